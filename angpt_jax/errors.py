"""The errors that are the user's to mend; every command turns them into lines on stderr and an exit code.

Exit codes: 0 finished; 1 another process of the run is gone; 2 bad input, nothing touched; 3 diverged; 4 storage that
is needed can't be read or written; 75 stopped on request with a checkpoint written. Anything else is a bug.
"""

import re
import sys

_USER_OF_ADDRESS = re.compile(r"(:/{1,2})[^/\s]*@")  # one slash is what a Path makes of two


class UserError(ValueError):
    """Bad input: `problems` holds one line each, `<field>: <what is wrong>, got <value>; <what is allowed>`."""

    exit_code = 2

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class DivergedError(UserError):
    """The loss or the gradient stopped being finite."""

    exit_code = 3


class StorageError(UserError):
    """A file that the run needs can't be read or written."""

    exit_code = 4


class PeerError(UserError):
    """Another process of the run is gone, or too late."""

    exit_code = 1


def print_problems(*problems: str) -> None:
    """One line on stderr for each, of what ends the run."""
    _print("error", problems)


def warn(*problems: str) -> None:
    """One line on stderr for each, of what was wrong but does not end the run."""
    _print("warning", problems)


def _print(kind: str, problems: tuple[str, ...]) -> None:
    """Without what a terminal would obey, and without the password of an address."""
    for problem in problems:
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in problem)
        print(f"angpt_jax: {kind}: " + _USER_OF_ADDRESS.sub(r"\1***@", line), file=sys.stderr)
