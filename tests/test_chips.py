"""The table of accelerators: figures that can't be far off, and a device that is not in it."""

import jax
import pytest

from angpt_jax import chips, flops
from angpt_jax.chips import CHIPS, Chip


@pytest.mark.parametrize("kind", CHIPS)
def test_figures_are_in_their_units(kind: str):
    chip = CHIPS[kind]
    assert 100 < chip.tflops < 10_000
    assert 10 * 2**30 < chip.hbm_bytes < 300 * 2**30
    assert 500e9 < chip.hbm_bandwidth < 20e12
    assert chip.hbm_bandwidth > chip.link_bandwidth > chip.network_bandwidth > 1e9
    assert chips.find(kind) == chip


def test_newer_chips_of_a_line_do_more():
    for older, newer in (("TPU v4", "TPU v5p"), ("TPU v5 lite", "TPU v6 lite"), ("NVIDIA H200", "NVIDIA B200")):
        assert CHIPS[older].tflops < CHIPS[newer].tflops
        assert CHIPS[older].hbm_bandwidth < CHIPS[newer].hbm_bandwidth


def test_both_names_of_a_tpu_mean_the_same_chip():
    for short, long in (("TPU v5e", "TPU v5 lite"), ("TPU v5p", "TPU v5"), ("TPU v6e", "TPU v6 lite")):
        assert CHIPS[short] is CHIPS[long]


def test_an_unknown_device_has_no_figures(monkeypatch: pytest.MonkeyPatch):
    kind = jax.devices()[0].device_kind
    assert chips.find(kind) is None
    assert flops.utilization(50.0) is None
    monkeypatch.setitem(CHIPS, kind, Chip("this one", 200.0, 1, 1.0, 1.0, 1.0))
    assert flops.utilization(50.0) == 0.25
