"""From a config to the objects of a run: architecture, model, optimizer, mesh, shardings. No files, no loop."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from angpt_jax import optim, sharding
from angpt_jax.arch import Arch, Sizes, override
from angpt_jax.archs import RECIPES
from angpt_jax.axes import axes_of
from angpt_jax.config import Config, ModelConfig
from angpt_jax.errors import UserError
from angpt_jax.model import Decoder
from angpt_jax.nu import approximate_nu
from angpt_jax.step import TrainState, first_state, init_state, make_train_step


@dataclass(frozen=True)
class Experiment:
    """All that the loop needs to make and shard a state; `abstract` carries shapes, dtypes and shardings."""

    model: Decoder
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh
    abstract: TrainState

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract)


def architecture(model: ModelConfig) -> tuple[Arch, Sizes]:
    """The recipe of `model.arch` for these sizes, with `model.places` replaced."""
    if model.arch not in RECIPES:
        raise UserError(f"model.arch: unknown architecture, got {model.arch!r}; one of {', '.join(RECIPES)}")
    sizes = Sizes(
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        feed_forward=model.feed_forward_width,
        vocab=model.vocab,
        rope_theta=model.rope_theta,
    )
    recipe = RECIPES[model.arch](sizes)
    arch = override(recipe, model.places)
    if recipe.nu.activation != 1.0 and "activation" not in model.places.get("nu", {}):  # it follows another f
        follows = approximate_nu(sizes.width, sizes.heads, sizes.feed_forward, arch.gate["activation"])
        arch = replace(arch, nu=replace(arch.nu, activation=follows.activation))
    return arch, sizes


def resolved(config: Config) -> tuple[Config, Arch, Sizes]:
    """The config without a null that the recipe or the sizes decide: what `config.yaml` of a run holds."""
    arch, sizes = architecture(config.model)
    config = replace(
        config,
        model=replace(config.model, feed_forward=sizes.feed_forward),
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
    return Experiment(model, tx, schedule, mesh, abstract)


def initial_state(built: Experiment, config: Config) -> TrainState:
    """The state of step 0, made where it will lie."""
    init = jax.jit(partial(init_state, built.model, built.tx), static_argnums=1, out_shardings=built.shardings)
    return init(config.run.seed, config.model.context)


def compiled_step(built: Experiment, config: Config) -> Any:
    """The compiled train step; it donates the state. Ahead of time, so that its memory can be asked."""
    shape = (config.data.batch_size, config.model.context + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.batch_sharding(built.mesh))
    step = make_train_step(built.model, built.tx, built.schedule)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(built.shardings, None))
    return jitted.lower(built.abstract, {"tokens": tokens, "segments": tokens}).compile()
