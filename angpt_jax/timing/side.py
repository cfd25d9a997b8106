"""One side of a comparison of speed: a process of its own, which measures when it is asked to."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from angpt_jax.errors import PeerError, UserError

PROMPT = 16  # tokens that stand before those that are decoded
GONE_SECONDS = 30.0  # that a process which was told to end may take


@dataclass(frozen=True)
class Request:
    """What a process is to measure.

    Args:
        words: flags of `train` that say what it runs
        measures: names of angpt_jax.timing.measures
        decode_batches: rows that are decoded at a time, one measure each
        decode_tokens: tokens that a row gets
        seconds: at least so long is a round
        keep_compiled: whether programs may be those that were compiled before
    """

    words: Sequence[str]
    measures: Sequence[str]
    decode_batches: Sequence[int]
    decode_tokens: int
    seconds: float
    keep_compiled: bool = False


class Side:
    """The process of a request, which compiles first, while others may begin. It ends when it is left."""

    def __init__(self, name: str, request: Request) -> None:
        self.name = name
        # A session of its own: a Ctrl-C reaches this process alone, which ends the other.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "angpt_jax.timing.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ask(asdict(request))

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What it found while it compiled: waits for that."""
        return self._answer()

    @property
    def names(self) -> list[str]:
        """What it can measure."""
        return self.facts["measures"]

    def round(self, measure: str) -> dict[str, float]:
        """One round of a measure: `seconds` of one of its units, and what else there is to say of it."""
        self._ask({"measure": measure})
        return self._answer()

    def _ask(self, question: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, and so is its answer
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise PeerError(f"{self.name}: its process ended while it measured, got exit code {code}; see above")
        answer = json.loads(line)
        if "problems" in answer:
            raise UserError(*(f"{self.name}: {problem}" for problem in answer["problems"]))
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if error is not None:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # no more questions: it ends
        try:
            self._process.wait(GONE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
