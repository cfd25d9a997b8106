"""Packages that others take along where they are installed, and that nothing here asks of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Inside, `import package` ends as where it is not installed; one that was imported before stays."""
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    hide = package not in modules
    if hide:
        modules[package] = None
    try:
        yield
    finally:
        if hide:
            del modules[package]
