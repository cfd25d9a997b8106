"""An export read back is what was exported, bit for bit; a damaged or hostile one is refused by file and reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import tree
from exports import VOCAB, batch, logits, made, write
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from angpt_jax.archs import RECIPES
from angpt_jax.errors import UserError
from angpt_jax.exports.exported import Exported, with_vocab
from angpt_jax.exports.reading import read_export

CASES: dict[str, dict[str, Any]] = {
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    "folded": {"recipe": "angpt", "folded": True},
    "grouped": {"recipe": "ngpt", "kv_heads": 2},
    "tied": {"recipe": "gpt_plus", "tied_embeddings": True},
    "places": {"recipe": "angpt", "places": {"residual": {"mlp": {"alpha_init": "1/layers"}}}, "across": True},
}


def assert_equal(found: Exported, exported: Exported) -> None:
    assert replace(found, params=None) == replace(exported, params=None)
    assert (found.arch, found.sizes) == (exported.arch, exported.sizes)
    assert jax.tree.structure(found.params) == jax.tree.structure(exported.params)
    for ours, theirs in zip(jax.tree.leaves(exported.params), jax.tree.leaves(found.params), strict=True):
        assert (theirs.dtype, theirs.shape, theirs.tobytes()) == (ours.dtype, ours.shape, ours.tobytes())


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_read_bit_for_bit_and_exported_again_to_the_same_bytes(case: str, tmp_path: Path) -> None:
    exported = made(**CASES[case])
    first = write(tmp_path / "first", exported)
    found = read_export(first)
    assert_equal(found, exported)
    assert tree(write(tmp_path / "second", found)) == tree(first)


def test_one_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    exported = made("gpt_plus")
    folder = write(tmp_path / "x", exported, shard_bytes=5000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(path.name for path in folder.glob("*.safetensors"))
    assert_equal(read_export(folder), exported)


def test_files_are_as_large_as_they_may_be_but_for_a_tensor_that_is_larger(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", made("gpt_plus"), shard_bytes=5000)
    kept = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    for tensors in kept.values():
        assert sum(array.nbytes for array in tensors.values()) <= 5000 or len(tensors) == 1
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert sum(array.nbytes for tensors in kept.values() for array in tensors.values()) == total


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 8), ("float16", 11)])
def test_half_the_bytes_are_read_as_float32_of_what_was_kept(dtype: str, bits: int, tmp_path: Path) -> None:
    exported = made("ngpt")
    found = read_export(write(tmp_path / "x", exported, dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {np.dtype("float32")}
    np.testing.assert_allclose(found.params["head"], exported.params["head"], rtol=2.0**-bits, atol=1e-6)
    assert not np.array_equal(found.params["head"], exported.params["head"])
    kept, ours = (of.params["logits"]["logit_scale"] for of in (found, exported))
    np.testing.assert_array_equal(kept, ours)
    again = write(tmp_path / "again", found, dtype)
    assert tree(again) == tree(tmp_path / "x")


def test_tensors_are_out_by_in_and_one_a_layer(tmp_path: Path) -> None:
    exported = made("normformer", kv_heads=2)
    tensors = load_file(write(tmp_path / "x", exported) / "model.safetensors")
    assert tensors["layers.1.mlp.up.weight"].shape == (40, 24) and tensors["layers.0.mlp.down.weight"].shape == (24, 40)
    assert tensors["layers.0.attention.key.weight"].shape == (12, 24)
    assert tensors["embedding.weight"].shape == tensors["head.weight"].shape == (VOCAB, 24)
    np.testing.assert_array_equal(tensors["layers.1.mlp.up.weight"], exported.params["layers"]["mlp"]["up"][1].T)
    np.testing.assert_array_equal(tensors["head.weight"], exported.params["head"].T)
    gain = exported.params["layers"]["attention"]["value_norm"]["gain"]
    np.testing.assert_array_equal(tensors["layers.1.attention.value_norm.gain"], gain[1])


@pytest.mark.parametrize("recipe", ["angpt", "gpt_plus"])
def test_more_vocabulary_leaves_the_logits_of_the_others(recipe: str, tmp_path: Path) -> None:
    exported = made(recipe)
    more = with_vocab(read_export(write(tmp_path / "x", exported)), 304)
    assert more.sizes.vocab == 304
    np.testing.assert_allclose(logits(more, batch())[..., :VOCAB], logits(exported, batch()), atol=1e-6)
    assert not logits(more, batch())[..., VOCAB:].any()


@pytest.mark.parametrize("recipe, folded", [("gpt_plus", False), ("angpt", True)])
def test_what_transformers_saved_is_read(recipe: str, folded: bool, tmp_path: Path) -> None:
    """A model that was loaded there, perhaps trained, and saved again."""
    torch_side = pytest.importorskip("exports_in_torch")
    exported = made(recipe, folded=folded)
    torch_side.load_model(write(tmp_path / "x", exported)).save_pretrained(tmp_path / "y")
    assert_equal(read_export(tmp_path / "y"), exported)


Damage = Callable[[Path], object]


def changed(**facts: Any) -> Damage:
    """config.json with other facts; `angpt_jax__x` is x in the section angpt_jax, `model__x` in its section model."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, value in facts.items():
            section, _, name = key.rpartition("__")
            at = {"": config, "angpt_jax": config["angpt_jax"], "model": config["angpt_jax"]["model"]}[section]
            at[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def with_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def holding(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


INDEX = "model.safetensors.index.json"
BAD: dict[str, tuple[Damage, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "not JSON": (holding("config.json", "{"), "config.json is not JSON (Expecting property name"),
    "deep": (holding("config.json", "[" * 200_000), "config.json is not JSON (nested too deep)"),
    "not UTF-8": (holding("config.json", b"\xff"), "config.json is not JSON ('utf-8' codec can't decode"),
    "a list": (holding("config.json", "[]"), "config.json holds no mapping"),
    "another model": (holding("config.json", "{}"), "config.json has no section angpt_jax"),
    "another format": (changed(angpt_jax__format=2), "config.json: format 2, where this version reads 1"),
    "a word for a number": (changed(angpt_jax__step="7"), "config.json: angpt_jax.step must be of type int"),
    "a number for a switch": (changed(angpt_jax__folded=1), "config.json: angpt_jax.folded must be of type bool"),
    "unknown architecture": (changed(model__arch="gpt9"), "model.arch: unknown architecture, got 'gpt9'"),
    "unknown field": (changed(model__eval="x"), "eval: unknown key in config.json"),
    "unknown part": (changed(model__places={"qk": {"part": "os"}}), "model.places.qk.part: unknown part, got 'os'"),
    "no heads": (changed(model__heads=0), "model.heads: must be >= 1, got 0"),
    "no number": (changed(model__rope_theta=float("nan")), "model.rope_theta: must be a finite number > 0"),
    "too large": (changed(model__width=10**9), "model: its parameters need"),
    "other sizes": (changed(model__width=48), "config.json: hidden_size is not what its section angpt_jax says"),
    "other places": (changed(places={}), "config.json: places is not what its section angpt_jax says"),
    "not to be folded": (
        changed(angpt_jax__folded=True, model__arch="ngpt"),
        "config.json: ngpt can't be folded",
    ),
    "folded or not": (changed(angpt_jax__folded=True), "config.json: places is not what its section angpt_jax says"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "empty": (holding("model.safetensors", b""), "model.safetensors is damaged or can't be read"),
    "truncated": (cut, "model.safetensors is damaged or can't be read"),
    "not tensors": (holding("model.safetensors", b"\x80\x04x" * 99), "model.safetensors is damaged or can't be read"),
    "a tensor less": (
        with_tensors(lambda tensors: tensors.pop("layers.1.mlp.up.weight")),
        "the tensors layers.1.mlp.up.weight are missing (1 in all)",
    ),
    "a tensor more": (
        with_tensors(lambda tensors: tensors.update({"__class__": np.zeros(2)})),
        "model.safetensors holds '__class__', which the model does not have",
    ),
    "another shape": (
        with_tensors(lambda tensors: tensors.update({"head.weight": np.zeros((24, VOCAB), np.float32)})),
        "model.safetensors holds head.weight as F32 of shape (24, 257), which must be float32, bfloat16 or float16 of "
        "shape (257, 24)",
    ),
    "another dtype": (
        with_tensors(lambda tensors: tensors.update({"head.weight": np.zeros((VOCAB, 24), np.int32)})),
        "model.safetensors holds head.weight as I32 of shape (257, 24)",
    ),
    "a file elsewhere": (
        holding(INDEX, json.dumps({"weight_map": {"head.weight": "../../x.safetensors"}})),
        f"{INDEX} must name files such as model-00001-of-00002.safetensors",
    ),
    "an index of nothing": (holding(INDEX, "{}"), f"{INDEX} must name files such as"),
    "a shard less": (
        holding(INDEX, json.dumps({"weight_map": {"head.weight": "model-00001-of-00002.safetensors"}})),
        "model-00001-of-00002.safetensors is missing",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "x", made("angpt"))


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_an_export_is_refused_by_its_file(case: str, whole: Path, tmp_path: Path) -> None:
    damage, said = BAD[case]
    folder = tmp_path / "x"
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    with pytest.raises(UserError) as caught:
        read_export(folder)
    (line,) = caught.value.problems
    assert line.startswith(f"run.init_from: {said}") and line.isprintable()
    assert line.endswith(f"got {str(folder)!r}; a folder that export made")


def test_programs_in_the_folder_are_not_run(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for path in whole.iterdir():
        program = f"open({str(tmp_path / 'canary')!r}, 'w')\n".encode()
        (folder / path.name).write_bytes(program if path.suffix == ".py" else path.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    read_export(folder)
    assert not (tmp_path / "canary").exists()


def test_metadata_is_what_transformers_asks(whole: Path) -> None:
    with safe_open(whole / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
