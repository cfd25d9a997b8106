"""What a person sees while it trains: a bar on a terminal, plain lines elsewhere."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class ProgressReport:
    """`update` after each logged step, `note` for anything else worth a line. All of it unless `quiet`."""

    def __init__(self, first_step: int, last_step: int, quiet: bool = False):
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._last_step = last_step
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=last_step, completed=first_step, numbers="first steps …")

    def __enter__(self) -> "ProgressReport":
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        numbers = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._task, completed=record["step"], numbers=numbers)
        if not self._console.is_terminal:
            left = (self._last_step - record["step"]) * record["step_seconds"]
            self.note(f"step {record['step']}/{self._last_step}  {numbers}  lr {record['lr']:.2e}  {left:.0f} s left")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)
