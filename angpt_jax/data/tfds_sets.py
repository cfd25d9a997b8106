"""TFDS data sets that are on disk, opened without TensorFlow."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from angpt_jax import json_text
from angpt_jax.errors import UserError

TFDS = "tfds:"
_FEATURES = "features.json"
_OWN_FEATURES = "tensorflow_datasets.core.features."


def tfds_builder(wanted: str | Path, key: str, name: str) -> Any:
    """A TFDS data set that is on disk already (its folder, or a name); nothing is ever downloaded."""
    import tensorflow_datasets as tfds

    if isinstance(wanted, str) and not wanted.replace("/", "").replace(".", "").replace("-", "").isidentifier():
        raise UserError(f"{key}: is no name of a TFDS data set, got {name}; such as {TFDS}imdb_reviews, or its folder")
    for features in _features_files(wanted):
        _refuse_foreign_features(features, key)
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


def _features_files(wanted: str | Path) -> list[Path]:
    """Those that TFDS may read to open a data set."""
    if isinstance(wanted, Path):
        return [wanted / _FEATURES]
    root = Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    return sorted((root / wanted.partition("/")[0]).rglob(_FEATURES))


def _refuse_foreign_features(path: Path, key: str) -> None:
    """Raises a UserError for a features.json that names a class outside of TFDS: TFDS would import its module."""
    try:
        facts = json_text.parsed(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {_FEATURES} can't be read ({error}), got {path.parent}; build it again") from error
    for kind in _classes(facts):
        if not kind.startswith(_OWN_FEATURES):
            raise UserError(f"{key}: {_FEATURES} names a class that TFDS does not have, got {kind!r} in {path.parent}")


def _classes(facts: Any) -> Iterator[str]:
    """The names of classes that a features.json holds, under any key that TFDS takes."""
    if isinstance(facts, dict):
        given = (facts.get(name) for name in ("pythonClassName", "python_class_name", "type"))
        yield from (name for name in given if isinstance(name, str))
        facts = list(facts.values())
    if isinstance(facts, list):
        for part in facts:
            yield from _classes(part)
