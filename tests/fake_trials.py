"""Trials whose process is a few lines of Python: it does what the name of its row says."""

import sys
from pathlib import Path

import pytest
from commands import TINY

from angpt_jax import cli, trials
from angpt_jax.config import Config
from angpt_jax.rows import Row
from angpt_jax.trials import Trial

PROGRAM = """
import json, os, pathlib, signal, sys, time
folder, config = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.with_name(folder.name + ".cores").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
does = folder.name.partition("+")[0].partition("-")[0]
print("begins", folder.name, flush=True)
if does == "refuses":
    sys.exit("run.dir: is in use")
folder.mkdir(exist_ok=True)
(folder / "config.yaml").write_text(config)
if does in ("waits", "ignores"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if does == "ignores" else lambda *_: sys.exit(75))
if does in ("waits", "ignores", "sleeps"):
    (folder / "ready").write_text(str(os.getpid()))
    time.sleep(60)
step = {"step": 14, "tokens": 3584}
lines = [step | {"loss": 2.0, "step_seconds": 0.25}, step | {"val_loss": 1.5, "val_bits_per_byte": 1.25}]
if does != "mute":
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
if does == "diverges":
    print("loss is nan\\n", flush=True)
    sys.exit(3)
if does == "fails":
    sys.exit("out of luck")
if does != "mute":
    (folder / "summary.json").write_text(json.dumps({"steps": 14, "val_loss": 1.5, "val_bits_per_byte": 1.25}))
"""


def tiny(folder: Path) -> Config:
    (folder / "tiny.yaml").write_text(TINY)
    return cli.parse(Config, ["--config", str(folder / "tiny.yaml")], command="train")


def make(folder: Path, *names: str) -> list[Trial]:
    config = tiny(folder)
    return [Trial(Row(name, ("tiny.yaml",)), config, folder / "runs" / name) for name in names]


def replace_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(trial: Trial, python: str = "python") -> list[str]:
        return [sys.executable, "-I", "-S", "-c", PROGRAM, str(trial.directory), cli.to_yaml(trial.config)]

    monkeypatch.setattr(Trial, "command", command)
    monkeypatch.setattr(trials, "POLL_SECONDS", 0.01)


def begun(trial: Trial) -> int:
    """How often it was started."""
    return trial.log.read_text().count("begins") if trial.log.exists() else 0
