"""What text can be prepared from: which kind of data a path holds, told by its name, and the files that make it up.

Nothing of the text is read here. How a source is cut into units is in `angpt_jax.data.units`, how the documents of a
unit are read in `angpt_jax.data.readers`.
"""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Literal

from angpt_jax import json_text
from angpt_jax.data.corpus import STDLIB, STDLIB_LEFT_OUT, unreadable, walk
from angpt_jax.data.tfds_sets import TFDS, tfds_builder
from angpt_jax.errors import UserError

Kind = Literal["text", "jsonl", "parquet", "arrow", "tfds"]
ALLOWED = (
    "a text file, .jsonl, .ndjson or .json lines (also .gz, .zst), .parquet, a folder of such files of one kind, "
    f"a data set saved with save_to_disk, a TFDS data set ({TFDS}NAME or its folder), or {STDLIB}"
)
COMPRESSED = (".gz", ".zst")
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_OTHERS = (".bz2", ".xz", ".zip", ".tar", ".array_record", ".tfrecord", ".bin", ".npy", ".safetensors", *COMPRESSED)


@dataclass(frozen=True)
class File:
    """One file of a source; `name` is its POSIX path relative to the root."""

    name: str
    size: int
    modified: int


@dataclass(frozen=True)
class Source:
    """Found data.

    Args:
        key: of the config, what errors blame
        name: what it was found by
        kind: how it is read
        root: folder of its files
        field: that holds the text, where documents have fields
        split: of a TFDS data set
        files: in their order
    """

    key: str
    name: str
    kind: Kind
    root: str
    field: str
    files: tuple[File, ...] = dataclass_field(repr=False)
    split: str = ""

    def path(self, file: str) -> Path:
        return Path(self.root) / file

    def wrong(self, problem: str, got: str, allowed: str) -> UserError:
        return UserError(f"{self.key}: {problem}, got {got}; {allowed}")


def find_source(name: str, key: str, text_field: str, split: str) -> Source:
    """The source that a name or path stands for; of a data set with several splits, its `split`."""
    if name == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = [file for file in walk(root, STDLIB_LEFT_OUT, key) if file.endswith(".py") and _is_utf8(root / file)]
        return Source(key, name, "text", str(root), text_field, _files(root, names, key))
    if name.startswith(TFDS):
        wanted, _, chosen = name.removeprefix(TFDS).partition("@")
        return _tfds(name, wanted, key, text_field, chosen or split)
    path = Path(name).expanduser().absolute()
    try:
        path.stat()
        if path.is_dir():
            return _folder(path, name, key, text_field, split)
    except FileNotFoundError as error:
        raise UserError(f"{key}: does not exist, got {name}; {ALLOWED}") from error
    except OSError as error:
        unreadable(error, key)
    if not path.is_file():
        raise UserError(f"{key}: neither a file nor a folder, got {name}; {ALLOWED}")
    return Source(
        key, name, _kind(path.name, name, key), str(path.parent), text_field, _files(path.parent, [path.name], key)
    )


def _folder(path: Path, name: str, key: str, text_field: str, split: str) -> Source:
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json", key).get("splits", [])
        if split not in splits:
            raise UserError(f"{key}: has no split {split}, got {name}; one of {_listed(path / s for s in splits)}")
        path = path / split
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        state = _json(path / "state.json", key)
        if state.get("_indices_files"):
            raise UserError(f"{key}: has an indices mapping, got {name}; flatten_indices() before save_to_disk")
        names = [file["filename"] for file in state.get("_data_files", [])]
        return Source(key, name, "arrow", str(path), text_field, _files(path, names, key))
    if (path / "dataset_info.json").is_file() and (path / "features.json").is_file():
        return _tfds(name, path, key, text_field, split)
    names = walk(path, key=key)
    if not names:
        raise UserError(f"{key}: no files in the folder, got {name}; {ALLOWED}")
    kinds: Counter[Kind] = Counter(_kind(file, f"{name} with {file}", key) for file in names)
    if len(kinds) > 1:
        examples = {_kind(file, file, key): file for file in reversed(names)}
        found = ", ".join(f"{count} {kind} ({examples[kind]})" for kind, count in kinds.items())
        raise UserError(f"{key}: holds files of several kinds ({found}), got {name}; the sub-folder with one kind")
    return Source(key, name, next(iter(kinds)), str(path), text_field, _files(path, names, key))


def _tfds(name: str, wanted: str | Path, key: str, text_field: str, split: str) -> Source:
    builder = tfds_builder(wanted, key, name)
    if split not in builder.info.splits:
        raise UserError(
            f"{key}: has no split {split}, got {name}; {_listed(builder.info.splits)} ({TFDS}NAME@SPLIT names one)"
        )
    info = builder.info.splits[split]
    if builder.info.file_format.value != "array_record":
        raise UserError(
            f"{key}: is stored as {builder.info.file_format.value}, got {name}; one that was built with "
            "file_format array_record"
        )
    if text_field not in builder.info.features:
        raise UserError(f"field: no such feature in {name}, got {text_field}; {_listed(builder.info.features)}")
    root = Path(builder.data_path)
    files = _files(root, [Path(path).name for path in info.filepaths], key)
    return Source(key, name, "tfds", str(root), text_field, files, split)


def _kind(file: str, got: str, key: str) -> Kind:
    stem = file
    for suffix in COMPRESSED:
        stem = stem.removesuffix(suffix)
    kind = _SUFFIXES.get(os.path.splitext(stem)[1].lower(), "text")
    if (stem != file and kind != "jsonl") or (kind == "text" and file.lower().endswith(_OTHERS)):
        raise UserError(f"{key}: of no kind that is read ({os.path.splitext(file)[1]}), got {got}; {ALLOWED}")
    return kind


def _files(root: Path, names: Iterable[str], key: str) -> tuple[File, ...]:
    try:
        stats = [(name, (root / name).stat()) for name in names]
    except OSError as error:
        unreadable(error, key)
    return tuple(File(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def changed(sources: Iterable[Source]) -> list[str]:
    """Paths of the files that are not what they were when they were found."""
    return [
        str(source.path(now.name))
        for source in sources
        for now, before in zip(
            _files(Path(source.root), [f.name for f in source.files], source.key), source.files, strict=True
        )
        if now != before
    ]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except ValueError:
        return False
    return True


def _json(path: Path, key: str) -> dict[str, Any]:
    try:
        return json_text.parsed(path.read_text("utf-8"))
    except OSError as error:
        unreadable(error, key)
    except ValueError as error:
        raise UserError(f"{key}: is not what save_to_disk writes ({error}), got {path}; save it again") from error


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "there are none"
