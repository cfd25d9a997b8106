"""`python -m angpt_jax.evaluate`: loss, perplexity and bits per byte of a run on named data; tasks of
lm-evaluation-harness."""

import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angpt_jax import cli, host_memory, json_output, mesh_rules, path_rules
from angpt_jax.config import FromRun, MeshConfig
from angpt_jax.errors import UserError
from angpt_jax.tables import UNKNOWN, print_table

if TYPE_CHECKING:
    from angpt_jax.data.shards import TokenStream
    from angpt_jax.evaluation import Evaluation
    from angpt_jax.harness_run import Results, Tasks
    from angpt_jax.trained import Trained

MOST_ROWS = 8  # of a device, where nothing is said; logits of 8 windows of 2048 tokens and 50,304 entries have 3.3 GB


@dataclass(frozen=True)
class EvaluateConfig:
    """How good the model of a run is: loss on named data, and tasks of lm-evaluation-harness.

    Args:
        run: where the model comes from
        sets: name and source of each set, {code: data/code}; of a folder that prepare made its held-out documents are
            read, of a text file, a folder of text files or stdlib all of the text, with the run's tokenizer; empty is
            what the run itself was evaluated on, or nothing where there are tasks in harness
        tokens: of each set, at most; null is all of it, and for the run's own sets its data.validation_tokens
        batch_size: windows that are computed at a time; null is at most 8 for each device that takes windows of its own
        fold: evaluates the plain decoder that anGPT folds into, which is the same function
        json: new file for all numbers
        harness: tasks, by their names in lm-evaluation-harness (whose data the hub of Hugging Face has) or by the path
            of a task file of yours, or of a folder of them, with local data, e.g. [arc_easy, tasks/mine.yaml]
        num_fewshot: examples in a prompt; null is what each task says, or 0
        limit: documents of each task, at most; null is all
        mesh: devices
    """

    run: FromRun = field(default_factory=FromRun)
    sets: dict[str, str] = field(default_factory=dict)
    tokens: int | None = None
    batch_size: int | None = None
    fold: bool = False
    json: str | None = None
    harness: list[str] = field(default_factory=list)
    num_fewshot: int | None = None
    limit: int | None = None
    mesh: MeshConfig = field(default_factory=MeshConfig)


def evaluate(config: EvaluateConfig, name: str) -> int:
    """Prints a table for the sets and one for the tasks; returns the exit code."""
    cli.raise_problems(check(config))
    directory = Path(config.run.dir).absolute()
    if not os.path.isfile(directory / "config.yaml"):
        raise UserError(f"run.dir: holds no run (no config.yaml), got {str(directory)!r}; train one first")
    tasks = _tasks(config)
    host_memory.keep_freed()
    from angpt_jax import run_dir, trained  # not before: JAX takes a second to load

    own_batch = run_dir.load_config(directory).data.batch_size
    model = trained.load(directory, config.mesh, config.fold)
    batch_size = _batch_size(config, own_batch, model)
    sets = _evaluate_sets(config, model, batch_size) if config.sets or not config.harness else {}
    results = _run_tasks(config, model, batch_size, tasks) if tasks else {}
    print(f"{model.model.arch.name} of step {model.step:,}, {directory}")
    _print_sets(sets)
    _print_tasks(results)
    facts = {"run": str(directory), "step": model.step, "arch": model.model.arch.name, "folded": config.fold}
    judged = {"sets": {name: _record(result) for name, result in sets.items()}, "harness": results}
    json_output.write(config.json, facts | judged)
    return 0


def check(config: EvaluateConfig) -> list[str]:
    """Problems of the values themselves."""
    problems = [
        f"{key}: must be at least {least}, got {value}"
        for key, value, least in (
            ("tokens", config.tokens, 1),
            ("batch_size", config.batch_size, 1),
            ("num_fewshot", config.num_fewshot, 0),
            ("limit", config.limit, 1),
        )
        if value is not None and value < least
    ]
    paths = ("run.dir", config.run.dir), *((f"sets.{name}", source) for name, source in config.sets.items())
    for key, path in (*paths, *(("harness", word) for word in config.harness)):
        problems += [f"{key}: must not be empty, got ''"] if path == "" else path_rules.of_path(key, path)
    for key, value in (("num_fewshot", config.num_fewshot), ("limit", config.limit)):
        if value is not None and value > 0 and not config.harness:
            problems.append(f"{key}: needs tasks, got {value} without harness; name tasks, or leave it out")
    return [*problems, *path_rules.of_output("json", config.json, new=True), *mesh_rules.of_the_mesh(config.mesh)]


def _tasks(config: EvaluateConfig) -> "Tasks | None":
    """The tasks with their data, before anything is computed."""
    if not config.harness:
        return None
    from angpt_jax import harness_run  # not before: the harness is an extra, and takes seconds to load

    return harness_run.load(config.harness, config.num_fewshot)


def _batch_size(config: EvaluateConfig, own: int, model: "Trained") -> int:
    """Rows of a batch, which the devices of the model can share; no more than training had, where nothing is said."""
    parts = model.model.how.layout.parts("batch")
    if config.batch_size is None:
        return min(-(-own // parts), MOST_ROWS) * parts
    if config.batch_size % parts:
        near = mesh_rules.near_multiples(config.batch_size, parts)
        over = " * ".join(f"mesh.{axis}" for axis in model.model.how.layout.over("batch"))
        raise UserError(f"batch_size: must be a multiple of {over}, got {config.batch_size} with {parts}; {near}")
    return config.batch_size


def _evaluate_sets(config: EvaluateConfig, model: "Trained", batch_size: int) -> "dict[str, Evaluation]":
    from angpt_jax import evaluation, sharding
    from angpt_jax.data.pipeline import validation_windows

    most = config.tokens or (None if config.sets else model.config.data.validation_tokens)
    windows = {
        key: validation_windows(stream, model.tokenizer, model.context, most, f"sets.{key}")
        for key, stream in _streams(config, model).items()
    }
    put = sharding.batch_putter(model.model.how.layout, batch_size)
    evaluator = evaluation.Evaluator(evaluation.make_window_nats(model.model), windows, batch_size, put)
    return evaluator.evaluate(model.params)


def _streams(config: EvaluateConfig, model: "Trained") -> "dict[str, TokenStream]":
    """What is evaluated: the sets that are given, or those of the run; ids of the run's tokenizer."""
    from angpt_jax.data import tokens

    data, ours = model.config.data, model.tokenizer.fingerprint
    if not config.sets:
        own = tokens.load_tokens(data, model.config.model.vocab)
        if own.tokenizer.fingerprint != ours:
            raise UserError(
                f"sets: the run's data are no longer of its tokenizer ({ours[:12]}), got tokenizer "
                f"{own.tokenizer.fingerprint[:12]}; bring the data back, or give --sets"
            )
        return own.validation
    return {
        name: tokens.judged_on(source, model.tokenizer, data.cache_dir, f"sets.{name}")
        for name, source in config.sets.items()
    }


def _run_tasks(config: EvaluateConfig, model: "Trained", batch_size: int, tasks: "Tasks") -> "Results":
    from angpt_jax import harness_run
    from angpt_jax.generate import Generator
    from angpt_jax.harness import HarnessModel
    from angpt_jax.scoring import Scorer

    scorer = Scorer(model.model, model.params, model.tokenizer, model.context, batch_size)
    generator = Generator(model.model, model.params, model.tokenizer, model.context)
    harness = HarnessModel(scorer, model.tokenizer, model.context, batch_size, generator)
    return harness_run.run(harness, tasks, config.limit)


def _record(result: "Evaluation") -> dict[str, Any]:
    """As it stands in the JSON: null where there is no number."""
    numbers = {"perplexity": result.perplexity} | asdict(result)
    return {
        key: numbers[key] if math.isfinite(numbers[key]) else None
        for key in ("loss", "standard_error", "perplexity", "bits_per_byte", "tokens", "bytes")
    }


def _print_sets(sets: "dict[str, Evaluation]") -> None:
    rows = [
        (
            name,
            f"{result.loss:.4f}",
            _figure(result.standard_error),
            f"{result.perplexity:,.2f}" if result.perplexity < 1e6 else f"{result.perplexity:.4g}",
            f"{result.bits_per_byte:.4f}",
            f"{result.tokens:,}",
            f"{result.bytes:,}",
        )
        for name, result in sets.items()
    ]
    print_table(("set", "nats/token", "± error", "perplexity", "bits/byte", "tokens", "bytes"), rows)


def _print_tasks(results: "Results") -> None:
    rows = [
        (task, metric, _figure(number["value"]), _figure(number["standard_error"]), str(found["samples"] or UNKNOWN))
        for task, found in results.items()
        for metric, number in found["metrics"].items()
    ]
    print_table(("task", "metric", "value", "± error", "documents"), rows, words=("metric",))


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


if __name__ == "__main__":
    cli.main(evaluate, EvaluateConfig, command="evaluate", default_config=None)
