"""Where the numbers of a run go: `metrics.jsonl`, `instruments.jsonl` (one object a line) and TensorBoard."""

import json
import math
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from angpt_jax.files import write_whole
from angpt_jax.hidden import hidden

with hidden("torch"):  # of which TensorBoardX knows the tensors where it is installed: seconds, at every start
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.summary import scalar

FLUSH_SECONDS = 120.0  # what TensorBoard sees is no older

Record = dict[str, Any]  # `step`, `tokens` and numbers; None where unknown


class JsonLines:
    """A file that grows by an object a line. Records of steps after `resumed_step`, which will be made again, go.

    It is made with its first record.
    """

    def __init__(self, path: Path, resumed_step: int):
        self._path, self._file = path, None
        if path.exists():
            kept = [record for record in read(path) if record["step"] <= resumed_step]
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, record: Record) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(_plain(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Board:
    """A file of TensorBoard's, which forgets what earlier files of its folder say of steps after `resumed_step`.

    In this thread: TensorBoardX's SummaryWriter writes in one of its own, and waits for ever once that died of a full
    disk.
    """

    def __init__(self, folder: Path, resumed_step: int):
        folder.mkdir(exist_ok=True)
        self._events, self._flushed = EventsWriter(str(folder / "events")), time.monotonic()
        self._write(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._write(step, summary=scalar(name, value))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._events.flush()
            self._flushed = time.monotonic()

    def _write(self, step: int, **what: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **what))

    def close(self) -> None:
        self._events.close()


class MetricsWriter:
    """Writes to a run directory that goes on after `resumed_step`."""

    def __init__(self, directory: Path, resumed_step: int):
        self._metrics = JsonLines(directory / "metrics.jsonl", resumed_step)
        self._instruments = JsonLines(directory / "instruments.jsonl", resumed_step)
        self._board = Board(directory / "tensorboard", resumed_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self._metrics.close()
        self._instruments.close()
        with suppress(OSError) if kind else nullcontext():  # what ended the run is worth more
            self._board.close()

    def write_instruments(self, record: Record) -> None:
        self._instruments.write(record)

    def write(self, record: Record) -> None:
        self._metrics.write(record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        self._board.write(record["step"], {name: value for name, value in numbers.items() if math.isfinite(value)})


class NoMetrics:
    """What the other processes of a run have in place of a MetricsWriter."""

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def write_instruments(self, record: Record) -> None:
        pass

    def write(self, record: Record) -> None:
        pass


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that a kill cut in half is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _plain(value: Any) -> Any:
    """JSON has no NaN: a non-finite number becomes its name, wherever it stands."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
