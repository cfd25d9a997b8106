"""SIGTERM and SIGINT ask a run to stop: it ends its step, saves, and exits with code 75."""

import signal
from types import FrameType
from typing import Any

EXIT_STOPPED = 75  # a signal came and what was done is saved: run me again
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal came while there was nothing to save. Like KeyboardInterrupt no Exception, which somebody may catch."""


class StopRequest:
    """While it is entered, `received` names the first signal that came, or is None; those after it change nothing, also
    when it is left.

    Args:
        at_once: the first signal also raises Stopped, wherever the program is, until `only_note`
    """

    def __init__(self, at_once: bool = False) -> None:
        self.received: str | None = None
        self._at_once = at_once
        self._over = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self.received or self._over else handler)

    def only_note(self) -> None:
        """From here on there is something to save. Raises Stopped for a signal whose own one was lost on its way: code
        that C calls back can't raise."""
        self._at_once = False
        if self.received:
            raise Stopped(self.received)

    def ignore_more(self) -> None:
        """The program ends, for a signal that came to another process perhaps: no further one changes how."""
        self._over = True

    def asked(self) -> str | None:
        """What ends the run with this step; to be asked once a step."""
        return self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            if self._at_once:
                raise Stopped(self.received)
