"""Where the numbers of a run go: `metrics.jsonl` (one object a line) and TensorBoard."""

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from angpt_jax.files import write_whole

Record = dict[str, Any]  # `step`, `tokens` and numbers; None where unknown


class MetricsWriter:
    """Writes to a run directory. `resumed_step`: records of later steps, which will be made again, are dropped."""

    def __init__(self, directory: Path, resumed_step: int):
        self._path = directory / "metrics.jsonl"
        _keep_until(self._path, resumed_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
        self._board.close()

    def write(self, record: Record) -> None:
        self._file.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._board.add_scalar(name, value, record["step"])


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that a kill cut in half is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _keep_until(path: Path, step: int) -> None:
    """Rewrites the file without the records after `step`."""
    kept = [record for record in read(path) if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def _plain(value: Any) -> Any:
    """JSON has no NaN: a non-finite number becomes its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
