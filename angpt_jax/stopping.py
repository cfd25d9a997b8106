"""SIGTERM and SIGINT ask a run to stop: it ends its step, saves, and exits with code 75."""

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While it is entered, `received` names the signal that came, or is None."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def at(self, step: int) -> str | None:
        """What ends the run with this step; to be asked once a step."""
        return self.received
