"""What a step that was compiled ahead of time says of itself, as the JSON of `angpt_jax.compile`."""

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from angpt_jax import flops, sharding
from angpt_jax.ahead import batch_search, collectives, costs, hlo
from angpt_jax.ahead.collectives import Collective, Places
from angpt_jax.ahead.roofline import Roofline, Work, roofline
from angpt_jax.ahead.step import Ahead, DoesNotFit, fits
from angpt_jax.footprint import Footprint, bytes_of, footprint


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
        slices = tuple(map(sharding.slice_of, mesh.devices.flat))
        return collectives.collectives(self.program, Places(mesh.axis_names, mesh.devices.shape, slices))

    @cached_property
    def work(self) -> Work:
        sent = [sum(c.sent_bytes for c in self.collectives if c.across == across) for across in (False, True)]
        return Work(self.ahead.flops, costs.traffic(self.program), *sent)

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
            "matrix_products": analysis and costs.flops(analysis.program),
        },
        "hbm_bytes": analysis and analysis.work.hbm_bytes,
        "collectives": analysis and collectives_report(analysis),
        "roofline": analysis and roofline_report(analysis),
        "loops_of_unknown_length": list(analysis.program.unknown_loops) if analysis else None,
        "largest_batch": largest(ahead, analysis, message) if largest_batch else None,
    }


def describe(ahead: Ahead, topology: str | None) -> dict[str, Any]:
    config, layout = ahead.config, ahead.built.layout
    return {
        "arch": config.model.arch,
        "topology": topology,
        "device": ahead.devices[0].device_kind,
        "chips": len(ahead.devices),
        "slices": sharding.slice_count(ahead.devices),
        "mesh": layout.shape,
        "parameters": flops.parameter_count(ahead.built.abstract.params),
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
    units, compiles = batch_search.search(first, limit, lambda units: ahead.peak(units * unit))
    return {"batch_size": units * unit, "multiple_of": unit, "compiles": compiles}
