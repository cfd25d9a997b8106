"""The PyTorch model that an export brings computes the logits of ours, for every recipe, and loads without this
package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import CONTEXT, VOCAB, batch, logits, made, write
from exports_in_torch import load_model
from exports_in_torch import logits as torch_logits

from angpt_jax.archs import RECIPES
from angpt_jax.exports import tensors
from angpt_jax.exports.description import MODEL_FILES
from angpt_jax.exports.standalone.modeling_angpt_jax import AngptJaxForCausalLM
from angpt_jax.exports.writing import STANDALONE

CASES: dict[str, dict[str, Any]] = {
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    "angpt folded": {"recipe": "angpt", "folded": True},
    "grouped queries": {"recipe": "ngpt", "kv_heads": 2},
    "grouped queries, a scale a head": {"recipe": "normformer", "kv_heads": 1},
    "tied": {"recipe": "gpt_plus", "tied_embeddings": True},
    "tied, with scales": {"recipe": "angpt", "tied_embeddings": True},
    "QK-norm": {"recipe": "angpt", "places": {"qk": {"part": "qk_norm"}}},
    "a sublayer of its own": {"recipe": "angpt", "places": {"residual": {"mlp": {"part": "add"}}}},
    "another base of the angles": {"recipe": "gpt_plus", "rope_theta": 100.0},
    "across documents": {"recipe": "gpt_plus", "across": True},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_ours(case: str, tmp_path: Path) -> None:
    exported = made(**CASES[case])
    ours, theirs = logits(exported, batch()), torch_logits(load_model(write(tmp_path / "x", exported)), batch())
    assert ours.shape == theirs.shape == (3, 12, VOCAB)
    assert np.abs(theirs - ours).max() < 1e-5 * np.abs(ours).max()


def test_a_folded_decoder_has_no_scale_and_the_logits_of_the_other(tmp_path: Path) -> None:
    ours = logits(made("angpt"), batch())
    model = load_model(write(tmp_path / "x", made("angpt", folded=True)))
    assert {name for name, _ in model.named_parameters() if not name.endswith(".weight")} == set()
    assert np.abs(torch_logits(model, batch()) - ours).max() < 1e-5 * np.abs(ours).max()


def test_documents_are_kept_apart_unless_the_run_did_not(tmp_path: Path) -> None:
    """The first row of the batch has two documents: what stands in the first must not touch the second."""
    other = batch()
    other[0, 1:6] = 7
    changed = {}
    for across in (False, True):
        model = load_model(write(tmp_path / str(across), made("gpt_plus", across=across)))
        changed[across] = np.abs(torch_logits(model, other) - torch_logits(model, batch()))[0, 6:].max()
    assert changed[False] == 0 and changed[True] > 1e-3


@pytest.mark.parametrize("dtype, error", [("bfloat16", 0.05), ("float16", 0.01)])
def test_matrices_of_half_the_bytes_and_scales_of_all(dtype: str, error: float, tmp_path: Path) -> None:
    """Stored and loaded in float32, a scale is what it was; logits are close."""
    exported = made("ngpt")
    model = load_model(write(tmp_path / "x", exported, dtype))
    found = {name.rpartition(".")[2] == "weight": str(p.dtype) for name, p in model.named_parameters()}
    assert found == {True: f"torch.{dtype}", False: "torch.float32"}
    ours, theirs = logits(exported, batch()), torch_logits(model, batch())
    assert 1e-6 < np.abs(theirs - ours).max() / np.abs(ours).max() < error
    scale = exported.params["layers"]["attention"]["qk"]["query_key_scale"][1]
    np.testing.assert_array_equal(model.layers[1].attention.qk.query_key_scale.detach().numpy(), scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_stays_float32_is_what_is_no_matrix(recipe: str) -> None:
    """By name, as transformers finds it."""
    kept = re.compile("|".join(AngptJaxForCausalLM._keep_in_fp32_modules_strict or []))
    for entry in tensors.entries(made(recipe).decoder):
        assert bool(kept.search(entry.name)) is not entry.is_matrix


def test_tensors_in_several_files_are_the_same(tmp_path: Path) -> None:
    exported = made("gpt_plus")
    one = write(tmp_path / "one", exported)
    many = write(tmp_path / "many", exported, shard_bytes=8000)
    assert len(list(many.glob("*.safetensors"))) > 3
    np.testing.assert_array_equal(torch_logits(load_model(one), batch()), torch_logits(load_model(many), batch()))


def test_the_loss_is_that_of_the_next_ids(tmp_path: Path) -> None:
    model, ids = load_model(write(tmp_path / "x", made("gpt_plus"))), torch.tensor(batch()).long()
    scores = torch_logits(model, batch()).astype(float)[:, :-1]
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, batch()[:, 1:, None], axis=-1)
    assert float(model(ids, labels=ids).loss.detach()) == pytest.approx(nats.mean(), rel=1e-5)


def test_config_json_says_what_transformers_asks(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "x", made("gpt_plus", kv_heads=2, tied_embeddings=True)))
    config, generation = model.config, model.generation_config
    assert (config.max_position_embeddings, generation.max_length) == (CONTEXT, CONTEXT)
    assert (config.bos_token_id, config.eos_token_id, generation.eos_token_id) == (256, 256, 256)
    assert (str(config.dtype), config.tie_word_embeddings) == ("torch.float32", True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_all_files_that_are_taken_along_are_named() -> None:
    assert sorted(MODEL_FILES) == sorted(path.name for path in STANDALONE.glob("*_angpt_jax.py"))


ALONE = """
import json, sys
sys.modules["jax"] = sys.modules["angpt_jax"] = None  # an import of either raises
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps(model(torch.tensor([[256, 72, 105]])).logits[0].tolist()))
"""


def test_a_process_without_jax_loads_it(tmp_path: Path) -> None:
    exported = made("angpt")
    folder = write(tmp_path / "x", exported)
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ours = logits(exported, np.array([[256, 72, 105]]))[0]
    assert np.abs(np.array(json.loads(done.stdout)) - ours).max() < 1e-5 * np.abs(ours).max()
