"""Where an array lies follows from the names of its axes, and what moves between devices is what must."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from angpt_jax import ops, sharding
from angpt_jax.axes import Axes
from angpt_jax.config import MeshConfig
from angpt_jax.layout import Layout

UP = Axes("up", ("embed", "feed_forward"), inputs=("embed",))
EVERYTHING = MeshConfig(1, 2, 2, 2, preset="context")
X_BLD, W_DF = np.random.default_rng(0).standard_normal((8, 4, 16)), np.random.default_rng(1).standard_normal((16, 32))


def layout(config: MeshConfig = EVERYTHING) -> Layout:
    return sharding.make_layout(config)


@pytest.mark.parametrize(
    "names, gathered, expected",
    [
        (("embed", "feed_forward"), False, PartitionSpec(("fsdp", "context"), "tensor")),
        (("embed", "feed_forward"), True, PartitionSpec(None, "tensor")),
        (("batch", "length", None), False, PartitionSpec(("replica", "fsdp"), "context", None)),
        (("batch", "length", "embed"), False, PartitionSpec("replica", None, ("fsdp", "context"))),
        (("vocab", "embed"), True, PartitionSpec("tensor", None)),
        (("layers", "head_dim"), False, PartitionSpec(None, None)),
    ],
)
def test_the_spec_of_an_array_follows_from_its_names(names, gathered, expected):
    def normal(spec: PartitionSpec) -> list[Any]:
        return [(axes,) if isinstance(axes, str) else axes for axes in spec]

    assert normal(layout().spec(*names, gathered=gathered)) == normal(expected)


def test_parts_are_those_of_all_mesh_axes_of_a_rule():
    assert [layout().parts(name) for name in ("batch", "length", "embed", "vocab", "layers")] == [2, 2, 4, 2, 1]
    assert Layout().parts("batch") == 1


def compiled(config: MeshConfig) -> tuple[str, Any]:
    """The program of a product and its gradients on that mesh, and what it computes."""
    here = layout(config)
    x = jax.device_put(jnp.asarray(X_BLD, jnp.float32), here.sharding("batch", "length", None))
    w = jax.device_put(jnp.asarray(W_DF, jnp.float32), here.sharding(*UP.names))

    def gradients(x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: jnp.square(ops.linear(x, w, 1.0, jnp.float32, place=here.of(UP))).sum(), (0, 1))(
            x, w
        )

    program: Any = jax.jit(gradients).lower(x, w).compile()
    return program.as_text(), program(x, w)


@pytest.mark.parametrize(
    "config", [MeshConfig(1, 8), MeshConfig(2, 4), EVERYTHING, MeshConfig(preset="data_parallel")], ids=str
)
def test_gradients_of_a_product_are_exact_and_lie_where_the_weight_lies(config):
    _, (dx, dw) = compiled(config)
    y = X_BLD @ W_DF
    np.testing.assert_allclose(dx, 2 * y @ W_DF.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, 2 * np.einsum("bld,blf->df", X_BLD, y), rtol=1e-5, atol=1e-4)
    here = layout(config)
    assert dw.sharding.is_equivalent_to(here.sharding(*UP.names), 2)


def test_a_gradient_is_brought_back_to_parts_and_added_up_over_replicas():
    """Under fsdp a reduce-scatter; its part, not the whole, goes over the replicas."""
    program, _ = compiled(MeshConfig(2, 4))
    assert re.findall(r"f32\[([\d,]+)\]\S* reduce-scatter\(", program) == ["4,32"]
    assert re.findall(r"f32\[([\d,]+)\]\S* all-reduce\(", program) == ["4,32"]
    assert set(re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", program)) == {"16,32"}


@pytest.mark.parametrize("config", [MeshConfig(1, 8), EVERYTHING], ids=str)
def test_a_look_up_moves_hidden_states_and_not_the_table(config):
    here, table_VD = layout(config), np.random.default_rng(2).standard_normal((1024, 16)).astype(np.float32)
    tokens_BL = np.random.default_rng(3).integers(0, 1024, (8, 4))
    lies = here.sharding("vocab", "embed")
    look_up = jax.jit(lambda table, tokens: ops.lookup(table, tokens, here))
    program: Any = look_up.lower(jax.device_put(table_VD, lies), tokens_BL).compile()
    np.testing.assert_array_equal(program(jax.device_put(table_VD, lies), tokens_BL), table_VD[tokens_BL])
    whole = [
        shape for shape in re.findall(r"f32\[([\d,]+)\]", program.as_text()) if shape.startswith(("1024,16", "512,16"))
    ]
    assert whole == []
