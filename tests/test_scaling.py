"""`python -m angpt_jax.scaling`: what it prints and writes for runs, and what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Outcome, tree
from scaling_runs import BEST_LR, LAW, WIDTHS, make_grid, make_run, parameters, penalty

from angpt_jax import cli, scaling
from angpt_jax.scaling import ScalingConfig

Start = Callable[..., Outcome]
FEW = ("--resamples", "4")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Start:
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["scaling", *argv])
        with pytest.raises(SystemExit) as ended:
            cli.main(scaling.scaling, ScalingConfig, "scaling", None, words="runs")
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return run


def make_rates(folder: Path, arch: str) -> None:
    """Five learning rates at three sizes, with the best one in the middle."""
    for width in WIDTHS[::2]:
        n = parameters(width)
        for k in (-2, -1, 0, 1, 2):
            lr = 1e-3 * (n / 1e6) ** BEST_LR * 2.0**k
            loss = float(LAW(n, 20 * n)) + penalty(n, 8192 * (n / 1e6) ** 0.25, lr)
            make_run(folder / f"{arch}_{width}_{k}", arch, width, 20 * n, loss, "--optim.peak_lr", repr(lr))


def test_each_architecture_gets_what_its_runs_are_enough_for(start: Start):
    make_grid(Path("runs/deep/angpt"), noise=0)
    make_rates(Path("runs/gpt_plus"), "gpt_plus")
    code, out, err = start("runs", *FEW)
    assert (code, err) == (0, "") and out.splitlines()[-1] == "scaling/scaling.html"
    record = json.loads(Path("scaling/scaling.json").read_text())
    angpt, gpt_plus = (record["architectures"][arch] for arch in ("angpt", "gpt_plus"))
    assert set(angpt["fits"]) == {"law"} and set(gpt_plus["fits"]) == {"lr"}
    law, lr = angpt["fits"]["law"], gpt_plus["fits"]["lr"]
    assert law["estimates"]["alpha"]["value"] == pytest.approx(LAW.alpha, abs=2e-3)
    assert lr["estimates"]["exponent"]["value"] == pytest.approx(BEST_LR, abs=1e-3)
    assert law["resamples"] == 4 and len(law["estimates"]["beta"]["interval"]) == 2
    assert law["held_out"]["error"] < 1e-3 and law["runs"] == len(angpt["runs"]) == 18
    assert "…" in out and f"{law['estimates']['alpha']['value']:.4g}" in out
    assert "angpt: lr: needs minima over peak learning rates, all else equal, at 3 parameter counts at least" in out
    assert "gpt_plus: law: needs tokens that are not tied to parameters" in out
    names = ["fitted_against_measured.png", "loss_against_tokens.png", "lr.png", "scaling.html", "scaling.json"]
    assert sorted(tree(Path("scaling"))) == names
    page = Path("scaling/scaling.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "lr_opt = factor · N^exponent" in page


def test_flops_and_counts_are_those_of_the_model():
    from angpt_jax import finished

    summary = {"parameters": 1000, "tokens": 7.0, "val_loss": 3.0, "steps": 5, "stopped_by": "steps"}
    model = {"width": 4, "layers": 3, "context": 10, "vocab": 50}
    config = {"model": model, "optim": {"peak_lr": 1e-3}, "data": {"batch_size": 2}, "run": {"steps": 5}}
    point = finished.point("run", config, summary, "total")
    assert (point.parameters, point.flops, point.batch_tokens) == (1000, 7 * (6 * 800 + 12 * 3 * 4 * 10), 20)
    assert finished.point("run", config, summary, "non_embedding").parameters == 600
    config["model"] = model | {"tied_embeddings": True}
    point = finished.point("run", config, summary, "non_embedding")
    assert (point.parameters, point.flops) == (800, 7 * (6 * 1000 + 12 * 3 * 4 * 10))


def test_runs_that_are_no_points_are_listed_with_the_reason(start: Start):
    make_grid(Path("runs"), noise=0)
    make_run(Path("runs/x1"), "angpt", 64, 1e6, 3.0, stopped_by="SIGTERM", steps=3)
    make_run(Path("runs/x2"), "angpt", 64, 1e6, 3.0, val_loss=None)
    make_run(Path("runs/x3"), "angpt", 64, 1e6, 3.0, "--run.init_from", "runs/x1")
    make_run(Path("runs/x4"), "angpt", 64, 1e6, 3.0)
    Path("runs/x4/summary.json").unlink()
    make_run(Path("runs/x5"), "angpt", 64, 1e6, 3.0)
    Path("runs/x5/summary.json").write_text("{")
    code, out, _ = start("runs", *FEW)
    assert code == 0
    lines = [line.removeprefix("left out: runs/") for line in out.splitlines() if line.startswith("left out")]
    assert lines[:4] == [
        "x1: is not finished (ended by SIGTERM at step 3 of 244)",
        "x2: has no val_loss that is a number above 0",
        "x3: starts from the weights of another run (run.init_from), which saw tokens before",
        "x4: is not finished (no summary.json)",
    ]
    assert lines[4].startswith("x5: is not JSON (") and len(lines) == 5
    assert [one["run"] for one in json.loads(Path("scaling/scaling.json").read_text())["left_out"]] == [
        f"runs/x{number}" for number in range(1, 6)
    ]


def test_runs_of_one_size_are_refused_and_nothing_is_written(start: Start):
    make_grid(Path("runs"), widths=(64,))
    before = tree(Path())
    code, out, err = start("runs")
    assert (code, out, tree(Path())) == (2, "", before)
    n = parameters(64)
    assert [line.removeprefix("angpt_jax: error: angpt: ") for line in err.splitlines()] == [
        f"law: needs runs of at least 3 parameter counts, got 1 ({n:,})",
        "law: needs at least 7 pairs (parameters, tokens) for its 5 unknowns, got 3",
        "isoflop: needs minima over parameter counts of equal FLOPs at 3 budgets at least, got 0, as no runs differ in "
        "that alone",
        "batch: needs minima over batch sizes, all else equal, at 3 parameter counts at least, got 0, as no runs "
        "differ in that alone",
        "lr: needs minima over peak learning rates, all else equal, at 3 parameter counts at least, got 0, as no runs "
        "differ in that alone",
    ]


def test_a_later_call_replaces_an_earlier_one(start: Start):
    make_grid(Path("runs"), noise=0)
    Path("scaling").mkdir()
    for name in ("scaling.html", "lr.png", "notes.txt"):
        Path("scaling", name).write_text("old")
    assert start("runs", *FEW).code == 0
    assert [name for name, content in tree(Path("scaling")).items() if content == b"old"] == ["notes.txt"]
    assert not Path("scaling/lr.png").exists()


def make_bad() -> None:
    make_run(Path("good/a"), "angpt", 64, 1e6, 3.0)
    make_run(Path("good/b"), "angpt", 64, 1e6, 3.0, "--data.source", "other")
    make_run(Path("open/a"), "angpt", 64, 1e6, 3.0, stopped_by="stop_at_step")
    Path("empty").mkdir()
    Path("file").write_text("x")


MEANING = "expected a list of str (run directories, and folders that hold run directories at any depth)"
BAD: list[tuple[list[str], list[str]]] = [
    ([], [f"runs: is required; {MEANING}"]),
    (["--runs", "[]"], ["runs: needs at least one run directory or a folder of them, got none"]),
    (["none"], ["runs: no such folder, got 'none'"]),
    (["file"], ["runs: is no folder, got 'file'"]),
    (["empty"], ["runs: holds no run (no config.yaml in it or below), got 'empty'"]),
    (
        ["open"],
        [
            "runs: holds no finished run, got none",
            "runs: open/a: is not finished (ended by stop_at_step at step 244 of",
        ],
    ),
    (
        ["good"],
        [
            'runs: losses of angpt can\'t be compared: data.source differs, got "stdlib" in \'good/a\' and "other" in '
            "'good/b'; name equal runs"
        ],
    ),
    (["good", "--out", "file"], ["out: is a file, got 'file'; name a folder"]),
    (
        ["good", "--out", "good"],
        ["out: is a folder with other things (no scaling.html), got 'good'; name a new or empty one"],
    ),
    (
        ["none", "--confidence", "1", "--held_out_fraction", "0", "--resamples", "1", "--seed", "-1"],
        [
            "runs: no such folder, got 'none'",
            "confidence: must be above 0 and below 1, got 1.0",
            "held_out_fraction: must be above 0 and below 1, got 0.0",
            "resamples: must be at least 2, got 1",
            "seed: must be at least 0, got -1",
        ],
    ),
    (["good", "--parameters", "all"], ["parameters: expected total or non_embedding, got 'all'"]),
]


@pytest.mark.parametrize(("argv", "lines"), BAD, ids=lambda x: " ".join(x)[:30])
def test_bad_input_is_named_and_nothing_is_written(start: Start, argv: list[str], lines: list[str]):
    make_bad()
    before = tree(Path())
    code, out, err = start(*argv)
    assert (code, out) == (2, "")
    for found, line in zip(err.splitlines(), lines, strict=True):
        assert found.startswith(f"angpt_jax: error: {line}")
    assert tree(Path()) == before


def test_a_folder_that_cant_be_made_is_an_error_of_the_storage(start: Start):
    make_grid(Path("runs"), noise=0)
    Path("file").write_text("x")
    code, out, err = start("runs", "--out", "file/x", *FEW)
    assert (code, out) == (4, "")
    assert err == "angpt_jax: error: out: can't be written, got 'file/x'; Not a directory\n"


def test_two_designs_of_one_recipe_are_told_apart(start: Start):
    make_grid(Path("runs/a"), noise=0)
    for path in [*Path("runs/a").iterdir()]:
        other = Path("runs/b") / path.name
        other.mkdir(parents=True)
        for name in ("summary.json", "config.yaml"):
            text = (path / name).read_text().replace("places: {}", "places: {head: {scale_init: 2.0}}")
            (other / name).write_text(text)
    assert start("runs", *FEW).code == 0
    found = json.loads(Path("scaling/scaling.json").read_text())["architectures"]
    assert set(found) == {"angpt {}", 'angpt {"head": {"scale_init": 2.0}}'}
