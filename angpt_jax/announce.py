"""The standings of a comparison for a reader: tables on stdout, compare.json, and a page with plots."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from angpt_jax import schema
from angpt_jax.errors import StorageError, warn
from angpt_jax.files import write_whole
from angpt_jax.plots.installed import REMEDY, has_matplotlib
from angpt_jax.plots.page import Cell, page
from angpt_jax.rows import name_of
from angpt_jax.speedup import Estimate
from angpt_jax.standings import Standings
from angpt_jax.tables import UNKNOWN, print_table
from angpt_jax.tuning import WITHIN, Tolerance

JSON, PAGE = "compare.json", "report.html"
NEVER = "*"


def show(standings: Standings) -> None:
    """Prints the tables."""
    heads, rows = _table(standings)
    print_table(heads, rows)
    print(*_notes(standings), sep="\n")
    print_table(*_tuning_table(standings))
    print_table(("run", "state", "said"), standings.unfinished(), words=("state", "said"))


def _table(standings: Standings) -> tuple[list[str], list[list[str]]]:
    ended = any(one.ended.seeds or one.not_enclosed for one in standings.verdicts.values())
    heads = ["contender", "validation loss", "bits/byte", "difference", "speed-up, tokens", "speed-up, time"]
    heads += [*(["speed-up, ended schedules"] if ended else []), "step time", "seeds"]
    rows = []
    for name, one in standings.verdicts.items():
        never = NEVER if one.unreached else ""
        shown = f"{name} (baseline)" if name == standings.baseline else name
        row = [shown, _said(one.loss, ".4f"), _said(one.bits_per_byte, ".4f"), _said(one.difference, "+.4f")]
        row += [_said(one.tokens, ".3f") + never, _said(one.time, ".3f") + never]
        row += [_said(one.ended, ".3f") + (NEVER * 2 if one.not_enclosed else "")] if ended else []
        milliseconds = UNKNOWN if one.step_seconds is None else f"{1000 * one.step_seconds:,.1f} ms"
        rows.append([*row, milliseconds, f"{len(one.runs)} of {len(standings.seeds())}"])
    return heads, rows


def _notes(standings: Standings) -> list[str]:
    """What the numbers of the table mean."""
    verdicts = standings.verdicts.values()
    notes = [
        f"Speed-up: tokens of {standings.baseline} over tokens until its last validation loss is reached. Time: the "
        "same, times its median step time over the contender's. Difference: of the last losses, paired by seed. "
        f"In brackets: {standings.confidence:.0%} intervals (Student's t over seeds, of logarithms for ratios)."
    ]
    if standings.tunings:
        notes.append("Tuned on training loss, with another seed; the validation set was not read for it.")
    for name, tuning in standings.tunings.items():
        for key in tuning.at_edge:
            values = f"{tuning.chosen[key]:g}" if tuning.chosen else UNKNOWN
            notes.append(
                f"Warning: the best {key} of {name} is at the edge of the list, {values}; try values beyond it."
            )
    if any(one.unreached for one in verdicts):
        where = ", ".join(f"{one.name}, seed {_listed(one.unreached)}" for one in verdicts if one.unreached)
        notes.append(
            f"{NEVER} that loss was never reached ({where}). There the speed-up is the share of its tokens after "
            f"which {standings.baseline} had the contender's last loss."
        )
    if any(one.not_enclosed for one in verdicts):
        where = ", ".join(f"{one.name}, seed {_listed(one.not_enclosed)}" for one in verdicts if one.not_enclosed)
        notes.append(f"{NEVER * 2} budgets do not enclose the loss of {standings.baseline}, seeds left out: {where}.")
    return notes


def _tuning_table(standings: Standings) -> tuple[list[str], list[list[str]]]:
    if not standings.tunings:
        return [], []
    grid = next(iter(standings.tunings.values())).grid
    heads = ["tuning", *map(name_of, grid), "chosen", f"within {WITHIN:.0%} of the best"]
    rows = []
    for name, tuning in standings.tunings.items():
        states = [standings.outcomes[f"{name}/tune/{name_of(values)}"].state for values in tuning.grid]
        scores = [
            f"{score:.4f}" if math.isfinite(score) else "not finite" if state == "finished" else state
            for score, state in zip(tuning.scores, states, strict=True)
        ]
        chosen = name_of(tuning.chosen) + (" (edge)" if tuning.at_edge else "") if tuning.chosen else UNKNOWN
        rows.append([name, *scores, chosen, _range(tuning.tolerance)])
    return heads, rows


def write(standings: Standings, folder: Path) -> None:
    """Writes compare.json, and the page where Matplotlib is there; prints their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / JSON, json.dumps(standings.record(), indent=2, allow_nan=False) + "\n")
        print(folder / JSON)
        _write_page(standings, folder)
    except OSError as error:
        raise StorageError(f"dir: can't be written ({error.strerror}), got {schema.show(str(folder))}") from error


def _write_page(standings: Standings, folder: Path) -> None:
    if not has_matplotlib():
        warn(f"compare: no plots, they need Matplotlib; {REMEDY}")
        return
    from angpt_jax.plots import comparison, look  # not before: Matplotlib takes a second to load

    heads, rows = _table(standings)
    cells = []
    for row, one in zip(rows, standings.verdicts.values(), strict=True):
        tuning = standings.tunings.get(one.name)
        below = name_of(tuning.chosen) if tuning and tuning.chosen else ""
        colour = look.COLOURS[one.place % len(look.COLOURS)]
        cells.append([Cell(row[0], below, colour), *map(Cell, row[1:])])
    notes = [*_notes(standings), *(f"{name}: {state}. {said}" for name, state, said in standings.unfinished())]
    pictures = comparison.draw(list(standings.verdicts.values()), standings.baseline, standings.tunings, folder)
    write_whole(folder / PAGE, page(f"Against {standings.baseline}", heads, cells, notes, pictures))
    print(folder / PAGE)


def _said(estimate: Estimate, form: str) -> str:
    if estimate.mean is None:
        return UNKNOWN
    spread = "" if estimate.low is None else f" ({estimate.low:{form}} to {estimate.high:{form}})"
    return f"{estimate.mean:{form}}{spread}"


def _listed(seeds: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, seeds[:-1])), str(seeds[-1])]))


def _range(tolerance: Tolerance | None) -> str:
    if tolerance is None:
        return UNKNOWN
    below, above = tolerance.ends
    least = "" if below and above else "at least "
    low, high = f"{'' if below else '≤ '}{tolerance.low:.3g}", f"{'' if above else '≥ '}{tolerance.high:.3g}"
    return f"{low} to {high}, {least}{tolerance.octaves:.1f} octaves"
