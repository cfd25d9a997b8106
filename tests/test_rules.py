"""A value that breaks a rule → exact error lines."""

import dataclasses
import math
from typing import Any

import pytest

from angpt_jax import rules
from angpt_jax.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from angpt_jax.schema import leaves, options

GOOD = Config(
    model=ModelConfig(arch="angpt", width=64, layers=2, heads=4, vocab=256, context=32),
    optim=OptimConfig(peak_lr=1e-3),
    data=DataConfig(batch_size=8),
    run=RunConfig(steps=100),
)


def changed(values: dict[str, Any], config: Any = GOOD) -> Any:
    """`config` with other values, by dotted key."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        config = dataclasses.replace(config, **{name: changed({rest: value}, getattr(config, name)) if rest else value})
    return config


COUNTS = ["width", "layers", "heads", "vocab", "feed_forward"]
BAD: list[tuple[dict[str, Any], list[str]]] = [
    *[({f"model.{name}": value}, [f"model.{name}: must be >= 1, got {value}"]) for name in COUNTS for value in (0, -5)],
    ({"model.context": 1}, ["model.context: must be >= 2, got 1"]),
    ({"data.batch_size": 0}, ["data.batch_size: must be >= 1, got 0"]),
    ({"data.validation_tokens": 0}, ["data.validation_tokens: must be >= 1, got 0"]),
    ({"run.steps": 0}, ["run.steps: must be >= 1, got 0"]),
    ({"run.steps": -5, "run.stop_at_step": 9}, ["run.steps: must be >= 1, got -5"]),
    ({"run.log_every_steps": 0}, ["run.log_every_steps: must be >= 1, got 0"]),
    ({"run.eval_every_steps": -1}, ["run.eval_every_steps: must be >= 1, got -1"]),
    ({"run.checkpoint_every_steps": 0}, ["run.checkpoint_every_steps: must be >= 1, got 0"]),
    ({"run.keep_latest": 1}, ["run.keep_latest: must be >= 2, got 1"]),
    ({"run.keep_every_steps": 0}, ["run.keep_every_steps: must be >= 1, got 0"]),
    ({"run.stop_at_step": 0}, ["run.stop_at_step: must be between 1 and run.steps, got 0 with run.steps 100"]),
    ({"run.stop_at_step": 101}, ["run.stop_at_step: must be between 1 and run.steps, got 101 with run.steps 100"]),
    (
        {"model.width": 66},
        ["model.width: must be an even multiple of model.heads, got 66 with 4 heads; 64 or 72 would do"],
    ),
    (
        {"model.width": 68},
        ["model.width: must be an even multiple of model.heads, got 68 with 4 heads; 64 or 72 would do"],
    ),
    ({"model.width": 6}, ["model.width: must be an even multiple of model.heads, got 6 with 4 heads; 8 would do"]),
    ({"model.rope_theta": 0.0}, ["model.rope_theta: must be a finite number > 0, got 0.0"]),
    ({"optim.peak_lr": math.nan}, ["optim.peak_lr: must be a finite number > 0, got nan"]),
    ({"optim.peak_lr": -1.0}, ["optim.peak_lr: must be a finite number > 0, got -1.0"]),
    ({"optim.peak_lr": 0.0}, ["optim.peak_lr: must be a finite number > 0, got 0.0"]),
    ({"optim.beta1": -0.1}, ["optim.beta1: must be >= 0 and < 1, got -0.1"]),
    ({"optim.beta2": 1.0}, ["optim.beta2: must be >= 0 and < 1, got 1.0"]),
    ({"optim.epsilon": 0.0}, ["optim.epsilon: must be a finite number > 0, got 0.0"]),
    ({"optim.lr_factors": {"up": -1.0}}, ["optim.lr_factors.up: must be a finite number >= 0, got -1.0"]),
    ({"optim.weight_decay": -1.0}, ["optim.weight_decay: must be a finite number >= 0, got -1.0"]),
    ({"optim.clip_norm": 0.0}, ["optim.clip_norm: must be a finite number > 0, or none, got 0.0"]),
    ({"optim.clip_norm": -1.0}, ["optim.clip_norm: must be a finite number > 0, or none, got -1.0"]),
    ({"optim.warmup_fraction": 1.5}, ["optim.warmup_fraction: must be between 0 and 1, got 1.5"]),
    ({"optim.warmup_steps": -1}, ["optim.warmup_steps: must be >= 0, got -1"]),
    ({"optim.decay_fraction": 0.0}, ["optim.decay_fraction: must be > 0 and <= 1, got 0.0"]),
    ({"optim.decay_steps": 0}, ["optim.decay_steps: must be >= 1, got 0"]),
    ({"optim.end_lr_fraction": 1.1}, ["optim.end_lr_fraction: must be between 0 and 1, got 1.1"]),
    ({"data.validation_fraction": 0.0}, ["data.validation_fraction: must be > 0 and < 1, got 0.0"]),
    ({"data.validation_fraction": 1.0}, ["data.validation_fraction: must be > 0 and < 1, got 1.0"]),
    (
        {"optim.warmup_steps": 5, "optim.warmup_fraction": 0.1},
        [
            "optim.warmup_steps: can't be given together with optim.warmup_fraction, got 5 and 0.1; "
            "set one of them to null"
        ],
    ),
    (
        {"optim.warmup_steps": 100},
        [
            "optim.warmup_steps: the warm-up must be shorter than run.steps, "
            "got 100 steps with run.steps 100; at most 99 steps"
        ],
    ),
    (
        {"optim.warmup_fraction": 1.0, "run.steps": 20},
        [
            "optim.warmup_fraction: the warm-up must be shorter than run.steps, "
            "got 20 steps with run.steps 20; at most 19 steps"
        ],
    ),
    (
        {"optim.schedule": "wsd", "optim.warmup_fraction": 0.5, "optim.decay_steps": 51},
        [
            "optim.decay_steps: warm-up and decay must fit into run.steps, got 51 steps after a warm-up of 50 "
            "(optim.warmup_fraction) with run.steps 100; at most 50 steps"
        ],
    ),
    ({"run.seed": -1}, ["run.seed: must be >= 0 and < 2**32, got -1"]),
    ({"run.seed": 2**32}, [f"run.seed: must be >= 0 and < 2**32, got {2**32}"]),
    ({"data.shuffle_seed": 2**70}, [f"data.shuffle_seed: must be >= 0 and < 2**32, got {2**70}"]),
    (
        {"model.places": {"residual": {"alpha_init": math.inf}}},
        ["model.places.residual.alpha_init: must be a finite number, got inf"],
    ),
    ({"run.dir": "a\0b"}, [r"run.dir: must be printable text (no newline or NUL), got 'a\x00b'"]),
    ({"data.source": "a\nb"}, [r"data.source: must be printable text (no newline or NUL), got 'a\nb'"]),
    ({"run.dir": "../../x"}, ["run.dir: must not contain '..', got '../../x'; give the folder itself"]),
    (
        {"run.dir": "gs://bucket/run"},
        [
            "run.dir: must be a path of a file system, got 'gs://bucket/run'; mount the bucket, or download, and give "
            "its path"
        ],
    ),
    ({"data.source": "x" * 256}, [f"data.source: must have no part longer than 255 bytes, got '{'x' * 76}..."]),
    ({"run.dir": "x/" * 1501}, [f"run.dir: must not be longer than 3000 bytes, got '{'x/' * 38}..."]),
    ({"run.dir": "a/.."}, ["run.dir: must not contain '..', got 'a/..'; give the folder itself"]),
    ({"run.dir": "r/" + "ä" * 101}, [f"run.dir: must have no part longer than 200 bytes, got 'r/{'ä' * 74}..."]),
    ({"mesh.fsdp": 0}, ["mesh.fsdp: must be >= 1, or -1 for all devices that are left, got 0"]),
    ({"mesh.tensor": -2}, ["mesh.tensor: must be >= 1, or -1 for all devices that are left, got -2"]),
    ({"optim.micro_batches": 0}, ["optim.micro_batches: must be >= 1, got 0"]),
    (
        {"optim.micro_batches": 3},
        ["data.batch_size: must be a multiple of optim.micro_batches, got 8 with 3; 6 or 9 would do"],
    ),
    ({"model.loss_vocab_chunk": 0}, ["model.loss_vocab_chunk: must be >= 1, got 0"]),
    (
        {"model.remat": ["attention", "keys"]},
        [
            "model.remat: no array of a layer, got 'keys'; none, full or a list of query, key, value, attention, "
            "attention_out, up, gate, hidden, down"
        ],
    ),
    (
        {"mesh.rules": {"width": "fsdp"}},
        [
            "mesh.rules.width: no axis of an array, got 'fsdp'; one of batch, length, embed, vocab, heads, kv_heads, "
            "feed_forward, head_dim, layers"
        ],
    ),
    (
        {"mesh.rules": {"embed": "data"}},
        [
            "mesh.rules.embed: must be mesh axes, got 'data'; one of replica, fsdp, tensor, context, a list of them, "
            "or null"
        ],
    ),
    (
        {"mesh.rules": {"vocab": ["tensor", "tensor"]}},
        ["mesh.rules.vocab: must name each mesh axis once, got ['tensor', 'tensor']"],
    ),
    ({"mesh.replica": -1}, ["mesh.replica: only one mesh axis can be -1, got -1 also for mesh.fsdp"]),
    (
        {"mesh.fsdp": 16},
        ["data.batch_size: must be a multiple of mesh.replica * mesh.fsdp, got 8 with 16; 16 would do"],
    ),
    (
        {"mesh.tensor": 3, "mesh.fsdp": 1, "model.vocab": 258},
        [
            "model.feed_forward: must be a multiple of mesh.tensor, got 256 with 3; 255 or 258 would do",
            "model.heads: must be a multiple of mesh.tensor, got 4 with 3; mesh.tensor 1 would do",
        ],
    ),
]


@pytest.mark.parametrize(("values", "lines"), BAD, ids=str)
def test_a_broken_rule_is_named(values: dict[str, Any], lines: list[str]):
    assert rules.check(changed(values)) == lines


MESHES: list[tuple[int, dict[str, Any], list[str]]] = [
    (
        8,
        {"mesh.replica": 4, "mesh.fsdp": 4, "data.batch_size": 16},
        [
            "mesh: replica * fsdp * tensor * context must be the 8 devices there are, got 4 * 4 * 1 * 1 = 16; "
            "2 * 4 * 1 * 1, 4 * 2 * 1 * 1, 1 * 4 * 2 * 1 would do"
        ],
    ),
    (
        8,
        {"mesh.replica": 2, "mesh.fsdp": 2},
        [
            "mesh: replica * fsdp * tensor * context must be the 8 devices there are, got 2 * 2 * 1 * 1 = 4; "
            "2 * 2 * 2 * 1, 2 * 4 * 1 * 1, 4 * 2 * 1 * 1 would do"
        ],
    ),
    (
        8,
        {"mesh.replica": 3},
        [
            "mesh: replica * fsdp * tensor * context must be the 8 devices there are, got 3 * -1 * 1 * 1; "
            "4 * 2 * 1 * 1, 2 * 4 * 1 * 1, 4 * 1 * 2 * 1 would do"
        ],
    ),
    (
        8,
        {"data.batch_size": 12},
        ["data.batch_size: must be a multiple of mesh.replica * mesh.fsdp, got 12 with 8; 8 or 16 would do"],
    ),
    (
        3,
        {"data.batch_size": 3, "model.width": 80},
        ["model.width: must be a multiple of mesh.fsdp, got 80 with 3; 72 or 96 would do"],
    ),
    (
        8,
        {"mesh.replica": 2, "mesh.fsdp": 2, "mesh.context": 2},
        ["mesh.context: preset fsdp_tensor splits nothing over it, got 2; context does"],
    ),
    (
        8,
        {"mesh.tensor": 2, "mesh.preset": "fsdp", "data.batch_size": 12},
        ["mesh.tensor: preset fsdp splits nothing over it, got 2; fsdp_tensor or context does"],
    ),
    (
        8,
        {"mesh.fsdp": 4, "mesh.context": 2, "mesh.preset": "context", "model.context": 33},
        ["model.context: must be a multiple of mesh.context, got 33 with 2; 32 or 34 would do"],
    ),
    (
        8,
        {"mesh.rules": {"vocab": "fsdp"}},
        ["mesh.rules.vocab: an array has it together with embed, got fsdp for both; change one"],
    ),
    (
        8,
        {"mesh.rules": {"embed": None, "vocab": "fsdp"}, "model.vocab": 257},
        ["model.vocab: must be a multiple of mesh.fsdp, got 257 with 8; 256 or 264 would do"],
    ),
    (
        8,
        {"optim.micro_batches": 2},
        [
            "data.batch_size: must be a multiple of mesh.replica * mesh.fsdp * optim.micro_batches, got 8 with 16; "
            "16 would do"
        ],
    ),
    (
        1,
        {"model.loss_vocab_chunk": 100},
        ["model.loss_vocab_chunk: must divide model.vocab, got 100 with 256; 64, 128, 256 would do"],
    ),
    (
        8,
        {"model.loss_vocab_chunk": 2, "mesh.fsdp": 2, "mesh.tensor": 4},
        [
            "model.loss_vocab_chunk: must divide model.vocab and be a multiple of mesh.tensor = 4, got 2 with 256; "
            "4, 8, 16 would do"
        ],
    ),
    (
        3,
        {"mesh.tensor": 3, "model.feed_forward": 96, "model.heads": 8},
        [
            "model.vocab: must be a multiple of mesh.tensor, got 256 with 3; 255 or 258 would do",
            "model.heads: must be a multiple of mesh.tensor, got 8 with 3; mesh.tensor 1 would do",
        ],
    ),
]


@pytest.mark.parametrize(("devices", "values", "lines"), MESHES, ids=str)
def test_a_mesh_that_does_not_fit_is_named(devices: int, values: dict[str, Any], lines: list[str]):
    assert rules.check(changed(values), devices) == lines


def test_slices_divide_the_replicas_alone():
    assert rules.check(changed({"data.batch_size": 32}), 32, 2) == [
        "mesh.replica: must be a multiple of the 2 slices that the devices are in, got 1; mesh 2 * 16 * 1 * 1, "
        "2 * 8 * 2 * 1, 4 * 8 * 1 * 1 would do"
    ]
    assert rules.check(changed({"data.batch_size": 32, "mesh.replica": 2}), 32, 2) == []
    assert rules.check(changed({"data.batch_size": 32, "mesh.replica": 3}), 32, 2)[0].endswith(
        "4 * 8 * 1 * 1, 2 * 16 * 1 * 1, 4 * 4 * 2 * 1 would do"
    )


FINE: list[tuple[int | None, dict[str, Any]]] = [
    (None, {}),
    (1, {}),
    (8, {}),
    (None, {"model.feed_forward": 1, "model.context": 2, "optim.clip_norm": "none", "optim.weight_decay": 0.0}),
    (None, {"optim.warmup_steps": 99, "optim.beta1": 0.0, "optim.end_lr_fraction": 1.0}),
    (None, {"optim.schedule": "wsd", "optim.decay_fraction": 1.0}),
    (None, {"optim.schedule": "wsd", "optim.warmup_fraction": 0.1, "optim.decay_fraction": 0.9}),
    (None, {"run.seed": 2**32 - 1, "run.stop_at_step": 100, "run.dir": "/data/runs/a..b", "run.keep_every_steps": 1}),
    (8, {"mesh.replica": 2, "mesh.fsdp": 2, "mesh.tensor": 2}),
    (8, {"mesh.replica": -1, "mesh.fsdp": 2}),
    (8, {"mesh.context": 4, "mesh.preset": "context"}),
    (8, {"mesh.preset": "data_parallel", "model.width": 88}),
    (8, {"mesh.rules": {"embed": None, "vocab": "fsdp", "heads": ["replica", "tensor"]}}),
    (8, {"model.loss_vocab_chunk": 64, "model.remat": ["attention", "up"], "mesh.fsdp": 4, "mesh.tensor": 2}),
    (8, {"optim.micro_batches": 2, "data.batch_size": 16}),
]


@pytest.mark.parametrize(("devices", "values"), FINE, ids=str)
def test_what_is_fine_has_no_problems(devices: int | None, values: dict[str, Any]):
    assert rules.check(changed(values), devices) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [leaf.key for leaf in leaves(Config) if float in options(leaf.hint)])
def test_no_float_may_be_nan_or_infinite(key: str, value: float):
    assert [line.partition(":")[0] for line in rules.check(changed({key: value}))] == [key]


def test_problems_are_all_listed():
    bad = {"optim.peak_lr": -1.0, "model.layers": 0, "run.seed": -1, "model.width": 66, "run.keep_latest": 0}
    assert sorted(line.partition(":")[0] for line in rules.check(changed(bad))) == sorted(bad)


def test_a_model_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    huge = {"model.vocab": 10**9, "model.width": 1024}
    monkeypatch.setattr(rules.os, "sysconf", {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4000}.__getitem__)
    assert rules.check(changed(huge), devices=8) == [
        "model: its parameters need 1024.0 GB on each device, got vocab 1000000000, width 1024, layers 2; "
        "at most 3.2 GB (80 % of this machine's memory)"
    ]
    assert rules.check(changed(huge)) == []  # how far it is split is not known yet
    assert rules.check(changed({**huge, "dry_run": True}), devices=8) == []
