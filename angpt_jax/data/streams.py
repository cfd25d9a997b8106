"""Files as streams: their text piece by piece, their lines one by one, compressed or not; never a whole file."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from angpt_jax.data.corpus import unreadable
from angpt_jax.data.sources import Source

LONGEST_LINE = 1 << 28  # bytes
_READ = 1 << 20  # bytes at once
_READ_COMPRESSED = 1 << 14


def decoded(source: Source, file: str, start: int, stop: int) -> Iterator[str]:
    """The UTF-8 text of bytes start … stop of a file."""
    decoder, path = codecs.getincrementaldecoder("utf-8")(), source.path(file)
    try:
        with path.open("rb") as opened:
            opened.seek(start)
            while start < stop:
                chunk = opened.read(min(_READ, stop - start))
                if not chunk:
                    raise source.wrong("got shorter while it was read", str(path), "a file that stays as it is")
                start += len(chunk)
                yield decoder.decode(chunk, final=start == stop)
    except UnicodeDecodeError as error:
        place = start - len(error.object) + error.start
        raise source.wrong(f"not UTF-8 at byte {place}", str(path), "UTF-8 text") from error
    except OSError as error:
        unreadable(error, source.key)


def lines(source: Source, file: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(place, line with its end) of the lines that begin in bytes start … stop of a file, or, where it is compressed,
    of all of them; the place counts bytes of the text."""
    path = source.path(file)
    with _opened(source, file) as opened:
        place = 0
        if start:
            opened.seek(start - 1)
            place = start - 1 + len(opened.readline())  # the rest of the line in front
        while place < stop or stop < 0:
            line = opened.readline(LONGEST_LINE)
            if not line:
                break
            if len(line) == LONGEST_LINE:
                raise source.wrong(f"a line of more than {LONGEST_LINE >> 20} MB", str(path), "one JSON object a line")
            yield place, line
            place += len(line)


def line_number(source: Source, file: str, place: int) -> int:
    """Number, from 1, of the line of a file that begins at a place."""
    number = 1
    with _opened(source, file) as opened:
        while place > 0 and (chunk := opened.read(min(_READ, place))):
            number, place = number + chunk.count(b"\n"), place - len(chunk)
    return number


@contextmanager
def _opened(source: Source, file: str) -> Iterator[BinaryIO]:
    """The file, decompressed; what can be wrong with it becomes a UserError."""
    path, zstd_errors = source.path(file), ()
    try:
        with path.open("rb") as raw:
            if file.endswith(".gz"):
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif file.endswith(".zst"):
                zstandard = _zstandard(source, file)
                zstd_errors = (zstandard.ZstdError,)
                yield io.BufferedReader(cast(Any, _Zstd(zstandard.ZstdDecompressor(), raw)), _READ)
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error, *zstd_errors) as error:
        raise source.wrong(f"damaged or cut off ({error})", str(path), "a whole compressed file") from error
    except OSError as error:
        unreadable(error, source.key)


class _Zstd(io.RawIOBase):
    """All frames of a .zst file; unlike the library's own reader it notices a file that ends too soon."""

    def __init__(self, library: Any, raw: BinaryIO):
        self._library, self._raw = library, raw
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_READ_COMPRESSED)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            self._frame = self._frame or self._library.decompressobj()
            self._output, self._input = self._frame.decompress(self._input), b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        taken = self._output[: len(buffer)]
        buffer[: len(taken)] = taken
        self._output = self._output[len(taken) :]
        return len(taken)


def _zstandard(source: Source, file: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise source.wrong("needs the package zstandard", file, "pip install -e '.[data]'") from error
    return zstandard
