"""Every file of configs/data prepares data that lie as its header says, and gives what the training configs read."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from commands import run_here

from angpt_jax import cli
from angpt_jax import prepare as command
from angpt_jax.data.prepared import open_prepared

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "configs" / "data"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TEXTS = [f"text {number}" for number in range(1000)]


def lines(**more: str) -> bytes:
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in TEXTS).encode()


def rows(path: Path, **more: list) -> None:
    parquet.write_table(pa.table({"text": TEXTS, **more}), path)


LAYOUTS: dict[str, dict[str, Callable[[Path], object]]] = {
    "slimpajama": {
        f"{split}/chunk{chunk}/example_0.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(lines()))
        for split, chunk in (("train", 1), ("train", 2), ("validation", 1), ("test", 1))
    },
    "openwebtext": {"plain_text/train-00000-of-00080.parquet": rows},
    "c4": {
        f"{split}/en/c4-{split}.00000-of-01024.json.gz": lambda path: path.write_bytes(gzip.compress(lines(url="u")))
        for split in ("train", "validation")
    },
    "fineweb_edu": {"sample/10BT/000_00000.parquet": lambda path: rows(path, score=[1.0] * 1000)},
    "tiny_shakespeare": {"input.txt": lambda path: path.write_text("First Citizen:\nBefore we proceed\n" * 20)},
}


def parsed(name: str) -> command.PrepareConfig:
    return cli.parse(command.PrepareConfig, ["--config", str(FOLDER / f"{name}.yaml")], command="prepare")


@pytest.mark.parametrize("name", CONFIGS)
def test_it_keeps_the_rules_and_says_where_the_data_are_from(name):
    config = parsed(name)
    assert command.check(config) == []
    assert config.out == f"data/{name}" and str(config.source).startswith(f"data/raw/{name}")
    header = "".join(re.findall("^#.*\n", (FOLDER / f"{name}.yaml").read_text(), re.MULTILINE))
    assert f"data/raw/{name}" in header and re.search(r"\d GB|bytes", header) and "http" not in header


@pytest.mark.parametrize("name", CONFIGS)
def test_it_prepares_such_files(name, tmp_path, monkeypatch, capsys):
    for place, write in LAYOUTS[name].items():
        path = tmp_path / "data" / "raw" / name / place
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    monkeypatch.chdir(tmp_path)
    flags = ("--config", str(FOLDER / f"{name}.yaml"), "--tokenizer", "bytes", "--workers", "1")
    run = command.prepare, command.PrepareConfig, "prepare"
    outcome = run_here(*run, *flags, monkeypatch=monkeypatch, capsys=capsys)
    assert outcome.code == 0, outcome.err
    manifest = open_prepared(tmp_path / "data" / name, "out", check_all=True).manifest
    documents = {split: sum(shard.documents for shard in shards) for split, shards in manifest.splits.items()}
    expected = {"slimpajama": (2000, 1000), "c4": (1000, 1000), "tiny_shakespeare": (1, 1)}
    if name in expected:
        assert tuple(documents.values()) == expected[name]
    else:
        assert sum(documents.values()) == 1000 and 1 <= documents["validation"] < 20


def test_the_training_configs_read_what_these_make():
    made = {parsed(name).out: parsed(name).tokenizer for name in CONFIGS}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        for source in re.findall(r"source: (data/\S+)", path.read_text()):
            assert source in made, path
            assert f"tokenizer: {made[source]}" in path.read_text() or "tokenizer:" not in path.read_text(), path


def test_all_are_here():
    assert CONFIGS == sorted(LAYOUTS)
    readme = (FOLDER / "README.md").read_text()
    assert all(f"{name}.yaml" in readme for name in CONFIGS)
