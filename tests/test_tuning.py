"""What is chosen from the scores of a grid, and how wide the good range is."""

import math

import numpy as np
import pytest

from angpt_jax import tuning
from angpt_jax.tuning import Tolerance

RATES = {"optim.peak_lr": [4e-3, 1e-3, 2e-3]}
NEVER = math.inf


def test_the_smallest_score_is_chosen_and_the_edge_is_named():
    inside = tuning.choose(RATES, [3.3, 3.2, 3.1])
    assert (inside.chosen, inside.at_edge) == ({"optim.peak_lr": 2e-3}, [])
    edge = tuning.choose(RATES, [3.0, 3.2, 3.1])
    assert (edge.chosen, edge.at_edge) == ({"optim.peak_lr": 4e-3}, ["optim.peak_lr"])
    assert tuning.choose({"optim.peak_lr": [2e-3]}, [3.0]).at_edge == []
    assert tuning.choose(RATES, [NEVER, 3.0, NEVER]).chosen == {"optim.peak_lr": 1e-3}
    none = tuning.choose(RATES, [NEVER] * 3)
    assert (none.chosen, none.tolerance, none.at_edge) == (None, None, [])


def test_every_combination_is_tried_and_the_range_is_that_of_the_best_of_the_others():
    over = {"optim.schedule": ["cosine", "wsd"], "optim.peak_lr": [1.0, 2.0, 4.0]}
    assert [(v["optim.schedule"], v["optim.peak_lr"]) for v in tuning.grid(over)][:4] == [
        *[("cosine", 1.0), ("cosine", 2.0), ("cosine", 4.0)],
        ("wsd", 1.0),
    ]
    found = tuning.choose(over, [5.0, 4.0, 6.0, 4.5, 4.9, 5.5])
    assert found.chosen == {"optim.schedule": "cosine", "optim.peak_lr": 2.0}
    assert found.key == "optim.peak_lr"
    places, best = found.profile()
    assert (places.tolist(), best.tolist()) == ([1.0, 2.0, 4.0], [4.5, 4.0, 5.5])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        # limit 1.02: half way to 1.04 below, a quarter of the way to 1.08 above, in log
        ([2, 1.04, 1, 1.08, 2], Tolerance(4 / 2**0.5, 4 * 2**0.25, (True, True))),
        ([2, 1.01, 1, 1.01, 1.02], Tolerance(2 / 2 ** (0.01 / 0.99), 16, (True, False))),
        ([2, NEVER, 1, NEVER, 1.0], Tolerance(4, 4, (True, True))),  # not beyond a run that diverged
        ([1, 2, 2, 2, 2], Tolerance(1, 2**0.02, (False, True))),
        ([1, 1, 1, 1, 1], Tolerance(1, 16, (False, False))),
    ],
)
def test_the_tolerance_is_within_two_percent_around_the_best(scores: list[float], expected: Tolerance):
    found = tuning.tolerance(np.array([1.0, 2, 4, 8, 16]), np.array(scores, float))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.ends == expected.ends
    assert found.octaves == pytest.approx(math.log2(expected.high / expected.low), abs=1e-12)


def test_a_score_is_the_mean_training_loss_of_the_last_tenth():
    records = [{"step": step, "loss": 9.0 if step <= 90 else float(step)} for step in range(1, 101)]
    records += [{"step": step, "val_loss": 1e9} for step in (95, 100)]
    assert tuning.score(records, 100) == np.mean(range(91, 101))
    assert tuning.score([*records[:-3], {"step": 99, "loss": "nan"}], 100) == NEVER
    assert tuning.score([], 100) == NEVER


def test_keys_are_dotted_however_they_were_given():
    nested, dotted = {"optim": {"peak_lr": [1.0]}}, {"optim.peak_lr": [1.0]}
    assert tuning.lists(nested) == tuning.lists(dotted) == dotted
