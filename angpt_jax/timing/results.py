"""What the rounds of all sides say: for each side medians over its processes of the least of their rounds, and ratios,
taken between processes that took turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from angpt_jax.tables import UNKNOWN
from angpt_jax.timing.rounds import Rounds

Sides = Mapping[str, Sequence[Rounds]]
Result = dict[str, Any]
MIB = 2**20
OF_THE_MACHINE = ("platform", "device_kind", "devices", "jax")
COUNTED = ("peak_bytes", "temporary_bytes", "bytes_accessed", "flops_counted")  # the same in every process


def report(sides: Sides, baseline: str, machine: Mapping[str, Any]) -> Result:
    """The object of `bench --json`: machine, results by side, and ratios to the baseline."""
    every = [rounds for processes in sides.values() for rounds in processes]
    facts, loads = every[0].facts, [load for rounds in every for load in rounds.loads]
    gemm = max(rounds.facts["gemm_flops"] / rounds.least("gemm") for rounds in every)
    about = {
        **machine,
        **{name: facts[name] for name in OF_THE_MACHINE},
        "gemm_flops_per_second": gemm,
        "peak_flops_per_second": facts["peak_flops"] or gemm,
        "peak_is_measured": facts["peak_flops"] is None,
        "load_of_others": statistics.mean(loads) if loads else None,
        "repeated_rounds": sum(rounds.repeated for rounds in every),
        "rounds": sum(len(kept) for rounds in every for kept in rounds.kept.values()),
    }
    return {
        "machine": about,
        "results": {name: _result(processes, about["peak_flops_per_second"]) for name, processes in sides.items()},
        "ratios": {
            f"{name}/{baseline}": _ratios(processes, sides[baseline])
            for name, processes in sides.items()
            if name != baseline
        },
    }


def _result(processes: Sequence[Rounds], peak: float) -> Result:
    facts, measures = processes[0].facts, processes[0].kept
    found: Result = {name: facts[name] for name in ("arch", "parameters")}
    if "train" in measures:
        seconds = _median(processes, _seconds("train"))
        steps = [round for process in processes for round in process.kept["train"]]
        found |= {
            "step_seconds": seconds,
            "tokens_per_second": facts["tokens_per_step"] / seconds,
            "mfu": facts["flops_per_step"] / seconds / peak,
            "data_wait_share": sum(step["waited"] for step in steps) / sum(step["seconds"] for step in steps),
            "page_faults_per_step": _median(processes, lambda process: process.least("train", "faults")),
            "compile_seconds": _median(processes, lambda process: process.facts["compile_seconds"]),
            **{name: facts[name] for name in COUNTED},
        }
    if "forward" in measures:
        found["forward_seconds"] = _median(processes, _seconds("forward"))
    if rows := _decoded(processes[0]):
        found["decode_tokens_per_second"] = {str(row): _median(processes, _decode_rate(row)) for row in rows}
    if "data" in measures:
        found["data_tokens_per_second"] = facts["tokens_per_step"] / _median(processes, _seconds("data"))
    if "update" in measures:
        cost = _median(processes, lambda process: process.least("update") - process.least("update_free"))
        found |= {"update_seconds": _median(processes, _seconds("update")), "constraint_seconds": cost}
        if "train" in measures:
            found["constraint_share"] = cost / found["step_seconds"]
    found["resident_bytes"] = max(process.facts["resident_bytes"] for process in processes)
    return found | {"processes": [_least(process) for process in processes]}


def _ratios(processes: Sequence[Rounds], others: Sequence[Rounds]) -> Result:
    """Of processes that took turns: the median, and from where to where they go."""
    pairs = list(zip(processes, others, strict=True))
    shared = [name for name in processes[0].kept if name in others[0].kept]
    found: Result = {}

    def note(name: str, of: Callable[[Rounds], float]) -> Any:
        each = [of(process) / of(other) for process, other in pairs]
        found[name + "_range"] = [min(each), max(each)]
        return statistics.median(each)

    for measure, name in (("train", "step_seconds"), ("forward", "forward_seconds")):
        if measure in shared:
            found[name] = note(name, _seconds(measure))
    rows = [row for row in _decoded(processes[0]) if f"decode_{row}" in shared]
    if rows:
        rates = {str(row): note(f"decode_tokens_per_second_{row}", _decode_rate(row)) for row in rows}
        found["decode_tokens_per_second"] = rates
    facts, theirs = processes[0].facts, others[0].facts
    return found | {name: facts[name] / theirs[name] for name in COUNTED if facts.get(name) and theirs.get(name)}


def _median(processes: Sequence[Rounds], of: Callable[[Rounds], float]) -> float:
    return statistics.median(of(process) for process in processes)


def _seconds(measure: str) -> Callable[[Rounds], float]:
    return lambda process: process.least(measure)


def _decode_rate(rows: int) -> Callable[[Rounds], float]:
    return lambda process: rows * process.facts["decoded_tokens"] / process.least(f"decode_{rows}")


def _decoded(process: Rounds) -> list[int]:
    return [int(name.removeprefix("decode_")) for name in process.kept if name.startswith("decode_")]


def _least(process: Rounds) -> dict[str, float]:
    return {name: process.least(name) for name in process.kept}


def table(found: Result, baseline: str) -> tuple[list[str], list[list[str]]]:
    """Heads and rows for a terminal; what was not measured has no column."""
    rates = sorted({int(row) for one in found["results"].values() for row in one.get("decode_tokens_per_second", {})})

    def of(name: str, form: str, factor: float = 1) -> Callable[[Result, Result], str]:
        return lambda one, _: _said(one.get(name), form, factor)

    def ratio(name: str) -> Callable[[Result, Result], str]:
        def said(_: Result, ratios: Result) -> str:
            ends = ratios.get(name + "_range")
            return f"{ratios[name]:.3f} ({ends[0]:.3f}–{ends[1]:.3f})" if ends else UNKNOWN

        return said

    def rate(row: int) -> Callable[[Result, Result], str]:
        return lambda one, _: _said(one.get("decode_tokens_per_second", {}).get(str(row)), ",.0f")

    def rate_ratio(row: int) -> Callable[[Result, Result], str]:
        return lambda _, ratios: _said(ratios.get("decode_tokens_per_second", {}).get(str(row)), ".3f")

    columns: dict[str, Callable[[Result, Result], str]] = {
        "step": of("step_seconds", ",.1f ms", 1000),
        f"/ {baseline}": ratio("step_seconds"),
        "tokens/s": of("tokens_per_second", ",.0f"),
        "MFU": of("mfu", ".3f"),
        "forward": of("forward_seconds", ",.1f ms", 1000),
        "constraint": of("constraint_share", ".2%"),
        "data wait": of("data_wait_share", ".2%"),
        "data tokens/s": of("data_tokens_per_second", ",.0f"),
        "faults": of("page_faults_per_step", ",.0f"),
        "compile": of("compile_seconds", ".1f s"),
        "peak": of("peak_bytes", ",.0f MiB", 1 / MIB),
        "temporary": of("temporary_bytes", ",.0f MiB", 1 / MIB),
    }
    for row in rates:
        columns |= {f"decode {row}, tokens/s": rate(row), f"decode {row} / {baseline}": rate_ratio(row)}
    rows = [
        [name, *(said(one, found["ratios"].get(f"{name}/{baseline}", {})) for said in columns.values())]
        for name, one in found["results"].items()
    ]
    told = [place for place in range(len(columns) + 1) if any(row[place] != UNKNOWN for row in rows)]
    heads = ["side", *columns]
    return [heads[place] for place in told], [[row[place] for place in told] for row in rows]


def _said(value: float | None, form: str, factor: float = 1) -> str:
    spec, _, unit = form.partition(" ")
    return UNKNOWN if value is None else f"{format(value * factor, spec)} {unit}".rstrip()
