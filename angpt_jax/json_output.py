"""The file that `--json` asks a command for."""

import json
from pathlib import Path
from typing import Any

from angpt_jax.errors import StorageError
from angpt_jax.files import write_whole
from angpt_jax.schema import show


def write(path: str | None, found: Any) -> None:
    """Writes all that was found, whole or not at all; nothing where the path is None."""
    if path is None:
        return
    try:
        write_whole(Path(path), json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"json: can't be written ({error.strerror}), got {show(path)}") from error
