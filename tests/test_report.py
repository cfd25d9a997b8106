"""`python -m angpt_jax.report`: what it writes, and what it refuses."""

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import Outcome, one_device, tree
from fake_runs import make_run, metrics, write_lines
from PIL import Image

from angpt_jax import cli, report
from angpt_jax.plots.pictures import PICTURES
from angpt_jax.report import ReportConfig

Start = Callable[..., Outcome]


class Page(HTMLParser):
    """What a reader sees of report.html."""

    def __init__(self, path: Path):
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.in_cell = False
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "td":
            self.cells.append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.cells[-1] += data

    def row(self, number: int) -> list[str]:
        width = len(report.HEADER)
        return self.cells[number * width : (number + 1) * width]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Start:
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["report", *argv])
        with pytest.raises(SystemExit) as ended:
            cli.main(report.report, ReportConfig, "report", None, words="runs")
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return run


def test_the_page_holds_every_picture_and_a_row_for_every_run(start: Start):
    make_run(Path("a/same"), "gpt_plus", layers=3)
    make_run(Path("b/same"), "angpt", layers=2)
    assert start("a/same", "b/same", "--out", "x/y") == (0, "x/y/report.html\n", "")
    page, files = Page(Path("x/y/report.html")), [Path(f"x/y/{picture.name}.png") for picture in PICTURES]
    assert sorted(tree(Path("x/y"))) == sorted([file.name for file in files] + ["report.html"])
    for image, file in zip(page.images, files, strict=True):
        assert image["src"] == "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
        pixels = np.asarray(Image.open(file).convert("L"))
        inches = pixels.shape[1] / 150
        assert inches <= 12 and image["width"] == str(round(inches * 96))
        assert 0.02 < np.mean(pixels < 250) < 0.5
        edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert edge.min() == 255, f"{file.name}: something is cut off"
    rest = ["12,345,678", "40", "40,000,000", "3.2000", "1.0250", "750.0 ms"]
    assert page.row(0) == ["a/same", "gpt_plus", *rest]
    assert page.row(1) == ["b/same", "angpt", *rest]
    for picture in PICTURES:
        assert picture.title in page.text and picture.caption in page.text
    assert page.text.count("Not measured in a/same.") == 4  # α, ν(α), the scale of the logits, rows on the bound
    assert "Instruments were off" not in page.text


def test_the_page_needs_nothing_else_and_takes_names_literally(start: Start):
    name = "_<b>&\"$x$' {é} 世界\u2028"
    make_run(Path("runs") / name, seen_at=())
    assert start(f"runs/{name}").code == 0
    page = Page(Path("report/report.html"))
    assert page.row(0)[0] == name + f"runs/{name}"
    assert not {"b", "script", "link", "iframe"} & set(page.tags)
    assert "http" not in Path("report/report.html").read_text("utf-8")


def test_without_instruments_there_is_the_loss_and_a_word_on_the_flag(start: Start):
    make_run(Path("off"), seen_at=())
    assert start("off").code == 0
    assert sorted(tree(Path("report"))) == ["loss.png", "report.html"]
    text = Page(Path("report/report.html")).text
    assert "Instruments were off in off: only the loss" in text and "--run.instrument_every_steps" in text


def test_a_report_replaces_an_older_one_and_leaves_other_files_alone(start: Start):
    make_run(Path("off"), seen_at=())
    Path("report").mkdir()
    for name in ("report.html", "alpha.png", "loss.png", "notes.txt"):
        Path("report", name).write_text("old")
    assert start("off").code == 0
    assert sorted(tree(Path("report"))) == ["loss.png", "notes.txt", "report.html"]
    assert [name for name, content in tree(Path("report")).items() if content == b"old"] == ["notes.txt"]


def test_a_run_that_goes_on_is_told_from_its_metrics(start: Start):
    folder = make_run(Path("run"), seen_at=())
    write_lines(folder / "metrics.jsonl", metrics(steps=26))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 28, "tok')
    (folder / "summary.json").unlink()
    assert start("run").code == 0
    assert Page(Path("report/report.html")).row(0) == [
        *["run", "angpt", "–", "26of 40", "26,000,000", f"{3.1 + 4 / 20:.4f}", "1.0500", "500.0 ms"],
    ]
    (folder / "summary.json").write_text(json.dumps({"steps": 20, "parameters": 7, "val_loss": 9.0}))  # an older one
    assert start("run").code == 0
    assert Page(Path("report/report.html")).row(0)[2:6] == ["7", "26of 40", "26,000,000", f"{3.1 + 4 / 20:.4f}"]


def break_runs() -> None:
    """Folders that can't be shown, beside a good one."""
    for name in ("good", "new", "half", "text", "stepless", "bytes", "summary"):
        make_run(Path(name), seen_at=())
    Path("new/metrics.jsonl").unlink()
    Path("half/metrics.jsonl").write_text('{"step": 1, "tok')
    Path("text/metrics.jsonl").write_text("no JSON\n")
    write_lines(Path("stepless/instruments.jsonl"), [{"step": 1, "tokens": 1}, {"tokens": 1}])
    Path("bytes/metrics.jsonl").write_bytes(b"\xff\n")
    Path("summary/summary.json").write_text("{")
    Path("empty").mkdir()
    Path("file").write_text("x")
    Path("bad").mkdir()
    Path("bad/config.yaml").write_text("a: [")


NOT_YET = "wait for the first line of metrics.jsonl"
JSON = "Expecting value: line 1 column 1 (char 0)"
BAD: list[tuple[list[str], list[str]]] = [
    ([], ["runs: is required; expected a list of str (run directories; plots put them side by side in this order)"]),
    (["--runs", "[]"], ["runs: needs at least one run directory, got none"]),
    (["none"], ["runs: no such folder, got 'none'"]),
    (["file"], ["runs: is no folder, got 'file'"]),
    (["empty"], ["runs: holds no run (no config.yaml), got 'empty'; name run directories"]),
    (["new"], [f"runs: holds no metrics yet, got 'new'; {NOT_YET}"]),
    (["half"], [f"runs: holds no metrics yet, got 'half'; {NOT_YET}"]),
    (["text"], [f"runs: is not a file of records ({JSON}), got 'text/metrics.jsonl'"]),
    (["stepless"], ["runs: record 2 has no step or no tokens, got 'stepless/instruments.jsonl'"]),
    (["good", "./good/"], ["runs: given twice, got 'good' and './good/'; name each run once"]),
    (["good", "--out", "file"], ["out: is a file, got 'file'; name a folder"]),
    (
        ["good", "--out", "good"],
        ["out: is a folder with other things (no report.html), got 'good'; name a new or empty one"],
    ),
    (["none", "empty", "--out", "file"], ["runs: no such folder", "runs: holds no run", "out: is a file"]),
    (["bytes"], ["runs: is not a file of records ('utf-8' codec can't decode byte 0xff"]),
    (["summary"], ["runs: is not JSON (Expecting property name"]),
    (["bad"], ["runs: is not YAML ("]),
]


@pytest.mark.parametrize(("argv", "lines"), BAD, ids=lambda x: " ".join(x)[:30])
def test_bad_input_is_named_and_nothing_is_written(start: Start, argv: list[str], lines: list[str]):
    break_runs()
    before = tree(Path())
    code, out, err = start(*argv)
    assert (code, out) == (2, "")
    for found, line in zip(err.splitlines(), lines, strict=True):
        assert found.startswith(f"angpt_jax: error: {line}")
    assert tree(Path()) == before and not Path("report").exists()


def test_a_folder_that_cant_be_made_is_an_error_of_the_storage(start: Start):
    make_run(Path("good"), seen_at=())
    Path("file").write_text("x")
    assert start("good", "--out", "file/x") == (
        *(4, ""),
        "angpt_jax: error: out: can't be written, got 'file/x'; Not a directory\n",
    )


def run_python(folder: Path, *code: str) -> Outcome:
    command = [sys.executable, "-c", "\n".join(["import runpy, sys", *code])]
    done = subprocess.run(command, cwd=folder, env=one_device(), capture_output=True, text=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_jax_is_never_loaded_and_matplotlib_only_to_draw(tmp_path: Path):
    make_run(tmp_path / "run", seen_at=())
    done = run_python(
        tmp_path,
        "for argv in ['--help'], ['none'], ['run']:",
        "    sys.argv = ['report', *argv]",
        "    try: runpy.run_module('angpt_jax.report', run_name='__main__')",
        "    except SystemExit as ended: code = ended.code",
        "    loaded = [name in sys.modules for name in ('jax', 'matplotlib', 'matplotlib.pyplot')]",
        "    print(code, loaded, file=sys.stderr)",
    )
    seen = [line for line in done.err.splitlines() if not line.startswith("angpt_jax")]
    assert seen == ["0 [False, False, False]", "2 [False, False, False]", "0 [False, True, False]"]
    assert "usage: python -m angpt_jax.report RUN... [--config FILE]... [--KEY VALUE]..." in done.out


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path):
    make_run(tmp_path / "run")
    done = run_python(
        tmp_path,
        "sys.modules['matplotlib'] = None",
        "sys.argv = ['report', 'run']",
        "runpy.run_module('angpt_jax.report', run_name='__main__')",
    )
    line = "angpt_jax: error: report: needs Matplotlib, which is not installed; pip install -e '.[plots]'\n"
    assert done == (2, "", line)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
