"""Files that a kill leaves whole."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file in one rename, so that a kill leaves the old one or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
