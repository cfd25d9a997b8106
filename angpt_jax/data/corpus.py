"""Documents and their split into training and validation text."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from angpt_jax.errors import StorageError, UserError

STDLIB = "stdlib"
STDLIB_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class Document:
    """One text; `name` is its POSIX path relative to the root it was found under."""

    name: str
    text: str


def read_documents(source: str, key: str = "data.source") -> list[Document]:
    """The non-empty documents of a source, sorted by name; a UserError under `key` names the file that can't be one.

    `stdlib` is every .py file of the running interpreter's standard library without tests, `encodings/` and installed
    packages; the few that are not UTF-8 are left out. Anything else is the path of a UTF-8 text file, or of a folder
    whose files all are; hidden files are skipped and links to folders are not followed.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        texts = ((name, _read_text(root / name, strict=False)) for name in _stdlib_names(root))
    else:
        root, names = _root_and_names(source, key)
        texts = ((name, _read_text(root / name, strict=True, key=key)) for name in names)
    documents = [Document(name, text) for name, text in texts if text]
    if not documents:
        raise UserError(f"{key}: empty, got {source}; a text file or a folder of text files with text in them")
    return documents


def split_documents(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, validation) documents, both ordered by the hash of the name, so that any prefix is a fair sample.

    The hash alone decides the side, so a document stays where it is when others come or go. Neither side is empty:
    the document nearest the border changes sides, and a single document is cut in two.
    """
    if len(documents) == 1:
        return _cut(documents[0], validation_fraction)
    ordered = sorted(documents, key=lambda document: name_hash(document.name))
    held_out = sum(name_hash(document.name) < validation_fraction for document in ordered)
    held_out = min(max(held_out, 1), len(ordered) - 1)
    return ordered[held_out:], ordered[:held_out]


def content_hash(documents: Sequence[Document]) -> str:
    """sha256 of all names and texts, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (_name_bytes(document.name), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")  # how Python keeps a file name that is not UTF-8


def name_hash(name: str) -> float:
    """sha256 of the name as a number in [0, 1]."""
    return int.from_bytes(hashlib.sha256(_name_bytes(name)).digest()[:8], "big") / 2**64


def _cut(document: Document, validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Head and tail of one document, cut at the fraction, or on the nearest line end that keeps half of each part."""
    text = document.text
    if len(text) < 2:
        raise UserError(
            f"data.source: can't be split in training and validation text, got one document, {document.name}, of "
            f"{len(text)} characters; several documents, or one of at least 2 characters"
        )
    cut = min(max(round(len(text) * (1 - validation_fraction)), 1), len(text) - 1)
    line_ends = (text.rfind("\n", 0, cut) + 1, text.find("\n", cut) + 1)
    fitting = [end for end in line_ends if 2 * end >= cut and 2 * (len(text) - end) >= len(text) - cut]
    cut = min(fitting, key=lambda end: abs(end - cut), default=cut)
    return [Document(document.name, text[:cut])], [Document(document.name, text[cut:])]


def _stdlib_names(root: Path) -> list[str]:
    return [name for name in walk(root, STDLIB_LEFT_OUT) if name.endswith(".py")]


def _root_and_names(source: str, key: str) -> tuple[Path, list[str]]:
    """The folder and the files in it that a path stands for."""
    path = Path(source).expanduser()
    if path.is_file():
        return path.parent, [path.name]
    if not path.is_dir():
        problem = "neither a file nor a folder" if path.exists() else "does not exist"
        raise UserError(f"{key}: {problem}, got {source}; {STDLIB}, a text file or a folder of text files")
    names = walk(path, key=key)
    if not names:
        raise UserError(f"{key}: no files in the folder, got {source}; a folder of text files (not hidden ones)")
    return path, names


def walk(root: Path, left_out: frozenset[str] = frozenset(), key: str = "data.source") -> list[str]:
    """Sorted POSIX paths, relative to root, of the files below it that are neither hidden nor in a left-out folder."""

    def names() -> Iterator[str]:
        for folder, subfolders, files in os.walk(root, onerror=partial(unreadable, key=key)):
            subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
            relative = Path(folder).relative_to(root)
            yield from ((relative / name).as_posix() for name in files if not name.startswith("."))

    return sorted(names())


def _read_text(path: Path, strict: bool, key: str = "data.source") -> str:
    """The text exactly as it is stored; not strict: nothing ("") where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        if not strict:
            return ""
        raise UserError(f"{key}: not UTF-8 at byte {error.start}, got {path}; UTF-8 text") from error
    except OSError as error:
        unreadable(error, key)


def unreadable(error: OSError, key: str = "data.source") -> NoReturn:
    """Raises the StorageError of a file or folder that can't be read."""
    raise StorageError(
        f"{key}: can't be read ({error.strerror}), got {error.filename}; files that this user may read"
    ) from error
