"""The evaluate command: the loss that training logged, on the same sets and on others; what is refused."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bad_inputs import prepared
from commands import Outcome, make_workspace, run_here, run_process, tree

from angpt_jax import cli, metrics
from angpt_jax.config import Config, MeshConfig
from angpt_jax.data.tokenizer import train_bpe
from angpt_jax.evaluate import EvaluateConfig, evaluate
from angpt_jax.prepare import PrepareConfig, prepare
from angpt_jax.scoring import Scorer
from angpt_jax.train import train
from angpt_jax.trained import load

MORE = "one line of it, and ünother\n" * 50
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with a run of four steps that was evaluated on two sets."""
    folder = make_workspace(tmp_path_factory.mktemp("trained") / "w")
    (folder / "more").mkdir()
    (folder / "more/a.txt").write_text(MORE)
    (folder / "more/b.txt").write_text(MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flags = ["--config", "tiny.yaml", "--run.dir", "runs/a", "--run.steps", "4"]
        config = cli.parse(Config, [*flags, "--data.validation_sets", "{more: more}"], command="train")
        assert train(config, "a") == 0
        yield folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(trained)
    (trained / "out.json").unlink(missing_ok=True)

    def call(*flags: str) -> Outcome:
        given = flags if "--run.dir" in flags else ("--run.dir", "runs/a", *flags)
        return run_here(evaluate, EvaluateConfig, "evaluate", *given, monkeypatch=monkeypatch, capsys=capsys)

    return call


def numbers(done: Outcome) -> dict:
    assert done.code == 0, done.err
    return json.loads(Path("out.json").read_text())


JSON = ("--json", "out.json")


@pytest.mark.parametrize("flags", [(), ("--batch_size", "24"), ("--fold", "true"), ("--mesh.tensor", "2")], ids=str)
def test_the_loss_is_the_one_that_training_logged(run: Run, flags: tuple[str, ...]) -> None:
    found = numbers(run(*JSON, *flags))["sets"]
    logged = metrics.read(Path("runs/a/metrics.jsonl"))[-1]
    assert list(found) == ["validation", "more"]
    for name, prefix in ("validation", ""), ("more", "more/"):
        assert found[name]["loss"] == pytest.approx(logged[f"{prefix}val_loss"], rel=1e-6)
        assert found[name]["bits_per_byte"] == pytest.approx(logged[f"{prefix}val_bits_per_byte"], rel=1e-6)
        assert found[name]["perplexity"] == pytest.approx(math.exp(found[name]["loss"]))
        assert found[name]["tokens"] == 500 and 490 < found[name]["bytes"] <= 500
        assert 0 < found[name]["standard_error"] < 0.1


def test_one_device_gives_it_too_as_a_table(trained: Path) -> None:
    done = run_process(trained, "evaluate", "--run.dir", "runs/a")
    logged = metrics.read(trained / "runs/a/metrics.jsonl")[-1]
    lines = [line.split() for line in done.out.splitlines()]
    assert ["set", "nats/token", "±", "error", "perplexity", "bits/byte", "tokens", "bytes"] in lines
    (row,) = [line for line in lines if line[:1] == ["validation"]]
    assert row[1] == f"{logged['val_loss']:.4f}" and row[4] == f"{logged['val_bits_per_byte']:.4f}"
    assert done.code == 0 and done.out.startswith(f"angpt of step 4, {trained}/runs/a\n")


def test_text_that_is_given_is_evaluated_whole_and_tokens_limit_it(run: Run) -> None:
    sets = ("--sets", "{more: more, file: more/a.txt}")
    found = numbers(run(*JSON, *sets))["sets"]
    size = len(MORE.encode())
    assert (found["more"]["bytes"], found["more"]["tokens"]) == (2 * size, 2 * size + 2)
    assert (found["file"]["bytes"], found["file"]["tokens"]) == (size, size + 1)
    Path("out.json").unlink()
    assert numbers(run(*JSON, *sets, "--tokens", "40"))["sets"]["file"]["tokens"] == 40


def test_a_set_is_tokenized_once(run: Run) -> None:
    run("--sets.again", "more")
    before = tree(Path("cache"))
    assert "tokenizing" not in run("--sets.again", "more").err
    assert tree(Path("cache")) == before


def test_of_a_prepared_folder_the_held_out_documents_are_read(run: Run) -> None:
    assert prepare(PrepareConfig("part", "text", validation_fraction=0.2, workers=1), "prepare") == 0
    facts = json.loads(Path("part/manifest.json").read_text())["splits"]["validation"]
    found = numbers(run(*JSON, "--sets.part", "part"))["sets"]["part"]
    assert (found["tokens"], found["bytes"]) == (facts["tokens"], facts["text_bytes"])


def test_a_single_window_has_no_standard_error(run: Run) -> None:
    done = run(*JSON, "--tokens", "9")
    assert numbers(done)["sets"]["validation"]["standard_error"] is None
    assert " – " in done.out


def emptied(folder: Path) -> None:
    """Prepared folders without text and of another tokenizer, an empty text, runs without a checkpoint."""
    (folder / "empty").mkdir()
    (folder / "empty/a.txt").touch()
    prepared(folder, ids=[])
    (folder / "other.json").write_text(train_bpe([MORE], 280).json)
    assert prepare(PrepareConfig("other", "text", tokenizer="other.json", workers=1), "prepare") == 0
    for name in ("bare", "plus"):
        shutil.copytree(folder / "runs/a", folder / "runs" / name, ignore=shutil.ignore_patterns("checkpoints"))
    config = folder / "runs/plus/config.yaml"
    config.write_text(
        config.read_text().replace("arch: angpt", "arch: gpt_plus").replace("scale_init: 5.6", "scale_init: null")
    )


BAD = [
    ("--run.dir runs/none", "run.dir: holds no run (no config.yaml), got '{w}/runs/none'; train one first"),
    ("--run.dir runs/bare", "run.dir: holds no checkpoint, got '{w}/runs/bare'; train it first"),
    ("--run.dir " + "x" * 300, "run.dir: must have no part longer than 255 bytes, got '" + "x" * 76 + "..."),
    ("--json tiny.yaml", "json: is there already, got 'tiny.yaml'; name a new file"),
    ("--json runs", "json: is a folder, got 'runs'; name a file"),
    ("--json none/x.json", "json: its folder is not there, got 'none/x.json'; make it first"),
    ("--sets.x none", "sets.x: does not exist, got none; stdlib, a text file or a folder of text files"),
    ("--sets.x empty", "sets.x: empty, got empty; a text file or a folder of text files with text in them"),
    ("--sets.x https://host/x", "sets.x: must be a path of a file system, got 'https://host/x'; mount the bucket, or"),
    ("--sets.x other", "sets.x: must be of the run's tokenizer (bytes), got other of "),
    ("--sets.x made", "sets.x: holds no text in its first 1 tokens, got made; text to evaluate on"),
    (
        "--run.dir runs/plus --fold true",
        "fold: gpt_plus can't be written as a plain decoder (input_norm: ",
    ),
    ("--sets x", "sets: expected a mapping, got 'x'"),
    ("--tokens 0", "tokens: must be at least 1, got 0"),
    ("--batch_size 0", "batch_size: must be at least 1, got 0"),
    ("--batch_size 9", "batch_size: must be a multiple of mesh.replica * mesh.fsdp, got 9 with 8; 8 or 16 would do"),
    ("--limit 0", "limit: must be at least 1, got 0"),
    ("--limit 5", "limit: needs tasks, got 5 without harness; name tasks, or leave it out"),
    ("--mesh.tensor 0", "mesh.tensor: must be >= 1, or -1 for all devices that are left, got 0"),
    ("--harness ./none.yaml", "harness: expected a list of str, got './none.yaml'"),
    ("--harness [none/x.yaml]", "harness: can't be read (No such file or directory), got 'none/x.yaml'"),
    ("--batchsize 8", "batchsize: unknown key; did you mean batch_size?"),
]


@pytest.fixture(scope="module")
def spoilt(trained: Path) -> Path:
    emptied(trained)
    return trained


@pytest.mark.parametrize("flags, start", BAD, ids=[flags[:40] for flags, _ in BAD])
def test_bad_input_gets_one_line_and_writes_nothing(run: Run, spoilt: Path, flags: str, start: str) -> None:
    before = tree(spoilt)
    done = run(*flags.split(" "))
    (line,) = done.err.splitlines()
    assert line.startswith("angpt_jax: error: " + start.format(w=spoilt))
    assert (done.code, done.out, tree(spoilt)) == (2, "", before)


def test_ids_of_the_set_are_those_of_the_run(run: Run) -> None:
    """A loss by hand: of the text itself, from the model that the run left."""
    Path("short.txt").write_text("a few words")
    found = numbers(run(*JSON, "--sets.short", "short.txt"))["sets"]["short"]
    model = load(Path("runs/a").absolute(), MeshConfig())
    ids, end = [*b"a few words"], model.tokenizer.end_of_document
    all_entries: Any = SimpleNamespace(size=300, end_of_document=end)  # training's loss counts them, scores do not
    scorer = Scorer(model.model, model.params, all_entries, model.context, 8)
    (score,) = scorer.scores([([end], [*ids, end])])
    np.testing.assert_allclose(found["loss"], -score.log_p / 12, rtol=1e-6)
    assert (found["tokens"], found["bytes"]) == (12, 11)
