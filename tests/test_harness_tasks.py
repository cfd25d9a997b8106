"""Whole tasks of lm-evaluation-harness, from files: their numbers by hand, and what is refused."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from commands import Outcome, make_workspace, one_device, run_here, tree
from harness_models import BYTES, END, Greedy, harness_model, model

from angpt_jax import cli, harness_run
from angpt_jax.config import Config, MeshConfig
from angpt_jax.errors import UserError
from angpt_jax.evaluate import EvaluateConfig, evaluate
from angpt_jax.scoring import Scorer
from angpt_jax.train import train
from angpt_jax.trained import load


def write_tasks(folder: Path) -> None:
    """Three tasks of each kind, with their data."""
    folder.mkdir()
    lines = {
        "choice": [
            {"question": "def f1(x): return", "choices": ["x + 1", "y"], "answer": 0},
            {"question": "one", "choices": ["two", "three four"], "answer": 1},
            {"question": "", "choices": ["k", "z"], "answer": 0},
        ],
        "rolling": [{"text": "def f1_2(x): return x + 2, and more words than a window takes"}, {"text": "two words"}],
        "writing": [{"text": "def ", "answer": "never"}],
    }
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
            ],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        "writing": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, kind in kinds.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"my_{name}", "test_split": "test"} | data | kind))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with tasks and a run of two steps."""
    folder = make_workspace(tmp_path_factory.mktemp("trained") / "w")
    write_tasks(folder / "tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        datasets = pytest.importorskip("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "hub")
        flags = ["--config", "tiny.yaml", "--run.dir", "runs/a", "--run.steps", "2"]
        assert train(cli.parse(Config, flags, command="train"), "a") == 0
        yield folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    monkeypatch.chdir(trained)

    def call(*flags: str) -> Outcome:
        given = ("--run.dir", "runs/a", *flags)
        return run_here(evaluate, EvaluateConfig, "evaluate", *given, monkeypatch=monkeypatch, capsys=capsys)

    return call


def test_tasks_of_files_have_the_numbers_of_a_calculation_by_hand(run: Callable[..., Outcome], trained: Path) -> None:
    done = run("--harness", "[tasks/choice.yaml, tasks/rolling.yaml]", "--json", "out.json")
    assert done.code == 0, done.err
    found = json.loads(Path("out.json").read_text())
    loaded = load(trained / "runs/a", MeshConfig())
    scorer = Scorer(loaded.model, loaded.params, loaded.tokenizer, 32, 8)

    def score(context: bytes, target: bytes) -> float:
        return scorer.scores([([*context] or [END], [*target])])[0].log_p

    by_choice = [
        [score(b"def f1(x): return", b" x + 1"), score(b"def f1(x): return", b" y")],
        [score(b"one", b" two"), score(b"one", b" three four")],
        [score(b"", b" k"), score(b"", b" z")],
    ]
    sizes, answers = [[5, 1], [3, 10], [1, 1]], [0, 1, 0]
    acc = [np.argmax(scores) == answer for scores, answer in zip(by_choice, answers, strict=True)]
    norm = [np.argmax(np.divide(s, n)) == a for s, n, a in zip(by_choice, sizes, answers, strict=True)]
    choice = found["harness"]["my_choice"]
    assert choice["samples"] == 3 and found["sets"] == {}
    for name, right in ("acc", acc), ("acc_norm", norm):
        assert choice["metrics"][name]["value"] == pytest.approx(np.mean(right))
        assert choice["metrics"][name]["standard_error"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(3))
    texts = [json.loads(line)["text"] for line in Path("tasks/rolling.jsonl").read_text().splitlines()]
    nats = -sum(score(b"", text.encode()) for text in texts)
    metrics = found["harness"]["my_rolling"]["metrics"]
    size = sum(len(text.encode()) for text in texts)
    assert metrics["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert metrics["byte_perplexity"]["value"] == pytest.approx(math.exp(nats / size), rel=1e-5)
    assert metrics["word_perplexity"]["value"] == pytest.approx(
        math.exp(nats / sum(len(text.split()) for text in texts)), rel=1e-5
    )
    assert any(line.split()[:2] == ["my_choice", "acc_norm"] for line in done.out.splitlines())


def test_a_task_that_generates_gets_text(trained: Path) -> None:
    folder = trained / "tasks"
    greedy = Greedy(model())
    answer = BYTES.decode(greedy.continued([*b"def "], 4, None)).partition("\n")[0]
    rows = [{"text": "def ", "answer": text} for text in (answer, "never")]
    (folder / "writing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = harness_run.load([str(folder / "writing.yaml")])
    found = harness_run.run(harness_model(model(), generator=greedy), tasks)
    assert found["my_writing"]["metrics"]["exact_match"]["value"] == 0.5
    assert harness_run.run(harness_model(model()), harness_run.load([f"{folder}/writing.yaml"]), limit=1) == {
        "my_writing": {"samples": 1, "metrics": {"exact_match": {"value": 1.0, "standard_error": None}}}
    }


PAYLOAD = "{{ cycler.__init__.__globals__.os.system('touch canary') }}"


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"doc_to_text": PAYLOAD}, "can't be used, got SecurityError: access to attribute"),
        ({"doc_to_target": PAYLOAD}, "can't be used"),
        ({"description": PAYLOAD}, "can't be used"),
        ({"metric_list": [{"metric": "./evil.py"}]}, "no metric of that name, got './evil.py'; one of acc, "),
        ({"doc_to_text": "!function evil.f"}, "tags are not allowed"),
        ({"process_docs": "!function evil.f"}, "tags are not allowed"),
    ],
    ids=str,
)
def test_a_planted_payload_in_a_task_file_is_not_run(
    run: Callable[..., Outcome], trained: Path, keys: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = trained / "planted"
    planted.mkdir(exist_ok=True)
    (planted / "evil.py").write_text("import os\nos.system('touch canary')\ndef f(*x): os.system('touch canary')\n")
    monkeypatch.syspath_prepend(planted)
    plain = yaml.safe_load((trained / "tasks/choice.yaml").read_text())
    text = yaml.safe_dump(plain | keys).replace("'!function evil.f'", "!function evil.f")
    (planted / "x.yaml").write_text(text)
    done = run("--harness", "[planted/x.yaml]")
    assert not list(trained.rglob("canary")) and "evil" not in sys.modules
    (line,) = said(done)
    assert line.startswith("harness: ") and words in line


def said(done: Outcome) -> list[str]:
    """The lines on stderr, without the bars that the harness draws where it was imported before."""
    assert done.code == 2
    start = "angpt_jax: error: "
    return [line.removeprefix(start) for line in done.err.splitlines() if line.startswith(start)]


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--harness [tasks/choice.yaml,./tasks]",
            "harness: two tasks of one name, got 'my_choice'; name each task once",
        ),
        (
            "--harness [tasks/choice.jsonl]",
            "harness: is not YAML (expected '<document start>', but found '{', line 2, ",
        ),
        ("--harness [tasks/choice.yaml] --limit 0", "limit: must be at least 1, got 0"),
        ("--harness [tasks/choice.yaml] --num_fewshot -1", "num_fewshot: must be at least 0, got -1"),
        (
            "--harness [spoilt/gone.yaml]",
            "harness: task gone needs data, from the hub of Hugging Face if it is not a file",
        ),
        (
            "--harness [spoilt/kind.yaml]",
            "harness: task kind can't be used, got ValueError: Got invalid output_type 'poem'",
        ),
    ],
)
def test_bad_tasks_get_one_line(run: Callable[..., Outcome], trained: Path, flags: str, line: str) -> None:
    plain = yaml.safe_load((trained / "tasks/choice.yaml").read_text())
    gone = {"task": "gone", "dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}
    (trained / "spoilt").mkdir(exist_ok=True)
    for name, keys in ("gone", gone), ("kind", {"task": "kind", "output_type": "poem"}):
        (trained / f"spoilt/{name}.yaml").write_text(yaml.safe_dump(plain | keys))
    before = tree(trained / "runs")
    (found,) = said(run(*flags.split(" ")))
    assert found.startswith(line) and tree(trained / "runs") == before


ALONE = """
import socket, sys, time
def refuse(*given, **named): raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
from angpt_jax import evaluate, harness_run
assert not {"lm_eval", "datasets", "torch", "jax"} & set(sys.modules)
for words in (["arc_easyy", "zzzzzzz"], ["arc_easy"], ["tasks/rolling.yaml"]):
    sys.argv = ["evaluate", "--run.dir", "runs/a", "--harness", f"[{', '.join(words)}]"]
    try:
        evaluate.cli.main(evaluate.evaluate, evaluate.EvaluateConfig, command="evaluate", default_config=None)
    except SystemExit as ended:
        print("ended", ended.code)
"""


def test_without_a_network_a_task_of_the_hub_is_one_line(trained: Path) -> None:
    """As is an unknown one, with the names that are near; nothing is left in the cache of the hub, and tasks of files
    need no network."""
    home = trained / "hub_home"
    environment = one_device() | {"HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=trained, env=environment, capture_output=True, text=True, timeout=200
    )
    assert re.findall(r"^ended (\d)$", done.stdout, re.MULTILINE) == ["2", "2", "0"], done.stderr
    near, unknown, hub = done.stderr.splitlines()
    assert near.startswith(
        "angpt_jax: error: harness: no task of that name, got 'arc_easyy'; did you mean arc_easy or "
    )
    assert "got 'zzzzzzz'; " in unknown
    assert hub.startswith(
        "angpt_jax: error: harness: task arc_easy needs data, from the hub of Hugging Face if it is not a file of "
        "yours, and there is no network and no copy in its cache here, got Couldn't reach 'allenai/ai2_arc' on the Hub"
    )
    assert not [path for path in home.rglob("*") if path.is_file() and "ai2_arc" in str(path)]


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"UNSAFE_CODE": True}, "harness: runs code that a model wrote, which this command never does, got 'x'"),
        ({"MULTIMODAL": True}, "harness: needs pictures or sound, and the model reads text, got 'x'"),
        (
            {"_metric_fn_list": {"rouge": None}},
            "harness: its metric rouge is code of the hub, which is not loaded, got 'x'",
        ),
    ],
)
def test_a_task_that_runs_code_of_others_is_refused(facts: dict, words: str) -> None:
    task = SimpleNamespace(config=SimpleNamespace(process_results=None))
    harness_run._check("x", task)
    with pytest.raises(UserError, match=words):
        harness_run._check("x", SimpleNamespace(**vars(task), **facts))


def test_without_the_harness_there_is_one_line(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    harness_run._manager.cache_clear()
    done = run("--harness", "[tasks/choice.yaml]")
    assert said(done) == ["harness: needs lm_eval, which is not installed; pip install -e '.[eval]'"]


def test_the_config_of_common_sense_tasks_names_tasks_that_exist() -> None:
    import lm_eval.tasks

    config = cli.parse(EvaluateConfig, ["--config", "common_sense", "--run.dir", "x"], command="evaluate")
    folder = Path(lm_eval.tasks.__file__).parent
    there = {path.stem for path in folder.glob("*/*.yaml")} | {"winogrande"}
    assert len(config.harness) == 6 and set(config.harness) <= there and config.num_fewshot == 0
