"""Finished runs that lie in some folders, as points of scaling laws, by architecture."""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from angpt_jax import training_flops
from angpt_jax.errors import UserError
from angpt_jax.laws.points import Point
from angpt_jax.plots.history import config_of, number, summary_of
from angpt_jax.schema import show

Counted = Literal["total", "non_embedding"]
ALIKE = {  # what the runs of one architecture must share, or their losses say nothing of N and D
    "model": ("vocab", "context"),
    "data": ("source", "mixture", "tokenizer", "validation_fraction", "validation_tokens"),
}
OF_A_SETTING = ("peak_lr", "micro_batches", "moments_dtype", "max_bad_steps")  # told apart by name, or without effect


class LeftOut(Exception):
    """Says why a run is no point."""


def folders(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The run directories that are named or lie below what is named, and what is wrong with the words."""
    found: dict[str, Path] = {}
    problems = [] if words else ["runs: needs at least one run directory or a folder of them, got none"]
    for word in words:
        path = Path(word)
        if not path.is_dir():
            problems.append(f"runs: {'is no folder' if path.exists() else 'no such folder'}, got {show(word)}")
            continue
        below = list(_below(path))
        found |= {os.path.abspath(folder): folder for folder in below}
        if not below:
            problems.append(f"runs: holds no run (no config.yaml in it or below), got {show(word)}")
    return list(found.values()), problems


def _below(path: Path) -> Iterator[Path]:
    for place, names, files in os.walk(path):
        if "config.yaml" in files:
            yield Path(place)
            names.clear()  # a run directory holds no other
        names.sort()


def read(runs: Sequence[Path], counted: Counted) -> tuple[dict[str, list[Point]], list[tuple[str, str]], list[str]]:
    """Points by architecture, runs that are left out with their reasons, and what makes losses incomparable."""
    points: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
    seen: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # the values of a key that must be shared
    left_out: list[tuple[str, str]] = []
    for folder in runs:
        try:
            config = config_of(folder)
            design = architecture(config)
            points[design].append(point(str(folder), config, summary_of(folder), counted))
        except LeftOut as reason:
            left_out.append((str(folder), str(reason)))
        except (UserError, OSError) as error:
            left_out.append((str(folder), " ".join(str(error).removeprefix("runs: ").split())))
        else:
            for section, key in ((section, key) for section, keys in ALIKE.items() for key in keys):
                value = json.dumps(_of(config, section).get(key))
                seen[design[0], f"{section}.{key}"].setdefault(value, str(folder))
    problems = [
        f"runs: losses of {arch} can't be compared: {key} differs, got {' and '.join(_told(values))}; name equal runs"
        for (arch, key), values in seen.items()
        if len(values) > 1
    ]
    return _named({design: found for design, found in sorted(points.items()) if found}), left_out, problems


def _named(points: dict[tuple[str, str], list[Point]]) -> dict[str, list[Point]]:
    """Under the name of the recipe, with the places where they are needed to tell two designs apart."""
    count = Counter(arch for arch, _ in points)
    return {arch if count[arch] == 1 else f"{arch} {places}": found for (arch, places), found in points.items()}


def _told(values: dict[str, str]) -> Iterator[str]:
    return (f"{value} in {show(folder)}" for value, folder in values.items())


def _of(config: dict[str, Any], section: str) -> dict[str, Any]:
    found = config.get(section)
    return found if isinstance(found, dict) else {}


def architecture(config: dict[str, Any]) -> tuple[str, str]:
    """The recipe, and the places that the run replaced."""
    model = _of(config, "model")
    return str(model.get("arch")), json.dumps(model.get("places") or {}, sort_keys=True)


def point(run: str, config: dict[str, Any], summary: dict[str, Any], counted: Counted) -> Point:
    """The run as a point of a law, if it was trained to the end of its schedule.

    Its FLOPs take all parameters but the embedding for weights of products: vectors, which are few, count as well.
    """
    model, optim = _of(config, "model"), _of(config, "optim")
    _check_finished(summary, _of(config, "run"))
    of_model = {key: number(model.get(key)) for key in ("width", "layers", "context", "vocab")}
    known = {key: number(summary.get(key)) for key in ("parameters", "tokens", "val_loss")} | of_model
    known |= {"peak_lr": number(optim.get("peak_lr")), "batch_size": number(_of(config, "data").get("batch_size"))}
    unknown = [key for key, value in known.items() if not (math.isfinite(value) and value > 0)]
    if unknown:
        raise LeftOut(f"has no {', '.join(unknown)} that is a number above 0")
    table, tied = known["width"] * known["vocab"], bool(model.get("tied_embeddings"))
    weights = known["parameters"] - (0 if tied else table)
    sizes = (int(known[key]) for key in ("layers", "width", "context"))
    return Point(
        run,
        known["parameters"] - ((1 if tied else 2) * table if counted == "non_embedding" else 0),
        known["tokens"],
        training_flops.per_token(int(weights), *sizes) * known["tokens"],
        known["val_loss"],
        known["batch_size"] * known["context"],
        known["peak_lr"],
        json.dumps({key: value for key, value in sorted(optim.items()) if key not in OF_A_SETTING}),
    )


def _check_finished(summary: dict[str, Any], run: dict[str, Any]) -> None:
    if not summary:
        raise LeftOut("is not finished (no summary.json)")
    if summary.get("stopped_by") != "steps" or number(summary.get("steps")) < number(run.get("steps")):
        where = f"step {summary.get('steps')} of {run.get('steps')}"
        raise LeftOut(f"is not finished (ended by {summary.get('stopped_by')} at {where})")
    if run.get("init_from") is not None:
        raise LeftOut("starts from the weights of another run (run.init_from), which saw tokens before")
