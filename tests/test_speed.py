"""What a step costs in ways that no other load of the machine changes: bytes, FLOPs, memory, compilations.

Page faults are in test_host_memory.py, norms in test_hlo.py.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import make_workspace, one_device, run_process

# 8.4M parameters, 2,048 tokens a step, unrolled, as XLA compiles for users: without the flags that the tests have.
COSTS = """
import json
from angpt_jax import cli, experiment
from angpt_jax.config import Config

SHAPE = "--model.width 256 --model.layers 6 --model.heads 4 --model.vocab 4096 --model.context 256 --data.batch_size 8"
costs = {}
for arch, config in {"angpt": "default", "ngpt": "default_ngpt", "gpt_plus": "default_gpt_plus"}.items():
    config = cli.parse(Config, ["--config", config, *SHAPE.split()], command="train", default_config="default")
    config, recipe, sizes = experiment.resolved(config)
    step = experiment.compiled_step(experiment.build(config, recipe, sizes), config)
    cost = step.cost_analysis()
    temporary = step.memory_analysis().temp_size_in_bytes
    costs[arch] = {"bytes": cost["bytes accessed"], "flops": cost["flops"], "temporary": temporary}
print(json.dumps(costs))
"""


@pytest.fixture(scope="module")
def relative() -> dict[str, dict[str, float]]:
    """Bytes accessed, FLOPs and temporary memory of a train step of anGPT and nGPT, in those of GPT+."""
    words = [sys.executable, "-c", COSTS]
    done = subprocess.run(words, env=one_device() | {"XLA_FLAGS": ""}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    costs: dict[str, Any] = json.loads(done.stdout)
    ratios = {arch: {name: cost[name] / costs["gpt_plus"][name] for name in cost} for arch, cost in costs.items()}
    print(ratios)
    return ratios


def test_a_step_of_angpt_moves_fewer_bytes_than_one_of_gpt_plus_and_ngpt_more(relative):
    assert relative["angpt"]["bytes"] <= 0.99 and relative["ngpt"]["bytes"] <= 1.21


def test_a_step_of_angpt_needs_less_temporary_memory(relative):
    assert relative["angpt"]["temporary"] <= 0.95


def test_flops_are_the_same_within_half_a_percent(relative):
    assert all(abs(relative[arch]["flops"] - 1) < 0.005 for arch in ("angpt", "ngpt"))


def test_a_run_compiles_each_program_once(tmp_path: Path):
    """Training, evaluations and checkpoints in between, the ragged last batch of an evaluation among them."""
    done = run_process(make_workspace(tmp_path / "w"), "train", "--config", "tiny.yaml", JAX_LOG_COMPILES="1")
    programs = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.err)
    assert done.code == 0 and {"train_step", "window_nats"} < set(programs)
    assert len(programs) == len(set(programs)) <= 10, programs
