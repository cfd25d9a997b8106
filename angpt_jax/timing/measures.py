"""What one process measures of one config, each in rounds: units of work, and the seconds that one of them takes."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from angpt_jax import chips, cli, experiment, flops, fold, footprint, optim, rules, sharding, trained
from angpt_jax.arch import Constraint
from angpt_jax.config import Config
from angpt_jax.data import pipeline
from angpt_jax.data.pipeline import Order
from angpt_jax.data.tokens import load_tokens
from angpt_jax.evaluation import make_window_nats
from angpt_jax.generate import Generator
from angpt_jax.timing.side import PROMPT, Request

Run = Callable[[int], None]  # does so many units, and waits for the last of them
GEMM = {"cpu": 2048}  # rows and columns of the product whose speed is the most that one can expect; elsewhere 8192


@dataclass
class Measure:
    """Units of work of one kind.

    Args:
        run: does so many of them
        units: in a round
        waited: seconds that they waited for data
        apart: seconds that went to something else
    """

    run: Run
    units: int = 1
    waited: float = 0.0
    apart: float = 0.0

    def round(self) -> dict[str, float]:
        """Of one unit: its seconds, and the page faults and seconds for data among them; of the round: the seconds of
        cores that this process took, and those that went by."""
        self.waited = self.apart = 0.0
        cores, faults, began = time.process_time(), _faults(), time.perf_counter()
        self.run(self.units)
        took = time.perf_counter() - began
        return {
            "seconds": (took - self.apart) / self.units,
            "faults": (_faults() - faults) / self.units,
            "waited": self.waited / self.units,
            "core_seconds": time.process_time() - cores,
            "elapsed": took,
        }

    def calibrate(self, seconds: float) -> None:
        """Makes a round take at least so long, after a unit that warms up."""
        self.run(1)
        while self.round()["elapsed"] < seconds:
            self.units *= 2


class Measures:
    """All that a request asks for, compiled and warm."""

    def __init__(self, request: Request) -> None:
        config = cli.parse(Config, list(request.words), command="train", default_config="default")
        config, arch, sizes = experiment.resolved(config)
        cli.raise_problems(rules.check(config, jax.device_count(), sharding.slice_count(jax.devices())))
        self._config, self._request = config, request
        if request.keep_compiled:
            experiment.keep_compiled(config.data)
        tokens = load_tokens(config.data, config.model.vocab)
        pipeline.check_length(tokens, config.model.context)
        self._built = experiment.build(config, arch, sizes)
        data = config.data
        order = Order(config.model.context, data.batch_size, data.shuffle_seed, data.packing)
        self._batches = pipeline.train_batches(tokens.train, order, workers=data.workers)
        self._state = experiment.initial_state(self._built, config)
        self.facts: dict[str, Any] = self._machine()
        self._measures = {"gemm": Measure(self._gemm())}
        make = {"train": self._train, "forward": self._forward, "data": self._data, "constraint": self._constraint}
        for name in request.measures:
            self._measures |= self._decode() if name == "decode" else make[name]()
        for measure in self._measures.values():
            measure.calibrate(request.seconds)
        self.facts |= {"measures": list(self._measures), "resident_bytes": _resident_bytes()}

    def __enter__(self) -> "Measures":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batches.close()

    def round(self, name: str) -> dict[str, float]:
        return self._measures[name].round()

    def _machine(self) -> dict[str, Any]:
        device = jax.devices()[0]
        chip, sizes = chips.find(device.device_kind), self._config.model
        tokens = self._config.data.batch_size * sizes.context
        return {
            "platform": device.platform,
            "device_kind": device.device_kind,
            "devices": jax.device_count(),
            "jax": jax.__version__,
            "arch": sizes.arch,
            "parameters": flops.parameter_count(self._built.abstract.params),
            "tokens_per_step": tokens,
            "flops_per_step": tokens * self._built.flops_per_token(sizes.context),
            "gemm_flops": 2 * GEMM.get(device.platform, 8192) ** 3,
            "peak_flops": chip and chip.tflops * 1e12 * jax.device_count(),
        }

    def _gemm(self) -> Run:
        size = GEMM.get(jax.default_backend(), 8192)
        x, product = jnp.ones((size, size), self._config.model.compute_dtype), jax.jit(jnp.matmul)

        def run(units: int) -> None:
            for _ in range(units):
                product(x, x).block_until_ready()

        return run

    def _train(self) -> dict[str, Measure]:
        """Steps as the loop takes them: batches of the real data, which are on their way before they are asked for."""
        began = time.perf_counter()
        step = experiment.compiled_step(self._built, self._config)
        memory, cost = footprint.footprint(step, self._built.abstract), step.cost_analysis()
        whole = not self._config.model.scan_layers  # or else XLA counts one layer
        self.facts |= {
            "compile_seconds": time.perf_counter() - began,
            "peak_bytes": memory and memory.peak,
            "temporary_bytes": memory and memory.temporaries,
            "bytes_accessed": cost.get("bytes accessed") if whole else None,
            "flops_counted": cost.get("flops") if whole else None,
        }
        batches = self._on_devices()

        def run(units: int) -> None:
            for _ in range(units):
                asked = time.perf_counter()
                batch = next(batches)
                measure.waited += time.perf_counter() - asked
                self._state, metrics = step(self._state, batch)
            jax.block_until_ready(metrics)

        measure = Measure(run)
        return {"train": measure}

    def _on_devices(self) -> Iterator[Any]:
        put = sharding.batch_putter(self._built.layout, self._config.data.batch_size)
        return sharding.ahead(self._batches, put)

    def _forward(self) -> dict[str, Measure]:
        """The loss of a batch, as an evaluation computes it."""
        window_nats, batch = make_window_nats(self._built.model), next(self._on_devices())

        def run(units: int) -> None:
            for _ in range(units):
                window_nats(self._state.params, batch).block_until_ready()

        return {"forward": Measure(run)}

    def _data(self) -> dict[str, Measure]:
        """Batches of the data, which nobody uses."""

        def run(units: int) -> None:
            for _ in range(units):
                next(self._batches)

        return {"data": Measure(run)}

    def _decode(self) -> dict[str, Measure]:
        """Greedy tokens behind prompts that are read already, with all factors folded in where that can be done."""
        model, params = self._built.model, self._state.params
        if not list(fold.obstacles(model.arch, model.tied_embeddings)):
            model, params = trained.fold_in(model, params)
        endless = cast(Any, SimpleNamespace(size=model.sizes.vocab, end_of_document=-1))  # no row ends early
        generator = Generator(model, params, endless, self._config.model.context)
        most = 1 + self._request.decode_tokens
        self.facts["decoded_tokens"] = self._request.decode_tokens

        def measure(rows: int) -> Measure:
            prompts = np.random.default_rng(0).integers(0, model.sizes.vocab, (rows, PROMPT)).tolist()

            def run(units: int) -> None:
                for _ in range(units):
                    began = time.perf_counter()
                    stream = generator.stream(prompts, most)
                    next(stream)  # the prompts are read
                    found.apart += time.perf_counter() - began
                    for _ in stream:
                        pass

            found = Measure(run)
            return found

        return {f"decode_{rows}": measure(rows) for rows in self._request.decode_batches}

    def _constraint(self) -> dict[str, Measure]:
        """The optimizer by itself, with the constraint of the architecture and without."""
        built, config = self._built, self._config
        chains = {"update": built.model.arch.constraint, "update_free": Constraint()}
        return {
            name: Measure(self._update(optim.build(config.optim, built.schedule, constraint, built.axes)))
            for name, constraint in chains.items()
        }

    def _update(self, tx: optax.GradientTransformation) -> Run:
        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
            updates, opt_state = tx.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        gradients = jax.tree.map(jnp.copy, self._state.params)
        has = [jax.tree.map(jnp.copy, self._state.params), tx.init(self._state.params)]

        def run(units: int) -> None:
            for _ in range(units):
                has[:] = update(*has, gradients)
            jax.block_until_ready(has)

        return run


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _resident_bytes() -> int:
    """The most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
