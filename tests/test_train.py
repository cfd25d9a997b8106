"""The main job as a user runs it: train, resume bit for bit, stop on a signal, sample."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import TINY, make_workspace, one_device, run_process, tree

from angpt_jax import metrics

FILES = {
    "config.yaml",
    "tokenizer.json",
    "environment.json",
    "metrics.jsonl",
    "tensorboard",
    "checkpoints",
    "summary.json",
}


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="session")
def whole_run(workspace: Path) -> Path:
    """14 steps in one go."""
    done = run_process(workspace, "train", "--config", "tiny.yaml", "--run.dir", "runs/whole")
    assert done.code == 0, done.err
    return workspace / "runs/whole"


@pytest.fixture(scope="session")
def resumed_run(workspace: Path) -> Path:
    """The same 14 steps, stopped after 7 and continued."""
    flags = ("--config", "tiny.yaml", "--run.dir", "runs/resumed")
    first = run_process(workspace, "train", *flags, "--run.stop_at_step", "7")
    assert first.code == 0, first.err
    assert json.loads((workspace / "runs/resumed/summary.json").read_text())["stopped_by"] == "stop_at_step"
    second = run_process(workspace, "train", *flags)
    assert second.code == 0, second.err
    assert "resumed at step 7" in second.out
    return workspace / "runs/resumed"


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in metrics.read(run / "metrics.jsonl") if "loss" in record}


def test_a_run_directory_holds_what_the_contract_promises(whole_run: Path) -> None:
    assert {path.name for path in whole_run.iterdir()} == FILES
    summary = json.loads((whole_run / "summary.json").read_text())
    assert list(summary) == [
        "arch", "parameters", "steps", "tokens", "val_loss", "val_bits_per_byte", "median_step_seconds",
        "tokens_per_second", "compile_seconds", "stopped_by",
    ]  # fmt: skip
    assert (summary["arch"], summary["steps"], summary["tokens"], summary["stopped_by"]) == (
        "angpt",
        14,
        14 * 8 * 32,
        "steps",
    )
    record = metrics.read(whole_run / "metrics.jsonl")[0]
    assert list(record) == [
        "step", "tokens", "loss", "lr", "grad_norm", "step_seconds", "data_wait_seconds", "tokens_per_second",
        "tflops_per_device", "mfu", "skipped_steps",
    ]  # fmt: skip
    evaluations = [r for r in metrics.read(whole_run / "metrics.jsonl") if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [5, 10, 14]
    assert list(evaluations[0]) == ["step", "tokens", "val_loss", "val_bits_per_byte"]


def test_the_loss_falls(whole_run: Path) -> None:
    by_step = losses(whole_run)
    assert by_step[14] < by_step[1] - 0.3


def test_seven_steps_and_seven_more_give_the_losses_of_fourteen_bit_for_bit(whole_run: Path, resumed_run: Path) -> None:
    assert sorted(losses(resumed_run)) == list(range(1, 15))
    assert losses(resumed_run) == losses(whole_run)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole_run, resumed_run)]
    assert summaries[0]["val_loss"] == summaries[1]["val_loss"]


def test_a_finished_run_is_not_trained_again(workspace: Path, whole_run: Path) -> None:
    before = (whole_run / "metrics.jsonl").read_bytes()
    done = run_process(workspace, "train", "--config", "tiny.yaml", "--run.dir", "runs/whole")
    assert done.code == 0
    assert "nothing to train" in done.out
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_was_killed_before_its_summary_gets_one(workspace: Path, whole_run: Path) -> None:
    path, steps = whole_run / "summary.json", losses(whole_run)
    before = json.loads(path.read_text())
    path.unlink()
    done = run_process(workspace, "train", "--config", "tiny.yaml", "--run.dir", "runs/whole")
    after = json.loads(path.read_text())
    assert (done.code, after["stopped_by"], losses(whole_run)) == (0, "steps", steps)
    for timed in ("compile_seconds", "median_step_seconds", "tokens_per_second"):
        del before[timed], after[timed]
    assert after == before


def test_changed_data_is_refused_and_nothing_is_overwritten(workspace: Path, resumed_run: Path) -> None:
    text = workspace / "text" / "00.py"
    before, original = tree(resumed_run), text.read_text()
    text.write_text(original.replace("return x", "return y"))
    flags = ("--config", "tiny.yaml", "--run.dir", "runs/resumed", "--run.log_every_steps", "2")
    done = run_process(workspace, "train", *flags)
    willing = run_process(workspace, "train", *flags, "--data.on_change", "continue")
    text.write_text(original)
    assert willing.code == 0 and "the data changed (tokens): going on with the new ones" in willing.err
    assert done.code == 2
    assert [line for line in done.err.splitlines() if "error" in line] == [
        f"angpt_jax: error: data.source: the data of {resumed_run} changed (tokens), got 'text'; "
        "bring the old data back, use another --run.dir, or go on with other data by --data.on_change continue"
    ]
    assert tree(resumed_run) == before


def test_a_run_directory_that_cannot_be_written_is_refused_at_the_start(workspace: Path) -> None:
    (workspace / "a_file").touch()
    done = run_process(workspace, "train", "--config", "tiny.yaml", "--run.dir", "a_file/run")
    assert (done.code, done.err.splitlines()[-1]) == (
        2,
        f"angpt_jax: error: run.dir: can't be written, got '{workspace}/a_file/run' (Not a directory); "
        "a folder of yours on a disk with room",
    )


def test_config_yaml_makes_the_same_run(workspace: Path, whole_run: Path) -> None:
    config = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert config["model"]["feed_forward"] == 128
    assert config["optim"]["clip_norm"] == "none"
    again = run_process(
        workspace,
        "train",
        "--config",
        str(whole_run / "config.yaml"),
        "--run.dir",
        "runs/again",
        "--run.stop_at_step",
        "3",
    )
    assert again.code == 0, again.err
    assert losses(workspace / "runs/again") == {step: losses(whole_run)[step] for step in (1, 2, 3)}


def test_sigterm_saves_and_exits_with_75(workspace: Path) -> None:
    flags = ["--config", "tiny.yaml", "--run.dir", "runs/stopped", "--run.steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "angpt_jax.train", *flags],
        cwd=workspace,
        env=one_device(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not losses(workspace / "runs/stopped") and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
        process.communicate()
    logged = max(losses(workspace / "runs/stopped"))
    saved = [int(path.name) for path in (workspace / "runs/stopped/checkpoints").iterdir()]
    assert saved == [json.loads((workspace / "runs/stopped/summary.json").read_text())["steps"]]
    assert logged in (saved[0], saved[0] - 1)


def test_sample_prints_text_and_is_a_function_of_its_seed(workspace: Path, whole_run: Path) -> None:
    flags = ("--run.dir", "runs/whole", "--samples", "2", "--tokens", "8", "--prompt", "def ", "--seed", "1")
    first, second = (run_process(workspace, "sample", *flags) for _ in range(2))
    assert first.code == 0, first.err
    assert first.out.count("--- sample") == 2
    assert "def " in first.out
    assert first.out == second.out


def test_dry_run_describes_and_writes_nothing(workspace: Path) -> None:
    done = run_process(workspace, "train", "--config", "tiny.yaml", "--run.dir", "runs/dry", "--dry_run", "true")
    assert done.code == 0, done.err
    assert not (workspace / "runs/dry").exists()
    for word in (
        "parameters",
        "tokens a step",
        "FLOPs per token",
        "learning rate",
        "query          1.4142",
        "mesh",
        "memory",
    ):
        assert word in done.out, word


def test_a_diverged_run_ends_with_3_and_keeps_no_bad_checkpoint(workspace: Path) -> None:
    (workspace / "gpt_plus.yaml").write_text(  # anGPT, whose rows stay in the ball, survives any learning rate
        TINY.replace("arch: angpt", "arch: gpt_plus").replace(", places: {head: {scale_init: 5.6}}", "")
    )
    flags = ("--config", "gpt_plus.yaml", "--run.dir", "runs/diverged", "--optim.peak_lr", "1e30")
    done = run_process(workspace, "train", *flags, "--run.checkpoint_every_steps", "1")
    assert done.code == 3
    line = "angpt_jax: error: optim.max_bad_steps: training diverged, "
    assert re.fullmatch(f"(tokenizing .*\\n)?{line}.*\\n", done.err), done.err  # the first test to run tokenizes
    finite = [step for step, loss in losses(workspace / "runs/diverged").items() if np.isfinite(loss)]
    saved = [int(path.name) for path in (workspace / "runs/diverged/checkpoints").iterdir()]
    assert max(saved, default=0) <= max(finite, default=0)
