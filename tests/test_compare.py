"""`python -m angpt_jax.compare`: on runs that are finished already, and what it refuses."""

import base64
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TINY, Outcome, make_workspace, run_process, tree
from fake_runs import write_lines
from PIL import Image
from test_report import Page
from test_speedup import T90

from angpt_jax import cli, contenders, trials, tuning
from angpt_jax import compare as command
from angpt_jax.compare import CompareConfig
from angpt_jax.plots import comparison
from angpt_jax.rows import Row
from angpt_jax.trials import Trial

PER_STEP = 8 * 32  # tokens
TABLE = """\
config: [plain.yaml]
values: {run.steps: 20}
seeds: [0, 1]
list:
  - {name: base}
  - {name: fast, optim.peak_lr: 8e-3}
  - {name: slow, optim.peak_lr: 1e-3}
"""
CURVES = {  # of the seeds; evaluated after steps 5, 10, 15 and 20
    "base": [[5, 4, 3.5, 3], [5, 4, 3.5, 3]],
    "fast": [[4.5, 3.5, 3, 2.8], [4, 3, 2.9, 2.8]],  # as good as base after 15 and 10 steps
    "slow": [[5, 4.5, 4.2, 4], [5, 4.5, 4.2, 4]],  # as good in the end as base after 10 steps
}
MILLISECONDS = {"base": 200, "fast": 400, "slow": 100}
Start = Callable[..., Outcome]


def write_table(folder: Path) -> None:
    """duel.yaml, of contenders that have no ν, which takes longest to read."""
    (folder / "duel.yaml").write_text(TABLE)
    plain = TINY.replace("arch: angpt", "arch: gpt_plus").replace(", places: {head: {scale_init: 5.6}}", "")
    (folder / "plain.yaml").write_text(plain)


@pytest.fixture
def pictures() -> None:
    """For tests that want them drawn, which takes seconds."""


@pytest.fixture
def start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Start:
    """Runs the command in a folder with tiny.yaml and duel.yaml. Nothing is trained: that would fail."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(comparison, "draw", lambda *what: [])
    monkeypatch.chdir(make_workspace(tmp_path / "w"))
    monkeypatch.setenv("COLUMNS", "40")  # nothing of a table is cut off
    write_table(Path())

    def no_process(*args: Any, **options: Any) -> Any:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", no_process)

    def run(*argv: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["compare", *argv])
        with pytest.raises(SystemExit) as ended:
            cli.main(command.compare, CompareConfig, "compare", None, words="configs")
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return run


def table_of(*flags: str) -> tuple[CompareConfig, list[Row]]:
    config = cli.parse(CompareConfig, ["--config", "duel.yaml", *flags], command="compare", words="configs")
    return config, command.contenders_of(config)[0]


def begin(trial: Trial) -> None:
    trial.directory.mkdir(parents=True)
    (trial.directory / "config.yaml").write_text(cli.to_yaml(trial.config))


def finish(trial: Trial, records: Iterable[dict[str, Any]], milliseconds: float = 200) -> None:
    """Files as training leaves them."""
    begin(trial)
    write_lines(trial.directory / "metrics.jsonl", list(records))
    steps = trial.config.run.steps
    summary = {"arch": "angpt", "parameters": 12, "steps": steps, "tokens": steps * PER_STEP, "stopped_by": "steps"}
    summary |= {"median_step_seconds": milliseconds / 1000, "val_bits_per_byte": 1.5}
    (trial.directory / "summary.json").write_text(json.dumps(summary))


def diverge(trial: Trial) -> None:
    begin(trial)
    (trial.directory / trials.ENDED).write_text(json.dumps({"state": "diverged", "said": "(exit code 3) too far"}))


def evaluations(trial: Trial, losses: list[float]) -> list[dict[str, Any]]:
    last = trial.config.run.steps
    steps = [last * (place + 1) // len(losses) for place in range(len(losses))]
    return [
        {"step": step, "tokens": step * PER_STEP, "val_loss": loss, "val_bits_per_byte": loss / 2}
        for step, loss in zip(steps, losses, strict=True)
    ]


def planned(
    *flags: str, chosen: dict[str, Any] | None = None, budgets: dict[str, list[int]] | None = None
) -> dict[contenders.Key, Trial]:
    config, table = table_of(*flags)
    named = contenders.reported(table, chosen or {}, config.seeds, 20, budgets or {})
    return contenders.planned(named, Path(config.dir or "runs/compare/duel"))


def finish_all(named: dict[contenders.Key, Trial]) -> None:
    for key, trial in named.items():
        finish(trial, evaluations(trial, CURVES[key.contender][key.seed]), MILLISECONDS[key.contender])


def cells(out: str, first: str) -> list[str]:
    """The cells of the first line of the output that begins with a name."""
    line = next(line.strip() for line in out.splitlines() if line.strip().startswith(first))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_finished_runs_make_the_table_the_json_and_the_page(start: Start):
    finish_all(planned())
    code, out, err = start("--config", "duel.yaml")
    assert (code, err) == (0, "6 of 6 runs are done already\n")
    spread = math.exp(T90[1] * math.log(1.5) / 2)
    mean = math.sqrt(20 / 15 * 20 / 10)
    in_tokens = f"{mean:.3f} ({mean / spread:.3f} to {mean * spread:.3f})"
    in_time = f"{mean / 2:.3f} ({mean / 2 / spread:.3f} to {mean / 2 * spread:.3f})"
    base, fast, slow = (cells(out, name) for name in ("base", "fast", "slow"))
    same = "3.0000 (3.0000 to 3.0000)"
    assert base == ["base (baseline)", same, "1.5000 (1.5000 to 1.5000)", "–", "–", "–", "200.0 ms", "2 of 2"]
    assert fast[3:] == ["-0.2000 (-0.2000 to -0.2000)", in_tokens, in_time, "400.0 ms", "2 of 2"]
    assert slow[4:6] == ["0.500 (0.500 to 0.500)*", "1.000 (1.000 to 1.000)*"]
    assert "never reached (slow, seed 0 and 1)" in out and "90% intervals" in out
    assert out.endswith("runs/compare/duel/compare.json\nruns/compare/duel/report.html\n")
    record = json.loads(Path("runs/compare/duel/compare.json").read_text())
    assert (record["baseline"], record["seeds"]) == ("base", [0, 1])
    found = record["contenders"]["fast"]
    assert found["speedup_tokens"]["seeds"] == pytest.approx({"0": 20 / 15, "1": 2.0})
    assert found["speedup_time"]["mean"] == pytest.approx(mean / 2)
    assert record["contenders"]["slow"]["never_reached_in_seeds"] == [0, 1]
    assert record["contenders"]["base"]["speedup_tokens"]["mean"] is None
    line = found["runs"]["fast/seed1"]["command"]
    assert "--optim.peak_lr 0.008 --run.seed 1 --data.shuffle_seed 1 --run.dir" in line
    page = Page(Path("runs/compare/duel/report.html"))
    assert page.cells[:2] == ["base (baseline)", same]
    assert "Against base" in page.text


def test_all_contenders_of_a_seed_come_before_the_next_seed(start: Start):
    names = [trial.name for trial in planned().values()]
    assert names == [f"{name}/seed{seed}" for seed in (0, 1) for name in ("base", "fast", "slow")]
    for key, trial in planned().items():
        assert trial.config.run.seed == trial.config.data.shuffle_seed == key.seed


def test_one_seed_has_no_interval_and_another_baseline_another_ratio(start: Start):
    named = {key: trial for key, trial in planned().items() if key.seed == 0}
    finish_all(named)
    done = start("--config", "duel.yaml", "--seeds", "[0]", "--baseline", "fast", "--dir", "runs/compare/duel")
    assert done.code == 0
    assert cells(done.out, "base")[3:6] == ["+0.2000", "0.750*", "1.500*"]
    assert cells(done.out, "fast (baseline)")[3] == "–"


def test_what_diverged_stops_nothing_else(start: Start):
    named = planned()
    for key, trial in named.items():
        if key.contender == "slow":
            diverge(trial)
        else:
            finish(trial, evaluations(trial, CURVES[key.contender][key.seed]))
    code, out, _ = start("--config", "duel.yaml")
    assert code == 0
    assert cells(out, "slow ") == ["slow", *["–"] * 6, "0 of 2"]
    assert cells(out, "slow/seed1") == ["slow/seed1", "diverged", "(exit code 3) too far"]
    assert cells(out, "fast")[-1] == "2 of 2"


def test_without_the_baseline_there_is_a_table_and_an_error(start: Start):
    for key, trial in planned().items():
        if key.contender == "base":
            diverge(trial)
        else:
            finish(trial, evaluations(trial, CURVES[key.contender][key.seed]))
    code, out, err = start("--config", "duel.yaml")
    assert code == 3 and cells(out, "fast")[3] == "–"
    assert "error: baseline: no run of it finished, so nothing can be compared with it, got base/seed0 diverged" in err
    assert Path("runs/compare/duel/compare.json").exists()


def test_shorter_schedules_give_a_second_speed_up(start: Start):
    budgets = {name: [10] for name in ("fast", "slow")}
    named = planned(budgets=budgets)
    finish_all({key: trial for key, trial in named.items() if key.steps == 20})
    for key, trial in named.items():
        if key.steps == 10:  # the baseline's 3.0 lies between 3.2 and 2.8 of fast, half way in log steps
            assert trial.config.run.steps == 10 and trial.directory.parent.name == "steps10"
            finish(trial, evaluations(trial, [4.0, 3.2 if key.contender == "fast" else 5.0]))
    code, out, _ = start("--config", "duel.yaml", "--budgets", "[0.5]")
    root = f"{math.sqrt(2):.3f}"
    assert code == 0
    assert cells(out, "fast")[6] == f"{root} ({root} to {root})"
    assert cells(out, "slow")[6] == "–**" and "seeds left out: slow, seed 0 and 1" in out
    assert {key.contender for key in named if key.steps == 10} == {"fast", "slow"}


# Tuning.

RATES = ["--tune", "true", "--tune_over", "{optim.peak_lr: [1e-3, 2e-3, 4e-3]}"]


def tune(scores: dict[str, list[float]], validation: dict[str, list[float]] | None = None) -> None:
    """Finished tuning runs of these training losses; infinite: diverged."""
    config, table = table_of(*RATES)
    over = tuning.lists(config.tune_over)
    configs = contenders.checked(table, "base")
    planned = trials.plan(contenders.tuned(table, over, configs, config.tune_steps), Path("runs/compare/duel"))
    losses = [loss for row in table for loss in scores[row.name]]
    others = [loss for row in table for loss in (validation or scores)[row.name]]
    for trial, loss, other in zip(planned, losses, others, strict=True):
        if math.isinf(loss):
            diverge(trial)
            continue
        records = [
            {"step": step, "tokens": step * PER_STEP, "loss": 9.0 if step < 19 else loss} for step in range(1, 21)
        ]
        finish(trial, [*records, {"step": 20, "tokens": 20 * PER_STEP, "val_loss": other}])


def test_each_is_tuned_on_training_loss_alone_and_the_edge_is_named(start: Start, pictures: None):
    scores = {"base": [3.3, 3.1, math.inf], "fast": [3.2, 3.1, 3.0], "slow": [3.1, 3.11, 3.5]}
    tune(scores, validation={name: [1.0, 9.0, 1.0] if name == "base" else [1.0, 1.0, 9.0] for name in scores})
    chosen = {"base": 2e-3, "fast": 4e-3, "slow": 1e-3}
    finish_all(planned(chosen={name: {"optim.peak_lr": rate} for name, rate in chosen.items()}))
    code, out, err = start("--config", "duel.yaml", *RATES)
    assert (code, err) == (0, "9 of 9 runs are done already\n6 of 6 runs are done already\n")
    tuned = [line.split() for line in out.partition("tuning ")[2].splitlines()]
    rows = {line[0]: line[1:] for line in tuned if line and line[0] in scores}
    assert rows["base"][:4] == ["3.3000", "3.1000", "diverged", "peak_lr=0.002"]
    assert rows["fast"][:5] == ["3.2000", "3.1000", "3.0000", "peak_lr=0.004", "(edge)"]
    assert rows["slow"][5:7] == ["≤", "0.001"]
    assert "Warning: the best optim.peak_lr of fast is at the edge of the list, 0.004" in out
    assert "optim.peak_lr of base" not in out
    found = json.loads(Path("runs/compare/duel/compare.json").read_text())["contenders"]["base"]
    assert found["tuning"]["chosen"] == {"optim.peak_lr": 0.002}
    assert [score["score"] for score in found["tuning"]["scores"]] == [3.3, 3.1, None]
    assert found["tuning"]["tolerance"]["ends"] == [True, True]
    assert list(found["runs"]) == ["base/peak_lr=0.002/seed0", "base/peak_lr=0.002/seed1"]
    assert "--optim.peak_lr 0.002" in found["runs"]["base/peak_lr=0.002/seed0"]["command"]
    files = [Path(f"runs/compare/duel/{name}.png") for name in ("losses", "speedups", "tuning")]
    images = Page(Path("runs/compare/duel/report.html")).images
    for image, file in zip(images, files, strict=True):
        assert image["src"] == "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
        pixels = np.asarray(Image.open(file).convert("L"))
        assert 0.01 < np.mean(pixels < 250) < 0.5
        edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert edge.min() == 255, f"{file.name}: something is cut off"


@pytest.mark.parametrize("lost", [5.0, 94062.0])
def test_a_lost_start_leaves_the_other_scores_their_height(lost: float):
    over = {"optim.peak_lr": [1e-3, 2e-3, 4e-3]}
    tunings = {
        name: (place, tuning.choose(over, scores))
        for place, (name, scores) in enumerate({"a": [4.5, 4.4, 4.4], "b": [4.3, 4.0, lost]}.items())
    }
    bottom, top = comparison.scores(tunings).axes[0].get_ylim()
    assert 3.8 < bottom < 4.0 and 4.5 < top < 5.6


def test_tuning_has_a_seed_of_its_own_and_one_budget_for_all(start: Start):
    config, table = table_of(*RATES, "--tune_steps", "10")
    rows = contenders.tuned(table, tuning.lists(config.tune_over), contenders.checked(table, "base"), config.tune_steps)
    assert [row.name for row in rows[:3]] == [f"base/tune/peak_lr=0.00{rate}" for rate in (1, 2, 4)]
    for row in rows:
        run, data = row.config().run, row.config().data
        assert run.seed == data.shuffle_seed == tuning.SEED and run.seed not in config.seeds
        assert (run.steps, run.eval_every_steps, run.log_every_steps) == (10, 10, 1)
    for one, other in zip(rows[:3], rows[3:6], strict=True):
        assert one.config().optim.peak_lr == other.config().optim.peak_lr


def test_a_baseline_that_never_trains_ends_it(start: Start):
    tune({"base": [math.inf] * 3, "fast": [3.2, 3.1, 3.0], "slow": [3.2, 3.1, 3.2]})
    code, out, err = start("--config", "duel.yaml", *RATES)
    assert (code, out) == (3, "")
    assert "error: tune_over: no run of the baseline base finished, got base/tune/peak_lr=0.001 diverged, " in err
    assert not Path("runs/compare/duel/compare.json").exists()


def test_a_contender_that_never_trains_is_said_to(start: Start):
    tune({"base": [3.2, 3.1, 3.2], "fast": [math.inf] * 3, "slow": [3.2, 3.1, 3.2]})
    chosen = {name: {"optim.peak_lr": 2e-3} for name in ("base", "slow")}
    finish_all({key: trial for key, trial in planned(chosen=chosen).items() if key.contender != "fast"})
    code, out, _ = start("--config", "duel.yaml", *RATES)
    assert code == 0
    assert cells(out, "fast ") == ["fast", *["–"] * 6, "0 of 2"]
    assert "fast/tune/peak_lr=0.002" in out


@pytest.mark.parametrize("flags", [[], RATES], ids=["training", "tuning"])
def test_a_signal_ends_it_with_75(flags: list[str], start: Start, monkeypatch: pytest.MonkeyPatch):
    def run_all(asked: list[Trial], **options: Any) -> dict[str, Any]:
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(trials, "run_all", run_all)
    code, out, err = start("--config", "duel.yaml", *flags)
    assert (code, out, err) == (75, "", "stopped by SIGTERM; run the same command again to go on\n")
    assert not Path("runs").exists()


def test_without_matplotlib_there_are_the_numbers(start: Start, monkeypatch: pytest.MonkeyPatch):
    finish_all(planned())
    import angpt_jax.plots

    for name in [name for name in sys.modules if name.startswith(("matplotlib", "angpt_jax.plots."))]:
        if name != "angpt_jax.plots.history" and name != "angpt_jax.plots.page":
            monkeypatch.delitem(sys.modules, name)
    for name in ("comparison", "look", "curves", "pictures"):
        monkeypatch.delattr(angpt_jax.plots, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = start("--config", "duel.yaml")
    assert (code, out.endswith("runs/compare/duel/compare.json\n")) == (0, True)
    assert "warning: compare: no plots, they need Matplotlib; pip install -e '.[plots]'\n" in err
    assert not Path("runs/compare/duel/report.html").exists()


# What is refused.

ONE = "list: needs two contenders or more, got ['tiny']; name them in list, or as words"
DIR = "dir: must be a folder, without '..', got "
BAD: list[tuple[list[str], list[str]]] = [
    ([], ["list: needs two contenders or more, got []; name them in list, or as words"]),
    (["tiny.yaml"], [ONE]),
    (["tiny.yaml", "./tiny.yaml"], ["configs[2]: has the name of another row, got 'tiny'; names differ", ONE]),
    (
        ["tiny.yaml", "--config", "duel.yaml"],
        [
            "configs: can't be given together with config, got ['tiny.yaml']",
            "configs: can't be given together with list, got ['tiny.yaml']",
            ONE,
        ],
    ),
    (["--baseline", "bsae"], ["baseline: no contender of that name, got 'bsae'; one of base, fast, slow"]),
    (["--seeds", "[]"], ["seeds: must be one or more, all different, got []"]),
    (["--seeds", "[1, 2, 1]"], ["seeds: must be one or more, all different, got [1, 2, 1]"]),
    (
        ["--seeds", "[-1, 2147483647]"],
        [f"seeds: must be >= 0 and < 2147483647, the seed of tuning, got {seed}" for seed in (-1, 2147483647)],
    ),
    (
        ["--budgets", "[0, 0.5, 1.0, .nan]"],
        [f"budgets: must be > 0 and < 1, got {share}" for share in ("0.0", "1.0", "nan")],
    ),
    (["--budgets", "[0.5, 0.51]"], ["budgets: must be different numbers of steps below 20, got [10, 10]"]),
    (["--budgets", "[0.01]"], ["budgets: must be different numbers of steps below 20, got [0]"]),
    (
        ["--budgets", "[0.5]", "--values", "{run.stop_at_step: 15}"],
        ["budgets: need schedules that end, got run.stop_at_step 15; leave one out"],
    ),
    (
        ["--budgets", "[0.5]", "--values", "{optim.warmup_steps: 12}"],
        [
            f"{name}/steps10: optim.warmup_steps: the warm-up must be shorter than run.steps, got 12 steps with "
            "run.steps 10; at most 9 steps"
            for name in ("fast", "slow")
        ],
    ),
    (
        ["--confidence", "1", "--at_a_time", "0", "--tune_steps", "0"],
        [
            "confidence: must be > 0 and < 1, got 1.0",
            "at_a_time: must be >= 1, got 0",
            "tune_steps: must be >= 1, got 0",
        ],
    ),
    (
        ["--tune_over", "{optim.peak_lr: 1e-3, optim.beta2: [], run.steps: [1], optim.beta1: [0.9, 0.9]}"],
        [
            "tune_over.optim.peak_lr: must be a list of values to try, got 0.001",
            "tune_over.optim.beta2: must be a list of values to try, got []",
            "tune_over.run.steps: must be a key of optim. or model.places., got [1]",
            "tune_over.optim.beta1: two values have the same name, got [0.9, 0.9]; each once",
        ],
    ),
    (["--dir", "tiny.yaml"], [f"{DIR}'tiny.yaml'"]),
    (["--dir", "../x"], [f"{DIR}'../x'"]),
    (["--dir", "s3://x"], ["dir: must be a path of a file system, got 's3://x'; mount the bucket"]),
    (["--values", "{run.seed: 3}"], [f"{n}: run.seed: is decided by seeds, got 3" for n in ("base", "fast", "slow")]),
    (["--values", "{run.steps: 0}"], [f"{n}: run.steps: must be >= 1, got 0" for n in ("base", "fast", "slow")]),
    (
        ["--tune", "true", "--tune_over", "{optim.peak_lr: [-1]}"],
        ["every row: optim.peak_lr: must be a finite number > 0, got -1.0"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "lines"), BAD, ids=lambda x: " ".join(x)[:40])
def test_bad_input_is_named_and_nothing_is_written(start: Start, argv: list[str], lines: list[str]):
    before = tree(Path())
    words = argv if not argv or argv[0].startswith("tiny") else ["--config", "duel.yaml", *argv]
    code, out, err = start(*words)
    assert (code, out) == (2, "")
    for found, line in zip(err.splitlines(), lines, strict=True):
        assert found.startswith(f"angpt_jax: error: {line}")
    assert tree(Path()) == before and not Path("runs").exists()


def test_contenders_that_would_see_other_batches_are_refused(start: Start):
    Path("duel.yaml").write_text(
        TABLE + "  - {name: other, data.batch_size: 4, run.steps: 30, model.context: 16, run.eval_every_steps: 7}\n"
        "  - {name: shuffled, data.packing: best_fit, model.vocab: 301}\n"
    )
    code, out, err = start("--config", "duel.yaml")
    assert (code, out) == (2, "")
    rule = "must be that of base, or the batches differ, got"
    assert [line.removeprefix("angpt_jax: error: ") for line in err.splitlines()] == [
        f"other: model.context: {rule} 16; it is 32 there",
        f"other: data.batch_size: {rule} 4; it is 8 there",
        f"other: run.steps: {rule} 30; it is 20 there",
        f"other: run.eval_every_steps: {rule} 7; it is 5 there",
        f"shuffled: model.vocab: {rule} 301; it is 300 there",
        f"shuffled: data.packing: {rule} 'best_fit'; it is 'concatenate' there",
    ]
    assert not Path("runs").exists()


def test_a_folder_with_another_run_in_it_is_refused(start: Start):
    for trial in planned("--values", "{optim.beta2: 0.99}").values():
        begin(trial)
    code, _, err = start("--config", "duel.yaml")
    assert code == 2 and err.count("optim.beta2: differs from the run in") == 6


def test_words_are_contenders(start: Start):
    Path("two.yaml").write_text(Path("tiny.yaml").read_text())
    config = cli.parse(CompareConfig, ["tiny.yaml", "two.yaml"], command="compare", words="configs")
    assert command.contenders_of(config) == ([Row("tiny", ("tiny.yaml",)), Row("two", ("two.yaml",))], [])


def test_an_ablation_table_is_a_comparison():
    path = Path(__file__).parent.parent / "configs" / "ablations" / "nu.yaml"
    config = cli.parse(CompareConfig, ["--config", str(path), "--baseline", "angpt"], command="compare")
    table, problems = command.contenders_of(config)
    assert [*problems, *command.check(config, table)] == [] and len(table) == 35
    assert len(contenders.checked(table[:4], "angpt")) == 4


def test_the_help_says_that_config_is_a_key_of_a_file_too():
    text = cli.help_text(CompareConfig, "compare", words="configs")
    assert "config, in a file:" in text and "configs that a contender of list starts from" in text
    assert text.startswith("usage: python -m angpt_jax.compare CONFIG... [--config FILE]...")


@pytest.mark.long
def test_two_contenders_are_trained_and_not_trained_again(tmp_path: Path):
    folder = make_workspace(tmp_path / "w")
    write_table(folder)
    flags = ["--config", "duel.yaml", "--seeds", "[0]", "--values", "{run.steps: 10}"]
    first, again = (run_process(folder, "compare", *flags) for _ in range(2))
    assert (first.code, again.code) == (0, 0), first.err
    assert first.out == again.out and again.err == "3 of 3 runs are done already\n"
