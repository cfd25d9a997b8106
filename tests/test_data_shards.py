"""Shards give back the ids that were written, and an opened folder is whole or a UserError names what is not."""

import dataclasses
import json
import pickle
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_streams import END, flip, ids_of, numbered, truncate, write_stream

from angpt_jax.data import prepared
from angpt_jax.data.prepared import MANIFEST, SPLITS, TOKENIZER, Manifest, is_prepared, open_prepared, write_manifest
from angpt_jax.data.shards import BLOCK, Format, Shard, ShardWriter, checksum
from angpt_jax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from angpt_jax.errors import StorageError, UserError

FORMATS: tuple[Format, ...] = get_args(Format)
every_format = pytest.mark.parametrize("format", FORMATS)
LENGTHS = st.lists(st.sampled_from([0, 1, 5, 40, 3000, BLOCK - 1, BLOCK, 9000]), min_size=1, max_size=6)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As on a full disk: no file gets larger than this."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 4), st.sampled_from(FORMATS), st.sampled_from(["uint16", "uint32"]), st.data())
def test_any_part_of_a_stream_reads_as_it_was_written(lengths, count, format, dtype, data):
    documents = numbered(lengths)
    expected = ids_of(documents)
    with tempfile.TemporaryDirectory() as folder:
        stream = write_stream(folder, documents, shards=count, format=format, dtype=dtype)
        assert stream.count == len(expected) and stream.text_bytes == sum(lengths)
        reader = stream.open()
        for _ in range(5):
            start = data.draw(st.integers(0, stream.count - 1))
            stop = data.draw(st.integers(start + 1, stream.count))
            ids = reader.read(start, stop)
            assert ids.dtype == np.int32
            np.testing.assert_array_equal(ids, expected[start:stop])


@every_format
def test_reads_cross_the_borders_of_shards_and_of_blocks(tmp_path, format):
    documents = numbered([BLOCK + 10, 3, 0, 2 * BLOCK, 7])
    stream = write_stream(tmp_path, documents, shards=5, format=format)
    expected = ids_of(documents)
    reader = stream.open()
    for border in np.cumsum([shard.tokens for shard in stream.shards]):
        np.testing.assert_array_equal(reader.read(border - 2, border + 1), expected[border - 2 : border + 1])
    np.testing.assert_array_equal(reader.read(0, stream.count), expected)


@every_format
def test_ids_above_two_bytes_are_kept(tmp_path, format):
    ids = np.array([2**16 - 1, 2**16, 100_276])
    stream = write_stream(tmp_path, [ids], format=format, dtype="uint32")
    assert stream.open().read(0, 5).tolist() == [END, *ids, END]
    assert stream.shards[0].largest_id == 100_276


@every_format
def test_writer_says_what_it_wrote(tmp_path, format):
    writer = ShardWriter(tmp_path / "shard", format, "uint16", END)
    for ids, text_bytes in ((np.array([5, 700]), 9), (np.array([], np.int32), 0), (np.array([6]), 1)):
        writer.add(ids, text_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.draft"]
    shard = writer.close()
    path = tmp_path / "shard"
    assert list(tmp_path.iterdir()) == [path]
    assert shard == Shard("shard", 3, 6, 10, 700, path.stat().st_size, checksum(path))


@every_format
def test_the_same_documents_give_the_same_bytes(tmp_path, format):
    for name in ("one", "two"):
        write_stream(tmp_path, numbered([5000, 0, 70]), format=format, name=name)
    assert (tmp_path / "one-0").read_bytes() == (tmp_path / "two-0").read_bytes()


@every_format
@pytest.mark.parametrize("documents", [0, 1, 300])
def test_discarded_writer_leaves_nothing(tmp_path, format, documents):
    writer = ShardWriter(tmp_path / "shard", format, "uint16", END)
    for _ in range(documents):
        writer.add(np.arange(100), 100)
    writer.discard()
    assert not list(tmp_path.iterdir())


@every_format
def test_closed_shard_cannot_be_discarded(tmp_path, format):
    writer = ShardWriter(tmp_path / "shard", format, "uint16", END)
    writer.add(np.arange(100), 100)
    shard = writer.close()
    writer.discard()
    assert list(tmp_path.iterdir()) == [tmp_path / "shard"] and checksum(tmp_path / "shard") == shard.sha256


@every_format
@pytest.mark.parametrize("length", [300, 20_000])  # of which a buffer keeps something, and nothing
def test_full_disk_is_an_os_error_and_leaves_nothing(tmp_path, format, length):
    with file_size_limit(10_000), pytest.raises(OSError, match="File too large"):
        writer = ShardWriter(tmp_path / "shard", format, "uint16", END)
        try:
            for seed in range(40):
                writer.add(np.random.default_rng(seed).integers(0, END, length), length)
            writer.close()
        except OSError:
            writer.discard()
            raise
    assert not list(tmp_path.iterdir())


@every_format
def test_reader_pickles_without_its_files(tmp_path, format):
    reader = write_stream(tmp_path, numbered([3 * BLOCK]), format=format).open()
    expected = reader.read(10, 20).tolist()
    pickled = pickle.dumps(reader)
    assert len(pickled) < 600
    assert pickle.loads(pickled).read(10, 20).tolist() == expected


@every_format
def test_a_file_that_gets_shorter_under_its_reader_is_a_storage_error(tmp_path, format):
    """A mapped file would end the process by SIGBUS."""
    stream = write_stream(tmp_path, numbered([20_000]), format=format)
    reader = stream.open()
    assert len(reader.read(0, 100)) == 100
    (tmp_path / "train-0").write_bytes(b"x" * 100)
    with pytest.raises(StorageError, match=r"data: can't be read \(.*\), got .*train-0; bring the file back"):
        reader.read(15_000, 15_100)
    (tmp_path / "train-0").unlink()
    with pytest.raises(StorageError, match=r"data: can't be read \(.*\), got .*train-0; bring the file back"):
        stream.open().read(0, 10)


@every_format
def test_an_id_that_nobody_wrote_is_a_storage_error(tmp_path, format):
    stream = write_stream(tmp_path, [np.arange(10), np.array([7, 300, 5])], shards=2, format=format)
    second = dataclasses.replace(stream.shards[1], largest_id=256)
    lying = dataclasses.replace(stream, shards=(stream.shards[0], second))
    assert lying.open().read(0, 13).tolist() == [END, *range(10), END, 7]
    line = r"data: id 300 at position 2 is larger than any that was written \(256\), got .*train-1; bring the file back"
    with pytest.raises(StorageError, match=line):
        lying.open().read(3, 15)


@every_format
def test_ids_that_a_manifest_denies_are_found_when_the_folder_is_opened_or_read(tmp_path, format):
    folder = make_folder(tmp_path / "made", format=format)
    facts = json.loads((folder / MANIFEST).read_text("utf-8"))
    facts["splits"]["train"]["shards"][0]["largest_id"] = 3
    (folder / MANIFEST).write_text(json.dumps(facts), "utf-8")
    if format == "memmap":
        assert problems(folder) == [
            f"data.source: train-0 holds id 256 at position 0, manifest.json says at most 3, got {folder}; "
            "run prepare again, it keeps what is whole"
        ]
    else:
        with pytest.raises(StorageError, match="id 256 at position 0 is larger"):
            open_prepared(folder, "data.source").stream("train").open().read(0, 3)


def make_folder(folder: Path, tokenizer: Tokenizer | None = None, format: Format = "memmap") -> Path:
    """A prepared folder of two shards a split, of bytes unless a tokenizer is given."""
    folder.mkdir()
    tokenizer = tokenizer or ByteTokenizer()
    if isinstance(tokenizer, FileTokenizer):
        (folder / TOKENIZER).write_text(tokenizer.json, "utf-8")
    documents = [np.arange(1, 50), np.arange(1, 9), np.arange(100)]
    end = tokenizer.end_of_document
    splits = {
        split: write_stream(folder, documents, shards=2, format=format, name=split, end=end).shards for split in SPLITS
    }
    kind = "bpe" if isinstance(tokenizer, FileTokenizer) else "bytes"
    write_manifest(folder, Manifest.of(format, tokenizer, kind, {"name": "text"}, splits))
    return folder


@pytest.fixture(scope="module")
def bpe() -> FileTokenizer:
    return train_bpe(["some text to learn from " * 9], 270)


def problems(folder: Path, **options: bool) -> list[str]:
    with pytest.raises(UserError) as caught:
        open_prepared(folder, "data.source", **options)
    assert all(problem.startswith("data.source: ") and str(folder) in problem for problem in caught.value.problems)
    return list(caught.value.problems)


@every_format
def test_whole_folder_opens_with_its_tokenizer_and_streams(tmp_path, format, bpe):
    folder = make_folder(tmp_path / "made", bpe, format)
    assert is_prepared(folder) and not is_prepared(tmp_path)
    opened = open_prepared(folder, "data.source")
    assert opened.tokenizer.fingerprint == bpe.fingerprint
    stream = opened.stream("validation")
    assert [shard.file for shard in stream.shards] == ["validation-0", "validation-1"]
    assert stream.end_of_document == bpe.end_of_document and stream.format == format
    assert stream.open().read(49, 53).tolist() == [49, bpe.end_of_document, 1, 2]


def test_manifest_holds_the_totals_and_reads_back(tmp_path):
    text = (make_folder(tmp_path / "made") / MANIFEST).read_text("utf-8")
    facts = json.loads(text)
    assert facts["splits"]["train"].keys() == {"documents", "tokens", "text_bytes", "shards"}
    assert facts["splits"]["train"]["documents"] == 3 and facts["splits"]["train"]["tokens"] == 160
    assert facts["tokenizer"] == {"kind": "bytes", "fingerprint": "bytes", "size": 257, "end_of_document": END}
    assert Manifest.from_json(text).to_json() == text


@every_format
@pytest.mark.parametrize(
    ("damage", "words"),
    [(Path.unlink, "is missing"), (truncate, "were written"), (flip, "its checksum differs")],
)
def test_every_damaged_shard_is_named(tmp_path, format, damage: Callable[[Path], None], words):
    folder = make_folder(tmp_path / "made", format=format)
    for name in ("train-1", "validation-0"):
        damage(folder / name)
    named = problems(folder)
    assert len(named) == 2 and "train-1" in named[0] and "validation-0" in named[1]
    assert all(words in problem and "run prepare again" in problem for problem in named)


def test_checksums_of_large_data_are_compared_on_demand(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "made")
    monkeypatch.setattr(prepared, "CHECKED", 100)
    flip(folder / "train-0")
    assert open_prepared(folder, "data.source")
    assert "train-0" in problems(folder, check_all=True)[0]


def without(facts: dict[str, Any], path: str) -> dict[str, Any]:
    """The facts without the one at a/b/c."""
    node: Any = facts
    *above, last = path.split("/")
    for name in above:
        node = node[int(name) if isinstance(node, list) else name]
    del node[last]
    return facts


SHARD_FACTS = [f"splits/train/shards/1/{field.name}" for field in dataclasses.fields(Shard)]
TOKENIZER_FACTS = [f"tokenizer/{name}" for name in ("kind", "fingerprint", "size", "end_of_document")]
TOP_FACTS = ["version", "format", "dtype", "tokenizer", "source", "splits", "splits/validation", "splits/train/shards"]


@pytest.mark.parametrize("path", [*TOP_FACTS, *TOKENIZER_FACTS, *SHARD_FACTS])
def test_manifest_that_lacks_something_is_not_prepares(tmp_path, path):
    folder = make_folder(tmp_path / "made")
    facts = without(json.loads((folder / MANIFEST).read_text("utf-8")), path)
    (folder / MANIFEST).write_text(json.dumps(facts), "utf-8")
    (problem,) = problems(folder)
    assert MANIFEST in problem and "not one of prepare's" in problem


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "prepare's"), ("[]", "prepare's"), ("3", "prepare's"), ("", "prepare's"), ('{"version": 7}', "version 7")],
)
def test_foreign_manifest_is_named(tmp_path, content, words):
    folder = make_folder(tmp_path / "made")
    (folder / MANIFEST).write_text(content, "utf-8")
    (problem,) = problems(folder)
    assert MANIFEST in problem and words in problem


@pytest.mark.parametrize(("name", "value"), [("format", "parquet"), ("dtype", "float32"), ("dtype", "wide")])
def test_manifest_of_shards_that_nothing_reads_is_named(tmp_path, name, value):
    folder = make_folder(tmp_path / "made")
    facts = json.loads((folder / MANIFEST).read_text("utf-8")) | {name: value}
    (folder / MANIFEST).write_text(json.dumps(facts), "utf-8")
    (problem,) = problems(folder)
    assert MANIFEST in problem and value in problem


BAD_FACTS = [
    ("splits/train/shards/0/file", "../train-0", "shard with file '../train-0'"),
    ("splits/train/shards/0/file", "..", "shard with file '..'"),
    ("splits/train/shards/0/file", "/etc/passwd", "shard with file '/etc/passwd'"),
    ("splits/train/shards/0/file", 3, "shard with file 3"),
    ("splits/train/shards/0/tokens", -1, "shard with tokens -1"),
    ("splits/train/shards/0/tokens", True, "shard with tokens True"),
    ("splits/train/shards/0/largest_id", 1.5, "shard with largest_id 1.5"),
    ("splits/train/shards/0/largest_id", 257, "train-0 with id 257, its tokenizer has 257 ids"),
    ("splits/train/shards/0/sha256", None, "shard with sha256 None"),
    ("splits/train/shards/0/tokens", 7, "for 7 uint16 ids"),
    ("tokenizer/size", "257", "tokenizer size '257' where int is due"),
    ("tokenizer/size", 2**16 + 1, "uint16 ids are too narrow for the 65537 ids of its tokenizer"),
    ("tokenizer/fingerprint", None, "tokenizer fingerprint None where str is due"),
    ("dtype", "uint32", "uint32 ids"),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD_FACTS, ids=str)
def test_facts_that_can_not_be_true_are_named(tmp_path, path, value, words):
    folder = make_folder(tmp_path / "made")
    facts = node = json.loads((folder / MANIFEST).read_text("utf-8"))
    *above, last = path.split("/")
    for name in above:
        node = node[int(name) if isinstance(node, list) else name]
    node[last] = value
    (folder / MANIFEST).write_text(json.dumps(facts), "utf-8")
    (problem,) = problems(folder)
    assert MANIFEST in problem and words in problem


def test_missing_manifest_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"data\.source: manifest\.json can't be read"):
        open_prepared(tmp_path, "data.source")


def test_tokenizer_that_did_not_make_the_tokens_is_named(tmp_path, bpe):
    folder = make_folder(tmp_path / "made", bpe)
    (folder / TOKENIZER).write_text(train_bpe(["other words " * 9], 270).json, "utf-8")
    (problem,) = problems(folder)
    assert TOKENIZER in problem and "not the tokenizer that made the tokens" in problem
    (folder / TOKENIZER).unlink()
    with pytest.raises(UserError, match=TOKENIZER):
        open_prepared(folder, "data.source")
