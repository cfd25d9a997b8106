"""The annotation of a weight says what its axes are, scanned or not, and a scale starts where it should."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SIZES, by_path, tiny

from angpt_jax.archs import RECIPES
from angpt_jax.axes import Annotated, Axes, axes_of, scale

pytestmark = pytest.mark.usefixtures("strict_dtypes")
GROUPED = replace(SIZES, heads=6, kv_heads=3)
LENGTHS = {"layers": 2, "embed": 24, "heads": 6, "kv_heads": 3, "head_dim": 4, "feed_forward": 40, "vocab": 31}
OUT = Axes("attention_out", ("heads", "embed"), inputs=("heads",))


def length(axis: Axes, name: str) -> int:
    """In a matrix, heads lie side by side."""
    return LENGTHS[name] * (LENGTHS["head_dim"] if axis.is_matrix and "heads" in name else 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_axis_has_the_length_that_its_name_says(recipe):
    model = tiny(recipe, GROUPED)
    shapes, axes = by_path(nn.meta.unbox(model.boxed)), by_path(model.axes)
    assert len(set(LENGTHS.values())) == len(LENGTHS)
    assert {path: leaf.shape for path, leaf in shapes.items()} == {
        path: tuple(length(axis, name) for name in axis.names) for path, axis in axes.items()
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_scanned_parameters_have_a_layers_axis_in_front(recipe):
    for path, axes in by_path(tiny(recipe).axes).items():
        assert [i for i, name in enumerate(axes.names) if name == "layers"] == [0] * path.startswith("layers/"), path


@pytest.mark.parametrize(
    "side, alone, scanned",
    [("inputs", (0,), (1,)), ("embed", (1,), (2,)), ("matrix", (0, 1), (1, 2))],
)
def test_positions_are_found_by_name(side, alone, scanned):
    box = Annotated(jnp.zeros((24, 24)), OUT)
    boxed = box.add_axis(0, {nn.PARTITION_NAME: "layers"})
    assert (box.axes.along(side), boxed.axes.along(side)) == (alone, scanned)
    assert boxed.remove_axis(0, {nn.PARTITION_NAME: "layers"}).axes == OUT


def test_a_scale_is_not_a_matrix():
    scale = Axes("alpha", ("embed",))
    assert OUT.is_matrix and not scale.is_matrix and scale.along("inputs") == ()


class OneScale(nn.Module):
    """s, alone."""

    first: float
    stored: float

    @nn.compact
    def __call__(self) -> jax.Array:
        return scale(self, "alpha", ("embed",), (5,), init=self.first, stored=self.stored)


@pytest.mark.parametrize("init, stored", [(0.01, 0.0625), (1.0, 1.0), (0.05, 0.03125)])
def test_a_scale_is_stored_as_told_starts_at_init_and_moves_by_their_ratio(init, stored):
    module = OneScale(init, stored)
    boxed = module.init(jax.random.key(0))
    assert axes_of(boxed)["params"]["alpha"] == Axes("alpha", ("embed",))
    variables = nn.meta.unbox(boxed)
    np.testing.assert_array_equal(variables["params"]["alpha"], np.full(5, stored, np.float32))
    np.testing.assert_allclose(np.asarray(module.apply(variables)), np.full(5, init), rtol=1e-6)
    slope = jax.jacobian(module.apply)(variables)["params"]["alpha"]
    np.testing.assert_allclose(slope, np.eye(5) * init / stored, rtol=1e-6)
