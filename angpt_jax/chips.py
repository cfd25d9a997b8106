"""What one accelerator can do, by the name that JAX gives it (`jax.Device.device_kind`).

Sources. TPUs: the system architecture pages of Google Cloud for v4, v5e, v5p and v6e. `hbm_bytes` of a TPU is what its
compiler lets a program use, less than the chip has (read off the message of a program that is far too large).
`link_bytes` is what a chip can send to its neighbours over all links at once: half of the "bidirectional ICI bandwidth
per chip"; for v4, six links of 50 GB/s (arXiv 2304.01433). NVIDIA: the data sheets of A100, H100, H200 and HGX B200, of
which half of NVLink's total is what a GPU sends; `hbm_bytes` is all there is, of which JAX takes three quarters unless
told otherwise. `network_bytes` is one chip's share of its host's network cards: 50 Gbit/s on v5p and 6.4 Tbit/s for the
256 chips of v5e are Google's figures, the other two TPUs and the cards of a GPU host (one for each GPU: 200 Gbit/s
beside A100, 400 Gbit/s beside the others) are ASSUMPTIONS.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device.

    Args:
        name: short name
        tflops: dense bfloat16 peak, TFLOP/s
        hbm_bytes: memory that a program can use
        hbm_bandwidth: bytes a second between that memory and the cores
        link_bandwidth: bytes a second that it can send to chips of its slice or host (ICI, NVLink)
        network_bandwidth: bytes a second that it can send to other slices or hosts
    """

    name: str
    tflops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float


def _chip(name: str, tflops: float, hbm: float, hbm_gb: float, link_gb: float, network_gb: float) -> Chip:
    """From bytes of memory and GB/s."""
    return Chip(name, tflops, round(hbm), hbm_gb * 1e9, link_gb * 1e9, network_gb * 1e9)


V4 = _chip("v4", 275, 30.75 * GIB, 1200, 300, 6.25)
V5E = _chip("v5e", 197, 15.75 * GIB, 819, 200, 3.125)
V5P = _chip("v5p", 459, 95.74 * GIB, 2765, 600, 6.25)
V6E = _chip("v6e", 918, 31.25 * GIB, 1638, 400, 12.5)

CHIPS: dict[str, Chip] = {
    "TPU v4": V4,
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "NVIDIA A100-SXM4-40GB": _chip("A100 SXM 40 GB", 312, 40e9, 1555, 300, 25),
    "NVIDIA A100-SXM4-80GB": _chip("A100 SXM 80 GB", 312, 80e9, 2039, 300, 25),
    "NVIDIA H100 80GB HBM3": _chip("H100 SXM", 989, 80e9, 3350, 450, 50),
    "NVIDIA H200": _chip("H200 SXM", 989, 141e9, 4800, 450, 50),
    "NVIDIA B200": _chip("B200", 2250, 180e9, 7700, 900, 50),
}


def find(device_kind: str) -> Chip | None:
    """The chip of that name; None for one that is not in the table."""
    return CHIPS.get(device_kind)
