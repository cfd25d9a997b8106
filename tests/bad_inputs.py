"""The 54 bad inputs that strangers give: what is given, and the lines that answer it.

A row may have a function that makes the files. In a line, `{w}` stands for the folder they lie in and `{memory}` for
the GB that a model may take here. Cases that are not in the table: see the last table of angpt_jax/RELIABILITY.md.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from commands import make_workspace

from angpt_jax import cli, experiment, run_dir
from angpt_jax.config import Config
from angpt_jax.data.prepared import MANIFEST, Manifest, write_manifest
from angpt_jax.data.shards import Shard, ShardWriter
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.data.tokens import load_tokens

Make = Callable[[Path], object]


def nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """One bad input.

    Args:
        case: number of the case
        flags: of the command line
        lines: on stderr, without what all of them begin with
        make: makes the files
        command: that is run
        config: what --config names; none where it is empty
        early: whether it is refused before JAX is imported
    """

    case: int
    flags: str
    lines: list[str]
    make: Make = nothing
    command: str = "train"
    config: str = "tiny.yaml"
    early: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"{self.case} {self.config if self.config != 'tiny.yaml' else ''} {self.flags}"[:50]


def workspace(folder: Path) -> Path:
    """Text, `tiny.yaml`, the tokens of the text in the cache, and a run of `tiny.yaml`, as far as its config."""
    make_workspace(folder)
    with_cwd = os.getcwd()
    os.chdir(folder)
    try:
        tiny = cli.parse(Config, ["--config", "tiny.yaml"], command="train")
        load_tokens(tiny.data, tiny.model.vocab)
        run_dir.make(folder / "runs/there")
        run_dir.record(folder / "runs/there", experiment.resolved(tiny)[0], ByteTokenizer.json)
    finally:
        os.chdir(with_cwd)
    return folder


def wrote(name: str, content: str | bytes) -> Make:
    """Makes one file."""

    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def yaml(content: str | bytes) -> Make:
    return wrote("x.yaml", content)


def prepared(folder: Path, ids: Any = range(250), largest: int | None = None) -> dict[str, Any]:
    """Makes `made`, a folder of tokens of bytes with checksums that are right; returns the facts of its manifest."""
    made, tokenizer = folder / "made", ByteTokenizer()
    made.mkdir()
    splits: dict[str, tuple[Shard, ...]] = {}
    for split in ("train", "validation"):
        writer = ShardWriter(made / f"{split}.bin", "memmap", tokenizer.dtype, tokenizer.end_of_document)
        writer.add(np.asarray(ids), text_bytes=len(ids))
        shard = writer.close()
        splits[split] = (shard if largest is None else dataclasses.replace(shard, largest_id=largest),)
    write_manifest(made, Manifest.of("memmap", tokenizer, "bytes", {"name": "text"}, splits))
    return json.loads((made / MANIFEST).read_text())


def with_ids(ids: Any, largest: int | None = None) -> Make:
    return lambda folder: prepared(folder, ids, largest)


def with_facts(path: str, value: Any) -> Make:
    """A manifest in which the fact at a/b/c is another."""

    def make(folder: Path) -> None:
        facts = prepared(folder)
        node: Any = facts
        *above, last = path.split("/")
        for name in above:
            node = node[int(name) if isinstance(node, list) else name]
        node[last] = value
        (folder / "made" / MANIFEST).write_text(json.dumps(facts))

    return make


def with_shard(content: bytes) -> Make:
    def make(folder: Path) -> None:
        prepared(folder)
        (folder / "made" / "train.bin").write_bytes(content)

    return make


def pipe(name: str) -> Make:
    return lambda folder: os.mkfifo(folder / name)


def many_zeros(folder: Path) -> None:
    with open(folder / "x.yaml", "wb") as file:
        file.truncate(100_000_000)


def loop_of_links(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
SIZES = "model: {arch: angpt, width: 32, layers: 2, heads: 2, vocab: 300, context: 32}\n"
SHARD = "splits/train/shards/0"
DEEP = "[" * 200_000

ROWS = [
    Row(
        1,
        "--model.d_modle 64",
        [
            (
                "model.d_modle: unknown key; the keys of model are arch, width, layers, heads, vocab, context, "
                "feed_forward, kv_heads, tied_embeddings, rope_theta, compute_dtype, scan_layers, remat, "
                "attention, loss_vocab_chunk, places"
            )
        ],
        early=True,
    ),
    Row(1, "--model.widht=64", ["model.widht: unknown key; did you mean model.width?"], early=True),
    Row(2, "--run.steps=abc", ["run.steps: expected int, got 'abc'"], early=True),
    Row(
        3, "--run.steps=1e3", ["run.steps: expected int, got 1000.0; write whole numbers as 1000 or 1_000"], early=True
    ),
    Row(3, "--run.steps=1.5", ["run.steps: expected int, got 1.5; write whole numbers as 1000 or 1_000"], early=True),
    Row(5, "--model.tied_embeddings=no", ["model.tied_embeddings: expected true or false, got 'no'"], early=True),
    Row(5, "--model.tied_embeddings=0", ["model.tied_embeddings: expected true or false, got 0"], early=True),
    Row(
        6,
        "--config x.yaml",
        ["run.steps: stands twice, on lines 2 and 4 of 'x.yaml'; keep one"],
        yaml("run:\n  steps: 1\n  seed: 1\n  steps: 2\n"),
        early=True,
    ),
    Row(7, "--run.seed 1 --run.seed 2", ["run.seed: given twice, got 1 and 2; keep one"], early=True),
    Row(8, "--optim.peak_lr=", ["optim.peak_lr: needs a value, got ''; expected float"], early=True),
    Row(
        8,
        "--config x.yaml",
        ["optim.peak_lr: is required; expected float (highest learning rate of the schedule)"],
        yaml(SIZES + "data: {batch_size: 8}\nrun: {steps: 3}\n"),
        config="",
        early=True,
    ),
    Row(9, "--optim.peak_lr nan", ["optim.peak_lr: must be a finite number > 0, got nan"], early=True),
    Row(9, "--optim.peak_lr inf", ["optim.peak_lr: must be a finite number > 0, got inf"], early=True),
    Row(10, "--optim.peak_lr -1", ["optim.peak_lr: must be a finite number > 0, got -1.0"], early=True),
    Row(
        11,
        "--optim.beta2 1.5 --optim.epsilon 0 --optim.weight_decay -1",
        [
            "optim.weight_decay: must be a finite number >= 0, got -1.0",
            "optim.beta2: must be >= 0 and < 1, got 1.5",
            "optim.epsilon: must be a finite number > 0, got 0.0",
        ],
        early=True,
    ),
    Row(12, "--optim.clip_norm -1", ["optim.clip_norm: must be a finite number > 0, or none, got -1.0"], early=True),
    Row(12, "--optim.clip_norm 0", ["optim.clip_norm: must be a finite number > 0, or none, got 0.0"], early=True),
    Row(
        13,
        "--optim.warmup_steps 14",
        [
            (
                "optim.warmup_steps: the warm-up must be shorter than run.steps, got 14 steps with run.steps 14;"
                " at most 13 steps"
            )
        ],
        early=True,
    ),
    Row(14, "--run.steps 0", ["run.steps: must be >= 1, got 0"], early=True),
    Row(14, "--run.steps -5", ["run.steps: must be >= 1, got -5"], early=True),
    Row(
        15,
        "--model.width 66 --model.heads 4",
        ["model.width: must be an even multiple of model.heads, got 66 with 4 heads; 64 or 72 would do"],
        early=True,
    ),
    Row(
        16,
        "--model.kv_heads 3",
        ["model.kv_heads: must divide model.heads, got 3 with 2 heads; one of 1, 2"],
        early=True,
    ),
    Row(
        16,
        "--model.width 6",
        ["model.width: must be an even multiple of model.heads, got 6 with 2 heads; 4 or 8 would do"],
        early=True,
    ),
    Row(17, "--model.layers 0", ["model.layers: must be >= 1, got 0"], early=True),
    Row(
        18,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (train.bin with id 301, its tokenizer has "
                "257 ids), got made; run prepare again"
            )
        ],
        with_ids([1, 301]),
    ),
    Row(
        18,
        "--data.source made",
        [
            (
                "data.source: train.bin holds id 301 at position 2, manifest.json says at most 256, got made; "
                "run prepare again, it keeps what is whole"
            ),
            (
                "data.source: validation.bin holds id 301 at position 2, manifest.json says at most 256, got "
                "made; run prepare again, it keeps what is whole"
            ),
        ],
        with_ids([1, 301] * 50, largest=256),
    ),
    Row(
        18,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (shard with largest_id -5), got made; run "
                "prepare again"
            )
        ],
        with_facts(f"{SHARD}/largest_id", -5),
    ),
    Row(
        18,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (shard with largest_id 'x'), got made; run "
                "prepare again"
            )
        ],
        with_facts(f"{SHARD}/largest_id", "x"),
    ),
    Row(
        19,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (uint16 ids are too narrow for the 70001 ids"
                " of its tokenizer), got made; run prepare again"
            )
        ],
        with_facts("tokenizer/size", 70_001),
    ),
    Row(
        19,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (train.bin of 502 bytes for 251 uint32 ids),"
                " got made; run prepare again"
            )
        ],
        with_facts("dtype", "uint32"),
    ),
    Row(
        20,
        "--model.vocab 1000000000000000000",
        [
            (
                "model: its parameters need 32000000000.0 GB on each device, got vocab 1000000000000000000, "
                "width 32, layers 2; at most {memory} GB (80 % of this machine's memory)"
            )
        ],
    ),
    Row(
        21,
        "--model.compute_dtype float33",
        ["model.compute_dtype: expected float32 or bfloat16, got 'float33'"],
        early=True,
    ),
    Row(
        21, "--model.compute_dtype bf16", ["model.compute_dtype: expected float32 or bfloat16, got 'bf16'"], early=True
    ),
    Row(
        21,
        "--optim.moments_dtype float64",
        ["optim.moments_dtype: expected float32 or bfloat16, got 'float64'"],
        early=True,
    ),
    Row(22, "--run.seed -1", ["run.seed: must be >= 0 and < 2**32, got -1"], early=True),
    Row(22, "--run.seed 1099511627776", ["run.seed: must be >= 0 and < 2**32, got 1099511627776"], early=True),
    Row(
        22,
        "--data.shuffle_seed 1180591620717411303424",
        ["data.shuffle_seed: must be >= 0 and < 2**32, got 1180591620717411303424"],
        early=True,
    ),
    Row(
        23,
        "--mesh.replica 4 --mesh.fsdp 4 --data.batch_size 16",
        [
            (
                "mesh: replica * fsdp * tensor * context must be the 8 devices there are, got 4 * 4 * 1 * 1 = "
                "16; 2 * 4 * 1 * 1, 4 * 2 * 1 * 1, 1 * 4 * 2 * 1 would do"
            )
        ],
    ),
    Row(
        24,
        "--mesh.replica 2 --mesh.fsdp 2",
        [
            (
                "mesh: replica * fsdp * tensor * context must be the 8 devices there are, got 2 * 2 * 1 * 1 = 4;"
                " 2 * 2 * 2 * 1, 2 * 4 * 1 * 1, 4 * 2 * 1 * 1 would do"
            )
        ],
    ),
    Row(25, "--mesh.fsdp 0", ["mesh.fsdp: must be >= 1, or -1 for all devices that are left, got 0"], early=True),
    Row(25, "--mesh.tensor -2", ["mesh.tensor: must be >= 1, or -1 for all devices that are left, got -2"], early=True),
    Row(25, "--mesh.replica -1", ["mesh.replica: only one mesh axis can be -1, got -1 also for mesh.fsdp"], early=True),
    Row(
        26,
        "--data.batch_size 12",
        [("data.batch_size: must be a multiple of mesh.replica * mesh.fsdp, got 12 with 8; 8 or 16 would do")],
    ),
    Row(27, "--data.batch_size 0", ["data.batch_size: must be >= 1, got 0"], early=True),
    Row(
        28,
        "--model.width 66 --model.heads 1 --mesh.replica 2 --mesh.fsdp 4",
        ["model.width: must be a multiple of mesh.fsdp, got 66 with 4; 64 or 68 would do"],
        early=True,
    ),
    Row(
        29,
        "--data.source e.txt",
        ["data.source: empty, got e.txt; a text file or a folder of text files with text in them"],
        wrote("e.txt", ""),
    ),
    Row(
        29,
        "--source e.jsonl --out o --workers 1",
        [
            (
                "source: empty, got e.jsonl; a text file, .jsonl, .ndjson or .json lines (also .gz, .zst), "
                ".parquet, a folder of such files of one kind, a data set saved with save_to_disk, a TFDS data "
                "set (tfds:NAME or its folder), or stdlib"
            )
        ],
        wrote("e.jsonl", ""),
        command="prepare",
    ),
    Row(
        29,
        "--data.source made",
        [
            (
                "data.source: train.bin holds 0 bytes where 502 were written, got made; run prepare again, it "
                "keeps what is whole"
            )
        ],
        with_shard(b""),
    ),
    Row(
        30,
        "--data.source made",
        [
            (
                "model.context: sequence longer than the data, 33 tokens needed and 22 found in the training "
                "data of made, got 32; at most 21, or more text"
            ),
            (
                "model.context: sequence longer than the data, 33 tokens needed and 22 found in the validation "
                "set validation, got 32; at most 21, or more text"
            ),
        ],
        with_ids(range(20)),
    ),
    Row(
        31,
        "--data.source made",
        [
            (
                "data.source: train.bin holds 3 bytes where 502 were written, got made; run prepare again, it "
                "keeps what is whole"
            )
        ],
        with_shard(b"123"),
    ),
    Row(
        31,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (train.bin of 502 bytes for 1000000000 "
                "uint16 ids), got made; run prepare again"
            )
        ],
        with_facts(f"{SHARD}/tokens", 10**9),
    ),
    Row(
        31,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (shard with file '../tiny.yaml'), got made; "
                "run prepare again"
            )
        ],
        with_facts(f"{SHARD}/file", "../tiny.yaml"),
    ),
    Row(
        32,
        "--data.source nothing",
        ["data.source: does not exist, got nothing; stdlib, a text file or a folder of text files"],
    ),
    Row(
        32,
        "--data.source no*.txt",
        ["data.source: does not exist, got no*.txt; stdlib, a text file or a folder of text files"],
    ),
    Row(
        32,
        f"--data.source {'x' * 300}",
        [
            (
                "data.source: must have no part longer than 255 bytes, got "
                "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
            )
        ],
        early=True,
    ),
    Row(
        32,
        f"--data.cache_dir {'x/' * 2000}",
        [
            (
                "data.cache_dir: must not be longer than 3000 bytes, got "
                "'x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/x/..."
            )
        ],
        early=True,
    ),
    Row(
        32,
        "--data.tokenizer https://me:password@host/x",
        [
            (
                "data.tokenizer: must be a path of a file system, got 'https://***@host/x'; mount the bucket, or"
                " download, and give its path"
            )
        ],
        early=True,
    ),
    Row(
        32,
        f"--source {'x' * 300} --out o",
        [
            (
                "source: must have no part longer than 255 bytes, got "
                "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
            )
        ],
        command="prepare",
    ),
    Row(
        32,
        "--data.source loop",
        ["data.source: does not exist, got loop; stdlib, a text file or a folder of text files"],
        loop_of_links,
    ),
    Row(
        32,
        "--data.source pipe",
        [("data.source: neither a file nor a folder, got pipe; stdlib, a text file or a folder of text files")],
        pipe("pipe"),
    ),
    Row(
        33,
        "--data.source b.txt",
        ["data.source: not UTF-8 at byte 3, got b.txt; UTF-8 text"],
        wrote("b.txt", b"abc\xff"),
    ),
    Row(
        33,
        "--source b.txt --out o --workers 1",
        ["source: not UTF-8 at byte 3, got {w}/b.txt; UTF-8 text"],
        wrote("b.txt", b"abc\xff"),
        command="prepare",
    ),
    Row(
        33,
        "--data.source red",
        ["data.source: not UTF-8 at byte 3, got red/\\x1b[31m\\x07.txt; UTF-8 text"],
        wrote("red/\x1b[31m\x07.txt", b"abc\xff"),
    ),
    Row(
        33,
        "--data.encoding_errors replace",
        [
            (
                "data.encoding_errors: unknown key; the keys of data are batch_size, source, mixture, tokenizer,"
                " packing, validation_fraction, validation_tokens, validation_sets, attend_across_documents, "
                "shuffle_seed, workers, on_change, cache_dir"
            )
        ],
        early=True,
    ),
    Row(
        34,
        "--data.tokenizer none.json",
        [
            (
                "data.tokenizer: can't be read (No such file or directory), got none.json; bytes, bpe, or the "
                "path of a byte-level tokenizer.json with <|endoftext|> or </s>, or of a SentencePiece .model"
            )
        ],
    ),
    Row(
        34,
        "--data.tokenizer text",
        [
            (
                "data.tokenizer: can't be read (Is a directory), got text; bytes, bpe, or the path of a "
                "byte-level tokenizer.json with <|endoftext|> or </s>, or of a SentencePiece .model"
            )
        ],
    ),
    Row(
        34,
        "--data.tokenizer t.json",
        [
            (
                "data.tokenizer: not JSON (Expecting property name enclosed in double quotes: line 1 column 2 "
                "(char 1)), got t.json; bytes, bpe, or the path of a byte-level tokenizer.json with "
                "<|endoftext|> or </s>, or of a SentencePiece .model"
            )
        ],
        wrote("t.json", "{"),
    ),
    Row(
        34,
        "--data.tokenizer t.json",
        [
            (
                "data.tokenizer: not a tokenizer (invalid type: sequence, expected struct Tokenizer at line 1 "
                "column 1), got t.json; bytes, bpe, or the path of a byte-level tokenizer.json with "
                "<|endoftext|> or </s>, or of a SentencePiece .model"
            )
        ],
        wrote("t.json", "[1]"),
    ),
    Row(
        34,
        "--data.tokenizer t.json",
        [
            (
                "data.tokenizer: not JSON (nested too deep), got t.json; bytes, bpe, or the path of a byte-level"
                " tokenizer.json with <|endoftext|> or </s>, or of a SentencePiece .model"
            )
        ],
        wrote("t.json", DEEP),
    ),
    Row(
        34,
        "--data.tokenizer t.json",
        [
            (
                "data.tokenizer: not what prepare keeps of a SentencePiece model, got t.json; bytes, bpe, or the"
                " path of a byte-level tokenizer.json with <|endoftext|> or </s>, or of a SentencePiece .model"
            )
        ],
        wrote("t.json", '{"sentencepiece": 5}'),
    ),
    Row(
        34,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (tokenizer fingerprint 5 where str is due), "
                "got made; run prepare again"
            )
        ],
        with_facts("tokenizer/fingerprint", 5),
    ),
    Row(
        34,
        "--data.source made",
        [
            (
                "data.source: manifest.json is not one of prepare's (version \\x1b[31m, this program reads "
                "version 1), got made; run prepare again"
            )
        ],
        with_facts("version", "\x1b[31m"),
    ),
    Row(
        35,
        "--model.vocab 200",
        [
            (
                "model.vocab: smaller than the tokenizer (data.tokenizer: bytes) of 257 ids, got 200; 257 or "
                "more, or another data.tokenizer"
            )
        ],
    ),
    Row(
        36,
        "--model.context 9000",
        [
            (
                "model.context: sequence longer than the data, 9001 tokens needed and 8028 found in the training"
                " data of text, got 9000; at most 8027, or more text"
            ),
            (
                "model.context: sequence longer than the data, 9001 tokens needed and 875 found in the "
                "validation set validation, got 9000; at most 874, or more text"
            ),
        ],
    ),
    Row(36, "--model.context 1", ["model.context: must be >= 2, got 1"], early=True),
    Row(
        37,
        "--source e.jsonl --out o --workers 1",
        ["source: empty, got e.jsonl (5 empty and 0 bad documents); documents with text in them"],
        wrote("e.jsonl", '{"text": ""}\n' * 5),
        command="prepare",
    ),
    Row(
        37,
        "--source e.jsonl --out o --workers 1 --validation_fraction 0.0001",
        [("validation_fraction: leaves no validation documents, got 0.0001; 0.16 would do, or a --validation_source")],
        wrote("e.jsonl", '{"text": "a"}\n' * 5),
        command="prepare",
    ),
    Row(
        37,
        "--data.source made",
        [
            (
                "model.context: sequence longer than the data, 33 tokens needed and 1 found in the validation "
                "set validation, got 32; at most 0, or more text"
            )
        ],
        with_facts("splits/validation/shards", []),
    ),
    Row(
        38,
        "--run.dir runs/there --model.width 64 --model.layers 3",
        [
            ("model.width: differs from the run in {w}/runs/there, got 64; it was 32: use that, or another --run.dir"),
            ("model.layers: differs from the run in {w}/runs/there, got 3; it was 2: use that, or another --run.dir"),
            (
                "model.feed_forward: differs from the run in {w}/runs/there, got 256; it was 128: use that, or "
                "another --run.dir"
            ),
        ],
    ),
    Row(
        39,
        "--run.dir runs/there --model.compute_dtype bfloat16 --optim.moments_dtype bfloat16",
        [
            (
                "model.compute_dtype: differs from the run in {w}/runs/there, got 'bfloat16'; it was 'float32': "
                "use that, or another --run.dir"
            ),
            (
                "optim.moments_dtype: differs from the run in {w}/runs/there, got 'bfloat16'; it was 'float32': "
                "use that, or another --run.dir"
            ),
        ],
    ),
    Row(
        39,
        "--run.cast bfloat16",
        [
            (
                "run.cast: unknown key; the keys of run are steps, dir, stop_at_step, log_every_steps, "
                "instrument_every_steps, eval_every_steps, checkpoint_every_steps, keep_latest, "
                "keep_every_steps, seed, resume, init_from"
            )
        ],
        early=True,
    ),
    Row(
        40,
        "--run.dir runs/there --run.seed 1 --model.context 16 --data.batch_size 16 --data.shuffle_seed 2",
        [
            (
                "model.context: differs from the run in {w}/runs/there, got 16; it was 32: use that, or another "
                "--run.dir"
            ),
            (
                "data.batch_size: differs from the run in {w}/runs/there, got 16; it was 8: use that, or another"
                " --run.dir"
            ),
            (
                "data.shuffle_seed: differs from the run in {w}/runs/there, got 2; it was 0: use that, or "
                "another --run.dir"
            ),
            ("run.seed: differs from the run in {w}/runs/there, got 1; it was 0: use that, or another --run.dir"),
        ],
    ),
    Row(
        40,
        "--run.dir runs/there --data.source tiny.yaml",
        [
            (
                "data.source: differs from the run in {w}/runs/there, got 'tiny.yaml'; it was 'text': use that, "
                "or another --run.dir"
            )
        ],
    ),
    Row(
        41,
        "--run.dir runs/there --run.steps 20",
        [("run.steps: differs from the run in {w}/runs/there, got 20; it was 14: use that, or another --run.dir")],
    ),
    Row(45, "--run.resume_step 7", ["run.resume_step: unknown key; did you mean run.resume?"], early=True),
    Row(48, "--run.dir ../../x", ["run.dir: must not contain '..', got '../../x'; give the folder itself"], early=True),
    Row(
        48,
        "--run.dir a/../../x",
        ["run.dir: must not contain '..', got 'a/../../x'; give the folder itself"],
        early=True,
    ),
    Row(
        48,
        f"--run.dir {'x' * 300}",
        [
            (
                "run.dir: must have no part longer than 200 bytes, got "
                "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
            )
        ],
        early=True,
    ),
    Row(48, "--run.dir 'a\nb'", ["run.dir: must be printable text (no newline or NUL), got 'a\\nb'"], early=True),
    Row(
        48,
        "--config x.yaml",
        ["run.dir: must be printable text (no newline or NUL), got 'a\\x00b'"],
        yaml(r'run: {dir: "a\0b"}'),
        early=True,
    ),
    Row(
        48,
        "--run.dir gs://bucket/run",
        [
            (
                "run.dir: must be a path of a file system, got 'gs://bucket/run'; mount the bucket, or download,"
                " and give its path"
            )
        ],
        early=True,
    ),
    Row(
        48,
        "--run.init_from gs://bucket/run",
        [
            (
                "run.init_from: must be a path of a file system, got 'gs://bucket/run'; mount the bucket, or download,"
                " and give its path"
            )
        ],
        early=True,
    ),
    Row(
        48,
        f"--run.init_from runs/{'x' * 300}",
        [
            (
                "run.init_from: must have no part longer than 255 bytes, got "
                "'runs/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
            )
        ],
        early=True,
    ),
    Row(
        44,
        "--run.init_from runs/nowhere",
        [
            (
                "run.init_from: holds no weights (no config.yaml or config.json), got '{w}/runs/nowhere'; a run "
                "directory, or a folder that export wrote"
            )
        ],
    ),
    Row(
        51,
        "--distributed.coordinator nonsense --distributed.processes 2 --distributed.process 2",
        [
            "distributed.coordinator: must be HOST:PORT of process 0, got 'nonsense'; such as 10.0.0.1:8476",
            "distributed.process: must be >= 0 and < distributed.processes, got 2 with 2 processes; 0 … 1",
        ],
        early=True,
    ),
    Row(
        53,
        "--run.checkpoint_every_steps 0 --run.keep_latest 1 --run.eval_every_steps -1",
        [
            "run.eval_every_steps: must be >= 1, got -1",
            "run.checkpoint_every_steps: must be >= 1, got 0",
            "run.keep_latest: must be >= 2, got 1",
        ],
        early=True,
    ),
    Row(53, "--run.keep_latest 0", ["run.keep_latest: must be >= 2, got 0"], early=True),
    Row(
        54,
        "--config nowhere.yaml",
        ["config: can't be read (No such file or directory), got 'nowhere.yaml'"],
        config="",
        early=True,
    ),
    Row(54, "--config ./text", ["config: is a directory, got 'text'"], config="", early=True),
    Row(
        54,
        "--config x.yaml",
        ["config: is not UTF-8 text (byte 5), got 'x.yaml'"],
        yaml(b"run: \xe9\n"),
        config="",
        early=True,
    ),
    Row(
        54,
        "--config x.yaml",
        ["config: is not YAML (anchors and aliases are not allowed, line 1, column 4), got 'x.yaml'"],
        yaml(BOMB),
        config="",
        early=True,
    ),
    Row(
        54, "--config x.yaml", ["config: is too large, got 'x.yaml'; at most 100 kB"], many_zeros, config="", early=True
    ),
    Row(
        54,
        "--config x.yaml",
        ["config: is not YAML (nested more than 20 deep, line 1, column 25), got 'x.yaml'"],
        yaml(f"run: {DEEP[:5000]}"),
        config="",
        early=True,
    ),
    Row(54, "--config ./pipe", ["config: is not a regular file, got 'pipe'"], pipe("pipe"), config="", early=True),
    Row(
        54,
        "--run.wandb true",
        [
            (
                "run.wandb: unknown key; the keys of run are steps, dir, stop_at_step, log_every_steps, "
                "instrument_every_steps, eval_every_steps, checkpoint_every_steps, keep_latest, "
                "keep_every_steps, seed, resume, init_from"
            )
        ],
        early=True,
    ),
]
