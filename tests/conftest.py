"""What the tests share: eight virtual CPU devices, a compile cache, and tiny models, each built once."""

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

# Level 0 and the older emitter of fusions compile in a fifth of the time, from the same HLO. Products stay XLA's own: a
# library that it would give them to rounds otherwise on each kind of CPU (1e-5 of a gradient). What the user sets wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_experimental_ynn_fusion_type=",
        os.environ.get("XLA_FLAGS", ""),
    ]
)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from weight_runs import make_run

from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Annotated, axes_of
from angpt_jax.model import Decoder
from angpt_jax.places import SUBLAYERS
from angpt_jax.step import nats

CACHE = Path(os.environ.get("ANGPT_TEST_CACHE") or Path(__file__).parent.parent / ".pytest_cache" / "xla")
SIZES = Sizes(width=24, layers=2, heads=3, feed_forward=40, vocab=31)  # no two of B, L, D, H, K, F, V, N are equal
BATCH, LENGTH = 4, 13
EVEN = Sizes(width=16, layers=2, heads=2, feed_forward=32, vocab=64)  # what a mesh splits in two


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_compilation_cache_dir", str(CACHE.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # Two workers may meet at one cache entry: whoever reads it half written compiles instead.
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache:UserWarning")


@pytest.fixture(scope="module")
def nothing_is_left_to_others() -> Iterator[None]:
    """For modules in which TensorStore drops what it still waits for, as when a part of a read or save fails."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def source_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `runs/source` of a workspace, with checkpoints of steps 3 and 6; not to be changed."""
    return make_run(tmp_path_factory.mktemp("source_run") / "w", "source")


@pytest.fixture(scope="module")
def strict_dtypes() -> Iterator[None]:
    """No silent promotion, for modules that ask for it: Optax's Adam would not pass (a float to the power of int32)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@dataclass(frozen=True)
class Tiny:
    """A decoder at test size, with its parameters as trees."""

    model: Decoder

    @cached_property
    def boxed(self) -> Any:
        """The annotated parameters, shapes only."""
        return jax.eval_shape(lambda: _init(self.model))

    @cached_property
    def axes(self) -> Any:
        return axes_of(self.boxed)

    @cached_property
    def initial(self) -> Any:
        """As the recipe draws them (slow to compile: most tests do with `random`)."""
        return jax.jit(lambda: nn.meta.unbox(_init(self.model)))()

    @cached_property
    def first_scales(self) -> Any:
        """The scales and gains as the recipe starts them; None for each matrix."""

        def scale_or_none(box: Annotated) -> Array | None:
            return None if box.axes.is_matrix else box.value

        return jax.jit(lambda: jax.tree.map(scale_or_none, _init(self.model), is_leaf=is_box))()

    @cached_property
    def random(self) -> Any:
        """Values that hide nothing, drawn from path and shape alone: rows of norm about 1, scales of 0.5 … 1.5 times
        their first value (−0.5 … 0.5 where that is 0), the α of a join of 0.15 … 0.45, stored with either sign."""

        def draw(path: Any, box: Annotated, first: Array | None) -> Array:
            rng = np.random.default_rng(list(path_of(path).encode()))
            if first is None:
                fan_in = np.prod([box.value.shape[i] for i in box.axes.along("inputs")])
                return jnp.asarray(rng.standard_normal(box.value.shape) / np.sqrt(fan_in), jnp.float32)
            drawn = rng.uniform(0.5, 1.5, first.shape)
            values = np.where(np.asarray(first) == 0, drawn - 1, drawn * np.asarray(first))
            for sublayer in SUBLAYERS:
                if path_of(path) == f"layers/{sublayer}_residual/alpha":
                    alpha_init = self.model.arch.residual.at(sublayer)["alpha_init"]
                    values *= rng.choice([-0.3, 0.3], first.shape) / alpha_init
            return jnp.asarray(values, jnp.float32)

        return jax.tree_util.tree_map_with_path(draw, self.boxed, self.first_scales, is_leaf=is_box)

    def logits(self, params: Any, tokens_BL: Any, segments_BL: Any = None) -> np.ndarray:
        """logits_BLV; one document if there are no segments."""
        segments_BL = np.zeros_like(tokens_BL) if segments_BL is None else segments_BL
        return np.asarray(_apply(self.model, params, tokens_BL, segments_BL))


@cache
def tiny(recipe: str, sizes: Sizes = SIZES, *, arch: Arch | None = None, **options: Any) -> Tiny:
    """The decoder of a recipe, or of `arch`; `options` are those of the Decoder."""
    return Tiny(Decoder(arch or RECIPES[recipe](sizes), sizes, **options))


def random_batch(sizes: Sizes = SIZES, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    """Tokens (B, L+1), and segments of several documents in each row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes.vocab, (batch, length + 1), dtype=np.int32)
    segments = np.sort(rng.integers(1, 4, (batch, length + 1), dtype=np.int32), axis=1)
    return {"tokens": tokens, "segments": segments, "weights": np.ones((batch, length), np.float32)}


def even_batch() -> dict[str, Any]:
    """One of EVEN's sizes that eight devices can share."""
    return random_batch(EVEN, batch=8, length=12)


@cache
def loss_and_gradients(model: Tiny) -> tuple[Any, Any]:
    """Of `random` on `even_batch`, on one device; sizes are those of EVEN or close to them."""
    compute = jax.jit(jax.value_and_grad(lambda params, batch: nats(model.model, params, batch).mean()))
    return compute(model.random, even_batch())


def is_box(node: Any) -> bool:
    return isinstance(node, Annotated)


def path_of(path: Any) -> str:
    """`layers/mlp/up`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _init(model: Decoder) -> Any:
    tokens_BL = jnp.zeros((1, LENGTH), jnp.int32)
    return model.init(jax.random.key(0), tokens_BL, tokens_BL)["params"]


@partial(jax.jit, static_argnums=0)
def _apply(model: Decoder, params: Any, tokens_BL: Array, segments_BL: Array) -> Any:
    return model.apply({"params": params}, tokens_BL, segments_BL)
