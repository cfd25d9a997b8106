"""Task files for lm-evaluation-harness that somebody wrote, read so that nothing in them is executed.

The harness calls Python functions that a file names (`!function`, `class`), evaluates further files, loads metrics
from the hub, and renders templates that can reach Python. So such a file is read here, as plain YAML, and handed over
as a mapping; what may run code or download is refused by name, and templates are rendered in Jinja's sandbox.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from angpt_jax import yaml_files
from angpt_jax.errors import UserError
from angpt_jax.schema import show

ALLOWED = (
    *("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs"),
    *("training_split", "validation_split", "test_split", "fewshot_split", "fewshot_config", "num_fewshot"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "description"),
    *("target_delimiter", "fewshot_delimiter", "output_type", "generation_kwargs", "repeats"),
    *("metric_list", "filter_list", "should_decontaminate", "doc_to_decontamination_query", "metadata"),
)
LOCAL = ("arrow", "csv", "json", "parquet", "text")  # values of dataset_path that read files of this machine
METRIC_KEYS = ("metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation", "ignore_numbers")
DEEPEST_INCLUDE = 8

Task = dict[str, Any]


def is_file(word: str) -> bool:
    """Whether a word of `harness` is the path of a task file or of a folder of them, rather than a name."""
    return "/" in word or word.endswith((".yaml", ".yml"))


def read(path: str) -> list[Task]:
    """The tasks of a file, or of all .yaml files below a folder that name a task."""
    place = Path(path).expanduser()
    if not place.is_dir():
        return [_checked(_merged(place), place)]
    files = sorted(file for file in place.glob("**/*.yaml") if file.is_file())
    tasks = [(_merged(file), file) for file in files]
    named = [_checked(task, file) for task, file in tasks if "task" in task]
    if not named:
        raise UserError(f"harness: no task in the folder, got {show(path)}; .yaml files with a key `task`")
    return named


def _merged(path: Path, depth: int = 0) -> Task:
    """The mapping of a file over those that it includes, which lie where it says, seen from its own folder."""
    task = _plain(path)
    includes = task.pop("include", [])
    merged: Task = {}
    for name in includes if isinstance(includes, list) else [includes]:
        if depth == DEEPEST_INCLUDE or not isinstance(name, str):
            rule = f"a path, at most {DEEPEST_INCLUDE} files deep"
            raise UserError(f"harness: include must be {rule}, got {show(name)} in {show(str(path))}")
        merged |= _merged(path.parent / name, depth + 1)
    return merged | task


def _plain(path: Path) -> Task:
    """What one file holds; tags such as !function are refused."""
    try:
        return yaml_files.read_mapping(path)
    except UserError as error:
        reasons = [problem.removeprefix("config: ") for problem in error.problems]
        near = "; a task file of yours holds plain YAML, without !function"
        problems = [f"harness: {reason}{near if 'tags are' in reason else ''}" for reason in reasons]
        raise UserError(*problems) from None


def _checked(task: Task, path: Path) -> Task:
    problems = [f"harness: {problem}" for problem in _problems(task, show(str(path)))]
    if problems:
        raise UserError(*problems)
    return task


def _problems(task: Task, where: str) -> Iterator[str]:
    for key in task:
        if key not in ALLOWED:
            yield f"{show(key)} is not taken from a task file of yours, got {where}; the keys are {', '.join(ALLOWED)}"
    if not isinstance(task.get("task"), str):
        yield f"task must be the name of the task, got {show(task.get('task'))} in {where}"
    if task.get("dataset_path") not in LOCAL:
        got = show(task.get("dataset_path"))
        yield f"dataset_path must read files of this machine, got {got} in {where}; one of {', '.join(LOCAL)}"
    for text in _texts([task.get("dataset_kwargs"), task.get("dataset_name")]):
        if "://" in text:
            yield f"dataset_kwargs must name files of this machine, got {show(text)} in {where}; download it first"
    metrics = task.get("metric_list") or []
    for metric in metrics if isinstance(metrics, list) else [metrics]:
        names = metric if isinstance(metric, dict) else {"metric": metric}
        if other := sorted(set(names) - set(METRIC_KEYS)):
            known = ", ".join(METRIC_KEYS)
            yield f"metric_list takes no {other[0]} from a task file of yours, got {where}; the keys are {known}"


def _texts(value: Any) -> Iterator[str]:
    """All text inside of lists and mappings."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value
