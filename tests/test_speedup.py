"""Speed-up at equal loss of hand-made curves, intervals against tables, and what holds of any curve."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angpt_jax.speedup import Estimate, arithmetic, at_equal_loss, geometric, of_ended_schedules, tokens_to

T90 = {1: 6.313751514675043, 2: 2.919985580353726}  # Student's t, 95 % quantile, from a table
TOKENS = np.array([100.0, 200, 300, 400])
curves = st.lists(st.floats(0.5, 10), min_size=2, max_size=8).map(np.array)


@pytest.mark.parametrize(
    ("loss", "target", "tokens"),
    [
        ([5, 4, 3, 2], 3, 300),
        ([5, 4, 3, 2], 3.5, 250),
        ([5, 4, 3, 2], 2, 400),
        ([5, 4, 3, 2], 1.9, None),
        ([5, 4, 3, 2], 6, 100),  # somewhere before the first evaluation: not taken for earlier than it is
        ([5, 3, 6, 2], 4, 150),  # the first crossing, not the last
        ([5, 3, 6, 2], 2.5, 350),  # from the lowest so far, not from the bump
        ([5, 3, 6, 3], 3, 200),
    ],
)
def test_tokens_are_those_of_the_first_crossing(loss: list[float], target: float, tokens: float | None):
    assert tokens_to(np.array(loss, float), TOKENS, target) == tokens


@given(curves, st.floats(0.5, 10), st.floats(0, 5))
@settings(max_examples=50, deadline=None)
def test_a_lower_target_takes_as_long_or_longer(loss: np.ndarray, target: float, less: float):
    tokens = np.arange(1.0, len(loss) + 1)
    first, later = tokens_to(loss, tokens, target), tokens_to(loss, tokens, target - less)
    assert later is None or (first is not None and first <= later <= tokens[-1])


def test_a_run_that_gets_there_is_faster_by_the_ratio_of_tokens():
    found = at_equal_loss(np.array([5.0, 4, 3.5, 3]), TOKENS, np.array([4.5, 3.5, 2.5, 2]), TOKENS)
    assert (found.value, found.reached) == (400 / 250, True)


def test_a_run_that_never_gets_there_is_slower_by_when_the_baseline_had_its_loss():
    found = at_equal_loss(np.array([4.5, 3.5, 2.5, 2]), TOKENS, np.array([5.0, 4, 3.5, 3]), TOKENS)
    assert (found.value, found.reached) == (250 / 400, False)


@given(curves, curves)
@settings(max_examples=50, deadline=None)
def test_there_is_always_a_number_and_it_says_who_reached_whom(baseline: np.ndarray, other: np.ndarray):
    tokens = [np.arange(1.0, len(loss) + 1) / len(loss) for loss in (baseline, other)]
    found = at_equal_loss(baseline, tokens[0], other, tokens[1])
    assert 0 < found.value < math.inf
    assert found.value >= 1 if found.reached else found.value <= 1


def test_a_run_is_as_fast_as_itself():
    loss = np.array([5.0, 4, 3])
    assert at_equal_loss(loss, TOKENS[:3], loss, TOKENS[:3]).value == 1


def test_intervals_are_those_of_student():
    assert arithmetic({}, 0.9) == Estimate(None, None, None, {})
    assert arithmetic({7: 2.5}, 0.9) == Estimate(2.5, None, None, {7: 2.5})
    found = arithmetic({0: 1.0, 1: 2.0, 2: 4.5}, 0.9)
    half = T90[2] * math.sqrt((1.5**2 + 0.5**2 + 2**2) / 2) / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half), rel=1e-12)


def test_the_interval_of_a_ratio_is_that_of_its_inverse():
    fast, slow = geometric({0: 1.25, 1: 2.0}, 0.9), geometric({0: 0.8, 1: 0.5}, 0.9)
    assert fast.mean == pytest.approx(math.sqrt(2.5))
    assert fast.mean and fast.low and fast.high and slow.mean and slow.low and slow.high
    assert (slow.mean, slow.low, slow.high) == pytest.approx((1 / fast.mean, 1 / fast.high, 1 / fast.low))
    assert fast.high / fast.mean == pytest.approx(math.exp(T90[1] * math.log(1.6) / 2))
    assert geometric({3: 1.5}, 0.9).low is None


@pytest.mark.parametrize(
    ("baseline", "speedup"),
    [
        (3.0, 800 / 400),
        (3.2, 800 / 200),
        (3.1, 800 / math.sqrt(200 * 400)),  # linear in log steps
        (2.9, 1.0),
        (3.21, None),  # better at the shortest: at least 4, but how much?
        (2.89, None),
    ],
)
def test_ended_schedules_are_interpolated_in_log_steps(baseline: float, speedup: float | None):
    found = of_ended_schedules(baseline, 800, [3.2, 3.0, 2.9], [200, 400, 800])
    assert found is None if speedup is None else found == pytest.approx(speedup, rel=1e-12)
