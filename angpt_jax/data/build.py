"""Units to shards over several processes; which of them made a unit leaves no trace, and finished units stay."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from angpt_jax.data.work import Done, Plan, Stopped, make, too_many
from angpt_jax.errors import StorageError, UserError

_POLL_SECONDS = 0.05
Report = Callable[[int, int], None]
Asked = Callable[[], bool]


def build(plan: Plan, folder: Path, done: dict[int, Done], workers: int, report: Report, stop: Asked) -> bool:
    """Writes the shards of all units that are not in `done` into `folder`, and adds them there.

    `report` hears the number of each and its bytes of text. False if it was asked to `stop` before all were done.
    """
    missing = [number for number in range(len(plan.units)) if number not in done]
    here = workers == 1 or len(missing) <= 1
    if workers == 1 or not here:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    run = _run_here(plan, folder, missing, stop) if here else _run_workers(plan, folder, missing, workers, stop)
    try:
        with closing(run):
            for number, unit_done in run:
                done[number] = unit_done
                _check_bad(done.values(), plan.skip_bad_lines)
                report(number, unit_done.text_bytes)
    except Stopped:
        return False
    except BrokenProcessPool as error:
        if stop():  # the signal reached the workers, too
            return False
        raise StorageError(
            f"workers: a worker process died (out of memory?), got {workers}; fewer workers or a smaller unit_mb; "
            "what is finished stays, run again"
        ) from error
    return True


def _check_bad(done: Iterable[Done], most: int) -> None:
    bad = [unit for unit in done if unit.bad]
    if (count := sum(unit.bad for unit in bad)) > most:
        raise UserError(bad[-1].first_bad, *too_many(count, most))


def _run_here(plan: Plan, folder: Path, missing: list[int], stop: Asked) -> Generator[tuple[int, Done], None, None]:
    for number in missing:
        yield number, make(plan, folder, number, stop)


def _run_workers(
    plan: Plan, folder: Path, missing: list[int], workers: int, stop: Asked
) -> Generator[tuple[int, Done], None, None]:
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    with ProcessPoolExecutor(
        min(workers, len(missing)), context, initializer=_start_worker, initargs=(plan, folder, stopping)
    ) as pool:
        numbers: dict[Future, int] = {pool.submit(_work, number): number for number in missing}
        try:
            waiting = set(numbers)
            while waiting:
                finished, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                for future in sorted(finished, key=lambda future: numbers[future]):
                    yield numbers[future], _result(future)
                if stop():
                    raise Stopped
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)


def _result(future: "Future[Done | tuple[type[UserError], tuple[str, ...]] | None]") -> Done:
    result = future.result()
    if result is None:
        raise Stopped
    if isinstance(result, Done):
        return result
    kind, problems = result
    raise kind(*problems)


_worker: dict[str, Any] = {}  # of this process, if it is one


def _start_worker(plan: Plan, folder: Path, stopping: Event) -> None:
    _worker.update(plan=plan, folder=folder, stopping=stopping)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent says when to stop
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(number: int) -> Done | tuple[type[UserError], tuple[str, ...]] | None:
    """An error comes back as a value, because a UserError does not survive a pickle."""
    try:
        return make(_worker["plan"], _worker["folder"], number, _worker["stopping"].is_set)
    except UserError as error:
        return type(error), error.problems
    except Stopped:
        return None
