"""TFDS data sets that are on disk, opened without TensorFlow."""

from pathlib import Path
from typing import Any

from angpt_jax.errors import UserError

TFDS = "tfds:"


def tfds_builder(wanted: str | Path, key: str, name: str) -> Any:
    """A TFDS data set that is on disk already (its folder, or a name); nothing is ever downloaded."""
    import tensorflow_datasets as tfds

    try:
        if isinstance(wanted, Path):
            return tfds.builder_from_directory(str(wanted))
        builder = tfds.builder(wanted, file_format="array_record")
    except (ValueError, OSError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0]
        raise UserError(f"{key}: is no TFDS data set ({first}), got {name}; one that is prepared on disk") from error
    if not builder.is_prepared():
        raise UserError(
            f"{key}: not on disk ({builder.data_path}), got {name}; "
            f"build it first: tfds.builder({wanted!r}, file_format='array_record').download_and_prepare()"
        )
    return builder
