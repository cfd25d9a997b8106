"""`python -m angpt_jax.bench`: processes that take turns, what comes of their rounds, and what it refuses."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, make_workspace, one_device, run_here, run_process

from angpt_jax import bench, cli, host_memory, rows
from angpt_jax.bench import BenchConfig
from angpt_jax.errors import PeerError, UserError
from angpt_jax.timing import results, rounds
from angpt_jax.timing.load import busy_seconds
from angpt_jax.timing.rounds import Plan, Rounds
from angpt_jax.timing.side import Request, Side

SHORT = ("--processes", "1", "--rounds", "2", "--round_seconds", "0.001", "--decode_tokens", "8", "--most_load", "99")
TWO = """\
list:
  - {name: ours, config: [tiny.yaml]}
  - {name: theirs, config: [tiny.yaml], model.arch: gpt_plus, model.places.head.scale_init: null}
"""
FACTS = {
    "platform": "cpu",
    "device_kind": "cpu",
    "devices": 1,
    "jax": "1.2.3",
    "arch": "angpt",
    "parameters": 10,
    "tokens_per_step": 100,
    "flops_per_step": 6e9,
    "gemm_flops": 4e9,
    "peak_flops": None,
    "decoded_tokens": 50,
    "compile_seconds": 3.0,
    "peak_bytes": 2**21,
    "temporary_bytes": 2**20,
    "bytes_accessed": None,
    "flops_counted": None,
    "resident_bytes": 7,
    "measures": [],
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("bench") / "w")
    (folder / "two.yaml").write_text(TWO)
    return folder


@pytest.fixture(scope="module")
def done(workspace: Path) -> Outcome:
    return run_process(workspace, "bench", "--config", "two.yaml", *SHORT, "--json", "bench.json")


def test_two_sides_are_measured(done: Outcome, workspace: Path):
    assert done.code == 0, done.err
    found = json.loads((workspace / "bench.json").read_text())
    assert set(found) == {"machine", "results", "ratios"} and set(found["results"]) == {"ours", "theirs"}
    assert set(found["ratios"]) == {"ours/theirs"} and found["machine"]["peak_is_measured"]
    for arch, one in zip(("angpt", "gpt_plus"), found["results"].values(), strict=True):
        assert one["arch"] == arch and one["parameters"] > 10_000
        assert one["tokens_per_second"] == pytest.approx(8 * 32 / one["step_seconds"])
        assert 0 < one["mfu"] < 1 and 0 <= one["data_wait_share"] < 1 and one["data_tokens_per_second"] > 1000
        assert one["peak_bytes"] > one["temporary_bytes"] > 10_000 and one["compile_seconds"] > 0
        assert one["resident_bytes"] > 100 * 2**20 and one["forward_seconds"] < one["step_seconds"]
        assert set(one["decode_tokens_per_second"]) == {"1", "8"}
        assert 0 < one["update_seconds"] < one["step_seconds"]
        assert one["bytes_accessed"] is None  # the layers of tiny.yaml are scanned: XLA counts one
    ours, theirs = (found["results"][name] for name in ("ours", "theirs"))
    ratios = found["ratios"]["ours/theirs"]
    assert ratios["step_seconds"] == pytest.approx(ours["step_seconds"] / theirs["step_seconds"])
    rates = (one["decode_tokens_per_second"]["8"] for one in (ours, theirs))
    assert ratios["decode_tokens_per_second"]["8"] == pytest.approx(next(rates) / next(rates))
    assert ratios["temporary_bytes"] == ours["temporary_bytes"] / theirs["temporary_bytes"]


def test_the_table_says_it_too(done: Outcome):
    head, _, *lines = (line.split() for line in done.out.strip().splitlines())
    assert head[:4] == ["side", "step", "/", "theirs"] and [line[0] for line in lines[:2]] == ["ours", "theirs"]
    assert "MFU is of the" in done.out and "Other programs took" in done.out
    assert done.err.splitlines()[0] in ("process 1 of 1: ours, theirs", "process 1 of 1: theirs, ours")


def test_it_writes_no_run(done: Outcome, workspace: Path):
    assert not (workspace / "runs").exists() and done.code == 0


def process(**seconds: list[float]) -> Rounds:
    """Rounds with these seconds."""
    kept: dict[str, list[Any]] = {
        name: [{"seconds": each, "waited": 0.1 * each, "faults": 5.0, "elapsed": each} for each in every]
        for name, every in ({"gemm": [0.1]} | seconds).items()
    }
    return Rounds(FACTS, kept, loads=[0.1, 0.3], repeated=1)


def processes(train: list[list[float]], decode_8: list[float]) -> list[Rounds]:
    return [process(train=steps, decode_8=[decoded]) for steps, decoded in zip(train, decode_8, strict=True)]


SIDES = {
    "a": processes(train=[[4, 3, 9], [2, 5], [1]], decode_8=[2, 4, 1]),
    "b": processes(train=[[4], [8], [5, 6]], decode_8=[2, 2, 2]),
}


def test_a_number_is_the_median_over_processes_of_the_least_round():
    found = results.report(SIDES, "b", {})
    a, machine = found["results"]["a"], found["machine"]
    assert a["step_seconds"] == 2 and a["tokens_per_second"] == 50 and a["data_wait_share"] == pytest.approx(0.1)
    assert a["decode_tokens_per_second"] == {"8": 8 * 50 / 2} and a["page_faults_per_step"] == 5
    assert machine["gemm_flops_per_second"] == 4e10 and a["mfu"] == 6e9 / 2 / 4e10
    assert machine["repeated_rounds"] == 6 and machine["load_of_others"] == pytest.approx(0.2)


def test_a_ratio_is_that_of_processes_that_took_turns():
    ratios = results.report(SIDES, "b", {})["ratios"]["a/b"]
    assert ratios["step_seconds"] == 0.25 and ratios["step_seconds_range"] == [0.2, 0.75]
    assert ratios["decode_tokens_per_second"] == {"8": 1.0} and ratios["temporary_bytes"] == 1


def test_the_data_sheet_of_a_device_says_what_is_possible():
    (side,) = results.report({"a": [process(train=[1.0])]}, "a", {})["results"].values()
    assert side["mfu"] == 6e9 / 4e10
    known = process(train=[1.0])
    known.facts = FACTS | {"peak_flops": 6e10}
    (side,) = results.report({"a": [known]}, "a", {})["results"].values()
    assert side["mfu"] == 0.1


def test_the_share_of_the_constraint_is_what_it_adds_to_the_optimizer():
    one = process(train=[2.0], update=[0.5, 0.3], update_free=[0.28, 0.4])
    (side,) = results.report({"a": [one]}, "a", {})["results"].values()
    assert side["constraint_share"] == pytest.approx(0.01)


class FakeSide:
    """Notes who was asked what; other programs take `loads` cores, round by round."""

    asked: list[tuple[str, str]]
    loads: Iterator[float]
    alive: int
    busy: float

    def __init__(self, name: str, request: Any) -> None:
        self.name, self.names, self.facts = name, ["gemm", "train"], FACTS
        FakeSide.alive += 1

    def __enter__(self) -> "FakeSide":
        return self

    def __exit__(self, *_: Any) -> None:
        FakeSide.alive -= 1

    def round(self, measure: str) -> Mapping[str, float]:
        FakeSide.asked.append((self.name, measure))
        FakeSide.busy += 2.0 + next(FakeSide.loads, 0.0)
        return {"seconds": 1.0 + len(FakeSide.asked), "elapsed": 1.0, "core_seconds": 2.0, "alive": FakeSide.alive}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSide]:
    FakeSide.asked, FakeSide.loads, FakeSide.alive, FakeSide.busy = [], iter([]), 0, 0.0
    monkeypatch.setattr(rounds, "Side", FakeSide)
    monkeypatch.setattr(rounds, "_others", lambda: FakeSide.busy)
    monkeypatch.setattr(host_memory, "computes_on_cpu", lambda: True)
    return FakeSide


REQUESTS: Any = {"a": None, "b": None, "c": None}


def test_sides_take_turns_in_random_order(fake: type[FakeSide]):
    found = rounds.measure(REQUESTS, Plan(2, 20, 0.2, 0), lambda text: None)
    assert {len(one.kept["train"]) for processes in found.values() for one in processes} == {20}
    turns = [tuple(name for name, _ in fake.asked[begin : begin + 3]) for begin in range(0, len(fake.asked), 3)]
    assert {tuple(sorted(turn)) for turn in turns} == {("a", "b", "c")} and len(set(turns)) == 6
    assert {name for name, _ in FakeSide.asked[::6]} == set("abc")
    assert found["a"][0].kept["train"][0]["alive"] == 3 and fake.alive == 0


def test_an_accelerator_has_one_process_at_a_time(fake: type[FakeSide], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "computes_on_cpu", lambda: False)
    found = rounds.measure(REQUESTS, Plan(2, 3, 0.2, 0), lambda text: None)
    assert {one["alive"] for processes in found.values() for of in processes for one in of.kept["train"]} == {1}


def test_a_disturbed_round_is_measured_again(fake: type[FakeSide]):
    fake.loads = iter([0.0, 0.5, 0.3, 0.1])
    (one,) = rounds.measure({"a": REQUESTS["a"]}, Plan(1, 2, 0.2, 0), lambda text: None)["a"]
    assert [len(one.kept[name]) for name in ("gemm", "train")] == [2, 2] and one.repeated == 2
    assert one.loads == pytest.approx([0.0, 0.1, 0.0, 0.0]) and one.kept["train"][0]["seconds"] == 5


def test_a_machine_that_is_never_quiet_is_measured_all_the_same(fake: type[FakeSide]):
    fake.loads = iter([1.0] * 100)
    (one,) = rounds.measure({"a": REQUESTS["a"]}, Plan(1, 2, 0.2, 0), lambda text: None)["a"]
    assert len(one.kept["train"]) == 2 and one.repeated == 4 and min(one.loads) == pytest.approx(1.0)


def test_work_of_this_process_is_work_of_the_machine():
    before, began = busy_seconds(), time.process_time()
    if before is None:
        pytest.skip("no /proc/stat here")
    while time.process_time() < began + 0.3:
        pass
    assert (busy_seconds() or 0) - before > 0.25


def request(*words: str) -> Request:
    return Request(["--config", "tiny.yaml", *words], [], [], 1, 0.001)


def test_what_a_process_finds_wrong_is_said_of_its_side(workspace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workspace)
    for name, value in one_device().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^mine: data.source: .*nowhere"):
        with Side("mine", request("--data.source", "nowhere")) as side:
            print(side.facts)


def test_a_process_that_is_killed_ends_the_benchmark(workspace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workspace)
    with pytest.raises(PeerError, match="^mine: its process ended while it measured, got exit code -9; see above$"):
        with Side("mine", request()) as side:
            side._process.kill()
            print(side.facts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(workspace: Path, number: signal.Signals):
    words = [sys.executable, "-m", "angpt_jax.bench", "--config", "two.yaml", *SHORT, "--json", "never.json"]
    command = subprocess.Popen(words, cwd=workspace, env=one_device(), stderr=subprocess.PIPE, text=True)
    assert command.stderr is not None and command.stderr.readline().startswith("process 1 of 1")
    children: list[str] = []
    while not children:
        time.sleep(0.02)
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    command.send_signal(number)
    assert command.wait(30) == 75
    assert command.stderr.read() == f"stopped by {number.name}; nothing was written\n"
    command.stderr.close()
    assert not any(Path(f"/proc/{child}").exists() for child in children) and not (workspace / "never.json").exists()


BAD = {
    ("--baseline", "other"): "baseline: no side of that name, got 'other'; one of ours, theirs",
    ("--processes", "0"): "processes: must be >= 1, got 0",
    ("--rounds", "0"): "rounds: must be >= 1, got 0",
    ("--round_seconds", "0"): "round_seconds: must be > 0, got 0.0",
    ("--most_load", "nan"): "most_load: must be > 0, got nan",
    ("--decode_batches", "[1, 0]"): "decode_batches: must be >= 1, got 0",
    ("--decode_batches", "[8, 8]"): "decode_batches: must be different, got [8, 8]",
    ("--decode_tokens", "16"): "decode_tokens: must be at most 15 in a context of 32, got 16",
    ("--measures", "[]"): "measures: must be one or more, all different, got []",
    ("--measures", "[speed]"): "measures: expected a list of train, forward, decode, data or constraint, got ['speed']",
    ("--json", "nowhere/x.json"): "json: its folder is not there, got 'nowhere/x.json'; make it first",
    ("--list", "[]"): "list: needs a side or more, got []; name them in list, or as words",
    ("--values", "{model.width: 33}"): "ours: model.width",
}


@pytest.mark.parametrize("flags", BAD, ids=" ".join)
def test_bad_values_are_one_line_and_nothing_starts(flags, workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it began"))
    short = () if "--decode_tokens" in flags else ("--decode_tokens", "8")
    words = ("--config", "two.yaml", *short, *flags)
    code, out, err = run_here(bench.bench, BenchConfig, "bench", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and out == "" and err.startswith(f"angpt_jax: error: {BAD[flags]}")
    assert err.count("\n") == (2 if flags[0] == "--values" else 1)


def test_words_are_sides_in_place_of_the_default(workspace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workspace)
    config = cli.parse(BenchConfig, ["tiny.yaml"], command="bench", default_config="default", words="configs")
    table, problems = rows.named(config.configs, config.list, config.config, config.values)
    assert [row.name for row in table] == ["tiny"] and problems == []


def test_the_default_compares_three_architectures_unrolled():
    config = cli.parse(BenchConfig, [], command="bench", default_config="default", words="configs")
    table, problems = rows.named(config.configs, config.list, config.config, config.values)
    assert [*problems, *bench.check(config, table)] == [] and config.baseline == "gpt_plus"
    models = [row.config().model for row in table]
    assert [model.arch for model in models] == ["angpt", "ngpt", "gpt_plus"]
    assert not any(model.scan_layers for model in models)  # or XLA counts one layer


def test_quick_is_short(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    seen: list[Any] = []

    def measure(requests: Mapping[str, Request], plan: Plan, say: Any) -> Any:
        seen.extend([requests["ours"], plan])
        raise bench.Stopped("SIGINT")

    monkeypatch.chdir(workspace)
    monkeypatch.setattr(bench, "measure", measure)
    words = ("--config", "two.yaml", "--quick", "--decode_tokens", "8")
    assert run_here(bench.bench, BenchConfig, "bench", *words, monkeypatch=monkeypatch, capsys=capsys).code == 75
    asked, plan = seen
    assert asked.measures == ["train", "decode"] and asked.keep_compiled
    assert plan.processes == 1 and plan.rounds == 3 and plan.compile_together
