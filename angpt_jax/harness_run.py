"""Tasks of lm-evaluation-harness: found by name or read from files, run on a model, their numbers.

    run(model, load(["arc_easy", "tasks/mine.yaml"]), limit=100)     # needs: pip install -e '.[eval]'

A task of the harness's own gets its data from the hub of Hugging Face, or from its cache on this machine; nothing else
downloads anything. Code that comes with data is never trusted.
"""

import functools
import logging
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from typing import Any

from angpt_jax import cli, task_files
from angpt_jax.errors import UserError, warn
from angpt_jax.schema import show

HUB = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
SECONDS = 10.0  # until the hub has answered
BOOTSTRAP = 1000  # samples, for the standard error of a metric that is no mean
SEED = 1234  # of the examples in a prompt; the harness's own

Tasks = dict[str, Any]  # what TaskManager.load gives
Results = dict[str, dict[str, Any]]


def load(words: Sequence[str], num_fewshot: int | None = None) -> Tasks:
    """The tasks that names and paths stand for, with their data."""
    files = [word for word in words if task_files.is_file(word)]
    names = [word for word in words if word not in files]
    specs = [(task["task"], task) for file in files for task in task_files.read(file)]
    if names:
        _be_offline_without_network()
    manager = _manager(bool(names))
    known = manager.all_tasks
    cli.raise_problems(_unknown(name, known) for name in names if name not in known)
    tasks: Tasks = {"tasks": {}, "groups": {}, "group_map": {}}
    for name, spec in [*((name, name) for name in names), *specs]:
        with _refusals(name), _quiet():
            if spec is not name:
                _check_metrics(spec)
            found = manager.load([spec])
        if twice := sorted(set(found["tasks"]) & set(tasks["tasks"])):
            raise UserError(f"harness: two tasks of one name, got {show(twice[0])}; name each task once")
        for part in tasks:
            tasks[part] |= found.get(part, {})
    for name, task in tasks["tasks"].items():
        _check(name, task)
        _set_fewshot(name, task, num_fewshot)
    return tasks


def run(model: Any, tasks: Tasks, limit: int | None = None) -> Results:
    """By task (and group): number of documents, and each metric with its standard error, None where there is none."""
    from jinja2 import TemplateError
    from lm_eval.evaluator import evaluate

    try:
        with _quiet():
            found: Any = evaluate(model, tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
    except TemplateError as error:
        raise UserError(f"harness: a template of a task can't be used ({_first_line(error)})") from error
    results = {}
    for name, numbers in found["results"].items():
        metrics = {
            key.removesuffix(",none"): {
                "value": _number(value),
                "standard_error": _number(numbers.get(_error_key(key))),
            }
            for key, value in numbers.items()
            if "," in key and not key.partition(",")[0].endswith("_stderr") and isinstance(value, int | float)
        }
        samples = found.get("n-samples", {}).get(name, {})
        results[name] = {"samples": samples.get("effective"), "metrics": metrics}
    return results


def _error_key(key: str) -> str:
    name, _, filtered = key.partition(",")
    return f"{name}_stderr,{filtered}"


def _number(value: Any) -> float | None:
    """None where there is none, or it is not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _be_offline_without_network() -> None:
    """Lets the libraries of the hub look into their cache only, where the hub does not answer: they would try for
    minutes. To be asked before they are imported."""
    if any(os.environ.get(name) for name in OFFLINE):
        return
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or HUB, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError):
        os.environ.update(dict.fromkeys(OFFLINE, "1"))


@functools.cache
def _manager(with_names: bool) -> Any:
    """What knows the tasks; the harness's own, if asked for (it reads thousands of files)."""
    os.environ["HF_EVALUATE_OFFLINE"] = "1"  # metrics of the hub are code
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # a fork of a process with JAX in it may hang
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UserError("harness: needs lm_eval, which is not installed; pip install -e '.[eval]'") from None
    with _quiet():
        return TaskManager(include_defaults=with_names)


def _unknown(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of the {len(known):,} of `lm_eval ls tasks`"
    if os.path.isdir(name):
        hint = f"the folder is ./{name}"
    return f"harness: no task of that name, got {show(name)}; {hint}"


def _check_metrics(task: task_files.Task) -> None:
    """Metrics of a file are the harness's own: another name would be looked for, and its code run."""
    import lm_eval.api.metrics  # noqa: F401  fills the registry
    from lm_eval.api.registry import METRIC_REGISTRY

    known = sorted(METRIC_REGISTRY.keys())
    for metric in task.get("metric_list") or []:
        name = metric["metric"] if isinstance(metric, dict) else metric
        if name not in known:
            raise UserError(f"harness: no metric of that name, got {show(name)}; one of {', '.join(known)}")


def _check(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"harness: runs code that a model wrote, which this command never does, got {show(name)}")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"harness: needs pictures or sound, and the model reads text, got {show(name)}")
    missing = [metric for metric, function in getattr(task, "_metric_fn_list", {}).items() if function is None]
    if missing and not callable(getattr(task.config, "process_results", None)):
        raise UserError(f"harness: its metric {missing[0]} is code of the hub, which is not loaded, got {show(name)}")


def _set_fewshot(name: str, task: Any, num_fewshot: int | None) -> None:
    """Like the harness: a task that says 0 itself stays at 0."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0 != num_fewshot:
        warn(f"num_fewshot: the task {name} is made for 0 examples and keeps them, got {num_fewshot}")
    elif num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=SEED)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """What the harness raises while it loads a task becomes one line."""
    from jinja2 import TemplateError

    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"harness: task {name} needs {error.name}, which is not installed; pip install {error.name}"
        ) from error
    except OSError as error:
        raise UserError(_without_data(name, error)) from error
    except (AttributeError, KeyError, RuntimeError, TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"harness: task {name} can't be used, got {type(error).__name__}: {_first_line(error)}; see its file"
        ) from error


def _without_data(name: str, error: OSError) -> str:
    offline = any(os.environ.get(variable) for variable in OFFLINE)
    why = "there is no network and no copy in its cache here" if offline else "they can't be had"
    return (
        f"harness: task {name} needs data, from the hub of Hugging Face if it is not a file of yours, and {why}, got "
        f"{_first_line(error)}; load them where there is a network and take the cache (HF_HOME) along, or give a task "
        "file with local data"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness's remarks are left out, what it prints goes to stderr, and templates can't reach Python."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    logger, plain = logging.getLogger("lm_eval"), utils.env
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    utils.env = SandboxedEnvironment(
        loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
    )
    utils.env.filters.update(plain.filters)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        utils.env = plain
        logger.setLevel(level)
