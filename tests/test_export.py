"""The command: a run becomes a folder, whole or not at all, and bad input becomes one line."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import Outcome, make_workspace, one_device, run_here, tree
from exports import logits
from safetensors.numpy import load_file

from angpt_jax import cli, trained
from angpt_jax.config import Config, MeshConfig
from angpt_jax.export import ExportConfig, export
from angpt_jax.exports import writing
from angpt_jax.exports.reading import read_export
from angpt_jax.train import train

BYTES = 257  # of the 300 entries of the tiny config
RUN = ("--run.dir", "runs/it")
FILES = {
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("modeling_angpt_jax.py", "configuration_angpt_jax.py", "parts_angpt_jax.py", "norms_angpt_jax.py"),
}
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run of two steps."""
    folder = make_workspace(tmp_path_factory.mktemp("run") / "w")
    config = ["--config", "tiny.yaml", *RUN, "--run.steps", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(cli.parse(Config, config, command="train"), "it") == 0
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*flags: str) -> Outcome:
        return run_here(export, ExportConfig, "export", *flags, monkeypatch=monkeypatch, capsys=capsys)

    return call


def test_a_run_becomes_a_folder(folder: Path, run: Run) -> None:
    """With the ids of its tokenizer alone, and with the logits that these have in the run."""
    before = tree(folder)
    done = run(*RUN, "--out", "made/it")
    assert done == (0, f"exported step 2 to {folder}/made/it: model.safetensors\n", "")
    assert {path.name for path in (folder / "made/it").iterdir()} == FILES
    assert {path: kept for path, kept in tree(folder).items() if not path.startswith("made/")} == before
    found, ours = read_export(folder / "made/it"), trained.load(folder / "runs/it", MeshConfig())
    assert (found.step, found.sizes.vocab, found.trained_vocab, found.folded) == (2, BYTES, 300, False)
    assert (found.tokenizer, found.end_of_document) == ("bytes", 256)
    assert found.params["embedding"].shape == found.params["head"].shape[::-1] == (BYTES, 32)
    assert found.params["logits"]["logit_scale"].shape == (BYTES,)
    np.testing.assert_array_equal(found.params["layers"]["mlp"]["up"], ours.params["layers"]["mlp"]["up"])
    tokens_BL = np.random.default_rng(0).integers(0, BYTES, (8, 32), dtype=np.int32)
    expected = jax.jit(ours.model.apply)({"params": ours.params}, tokens_BL, np.cumsum(tokens_BL == 256, axis=1))
    np.testing.assert_allclose(logits(found, tokens_BL), np.asarray(expected)[..., :BYTES], atol=1e-5)


def test_folded_and_of_half_the_bytes_in_several_files(folder: Path, run: Run) -> None:
    (folder / "out").mkdir()
    done = run(*RUN, "--out", "out", "--fold", "true", "--dtype", "bfloat16", "--shard_mb", "1")
    assert done.code == 0 and read_export(folder / "out").folded
    tensors = load_file(folder / "out/model.safetensors")
    assert {str(array.dtype) for array in tensors.values()} == {"bfloat16"}
    assert not any("residual" in name or "logits" in name for name in tensors)


def test_the_options_reach_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def write(exported: Any, tokenizer: Any, out: Path, dtype: str, shard_bytes: int) -> list[str]:
        seen.update(out=out, dtype=dtype, shard_bytes=shard_bytes)
        return []

    monkeypatch.setattr(writing, "write", write)
    flags = ["--run.dir", "runs/it", "--out", "~/x", "--dtype", "float16", "--shard_mb", "7"]
    assert export(cli.parse(ExportConfig, flags, command="export"), "export") == 0
    assert seen == {"out": Path("~/x").expanduser(), "dtype": "float16", "shard_bytes": 7_000_000}


NEW = "a folder that is not there, or an empty one"
EARLY = {
    "--out out --dtype float64": "dtype: expected float32, bfloat16 or float16, got 'float64'",
    "--out out --format gguf": "format: expected safetensors or orbax, got 'gguf'",
    "--out out --shard_mb 0": "shard_mb: must be at least 1, got 0",
    "--out out --fold yes": "fold: expected true or false, got 'yes'",
    "--run.dir runs/it": "out: is required; expected str (folder to make; it must not be there, or be empty)",
    "--out text": f"out: is not empty, got 'text'; {NEW}",
    "--out tiny.yaml": f"out: is not a folder, got 'tiny.yaml'; {NEW}",
    "--out tiny.yaml/x": "out: can't be written there, got 'tiny.yaml/x' ('tiny.yaml' is a file); " + NEW,
    "--out link": f"out: is not a folder, got 'link'; {NEW}",
    "--out ..": f"out: must end in the name of a folder, without '..', got '..'; {NEW}",
    "--out /": f"out: must end in the name of a folder, without '..', got '/'; {NEW}",
    "--out ~nobody-of-that-name/x": (
        f"out: can't be read (Could not determine home directory.), got '~nobody-of-that-name/x'; {NEW}"
    ),
    "--out gs://bucket/x": (
        "out: must be a path of a file system, got 'gs://bucket/x'; mount the bucket, or download, and give its path"
    ),
    "--out a\nb": r"out: must be printable text (no newline or NUL), got 'a\nb'",
    f"--out {'x' * 201}": f"out: must have no part longer than 200 bytes, got '{'x' * 76}...",
    "--out out --run.dir a\x1b[2J": r"run.dir: must be printable text (no newline or NUL), got 'a\x1b[2J'",
    "--out out --format orbax --dtype bfloat16": "dtype: has no effect on format orbax, got bfloat16; leave it out",
}
LATE = {
    "--out out --run.dir nowhere": "run.dir: holds no run (no config.yaml), got '{w}/nowhere'; train one first",
    "--out out --run.dir runs/bare": "run.dir: holds no checkpoint, got '{w}/runs/bare'; train it first",
    "--out out --run.dir runs/tied --fold true": (
        "fold: angpt can't be written as a plain decoder (model.tied_embeddings: one matrix can't be the embedding and "
        "take the factors of the head), got true; false"
    ),
}


def plant(folder: Path) -> None:
    (folder / "link").symlink_to("nowhere")
    for name, old, new in (("bare", "", ""), ("tied", "tied_embeddings: false", "tied_embeddings: true")):
        (folder / "runs" / name).mkdir()
        for file in ("config.yaml", "tokenizer.json"):
            text = (folder / "runs/it" / file).read_text()
            assert file == "tokenizer.json" or old in text
            (folder / "runs" / name / file).write_text(text.replace(old, new) if old else text)


def words(flags: str) -> list[str]:
    return flags.split(" ")


@pytest.mark.parametrize("flags", [*EARLY, *LATE], ids=ascii)
def test_bad_input_is_one_line_and_nothing_is_written(flags: str, folder: Path, run: Run) -> None:
    plant(folder)
    before = tree(folder)
    given = words(flags) if "--run.dir" in flags else [*words(flags), *RUN]
    done = run(*given)
    expected = (EARLY | LATE)[flags].replace("{w}", str(folder))
    assert (done.code, done.out, tree(folder)) == (2, "", before)
    assert done.err == f"angpt_jax: error: {expected}\n"
    assert not (folder / "out").exists()


WITHOUT_JAX = """
import contextlib, io, json, sys
from angpt_jax import cli, export
loaded = []
for argv in json.load(sys.stdin):
    sys.argv = ["export", *argv]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(export.export, export.ExportConfig, "export", None)
    loaded.append(sorted({"jax", "jaxlib", "flax", "orbax", "torch", "safetensors"} & set(sys.modules)))
print(json.dumps(loaded))
"""


def test_what_is_wrong_with_the_flags_is_found_before_jax_is_imported(folder: Path) -> None:
    plant(folder)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        input=json.dumps([words(flags) for flags in EARLY]),
        env=one_device(),
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == [[]] * len(EARLY), done.stderr


def full(*given: Any, **named: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stopped(*given: Any, **named: Any) -> None:
    raise KeyboardInterrupt


def test_a_disk_that_is_full_leaves_nothing(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "save_file", full)
    before = sorted(folder.rglob("*"))
    done = run(*RUN, "--out", "made/it")
    line = f"out: can't be written, got '{folder}/made/it' (No space left on device); a folder on a disk with room"
    assert (done.code, done.err) == (4, f"angpt_jax: error: {line}\n")
    assert sorted(folder.rglob("*")) == before


def test_what_was_stopped_has_not_the_name_of_what_is_whole(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While files are written they lie elsewhere; what a kill left there is removed by the next export."""
    (folder / ".out.unfinished").mkdir()
    (folder / ".out.unfinished/rest").write_text("of an export that was killed")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing, "save_file", stopped)
        export(cli.parse(ExportConfig, [*RUN, "--out", "out"], command="export"), "export")
    assert list(folder.glob("*out*")) == []
    (folder / ".out.unfinished").mkdir()
    assert run(*RUN, "--out", "out").code == 0
    assert [path.name for path in folder.glob("*out*")] == ["out"] and "rest" not in tree(folder / "out")


def test_a_number_that_float16_can_not_hold_is_refused(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = writing.tensors.tensor
    monkeypatch.setattr(writing.tensors, "tensor", lambda entry, params: tensor(entry, params) * 1e6)
    done = run(*RUN, "--out", "made/it", "--dtype", "float16")
    assert done.code == 2 and not (folder / "made").exists()
    assert done.err.startswith("angpt_jax: error: dtype: can't hold embedding.weight, whose largest entry is ")


@pytest.mark.parametrize("fold", ["false", "true"])
def test_orbax_is_a_run_directory_of_weights_alone(folder: Path, run: Run, fold: str) -> None:
    done = run(*RUN, "--out", "out", "--format", "orbax", "--fold", fold)
    assert (done.code, done.err) == (0, "") and "--run.init_from" in done.out
    assert {path.name for path in (folder / "out").iterdir()} == {
        *("config.yaml", "tokenizer.json", "weights.json", "checkpoints")
    }
    weights = trained.load(folder / "out", MeshConfig())
    assert weights.is_folded == (fold == "true")
    again = trained.load(folder / "runs/it", MeshConfig(), folded=fold == "true")
    jax.tree.map(np.testing.assert_array_equal, weights.params, again.params)
