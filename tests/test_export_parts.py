"""Each part that an export brings in PyTorch is the part of ours: same names, same parameters, same numbers."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from angpt_jax import ops
from angpt_jax.axes import Annotated
from angpt_jax.exports.standalone import norms_angpt_jax, parts_angpt_jax
from angpt_jax.exports.standalone.norms_angpt_jax import At
from angpt_jax.nu import ACTIVATIONS
from angpt_jax.part import setting_types
from angpt_jax.parts import PARTS

B, L, H, G, K, V, LAYER = 2, 3, 4, 2, 6, 7, 3
RNG = np.random.default_rng(0)
ANGLES_LR = ops.rotary_angles(jnp.arange(L), K, 100.0)


def choices(kind: type) -> Iterator[dict[str, Any]]:
    """Settings that are nobody's default, with each word that a setting may be."""
    values: dict[str, list[Any]] = {}
    for number, (name, hint) in enumerate(setting_types(kind).items()):
        words = list(getattr(hint, "__args__", ())) or (list(ACTIVATIONS) if name == "activation" else [])
        values[name] = words or [0.3 + 0.1 * number]
    for combination in product(*values.values()):
        yield dict(zip(values, combination, strict=True))


CASES = [
    (place, name, settings)
    for place, parts in PARTS.items()
    if place != "init"
    for name, kind in parts.items()
    for settings in choices(kind)
]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def call(place: str, name: str) -> tuple[list[np.ndarray], At, list[Any], list[Any]]:
    """What a part in that place is given: arrays, where it stands, and what our module and theirs are given besides."""
    layer = jnp.float32(LAYER)
    if place == "qk":
        angles = torch.tensor(np.asarray(ANGLES_LR))[None].expand(B, L, -1)
        return (
            [normal(B, L, H, K), normal(B, L, G, K)],
            At(K, LAYER, H, G),
            [lambda x: ops.rotate(x, ops.turns(ANGLES_LR))],
            [angles],
        )
    if place == "value":
        return [normal(B, L, G, K)], At(K, LAYER, H, G), [], []
    if place == "gate":
        return [normal(B, L, K) for _ in PARTS[place][name].inputs], At(K, LAYER), [], []
    if place == "residual":
        return [normal(B, L, K), normal(B, L, K)], At(K, LAYER), [layer], []
    return [normal(B, L, K)], At(K, LAYER), [layer], []


def filled(shapes: Any) -> Any:
    """Random parameters near 1 instead of shapes."""
    return jax.tree.map(
        lambda box: jnp.asarray(RNG.uniform(-1.5, 1.5, box.value.shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, Annotated),
    )


def give(module: torch.nn.Module, params: Any) -> None:
    """The parameters by their names, which must be the same."""
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    module.load_state_dict({name: torch.tensor(array) for name, array in flat.items()})


def compare(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), theirs if isinstance(theirs, tuple) else [theirs], strict=True):
        np.testing.assert_allclose(b.detach().numpy(), a, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("place, name, settings", [case for case in CASES if case[0] != "head"], ids=str)
def test_a_part_is_ours(place: str, name: str, settings: dict[str, Any]) -> None:
    arrays, at, ours, theirs = call(place, name)
    module: Any = PARTS[place][name](**settings)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *arrays, *ours)).get("params", {})
    params = filled(shapes)
    part = parts_angpt_jax.PARTS[place][name](settings, at)
    give(part, params)
    inputs = [torch.tensor(array) for array in arrays]
    compare(module.apply({"params": params}, *arrays, *ours), part(*inputs, *theirs))


@pytest.mark.parametrize("name, settings", [case[1:] for case in CASES if case[0] == "head"], ids=str)
def test_a_head_is_ours(name: str, settings: dict[str, Any]) -> None:
    h_BLD, w_DV = normal(B, L, K), normal(K, V)
    module: Any = PARTS["head"][name](**settings)
    params = filled(jax.eval_shape(lambda: module.init(jax.random.key(0), w_DV)).get("params", {}))
    part = parts_angpt_jax.PARTS["head"][name](settings, At(K, vocab=V))
    give(part, params)
    linear = torch.nn.Linear(K, V, bias=False)
    linear.weight.data = torch.tensor(w_DV.T)
    compare(h_BLD @ module.apply({"params": params}, w_DV), part(torch.tensor(h_BLD), linear))


def test_names_are_the_same() -> None:
    theirs = {place: set(parts) for place, parts in parts_angpt_jax.PARTS.items()}
    assert theirs == {place: set(parts) for place, parts in PARTS.items() if place != "init"}
    for place, parts in parts_angpt_jax.PARTS.items():
        assert {name: part.__name__ for name, part in parts.items()} == {
            name: kind.__name__ for name, kind in PARTS[place].items()
        }
    assert set(parts_angpt_jax.ACTIVATIONS) == set(ACTIVATIONS)
    for name, epsilon in norms_angpt_jax.EPSILON.items():
        assert PARTS["input_norm"][name].epsilon == epsilon
    gates: dict[str, Any] = parts_angpt_jax.PARTS["gate"]
    assert {name: kind.inputs for name, kind in PARTS["gate"].items()} == {
        name: part.inputs for name, part in gates.items()
    }
