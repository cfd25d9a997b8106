"""What the tests share: eight virtual CPU devices, a compile cache, strict dtypes, and tiny models, each built once."""

import os
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from angpt_jax.arch import Arch, Sizes, override
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Axes, axes_of
from angpt_jax.model import Decoder

CACHE = Path(os.environ.get("ANGPT_TEST_CACHE") or Path(__file__).parent.parent / ".pytest_cache" / "xla")
SIZES = Sizes(width=24, layers=2, heads=3, feed_forward=40, vocab=31)  # no two of B, L, D, H, K, F, V, N are equal
BATCH, LENGTH = 4, 13


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_compilation_cache_dir", str(CACHE.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # Two workers may meet at one cache entry: whoever reads it half written compiles instead.
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache:UserWarning")


@dataclass(frozen=True)
class Tiny:
    """A decoder at test size, with parameters."""

    model: Decoder

    @cached_property
    def axes(self) -> Any:
        return axes_of(jax.eval_shape(lambda: _init(self.model)))

    @cached_property
    def initial(self) -> Any:
        """The parameters as the recipe draws them."""
        return jax.jit(lambda: nn.meta.unbox(_init(self.model)))()

    @cached_property
    def random(self) -> Any:
        """Parameters that hide nothing, a function of path and shape alone: rows of norm about 1, scales of 0.5 … 1.5
        times their first value, alpha of 0.1 … 0.5, stored with either sign."""

        def draw(path: Any, axes: Axes, shape: jax.ShapeDtypeStruct) -> Array:
            rng = np.random.default_rng(list(path_of(path).encode()))
            if axes.is_matrix:
                fan_in = np.prod([shape.shape[i] for i in axes.along("inputs")])
                return jnp.asarray(rng.standard_normal(shape.shape) / np.sqrt(fan_in), jnp.float32)
            first = 1.0
            for place in (self.model.arch.residual, self.model.arch.head, self.model.arch.qk):
                ...
            return jnp.asarray(values, jnp.float32)

        shapes = jax.eval_shape(lambda: nn.meta.unbox(_init(self.model)))
        return jax.tree_util.tree_map_with_path(draw, self.axes, shapes)

    def logits(self, params: Any, tokens_BL: Any, segments_BL: Any = None) -> np.ndarray:
        """logits_BLV; one document if there are no segments."""
        segments_BL = np.zeros_like(tokens_BL) if segments_BL is None else segments_BL
        return np.asarray(_apply(self.model, params, tokens_BL, segments_BL))


@cache
def tiny(
    recipe: str, sizes: Sizes = SIZES, dtype: Any = jnp.float32, scan_layers: bool = True, arch: Arch | None = None
) -> Tiny:
    """The decoder of a recipe, or of `arch`."""
    return Tiny(Decoder(arch or RECIPES[recipe](sizes), sizes, dtype=dtype, scan_layers=scan_layers))


def changed(recipe: str, places: dict[str, Any], sizes: Sizes = SIZES) -> Arch:
    """A recipe with places replaced, as from YAML."""
    return override(RECIPES[recipe](sizes), places)


def random_batch(sizes: Sizes = SIZES, batch: int = BATCH, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Tokens (B, L+1), and segments of several documents in each row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes.vocab, (batch, length + 1), dtype=np.int32)
    return {"tokens": tokens, "segments": np.sort(rng.integers(0, 3, (batch, length + 1), dtype=np.int32), axis=1)}


def path_of(path: Any) -> str:
    """`layers/mlp/up`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@partial(jax.jit, static_argnums=0)
def _init(model: nn.Module) -> Any:
    tokens_BL = jnp.zeros((1, LENGTH), jnp.int32)
    return model.init(jax.random.key(0), tokens_BL, tokens_BL)


@partial(jax.jit, static_argnums=0)
def _apply(model: nn.Module, params: Any, tokens_BL: Array, segments_BL: Array) -> Any:
    return model.apply({"params": params}, tokens_BL, segments_BL)
