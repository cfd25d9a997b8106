"""Which documents a source has, and which of them are held out."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from angpt_jax.data.corpus import Document, content_hash, read_documents, split_documents
from angpt_jax.errors import StorageError, UserError

MANY = [Document(f"{i}.txt", f"text {i}\n") for i in range(200)]


def write(root: Path, files: Mapping[str, str | bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root)


def names(documents: list[Document]) -> set[str]:
    return {document.name for document in documents}


def test_stdlib_is_megabytes_of_library_code_without_tests():
    documents = read_documents("stdlib")
    assert 8e6 < sum(len(document.text) for document in documents) < 16e6
    assert {"argparse.py", "asyncio/events.py"} <= names(documents)
    folders = {folder for document in documents for folder in document.name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "encodings", "site-packages", "__pycache__"}


def test_folder_is_read_recursively_sorted_without_hidden_and_empty_files(tmp_path):
    files = {"b.txt": "bee\r\n", "a/z.md": "zed é", "a/.hidden": "no", ".git/x": "no", "empty.txt": "", "a.txt": "ay"}
    documents = read_documents(write(tmp_path, files))
    assert documents == [Document("a.txt", "ay"), Document("a/z.md", "zed é"), Document("b.txt", "bee\r\n")]


def test_single_file_is_one_document(tmp_path):
    write(tmp_path, {"a.txt": "one", "b.txt": "two"})
    assert read_documents(str(tmp_path / "b.txt")) == [Document("b.txt", "two")]


@pytest.mark.parametrize(
    ("files", "source", "said"),
    [
        ({}, "nowhere", ["does not exist", "nowhere"]),
        ({".hidden": "x"}, "", ["no files"]),
        ({"a.txt": "", "b.txt": ""}, "", ["empty"]),
        ({"ok.txt": "fine", "sub/bad.txt": b"abc\xff"}, "", ["not UTF-8 at byte 3", "sub/bad.txt"]),
    ],
)
def test_unusable_source_is_the_users_error(tmp_path, files, source, said):
    write(tmp_path, files)
    with pytest.raises(UserError) as caught:
        read_documents(str(tmp_path / source))
    (problem,) = caught.value.problems
    assert problem.startswith("data.source: ")
    assert all(words in problem for words in [*said, str(tmp_path)])


def test_file_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path, {"a.txt": "x"})
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match=r"data\.source: can't be read .*dangling\.txt"):
        read_documents(str(tmp_path))


def test_split_is_a_partition_near_the_fraction():
    train, validation = split_documents(MANY, 0.2)
    assert sorted([*train, *validation], key=MANY.index) == MANY
    assert 20 < len(validation) < 60


def test_side_of_a_document_does_not_depend_on_the_others_nor_on_their_order():
    train, validation = split_documents(MANY, 0.2)
    few_train, few_validation = split_documents(MANY[100::-1], 0.2)
    assert names(few_train) < names(train)
    assert names(few_validation) < names(validation)


def test_larger_fraction_holds_out_more_and_order_is_that_of_the_hash():
    """The first documents of a split are no particular ones: they are not the first names."""
    smaller, larger = (split_documents(MANY, fraction)[1] for fraction in (0.1, 0.3))
    assert larger[: len(smaller)] == smaller
    train, _ = split_documents(MANY, 0.1)
    first = [int(document.name.removesuffix(".txt")) for document in train[:40]]
    assert 60 < sum(first) / len(first) < 140


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_side_is_empty(fraction):
    train, validation = split_documents(MANY[:2], fraction)
    assert len(train) == len(validation) == 1


@pytest.mark.parametrize(
    ("text", "fraction", "head"),
    [
        ("".join(f"line {i}\n" for i in range(100, 200)), 0.1, "".join(f"line {i}\n" for i in range(100, 190))),
        ("a\n" + "b" * 98, 0.2, "a\n" + "b" * 78),
        ("ab", 0.01, "a"),
        ("ab", 0.99, "a"),
        ("aaaa\nbbbb", 0.35, "aaaa\n"),
    ],
    ids=["line end at the fraction", "line end too far away", "nothing held out", "all held out", "nearest line end"],
)
def test_single_document_is_cut_at_the_fraction(text, fraction, head):
    train, validation = split_documents([Document("a", text)], fraction)
    assert (train[0].text, validation[0].text) == (head, text[len(head) :])


def test_single_character_cannot_be_split():
    with pytest.raises(UserError, match=r"^data\.source: .*a\.txt"):
        split_documents([Document("a.txt", "x")], 0.5)


def test_content_hash_sees_names_texts_and_where_one_ends():
    variants = [
        [("a", "bc")],
        [("b", "bc")],
        [("ab", "c")],
        [("a", "bd")],
        [("a", "b"), ("", "c")],
        [("a", "bc"), ("d", "e")],
    ]
    hashes = {content_hash([Document(*pair) for pair in variant]) for variant in variants}
    assert len(hashes) == len(variants)
