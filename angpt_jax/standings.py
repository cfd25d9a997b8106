"""How a comparison ends: the verdict on every contender, how its runs stand, what was tuned."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from angpt_jax import verdict
from angpt_jax.contenders import Key
from angpt_jax.plots import history
from angpt_jax.rows import Row
from angpt_jax.trials import Outcome, Trial
from angpt_jax.tuning import Tuning
from angpt_jax.verdict import Verdict


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
        return [(n, o.state, o.said) for n, o in self.outcomes.items() if o.state != "finished"]

    def seeds(self) -> list[int]:
        """Of the reported runs."""
        return sorted({key.seed for key in self.trials})

    def record(self) -> dict[str, Any]:
        """What compare.json holds; null where there is no number."""
        return {
            "baseline": self.baseline,
            "seeds": self.seeds(),
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
