"""The report of `angpt_jax.compile` as text: what its JSON holds, for people."""

from typing import Any

from angpt_jax import meshes
from angpt_jax.ahead.collectives import KINDS
from angpt_jax.chips import GIB
from angpt_jax.footprint import ROWS, against, row

WIDTH = 100


def table(report: dict[str, Any]) -> str:
    lines = [*_head(report), "", *_memory(report)]
    if report["collectives"]:
        lines += ["", *_collectives(report["collectives"]), "", *_work(report)]
    if report["roofline"]:
        lines += ["", *_roofline(report)]
    if report["loops_of_unknown_length"]:
        lines += ["", f"loops of unknown length, counted once: {len(report['loops_of_unknown_length'])}"]
    return "\n".join([*lines, "", *_verdict(report)])


def _head(report: dict[str, Any]) -> list[str]:
    where = report["topology"] or "here"
    slices = f", {report['slices']} slices" if report["slices"] > 1 else ""
    kept = report["remat"]
    return [
        f"{report['config']} ({report['arch']}, {report['parameters']:,} parameters)",
        f"  devices    {where}{slices}: {report['chips']} × {report['device']}",
        f"  mesh       {meshes.words(report['mesh'])}",
        f"  batch      {report['batch_size']} sequences of {report['context']} ({report['tokens_per_step']:,} tokens), "
        f"micro batches {report['micro_batches']}",
        f"  program    attention {report['attention']}, loss chunk {report['loss_vocab_chunk'] or 'all'}; compiled in "
        f"{report['compile_seconds']} s",
        f"  remat      {kept if isinstance(kept, str) else ', '.join(kept)}",
    ]


def _memory(report: dict[str, Any]) -> list[str]:
    memory = report["memory"]
    rows = [row(words, memory[name], remark) for name, (words, remark) in ROWS.items() if name in memory]
    return ["memory, on each chip", *rows, *against(memory["peak"], memory["limit"])]


def _collectives(report: dict[str, Any]) -> list[str]:
    form = "  {:<20} {:<16} {:>9} {:>12}"
    lines = ["sent by each chip in one step", form.format("", "over", "times", "MB").rstrip()]
    for group in report["by_axes"]:
        over = "between slices" if group["between_slices"] else group["axes"] or "unknown"
        lines.append(form.format(group["kind"], over, f"{group['count']:,}", f"{group['bytes'] / 1e6:,.3f}"))
    for kind in KINDS:
        if not report["by_kind"][kind]["count"]:
            lines.append(form.format(kind, "", "none", "").rstrip())
    for title, one in (("largest all-gather", report["largest_all_gather"]), *_senders(report)):
        if one:
            lines.append(f"  {title}: {one['whole_bytes'] / 1e6:,.3f} MB, {one['times']} times, over {one['axes']}")
            lines += [f"    {_tail(one[what])}" for what in ("operands", "source")]
    return lines


def _senders(report: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"sends most, {one['kind']}", one) for one in report["largest"][:2]]


def _tail(text: str) -> str:
    """As much of the end as fits."""
    return text if len(text) <= WIDTH - 4 else f"…{text[-(WIDTH - 5) :]}"


def _work(report: dict[str, Any]) -> list[str]:
    flops, hbm = report["flops"], report["hbm_bytes"]
    ratio = flops["matrix_products"] / flops["analytic"]
    return [
        "work of each chip in one step",
        f"  analytic FLOPs   {flops['analytic']:.4g}  ({flops['per_token']:,} per token)",
        f"  in the program   {flops['matrix_products']:.4g}  ({ratio:.2f} of it; kernels not counted, remat is)",
        f"  HBM traffic      {hbm / GIB:,.3f} GiB",
    ]


def _roofline(report: dict[str, Any]) -> list[str]:
    line = report["roofline"]
    parts = {
        "compute": "analytic FLOPs at the peak rate",
        "memory": "HBM",
        "link": "links in a slice",
        "network": "between slices",
    }
    rows = [f"  {name:<9} {1000 * line[f'{name}_seconds']:12,.3f} ms  {of}" for name, of in parts.items()]
    return [
        "a step at the least, by what the chip can do",
        *rows,
        f"  step      {1000 * line['step_seconds']:12,.3f} ms  if all overlap, bound by {line['bound_by']}",
        f"            {1000 * line['step_seconds_without_overlap']:12,.3f} ms  if nothing does",
        f"  at most   {line['tokens_per_second']:12,.0f} tokens/s, MFU {line['mfu_bound']:.1%}",
    ]


def _verdict(report: dict[str, Any]) -> list[str]:
    memory, largest = report["memory"], report["largest_batch"]
    words = {True: "fits", False: "does not fit", None: "whether it fits is unknown"}[memory["fits"]]
    lines = [words + (f": {memory['compiler']}" if memory["compiler"] else "")]
    if largest:
        found = f"{largest['batch_size']} sequences" if largest["batch_size"] else "none fits"
        lines.append(f"largest batch: {found} (a multiple of {largest['multiple_of']}; {largest['compiles']} compiles)")
    return lines
