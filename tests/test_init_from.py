"""A new run from the weights of another: the same bits, its own schedule; what does not fit is refused at the start."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from commands import Outcome, run_here, tree
from processes import errors, run_all
from states import state_of
from weight_runs import FLAGS, make_run

from angpt_jax import cli, init_from, metrics, pretrain, trained, weights
from angpt_jax.config import Config, MeshConfig
from angpt_jax.errors import UserError
from angpt_jax.exports import writing
from angpt_jax.exports.exported import of_run
from angpt_jax.job import Job, assemble
from angpt_jax.processes.group import ALONE
from angpt_jax.train import train

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("nothing_is_left_to_others"),
]
STILL = ("--optim.peak_lr", "1e-12")


@pytest.fixture(scope="module")
def source(source_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and beside it `weights` and `folded`, which hold its weights alone, and the same as exports."""
    copied = tmp_path_factory.mktemp("init_from") / "w"
    run = Path(shutil.copytree(source_run.parent.parent, copied)) / "runs/source"
    weights.save_weights(trained.load(run, MeshConfig()), run.parent / "weights")
    weights.save_weights(trained.load(run, MeshConfig(), folded=True), run.parent / "folded")
    for name, folded in (("exported", False), ("folded_export", True)):
        model = trained.load(run, MeshConfig(), folded)
        writing.write(of_run(model), model.tokenizer, run.parent / name, "float32", 20_000)
    return run


@pytest.fixture(scope="module")
def started(source: Path) -> Path:
    """A run from the weights alone, whose learning rate moves nothing; its source is gone by now."""
    lost = Path(shutil.copytree(source.parent / "weights", source.parent / "lost"))
    run = make_run(workspace(source), "started", "--run.init_from", "runs/lost", *STILL, "--run.stop_at_step", "3")
    shutil.rmtree(lost)
    return run


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """The run, to be broken."""
    return Path(shutil.copytree(source, tmp_path / "copy"))


def workspace(source: Path) -> Path:
    return source.parent.parent


def job_of(source: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Job:
    monkeypatch.chdir(workspace(source))
    return assemble(cli.parse(Config, [*FLAGS, "--run.dir", "runs/new", *flags], command="train"), "tiny", ALONE)


def read(job: Job) -> Any:
    return init_from.read(job.config, job.directory, job.built.abstract.params, ALONE)


def losses(run: Path, key: str) -> dict[int, float]:
    return {record["step"]: record[key] for record in metrics.read(run / "metrics.jsonl") if key in record}


def test_it_starts_at_the_loss_that_the_source_ended_with(source: Path, started: Path) -> None:
    ended = losses(source, "val_loss")[6]
    assert losses(started, "val_loss")[3] == pytest.approx(ended, abs=1e-5)
    assert losses(source, "loss")[1] > ended + 0.3
    assert all(abs(loss - ended) < 0.15 for loss in losses(started, "loss").values())


def test_it_starts_at_step_0_of_its_own_schedule(source: Path, started: Path) -> None:
    assert sorted(losses(started, "lr")) == [1, 2, 3]
    rates = [losses(run, "lr") for run in (started, source)]
    assert rates[0][3] / rates[0][1] == pytest.approx(rates[1][3] / rates[1][1])
    assert yaml.safe_load((started / "config.yaml").read_text())["run"]["init_from"] == str(source.parent / "lost")


@pytest.mark.parametrize("mesh", [("--mesh.tensor", "2"), ("--mesh.preset", "data_parallel")])
@pytest.mark.parametrize("kind", ["source", "weights"])
def test_the_weights_are_those_of_the_source_bit_for_bit_and_lie_as_the_mesh_says(
    source: Path, kind: str, mesh: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(source, monkeypatch, "--run.init_from", f"runs/{kind}", *mesh)
    saved = state_of(source)
    state, batches = pretrain.start(job, read(job))
    batches.close()
    for path, leaf in jax.tree_util.tree_leaves_with_path({"params": state.params}):
        np.testing.assert_array_equal(leaf, saved[jax.tree_util.keystr(path, simple=True, separator="/")])
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((state.opt_state, state.step, state.skipped)))
    assert jax.tree.map(lambda x: x.sharding, state) == job.built.shardings
    assert not job.directory.exists()


def test_an_export_gives_its_bits_and_padded_entries_stand_for_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(source, monkeypatch, "--run.init_from", "runs/exported", "--mesh.tensor", "2", "--model.vocab", "310")
    saved, params = state_of(source), read(job)
    for path, leaf in jax.tree_util.tree_leaves_with_path({"params": params}):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        known = tuple(slice(257 if size == 310 else None) for size in leaf.shape)
        cut = tuple(slice(257 if size == 300 else None) for size in saved[name].shape)
        np.testing.assert_array_equal(np.asarray(leaf)[known], saved[name][cut])
    assert not np.asarray(params["embedding"])[257:].any() and not np.asarray(params["head"])[:, 257:].any()
    assert jax.tree.map(lambda x: x.sharding, params) == job.built.shardings.params


def test_a_damaged_export_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path(shutil.copytree(source.parent / "exported", tmp_path / "there"))
    first = min(there.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-4])
    job = job_of(source, monkeypatch, "--run.init_from", str(there))
    with pytest.raises(UserError, match=rf"^run\.init_from: {first.name} is damaged or can't be read"):
        read(job)


def answer(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> Outcome:
    """What a start answers that writes nothing."""
    monkeypatch.chdir(workspace(source))
    before = tree(source.parent)
    done = run_here(
        train, Config, "train", *FLAGS, "--run.dir", "runs/new", *flags, monkeypatch=monkeypatch, capsys=capsys
    )
    assert tree(source.parent) == before
    assert not (source.parent / "new").exists()
    return done


OTHER = "run.init_from: its model is not that of this run, got '{runs}/source', which differs in "
NOTHING = (
    "run.init_from: holds no weights (no config.yaml or config.json), got '{there}'; a run directory, or a folder "
)

FOLDED = "run.init_from: holds folded weights, which are of another architecture, got '{there}'; weights that "


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--model.width 64",
            OTHER + "model.width (saved: 32, wanted: 64); model.feed_forward (saved: 128, wanted: 256); use its model, "
            "or no --run.init_from",
        ),
        ("--model.heads 4", OTHER + "model.heads (saved: 2, wanted: 4); model.kv_heads (saved: 2, wanted: 4); "),
        ("--model.vocab 304", OTHER + "model.vocab (saved: 300, wanted: 304); "),
        ("--model.tied_embeddings true", OTHER + "model.tied_embeddings (saved: False, wanted: True); "),
        ("--model.rope_theta 500", OTHER + "model.rope_theta (saved: 10000.0, wanted: 500.0); "),
        ("--model.arch ngpt", OTHER + "model.arch (saved: angpt, wanted: ngpt); "),
        ("--model.places.head.scale_init 3", OTHER + "model.places.head (saved: ScaledLogits(scale_init=5.6, "),
        (
            "--data.tokenizer bpe",
            "run.init_from: its tokenizer is not that of this run, got '{runs}/source'; give that as "
            "data.tokenizer (prepare takes it as --tokenizer), or no --run.init_from",
        ),
        ("--run.init_from runs/nothing", NOTHING.replace("{there}", "{runs}/nothing")),
        ("--run.init_from tiny.yaml", NOTHING.replace("{there}", "{w}/tiny.yaml")),
        ("--run.init_from runs/new", NOTHING.replace("{there}", "{runs}/new")),
        ("--run.init_from runs/folded", FOLDED.replace("{there}", "{runs}/folded")),
        ("--run.init_from runs/folded_export", FOLDED.replace("{there}", "{runs}/folded_export")),
        (
            "--run.init_from runs/exported --model.layers 3",
            OTHER.replace("source", "exported") + "model.layers (saved: 2, wanted: 3); ",
        ),
        (
            "--run.init_from runs/exported --data.tokenizer bpe",
            "run.init_from: its tokenizer is not that of this run, got '{runs}/exported'; ",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line_before_anything_is_written(
    source: Path, flags: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*flags.split(), *([] if "init_from" in flags else ["--run.init_from", "runs/source"])]
    done = answer(source, monkeypatch, capsys, *given)
    (said,) = [line for line in done.err.splitlines() if not line.startswith("tokenizing")]
    expected = line.replace("{runs}", str(source.parent)).replace("{w}", str(workspace(source)))
    assert (done.code, done.out) == (2, "") and said.startswith(f"angpt_jax: error: {expected}")
    dry = answer(source, monkeypatch, capsys, *given, "--dry_run", "true")
    assert (dry.code, dry.err.splitlines()[-1]) == (2, said)


def no_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def damaged(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/6")
    shutil.rmtree(run / "checkpoints/3/state/ocdbt.process_0")


def half_a_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").write_text("{")


def no_layers(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("layers: 2", "layers: 0"))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (no_checkpoint, "holds no checkpoint, got '{copy}'; a run that has saved one"),
        (damaged, "none of its checkpoints is whole, got '{copy}/checkpoints' (step 3: "),
        (half_a_tokenizer, "not JSON (Expecting property name"),
        (no_layers, "has a config.yaml that does not hold, got '{copy}' (model.layers: must be >= 1, got 0)"),
    ],
)
def test_a_source_that_is_broken_is_refused_before_anything_is_written(
    source: Path,
    copy: Path,
    break_it: Callable[[Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(copy)
    done = answer(source, monkeypatch, capsys, "--run.init_from", str(copy))
    line = f"angpt_jax: error: run.init_from: {said.replace('{copy}', str(copy))}"
    assert done.code == 2 and done.err.startswith(line) and done.err.count("\n") == 1


def test_of_damaged_weights_the_ones_before_are_taken(
    source: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a folder without a tokenizer may be anything's."""
    shutil.rmtree(copy / "checkpoints/6/state/ocdbt.process_0")
    (copy / "tokenizer.json").unlink()
    params = read(job_of(source, monkeypatch, "--run.init_from", str(copy)))
    np.testing.assert_array_equal(params["embedding"], state_of(source, 3)["params/embedding"])
    said = capsys.readouterr()
    assert "going on with step 3" in said.err and f"starts from the weights of step 3 in {copy}" in said.out
    assert (copy / "checkpoints/6").exists()


def test_numbers_that_are_not_finite_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(source, monkeypatch, "--run.init_from", "runs/source")
    params = init_from._of_checkpoint
    bad = lambda *given: {"w": params(*given)["embedding"].at[3, 4].set(np.nan)}  # noqa: E731
    monkeypatch.setattr(init_from, "_of_checkpoint", bad)
    with pytest.raises(UserError, match=r"^run\.init_from: holds numbers that are not finite, got '.*/source'"):
        read(job)


def test_a_resume_does_not_look_at_the_source(source: Path, started: Path) -> None:
    """It is gone; what the run started from is kept, whatever the resume is told."""
    lost = (started / "config.yaml").read_text()
    make_run(workspace(source), "started", *STILL, "--run.stop_at_step", "4")
    make_run(workspace(source), "started", "--run.init_from", "runs/nowhere", *STILL)
    assert sorted(losses(started, "loss")) == [1, 2, 3, 4, 5, 6]
    assert (started / "config.yaml").read_text() == lost.replace("stop_at_step: 3", "stop_at_step: null")


def test_a_window_may_be_longer_and_rows_held_to_another_set(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--model.context", "64", "--model.places.constraint.norm", "one", "--model.compute_dtype", "bfloat16")
    assert job_of(source, monkeypatch, "--run.init_from", "runs/source", *flags).config.model.context == 64


@pytest.mark.long
def test_several_processes_start_from_the_same_weights(source: Path, started: Path) -> None:
    flags = (*FLAGS[2:], "--run.dir", "runs/two", "--run.init_from", "runs/weights", *STILL, "--run.stop_at_step", "3")
    done = run_all(workspace(source), 2, 2, *flags)
    assert [outcome.code for outcome in done] == [0, 0], done
    assert losses(source.parent / "two", "loss") == pytest.approx(losses(started, "loss"), rel=1e-5)
    refused = run_all(workspace(source), 2, 2, *FLAGS[2:], "--run.dir", "runs/no", "--run.init_from", "runs/folded")
    assert [outcome.code for outcome in refused] == [2, 2]
    assert all(errors(outcome)[0].startswith("run.init_from: holds folded weights") for outcome in refused)
