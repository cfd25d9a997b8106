"""A thousand layers of anGPT: they compile like one, keep the norm of the stream, and train; GPT+ beside them.

python -m pytest -s tests/test_depth.py    # prints what it measures
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angpt_jax import experiment, sharding
from angpt_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig
from angpt_jax.step import make_train_step

LAYERS = {"angpt": 1000, "gpt_plus": 500}  # half of them show where GPT+ goes
VOCAB, CONTEXT, BATCH, STEPS = 64, 32, 2, 20
PLACES = {"angpt": {"residual": {"alpha_init": "1/layers"}, "head": {"scale_init": "sqrt(width)"}}, "gpt_plus": {}}
OPTIMIZED: Any = {"xla_backend_optimization_level": 2}  # at level 0, that of the tests, a step takes twice as long


@dataclass(frozen=True)
class Deep:
    """What was measured of one model.

    Args:
        compile_seconds: of tracing, lowering and compiling the train step
        streams: mean norm of the stream before each sublayer and behind the last layer, at init and after training
        losses: of each step
    """

    compile_seconds: float
    streams: tuple[np.ndarray, np.ndarray]
    losses: np.ndarray


def config(arch: str) -> Config:
    model = ModelConfig(
        arch,
        width=64,
        layers=LAYERS[arch],
        heads=4,
        vocab=VOCAB,
        context=CONTEXT,
        feed_forward=64,
        remat="full",
        places=PLACES[arch],
    )
    optim = OptimConfig(1e-3, schedule="constant")
    return Config(model, optim, DataConfig(batch_size=BATCH), RunConfig(STEPS), MeshConfig(1, 1, 1))


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Each token follows from the one before it, by one permutation of the vocabulary."""
    rng = np.random.default_rng(0)
    successor = rng.permutation(VOCAB).astype(np.int32)
    for _ in range(STEPS):
        tokens = [rng.integers(0, VOCAB, BATCH, dtype=np.int32)]
        for _ in range(CONTEXT):
            tokens.append(successor[tokens[-1]])
        one_document, all_count = np.ones((BATCH, CONTEXT + 1), np.int32), np.ones((BATCH, CONTEXT), np.float32)
        yield {"tokens": np.stack(tokens, axis=1), "segments": one_document, "weights": all_count}


def compiled_step(built: experiment.Experiment) -> tuple[Any, float]:
    """The train step, and the seconds that it took; never from the compile cache."""
    lies = sharding.batch_sharding(built.layout)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), next(batches()))
    step = jax.jit(
        make_train_step(built.model, built.tx, built.schedule),
        donate_argnums=0,
        out_shardings=(built.shardings, None),
    )
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # what is never written is never read
    try:
        start = time.perf_counter()
        lowered = step.lower(built.abstract, batch)
        return lowered.compile(compiler_options=OPTIMIZED), time.perf_counter() - start
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@cache
def deep(arch: str) -> Deep:
    """Builds and trains it as the package does."""
    resolved, recipe, sizes = experiment.resolved(config(arch))
    built = experiment.build(resolved, recipe, sizes)
    step, seconds = compiled_step(built)
    state, put = experiment.initial_state(built, resolved), sharding.batch_putter(built.layout, BATCH)

    @jax.jit
    def streams(params: Any, tokens_BL: jax.Array) -> jax.Array:
        seen = built.model.apply({"params": params}, tokens_BL, jnp.zeros_like(tokens_BL), mutable=["instruments"])[1]
        seen: Any = seen["instruments"]
        inside = [seen["layers"][f"{sublayer}_stream"]["mean"] for sublayer in ("attention", "mlp")]
        return jnp.append(jnp.stack(inside, axis=1), seen["final_stream"]["mean"])

    tokens_BL = next(batches())["tokens"][:, :-1]
    first, losses = np.asarray(streams(state.params, tokens_BL)), []
    for batch in batches():
        state, metrics = step(state, put(batch))
        losses.append(float(metrics["loss"]))
    measured = Deep(seconds, (first, np.asarray(streams(state.params, tokens_BL))), np.array(losses))
    show(arch, measured)
    return measured


def show(arch: str, measured: Deep) -> None:
    layers = LAYERS[arch]
    print(f"\n{arch}, {layers} layers: train step compiled in {measured.compile_seconds:.1f} s")
    print(f"  loss {' '.join(f'{loss:.2f}' for loss in measured.losses)}")
    for when, stream in zip(("at init", f"after {STEPS} steps"), measured.streams, strict=True):
        norms = "  ".join(f"{norm:.4g}" for norm in stream[:: layers // 5])
        print(f"  norm of the stream {when}, every {layers // 10} layers: {norms}")


def test_a_thousand_layers_compile_in_less_than_a_minute():
    assert deep("angpt").compile_seconds < 60


def test_the_stream_of_angpt_has_norm_one_at_every_depth():
    stream, _ = deep("angpt").streams
    assert stream.shape == (2 * 1000 + 1,)
    np.testing.assert_allclose(stream, 1, atol=0.05)


def test_a_thousand_layers_learn():
    losses = deep("angpt").losses
    assert len(losses) == STEPS and np.isfinite(losses).all()
    assert losses.max() < 2 * losses[0] and losses[-1] <= losses[0]
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()


def test_the_stream_stays_near_norm_one_while_it_learns():
    _, stream = deep("angpt").streams
    assert 0.7 < stream.min() and stream.max() < 1.5


def test_the_stream_of_gpt_plus_grows_with_depth_at_init_and_more_while_it_trains():
    deep_plus = deep("gpt_plus")
    for stream, factor in zip(deep_plus.streams, (1.05, 10), strict=True):
        coarse = stream[:: LAYERS["gpt_plus"] // 5]
        assert (np.diff(coarse) > 0).all() and stream[-1] > factor * stream[0]
    assert np.isfinite(deep_plus.losses).all()
