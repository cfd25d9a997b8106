"""Which implementation of attention can do what is asked for, and which is best on the devices at hand."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from angpt_jax.attention.splash import LANES
from angpt_jax.errors import UserError
from angpt_jax.layout import Layout

Implementation = Literal["reference", "blocks", "xla", "cudnn", "splash"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
BEST: dict[str, tuple[Implementation, ...]] = {"tpu": ("splash",), "gpu": ("cudnn",), "cpu": ("blocks",)}
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities of NVIDIA's GPUs


@dataclass(frozen=True)
class Task:
    """What is asked of attention.

    Args:
        layout: the devices, and what is split over them
        dtype: of queries, keys and values
        attend_across_documents: whether a window is one segment
        head_width: K
        context: tokens of a window (L)
    """

    layout: Layout
    dtype: str
    attend_across_documents: bool
    head_width: int
    context: int

    @property
    def device(self) -> Any:
        """One of them: they are of one kind. Those of a mesh may be devices to compile for, with none here."""
        return jax.devices()[0] if self.layout.mesh is None else self.layout.mesh.devices.flat[0]

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of an NVIDIA GPU."""
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(self.device, "compute_capability", "")))
        return (int(found[1]), int(found[2])) if self.device.platform == "gpu" and found else None


@dataclass(frozen=True)
class Refusal:
    """What an implementation needs and what it got instead; `instead` would also do, at the field that `got` names."""

    needs: str
    got: str
    instead: str = ""


def choose(
    wanted: Implementation | Literal["auto"],
    layout: Layout,
    dtype: str,
    attend_across_documents: bool,
    head_width: int,
    context: int,
) -> Implementation:
    """The implementation that `wanted` stands for on the devices of `layout`; a UserError if it can't do it there.

    `auto` is the best of those that can: splash on a TPU and cudnn on an NVIDIA GPU, xla where these can't, and
    blocks on a CPU. A name is that implementation and no other.
    """
    task = Task(layout, dtype, attend_across_documents, head_width, context)
    able = [name for name in IMPLEMENTATIONS if not list(refusals(name, task))]
    if wanted == "auto":
        return next(name for name in (*BEST.get(task.device.platform, ()), "xla") if name in able)
    if wanted in able:
        return wanted
    others = f"{', '.join(able)} or auto"
    raise UserError(*(_line(wanted, refusal, others) for refusal in refusals(wanted, task)))


def refusals(implementation: Implementation, task: Task) -> Iterator[Refusal]:
    """Why it can't do it."""
    if implementation == "cudnn":
        yield from _cudnn(task)
    if implementation == "splash":
        yield from _splash(task)


def _line(implementation: str, refusal: Refusal, others: str) -> str:
    cure = f"{refusal.instead} there, or {others} here, would do" if refusal.instead else f"{others} would do"
    return f"model.attention: {implementation} {refusal.needs}, got {refusal.got}; {cure}"


def _cudnn(task: Task) -> Iterator[Refusal]:
    capability = task.capability
    if capability is None:
        yield Refusal("needs an NVIDIA GPU", f"{task.device.device_kind} devices")
        return
    if capability < AMPERE:
        yield Refusal("needs compute capability 8.0 or more", ".".join(map(str, capability)))
        return
    if not task.attend_across_documents:
        yield Refusal("can't part documents", "data.attend_across_documents false", "true")
    if task.dtype != "bfloat16":
        yield Refusal("needs bfloat16", f"model.compute_dtype {task.dtype}", "bfloat16")
    most = 256 if capability >= HOPPER else 128
    if task.head_width % 8 or task.head_width > most:
        needs = f"needs a head width that is a multiple of 8 and at most {most}"
        yield Refusal(needs, f"model.width / model.heads = {task.head_width}")
    if task.layout.parts("length") > 1:
        yield Refusal("needs whole windows", f"{_axes(task)} {task.layout.parts('length')}", "1")


def _splash(task: Task) -> Iterator[Refusal]:
    if task.device.platform != "tpu":
        yield Refusal("needs a TPU", f"{task.device.device_kind} devices")
        return
    parts = task.layout.parts("length")
    step = LANES * parts
    if task.context % step:
        below, above = task.context // step * step, -(-task.context // step) * step
        of = str(LANES) if parts == 1 else f"{LANES} * {_axes(task)} = {step}"
        instead = f"{below} or {above}" if below else str(above)
        yield Refusal(f"needs a multiple of {of} tokens", f"model.context {task.context}", instead)


def _axes(task: Task) -> str:
    return " * ".join(f"mesh.{axis}" for axis in task.layout.over("length"))
