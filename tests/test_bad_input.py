"""Bad input: the exact line on stderr, exit code 2, and nothing written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import make_workspace, run_here, tree

from angpt_jax import cli, experiment, run_dir
from angpt_jax.config import Config
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.sample import SampleConfig, sample
from angpt_jax.train import train

ONE_LINE: list[tuple[str, str]] = [
    (
        "--model.d_modle 64",
        "model.d_modle: unknown key; the keys of model are arch, width, layers, heads, vocab, context, feed_forward, "
        "kv_heads, tied_embeddings, rope_theta, compute_dtype, scan_layers, remat, "
        "attention, loss_vocab_chunk, places",
    ),
    ("--run.steps abc", "run.steps: expected int, got 'abc'"),
    (
        "--model.arch angtp",
        "model.arch: unknown architecture, got 'angtp'; did you mean angpt?",
    ),
    (
        "--model.places.gate.part swiglu",
        "model.places.gate.part: unknown part, got 'swiglu'; one of gated, unit_gated, scaled_gated, plain",
    ),
    (
        "--model.places.nu.down 1.02 --model.places.residual.part exact_lerp --model.places.branch_norm.part unit_norm",
        "model.places.nu.down: has no effect in angpt, got 1.02; UnitNorm of branch_norm takes every factor out again",
    ),
    ("--model.kv_heads 3", "model.kv_heads: must divide model.heads, got 3 with 2 heads; one of 1, 2"),
    ("--run.instrument_every_steps 0", "run.instrument_every_steps: must be >= 1, got 0"),
    ("--data.workers -1", "data.workers: must be >= 0, got -1"),
    ("--data.mixture.text 0", "data.mixture.text: must be a finite number > 0, got 0.0"),
    ("--data.packing tight", "data.packing: expected concatenate or best_fit, got 'tight'"),
    ("--model.places.gates.part gated", "model.places.gates: unknown place, got 'gates'; did you mean gate?"),
    (
        "--model.width 33",
        "model.width: must be an even multiple of model.heads, got 33 with 2 heads; 32 or 36 would do",
    ),
    (
        "--data.batch_size 9",
        "data.batch_size: must be a multiple of mesh.replica * mesh.fsdp, got 9 with 8; 8 or 16 would do",
    ),
    (
        "--distributed.coordinator localhost:1 --distributed.processes 2 --distributed.process 2",
        "distributed.process: must be >= 0 and < distributed.processes, got 2 with 2 processes; 0 … 1",
    ),
    ("--optim.peak_lr -1", "optim.peak_lr: must be a finite number > 0, got -1.0"),
    ("--optim.peak_lr nan", "optim.peak_lr: must be a finite number > 0, got nan"),
    ("--run.steps 0", "run.steps: must be >= 1, got 0"),
    (
        "--config broken.yaml",
        "config: is not YAML (expected the node content, but found '<stream end>', line 2, column 1), "
        "got 'broken.yaml'",
    ),
    (
        "--config nowhere.yaml",
        "config: can't be read (No such file or directory), got 'nowhere.yaml'",
    ),
    (
        "--model.vocab 200",
        "model.vocab: smaller than the tokenizer (data.tokenizer: bytes) of 257 ids, got 200; "
        "257 or more, or another data.tokenizer",
    ),
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, `tiny.yaml`, a broken file, and the directory of a run of another width."""
    folder = make_workspace(tmp_path / "w")
    monkeypatch.chdir(folder)
    (folder / "broken.yaml").write_text("{a: [\n")
    return folder


BadTrain = Callable[..., list[str]]


@pytest.fixture
def bad_train(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> BadTrain:
    """Runs train with flags and checks what holds for all bad input; returns the lines."""

    def run(*flags: str) -> list[str]:
        before = tree(workspace)
        done = run_here(train, Config, "train", "--config", "tiny.yaml", *flags, monkeypatch=monkeypatch, capsys=capsys)
        after = {name: content for name, content in tree(workspace).items() if not name.startswith("cache/")}
        assert done.code == 2
        assert after == before
        lines = [line for line in done.err.splitlines() if not line.startswith("tokenizing ")]
        assert all(line.startswith("angpt_jax: error: ") for line in lines), done.err
        return [line.removeprefix("angpt_jax: error: ") for line in lines]

    return run


@pytest.mark.parametrize(("flags", "line"), ONE_LINE, ids=[flags for flags, _ in ONE_LINE])
def test_one_line_names_field_value_and_what_is_allowed(bad_train: BadTrain, flags: str, line: str) -> None:
    assert bad_train(*flags.split()) == [line]


def test_a_sequence_longer_than_the_data_is_refused(bad_train: BadTrain) -> None:
    lines = bad_train("--model.context", "9000")
    assert lines == [
        "model.context: sequence longer than the data, 9001 tokens needed and 8028 found in the training data of "
        "text, got 9000; at most 8027, or more text",
        "model.context: sequence longer than the data, 9001 tokens needed and 875 found in the validation set "
        "validation, got 9000; at most 874, or more text",
    ]


def test_all_errors_are_listed_at_once(bad_train: BadTrain) -> None:
    lines = bad_train("--run.steps", "0", "--model.width", "33", "--optim.beta1", "2")
    assert [line.partition(":")[0] for line in lines] == ["run.steps", "optim.beta1", "model.width"]


def other_run(workspace: Path) -> Path:
    """The directory of a run of width 64, as far as its config."""
    directory = workspace / "runs" / "other"
    tiny = cli.parse(Config, ["--config", "tiny.yaml", "--model.width", "64"], command="train")
    run_dir.make(directory)
    run_dir.record(directory, experiment.resolved(tiny)[0], ByteTokenizer.json)
    return directory


def test_a_run_directory_with_another_model_is_refused(bad_train: BadTrain, workspace: Path) -> None:
    directory = other_run(workspace)
    assert bad_train("--run.dir", "runs/other") == [
        f"model.width: differs from the run in {directory}, got 32; it was 64: use that, or another --run.dir",
        f"model.feed_forward: differs from the run in {directory}, got 128; it was 256: use that, or another --run.dir",
    ]


def test_resume_never_and_must_are_kept(bad_train: BadTrain, workspace: Path) -> None:
    assert bad_train("--run.resume", "must", "--run.dir", "runs/none") == [
        f"run.resume: must, but there is no run in {workspace}/runs/none; use auto to start one"
    ]
    directory = other_run(workspace)
    assert bad_train("--model.width", "64", "--run.dir", "runs/other", "--run.resume", "never") == [
        f"run.dir: holds a run already, got '{directory}'; use another one, or --run.resume auto"
    ]


SAMPLE_LINES = [
    ("--run.dir runs/none", "run.dir: holds no run (no config.yaml), got '{workspace}/runs/none'; train one first"),
    ("--temperature nan", "temperature: must be a finite number >= 0, got nan; 0 is greedy"),
    ("--tokens 0", "tokens: must be at least 1, got 0; 1 or more"),
    (
        "--run.dir runs/other --prompt " + "x" * 40,
        "prompt: leaves no room in the context of 32 tokens, got 40 tokens; at most 30",
    ),
    ("--top_p 0", "top_p: must be in (0, 1], got 0.0; 1 or null draws among all tokens"),
    ("--top_p 1.01", "top_p: must be in (0, 1], got 1.01; 1 or null draws among all tokens"),
    ("--top_k 0", "top_k: must be at least 1, got 0; 1 or more"),
    ("--prompt a --prompts [b]", "prompts: stand in place of prompt, got both (prompt 'a'); one of them"),
    ("--stop ['']", "stop: must not hold an empty text, got ''; texts of one character or more"),
    ("--mesh.context 2", "mesh.context: a token at a time can't be split, got 2; 1"),
    ("--run.dir " + "x" * 300, "run.dir: must have no part longer than 255 bytes, got '" + "x" * 76 + "..."),
    (
        "--run.dir runs/other --fold true --prompts ['" + "y" * 31 + "',z]",
        "prompt: leaves no room in the context of 32 tokens, got 31 tokens; at most 30",
    ),
    ("--run.dir runs/other --tokens 5", "run.dir: holds no checkpoint, got '{workspace}/runs/other'; train it first"),
]


@pytest.mark.parametrize(("flags", "line"), SAMPLE_LINES, ids=[flags for flags, _ in SAMPLE_LINES])
def test_sample_refuses_with_one_line(
    flags: str, line: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other_run(workspace)
    done = run_here(sample, SampleConfig, "sample", *flags.split(), monkeypatch=monkeypatch, capsys=capsys)
    assert done.code == 2
    lines = [line for line in done.err.splitlines() if not line.startswith("tokenizing ")]
    assert lines == ["angpt_jax: error: " + line.format(workspace=workspace)]
