"""What a comparison hands over: tables on stdout, compare.json, and a page with its plots."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from angpt_jax import verdict
from angpt_jax.contenders import Key
from angpt_jax.errors import StorageError, warn
from angpt_jax.files import write_whole
from angpt_jax.plots import history
from angpt_jax.plots.page import Cell, page
from angpt_jax.rows import Row, name_of
from angpt_jax.schema import show
from angpt_jax.speedup import Estimate
from angpt_jax.tables import print_table
from angpt_jax.trials import Outcome, Trial
from angpt_jax.tuning import WITHIN, Tolerance, Tuning
from angpt_jax.verdict import Verdict

JSON, PAGE = "compare.json", "report.html"
UNKNOWN, NEVER = "–", "*"


@dataclass(frozen=True)
class Standings:
    """The end of a comparison.

    Args:
        baseline: name of that contender
        verdicts: of each contender
        trials: the runs that the verdicts are made of
        outcomes: how each run stands, also those of tuning, by name
        tunings: of each contender; empty where nothing was tuned
        confidence: of the intervals
    """

    baseline: str
    verdicts: dict[str, Verdict]
    trials: Mapping[Key, Trial]
    outcomes: Mapping[str, Outcome]
    tunings: Mapping[str, Tuning]
    confidence: float

    def outcomes_of(self, contender: str) -> dict[str, Outcome]:
        """Of its reported runs, by name."""
        names = [trial.name for key, trial in self.trials.items() if key.contender == contender]
        return {name: self.outcomes[name] for name in names}

    def unfinished(self) -> list[tuple[str, str, str]]:
        """Name, state and last line of every run that did not finish."""
        return [(n, o.state, o.said or UNKNOWN) for n, o in self.outcomes.items() if o.state != "finished"]

    def show(self) -> None:
        """Prints the tables; warns of what a reader should not miss."""
        heads, rows = self._table()
        print_table(heads, rows)
        print(*self.notes(), sep="\n")
        print_table(*self._tuning_table())
        print_table(("run", "state", "said"), self.unfinished(), left=("state", "said"))
        for name, tuning in self.tunings.items():
            for key in tuning.at_edge:
                value = tuning.chosen and tuning.chosen[key]
                warn(f"tune_over.{key}: the best of {name} is at the edge of the list, got {show(value)}; try others")

    def _table(self) -> tuple[list[str], list[list[str]]]:
        ended = any(one.ended.seeds or one.not_enclosed for one in self.verdicts.values())
        heads = ["contender", "validation loss", "bits/byte", "difference", "speed-up, tokens", "speed-up, time"]
        heads += [*(["speed-up, ended schedules"] if ended else []), "step time", "seeds"]
        rows = []
        for name, one in self.verdicts.items():
            never = NEVER if one.unreached else ""
            row = [name, _said(one.loss, ".4f"), _said(one.bits_per_byte, ".4f"), _said(one.difference, "+.4f")]
            row += [_said(one.tokens, ".3f") + never, _said(one.time, ".3f") + never]
            row += [_said(one.ended, ".3f") + (NEVER * 2 if one.not_enclosed else "")] if ended else []
            milliseconds = UNKNOWN if one.step_seconds is None else f"{1000 * one.step_seconds:,.1f} ms"
            rows.append([*row, milliseconds, f"{len(one.runs)} of {len(self._seeds())}"])
        return heads, rows

    def _seeds(self) -> list[int]:
        return sorted({key.seed for key in self.trials})

    def notes(self) -> list[str]:
        """What the numbers of the table mean."""
        verdicts = self.verdicts.values()
        notes = [
            f"Speed-up: tokens of {self.baseline} over tokens until its last validation loss is reached. Time: the same, "
            "times its median step time over the contender's. Difference: of the last losses, paired by seed. In "
            f"brackets: {self.confidence:.0%} intervals (Student's t over seeds, of logarithms where it is a ratio)."
        ]
        if self.tunings:
            notes.append("Tuned on training loss, with another seed; the validation set was not read for it.")
        if any(one.unreached for one in verdicts):
            where = ", ".join(f"{one.name}, seed {_listed(one.unreached)}" for one in verdicts if one.unreached)
            notes.append(
                f"{NEVER} that loss was never reached ({where}). There the speed-up is the share of its tokens after "
                f"which {self.baseline} had the contender's last loss."
            )
        if any(one.not_enclosed for one in verdicts):
            where = ", ".join(f"{one.name}, seed {_listed(one.not_enclosed)}" for one in verdicts if one.not_enclosed)
            notes.append(f"{NEVER * 2} budgets do not enclose the loss of {self.baseline}, seeds left out: {where}.")
        return notes

    def _tuning_table(self) -> tuple[list[str], list[list[str]]]:
        if not self.tunings:
            return [], []
        grid = next(iter(self.tunings.values())).grid
        heads = ["tuning", *map(name_of, grid), "chosen", f"within {WITHIN:.0%} of the best"]
        rows = []
        for name, tuning in self.tunings.items():
            scores = [
                f"{score:.4f}" if math.isfinite(score) else self.outcomes[f"{name}/tune/{name_of(values)}"].state
                for values, score in zip(tuning.grid, tuning.scores, strict=True)
            ]
            chosen = name_of(tuning.chosen) + (" (edge)" if tuning.at_edge else "") if tuning.chosen else UNKNOWN
            rows.append([name, *scores, chosen, _range(tuning.tolerance)])
        return heads, rows

    def record(self) -> dict[str, Any]:
        """What compare.json holds; null where there is no number."""
        return {
            "baseline": self.baseline,
            "seeds": self._seeds(),
            "confidence": self.confidence,
            "contenders": {name: self._record_of(one) for name, one in self.verdicts.items()},
        }

    def _record_of(self, one: Verdict) -> dict[str, Any]:
        facts = next(iter(one.runs.values())).facts() if one.runs else {}
        numbers = {
            "val_loss": one.loss,
            "val_bits_per_byte": one.bits_per_byte,
            "loss_difference": one.difference,
            "speedup_tokens": one.tokens,
            "speedup_time": one.time,
            "speedup_ended_schedules": one.ended,
        }
        return {
            **{key: facts.get(key) for key in ("arch", "parameters", "steps", "tokens")},
            "median_step_seconds": one.step_seconds,
            **{key: asdict(estimate) for key, estimate in numbers.items()},
            "never_reached_in_seeds": list(one.unreached),
            "budgets_do_not_enclose_in_seeds": list(one.not_enclosed),
            "tuning": _tuning_record(self.tunings[one.name]) if one.name in self.tunings else None,
            "runs": {
                trial.name: asdict(self.outcomes[trial.name]) | {"command": trial.line()}
                for key, trial in self.trials.items()
                if key.contender == one.name
            },
        }

    def write(self, folder: Path) -> None:
        """Writes compare.json, and the page where Matplotlib is there; prints their paths."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / JSON, json.dumps(self.record(), indent=2, allow_nan=False) + "\n")
            print(folder / JSON)
            self._write_page(folder)
        except OSError as error:
            raise StorageError(f"dir: can't be written ({error.strerror}), got {show(str(folder))}") from error

    def _write_page(self, folder: Path) -> None:
        try:
            from angpt_jax.plots import comparison, look  # not before: Matplotlib is an extra
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            warn("compare: no plots, they need Matplotlib; pip install -e '.[plots]'")
            return
        heads, rows = self._table()
        cells = []
        for row, one in zip(rows, self.verdicts.values(), strict=True):
            tuning = self.tunings.get(one.name)
            below = name_of(tuning.chosen) if tuning and tuning.chosen else ""
            colour = look.COLOURS[one.place % len(look.COLOURS)]
            cells.append([Cell(row[0], below, colour), *map(Cell, row[1:])])
        notes = [*self.notes(), *(f"{name}: {state}. {said}" for name, state, said in self.unfinished())]
        pictures = comparison.draw(list(self.verdicts.values()), self.baseline, self.tunings, folder)
        write_whole(folder / PAGE, page(f"Against {self.baseline}", heads, cells, notes, pictures))
        print(folder / PAGE)


def of(
    table: Sequence[Row],
    baseline: str,
    trials: Mapping[Key, Trial],
    outcomes: Mapping[str, Outcome],
    tunings: Mapping[str, Tuning],
    confidence: float,
) -> Standings:
    """Reads the runs that finished and judges every contender."""
    runs: dict[str, dict[int, dict[int, history.History]]] = {row.name: {} for row in table}
    for key, trial in trials.items():
        if outcomes[trial.name].state == "finished":
            runs[key.contender].setdefault(key.steps, {})[key.seed] = history.load(str(trial.directory))
    whole = max((key.steps for key in trials), default=0)
    lengths = {key: sorted({other.steps for other in trials if other.contender == key}) for key in runs}
    verdicts = {
        name: verdict.judged(
            name,
            place,
            of_name.get(whole, {}),
            {} if name == baseline else runs[baseline].get(whole, {}),
            {steps: of_name.get(steps, {}) for steps in lengths[name] if steps < whole},
            whole,
            confidence,
        )
        for place, (name, of_name) in enumerate(runs.items())
    }
    return Standings(baseline, verdicts, trials, outcomes, tunings, confidence)


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


def _tuning_record(tuning: Tuning) -> dict[str, Any]:
    tolerance = tuning.tolerance
    return {
        "scores": [
            {"values": values, "score": score if math.isfinite(score) else None}
            for values, score in zip(tuning.grid, tuning.scores, strict=True)
        ],
        "chosen": tuning.chosen,
        "at_edge": tuning.at_edge,
        "tolerance": tolerance and {"of": tuning.key, **asdict(tolerance), "octaves": tolerance.octaves},
    }
