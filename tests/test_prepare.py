"""`prepare` writes the same bytes whatever happens on the way, and says in one line what it can't do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Outcome, one_device, run_here, run_process, tree

from angpt_jax import prepare as command
from angpt_jax.data import build, plans, work
from angpt_jax.data.corpus import name_hash, read_documents, split_documents
from angpt_jax.data.plans import sample_texts
from angpt_jax.data.prepared import open_prepared
from angpt_jax.data.readers import Piece, read
from angpt_jax.data.sources import find_source
from angpt_jax.data.tokenizer import ByteTokenizer, train_bpe
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.data.units import cut

WORDS = "the quick brown fox jumps over a lazy dog while 12 grey geese don't look, é 漢字 🙂".split()
Prepare = Callable[..., Outcome]


def text(number: int, words: int) -> str:
    picked = np.random.default_rng(number).integers(0, len(WORDS), words)
    return " ".join(WORDS[n] for n in picked) + "\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a JSONL file of 200 documents; a unit_mb is 2,000 bytes."""
    lines = [json.dumps({"text": text(number, 20 + number % 30)}) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(command, "MEGABYTE", 2000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prepare(monkeypatch, capsys) -> Prepare:
    def run(*flags: str) -> Outcome:
        given = ("--source", "a.jsonl", "--out", "out", "--validation_fraction", "0.1", "--workers", "1")
        given = (*given, "--unit_mb", "1", *flags)
        last = {flag: value for flag, value in zip(given[::2], given[1::2], strict=True)}
        words = [word for pair in last.items() for word in pair]
        return run_here(
            command.prepare, command.PrepareConfig, "prepare", *words, monkeypatch=monkeypatch, capsys=capsys
        )

    return run


def documents_of(folder: Path, split: str) -> list[str]:
    """The texts of a stream, in its order."""
    prepared = open_prepared(folder, "out", check_all=True)
    stream = prepared.stream(split)  # pyright: ignore
    ids = stream.open().read(0, stream.count)
    assert ids[0] == ids[-1] == stream.end_of_document
    ends = np.flatnonzero(ids == stream.end_of_document)
    return [prepared.tokenizer.decode(ids[a + 1 : b].tolist()) for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.parametrize("format", ["memmap", "array_record"])
@pytest.mark.parametrize("tokenizer", ["bytes", "file", "bpe"])
def test_every_document_is_there_once_on_its_side(here, prepare, format, tokenizer):
    flags = {"bytes": (), "file": ("--tokenizer", "t.json"), "bpe": ("--train_tokenizer", "300")}[tokenizer]
    (here / "t.json").write_text(train_bpe([text(0, 500)], 290).json)
    outcome = prepare("--format", format, *flags)
    assert (outcome.code, outcome.err) == (0, "")
    lines = (here / "a.jsonl").read_bytes().splitlines(keepends=True)
    places = np.cumsum([0, *map(len, lines)])
    sides: dict[str, list[str]] = {"train": [], "validation": []}
    for place, line in zip(places, lines, strict=False):
        side = "validation" if name_hash(f"a.jsonl:{place}") < 0.1 else "train"
        sides[side].append(json.loads(line)["text"])
    assert {side: documents_of(here / "out", side) for side in sides} == sides
    manifest = json.loads((here / "out" / "manifest.json").read_text())
    for side, texts in sides.items():
        facts = manifest["splits"][side]
        assert (facts["documents"], facts["text_bytes"]) == (len(texts), sum(len(text.encode()) for text in texts))
        assert sum(shard["tokens"] for shard in facts["shards"]) == facts["tokens"]
        assert len(facts["shards"]) > 5
    assert manifest["tokenizer"]["kind"] == tokenizer and manifest["format"] == format
    assert manifest["source"] | {"fingerprint": 0} == {
        "name": "a.jsonl",
        "kind": "jsonl",
        "fingerprint": 0,
        "files": 1,
        "bytes": (here / "a.jsonl").stat().st_size,
        "empty_documents": 0,
        "bad_lines": 0,
        "validation_fraction": 0.1,
    }
    assert (here / "out" / "tokenizer.json").exists() == (tokenizer != "bytes")
    assert not (here / "out" / "unfinished").exists()
    documents, tokens = (sum(facts[key] for facts in manifest["splits"].values()) for key in ("documents", "tokens"))
    assert documents == 200 and f"{manifest['splits']['train']['tokens']:,} tokens" in outcome.out and tokens > 4000


def test_a_folder_of_texts_gives_the_streams_of_its_split(here, prepare):
    (here / "texts").mkdir()
    for number in range(30):
        (here / "texts" / f"{number}.txt").write_text(text(number, 40))
    assert prepare("--source", "texts").code == 0
    train, validation = split_documents(read_documents("texts"), 0.1)
    assert documents_of(here / "out", "train") == [document.text for document in train]
    assert documents_of(here / "out", "validation") == [document.text for document in validation]


def test_a_single_long_text_is_one_document_a_side(here, prepare):
    content = text(1, 60_000)
    (here / "long.txt").write_text(content)
    (here / "t.json").write_text(train_bpe([text(0, 500)], 290).json)
    assert prepare("--source", "long.txt", "--tokenizer", "t.json").code == 0
    (train,), (validation,) = documents_of(here / "out", "train"), documents_of(here / "out", "validation")
    assert train + validation == content
    stream = open_prepared(here / "out", "out").stream("train")
    whole = load_tokenizer("t.json").encode([train])[0]  # though it was read in pieces
    assert (stream.open().read(1, stream.count - 1) == whole).all() and len(train) > 200_000


def test_the_number_of_workers_leaves_no_trace(here, prepare):
    flags = ("--train_tokenizer", "300")
    assert prepare(*flags).code == prepare("--out", "two", "--workers", "2", *flags).code == 0
    assert tree(here / "out") == tree(here / "two") and len(tree(here / "two")) > 20


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


@pytest.mark.parametrize("units", [0, 1, 7])
def test_a_killed_one_goes_on_where_it_was(here, prepare, monkeypatch, units):
    assert prepare("--out", "reference", "--train_tokenizer", "300").code == 0
    made: list[int] = []

    def make(plan: work.Plan, folder: Path, number: int, stopped: Callable[[], bool]) -> work.Done:
        if len(made) == units:
            (folder / f"train-{number:05}.bin.draft").write_bytes(b"half")
            (folder / f"train-{number + 1:05}.bin").write_bytes(b"whole, but its sidecar is not there")
            raise Killed
        made.append(number)
        return work.make(plan, folder, number, stopped)

    monkeypatch.setattr(build, "make", make)
    monkeypatch.setattr(shutil, "rmtree", lambda *rest, **flags: None)  # a kill cleans nothing up
    with pytest.raises(Killed):
        prepare("--train_tokenizer", "300")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(command, "MEGABYTE", 2000)
    assert not [path for path in (here / "out").iterdir() if path.is_file()]  # nothing has its final name
    if units == 7:  # and the disk lost one
        os.truncate(here / "out" / "unfinished" / f"train-{made.pop():05}.bin", 100)
    units_again = []
    monkeypatch.setattr(build, "make", lambda *given: (units_again.append(given[2]), work.make(*given))[1])
    assert prepare("--train_tokenizer", "300").code == 0
    assert tree(here / "out") == tree(here / "reference")
    assert not set(made) & set(units_again) and len(made) + len(units_again) > 10


def big_jsonl(path: Path, megabytes: int) -> None:
    block = [json.dumps({"text": text(number, 2000)}) + "\n" for number in range(100)]
    with path.open("w") as file:
        while file.tell() < megabytes * 10**6:
            file.writelines(block)


def test_signals_leave_a_state_that_goes_on(tmp_path):
    """SIGTERM, then SIGKILL of the parent alone, in processes of their own."""
    big_jsonl(tmp_path / "a.jsonl", 10)
    (tmp_path / "t.json").write_text(train_bpe([text(0, 500)], 290).json)
    flags = ["--source", "a.jsonl", "--tokenizer", "t.json", "--unit_mb", "1", "--workers", "2"]
    words = [sys.executable, "-m", "angpt_jax.prepare", *flags, "--out", "out"]
    done = 0
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(words, cwd=tmp_path, env=one_device(), stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("out/unfinished/0*.json"))) <= done:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)  # ends only when the workers are gone: they hold the pipe too
        assert process.returncode == code
        assert done < (done := len(list(tmp_path.glob("out/unfinished/0*.json")))) < 11
        assert (number == signal.SIGTERM) == ("run the same command again to go on" in out)
    outcome = run_process(tmp_path, "prepare", *flags, "--out", "out")
    assert outcome.code == 0 and f"{done} of 11 units are done already" in outcome.out
    assert run_process(tmp_path, "prepare", *flags[:-1], "1", "--out", "one").code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "one")


def test_a_worker_that_dies_is_told(here, prepare, monkeypatch):
    assert prepare("--out", "reference").code == 0
    monkeypatch.setattr(build, "_start_worker", dies)
    outcome = prepare("--workers", "2")
    assert outcome.code == 4 and outcome.err.startswith("angpt_jax: error: workers: a worker process died (out of mem")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(command, "MEGABYTE", 2000)
    assert prepare().code == 0 and tree(here / "out") == tree(here / "reference")


def dies(*given: object) -> None:
    os._exit(1)


def test_memory_is_bounded(tmp_path):
    """Parent and two workers, on an input that is larger than what they may use."""
    big_jsonl(tmp_path / "a.jsonl", 60)
    code = """
import re, resource, sys
from angpt_jax import cli, prepare
sys.argv = ["prepare", "--source", "a.jsonl", "--out", "out", "--unit_mb", "30", "--workers", "2"]
def peak():  # since exec; ru_maxrss of this process would be that of whoever started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
if __name__ == "__main__":
    before = peak()
    try:
        cli.main(prepare.prepare, prepare.PrepareConfig, "prepare", None)
    finally:
        print(before, peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    (tmp_path / "run.py").write_text(code)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=one_device(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, parent, worker = (int(word) for word in done.stdout.split()[-3:])
    assert parent - before < 20_000 and worker - before < 40_000  # kilobytes


def test_a_second_run_changes_nothing(here, prepare):
    prepare()
    before = {path: path.stat().st_mtime_ns for path in (here / "out").iterdir()}
    outcome = prepare("--workers", "2")
    assert (outcome.code, outcome.out[:18]) == (0, "already prepared: ")
    assert {path: path.stat().st_mtime_ns for path in (here / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("flag", "value"),
    [("format", "array_record"), ("validation_fraction", "0.2"), ("unit_mb", "2"), ("train_tokenizer", "300")],
)
def test_another_plan_is_refused(here, prepare, flag, value):
    prepare()
    before = tree(here / "out")
    outcome = prepare(f"--{flag}", value)
    name = {"train_tokenizer": "tokenizer"}.get(flag, flag)
    assert outcome.code == 2 and f"out: holds tokens that were prepared with another {name}, got " in outcome.err
    assert tree(here / "out") == before


def test_a_changed_source_is_refused(here, prepare):
    prepare()
    (here / "a.jsonl").write_text('{"text": "b"}\n' * 5)
    assert "prepared with another source, got " in prepare().err


def test_a_source_that_changes_under_the_hands_is_refused(here, prepare, monkeypatch):
    def touch(*given: Any) -> work.Done:
        os.utime("a.jsonl", (given[2], given[2]))
        return work.make(*given)

    monkeypatch.setattr(build, "make", touch)
    outcome = prepare()
    assert outcome.code == 2 and f"source: changed while it was read, got {here}/a.jsonl; run again" in outcome.err
    assert not (here / "out").exists()


def test_a_tokenizer_is_trained_on_training_text_alone(here):
    (here / "b.txt").write_text("seen " * 50 + "\n" + "unseen " * 50)
    for name, fraction in (("a.jsonl", 0.3), ("b.txt", 0.5)):
        units = cut(find_source(name, "source", "text", "train"), 2000, None, fraction)
        sample = list(sample_texts(units, fraction))
        pieces = [piece for unit in units if unit.side != "validation" for piece in read(unit)]
        kept = [p for p in pieces if isinstance(p, Piece) and (name == "b.txt" or name_hash(p.name) >= fraction)]
        assert sample == [piece.text for piece in kept] and "unseen" not in "".join(sample)


def test_a_sample_is_bounded_and_from_everywhere(here, monkeypatch):
    units = cut(find_source("a.jsonl", "source", "text", "train"), 2000, "train", 0)
    monkeypatch.setattr(plans, "_SAMPLE", 3000)
    monkeypatch.setattr(plans, "_SAMPLED_UNITS", 5)
    sample = "".join(sample_texts(units, 0))
    assert 3000 <= len(sample) < 4500
    assert (
        sum(
            next(iter(texts)) in sample
            for texts in ([p.text for p in read(unit) if isinstance(p, Piece)] for unit in units)
        )
        == 5
    )


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "tokenizer"])
def test_damage_is_found_and_mended(here, prepare, damage):
    flags = ("--train_tokenizer", "300")
    prepare(*flags)
    before, victim = tree(here / "out"), here / "out" / "train-00003.bin"
    if damage == "cut":
        os.truncate(victim, 11)
    elif damage == "changed":
        victim.write_bytes(victim.read_bytes()[:-1] + b"\xff")
    elif damage == "missing":
        victim.unlink()
    else:
        (here / "out" / "tokenizer.json").write_text(train_bpe(["other text"], 290).json)
    checked = prepare("--verify", "true")
    named = "tokenizer.json is not" if damage == "tokenizer" else "out: train-00003.bin "
    assert checked.code == 2 and named in checked.err
    again = prepare(*flags)
    assert again.code == 0 and "already prepared" not in again.out
    assert tree(here / "out") == before
    assert prepare("--verify", "true").out.startswith(f"{here}/out is whole: ")


def bad_line(folder: Path, line: bytes = b'{"text": ') -> None:
    lines = (folder / "a.jsonl").read_bytes().splitlines()
    (folder / "a.jsonl").write_bytes(b"\n".join([*lines[:7], line, *lines[7:150], line, *lines[150:]]))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_lines_are_passed_over_up_to_a_number(here, prepare, workers, monkeypatch):
    monkeypatch.setattr(work, "_PIECES_AT_ONCE", 1)  # so the shards are begun when the line comes
    bad_line(here)
    outcome = prepare("--workers", workers)
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert re.search(r"error: source: broken JSON \(.*\), got \S*a.jsonl line (8|152); mend it, or pass ", outcome.err)
    assert not (here / "out" / "manifest.json").exists()
    outcome = prepare("--workers", workers, "--skip_bad_lines", "1")
    assert outcome.code == 2 and "skip_bad_lines: at least 2 bad lines, got 1" in outcome.err
    assert not [name for name in tree(here / "out") if name.endswith(".draft")]
    assert prepare("--workers", workers, "--skip_bad_lines", "2").code == 0
    assert json.loads((here / "out" / "manifest.json").read_text())["source"]["bad_lines"] == 2
    assert len(documents_of(here / "out", "train") + documents_of(here / "out", "validation")) == 200


def test_a_validation_source_is_all_held_out(here, prepare):
    (here / "held").mkdir()
    (here / "held" / "b.txt").write_text("held out")
    assert prepare("--validation_source", "held").code == 0
    assert documents_of(here / "out", "validation") == ["held out"]
    assert len(documents_of(here / "out", "train")) == 200


def test_an_empty_side_says_which_fraction_would_do(here, prepare):
    for fraction, side in (("0.0001", "validation"), ("0.9999", "training")):
        (here / "a.jsonl").write_text("".join(json.dumps({"text": text(n, 5)}) + "\n" for n in range(5)))
        outcome = prepare("--validation_fraction", fraction)
        found = re.search(
            rf"validation_fraction: leaves no {side} documents, got {fraction}; (\S+) would do", outcome.err
        )
        assert outcome.code == 2 and found, outcome.err
        assert not (here / "out").exists()
        assert prepare("--validation_fraction", found[1], "--out", side).code == 0


def write_documents(*texts: str) -> Callable[[Path], object]:
    return lambda here: (here / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


def fill_out(here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "thesis.txt").write_text("mine")


BAD = [
    (write_documents(), (), "source: empty, got a.jsonl; "),
    (write_documents("", ""), (), "source: empty, got a.jsonl (2 empty and 0 bad documents); "),
    (
        write_documents("one"),
        (),
        "source: holds one document, got a.jsonl; several documents, or a --validation_source",
    ),
    (fill_out, (), "out: holds other things (thesis.txt), got "),
    (None, ("--out", "a.jsonl/b", "--source", "stdlib"), "out: can't be used (Not a directory), got "),
    (None, ("--source", ".", "--out", "out"), "out: must not lie in source, got out; a folder elsewhere"),
    (None, ("--source", "nothing"), "source: does not exist, got nothing; "),
    (None, ("--field", "body"), "source: no field body (there are text), got "),
    (None, ("--tokenizer", "none.json"), "tokenizer: can't be read (No such file or directory), got none.json; "),
    (None, ("--tokenizer", "a.jsonl"), "tokenizer: not JSON "),
    (None, ("--validation_source", "nothing"), "validation_source: does not exist, got nothing; "),
    (None, ("--workers", "0"), "workers: must be at least 1, got 0"),
    (None, ("--validation_fraction", "1.0"), "validation_fraction: must be > 0 and < 1, got 1.0"),
    (None, ("--train_tokenizer", "3"), "train_tokenizer: must be at least 257, got 3"),
    (None, ("--train_tokenizer", "300", "--tokenizer", "t"), "train_tokenizer: can't be given together with tokenizer"),
    (None, ("--source", "null"), "source: needed, got null; "),
    (None, ("--source", "a\nb"), "source: must be printable text (no newline or NUL), got "),
]


@pytest.mark.parametrize(("change", "flags", "problem"), BAD)
def test_bad_input_touches_nothing(here, prepare, change, flags, problem):
    if change:
        change(here)
    before = tree(here)
    outcome = prepare(*flags)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
    assert outcome.err.startswith(f"angpt_jax: error: {problem}"), outcome.err
    assert tree(here) == before and (here / "out").exists() == (change is fill_out)


def test_all_problems_are_listed(here, prepare):
    outcome = prepare("--workers", "0", "--unit_mb", "0", "--skip_bad_lines", "-1")
    assert outcome.code == 2 and outcome.err.count("\n") == 3


def test_a_tokenizer_that_changes_the_text_is_refused(here, prepare, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, texts: [np.zeros(3, np.int32) for _ in texts])
    outcome = prepare()
    assert outcome.code == 2 and "tokenizer: does not give back the text, got a.jsonl:0; " in outcome.err
    assert not (here / "out").exists()


@pytest.mark.parametrize("format", ["memmap", "array_record"])
def test_a_full_disk_leaves_no_half_shard(here, format):
    """A limit on the size of a file stands for the disk: the process that meets it gets an OSError too."""
    (here / "a.jsonl").write_text("".join(json.dumps({"text": text(n, 3000)}) + "\n" for n in range(200)))
    code = f"""
import resource, signal, sys
from angpt_jax import cli, prepare
most = int(sys.argv[1])
flags = "--source a.jsonl --out out --unit_mb 1 --workers 1 --validation_fraction 0.1 --format {format}"
sys.argv = ["prepare", *flags.split()]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
cli.main(prepare.prepare, prepare.PrepareConfig, "prepare", None)
"""
    (here / "run.py").write_text(code)

    def run(most: int) -> subprocess.CompletedProcess:
        words = [sys.executable, "run.py", str(most)]
        return subprocess.run(words, cwd=here, env=one_device(), capture_output=True, text=True)

    done = run(100_000)
    assert done.returncode == 4, done.stderr
    assert re.match("angpt_jax: error: out: can't be written .*File too large.*, got ", done.stderr)
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not [name for name in tree(here / "out") if name.endswith((".bin", ".array_record"))]
    assert run(10**9).returncode == 0
    assert len(documents_of(here / "out", "train") + documents_of(here / "out", "validation")) == 200


def test_a_folder_that_may_not_be_written_is_a_storage_error(here, prepare, monkeypatch):
    def denied(*given: object, **flags: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    outcome = prepare()
    assert (outcome.code, outcome.err.count("\n")) == (4, 1)
    assert outcome.err.startswith(f"angpt_jax: error: out: can't be written (Permission denied), got {here}/out; ")


def test_two_at_once_do_not_meet(here, prepare, monkeypatch):
    inner: list[Outcome] = []
    make = work.make

    def twice(*given: object) -> work.Done:
        if not inner:
            inner.append(run_process(here, "prepare", *FLAGS, "--unit_mb", "1"))
        return make(*given)  # pyright: ignore

    monkeypatch.setattr(command, "MEGABYTE", 10**6)
    monkeypatch.setattr(build, "make", twice)
    assert prepare().code == 0
    assert inner[0].code == 2 and "out: another prepare is at work there, got " in inner[0].err


FLAGS = ("--source", "a.jsonl", "--out", "out", "--validation_fraction", "0.1", "--workers", "1")


def test_jax_is_not_imported():
    code = "import sys, angpt_jax.prepare; assert not {'jax', 'tensorflow_datasets', 'pyarrow'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=one_device()).returncode == 0
