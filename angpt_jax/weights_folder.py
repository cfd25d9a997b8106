"""A folder of weights alone: laid out like a run directory, but nothing in it can be resumed.

`weights.json` there says so, and whether the weights are folded (`angpt_jax.fold`).
"""

import json
import os
from pathlib import Path
from typing import Any

from angpt_jax import json_text
from angpt_jax.errors import UserError
from angpt_jax.files import write_whole

NAME = "weights.json"
FOLDED = "folded"  # there, and in the data of the checkpoint, which has a digest


def is_one(directory: Path) -> bool:
    return os.path.exists(directory / NAME)


def mark(directory: Path, folded: bool) -> None:
    """Says that `directory` holds weights alone."""
    write_whole(directory / NAME, json.dumps({FOLDED: folded}) + "\n")


def is_folded(directory: Path, field: str = "run.dir") -> bool:
    """Whether the weights there are folded; those of a run are not. `field` is what an error blames."""
    if not is_one(directory):
        return False
    try:
        said = json_text.parsed((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict) or not isinstance(said.get(FOLDED), bool):
        raise UserError(
            f"{field}: has a {NAME} that does not say whether its weights are folded, got {str(directory)!r}; export "
            "them again"
        )
    return said[FOLDED]


def check(directory: Path, folded: bool, data: dict[str, Any], field: str = "run.dir") -> None:
    """Refuses a checkpoint whose `data` say otherwise than the folder that it lies in."""
    if data.get(FOLDED, False) is not folded:
        raise UserError(
            f"{field}: has a checkpoint that is {'not ' if folded else ''}folded, against its {NAME}, got "
            f"{str(directory)!r}; export it again"
        )
