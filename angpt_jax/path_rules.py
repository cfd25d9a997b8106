"""What a path that somebody gives must satisfy before anything looks there; one line for each problem."""

from collections.abc import Iterator
from pathlib import Path

from angpt_jax.schema import show

LONGEST_PART = 255  # bytes of one name, what file systems take
LONGEST = 3000  # bytes of a whole path; Linux takes 4095, and names are appended


def of_path(key: str, path: str | None, longest_part: int = LONGEST_PART) -> Iterator[str]:
    """Problems of the text of `path`; none where it is None."""
    if path is None:
        return
    if not path.isprintable():
        yield f"{key}: must be printable text (no newline or NUL), got {show(path)}"
    if "://" in path:
        near = "mount the bucket, or download, and give its path"
        yield f"{key}: must be a path of a file system, got {show(path)}; {near}"
    if any(len(_encoded(part)) > longest_part for part in path.split("/")):
        yield f"{key}: must have no part longer than {longest_part} bytes, got {show(path)}"
    elif len(_encoded(path)) > LONGEST:
        yield f"{key}: must not be longer than {LONGEST} bytes, got {show(path)}"


def of_output(key: str, path: str | None, new: bool = False) -> Iterator[str]:
    """What speaks against writing a file there; `new`: also that there is one. None where it is None."""
    if path is None:
        return
    if not path or not path.isprintable():
        yield f"{key}: must be the path of a file, got {show(path)}"
        return
    too_long = list(of_path(key, path))
    if too_long:
        yield from too_long
    elif Path(path).is_dir():
        yield f"{key}: is a folder, got {show(path)}; name a file"
    elif not Path(path).parent.is_dir():
        yield f"{key}: its folder is not there, got {show(path)}; make it first"
    elif new and (Path(path).exists() or Path(path).is_symlink()):
        yield f"{key}: is there already, got {show(path)}; name a new file"


def of_page(key: str, folder: str, page: str) -> Iterator[str]:
    """What speaks against writing `page` and pictures to a folder: it may be new, empty, or hold an older page."""
    path = Path(folder)
    try:
        if path.exists() and not path.is_dir():
            yield f"{key}: is a file, got {show(folder)}; name a folder"
        elif path.is_dir() and not (path / page).is_file() and any(path.iterdir()):
            yield f"{key}: is a folder with other things (no {page}), got {show(folder)}; name a new or empty one"
    except OSError as error:
        yield f"{key}: can't be read ({error.strerror}), got {show(folder)}"


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
