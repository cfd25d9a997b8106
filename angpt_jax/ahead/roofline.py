"""How long a step takes at the least: what it computes, moves and sends, over what the chip can do a second.

The step takes as long as the slowest of the four if the compiler hides the others behind it, and as long as all of them
together if it hides nothing. The truth lies in between, and above: no product reaches the peak. A chip is taken to send
over all its links at once; a ring along one axis of a torus has two of the four or six.

The compiler's own estimate, `optimal_seconds` of its cost analysis, is not used: it counts the body of a loop once, and
has been seen to be negative.
"""

from dataclasses import dataclass

from angpt_jax.chips import Chip


@dataclass(frozen=True)
class Work:
    """Of one chip in one step.

    Args:
        flops: analytic FLOPs, forward and backward
        hbm_bytes: read from and written to its memory
        link_bytes: sent to chips of its slice
        network_bytes: sent to other slices
    """

    flops: float
    hbm_bytes: float
    link_bytes: float
    network_bytes: float


@dataclass(frozen=True)
class Roofline:
    """Seconds of each, if it were alone."""

    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    network_seconds: float

    @property
    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "links": self.link_seconds,
            "network": self.network_seconds,
        }

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def overlapped_seconds(self) -> float:
        return max(self.parts.values())

    @property
    def serial_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu_bound(self) -> float:
        """Model FLOPs utilization if everything else overlaps."""
        return self.compute_seconds / self.overlapped_seconds


def roofline(work: Work, chip: Chip) -> Roofline:
    return Roofline(
        compute_seconds=work.flops / (chip.tflops * 1e12),
        memory_seconds=work.hbm_bytes / chip.hbm_bandwidth,
        link_seconds=work.link_bytes / chip.link_bandwidth,
        network_seconds=work.network_bytes / chip.network_bandwidth,
    )
