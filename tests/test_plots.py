"""The figures of a report: they show the numbers of the files, and nothing covers anything else."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import ATTENTION, MLP, OUTSIDE, SCALES, instruments, make_run, metrics, write_lines
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from angpt_jax.plots import curves, depth, history, look
from angpt_jax.plots.curves import Row
from angpt_jax.plots.history import History
from angpt_jax.plots.pictures import PICTURES

BY_NAME = {picture.name: picture for picture in PICTURES}
STEPS = [10, 20, 40]


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with look.style():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[History]:
    """Three designs, two depths, and a fourth run with a long name."""
    folder, long = tmp_path_factory.mktemp("runs"), "angpt-" + "lr3e-3-" * 9
    made = [("gpt_plus", "gpt_plus", 12), ("ngpt", "ngpt", 3), ("angpt", "angpt", 3), (long, "angpt", 3)]
    return [history.load(str(make_run(folder / name, arch, n)), place) for place, (name, arch, n) in enumerate(made)]


def draw(name: str, runs: list[History]) -> tuple[Figure, list[Axes]]:
    """The picture and its panels."""
    figure = BY_NAME[name].draw(runs)
    return figure, [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def lines(panel: Axes) -> list[tuple[list[float], list[float]]]:
    """x and y of the lines, without the edges of bands."""
    drawn = [line for line in panel.lines if line.get_linewidth() > 0.5]
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in drawn]


def boxes(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Where each text and each legend stands."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    for axes in figure.axes:
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            texts += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
        for text in texts:
            if text.get_visible() and text.get_text():
                assert float(text.get_fontsize()) >= 9
                yield text.get_text(), text.get_window_extent(canvas.get_renderer())
    for legend in figure.legends:
        assert all(float(text.get_fontsize()) >= 9 for text in legend.get_texts())
        yield "legend", legend.get_window_extent(canvas.get_renderer())


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_covers_a_text_or_cuts_it_off(name: str, runs: list[History]):
    kind = BY_NAME[name].kind
    figure, panels = draw(name, [run for run in runs if kind is None or run.seen(kind)])
    found = list(boxes(figure))
    assert [(a, b) for (a, one), (b, other) in itertools.combinations(found, 2) if one.overlaps(other)] == []
    corners = [(text, corner) for text, box in found for corner in (box.min, box.max)]
    assert [text for text, (x, y) in corners if not figure.bbox.contains(x, y)] == []
    frames = [panel.get_window_extent() for panel in panels]
    assert [text for text, box in found if any(box.overlaps(frame) for frame in frames)] == []
    assert min(frame.width for frame in frames) > 1.7 * look.DPI
    assert figure.get_figwidth() <= look.WIDTH


def test_losses_stand_at_their_tokens_and_seconds(runs: list[History]):
    _, (by_tokens, by_time) = draw("loss", runs[:1])
    steps = list(range(2, 41, 2))
    seconds = [2.0 * step if step <= 20 else 40 + 0.5 * (step - 20) for step in steps]
    (training_x, training_y), (validation_x, validation_y) = lines(by_tokens)
    assert training_x == steps and by_tokens.get_xlabel() == "tokens (millions)"
    assert training_y == [3 + 4 / step for step in steps]
    assert validation_x == [10, 20, 30, 40] and validation_y == [3.1 + 4 / step for step in validation_x]
    assert by_time.get_xlabel() == "training time (seconds)"
    assert lines(by_time)[0][0] == seconds and lines(by_time)[1][0] == [20, 40, 45, 50]
    low, high = by_tokens.get_ylim()
    assert low < 3.1 < 3 + 4 / 4 < high < 3 + 4 / 2  # the first tenth is left out


def test_the_stream_is_shown_as_the_sublayers_read_it(runs: list[History]):
    figure, (grown, flat) = draw("input_norms", runs[:2])
    assert [panel.get_title() for panel in (grown, flat)] == ["gpt_plus", "ngpt"]
    for step, (x, y) in zip(STEPS, lines(grown), strict=True):
        assert x == list(range(1, 26))
        pairs = [[layer * step, layer * step * 1.1] for layer in range(1, 13)]
        assert y == pytest.approx([*np.ravel(pairs), 12 * step * 1.5])
    assert grown.get_yscale() == "log" and grown.get_shared_y_axes().joined(grown, flat)
    early, *_, late = [sum(map(float, np.ravel(line.get_color()))) for line in grown.lines if line.get_linewidth() > 1]
    assert late < early  # darker
    assert [axes.get_ylabel() for axes in figure.axes] == ["‖h‖ (mean over tokens)", "", "step"]
    _, (grown, flat) = draw("input_norms_apart", runs[:2])
    assert not grown.get_shared_y_axes().joined(grown, flat) and flat.get_yscale() == "linear"


def test_inner_norms_are_those_of_the_last_step(runs: list[History]):
    _, (branches, inside) = draw("inner_norms", runs[:1])
    assert branches.get_title() == "gpt_plus\nstep 40"
    last = runs[0].instruments[-1]["norms"]
    assert [y for _, y in lines(branches)] == [last[name]["mean"] for name in ("attention_branch", "mlp_branch")]
    assert [y for _, y in lines(inside)] == [last[name]["mean"] for name in "qkua"]
    edge = [np.asarray(line.get_ydata(), float) for line in inside.lines if line.get_linewidth() <= 0.5]
    np.testing.assert_allclose(edge[0], np.array(last["q"]["mean"]) + 0.1)


@pytest.mark.parametrize("name", ["alpha", "nu_alpha", "entropy"])
def test_layers_are_shown_at_their_steps(name: str, runs: list[History]):
    _, panels = draw(name, runs[2:3])
    for panel, part in zip(panels, ("attention", "mlp"), strict=False):
        assert lines(panel) == [([1, 2, 3], record[name][part]["mean"]) for record in runs[2].instruments]
        assert panel.get_yscale() == "linear"
    assert len(panels) == (1 if name == "entropy" else 2)


def test_gradients_of_embedding_and_head_stand_beside_the_layers(runs: list[History]):
    _, (panel,) = draw("gradient_norms", runs[1:2])
    x, y = lines(panel)[0]
    assert x == [0, 1, 1, 2, 3, 3, 4]
    np.testing.assert_allclose(y, [0.5, np.nan, 1, 1 / 2, 1 / 3, np.nan, 0.7])


def test_parameters_are_means_over_layers_in_groups(runs: list[History]):
    figure, (ratio, angle) = draw("updates", runs[1:2])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [path.removeprefix("layers/") for path in [*ATTENTION, *MLP, *OUTSIDE]]
    attention_out = np.mean([3 / layer for layer in (1, 2, 3)])
    assert lines(ratio)[0] == (STEPS, pytest.approx([1e-3 * attention_out / step for step in STEPS]))
    assert lines(angle)[0] == (STEPS, pytest.approx([0.06 * attention_out / step for step in STEPS]))
    looks = {(to_hex(line.get_color()), str(line.get_linestyle())) for line in ratio.lines}
    assert len(looks) == len(names)
    _, (matrices, others) = draw("first_moments", runs[1:2])
    assert (len(lines(matrices)), len(lines(others))) == (len(names), len(SCALES["ngpt"]))
    assert matrices.get_yscale() == "log"
    _, (bound,) = draw("on_bound", runs[1:2])
    assert [y[0] for _, y in lines(bound)] == pytest.approx([30, 40, 50, 60, 70, 80, 90, 10, 20])
    assert bound.get_ylim() == (-3, 103)


def test_more_parameters_than_fit_are_counted(runs: list[History]):
    row = Row("x", "update_ratio")
    record = {"step": 1, "tokens": 1, "update_ratio": {f"w{i}": [float(i + 1)] for i in range(curves.PATHS + 3)}}
    many = History("many", "many", 0, {}, {}, [], [record])
    figure = curves.by_parameter([many], [row])
    assert [text.get_text() for text in figure.legends[0].get_texts()][-2:] == [f"w{curves.PATHS - 1}", "and 3 more"]


def test_a_run_keeps_its_colour_in_every_picture(runs: list[History]):
    for name in ("loss", "logit_scale"):
        _, (panel, *_) = draw(name, runs[1:3])
        shown = {to_hex(line.get_color()).upper() for line in panel.lines}
        assert shown == set(look.COLOURS[1:3])


def nothing(value: Any) -> Any:
    """The same tree with null for each number."""
    if isinstance(value, dict):
        return {key: nothing(part) if key not in ("step", "tokens") else part for key, part in value.items()}
    return [None] * len(value) if isinstance(value, list) else None


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "loss"])
def test_what_is_null_is_left_out(name: str, tmp_path: Path):
    folder, record = make_run(tmp_path / "run"), instruments("angpt", 2, 20)
    empty: dict[str, Any] = {key: None if key not in ("step", "tokens") else part for key, part in record.items()}
    write_lines(folder / "instruments.jsonl", [nothing(record), record, nothing(record) | {"step": 30}, empty])
    figure, panels = draw(name, [history.load(str(folder))])
    figure.draw_without_rendering()
    seen = [y for panel in panels for _, y in lines(panel) if np.isfinite(y).any()]
    assert seen
    write_lines(folder / "instruments.jsonl", [nothing(record)])
    assert not history.load(str(folder)).seen(str(BY_NAME[name].kind))


def test_numbers_that_json_lacks_are_left_out(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", [*metrics(4), {"step": 5, "tokens": 5, "loss": "nan", "val_loss": None}])
    run = history.load(str(folder))
    assert run.curve("loss")[0].tolist() == [2, 4] and len(run.curve("val_loss")[0]) == 0
    assert np.isnan(history.values({"a": {"b": [None, "inf", True, 2]}}, "a", "b")).tolist() == [True] * 3 + [False]
    assert history.values({"a": {"b": None}}, "a", "b").tolist() == history.values({}, "a", "b").tolist() == []


def test_axes_are_logarithmic_beyond_a_factor_of_ten_and_flat_lines_look_flat():
    for values, scale, ticks in ([1, 9], "linear", None), ([1, 11], "log", "5"), ([3e-7, 1e-5], "log", r"$5 \times"):
        _, panels = look.grid(["a", "b"])
        panels[0, 0].plot([1, 2], values)
        look.scale_y(panels[:, 0])
        assert panels[1, 0].get_yscale() == scale
        panels[0, 0].figure.draw_without_rendering()
        labels = [label.get_text() for label in panels[0, 0].get_yticklabels()]
        assert ticks is None or any(label.startswith(ticks) for label in labels)
    _, panels = look.grid(["a"])
    panels[0, 0].plot([1, 2], [1, 1 + 1e-6])
    look.scale_y(panels[:, 0])
    assert panels[0, 0].get_ylim() == pytest.approx((0.99, 1.01), rel=1e-4)


def test_many_runs_take_several_lines_of_panels():
    figure, panels = look.grid([str(i) for i in range(6)], rows=2)
    tops = [panel.get_position().y1 for panel in panels[:, 0]]
    assert len(set(tops[:4])) == len(set(tops[4:])) == 1 and tops[4] < panels[0, 1].get_position().y0
    look.name_axes(panels, "x", ["a", "b"])
    assert [panel.get_ylabel() for panel in panels[:, 1]] == ["b", "", "", "", "b", ""]


def test_names_are_shortened_in_their_middle_and_drawn_literally():
    assert look.shortened("abcdefghij", 10) == "abcdefghij"
    assert look.shortened("abcdefghijk", 10) == "abc…fghijk"
    assert look.heading("lr3e-3 abc", 6) == "lr3e-3\nabc"
    assert look.plain("$x$_世\n") == r"\$x\$_??"


def test_some_of_many_steps_are_shown():
    assert look.some_of([1, 2, 3], 6) == [1, 2, 3]
    assert look.some_of(list(range(11)), 6) == [0, 2, 4, 6, 8, 10]


def test_depth_needs_both_sublayers_of_a_layer():
    record = {"norms": {"attention_stream": {"mean": [1, 2]}, "mlp_stream": {"mean": [3]}}}
    places, mean, std = depth.by_sublayer(record)
    assert (places.tolist(), mean.tolist(), std.tolist()) == ([1, 2], [1, 3], [])
