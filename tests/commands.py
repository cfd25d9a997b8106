"""Runs the commands as a user would: on a small folder of text, in this process or in one of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from angpt_jax import cli

QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
TINY = """\
model:
  {arch: angpt, width: 32, layers: 2, heads: 2, vocab: 300, context: 32, places: {head: {scale_init: 5.6}}}
optim: {peak_lr: 4e-3}
data: {source: text, tokenizer: bytes, batch_size: 8, validation_tokens: 500, cache_dir: cache}
run: {steps: 14, log_every_steps: 1, eval_every_steps: 5, checkpoint_every_steps: 100}
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def make_workspace(folder: Path) -> Path:
    """A folder with `tiny.yaml` and 40 small text files."""
    (folder / "text").mkdir(parents=True)
    (folder / "tiny.yaml").write_text(TINY)
    for number in range(40):
        lines = "\n".join(f"def f{number}_{line}(x): return x + {line * number}" for line in range(8))
        (folder / "text" / f"{number:02}.py").write_text(lines)
    return folder


def one_device() -> dict[str, str]:
    """The environment of a process of its own: this package, a CPU device, fast compiles, kept for the next."""
    inherited = dict(os.environ)
    cache = str(Path(jax.config.values["jax_compilation_cache_dir"]) / os.environ.get("PYTEST_XDIST_WORKER", "alone"))
    ours = {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILES}
    return inherited | ours | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def run_process(workspace: Path, command: str, *flags: str, **environment: str) -> Outcome:
    """`python -m angpt_jax.COMMAND FLAGS` in `workspace`, on one device; with further variables of the environment."""
    done = subprocess.run(
        [sys.executable, "-m", f"angpt_jax.{command}", *flags],
        cwd=workspace,
        env=one_device() | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_here(
    run: Callable,
    schema: type,
    command: str,
    *flags: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> Outcome:
    """The same without the start of a process: on the virtual devices of the tests."""
    monkeypatch.setattr(sys, "argv", [command, *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main(run, schema, command=command, default_config=None)
    captured = capsys.readouterr()
    return Outcome(int(ended.value.code or 0), captured.out, captured.err)


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A small file system at `folder`, while it lasts; skips the test where mounting is not permitted."""
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its content, to see that nothing changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
