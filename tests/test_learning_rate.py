"""What a recipe recommends fills the gaps of `optim`, and the schedule has the shape that `optim` asks for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from angpt_jax.arch import Recommended
from angpt_jax.config import OptimConfig
from angpt_jax.optim import learning_rate, with_recommendations

PEAK = 0.01
STEPS = 100
OPTIM = OptimConfig(PEAK, warmup_fraction=0.0)
GPT_PLUS = Recommended(warmup_fraction=0.1, weight_decay=0.1, clip_norm=1.0)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {"warmup_fraction": 0.1, "weight_decay": 0.1, "clip_norm": 1.0}),
        ({"warmup_fraction": 0.0}, {"warmup_fraction": 0.0, "weight_decay": 0.1, "clip_norm": 1.0}),
        ({"warmup_steps": 7}, {"warmup_fraction": None, "weight_decay": 0.1, "clip_norm": 1.0}),
        ({"warmup_steps": 0}, {"warmup_fraction": None, "weight_decay": 0.1, "clip_norm": 1.0}),
        ({"weight_decay": 0.0}, {"warmup_fraction": 0.1, "weight_decay": 0.0, "clip_norm": 1.0}),
        ({"clip_norm": "none"}, {"warmup_fraction": 0.1, "weight_decay": 0.1, "clip_norm": "none"}),
    ],
)
def test_recommendations_fill_only_what_is_null(given, expected):
    assert with_recommendations(OptimConfig(PEAK, **given), GPT_PLUS) == OptimConfig(PEAK, **(given | expected))


def rates(**changes: Any) -> np.ndarray:
    """The learning rate of each step from 0 to STEPS, the first one after the run."""
    schedule = learning_rate(replace(OPTIM, **changes), STEPS)
    return np.array([schedule(step) for step in range(STEPS + 1)], np.float64)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup_fraction, warmup_steps, rise", [(0.0, None, 0), (0.1, None, 10), (None, 25, 25)])
@pytest.mark.parametrize("end", [0.0, 0.1])
def test_start_peak_and_end(schedule, warmup_fraction, warmup_steps, rise, end):
    warmup = {"warmup_fraction": warmup_fraction, "warmup_steps": warmup_steps}
    lr = rates(schedule=schedule, end_lr_fraction=end, **warmup)
    np.testing.assert_allclose(lr[: rise + 1], PEAK * np.arange(1, rise + 2) / (rise + 1), rtol=1e-5)
    assert lr[0] > 0 and lr[rise] == lr.max() == pytest.approx(PEAK, rel=1e-6)
    assert (np.diff(lr[rise:]) <= 0).all()
    assert lr[STEPS] == pytest.approx(PEAK if schedule == "constant" else end * PEAK, abs=1e-9)


def test_cosine_is_half_way_down_in_the_middle():
    lr = rates(warmup_fraction=0.2, end_lr_fraction=0.1)
    assert lr[60] == pytest.approx((1 + 0.1) / 2 * PEAK, rel=1e-5)
    assert np.abs(np.diff(lr[20:])).argmax() in (39, 40)


def test_wsd_is_constant_and_then_a_straight_line():
    lr = rates(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.3, end_lr_fraction=0.2)
    np.testing.assert_allclose(lr[10:71], PEAK, rtol=1e-6)
    np.testing.assert_allclose(lr[70:], np.linspace(PEAK, 0.2 * PEAK, 31), rtol=1e-5)


def test_steps_and_fractions_say_the_same():
    in_fractions = rates(schedule="wsd", warmup_fraction=0.05, decay_fraction=0.4)
    in_steps = rates(schedule="wsd", warmup_fraction=None, warmup_steps=5, decay_fraction=0.9, decay_steps=40)
    np.testing.assert_array_equal(in_fractions, in_steps)


def test_stopping_early_does_not_change_the_schedule():
    """It is that of `run.steps`; a longer run stretches it."""
    np.testing.assert_allclose(learning_rate(OPTIM, 2 * STEPS)(STEPS), PEAK / 2, rtol=1e-5)
