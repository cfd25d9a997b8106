"""Run directories as training leaves them, made of numbers that are easy to find again."""

import json
from pathlib import Path
from typing import Any

import numpy as np

ATTENTION = [f"layers/attention/{name}" for name in ("attention_out", "key", "query", "value")]
MLP = [f"layers/mlp/{name}" for name in ("down", "gate", "up")]
OUTSIDE = ["embedding", "head"]
SCALES = {
    "gpt_plus": ["layers/attention/qk/query_gain", "layers/attention_norm/gain", "final_norm/gain"],
    "ngpt": ["layers/attention_residual/alpha", "layers/mlp/gating/up_scale", "logits/logit_scale"],
    "angpt": ["layers/attention_residual/alpha", "layers/mlp_residual/alpha", "logits/logit_scale"],
}
TOKENS_PER_STEP = 1_000_000
NORMS = ("attention_stream", "mlp_stream", "attention_branch", "mlp_branch", "q", "k", "u", "a")


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metrics(steps: int = 40) -> list[dict[str, Any]]:
    """Two seconds a step, half a second from the middle on; an evaluation every ten steps."""
    records: list[dict[str, Any]] = []
    for step in range(2, steps + 1, 2):
        place = {"step": step, "tokens": step * TOKENS_PER_STEP}
        records.append(place | {"loss": 3 + 4 / step, "step_seconds": 2.0 if step <= steps // 2 else 0.5, "mfu": None})
        if step % 10 == 0:
            records.append(place | {"val_loss": 3.1 + 4 / step, "val_bits_per_byte": 1 + 1 / step})
    return records


def spread(mean: Any, std: float = 0.1) -> dict[str, list[float]]:
    means = np.atleast_1d(mean).tolist()
    return {"mean": means, "std": [std] * len(means)}


def instruments(arch: str, layers: int, step: int) -> dict[str, Any]:
    """One record: the stream of GPT+ grows with the depth and the steps, the others' does not."""
    depth = np.arange(1, layers + 1)
    growth = depth * step if arch == "gpt_plus" else np.ones(layers)
    paths = [*OUTSIDE, *ATTENTION, *MLP]
    record: dict[str, Any] = {"step": step, "tokens": step * TOKENS_PER_STEP, "a_later_instrument": {"x": [1]}}
    record["norms"] = {name: spread(growth * (1 + 0.1 * i)) for i, name in enumerate(NORMS)}
    record["norms"]["final_stream"] = spread(growth[-1] * 1.5)
    record["entropy"] = {"attention": spread(3 - depth / layers)}
    record["gradient_norm"] = {"layers": (1 / depth).tolist(), "embedding": [0.5], "head": [0.7], "final_norm": [0.01]}
    for kind, scale in ("update_ratio", 1e-3), ("update_angle", 0.06):
        record[kind] = {path: (scale * (i + 1) / depth / step).tolist() for i, path in enumerate(paths)}
    record["first_moment_variance"] = {path: [10.0**-i / step] for i, path in enumerate([*paths, *SCALES[arch]])}
    if arch != "gpt_plus":
        record["alpha"] = {"attention": spread(0.01 * depth * step), "mlp": spread(0.02 * depth * step)}
        record["logit_scale"] = {"head": spread(5 + step)}
        record["on_bound"] = {path: [min(1.0, 0.1 * (i + 1))] * layers for i, path in enumerate(paths)}
    if arch == "angpt":
        record["nu_alpha"] = {"attention": spread(1 + 0.05 * depth, 0.01), "mlp": spread(1 + 0.1 * depth, 0.01)}
    return record


def make_run(folder: Path, arch: str = "angpt", layers: int = 2, seen_at: tuple[int, ...] = (10, 20, 40)) -> Path:
    """A finished run; `seen_at`: the instrumented steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{arch: {arch}, layers: {layers}}}\nrun: {{steps: 40}}\n")
    write_lines(folder / "metrics.jsonl", metrics())
    summary = {"arch": arch, "parameters": 12_345_678, "steps": 40, "tokens": 40 * TOKENS_PER_STEP}
    summary |= {"val_loss": 3.2, "val_bits_per_byte": 1.025, "median_step_seconds": 0.75, "stopped_by": "steps"}
    (folder / "summary.json").write_text(json.dumps(summary))
    if seen_at:
        write_lines(folder / "instruments.jsonl", [instruments(arch, layers, step) for step in seen_at])
    return folder
