"""The main job: pretrain, evaluate, checkpoint, resume."""

import json
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import grain
import jax

from angpt_jax import dry_run, experiment, flops, init_from, placement, run_dir, run_lock, sharding
from angpt_jax.checkpoint import Checkpoints
from angpt_jax.config import Config
from angpt_jax.data import pipeline
from angpt_jax.errors import DivergedError, UserError
from angpt_jax.evaluation import Evaluation, Evaluator, as_record, make_window_nats
from angpt_jax.files import write_whole
from angpt_jax.footprint import whole_bytes_of
from angpt_jax.job import Job, assemble
from angpt_jax.loop import InputBound, StepReporter, run_steps
from angpt_jax.metrics import MetricsWriter, NoMetrics
from angpt_jax.processes import distributed
from angpt_jax.processes.group import AgreedStop
from angpt_jax.progress import ProgressReport
from angpt_jax.restore import newest_valid
from angpt_jax.step import Batch, TrainState, is_finite
from angpt_jax.stopping import EXIT_STOPPED, StopRequest


def pretrain(config: Config, name: str, request: StopRequest) -> int:
    """Trains or continues the run of `config`; returns the exit code. `name` names the default run directory; `request`
    is what stops a single process, and is entered."""
    with (
        distributed.joined(config.distributed) as group,
        nullcontext(request) if group.is_alone else AgreedStop() as stop,
    ):
        job = assemble(config, name, group)
        if config.dry_run:
            group.say(dry_run.describe(job.config, job.arch, job.sizes, job.built))
            return 0
        params = init_from.read(job.config, job.directory, job.built.abstract.params, group)
        state_bytes = whole_bytes_of(job.built.abstract)
        group.in_turn("run.dir can be written", partial(run_dir.preflight, job.directory, state_bytes))
        with run_lock.locked(job.directory, group):
            return train(job, stop, params)


def train(job: Job, stop: StopRequest | AgreedStop, params: Any = None) -> int:
    """Trains in the run directory of the job, which is locked, and starts a new run from `params`, if there are some;
    returns the exit code."""
    run, group = job.config.run, job.group
    group.agreed("run.dir", partial(run_dir.check, job.directory, job.config) if group.is_first else lambda: None)
    stop.only_note()
    with run_dir.storage(job.directory):
        state, batches = start(job, params)
        folder = run_dir.checkpoints_of(job.directory)
        with closing(batches), Checkpoints(folder, run.keep_latest, run.keep_every_steps, group) as checkpoints:
            if min(int(state.step), run_dir.summarized_step(job.directory)) >= run.last_step:
                group.say(f"{job.directory} is at step {int(state.step)} already: nothing to train")
                return 0
            if group.is_first:
                run_dir.record(job.directory, init_from.recorded(job.config, job.directory), job.tokens.tokenizer.json)

            def asked() -> str | None:
                checkpoints.check()
                return stop.asked()

            stopped_by = run_job(job, state, batches, checkpoints, asked)
    return EXIT_STOPPED if stopped_by.startswith("SIG") else 0


def start(job: Job, params: Any = None) -> tuple[TrainState, grain.DatasetIterator]:
    """State and batches at the newest checkpoint that is whole, or at step 0, of `params` if there are some."""
    config, built, group = job.config, job.built, job.group
    count = sum(part.stream.count for part in job.tokens.train)
    group.say(f"{job.arch.name}: {flops.parameter_count(built.abstract.params):,} parameters")
    group.say(f"{count:,} training tokens; {group.banner()}")
    for line in placement.at_start(built, config.model.attention):
        group.say(line)
    found = newest_valid(run_dir.checkpoints_of(job.directory), built.abstract, group)
    if found is None:
        if config.run.resume == "must":
            raise UserError(f"run.resume: must, but {job.directory} has no checkpoint; use auto to start at step 0")
        step = 0
        state = experiment.initial_state(built, config) if params is None else experiment.state_of(built, params)
    else:
        step, state = found.step, found.state
        job.check_data(found.data["fingerprint"])
        group.say(f"resumed at step {step} from {job.directory}")
    jax.block_until_ready(state)
    group.barrier("state is there")
    part, parts = sharding.rows_of_process(built.layout, config.data.batch_size)
    batches = pipeline.train_batches(
        job.tokens.train,
        job.order,
        start=step,
        process_index=part,
        process_count=parts,
        workers=config.data.workers,
    )
    return state, batches


def run_job(
    job: Job,
    state: TrainState,
    batches: grain.DatasetIterator,
    checkpoints: Checkpoints,
    stop: Callable[[], str | None],
) -> str:
    """Compiles, trains, evaluates, saves; writes the summary; returns what ended it."""
    first_step, config, group = int(state.step), job.config, job.group
    put = sharding.batch_putter(job.built.layout, config.data.batch_size)
    began = time.perf_counter()
    train_step = compiled_steps(job)
    compile_seconds = time.perf_counter() - began
    evaluator = make_evaluator(job, put)
    group.barrier("first step")

    def evaluate_state(step: int, state: TrainState) -> None:
        group.barrier(f"evaluation at step {step}")
        results = evaluator.evaluate(state.params, stop)
        if results:
            writer.write({"step": step, "tokens": step * job.tokens_per_step} | as_record(results))
        for name, result in results.items():
            progress.note(f"step {step}  {name} {result.loss:.4f} nats/token, {result.bits_per_byte:.4f} bits/byte")
        group.barrier(f"evaluated at step {step}")

    def save(step: int, state: TrainState) -> None:
        group.barrier(f"save at step {step}")
        if not is_finite(state):
            raise DivergedError(
                f"optim.peak_lr: training diverged, parameters or moments are not finite after step {step}, got "
                f"{config.optim.peak_lr}; lower it in another run.dir. The last checkpoint is from before"
            )
        checkpoints.save(step, state, {"fingerprint": job.data_fingerprint})

    warning = InputBound(config.data.workers)

    def emit(record: dict[str, Any]) -> None:
        writer.write(record)
        progress.update(record)
        if said := warning.of(record):
            progress.note(said)

    reporter = StepReporter(
        emit,
        lambda record: writer.write_instruments(record),
        lambda text: progress.note(text),
        config.run.log_every_steps,
        config.optim.max_bad_steps,
        job.tokens_per_step,
        job.built.flops_per_token(config.model.context),
    )
    on_devices = sharding.ahead(batches, put)
    with (
        MetricsWriter(job.directory, first_step) if group.is_first else NoMetrics() as writer,
        ProgressReport(first_step, config.run.last_step, quiet=not group.is_first) as progress,
    ):
        state, stopped_by = run_steps(
            state,
            config.run,
            train_step=train_step,
            next_batch=lambda: next(on_devices),
            evaluate=evaluate_state,
            save=save,
            reporter=reporter,
            stop=stop,
        )
    step_seconds = reporter.median_step_seconds()
    ending = {"compile_seconds": compile_seconds, "stopped_by": stopped_by}
    summary = summarize(job, int(state.step), evaluator.last, step_seconds) | ending
    if group.is_first:
        write_whole(job.directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return stopped_by


def make_evaluator(job: Job, put: Callable[[Any], Any]) -> Evaluator:
    """Of the validation sets of the job."""
    data, context = job.config.data, job.config.model.context
    sets = {
        name: pipeline.validation_windows(
            stream, job.tokens.tokenizer, context, data.validation_tokens, f"validation set {name}"
        )
        for name, stream in job.tokens.validation.items()
    }
    return Evaluator(make_window_nats(job.built.model), sets, data.batch_size, put)


def compiled_steps(job: Job) -> Callable[[int, TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """number of the step, state, batch → state and metrics, with instruments where they are due."""
    plain, every = experiment.compiled_step(job.built, job.config), job.config.run.instrument_every_steps
    if every is None:
        return lambda step, state, batch: plain(state, batch)
    instrumented = experiment.compiled_step(job.built, job.config, instruments=True)
    return lambda step, state, batch: (plain if step % every else instrumented)(state, batch)


def summarize(job: Job, step: int, evaluation: Evaluation | None, step_seconds: float | None) -> dict[str, Any]:
    """What `summary.json` says of the model and the training so far; null where a stop came before an evaluation, or a
    step."""
    return {
        "arch": job.arch.name,
        "parameters": flops.parameter_count(job.built.abstract.params),
        "steps": step,
        "tokens": step * job.tokens_per_step,
        "val_loss": evaluation and evaluation.loss,
        "val_bits_per_byte": evaluation and evaluation.bits_per_byte,
        "median_step_seconds": step_seconds,
        "tokens_per_second": step_seconds and job.tokens_per_step / step_seconds,
    }
