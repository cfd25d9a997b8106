"""What a person sees while data are prepared: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 10.0


class UnitProgress:
    """`update` after each unit, of which `sizes` are known and some are done already."""

    def __init__(self, sizes: Sequence[int], done: Collection[int]):
        self._sizes, self._done, self._text = sizes, set(done), 0
        self._started = self._last = time.monotonic()
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} MB"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("prepare", total=sum(sizes) / 1e6, numbers=self._numbers)
        self._bar.update(self._task, completed=self._read)

    def __enter__(self) -> "UnitProgress":
        self._bar.start()
        if self._done:
            self._console.print(f"{len(self._done)} of {len(self._sizes)} units are done already", markup=False)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()

    def update(self, number: int, text_bytes: int) -> None:
        self._done.add(number)
        self._text += text_bytes
        self._bar.update(self._task, completed=self._read, numbers=self._numbers)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last >= _LINE_SECONDS:
            self._last = now
            total = sum(self._sizes) / 1e6
            self._console.print(f"{self._read:,.0f}/{total:,.0f} MB read, {self._numbers}", markup=False)

    def rate(self) -> str:
        """Text of this run, and how fast it went."""
        seconds = time.monotonic() - self._started
        return f"{self._text / 1e6:,.1f} MB of text in {seconds:,.1f} s ({self._text / 1e6 / seconds:,.2f} MB/s)"

    @property
    def _read(self) -> float:
        return sum(self._sizes[number] for number in self._done) / 1e6

    @property
    def _numbers(self) -> str:
        speed = self._text / 1e6 / max(time.monotonic() - self._started, 1e-9)
        return f"{len(self._done)}/{len(self._sizes)} units, {speed:,.2f} MB of text/s"
