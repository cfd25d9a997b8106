"""What the sample command prints: the first sample while it is made, whole characters, and the end of each."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Outcome, make_workspace, run_here, run_process

from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.sample import SampleConfig, Writer, check, sample

TOKENIZER = ByteTokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode([text])[0].tolist()


def test_the_first_sample_is_printed_as_it_comes_and_the_others_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(["a ", "b "], TOKENIZER, [], "of step 3")
    assert capsys.readouterr().out == "--- sample 1 of step 3 ---\na "
    writer.add([ids("one"), ids("other")])
    assert capsys.readouterr().out == "one"
    writer.add([ids(" two"), []])
    assert capsys.readouterr().out == " two"
    writer.close()
    assert capsys.readouterr().out == "\n--- sample 2 of step 3 ---\nb other\n"


def test_a_character_is_printed_once_all_of_its_bytes_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer([""], TOKENIZER, [], "")
    capsys.readouterr()
    printed = []
    for byte in [*ids("x漢"), 0xFF, *ids("y")]:
        writer.add([[byte]])
        printed.append(capsys.readouterr().out)
    assert printed == ["x", "", "", "漢", "", "\ufffdy"]
    writer.add([[0xE6]])
    writer.close()
    assert capsys.readouterr().out == "\ufffd\n"


def test_a_text_that_ends_a_sample_is_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(["", ""], TOKENIZER, ["END", "\n\n"], "")
    assert not writer.is_stopped(ids("12EN")) and writer.is_stopped(ids("12END")) and writer.is_stopped(ids("a\n\n"))
    capsys.readouterr()
    for letter in "12END":
        writer.add([ids(letter), ids(letter.lower())])
        assert "E" not in (out := capsys.readouterr().out), out
    writer.close()
    assert writer._printed == "12"
    assert capsys.readouterr().out.endswith("\n12end\n")


def test_bytes_that_are_no_text_are_refused() -> None:
    assert check(SampleConfig(prompt="a\udcff")) == ["prompt: must be UTF-8 text, got 'a\\udcff'"]
    assert check(SampleConfig(prompts=["a", "\ud800"])) == ["prompts: must be UTF-8 text, got '\\ud800'"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run of two steps."""
    folder = make_workspace(tmp_path_factory.mktemp("sample") / "w")
    flags = "--config tiny.yaml --run.dir runs/a --run.steps 2"
    done = run_process(folder, "train", *flags.split())
    assert done.code == 0, done.err
    return folder


Sampled = Callable[..., Outcome]


@pytest.fixture
def sampled(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sampled:
    """Runs the command in that workspace, on eight devices."""
    monkeypatch.chdir(trained)
    return lambda *flags: run_here(sample, SampleConfig, "sample", *flags, monkeypatch=monkeypatch, capsys=capsys)


def test_a_batch_of_prompts_is_continued_folded_or_not(sampled: Sampled) -> None:
    flags = ["--run.dir", "runs/a", "--prompts", "['def ', 'return x +', '']", "--samples", "2", "--temperature", "0"]
    folded, unfolded = (sampled(*flags, "--tokens", "9", "--fold", fold) for fold in ("true", "false"))
    assert folded.code == 0 and folded.out == unfolded.out
    assert [folded.out.count(f"--- sample {number} of step 2 ---\n") for number in (1, 6, 7)] == [1, 1, 0]
    rows = folded.out.split("---\n")[1:]
    for row, prompt in zip(rows[::2], ("def ", "return x +", ""), strict=True):
        assert row.startswith(prompt)
    assert rows[0].split("\n---")[0] == rows[1].split("\n---")[0]  # greedy


def test_it_needs_nothing_but_the_run_directory(sampled: Sampled, trained: Path) -> None:
    (trained / "text").rename(trained / "gone")
    shutil.rmtree(trained / "cache" / "tokens")
    assert sampled("--run.dir", "runs/a", "--tokens", "3").code == 0


def test_what_can_not_be_folded_is_refused_with_the_reason(sampled: Sampled, trained: Path) -> None:
    shutil.copytree(trained / "runs/a", trained / "runs/b")
    config = trained / "runs/b/config.yaml"
    config.write_text(config.read_text().replace("arch: angpt", "arch: dyt").replace("scale_init: 5.6", ""))
    done = sampled("--run.dir", "runs/b", "--fold", "true")
    assert (done.code, done.out) == (2, "")
    start = "angpt_jax: error: fold: dyt can't be written as a plain decoder (input_norm: DyT depends on the vector"
    assert done.err.startswith(start)
    assert done.err.endswith(", got true; false\n") and len(done.err.splitlines()) == 1
