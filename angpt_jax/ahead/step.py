"""The train step, compiled for devices that need not be there."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies

from angpt_jax import chips, cli, experiment, rules, sharding
from angpt_jax.ahead import topologies
from angpt_jax.chips import Chip
from angpt_jax.config import Config
from angpt_jax.experiment import Experiment
from angpt_jax.footprint import Footprint, footprint, memory_of
from angpt_jax.layout import Device

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
    devices: Sequence[Device]

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


def tpu_devices(topology: str, slices: int) -> Sequence[Device]:
    """The devices of slices that are not there; `angpt_jax.ahead.topologies` has checked the name."""
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
