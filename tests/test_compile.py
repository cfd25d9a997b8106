"""`compile`, as a user runs it: for TPU slices that are not here, too large a model, and what it refuses.

The pod tests need the TPU compiler (libtpu), which installs with the extra `tpu`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Outcome, run_here, run_process, tree

from angpt_jax.ahead import topologies
from angpt_jax.ahead.topologies import FAMILIES, shapes
from angpt_jax.compile import CompileConfig, compile_step
from angpt_jax.config import MeshConfig

pod = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install -e '.[tpu]'"
)
# The compiler looks for a fast program for a fifth of the time; arrays and large collectives stay what they are.
PLAIN = {"XLA_FLAGS": ""}
QUICK = PLAIN | {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}
STAND_IN = """\
model: {arch: angpt, width: 128, layers: 2, heads: 2, vocab: 256, context: 128, compute_dtype: bfloat16}
optim: {peak_lr: 4e-3}
data: {source: text, batch_size: 16}
run: {steps: 14}
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(STAND_IN)
    return tmp_path


def compile_for(workspace: Path, *flags: str, **environment: str) -> tuple[Outcome, dict[str, Any]]:
    """The command in a process of its own, and its JSON."""
    done = run_process(
        workspace, "compile", "--config", "small.yaml", "--json", "out.json", *flags, **PLAIN | environment
    )
    assert (workspace / "out.json").exists(), done.err
    assert sorted(tree(workspace)) == ["out.json", "small.yaml"]
    return done, json.loads((workspace / "out.json").read_text())


def near(value: float, expected: float) -> bool:
    return abs(value - expected) <= 0.05 * expected


@pod
def test_one_slice(workspace: Path):
    flags = ("--mesh.tensor", "2", "--optim.micro_batches", "2")
    flags += ("--model.attention", "reference")  # whose products are in the program's text
    done, report = compile_for(workspace, "--topology", "v5e:4x4", *flags)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    for words in ("v5e:4x4: 16 × TPU v5 lite", "fsdp 8, tensor 2", "peak", "all-gather", "MFU", "fits"):
        assert words in done.out
    assert {key: report[key] for key in ("config", "topology", "chips", "slices", "micro_batches", "batch_size")} == {
        **{"config": "small", "topology": "v5e:4x4", "chips": 16, "slices": 1, "micro_batches": 2, "batch_size": 16},
    }
    memory, work = report["memory"], report["flops"]
    assert memory["fits"] is True and 0 < memory["peak"] < memory["limit"] == 15.75 * 2**30
    assert near(memory["parameters"], 4 * report["parameters"] / 16)
    assert near(memory["optimizer_state"], 8 * report["parameters"] / 16)
    rows = 16 // 8
    assert memory["batch"] == rows * (2 * 129 + 128) * 4
    assert memory["arguments"] >= memory["parameters"] + memory["optimizer_state"] + memory["batch"]
    assert work["analytic"] * 16 == work["per_token"] * 16 * 128
    assert near(work["matrix_products"], work["analytic"])
    sent = report["collectives"]
    assert sent["by_kind"]["all-gather"]["count"] > 0 and sent["by_kind"]["reduce-scatter"]["count"] > 0
    assert sent["network_bytes"] == 0 < sent["link_bytes"]
    assert report["loops_of_unknown_length"] == []
    assert 0 < report["roofline"]["mfu_bound"] <= 1
    assert report["roofline"]["step_seconds"] <= report["roofline"]["step_seconds_without_overlap"]


@pod
def test_two_slices(workspace: Path):
    flags = ("--topology", "v5e:4x4", "--slices", "2", "--mesh.replica", "4", "--data.batch_size", "64")
    done, report = compile_for(workspace, *flags)
    assert (done.code, done.err) == (0, "")
    assert (report["chips"], report["slices"], report["mesh"]["replica"]) == (32, 2, 4)
    assert near(report["memory"]["parameters"], 4 * report["parameters"] / 8)
    gradients = 4 * report["parameters"] / 8 / 2  # each of two replicas in a slice sends half of its part to the other
    assert gradients <= report["collectives"]["network_bytes"] <= 1.1 * gradients
    across = [group for group in report["collectives"]["by_axes"] if group["between_slices"]]
    assert [group["kind"] for group in across] == ["all-reduce"]
    assert report["roofline"]["network_seconds"] == pytest.approx(report["collectives"]["network_bytes"] / 3.125e9)


@pod
def test_slices_divide_the_replicas_and_rows_of_chips_within_them(monkeypatch: pytest.MonkeyPatch):
    from angpt_jax import sharding
    from angpt_jax.ahead import step
    from angpt_jax.compile import TPU_COMPILER

    for name, value in TPU_COMPILER.items():
        monkeypatch.setenv(name, value)
    mesh = sharding.make_mesh(MeshConfig(4, 8), step.tpu_devices("v5e:4x4", 2))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.shape == (4, 8, 1, 1)
    assert slices[:, :, 0, 0].tolist() == [[0] * 8, [0] * 8, [1] * 8, [1] * 8]


@pod
def test_a_model_that_is_too_large(workspace: Path):
    flags = ("--model.width", "4096", "--model.heads", "32", "--model.layers", "80", "--data.batch_size", "4")
    done, report = compile_for(workspace, "--topology", "v5e:2x2", "--largest_batch", "true", *flags)
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines()[-2].startswith("does not fit: Ran out of memory on HBM")
    memory = report["memory"]
    assert memory["fits"] is False and memory["peak"] > memory["limit"]
    assert near(memory["parameters"], 4 * report["parameters"] / 4)
    assert report["largest_batch"]["batch_size"] == 0
    assert report["collectives"] is report["roofline"] is None


@pod
def test_the_program_does_not_grow_with_depth(workspace: Path):
    """By its instructions, which do not depend on what else the machine does: the compile time follows."""
    sizes = [
        compile_for(workspace, "--topology", "v5e:2x2", "--model.layers", layers, **QUICK)[1]["instructions"]
        for layers in ("12", "48")
    ]
    assert max(sizes) < 1.3 * min(sizes)


@pod
@pytest.mark.parametrize(
    ("topology", "chips", "kind"),
    [
        ("v4:2x2x1", 4, "TPU v4"),
        ("v5e:1x1", 1, "TPU v5 lite"),
        ("v5p:8x8x16", 1024, "TPU v5"),
        ("v6e:2x4", 8, "TPU v6 lite"),
    ],
)
def test_each_generation_is_known_by_the_table(topology: str, chips: int, kind: str, monkeypatch: pytest.MonkeyPatch):
    from angpt_jax import chips as table
    from angpt_jax.ahead import step
    from angpt_jax.compile import TPU_COMPILER

    for name, value in TPU_COMPILER.items():
        monkeypatch.setenv(name, value)
    devices = step.tpu_devices(topology, 1)
    assert (len(devices), devices[0].device_kind) == (chips, kind)
    found = table.find(kind)
    assert found and found.name == topology.partition(":")[0]


def test_the_devices_here(workspace: Path):
    done, report = compile_for(workspace, "--model.layers", "1", "--model.context", "32", "--largest_batch", "true")
    assert (done.code, done.err) == (0, "")
    assert (report["topology"], report["chips"], report["memory"]["fits"]) == (None, 1, None)
    assert report["roofline"] is report["largest_batch"] is None
    assert done.out.splitlines()[-1] == "whether it fits is unknown"
    assert near(report["flops"]["matrix_products"], report["flops"]["analytic"])


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            ["--topology", "v9:4x4"],
            ["topology: must be v4, v5e, v5p, v6e and a shape, got 'v9:4x4'; e.g. v5e:4x4 or v5p:8x8x16"],
        ),
        (
            ["--topology", "v5e"],
            ["topology: must be v4, v5e, v5p, v6e and a shape, got 'v5e'; e.g. v5e:4x4 or v5p:8x8x16"],
        ),
        (
            ["--topology", "v5e:3x3", "--run.steps", "0"],
            [
                "topology: v5e has no slice of that shape, got 'v5e:3x3'; near are v5e:2x4, v5e:4x4, v5e:2x2",
                "run.steps: must be >= 1, got 0",
            ],
        ),
        (
            ["--topology", "v5p:4x4x2", "--slices", "0"],
            [
                "slices: must be between 1 and 1024, got 0",
                "topology: v5p has no slice of that shape, got 'v5p:4x4x2'; near are v5p:2x4x4, v5p:2x2x4, v5p:4x4x4",
            ],
        ),
        (
            ["--slices", "2"],
            ["slices: only a named topology can have several, got 2; add --topology, e.g. v5e:4x4"],
        ),
        (["--json", "no/out.json"], ["json: its folder is not there, got 'no/out.json'; make it first"]),
        (["--json", "."], ["json: is a folder, got '.'; name a file"]),
    ],
)
def test_bad_input(
    flags: list[str],
    lines: list[str],
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(topologies, "find_spec", lambda name: object())
    done = refused(monkeypatch, capsys, *flags)
    assert done == Outcome(2, "", "".join(f"angpt_jax: error: {line}\n" for line in lines))
    assert list(tree(workspace)) == ["small.yaml"]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> Outcome:
    run = partial(run_here, compile_step, CompileConfig, "compile", monkeypatch=monkeypatch, capsys=capsys)
    return run("--config", "small.yaml", *flags)


def test_a_topology_needs_the_compiler(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(topologies, "find_spec", lambda name: None)
    line = "topology: needs the TPU compiler, got 'v5e:4x4'; pip install -e '.[tpu]'"
    assert refused(monkeypatch, capsys, "--topology", "v5e:4x4") == Outcome(2, "", f"angpt_jax: error: {line}\n")


@pod
def test_a_mesh_that_does_not_fit_the_topology(workspace: Path):
    done = run_process(workspace, "compile", "--config", "small.yaml", "--topology", "v5e:2x2", "--slices", "2")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("angpt_jax: error: mesh.replica: must be a multiple of the 2 slices")
    assert list(tree(workspace)) == ["small.yaml"]


def test_a_bad_name_is_answered_before_jax_is_loaded(workspace: Path):
    code = "\n".join(
        [
            "import runpy, sys",
            "sys.argv = ['compile', '--config', 'small.yaml', '--topology', 'v9:4x4']",
            "try: runpy.run_module('angpt_jax.compile', run_name='__main__')",
            "except SystemExit as ended: print(ended.code, 'jax' in sys.modules)",
        ]
    )
    environment = os.environ | {"PYTHONPATH": str(Path(topologies.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace, env=environment, capture_output=True, text=True)
    assert done.stdout == "2 False\n"


def test_the_slices_that_can_be_had():
    assert all(len(shape) == family.axes for family in FAMILIES.values() for shape in shapes(family))
    flat, cubes = set(shapes(FAMILIES["v5e"])), set(shapes(FAMILIES["v5p"]))
    assert {(1, 1), (2, 2), (4, 4), (16, 16)} <= flat and not {(1, 2), (16, 32), (4, 2)} & flat
    assert {(2, 2, 1), (4, 4, 4), (8, 8, 16), (16, 16, 24)} <= cubes and not {(4, 4, 2), (16, 24, 24)} & cubes
