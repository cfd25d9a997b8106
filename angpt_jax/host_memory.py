"""What the C library does with memory that is given back."""

import ctypes
import os
import sys
from pathlib import Path

# Of glibc's mallopt (malloc.h), and the value of each.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
KEEP = {MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 * 2**20, ARENA_MAX: 1}
ACCELERATORS = ("nvidia0", "accel*", "vfio/[0-9]*", "kfd")  # what stands for one in /dev


def keep_freed() -> bool:
    """Where this machine computes on its CPU, the process keeps what it frees; whether that is so. To be called before
    JAX is imported: afterwards it would have no effect, and does nothing.

    XLA's CPU backend takes the memory of a step anew in each step. Given back in between, every page of it faults
    again: 28,600 faults a step of the default config in windows of 128; so 0, and 0.72 of the CPU time, in a process
    that is larger by 0.4. Whoever sets a MALLOC_… of glibc or GLIBC_TUNABLES has decided otherwise.
    """
    decided = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if decided or "jax" in sys.modules or sys.platform != "linux" or not computes_on_cpu():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) for name, value in KEEP.items())


def computes_on_cpu() -> bool:
    """Whether JAX will compute on the CPU, as far as can be said before it is imported."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return platforms == "cpu" or not (platforms or any(any(Path("/dev").glob(name)) for name in ACCELERATORS))
