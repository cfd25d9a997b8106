"""From a config to the objects of a run: architecture, model, optimizer, mesh, shardings. No files, no loop."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from angpt_jax import flops, optim, sharding
from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.axes import axes_of
from angpt_jax.config import Config, ModelConfig
from angpt_jax.errors import UserError
from angpt_jax.instruments import make_observer
from angpt_jax.model import Decoder
from angpt_jax.places import nearest, override
from angpt_jax.step import TrainState, first_state, init_state, make_train_step


@dataclass(frozen=True)
class Experiment:
    """All that the loop needs to make and shard a state; `abstract` carries shapes, dtypes and shardings."""

    model: Decoder
    axes: Any
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh
    abstract: TrainState

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract)

    def flops_per_token(self, context: int) -> int:
        """Forward and backward."""
        weights = flops.product_weights(self.abstract.params, self.axes, self.model.tied_embeddings)
        return flops.training_flops_per_token(weights, self.model.sizes, context)


def architecture(model: ModelConfig) -> tuple[Arch, Sizes]:
    """The recipe of `model.arch` for these sizes, with `model.places` replaced."""
    if model.arch not in RECIPES:
        raise UserError(f"model.arch: unknown architecture, got {model.arch!r}; {nearest(model.arch, RECIPES)}")
    sizes = Sizes(
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        feed_forward=model.feed_forward_width,
        vocab=model.vocab,
        kv_heads=model.kv_heads,
        rope_theta=model.rope_theta,
    )
    return override(RECIPES[model.arch](sizes), model.places, sizes), sizes


def resolved(config: Config) -> tuple[Config, Arch, Sizes]:
    """The config without a null that the recipe or the sizes decide: what `config.yaml` of a run holds."""
    arch, sizes = architecture(config.model)
    config = replace(
        config,
        model=replace(config.model, feed_forward=sizes.feed_forward, kv_heads=sizes.key_value_heads),
        optim=optim.with_recommendations(config.optim, arch.optimizer),
    )
    return config, arch, sizes


def build(config: Config, arch: Arch, sizes: Sizes) -> Experiment:
    """Everything for a resolved config, on the devices here. Nothing is computed yet."""
    model = Decoder(
        arch,
        sizes,
        dtype=jnp.dtype(config.model.compute_dtype),
        scan_layers=config.model.scan_layers,
        remat=config.model.remat,
        tied_embeddings=config.model.tied_embeddings,
        attend_across_documents=config.data.attend_across_documents,
    )
    tokens_BL = jax.ShapeDtypeStruct((1, config.model.context), jnp.int32)
    boxed = jax.eval_shape(model.init, jax.random.key(0), tokens_BL, tokens_BL)["params"]
    axes, params = axes_of(boxed), nn.meta.unbox(boxed)

    mesh = sharding.make_mesh(config.mesh)
    schedule = optim.learning_rate(config.optim, config.run.steps)
    tx = optim.build(config.optim, schedule, arch.constraint, axes)

    param_shardings = sharding.parameter_shardings(axes, mesh)
    shapes = jax.eval_shape(partial(first_state, tx), params)
    shardings = shapes.replace(
        step=NamedSharding(mesh, PartitionSpec()),
        params=param_shardings,
        opt_state=sharding.optimizer_shardings(tx, params, param_shardings, mesh),
    )
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return Experiment(model, axes, tx, schedule, mesh, abstract)


def initial_state(built: Experiment, config: Config) -> TrainState:
    """The state of step 0, made where it will lie."""
    init = jax.jit(partial(init_state, built.model, built.tx), static_argnums=1, out_shardings=built.shardings)
    return init(config.run.seed, config.model.context)


def compiled_step(built: Experiment, config: Config, instruments: bool = False) -> Any:
    """The compiled train step, with instruments or without; it donates the state. Ahead of time, so that its memory
    can be asked."""
    rows, context = config.data.batch_size, config.model.context
    lies = sharding.batch_sharding(built.mesh)
    tokens = jax.ShapeDtypeStruct((rows, context + 1), jnp.int32, sharding=lies)
    weights = jax.ShapeDtypeStruct((rows, context), jnp.float32, sharding=lies)
    observe = make_observer(built.axes, built.model.arch.constraint) if instruments else None
    step = make_train_step(built.model, built.tx, built.schedule, observe)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(built.shardings, None))
    return jitted.lower(built.abstract, {"tokens": tokens, "segments": tokens, "weights": weights}).compile()
