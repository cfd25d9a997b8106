"""Runs `train` in several processes on this machine, as one run: each with its own virtual devices, joined by gloo."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import QUICK_COMPILES, Outcome, one_device

from angpt_jax import metrics

TRAIN = "\nimport runpy; runpy.run_module('angpt_jax.train', run_name='__main__')"
SECONDS = 100  # after which a process that is still there is killed, and the test fails


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(devices: int) -> dict[str, str]:
    """Of a process with virtual devices, which compiles as little as can be."""
    return one_device() | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILES}"}


class Processes:
    """Processes of one run that were started, some of them perhaps."""

    def __init__(self, port: int):
        self.port = port
        self._started: dict[int, subprocess.Popen] = {}
        self._logs: dict[int, Path] = {}

    def start(
        self, folder: Path, process: int, processes: int, devices: int, *flags: str, before: str | None = None
    ) -> None:
        """Starts one of them in `folder`; `before` is a program that runs in it first."""
        self._logs[process] = folder / f"log-{self.port}-{process}"
        address = ["--distributed.coordinator", f"127.0.0.1:{self.port}", "--distributed.processes", str(processes)]
        alone = processes == 1
        with self._logs[process].open("w") as log, self._errors(process).open("w") as errors:
            self._started[process] = subprocess.Popen(
                [sys.executable, *(["-m", "angpt_jax.train"] if before is None else ["-c", before + TRAIN])]
                + ["--config", "tiny.yaml", *flags]
                + ([] if alone else [*address, "--distributed.process", str(process)]),
                cwd=folder,
                env=environment(devices),
                stdout=log,
                stderr=errors,
            )

    def _errors(self, process: int) -> Path:
        return self._logs[process].with_suffix(".err")

    def signal(self, process: int, number: signal.Signals) -> None:
        self._started[process].send_signal(number)

    def wait_for_step(self, run: Path, step: int) -> None:
        """Until it is in the metrics."""
        deadline = time.monotonic() + SECONDS
        while not any(record["step"] >= step for record in metrics.read(run / "metrics.jsonl")):
            assert time.monotonic() < deadline, self.outcomes(0)
            assert all(process.poll() is None for process in self._started.values()), self.outcomes(0)
            time.sleep(0.1)

    def outcomes(self, seconds: float = SECONDS) -> list[Outcome]:
        """Of all that were started, in their order, once they have ended."""
        deadline = time.monotonic() + seconds
        codes = {}
        for number, process in sorted(self._started.items()):
            try:
                codes[number] = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[number] = -1000
        return [
            Outcome(code, self._logs[number].read_text(), self._errors(number).read_text())
            for number, code in codes.items()
        ]

    def listening(self, process: int) -> set[str]:
        """Addresses that a process listens on, as /proc/net/tcp writes them."""
        pid = self._started[process].pid
        fds = Path(f"/proc/{pid}/fd")
        links = [os.readlink(fd) for fd in fds.iterdir() if fd.exists() or fd.is_symlink()]
        inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    found.add(words[1].partition(":")[0])
        return found

    def kill(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()


@contextmanager
def running(folder: Path, processes: int, devices: int, *flags: str) -> Iterator[Processes]:
    """All processes of a run, until the block ends."""
    started = Processes(free_port())
    try:
        for process in range(processes):
            started.start(folder, process, processes, devices, *flags)
        yield started
    finally:
        started.kill()


def run_all(folder: Path, processes: int, devices: int, *flags: str) -> list[Outcome]:
    with running(folder, processes, devices, *flags) as started:
        return started.outcomes()


def errors(outcome: Outcome) -> list[str]:
    """The lines that the program itself wrote."""
    start = "angpt_jax: error: "
    return [line.removeprefix(start) for line in outcome.err.splitlines() if line.startswith(start)]
