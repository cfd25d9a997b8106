"""Strangers' files run nothing, secrets stay out, nothing is written elsewhere, no network is needed."""

import ast
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bad_inputs import prepared
from commands import Outcome, make_workspace, one_device, run_here, tree
from pyarrow import parquet

import angpt_jax
from angpt_jax import cli, links, metrics, rules, run_dir
from angpt_jax.config import Config
from angpt_jax.data.tokenizer import ByteTokenizer, train_bpe
from angpt_jax.evaluate import EvaluateConfig, evaluate
from angpt_jax.export import ExportConfig, export
from angpt_jax.prepare import PrepareConfig, prepare
from angpt_jax.sample import SampleConfig, sample
from angpt_jax.schema import leaves
from angpt_jax.sweep import SweepConfig, sweep
from angpt_jax.train import train

PACKAGE = Path(angpt_jax.__file__).parent
COMMANDS: dict[str, tuple[Callable, type]] = {
    "train": (train, Config),
    "prepare": (prepare, PrepareConfig),
    "sample": (sample, SampleConfig),
    "evaluate": (evaluate, EvaluateConfig),
    "export": (export, ExportConfig),
    "sweep": (sweep, SweepConfig),
}
Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(command: str, *flags: str) -> Outcome:
        return run_here(*COMMANDS[command], command, *flags, monkeypatch=monkeypatch, capsys=capsys)

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace inside of `tmp_path`."""
    made = make_workspace(tmp_path / "a" / "w")
    monkeypatch.chdir(made)
    return made


# S1: nothing is executed from a file.

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "code",
    "runpy",
    "torch",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all", "importlib.import_module", "pickle.loads",
    "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
FORBIDDEN_NAMES = {"Loader", "FullLoader", "UnsafeLoader", "CLoader", "PyExtensionType"}
FORBIDDEN_FLAGS = {"allow_pickle", "trust_remote_code", "shell"}


def dangers(source: str) -> Iterator[str]:
    """What in a program may run code that stands in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from (f"import {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS:
                yield f"{called}()"
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_FLAGS and not is_false:
                    yield f"{keyword.arg}={ast.unparse(keyword.value)}"
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["import pickle"]),
        ("from torch import load", ["import torch"]),
        ("import yaml\nyaml.load(x, yaml.UnsafeLoader)", ["yaml.load()", "yaml.UnsafeLoader"]),
        ("np.load(path, allow_pickle=flag)\nnp.load(path, allow_pickle=False)", ["allow_pickle=flag"]),
        ("subprocess.run(x, shell=True)", ["shell=True"]),
        ("eval('1')\nexec(x)\nre.compile(x)\nstep.compile()", ["eval()", "exec()"]),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", ["trust_remote_code=True"]),
        ("import os\nos.system('x')", ["os.system()"]),
        ("importlib.import_module(name)", ["importlib.import_module()"]),
    ],
)
def test_dangers_are_seen(source: str, found: list[str]) -> None:
    assert list(dangers(source)) == found


# What an export takes along runs in programs of others: a model in PyTorch. It may import that, and load no file.
STANDALONE = PACKAGE / "exports" / "standalone"
OF_PYTORCH = {"import torch", "import torch.nn"}
LOADS = re.compile(r"(^|[._])(load\w*|from_pretrained|open|hub|read\w*|urlopen|system|run)$")


def test_the_package_can_not_run_code_from_a_file() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 80
    found = [(path, danger) for path in sources for danger in dangers(path.read_text("utf-8"))]
    assert [(path.name, danger) for path, danger in found if path.parent != STANDALONE] == []
    assert {danger for path, danger in found if path.parent == STANDALONE} == OF_PYTORCH


def test_what_an_export_takes_along_loads_nothing() -> None:
    nodes = [node for path in STANDALONE.glob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    assert len(calls) > 200 and [call for call in calls if LOADS.search(call)] == []
    assert LOADS.search("torch.load") and LOADS.search("torch.hub.load") and LOADS.search("open")


class Payload:
    """Unpickling it touches a file."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def plant_pickles(folder: Path, canary: Path) -> None:
    payload = pickle.dumps(Payload(canary))
    for name in (
        "t.json",
        "t.model",
        "x.yaml",
        "x.pkl",
        "x.jsonl",
        "x.parquet",
        "x.arrow",
        "x.jsonl.gz",
        "x.jsonl.zst",
    ):
        (folder / name).write_bytes(payload)
    np.save(folder / "x.npy", np.array([Payload(canary)], object), allow_pickle=True)
    facts = prepared(folder)
    for name in ("train.bin", "validation.bin", "manifest.json"):
        (folder / "made" / name).write_bytes(payload)
    (folder / "sums").mkdir()
    (folder / "sums/manifest.json").write_text(json.dumps(facts))
    schema = pa.schema(
        [
            pa.field(
                "text",
                pa.string(),
                metadata={"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": payload},
            )
        ]
    )
    (folder / "extension").mkdir()
    parquet.write_table(
        pa.table([[f"text {number}" for number in range(30)]], schema=schema), folder / "extension/x.parquet"
    )


def plant_programs(folder: Path, canary: Path) -> None:
    """Where Python would look for them if the folder were on its path; and names of them in files that have classes."""
    program = f"import os; os.system('touch {canary}')\nclass Thing: pass\n"
    for name in ("sitecustomize", "usercustomize", "evil", "conftest", "config"):
        (folder / f"{name}.py").write_text(program)


def plant_names(folder: Path, canary: Path) -> None:
    """Files whose text names code."""
    call = f"!!python/object/apply:os.system ['touch {canary}']"
    (folder / "call.yaml").write_text(f"model: {call}\n")
    (folder / "runs/bad").mkdir(parents=True)
    (folder / "runs/bad/config.yaml").write_text(f"{call}\n")
    spec = json.loads(train_bpe(["some text"], 260).json)
    spec |= {"__class__": "evil.Thing", "auto_map": {"AutoTokenizer": "evil.Thing"}, "py/object": "evil.Thing"}
    (folder / "named.json").write_text(json.dumps(spec))
    for name, facts in {
        "camel": {"pythonClassName": "evil.Thing"},
        "snake": {"featuresDict": {"features": {"text": {"python_class_name": "evil.Thing"}}}},
        "old": {"type": "evil.Thing", "content": {}},
    }.items():
        (folder / name / "1.0.0").mkdir(parents=True)
        (folder / name / "1.0.0/features.json").write_text(json.dumps(facts))
        (folder / name / "1.0.0/dataset_info.json").write_text(json.dumps({"name": name, "version": "1.0.0"}))


TINY = ("train", "--config", "tiny.yaml")
MAKE = ("prepare", "--out", "out", "--workers", "1")
USES = [
    ("train", "--config", "x.yaml"),
    ("train", "--config", "call.yaml"),
    (*TINY, "--model.places", "!!python/name:os.system"),
    (*TINY, "--data.tokenizer", "t.json"),
    (*TINY, "--data.tokenizer", "t.model"),
    (*TINY, "--data.tokenizer", "named.json"),
    (*TINY, "--data.source", "made"),
    (*TINY, "--data.source", "sums"),
    (*TINY, "--run.dir", "runs/bad"),
    ("sample", "--run.dir", "runs/bad"),
    ("evaluate", "--run.dir", "runs/bad"),
    ("evaluate", "--config", "call.yaml"),
    ("export", "--run.dir", "runs/bad", "--out", "out"),
    ("sweep", "--config", "x.yaml"),
    ("sweep", "--config", "call.yaml"),
    ("sweep", "--list", "[{name: a, config: [call.yaml]}]"),
    ("sweep", "--grid", "{model.places: [!!python/name:os.system]}"),
    *((*MAKE, "--source", name) for name in ("x.npy", "x.pkl", "x.jsonl", "x.parquet", "x.arrow", "x.jsonl.gz")),
    *((*MAKE, "--source", name) for name in ("x.jsonl.zst", "camel/1.0.0", "snake/1.0.0", "old/1.0.0", "made")),
    (*MAKE, "--source", "text", "--tokenizer", "t.json"),
    (*MAKE, "--source", "text", "--tokenizer", "t.model"),
    (*MAKE, "--source", "tfds:evil:thing"),
    (*MAKE, "--source", "tfds:camel"),
]


@pytest.mark.parametrize("words", USES, ids=" ".join)
def test_a_planted_payload_is_refused_and_not_run(
    words: tuple[str, ...], folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    for plant in (plant_pickles, plant_programs, plant_names):
        plant(folder, canary)
    monkeypatch.syspath_prepend(folder)  # as if the working directory were on Python's path, which it is for -m
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    done = run(*words)
    assert (done.code, canary.exists(), "evil" in sys.modules) == (2, False, False)
    assert done.err.startswith("angpt_jax: error: ") and not (folder / "out").exists()


def test_a_pickle_in_the_schema_of_parquet_is_not_run(folder: Path, tmp_path: Path, run: Run) -> None:
    plant_pickles(folder, tmp_path / "canary")
    assert run(*MAKE, "--source", "extension", "--validation_fraction", "0.3").code == 0
    assert not (tmp_path / "canary").exists()


def test_features_of_tfds_are_taken_also_under_such_names(tmp_path: Path) -> None:
    sets = importlib.import_module("angpt_jax.data.tfds_sets")
    own = "tensorflow_datasets.core.features."
    features = {"type": {"pythonClassName": f"{own}text_feature.Text", "text": {}}}
    facts = {"pythonClassName": f"{own}features_dict.FeaturesDict", "featuresDict": {"features": features}}
    (tmp_path / "features.json").write_text(json.dumps(facts))
    sets._refuse_foreign_features(tmp_path / "features.json", "source")


# S2: secrets.

SECRETS = {
    "HF_TOKEN": "hf_5ecretHuggingFace",
    "AWS_SECRET_ACCESS_KEY": "wJalr5ecretAws",
    "WANDB_API_KEY": "0badc0de5ecretWandb",
    "GITHUB_TOKEN": "ghp_5ecretGitHub",
    "HTTPS_PROXY": "http://user:5ecretProxy@proxy.invalid:3128",
}


def test_no_field_takes_a_secret() -> None:
    secret = re.compile(r"(^|[._])(token|key|api_key|password|passwd|secret|credentials?|login|user)$")
    keys = [leaf.key for _, schema in COMMANDS.values() for leaf in leaves(schema)]
    assert len(keys) > 80 and [key for key in keys if secret.search(key)] == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--data.source", "https://me:5ecret@host/data"),
        ("--data.cache_dir", "s3://me:5ecret@host/data"),
        ("--run.dir", "ftp://me:5ecret@host/data"),
        ("--data.mixture.x", "https://me:5ecret@host/data"),
        ("--data.validation_sets", "{x: 'https://me:5ecret@host/data'}"),
        ("--hf_token", "5ecret"),
        ("--run.wandb_key=5ecret",),
        ("https://me:5ecret@host/data",),
        ("--config", "https://me:5ecret@host/x.yaml"),
    ],
    ids=str,
)
def test_a_secret_that_is_given_by_mistake_is_neither_kept_nor_shown(
    flags: tuple[str, ...], folder: Path, tmp_path: Path, run: Run
) -> None:
    before = tree(tmp_path)
    done = run(*TINY, *flags)
    assert (done.code, tree(tmp_path)) == (2, before)
    assert "5ecret" not in done.out + done.err


# S4: nothing is written outside.

NAMES = [
    "../../x", "../x", "a/../../x", "runs/../../../x", "..", "a/..", "./../x", "x/../..", "~/x", "~root/x", "$HOME/x",
    "$(touch canary)", "`touch canary`", "; touch canary", "| touch canary", "> canary", "&& touch canary", "-rf", "*",
    "a\nb", "a\0b", "\x1b[2J", "a\tb", "\u202etxt", "\ud800", "C:\\x", "..\\..\\x", "%2e%2e/x", "file:///x", "gs://b/x",
    "https://host/x", "x" * 300, "x/" * 3000, "a b", "'", '"', "con", ".hidden", "a//b/./c", "{a,b}",
]  # fmt: skip
REFUSED = {name for name in NAMES if ".." in name.split("/") or not name.isprintable() or "://" in name}
REFUSED |= {"x" * 300, "x/" * 3000}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_hostile_name_writes_nothing_outside(name: str, folder: Path, tmp_path: Path, run: Run) -> None:
    before = tree(tmp_path)
    (folder / "x.yaml").write_text(json.dumps({"run": {"dir": name}}))
    config = cli.parse(Config, ["--config", "tiny.yaml"], command="train")
    if name in REFUSED:
        done = run(*TINY, "--config", "x.yaml")
        assert done.code == 2 and done.err.startswith("angpt_jax: error: run.dir: ")
        assert tree(tmp_path) == before | {"a/w/x.yaml": (folder / "x.yaml").read_bytes()}
        return
    config = cli.parse(Config, ["--config", "tiny.yaml", "--config", "x.yaml"], command="train")
    assert rules.check(config) == []
    directory = run_dir.locate(config, "tiny")
    run_dir.check(directory, config)
    run_dir.make(directory)
    run_dir.record(directory, config, ByteTokenizer.json)
    with metrics.MetricsWriter(directory, 0) as writer:
        writer.write({"step": 1, "tokens": 1, "loss": 1.0})
    new = [path for path in tree(tmp_path) if path not in before and path != "a/w/x.yaml"]
    inside = str(directory.resolve().relative_to(tmp_path.resolve()))
    assert directory.resolve().is_relative_to(folder.resolve()) and len(new) == 5
    assert all(path.startswith(f"{inside}/") for path in new)


LINKS = [
    "config.yaml",
    "tokenizer.json",
    "config.draft",
    "environment.json",
    "metrics.jsonl",
    "instruments.jsonl",
    "summary.json",
]
LINKS += ["checkpoints", "tensorboard", "checkpoints/5", "checkpoints/5/state", "lock", "anything/at/all"]


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_run_directory_is_refused(
    name: str, absolute: bool, folder: Path, tmp_path: Path, run: Run
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    link = folder / "runs/theirs" / name
    link.parent.mkdir(parents=True)
    target = outside if "." not in name else outside / "mine"
    link.symlink_to(target if absolute else os.path.relpath(target, link.parent))
    before = tree(tmp_path)
    done = run(*TINY, "--run.dir", "runs/theirs")
    assert done.err == (
        f"angpt_jax: error: run.dir: holds links that lead out of it ({name}), got '{folder}/runs/theirs'; "
        "give a run.dir on the other disk itself, or remove them\n"
    )
    assert (done.code, tree(tmp_path)) == (2, before)


def test_links_inside_and_a_folder_that_is_a_link_are_taken(tmp_path: Path) -> None:
    (tmp_path / "disk/run/checkpoints").mkdir(parents=True)
    (tmp_path / "disk/run/latest").symlink_to("checkpoints")
    (tmp_path / "run").symlink_to("disk/run")
    assert links.leading_out(tmp_path / "run") == links.leading_out(tmp_path / "none") == []
    (tmp_path / "disk/run/loop").symlink_to("loop")
    (tmp_path / "disk/run/up").symlink_to("..")
    assert links.leading_out(tmp_path / "run") == ["loop", "up"]


@pytest.mark.parametrize("name", ["unfinished", "manifest.json", "train-00000.bin.draft"])
def test_a_link_out_of_the_folder_of_prepare_is_refused(name: str, folder: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "outside").mkdir()
    (folder / "out").mkdir()
    (folder / "out" / name).symlink_to(tmp_path / "outside")
    before = tree(tmp_path)
    done = run(*MAKE, "--source", "text")
    assert done.err == f"angpt_jax: error: out: holds links that lead out of it ({name}), got {folder}/out\n"
    assert (done.code, tree(tmp_path), list((tmp_path / "outside").iterdir())) == (2, before, [])


@pytest.mark.parametrize("file", ["plan.json", "unfinished/00000.json"])
def test_prepare_moves_no_file_that_a_plan_names_elsewhere(file: str, folder: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "mine").write_text("mine")
    assert run(*MAKE, "--source", "text").code == 0
    plan = json.loads((folder / "out/plan.json").read_text())
    unit = plan["units"]["0"]
    unit["shards"]["train"] |= {"file": "../../../mine", "bytes": 4}
    (folder / "out" / file).parent.mkdir(exist_ok=True)
    (folder / "out" / file).write_text(json.dumps(plan if file == "plan.json" else unit))
    done = run(*MAKE, "--source", "text")
    assert (tmp_path / "mine").read_text() == "mine"
    if file == "plan.json":
        assert done.code == 2 and "plan.json is not one of prepare's (shard with file '../../../mine')" in done.err
    else:
        assert done.code == 0


# S5: no network; and S1, S2 once more, of whole runs.

BLOCKED = """
import runpy, socket, sys
def refuse(*given, **named): raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@cache
def without_network() -> tuple[str, list[str]]:
    """How a module is run without a network, and the words in front of its name."""
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode == 0:
        return "unshare", [unshare, "-rn", sys.executable, "-P", "-m"]
    return "blocked sockets", [sys.executable, "-P", "-c", BLOCKED]


def run_alone(folder: Path, command: str, *flags: str) -> Outcome:
    """In a process with secrets around it, without a network, and without the working directory on Python's path."""
    words = [*without_network()[1], f"angpt_jax.{command}", *flags]
    environment = one_device() | SECRETS
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def strange_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """The folder of a workspace where prepare, train, sample and evaluate ran among planted files."""
    top = tmp_path_factory.mktemp("strange")
    folder, canary = make_workspace(top / "a" / "w"), top / "canary"
    plant_programs(folder, canary)
    for name in ("yaml", "jax", "numpy", "json"):
        shutil.copy(folder / "evil.py", folder / f"{name}.py")
    name = "runs/$(touch canary); x"
    flags = ("--config", "tiny.yaml", "--run.dir", name, "--run.steps", "2", "--data.source", "made")
    ended = [run_alone(folder, "prepare", "--source", "text", "--out", "made", "--validation_fraction", "0.2")]
    ended += [run_alone(folder, "train", *flags)]
    for place in [folder / name, *(folder / name).rglob("*")]:
        if place.is_dir():
            (place / "payload.pkl").write_bytes(pickle.dumps(Payload(canary)))
            np.save(place / "payload.npy", np.array([Payload(canary)], object), allow_pickle=True)
            plant_programs(place, canary)
    ended += [run_alone(folder, "sample", "--run.dir", name, "--tokens", "2", "--samples", "1")]
    ended += [run_alone(folder, "evaluate", "--run.dir", name, "--sets.text", "text")]
    return folder, ended


def test_everything_works_without_a_network(
    strange_run: tuple[Path, list[Outcome]], record_property: Callable[[str, Any], None]
) -> None:
    record_property("network", without_network()[0])
    assert [(done.code, done.err if done.code else "") for done in strange_run[1]] == [(0, "")] * 4
    assert "--- sample 1 of step 2 ---" in strange_run[1][2].out


def test_no_secret_of_the_environment_is_kept_or_shown(strange_run: tuple[Path, list[Outcome]]) -> None:
    folder, ended = strange_run
    kept = tree(folder)
    assert any("environment.json" in name for name in kept) and any("checkpoints/2/" in name for name in kept)
    texts = [*(content for content in kept.values()), *((done.out + done.err).encode() for done in ended)]
    for secret in (*SECRETS.values(), "5ecretProxy"):
        assert not any(secret.encode() in text for text in texts)


def test_planted_programs_and_checkpoint_files_are_not_run(strange_run: tuple[Path, list[Outcome]]) -> None:
    folder, ended = strange_run
    assert [done.code for done in ended] == [0, 0, 0, 0]
    assert list(folder.parent.parent.rglob("canary*")) == []
    outside = [path for path in folder.parent.parent.rglob("*") if path.is_file() and folder not in path.parents]
    assert outside == []
