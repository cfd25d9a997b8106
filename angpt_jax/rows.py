"""Tables of runs: each row has a name, configs that it starts from, and what it changes in them. No JAX.

rows, problems = read([{"name": "fast", "optim.peak_lr": 8e-3}, ...], configs=["default"], values={})
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from angpt_jax import cli, rules
from angpt_jax.config import Config
from angpt_jax.errors import UserError
from angpt_jax.form import flatten
from angpt_jax.schema import show

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")
NOT_OF_A_ROW = ("run.dir", "run.resume", "dry_run")  # whoever runs the row decides these


@dataclass(frozen=True)
class Row:
    """What is trained: `configs`, later wins, changed by `values` (dotted keys)."""

    name: str
    configs: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def words(self) -> list[str]:
        """The flags of `train` that say it."""
        files = [word for config in self.configs for word in ("--config", config)]
        return [*files, *(word for key, value in self.values.items() for word in (f"--{key}", _text(value)))]

    def config(self) -> Config:
        """The config that `train` would read; a UserError names the row, and what is wrong in it."""
        try:
            config = cli.parse(Config, self.words(), command="train", default_config="default")
            cli.raise_problems(rules.check(config))
        except UserError as error:
            raise UserError(*(f"{self.name}: {problem}" for problem in error.problems)) from None
        return config

    def but(self, name: str, values: Mapping[str, Any]) -> "Row":
        """The same with another name and further values."""
        return Row(name, self.configs, {**self.values, **values})


def read(
    entries: Iterable[Any], configs: Sequence[str], values: Mapping[str, Any], key: str = "list"
) -> tuple[list[Row], list[str]]:
    """The rows of a list of mappings, and what is wrong with them.

    An entry has a `name`, may have a `config` of its own in place of `configs`, and dotted keys; `values` are those of
    every row.
    """
    rows: dict[str, Row] = {}
    shared, problems = dotted(values, "values")
    for place, entry in enumerate(entries, 1):
        where = f"{key}[{place}]"
        if not isinstance(entry, dict):
            problems.append(f"{where}: must be a mapping with a name, got {show(entry)}")
            continue
        own = {str(name): value for name, value in entry.items()}
        name, started_from = own.pop("name", None), own.pop("config", list(configs))
        found = [*problems_of_name(name, where), *_problems_of_configs(started_from, where)]
        changed, wrong = dotted(own, where)
        if isinstance(name, str) and name in rows:
            found.append(f"{where}: has the name of another row, got {show(name)}; names differ")
        problems += [*found, *wrong]
        if not found:
            rows[name] = Row(name, tuple(started_from), {**shared, **changed})
    return list(rows.values()), problems


def named(
    words: Sequence[str], entries: Iterable[Any], configs: Sequence[str], values: Mapping[str, Any]
) -> tuple[list[Row], list[str]]:
    """The rows that the words of a command line name, each a run config, or else those of a list; and what is wrong."""
    if not words:
        return read(entries, configs, values)
    table, problems = read([{"name": Path(word).stem, "config": [word]} for word in words], [], values, key="configs")
    given = [key for key, value in (("config", configs), ("list", entries)) if value]
    problems += [f"configs: can't be given together with {key}, got {show(words)}" for key in given]
    return table, problems


def name_of(values: Mapping[str, Any]) -> str:
    """A readable name that follows from what a row changes: `peak_lr=0.004+beta2=0.99`."""
    return "+".join(f"{short}={_plain(values[key])}" for key, short in short_keys(values).items()) or "base"


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """As much of the end of each key as tells it from the others, `peak_lr` of `optim.peak_lr`."""
    parts = {key: key.split(".") for key in keys}

    def ends(key: str) -> Iterator[str]:
        return (".".join(parts[key][-length:]) for length in range(1, len(parts[key]) + 1))

    taken = Counter(end for key in parts for end in ends(key))
    return {key: next((end for end in ends(key) if taken[end] == 1), key) for key in parts}


def dotted(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Values by dotted key, and what is wrong with the keys."""
    flat = {".".join(path): value for path, value in flatten(dict(values)) if path}
    problems = [
        f"{where}.{key}: is not for a row to say, got {show(value)}; the command that runs it decides"
        for key, value in flat.items()
        if key in NOT_OF_A_ROW
    ]
    return flat, problems


def problems_of_name(name: Any, where: str) -> list[str]:
    """What speaks against a name, which folders get too."""
    if name is None:
        return [f"{where}: has no name; give it one"]
    if isinstance(name, str) and _NAME.fullmatch(name):
        return []
    rule = "must be letters, digits, dots, + = _ or -, at most 100, and begin with a letter or digit"
    return [f"{where}.name: {rule}, got {show(name)}"]


def _problems_of_configs(configs: Any, where: str) -> list[str]:
    if isinstance(configs, list) and all(isinstance(config, str) and config for config in configs):
        return []
    return [f"{where}.config: must be a list of config names or files, got {show(configs)}"]


def _text(value: Any) -> str:
    """A value as a flag takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else _text(value)
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", text).strip("_")
