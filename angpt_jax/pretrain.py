"""The main job: pretrain, evaluate, checkpoint, resume."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import jax

from angpt_jax import cli, dry_run, experiment, flops, rules, run_dir, sharding
from angpt_jax.arch import Arch, Sizes
from angpt_jax.checkpoint import Checkpoints
from angpt_jax.config import Config
from angpt_jax.data import pipeline
from angpt_jax.data.tokens import Fingerprint, TokenData, cache_root, load_tokens
from angpt_jax.errors import UserError
from angpt_jax.evaluate import Evaluation, evaluate, make_window_nats
from angpt_jax.experiment import Experiment
from angpt_jax.files import write_whole
from angpt_jax.loop import StepReporter, run_steps
from angpt_jax.metrics import MetricsWriter
from angpt_jax.progress import ProgressReport
from angpt_jax.step import Batch, TrainState
from angpt_jax.stopping import StopRequest

EXIT_STOPPED = 75  # a signal came and a checkpoint was written: run me again


@dataclass(frozen=True)
class Job:
    """A run that nothing speaks against: its resolved config and all that was made from it."""

    config: Config
    arch: Arch
    sizes: Sizes
    built: Experiment
    tokens: TokenData
    directory: Path

    @property
    def last_step(self) -> int:
        return self.config.run.stop_at_step or self.config.run.steps

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.model.context

    @cached_property
    def data_fingerprint(self) -> Fingerprint:
        """What decides which tokens a step sees."""
        data = self.config.data
        return pipeline.pipeline_fingerprint(self.tokens, self.config.model.context, data.batch_size, data.shuffle_seed)


def pretrain(config: Config, name: str) -> int:
    """Trains or continues the run of `config`; returns the exit code. `name` names the default run directory."""
    job = prepare(config, name)
    if config.dry_run:
        print(dry_run.describe(job.config, job.arch, job.sizes, job.built))
        return 0
    run_dir.make(job.directory)
    run = job.config.run
    folder = job.directory / "checkpoints"
    with StopRequest() as stop, Checkpoints(folder, run.keep_latest, run.keep_every_steps) as checkpoints:
        state, batches = start(job, checkpoints)
        with closing(batches):
            if int(state.step) >= job.last_step:
                print(f"{job.directory} is at step {int(state.step)} already: nothing to train")
                return 0
            run_dir.record(job.directory, job.config)
            stopped_by = run_job(job, state, batches, checkpoints, stop)
    return EXIT_STOPPED if stopped_by.startswith("SIG") else 0


def prepare(config: Config, name: str) -> Job:
    """Checks what needs JAX or the data, then reads the tokens and builds. Writes nothing but the token cache.

    The rules of `rules.check(config)` are taken to hold.
    """
    config, arch, sizes = experiment.resolved(config)
    cli.raise_problems(rules.check(config, devices=jax.device_count()))
    directory = run_dir.locate(config, name)
    run_dir.check(directory, config)
    tokens = load_tokens(config.data, config.model.vocab)
    pipeline.check_length(tokens, config.model.context, config.data.source)
    jax.config.update("jax_compilation_cache_dir", str(cache_root(config.data.cache_dir) / "xla"))
    return Job(config, arch, sizes, experiment.build(config, arch, sizes), tokens, directory)


def start(job: Job, checkpoints: Checkpoints) -> tuple[TrainState, grain.DatasetIterator]:
    """State and batches at the newest checkpoint, or at step 0."""
    config, built, train_tokens = job.config, job.built, job.tokens.train
    batches = pipeline.train_batches(
        train_tokens,
        job.tokens.tokenizer.end_of_document,
        config.model.context,
        config.data.batch_size,
        config.data.shuffle_seed,
        jax.process_index(),
        jax.process_count(),
    )
    print(f"{job.arch.name}: {flops.parameter_count(built.abstract.params):,} parameters")
    print(f"{train_tokens.count:,} training tokens; {jax.device_count()} × {jax.devices()[0].device_kind}")
    step = checkpoints.latest_step()
    if step is None:
        if config.run.resume == "must":
            raise UserError(f"run.resume: must, but {job.directory} has no checkpoint; use auto to start at step 0")
        return experiment.initial_state(built, config), batches
    state, data = checkpoints.restore(step, built.abstract)
    fingerprint = job.data_fingerprint
    if changed := [name for name in fingerprint if data["fingerprint"].get(name) != fingerprint[name]]:
        raise UserError(
            f"data.source: the data of {job.directory} changed ({', '.join(changed)}), got {config.data.source!r}; "
            "bring the old data back, or use another --run.dir"
        )
    batches.set_state(data["iterator"])
    print(f"resumed at step {step} from {job.directory}")
    return state, batches


def run_job(
    job: Job, state: TrainState, batches: grain.DatasetIterator, checkpoints: Checkpoints, stop: StopRequest
) -> str:
    """Compiles, trains, evaluates, saves; writes the summary; returns what ended it."""
    first_step, config = int(state.step), job.config
    put = sharding.batch_putter(job.built.mesh)
    began = time.perf_counter()
    train_step = compiled_steps(job)
    compile_seconds = time.perf_counter() - began
    window_nats = make_window_nats(job.built.model)
    validation = pipeline.validation_windows(
        job.tokens.validation, job.tokens.tokenizer, config.model.context, config.data.validation_tokens
    )
    evaluations: list[Evaluation] = []

    def evaluate_state(step: int, state: TrainState) -> None:
        result = evaluate(window_nats, state.params, validation, config.data.batch_size, put)
        evaluations.append(result)
        record = {"step": step, "tokens": step * job.tokens_per_step}
        writer.write(record | {"val_loss": result.loss, "val_bits_per_byte": result.bits_per_byte})
        progress.note(f"step {step}  validation {result.loss:.4f} nats/token, {result.bits_per_byte:.4f} bits/byte")

    def save(step: int, state: TrainState) -> None:
        checkpoints.save(step, state, {"iterator": batches.get_state(), "fingerprint": job.data_fingerprint})

    def emit(record: dict[str, Any]) -> None:
        writer.write(record)
        progress.update(record)

    reporter = StepReporter(
        emit,
        lambda record: writer.write_instruments(record),
        config.run.log_every_steps,
        job.tokens_per_step,
        job.built.flops_per_token(config.model.context),
    )
    with MetricsWriter(job.directory, first_step) as writer, ProgressReport(first_step, job.last_step) as progress:
        state, stopped_by = run_steps(
            state,
            job.last_step,
            config.run,
            train_step=train_step,
            next_batch=lambda: put(next(batches)),
            evaluate=evaluate_state,
            save=save,
            reporter=reporter,
            stop=stop,
        )
    step_seconds = reporter.median_step_seconds()
    ending = {"compile_seconds": compile_seconds, "stopped_by": stopped_by}
    summary = summarize(job, int(state.step), evaluations[-1] if evaluations else None, step_seconds) | ending
    write_whole(job.directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return stopped_by


def compiled_steps(job: Job) -> Callable[[int, TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """number of the step, state, batch → state and metrics, with instruments where they are due."""
    plain, every = experiment.compiled_step(job.built, job.config), job.config.run.instrument_every_steps
    if every is None:
        return lambda step, state, batch: plain(state, batch)
    instrumented = experiment.compiled_step(job.built, job.config, instruments=True)
    return lambda step, state, batch: (plain if step % every else instrumented)(state, batch)


def summarize(job: Job, step: int, evaluation: Evaluation | None, step_seconds: float) -> dict[str, Any]:
    """What `summary.json` says of the model and the training so far; null where a stop came before an evaluation."""
    return {
        "arch": job.arch.name,
        "parameters": flops.parameter_count(job.built.abstract.params),
        "steps": step,
        "tokens": step * job.tokens_per_step,
        "val_loss": evaluation and evaluation.loss,
        "val_bits_per_byte": evaluation and evaluation.bits_per_byte,
        "median_step_seconds": step_seconds,
        "tokens_per_second": job.tokens_per_step / step_seconds,
    }
