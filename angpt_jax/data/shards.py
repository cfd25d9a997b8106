"""Prepared tokens on disk: shards of ids in a folder, and the manifest that says what they are.

A shard holds whole documents, each behind an end-of-document id. The shards of a split, one behind the other, and an
end-of-document id are its stream. Two formats: `memmap` (the ids, nothing else) and `array_record` (blocks of ids).
"""

import bisect
import errno
import hashlib
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  compiled

from angpt_jax.errors import StorageError

Format = Literal["memmap", "array_record"]
SUFFIX: dict[Format, str] = {"memmap": "bin", "array_record": "array_record"}
BLOCK = 4096  # ids in one record of an ArrayRecord shard
_AGAIN = "bring the file back, or run prepare again, then continue the run"


@dataclass(frozen=True)
class Shard:
    """One file.

    Args:
        file: its name in the folder
        documents: documents that begin in it
        tokens: ids, with those in front of documents
        text_bytes: bytes of UTF-8 text that they stand for
        largest_id: of its ids
        bytes: size of the file
        sha256: of the file
    """

    file: str
    documents: int
    tokens: int
    text_bytes: int
    largest_id: int
    bytes: int
    sha256: str

    @classmethod
    def read(cls, facts: dict[str, Any]) -> "Shard":
        """From JSON; a ValueError (TypeError) if the facts are not such as a ShardWriter gives."""
        for name, value in facts.items():
            if name in ("file", "sha256"):
                fits = isinstance(value, str) and value.isprintable() and value not in ("", ".", "..")
                fits = fits and "/" not in value
            else:
                fits = type(value) is int and value >= 0
            if not fits:
                raise ValueError(f"shard with {name} {value!r}")
        return cls(**facts)


@dataclass(frozen=True)
class TokenStream:
    """The shards of one split in their order, and the end-of-document id behind the last; `open` it to read."""

    folder: str
    format: Format
    dtype: str
    end_of_document: int
    shards: tuple[Shard, ...]

    @property
    def count(self) -> int:
        """Ids of the stream."""
        return sum(shard.tokens for shard in self.shards) + 1

    @property
    def text_bytes(self) -> int:
        """Bytes of UTF-8 text that the stream stands for."""
        return sum(shard.text_bytes for shard in self.shards)

    def open(self) -> "StreamReader":
        return StreamReader(self)


class _Ids(Protocol):
    def read(self, start: int, stop: int) -> np.ndarray: ...


class StreamReader:
    """Random access to a stream; files are opened where they are first read, also behind a pickle."""

    def __init__(self, stream: TokenStream):
        self.stream = stream

    def __reduce__(self):
        return type(self), (self.stream,)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(shard.tokens for shard in self.stream.shards)]

    @cached_property
    def _opened(self) -> dict[int, _Ids]:
        return {}

    def read(self, start: int, stop: int) -> np.ndarray:
        """ids[start:stop] as int32; both lie in 0 … count."""
        parts, position = [], start
        while position < min(stop, self._starts[-1]):
            number = bisect.bisect_right(self._starts, position) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            part = self._shard(number).read(position - first, end - first)
            self._check(part, number, position - first)
            parts.append(part)
            position = end
        if stop > self._starts[-1]:
            parts.append(np.array([self.stream.end_of_document], np.int32))
        return np.concatenate([part.astype(np.int32) for part in parts])

    def _shard(self, number: int) -> _Ids:
        if number not in self._opened:
            shard = self.stream.shards[number]
            kind = {"memmap": _RawIds, "array_record": _RecordIds}[self.stream.format]
            self._opened[number] = kind(Path(self.stream.folder) / shard.file, self.stream.dtype)
        return self._opened[number]

    def _check(self, ids: np.ndarray, number: int, start: int) -> None:
        """Raises a StorageError for an id above those that were written; model.vocab was compared with them."""
        shard = self.stream.shards[number]
        if ids.max(initial=0) > shard.largest_id:
            place = int(np.argmax(ids > shard.largest_id))
            path = Path(self.stream.folder) / shard.file
            raise StorageError(
                f"data: id {ids[place]} at position {start + place} is larger than any that was written "
                f"({shard.largest_id}), got {path}; {_AGAIN}"
            )


class _RawIds:
    """Reads what it is asked for: a mapped file that gets shorter would end the process by a signal."""

    def __init__(self, path: Path, dtype: str):
        self._path, self._dtype = path, np.dtype(dtype)
        with _as_storage_error(path):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, stop: int) -> np.ndarray:
        width = self._dtype.itemsize
        raw = bytearray()
        with _as_storage_error(self._path):
            while missing := (stop - start) * width - len(raw):
                part = os.pread(self._file, missing, start * width + len(raw))
                if not part:
                    raise OSError(errno.EIO, "it became shorter")
                raw += part
        return np.frombuffer(raw, self._dtype)


class _RecordIds:
    def __init__(self, path: Path, dtype: str):
        self._path, self._dtype = path, dtype
        with _as_storage_error(path):
            self._reader = array_record_module.ArrayRecordReader(str(path))

    def read(self, start: int, stop: int) -> np.ndarray:
        first = start // BLOCK
        with _as_storage_error(self._path):
            blocks = self._reader.read(list(range(first, -(-stop // BLOCK))))
            ids = np.concatenate([np.frombuffer(block, self._dtype) for block in blocks])
        if len(ids) < stop - first * BLOCK:
            raise StorageError(f"data: can't be read (it became shorter), got {self._path}; {_AGAIN}")
        return ids[start - first * BLOCK : stop - first * BLOCK]


@contextmanager
def _as_storage_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, IndexError) as error:  # all but the first are ArrayRecord's
        why = (isinstance(error, OSError) and error.strerror) or str(error).strip().split("\n")[0]
        raise StorageError(f"data: can't be read ({why}), got {path}; {_AGAIN}") from error


class ShardWriter:
    """Writes one shard under `path`, document by document; `close` says what was written. Under a draft's name until
    then, so that no half shard ever has a final name."""

    def __init__(self, path: Path, format: Format, dtype: str, end_of_document: int):
        self._path, self._draft = path, path.with_name(f"{path.name}.draft")
        self._dtype, self._end = np.dtype(dtype), np.array([end_of_document], dtype)
        self._sink = (_RawSink if format == "memmap" else _RecordSink)(self._draft)
        self._documents = self._tokens = self._text_bytes = self._largest = 0

    def add(self, ids: np.ndarray, text_bytes: int, begins: bool = True) -> None:
        """Appends a document of `text_bytes` bytes of text, or, where none begins, a further part of the last one."""
        self._documents, self._text_bytes = self._documents + begins, self._text_bytes + text_bytes
        for part in (self._end[: int(begins)], ids.astype(self._dtype)):
            self._tokens += len(part)
            self._largest = max(self._largest, int(part.max(initial=0)))
            self._sink.write(part)

    def close(self) -> Shard:
        self._sink.close()
        digest = checksum(self._draft)
        size = self._draft.stat().st_size
        self._draft.replace(self._path)
        return Shard(self._path.name, self._documents, self._tokens, self._text_bytes, self._largest, size, digest)

    def discard(self) -> None:
        """Removes the draft of a shard that is not to be; one that is closed stays."""
        with suppress(OSError):  # of a disk without room for what was not written yet
            self._sink.close()
        self._draft.unlink(missing_ok=True)


class _RawSink:
    def __init__(self, path: Path):
        self._file = path.open("wb")

    def write(self, ids: np.ndarray) -> None:
        self._file.write(ids.tobytes())

    def close(self) -> None:
        self._file.close()


class _RecordSink:
    """Ids in records of BLOCK; the last may be shorter."""

    def __init__(self, path: Path):
        with _as_os_error():
            self._writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,zstd:1")
        self._waiting: list[np.ndarray] = []
        self._count = 0

    def write(self, ids: np.ndarray) -> None:
        self._waiting.append(ids)
        self._count += len(ids)
        if self._count >= BLOCK:
            ids = np.concatenate(self._waiting)
            whole = len(ids) // BLOCK * BLOCK
            with _as_os_error():
                for start in range(0, whole, BLOCK):
                    self._writer.write(ids[start : start + BLOCK].tobytes())
            self._waiting, self._count = [ids[whole:]], len(ids) - whole

    def close(self) -> None:
        with _as_os_error():
            if self._count:
                self._writer.write(np.concatenate(self._waiting).tobytes())
                self._count = 0
            self._writer.close()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """ArrayRecord's writer raises a RuntimeError where a file can't be written."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, str(error)) from error


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
