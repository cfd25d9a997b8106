"""The train step, compiled for devices that need not be there, and what its program says."""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies

from angpt_jax import chips, cli, collectives, experiment, hlo, hlo_costs, rules, sharding, topologies
from angpt_jax.chips import Chip
from angpt_jax.collectives import Collective, Places
from angpt_jax.config import Config
from angpt_jax.experiment import Experiment
from angpt_jax.footprint import Footprint, bytes_of, footprint, memory_of
from angpt_jax.roofline import Roofline, Work, roofline

MOST_COMPILES = 6  # in the search for the largest batch
_SIZE = re.compile(r"([\d.]+)([KMGT])\b")


class DoesNotFit(Exception):
    """The compiler found the program too large for the memory of the chip."""

    def __init__(self, message: str):
        first = message.splitlines()[0]
        super().__init__(first.partition("RESOURCE_EXHAUSTED: ")[2] or first)

    @property
    def needed(self) -> int | None:
        """Bytes, if it says so."""
        size = _SIZE.search(str(self))
        return round(float(size[1]) * 2 ** (10 * " KMGT".index(size[2]))) if size else None


@dataclass(frozen=True)
class Ahead:
    """A config on its devices, ready to be compiled."""

    config: Config
    built: Experiment
    devices: Sequence[jax.Device]

    @property
    def chip(self) -> Chip | None:
        return chips.find(self.devices[0].device_kind)

    @property
    def limit(self) -> int | None:
        return memory_of(self.devices[0])

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.config.data.batch_size * self.config.model.context

    @property
    def flops(self) -> float:
        """Analytic, of one step on one device."""
        return self.built.flops_per_token(self.config.model.context) * self.tokens / len(self.devices)

    @property
    def batch_unit(self) -> int:
        """What a batch size must be a multiple of."""
        return self.built.layout.parts("batch") * self.config.optim.micro_batches

    def compile(self, batch_size: int | None = None) -> Any:
        """The compiled step, of another batch size if given; raises DoesNotFit."""
        data = self.config.data if batch_size is None else replace(self.config.data, batch_size=batch_size)
        try:
            return experiment.compiled_step(self.built, replace(self.config, data=data))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) and "hbm" in str(error).lower():
                raise DoesNotFit(str(error)) from None
            raise

    def peak(self, batch_size: int) -> tuple[int | None, bool]:
        """Bytes that a step of this batch size needs, and whether they are there."""
        try:
            found = footprint(self.compile(batch_size), self.built.abstract)
        except DoesNotFit as error:
            return error.needed, False
        return found and found.peak, fits(found, self.limit) is not False


def prepare(config: Config, topology: str | None, slices: int) -> Ahead:
    """Builds for the devices of `topology`, or those here; refuses a config that does not fit them."""
    devices = tpu_devices(topology, slices) if topology else jax.devices()
    config, arch, sizes = experiment.resolved(config)
    cli.raise_problems(rules.check(config, len(devices), sharding.slice_count(devices)))
    return Ahead(config, experiment.build(config, arch, sizes, devices), devices)


def tpu_devices(topology: str, slices: int) -> Sequence[jax.Device]:
    """The devices of slices that are not there; `angpt_jax.topologies` has checked the name."""
    family, shape = topologies.split(topology)
    options: dict[str, Any] = dict(family.options)
    if math.prod(shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if slices > 1:
        options["num_slices"] = slices
    return jax_topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def fits(found: Footprint | None, limit: int | None) -> bool | None:
    """Whether the chip's memory is enough; None if that can't be known."""
    return None if found is None or limit is None else found.peak <= limit


@dataclass(frozen=True)
class Analysis:
    """What a compiled step says of itself."""

    ahead: Ahead
    compiled: Any

    @cached_property
    def program(self) -> hlo.Program:
        return hlo.read(self.compiled.as_text())

    @cached_property
    def footprint(self) -> Footprint | None:
        return footprint(self.compiled, self.ahead.built.abstract)

    @cached_property
    def collectives(self) -> list[Collective]:
        mesh = self.ahead.built.layout.mesh
        assert mesh is not None
        slices = tuple(getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat)
        return collectives.collectives(self.program, Places(mesh.axis_names, mesh.devices.shape, slices))

    @cached_property
    def work(self) -> Work:
        sent = [sum(c.sent_bytes for c in self.collectives if c.across == across) for across in (False, True)]
        return Work(self.ahead.flops, hlo_costs.traffic(self.program), *sent)

    @cached_property
    def roofline(self) -> Roofline | None:
        return roofline(self.work, self.ahead.chip) if self.ahead.chip else None


def report(ahead: Ahead, topology: str | None, largest_batch: bool) -> dict[str, Any]:
    """All that the command says, as the JSON that it writes. Bytes and FLOPs are those of one chip and one step."""
    began, message, analysis = time.perf_counter(), None, None
    try:
        analysis = Analysis(ahead, ahead.compile())
    except DoesNotFit as error:
        message = error
    seconds = time.perf_counter() - began
    return {
        **describe(ahead, topology),
        "compile_seconds": round(seconds, 1),
        "instructions": analysis and analysis.program.size,
        "memory": memory_report(ahead, analysis and analysis.footprint, message),
        "flops": {
            "per_token": ahead.built.flops_per_token(ahead.config.model.context),
            "analytic": ahead.flops,
            "matrix_products": analysis and hlo_costs.flops(analysis.program),
        },
        "hbm_bytes": analysis and analysis.work.hbm_bytes,
        "collectives": analysis and collectives_report(analysis),
        "roofline": analysis and roofline_report(analysis),
        "loops_of_unknown_length": list(analysis.program.unknown_loops) if analysis else None,
        "largest_batch": largest(ahead, analysis, message) if largest_batch else None,
    }


def describe(ahead: Ahead, topology: str | None) -> dict[str, Any]:
    config, layout = ahead.config, ahead.built.layout
    assert layout.mesh is not None
    return {
        "arch": config.model.arch,
        "topology": topology,
        "device": ahead.devices[0].device_kind,
        "chips": len(ahead.devices),
        "slices": sharding.slice_count(ahead.devices),
        "mesh": dict(layout.mesh.shape),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(ahead.built.abstract.params)),
        "batch_size": config.data.batch_size,
        "context": config.model.context,
        "tokens_per_step": ahead.tokens,
        "micro_batches": config.optim.micro_batches,
        "remat": config.model.remat,
        "attention": ahead.built.model.how.attention,
        "loss_vocab_chunk": config.model.loss_vocab_chunk,
    }


def memory_report(ahead: Ahead, found: Footprint | None, message: DoesNotFit | None) -> dict[str, Any]:
    """Bytes on one chip; where the compiler refused, what it said."""
    state = ahead.built.abstract
    known = {"parameters": bytes_of(state.params), "optimizer_state": bytes_of(state.opt_state)}
    parts = asdict(found) if found else known | {"peak": message and message.needed}
    peak, limit = parts["peak"], ahead.limit
    return parts | {
        "limit": limit,
        "share": round(peak / limit, 4) if peak is not None and limit else None,
        "fits": False if message else fits(found, limit),
        "compiler": message and str(message),
    }


def collectives_report(analysis: Analysis) -> dict[str, Any]:
    """By kind and mesh axes, and the largest ones with their place in the model."""
    found = analysis.collectives

    def total(group: list[Collective]) -> dict[str, Any]:
        return {"count": sum(c.times for c in group), "bytes": round(sum(c.sent_bytes for c in group))}

    def single(one: Collective) -> dict[str, Any]:
        place = {"kind": one.kind, "axes": one.axes, "between_slices": one.across, "times": one.times}
        return place | {"whole_bytes": one.whole_bytes, "operands": one.shapes, "source": one.source}

    gathers = sorted((c for c in found if c.kind == "all-gather"), key=lambda c: -c.whole_bytes)
    return {
        "by_kind": {kind: total([c for c in found if c.kind == kind]) for kind in collectives.KINDS},
        "by_axes": [
            {"kind": kind, "axes": axes, "between_slices": any(c.across for c in group), **total(group)}
            for kind, axes, group in collectives.grouped(found)
        ],
        "link_bytes": round(analysis.work.link_bytes),
        "network_bytes": round(analysis.work.network_bytes),
        "largest_all_gather": single(gathers[0]) if gathers else None,
        "largest": [single(one) for one in sorted(found, key=lambda c: -c.sent_bytes)[:12]],
    }


def roofline_report(analysis: Analysis) -> dict[str, Any] | None:
    """Seconds of a step at the least; null for a chip that is not in the table."""
    line = analysis.roofline
    if line is None:
        return None
    return asdict(line) | {
        "bound_by": line.bound_by,
        "step_seconds": line.overlapped_seconds,
        "step_seconds_without_overlap": line.serial_seconds,
        "tokens_per_second": analysis.ahead.tokens / line.overlapped_seconds,
        "mfu_bound": line.mfu_bound,
    }


def largest(ahead: Ahead, analysis: Analysis | None, message: DoesNotFit | None) -> dict[str, Any] | None:
    """The largest batch that fits, all else the same; null where memory or peak are unknown."""
    limit, unit = ahead.limit, ahead.batch_unit
    found = analysis.footprint if analysis else None
    peak = found.peak if found else message and message.needed
    if limit is None or peak is None:
        return None
    first = (ahead.config.data.batch_size // unit, peak, fits(found, limit) is True)
    units, compiles = search(first, limit, lambda units: ahead.peak(units * unit))
    return {"batch_size": units * unit, "multiple_of": unit, "compiles": compiles}


def search(
    first: tuple[int, int, bool], limit: int, measure: Callable[[int], tuple[int | None, bool]]
) -> tuple[int, int]:
    """The largest number of units that fits (0: not even one), and how many times it was measured.

    Memory is close to linear in the batch: a line through the first two measurements says where the limit is, a third
    checks it. While it is wrong, a line through the two nearest ones is taken, or the middle where that can't be. The
    search ends between a number that fits and the next that does not, or after MOST_COMPILES.
    """
    known: dict[int, tuple[int, bool]] = {first[0]: first[1:]}
    other = first[0] * 2 if first[2] else max(1, first[0] // 2)
    for _ in range(MOST_COMPILES):
        if other in known:
            break
        peak, fit = measure(other)
        if peak is None:
            break
        known[other] = (peak, fit)
        fitting = max((units for units, (_, fit) in known.items() if fit), default=0)
        too_many = min((units for units, (_, fit) in known.items() if not fit), default=None)
        guess = _crossing(known, limit)
        if too_many is not None and guess >= too_many:
            guess = (fitting + too_many) // 2
        other = max(guess, fitting, 1)
    return max((units for units, (_, fit) in known.items() if fit), default=0), len(known) - 1


def _crossing(known: dict[int, tuple[int, bool]], limit: int) -> int:
    """Units at which the line through the two measurements next to the limit crosses it."""
    nearest = sorted(known, key=lambda units: abs(known[units][0] - limit))
    one, two = nearest[:2]
    a, b = known[one][0], known[two][0]
    slope = (b - a) / (two - one)
    return math.floor(one + (limit - a) / slope) if slope > 0 else 2 * max(one, two)
