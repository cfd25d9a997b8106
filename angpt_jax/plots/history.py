"""What the folder of a run tells: its metrics, instruments and summary, as plots and tables want them. No JAX."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from angpt_jax.errors import UserError
from angpt_jax.metrics import Record, read
from angpt_jax.schema import show
from angpt_jax.yaml_files import read_mapping


@dataclass(frozen=True)
class History:
    """A run so far.

    Args:
        folder: its directory, as the user wrote it
        name: what tables and plots call it
        place: its number among the runs that are shown, which decides its colour
        config: what its config.yaml holds
        summary: what its summary.json holds; empty while the run has not ended
        metrics: records of training steps and of evaluations
        instruments: records of what was seen inside; empty where instruments were off
    """

    folder: str
    name: str
    place: int
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[Record]
    instruments: list[Record]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one metric, where it is known."""
        points = [(record["step"], number(record[name])) for record in self.metrics if name in record]
        steps, values = np.array(points, float).reshape(-1, 2).T
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens that were read until each of `steps`."""
        known = {0: 0} | {record["step"]: record["tokens"] for record in self.metrics}
        return np.interp(steps, list(known), list(known.values()))

    def seconds_at(self, steps: np.ndarray) -> np.ndarray:
        """Seconds that training took until each of `steps`: step_seconds × steps, so evaluations are left out."""
        known, seconds = self.curve("step_seconds")
        passed = np.cumsum(np.diff(known, prepend=0) * seconds)
        return np.interp(steps, [0, *known], [0, *passed])

    def setting(self, section: str, name: str) -> Any:
        """A value of its config; None if that lacks it."""
        found = self.config.get(section)
        return found.get(name) if isinstance(found, dict) else None

    def seen(self, kind: str) -> list[Record]:
        """The records of instruments that hold something of this kind."""
        return [record for record in self.instruments if _holds_number(record.get(kind))]

    def facts(self) -> Record:
        """What the metrics say at their end, and summary.json unless it is older than they are."""
        last = self.metrics[-1]
        facts: Record = {"arch": self.setting("model", "arch"), "parameters": self.summary.get("parameters")}
        facts |= {"steps": last["step"], "tokens": last["tokens"]}
        for name in ("val_loss", "val_bits_per_byte"):
            facts[name] = next(iter(self.curve(name)[1][::-1].tolist()), None)
        speeds = self.curve("step_seconds")[1]
        facts["median_step_seconds"] = float(np.median(speeds)) if len(speeds) else None
        if number(self.summary.get("steps")) >= last["step"]:
            facts |= {name: value for name, value in self.summary.items() if value is not None}
        return facts


def number(value: Any) -> float:
    """A value of a record; NaN where it is null, no number, or the name of one that is not finite."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan


def _holds_number(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return any(map(_holds_number, parts)) if parts is not None else bool(np.isfinite(number(value)))


def values(record: Record, *keys: str) -> np.ndarray:
    """The list at `record[key][key]…`, NaN for what is null in it; empty if it is not there."""
    found: Any = record
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return np.array([number(value) for value in found] if isinstance(found, list) else [], float)


def load(folder: str, place: int = 0) -> History:
    """The run in `folder`, named after it; a UserError says why it can't be shown."""
    path = Path(folder)
    try:
        if not path.is_dir():
            raise UserError(f"runs: {'is no folder' if path.exists() else 'no such folder'}, got {show(folder)}")
        if not (path / "config.yaml").exists():
            raise UserError(f"runs: holds no run (no config.yaml), got {show(folder)}; name run directories")
        config = config_of(path)
        metrics, instruments = (_records(path / f"{name}.jsonl") for name in ("metrics", "instruments"))
        run = History(folder, path.absolute().name or folder, place, config, summary_of(path), metrics, instruments)
    except OSError as error:
        raise UserError(f"runs: can't be read ({error.strerror}), got {show(error.filename or folder)}") from None
    if not len(run.curve("loss")[0]) and not len(run.curve("val_loss")[0]):
        raise UserError(f"runs: holds no metrics yet, got {show(folder)}; wait for the first line of metrics.jsonl")
    return run


def config_of(folder: Path) -> dict[str, Any]:
    """What config.yaml of the run holds."""
    try:
        return read_mapping(folder / "config.yaml")
    except UserError as error:
        raise UserError(*(f"runs: {problem.removeprefix('config: ')}" for problem in error.problems)) from None


def _records(path: Path) -> list[Record]:
    try:
        records = read(path)
    except ValueError as error:  # of JSON or UTF-8
        raise UserError(f"runs: is not a file of records ({error}), got {show(str(path))}") from None
    for line, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not all(number(record.get(name)) >= 0 for name in ("step", "tokens")):
            raise UserError(f"runs: record {line} has no step or no tokens, got {show(str(path))}")
    return records


def summary_of(folder: Path) -> dict[str, Any]:
    """What summary.json of the run holds; empty while there is none."""
    path = folder / "summary.json"
    try:
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"runs: is not JSON ({error}), got {show(str(path))}") from None
    return found if isinstance(found, dict) else {}


def name_apart(runs: list[History]) -> list[History]:
    """The same runs; those that share their name with another are called by their paths."""
    count = Counter(run.name for run in runs)
    return [replace(run, name=run.folder) if count[run.name] > 1 else run for run in runs]
