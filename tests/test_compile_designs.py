"""What a pod would do with each design: the TPU compiler's program for 16 chips, two replicas of eight parts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import run_process
from test_compile import QUICK, pod

pytestmark = pod
SIZES = """\
model:
  {arch: ARCH, width: 512, layers: 2, heads: 8, vocab: 4096, context: 512, compute_dtype: bfloat16, remat: full,
   attention: splash, loss_vocab_chunk: 2048}
optim: {peak_lr: 4e-3}
data: {source: text, batch_size: 1024}
mesh: {replica: 2, fsdp: 8}
run: {steps: 14}
"""
HEAD_CHUNK = 2 * 512 * 2048  # bytes of what a chunk of the loss gathers, in bfloat16
LAYER = 2 * 512 * 2048  # of the largest weight of a layer


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("designs")

    @cache
    def report(arch: str, *flags: str) -> dict[str, Any]:
        (folder / "config.yaml").write_text(SIZES.replace("ARCH", arch))
        flags = ("--config", "config.yaml", "--topology", "v5e:4x4", "--json", "out.json", *flags)
        done = run_process(folder, "compile", *flags, **QUICK)
        assert (done.code, done.err) == (0, "")
        return json.loads((folder / "out.json").read_text())

    return report


def sent(report: dict[str, Any]) -> float:
    return report["collectives"]["link_bytes"] + report["collectives"]["network_bytes"]


def test_the_projection_adds_next_to_nothing(reports):
    """Its norms along `embed`, which fsdp splits, are one small all-reduce; and a pass over a chip's parameters, which
    counts the less the more tokens it has (32,768 here)."""
    with_it, without = reports("angpt"), reports("angpt", "--model.places.constraint.norm", "none")
    assert 0 < sent(with_it) - sent(without) < 0.01 * sent(without)
    assert with_it["hbm_bytes"] < 1.01 * without["hbm_bytes"]


def test_angpt_moves_the_fewest_bytes(reports):
    """To and from memory; between chips all move the same, but for the norms of their constraints."""
    angpt, gpt_plus, ngpt = (reports(arch) for arch in ("angpt", "gpt_plus", "ngpt"))
    assert angpt["hbm_bytes"] < 0.9 * min(gpt_plus["hbm_bytes"], ngpt["hbm_bytes"])
    assert max(map(sent, (angpt, gpt_plus, ngpt))) < 1.01 * min(map(sent, (angpt, gpt_plus, ngpt)))


@pytest.mark.parametrize("arch", ["angpt", "gpt_plus", "ngpt"])
def test_weights_are_gathered_one_by_one_and_gradients_brought_back_to_parts(reports, arch):
    report = reports(arch)
    kinds = report["collectives"]["by_kind"]
    assert report["collectives"]["largest_all_gather"]["whole_bytes"] <= max(HEAD_CHUNK, LAYER)
    matrices = 4 * 2 * 512**2 + 3 * 2 * 512 * 2048 + 512 * 4096  # of the layers and the head
    ring = 7 / 8  # of each array leaves a chip
    assert kinds["all-gather"]["bytes"] == pytest.approx(2 * 2 * matrices * ring, rel=0.1)  # bfloat16, twice with remat
    assert kinds["reduce-scatter"]["bytes"] == pytest.approx(4 * matrices * ring, rel=0.1)  # float32, once
    embedding = 512 * 4096
    replicas = 2 * 4 * (matrices + embedding) / 8 / 2  # an all-reduce of parts between two replicas
    assert kinds["all-reduce"]["bytes"] == pytest.approx(replicas, rel=0.1)


@pytest.mark.parametrize("arch", ["angpt", "ngpt", "gpt_plus"])
def test_a_chip_holds_its_part_of_the_state_and_no_more(reports, arch):
    report = reports(arch)
    assert report["memory"]["arguments"] == pytest.approx(12 * report["parameters"] / 8, rel=0.05)
