"""Every kind of data gives back exactly its documents, whatever the size of a unit; what is none is named."""

import gzip
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from angpt_jax.data import streams, tokenizer
from angpt_jax.data.corpus import Document, name_hash, read_documents, split_documents
from angpt_jax.data.readers import Bad, Piece, read
from angpt_jax.data.sources import changed, find_source
from angpt_jax.data.units import Unit, cut
from angpt_jax.errors import StorageError, UserError

TEXTS = [f"document {n}, é 漢字 🙂\n" * (n % 7 + 1) for n in range(40)]


def units_of(path: Path | str, unit_bytes: int, side: str | None = "train", fraction: float = 0.2) -> list[Unit]:
    return cut(find_source(str(path), "source", "text", "train"), unit_bytes, side, fraction)  # pyright: ignore


def pieces_of(units: Sequence[Unit]) -> list[Piece]:
    pieces = []
    for unit in units:
        for piece in read(unit):
            assert isinstance(piece, Piece), piece
            pieces.append(piece)
    return pieces


def texts_of(units: Sequence[Unit]) -> list[str]:
    return [piece.text for piece in pieces_of(units)]


def jsonl(texts: Sequence[str] = TEXTS, end: str = "\n") -> bytes:
    return "\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)).encode() + end.encode()


def write_jsonl(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(TEXTS[:25], end=""))
    (folder / "b").mkdir()
    (folder / "b" / "c.ndjson").write_bytes(b"\n" + jsonl(TEXTS[25:]))
    (folder / ".hidden.jsonl").write_bytes(b"{")
    return folder


def write_compressed(folder: Path) -> Path:
    (folder / "a.json.gz").write_bytes(gzip.compress(jsonl(TEXTS[:10])) + gzip.compress(jsonl(TEXTS[10:25])))
    frames = [zstandard.compress(jsonl(part)) for part in (TEXTS[25:30], TEXTS[30:])]
    (folder / "b.jsonl.zst").write_bytes(b"".join(frames))
    return folder


def write_parquet(folder: Path) -> Path:
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table.slice(0, 25), folder / "a.parquet", row_group_size=4)
    strings = table.slice(25).set_column(1, "text", table.slice(25)["text"].cast(pa.large_string()).dictionary_encode())
    parquet.write_table(strings, folder / "b.parquet", row_group_size=100)
    return folder


def write_saved(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    """As `save_to_disk` of the library datasets does."""
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (texts[:25], texts[25:]), strict=True):
        table = pa.table({"text": part, "id": range(len(part))})
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


WRITERS = {"jsonl": write_jsonl, "compressed": write_compressed, "parquet": write_parquet, "saved": write_saved}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("unit_bytes", [1, 300, 10**9])
def test_documents_come_back_whatever_the_size_of_a_unit(kind, unit_bytes, tmp_path):
    units = units_of(WRITERS[kind](tmp_path), unit_bytes)
    assert texts_of(units) == TEXTS
    names = [piece.name for piece in pieces_of(units)]
    assert len(set(names)) == len(TEXTS)
    assert names == [piece.name for piece in pieces_of(units_of(tmp_path, 10**9))]  # so is their side
    assert len(units) == 1 if unit_bytes == 10**9 else len(units) >= 2


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="aé \n", max_size=9), min_size=1, max_size=12),
    unit_bytes=st.integers(1, 60),
    end=st.sampled_from(["", "\n", "\n\n"]),
)
def test_byte_ranges_hold_every_line_once(lines, unit_bytes, end, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(jsonl(lines, end))
    assert texts_of(units_of(path, unit_bytes)) == lines


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_a_folder_of_texts_is_split_and_ordered_like_a_corpus(fraction, tmp_path):
    for number, text in enumerate(["", *TEXTS]):
        (tmp_path / f"{number}.txt").write_text(text)
    train, validation = split_documents(read_documents(str(tmp_path)), fraction)
    units = units_of(tmp_path, 200, None, fraction)
    for side, documents in (("train", train), ("validation", validation)):
        pieces = pieces_of([unit for unit in units if unit.side == side])
        assert [Document(piece.name, piece.text) for piece in pieces] == documents
    assert len(units) > 5


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aé🙂\n", min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(1, 20))
def test_a_single_text_is_cut_like_a_corpus(tmp_path_factory, text, fraction, read_bytes):
    path = tmp_path_factory.mktemp("one") / "one.txt"
    path.write_text(text, newline="")
    (train,), (validation,) = split_documents([Document("one.txt", text)], fraction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_READ", read_bytes)
        units = units_of(path, 10, None, fraction)
        assert [unit.side for unit in units] == ["train", "validation"]
        assert texts_of(units) == [train.text, validation.text]


def test_a_long_text_comes_in_pieces_of_one_document(tmp_path):
    text = "é some words " * 40_000
    (tmp_path / "long.txt").write_text(text)
    pieces = pieces_of(units_of(tmp_path, 10**9))
    assert "".join(piece.text for piece in pieces) == text and len(pieces) > 3
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="aé _\n", max_size=30), max_size=6), st.integers(1, 6), st.integers(1, 20))
def test_a_text_is_cut_in_the_same_places_however_it_comes(texts, part, more):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_PART_CHARACTERS", part)
        patch.setattr(tokenizer, "_LONGEST_PART", part + more)
        found = list(tokenizer.parts(texts))
        assert found == list(tokenizer.parts(["".join(texts)]))
    assert "".join(found) == "".join(texts) and max(map(len, found)) <= part + more
    for before, after in zip(found, found[1:], strict=False):
        assert len(before) >= part
        assert len(before) == part + more or (after[0] == " " and (before[-1].isalnum() or before[-1] == "_"))


def test_the_library_of_python_is_a_source():
    found = find_source("stdlib", "source", "text", "train")
    assert found.kind == "text" and any(file.name == "json/decoder.py" for file in found.files)


def test_a_dict_of_data_sets_gives_the_split_that_is_wanted(tmp_path):
    for split, texts in (("train", TEXTS), ("test", TEXTS[:30])):
        (tmp_path / split).mkdir()
        write_saved(tmp_path / split, texts)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts_of(units_of(tmp_path, 10**9)) == TEXTS
    with pytest.raises(UserError, match=r"no split validation, got .*; one of .*/train, .*/test"):
        find_source(str(tmp_path), "validation_source", "text", "validation")


def test_a_tfds_folder_is_read_without_tensorflow(tmp_path):
    tfds = importlib.import_module("tensorflow_datasets")  # not before: it is slow

    class Small(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator:
            yield from ((n, {"text": text}) for n, text in enumerate(TEXTS))

    builder = Small(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    units = units_of(str(builder.data_path), 500)
    assert sorted(texts_of(units)) == sorted(TEXTS) and len(units) > 3
    with pytest.raises(UserError, match="field: no such feature in .*, got body; text"):
        find_source(str(builder.data_path), "source", "body", "train")


BAD_LINES = [
    (b'{"text": "a"', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b'["a"]', "not a JSON object but a list"),
    (b'{"body": "a", "id": 1}', r"no field text \(there are body, id\)"),
    (b'{"text": null}', "field text is null, not a text"),
    (b'{"text": 3}', "field text is a number, not a text"),
    (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
    (b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=[problem for _, problem in BAD_LINES])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_bad_line_is_named_and_the_others_are_read(line, problem, suffix, tmp_path):
    content = jsonl(TEXTS[:20]) + b"\n" + line + b"\n" + jsonl(TEXTS[20:])
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    found = [one for unit in units_of(path, 400) for one in read(unit)]
    (bad,) = [one for one in found if isinstance(one, Bad)]
    assert [one.text for one in found if isinstance(one, Piece)] == TEXTS
    with pytest.raises(AssertionError, match=rf"source: .*{problem}.* got {path} line 22; "):
        raise AssertionError(bad.problem)


def test_a_row_without_text_is_named(tmp_path):
    parquet.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet", row_group_size=1)
    found = [one for unit in units_of(tmp_path, 1) for one in read(unit)]
    assert [one.text for one in found if isinstance(one, Piece)] == ["a", "b"]
    assert [one.problem for one in found if isinstance(one, Bad)] == [
        f"source: field text is null, not a text, got {tmp_path}/a.parquet row 1; "
        "mend it, or pass over it with --skip_bad_lines"
    ]


def mixed(folder: Path) -> Path:
    (folder / "README.md").write_text("x")
    return write_parquet(folder)


def not_utf8(folder: Path) -> Path:
    (folder / "a.txt").write_bytes("é".encode() * 600_000 + b"\xe9 " * 10)
    return folder


def other_columns(folder: Path) -> Path:
    parquet.write_table(pa.table({"body": ["a"], "id": [1]}), folder / "a.parquet")
    return folder


def numbers(folder: Path) -> Path:
    parquet.write_table(pa.table({"text": [1, 2]}), folder / "a.parquet")
    return folder


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


BAD_SOURCES = [
    (lambda folder: folder / "nothing", "source: does not exist, got .*nothing; a text file, "),
    (lambda folder: folder, "source: no files in the folder, got "),
    (lambda folder: "/dev/null", "source: neither a file nor a folder, got /dev/null; "),
    (mixed, r"source: holds files of several kinds \(1 text \(README.md\), 2 parquet \(a.parquet\)\), got "),
    (file("a.txt", b""), "source: empty, got "),
    (file("a.txt", b"x"), "source: one character can't be split, got "),
    (file("a.jsonl", b""), "source: empty, got "),
    (file("a.txt.gz", b""), r"source: of no kind that is read \(.gz\), got "),
    (file("a.tar", b""), r"source: of no kind that is read \(.tar\), got "),
    (file("a.jsonl.gz", gzip.compress(jsonl())[:-20]), "source: damaged or cut off .*, got .*a.jsonl.gz; "),
    (file("a.jsonl.gz", b"x"), "source: damaged or cut off .*, got .*a.jsonl.gz; "),
    (file("a.jsonl.zst", zstandard.compress(jsonl())[:-9]), "source: damaged or cut off .*, got .*a.jsonl.zst; "),
    (file("a.jsonl.zst", b"xxxxxxxx"), "source: damaged or cut off .*, got .*a.jsonl.zst; "),
    (file("a.parquet", b"x" * 50), "source: damaged or of another kind .*, got .*a.parquet; "),
    (file("a.arrow", b"x" * 50), "source: damaged .*, got .*a.arrow; "),
    (not_utf8, "source: not UTF-8 at byte 1200000, got .*a.txt; UTF-8 text"),
    (other_columns, r"source: no field text \(there are body, id\), got .*a.parquet; another --field"),
    (numbers, r"source: field text is int64, not text \(there are text\), got .*a.parquet; text"),
]


@pytest.mark.parametrize(("make", "problem"), BAD_SOURCES)
def test_what_is_no_data_is_named(make, problem, tmp_path):
    with pytest.raises(UserError, match=problem) as caught:
        pieces_of(units_of(make(tmp_path), 10**6, None))
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_a_storage_error(tmp_path, monkeypatch):
    write_jsonl(tmp_path)
    units = units_of(tmp_path, 10**6)

    def denied(path: Path, *rest: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(StorageError, match=r"source: can't be read \(Permission denied\), got .*a.jsonl; "):
        pieces_of(units)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "LONGEST_LINE", 1 << 10)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 2000}]))
    with pytest.raises(UserError, match="source: a line of more than .*a.json; one JSON object a line"):
        pieces_of(units_of(tmp_path, 10**6))


def test_a_file_that_changed_is_noticed(tmp_path):
    source = find_source(str(write_jsonl(tmp_path)), "source", "text", "train")
    assert changed([source]) == []
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert changed([source]) == [str(tmp_path / "a.jsonl")]


def test_the_side_of_a_document_follows_from_its_name_alone(tmp_path):
    names = [piece.name for piece in pieces_of(units_of(write_parquet(tmp_path), 10**6, None))]
    assert names[:2] == ["a.parquet:0", "a.parquet:1"] and names[-1] == "b.parquet:14"
    assert 0 < sum(name_hash(name) < 0.3 for name in names) < len(names)
