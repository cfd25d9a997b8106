"""The training loop: the device runs step n while the host reports step n−1."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from angpt_jax import flops
from angpt_jax.config import RunConfig
from angpt_jax.errors import DivergedError
from angpt_jax.metrics import Record
from angpt_jax.step import Batch, TrainState

WAITING = 0.05  # share of a step that data may take before it is worth a warning


@dataclass
class StepReporter:
    """Turns the device's metrics of a finished step into a record, timed since the step before.

    Args:
        emit: takes each record that is due
        emit_instruments: takes the record of each step that had instruments
        warn: takes a line about each step that was skipped
        log_every_steps: steps between two records
        max_bad_steps: steps skipped in a row that end the run
        tokens_per_step: tokens of one batch over all devices
        flops_per_token: analytic, forward and backward
    """

    emit: Callable[[Record], None]
    emit_instruments: Callable[[Record], None]
    warn: Callable[[str], None]
    log_every_steps: int
    max_bad_steps: int
    tokens_per_step: int
    flops_per_token: int
    step_seconds: list[float] = field(default_factory=list)
    skipped_in_a_row: int = 0
    _mark: float = field(default_factory=time.perf_counter)
    _steps: int = 0
    _data_wait: float = 0.0

    def waited_for_data(self, seconds: float) -> None:
        self._data_wait += seconds

    def restart_clock(self) -> None:
        """Forgets the time since the last step: it went to an evaluation or a checkpoint."""
        self._mark = time.perf_counter()

    def step_done(self, step: int, metrics: dict[str, Any], last: bool = False) -> None:
        """Waits for the metrics of `step`; raises if too many were not finite; emits a record where one is due."""
        values = jax.tree.map(lambda value: value.tolist(), jax.device_get(metrics))
        instruments = values.pop("instruments", None)
        self.skipped_in_a_row = values["skipped_in_a_row"]
        if self.skipped_in_a_row:
            self._note_skipped(step, values)
        now = time.perf_counter()
        self.step_seconds.append(now - self._mark)
        self._mark = now
        self._steps += 1
        record = {"step": step, "tokens": step * self.tokens_per_step}
        if instruments:
            self.emit_instruments(record | instruments)
        if step % self.log_every_steps == 0 or last:
            record |= {name: values[name] for name in ("loss", "lr", "grad_norm")}
            self.emit(record | self._speed() | {"skipped_steps": values["skipped_steps"]})

    def _note_skipped(self, step: int, values: dict[str, Any]) -> None:
        bad = next(f"{name} is {values[name]}" for name in ("loss", "grad_norm") if not math.isfinite(values[name]))
        if self.skipped_in_a_row >= self.max_bad_steps:
            raise DivergedError(
                f"optim.max_bad_steps: training diverged, {bad} at step {step}, got {self.skipped_in_a_row} such steps "
                "in a row; see the data of these steps, or lower optim.peak_lr in another run.dir. The last checkpoint "
                "is from before"
            )
        self.warn(f"step {step}: {bad}, skipped; {self.skipped_in_a_row} in a row, {self.max_bad_steps} end the run")

    def _speed(self) -> Record:
        """Means over the steps since the last record."""
        seconds = sum(self.step_seconds[-self._steps :]) / self._steps
        tflops = self.flops_per_token * self.tokens_per_step / seconds / 1e12 / jax.device_count()
        wait = self._data_wait / self._steps
        self._steps, self._data_wait = 0, 0.0
        return {
            "step_seconds": seconds,
            "data_wait_seconds": wait,
            "tokens_per_second": self.tokens_per_step / seconds,
            "tflops_per_device": tflops,
            "mfu": flops.utilization(tflops),
        }

    def median_step_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None


@dataclass
class InputBound:
    """Says once, with the remedy, that steps wait for data for more than WAITING of their time.

    Args:
        workers: processes that read ahead
    """

    workers: int
    _said: bool = False

    def of(self, record: Record) -> str | None:
        share = record["data_wait_seconds"] / record["step_seconds"]
        if self._said or share <= WAITING or math.isnan(share):
            return None
        self._said = True
        remedy = f"--data.workers {2 * self.workers or 2}, or tokens made by angpt_jax.prepare on a faster disk"
        return f"step {record['step']}: {share:.0%} of a step is waiting for data; try {remedy}"


def run_steps(
    state: TrainState,
    run: RunConfig,
    *,
    train_step: Callable[[int, TrainState, Batch], tuple[TrainState, dict[str, Any]]],
    next_batch: Callable[[], Batch],
    evaluate: Callable[[int, TrainState], None],
    save: Callable[[int, TrainState], None],
    reporter: StepReporter,
    stop: Callable[[], str | None],
) -> tuple[TrainState, str]:
    """Trains up to the last step or a stop request; the state, and what ended it: steps, stop_at_step or a signal.

    The last step is always evaluated and saved; where the state is there already, it is evaluated. `stop`, asked before
    the first step and at each, names the signal that ends the run there; it saves without evaluating, and so it does
    where an evaluation was cut. While steps are skipped no save is due, so that the kept ones stay those of good steps:
    it comes after the next good one.
    """
    first_step, last_step = int(state.step), run.last_step
    if (stopped_by := stop()) is not None:
        save(first_step, state)
        return state, stopped_by
    if first_step >= last_step:
        evaluate(first_step, state)
    owed = False
    reporter.restart_clock()
    pending: tuple[int, dict[str, Any]] | None = None
    for step in range(first_step + 1, last_step + 1):
        asked = time.perf_counter()
        batch = next_batch()
        reporter.waited_for_data(time.perf_counter() - asked)
        state, metrics = train_step(step, state, batch)
        if pending:
            reporter.step_done(*pending)
        pending = (step, metrics)
        last, stopped_by = step == last_step, stop()
        evaluation_due = (last or step % run.eval_every_steps == 0) and stopped_by is None
        owed = owed or step % run.checkpoint_every_steps == 0
        if evaluation_due or owed or last or stopped_by is not None:
            reporter.step_done(step, metrics, last)
            pending = None
            if evaluation_due:
                evaluate(step, state)
                stopped_by = stop()
            if last or stopped_by is not None or (owed and not reporter.skipped_in_a_row):
                save(step, state)
                owed = False
            reporter.restart_clock()
        if stopped_by is not None:
            return state, stopped_by
    return state, "steps" if last_step == run.steps else "stop_at_step"
