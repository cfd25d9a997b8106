"""Memory of a step is taken once, not once a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import one_device

from angpt_jax import host_memory

STEPS = """
import resource, sys
from angpt_jax import host_memory
kept = host_memory.keep_freed()
import jax, jax.numpy as jnp

@jax.jit
def step(x):
    return 0.5 * x + 1

x, faults = jnp.ones(10 * 2**20), []
for _ in range(25):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = jax.block_until_ready(step(x))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, sorted(faults[10:])[7])  # the median of warm steps
"""


def faults(**environment: str) -> tuple[str, int]:
    """What `keep_freed` said, and the page faults of a warm step with an array of 40 MiB, 10,240 pages."""
    done = subprocess.run([sys.executable, "-c", STEPS], env=one_device() | environment, capture_output=True, text=True)
    kept, typical = done.stdout.split()
    return kept, int(typical)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_warm_step_faults_no_page():
    kept, typical = faults()
    assert kept == "True" and typical < 100


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_the_user_set_stays():
    kept, typical = faults(MALLOC_ARENA_MAX="2")
    assert kept == "False" and typical > 5000


def test_an_accelerator_needs_none_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(host_memory, "Path", lambda _: tmp_path)
    monkeypatch.delitem(sys.modules, "jax")
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert not host_memory.keep_freed()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    (tmp_path / "nvidia0").unlink()
    assert not host_memory.keep_freed()


def test_training_asks_for_it_before_jax_is_there():
    code = "\n".join(
        [
            "import runpy, sys",
            "from angpt_jax import host_memory",
            "host_memory.keep_freed = lambda: print('jax' in sys.modules)",
            "sys.argv = ['train', '--run.init_from', 'nowhere', '--run.dir', 'none']",
            "runpy.run_module('angpt_jax.train', run_name='__main__')",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], env=one_device(), capture_output=True, text=True)
    assert done.stdout.startswith("False\n"), done
