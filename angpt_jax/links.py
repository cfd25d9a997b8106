"""Symbolic links in folders that may come from strangers: what is written there must not end up elsewhere."""

import os
from pathlib import Path


def leading_out(folder: Path) -> list[str]:
    """Paths, relative to `folder`, of the links below it that lead out of it; `folder` itself may be one."""
    root = folder.resolve()
    found = []
    for place, folders, files in os.walk(root):
        links = [Path(place, name) for name in (*folders, *files) if os.path.islink(os.path.join(place, name))]
        found += [str(link.relative_to(root)) for link in links if not _target(link).is_relative_to(root)]
    return sorted(found)


def _target(link: Path) -> Path:
    """Where it leads; of a loop, the root of the file system."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):
        return Path("/")
