"""From a config to the objects of a run: architecture, model, optimizer, mesh, shardings. No files, no loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from angpt_jax import attention, flops, optim, sharding, training_flops
from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.axes import axes_of
from angpt_jax.config import Config, DataConfig, ModelConfig
from angpt_jax.data.text_cache import cache_root
from angpt_jax.errors import UserError
from angpt_jax.how import How
from angpt_jax.instruments import make_observer
from angpt_jax.layout import Device, Layout
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
    layout: Layout
    abstract: TrainState

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract)

    def flops_per_token(self, context: int) -> int:
        """Forward and backward."""
        weights = flops.product_weights(self.abstract.params, self.axes, self.model.tied_embeddings)
        sizes = self.model.sizes
        return training_flops.per_token(weights, sizes.layers, sizes.width, context)


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


def build(config: Config, arch: Arch, sizes: Sizes, devices: Sequence[Device] | None = None) -> Experiment:
    """Everything for a resolved config, on `devices` (those here). Nothing is computed yet."""
    layout = sharding.make_layout(config.mesh, devices)
    model = decoder(config, arch, sizes, layout)
    tokens_BL = jax.ShapeDtypeStruct((1, config.model.context), jnp.int32)
    boxed = jax.eval_shape(on_one_device(model).init, jax.random.key(0), tokens_BL, tokens_BL)["params"]
    axes, params = axes_of(boxed), nn.meta.unbox(boxed)
    sharding.check_split(axes, params, layout)

    schedule = optim.learning_rate(config.optim, config.run.steps)
    tx = optim.build(config.optim, schedule, arch.constraint, axes)

    param_shardings = sharding.parameter_shardings(axes, layout)
    shapes = jax.eval_shape(partial(first_state, tx), params)
    shardings = shapes.replace(
        params=param_shardings,
        opt_state=sharding.optimizer_shardings(tx, params, param_shardings, layout),
        **dict.fromkeys(("step", "skipped", "in_a_row"), sharding.everywhere(layout)),
    )
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return Experiment(model, axes, tx, schedule, layout, abstract)


def keep_compiled(data: DataConfig) -> None:
    """From now on, programs that took long to compile are found again: where JAX_COMPILATION_CACHE_DIR says, or else
    beside the token files."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_root(data.cache_dir) / "xla"))


def decoder(config: Config, arch: Arch, sizes: Sizes, layout: Layout) -> Decoder:
    """The model of a config, for the devices of `layout`."""
    model, across = config.model, config.data.attend_across_documents
    code = attention.choose(model.attention, layout, model.compute_dtype, across, sizes.head_width, model.context)
    return Decoder(
        arch,
        sizes,
        How(jnp.dtype(model.compute_dtype), code, layout),
        scan_layers=model.scan_layers,
        remat=tuple(model.remat) if isinstance(model.remat, list) else model.remat,
        tied_embeddings=model.tied_embeddings,
        attend_across_documents=across,
        loss_vocab_chunk=model.loss_vocab_chunk,
    )


def on_one_device(model: Decoder) -> Decoder:
    """The same function without a mesh: a single row of tokens, as for an init, can't be split."""
    return model.clone(how=How(model.how.dtype))


def initial_state(built: Experiment, config: Config) -> TrainState:
    """The state of step 0, made where it will lie. The layers are scanned, which gives the same weights and compiles
    sooner."""
    model = on_one_device(built.model).clone(scan_layers=True)
    init = jax.jit(partial(init_state, model, built.tx), static_argnums=1, out_shardings=built.shardings)
    return init(np.uint32(config.run.seed), config.model.context)  # 2**31 and more are no int32


def state_of(built: Experiment, params: Any) -> TrainState:
    """The state of step 0 of these parameters, which lie where they should; their memory goes into it."""
    return jax.jit(partial(first_state, built.tx), donate_argnums=0, out_shardings=built.shardings)(params)


def compiled_step(built: Experiment, config: Config, instruments: bool = False) -> Any:
    """The compiled train step, with instruments or without; it donates the state. Ahead of time, so that its memory
    can be asked."""
    rows, context = config.data.batch_size, config.model.context
    lies = sharding.batch_sharding(built.layout)
    tokens = jax.ShapeDtypeStruct((rows, context + 1), jnp.int32, sharding=lies)
    weights = jax.ShapeDtypeStruct((rows, context), jnp.float32, sharding=lies)
    observe = make_observer(built.axes, built.model.arch.constraint) if instruments else None
    step = make_train_step(built.model, built.tx, built.schedule, observe, config.optim.micro_batches)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(built.shardings, sharding.everywhere(built.layout)))
    return jitted.lower(built.abstract, {"tokens": tokens, "segments": tokens, "weights": weights}).compile()
