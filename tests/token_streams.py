"""Streams of token ids on disk for the tests of the data pipeline."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from angpt_jax.data.pipeline import Batch
from angpt_jax.data.shards import Format, ShardWriter, TokenStream
from angpt_jax.data.tokenizer import Tokenizer

END = 256  # the end-of-document id of bytes
FIRST = 1000  # of the ids of `numbered`


def numbered(lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents of these lengths in which every id says where it stands; no id follows another across documents."""
    starts = FIRST + np.cumsum([0, *lengths]) + np.arange(len(lengths) + 1)
    return [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def write_stream(
    folder: Path | str,
    documents: Sequence[np.ndarray],
    *,
    shards: int = 1,
    format: Format = "memmap",
    dtype: str = "uint16",
    name: str = "train",
    end: int = END,
) -> TokenStream:
    """The documents in their order, shared by as many shards; some of them are empty where documents are few."""
    borders = np.linspace(0, len(documents), shards + 1).astype(int)
    written = []
    for number, (first, stop) in enumerate(zip(borders, borders[1:], strict=False)):
        writer = ShardWriter(Path(folder) / f"{name}-{number}", format, dtype, end)
        for ids in documents[first:stop]:
            writer.add(np.asarray(ids), text_bytes=len(ids))
        written.append(writer.close())
    return TokenStream(str(folder), format, dtype, end, tuple(written))


def ids_of(documents: Sequence[np.ndarray]) -> np.ndarray:
    """What the stream of the documents has to be."""
    return np.concatenate([*(np.array([END, *ids], np.int32) for ids in documents), np.array([END], np.int32)])


def texts_of(tokenizer: Tokenizer, stream: TokenStream) -> list[str]:
    """The documents of a stream, which begins and ends with the id that ends a document."""
    ids = stream.open().read(0, stream.count)
    ends = np.flatnonzero(ids == tokenizer.end_of_document)
    assert ends[0] == 0 and ends[-1] == len(ids) - 1
    return [tokenizer.decode(document[1:]) for document in np.split(ids, ends[1:-1])]


def stack(batches: Sequence[Batch]) -> Batch:
    """All rows of the batches, one behind the other."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_same_batches(actual: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys() == {"tokens", "segments", "weights"}
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def truncate(path: Path) -> None:
    """A file that ends too soon."""
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    """A file with one bit that is another."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
