"""`python -m angpt_jax.nu`: the printed ν, what Monte Carlo says of them, and how norms concentrate."""

import math
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from commands import one_device, run_here, run_process

from angpt_jax.nu import __main__ as command
from angpt_jax.nu import approximate_nu, lerp_nu, monte_carlo
from angpt_jax.nu.__main__ import NuConfig, describe, print_nu

SMALL = NuConfig(width=128, heads=4, feed_forward=256, samples=600, widths=[32, 64, 128, 256], alphas=[0.1, 0.4])
ERROR = 1 / math.sqrt(2 * SMALL.samples)  # relative error of a spread
LETTERS = {"D": 128, "K": 32, "F": 256}


@cache
def text(widths: tuple[int, ...] = (32, 64, 128, 256), **changes) -> str:
    return "\n".join(describe(replace(SMALL, widths=list(widths), **changes)))


def first_table(**changes) -> dict[str, dict[str, str]]:
    return factors(text(widths=(32, 64), **changes))


def factors(printed: str) -> dict[str, dict[str, str]]:
    """The first table: factor → heading → cell."""
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("factor"))
    columns = [line.split("  ") for line in lines[start : lines.index("", start)]]
    heading, *rows = ([cell.strip() for cell in cells if cell.strip()] for cells in columns)
    return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}


def spreads(printed: str) -> dict[str, dict[str, float]]:
    """The second table: width, exponent, … → name → number."""
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("width  "))
    names = lines[start].split()[1:]
    rows = [line.rsplit(maxsplit=len(names)) for line in lines[start + 1 : lines.index("", start)]]
    return {name: dict(zip(names, map(float, numbers), strict=True)) for name, *numbers in rows}


def mean_spread_error(row: dict[str, str]) -> list[float]:
    return [float(number) for number in (*row["mean ± spread"].split(" ± "), row["error of the mean"])]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu_squared"])
def test_values_are_those_of_the_models(activation, gated):
    nu = approximate_nu(128, 4, 256, activation, inputs=("up", "gate") if gated else ("up",))
    expected = {field.name: getattr(nu, field.name) for field in fields(nu) if gated or field.name != "gate"}
    expected |= {f"ν({alpha})": lerp_nu(alpha) for alpha in SMALL.alphas}
    rows = first_table(activation=activation, gated=gated)
    assert {name: row["value"] for name, row in rows.items()} == {name: f"{v:#.6g}" for name, v in expected.items()}


@pytest.mark.parametrize("factor", ["query", "key", "value", "attention_out", "up", "gate", "down"])
def test_a_formula_says_its_value(factor):
    row = first_table()[factor]
    numerator, denominator = row["formula"].removeprefix("√(").removesuffix(")").split("/")
    assert float(row["value"]) == pytest.approx(math.sqrt(LETTERS[numerator] / LETTERS[denominator]), rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu", "gated": False}, {"heads": 32, "feed_forward": 96}])
def test_norms_have_a_mean_square_of_one(changes):
    rows = first_table(**changes)
    for name, row in rows.items():
        mean, spread, error = mean_spread_error(row)
        assert error == pytest.approx(spread / math.sqrt(SMALL.samples), rel=0.01, abs=1e-5), name
        assert abs(math.hypot(mean, spread) - 1) < 4 * error, name


@pytest.mark.parametrize("factor, outputs", [("value", 32), ("attention_out", 128), ("gate", 256), ("down", 128)])
def test_the_spread_behind_a_map_is_that_of_its_outputs(factor, outputs):
    """1/√(2n) for n normal entries."""
    spread = mean_spread_error(first_table()[factor])[1]
    assert spread == pytest.approx(1 / math.sqrt(2 * outputs), rel=4.4 * ERROR)


def spread_in_theory(name: str, width: int) -> float:
    """Standard deviation of a norm near 1: 1/√(2n) for n normal entries, ν²α(1−α)/√D for a join."""
    alpha, feed_forward = max(SMALL.alphas), 2 * width
    rows = {"q": 1 / math.sqrt(2 * 32), "u": 1 / math.sqrt(2 * feed_forward)}
    rows["join"] = lerp_nu(alpha) ** 2 * alpha * (1 - alpha) / math.sqrt(width)
    g = np.linspace(-10, 10, 20_001)
    density = np.exp(-(g**2) / 2) / np.exp(-(g**2) / 2).sum()
    silu = math.sqrt(0.5) * g / (1 + np.exp(-math.sqrt(0.5) * g))
    second, fourth = ((silu**n * density).sum() for n in (2, 4))
    rows["a"] = 0.5 * math.sqrt((3 * fourth / second**2 - 1) / feed_forward)
    rows["x_M"] = math.hypot(rows["a"], 1 / math.sqrt(2 * width))
    return rows[name]


@pytest.mark.parametrize("name, tolerance", [("q", 0.12), ("u", 0.12), ("a", 0.2), ("x_M", 0.15), ("join", 0.12)])
def test_spreads_are_those_of_theory(name, tolerance):
    """Theory is that of large widths; a, whose entries are far from normal, is the last to get there."""
    rows = spreads(text())
    for width in (64, 128, 256):
        assert rows[str(width)][name] == pytest.approx(100 * spread_in_theory(name, width), rel=tolerance)


@pytest.mark.parametrize("name", ["u", "a", "x_M", "join"])
def test_spreads_fall_like_one_over_root_width(name):
    rows = spreads(text())
    assert rows["exponent"][name] == pytest.approx(-0.5, abs=0.1) and rows["expected"][name] == -0.5


def test_the_spread_of_a_head_does_not_fall():
    rows = spreads(text())
    assert abs(rows["exponent"]["q"]) < 0.07 and rows["expected"]["q"] == 0
    assert "q has 32 entries at each width: its spread stays near 1/√(2K) = 12.5 %." in text()


def test_the_exponent_is_the_slope_of_the_printed_spreads_and_its_error_follows():
    rows = spreads(text())
    x = np.log(SMALL.widths)
    for name in ("q", "u", "a", "x_M", "join"):
        y = np.log([rows[str(width)][name] for width in SMALL.widths])
        slope = ((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum()
        assert rows["exponent"][name] == pytest.approx(slope, abs=2e-3)
        assert rows["± about"][name] == pytest.approx(ERROR / math.sqrt(((x - x.mean()) ** 2).sum()), abs=6e-4)


def test_output_is_a_function_of_the_seed():
    first, again = text(widths=(32, 64)), "\n".join(describe(replace(SMALL, widths=[32, 64])))
    assert first == again
    for name, row in first_table(seed=1).items():
        assert row["value"] == factors(first)[name]["value"]
        assert row["mean ± spread"] != factors(first)[name]["mean ± spread"]


def test_a_width_does_not_depend_on_the_others():
    all_widths, two = spreads(text()), spreads(text(widths=(64, 32, 32)))
    assert list(two)[:2] == ["32", "64"]
    assert [two["32"], two["64"]] == [all_widths["32"], all_widths["64"]]


def test_every_matrix_is_drawn_anew(monkeypatch: pytest.MonkeyPatch):
    drawn = []
    unit_rows = monte_carlo.unit_rows

    def remember(rng, outputs, x):
        drawn.append((outputs, x.shape[1], rng.bit_generator.state["state"]["state"]))
        return unit_rows(rng, outputs, x)

    monkeypatch.setattr(monte_carlo, "unit_rows", remember)
    layer = monte_carlo.Layer(8, 4, 20, "silu", gated=True)
    norms = monte_carlo.norms(layer, 150, seed=0)
    assert {len(values) for values in norms.values()} == {150}
    assert len(drawn) == len(set(drawn)) == 3 * 7  # 64 + 64 + 22 vectors, seven matrices each time
    assert [count for outputs, count, _ in drawn if outputs == 4] == [64] * 3 + [64] * 3 + [22] * 3


@pytest.mark.parametrize("entries", [1, 700, 2**19])
def test_rows_have_norm_one_however_they_are_drawn(monkeypatch: pytest.MonkeyPatch, entries: int):
    expected = monte_carlo.unit_rows(np.random.default_rng(0), 30, np.eye(64, dtype=np.float32))
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-6)
    monkeypatch.setattr(monte_carlo, "BLOCK_ENTRIES", entries)
    in_blocks = monte_carlo.unit_rows(np.random.default_rng(0), 30, np.eye(64, dtype=np.float32))
    np.testing.assert_allclose(in_blocks, expected, rtol=1e-6)


def test_the_defaults_are_fine():
    assert command.check(NuConfig()) == []


HEADS = "heads: must divide width, got 3 with width 16; one of 1, 2, 4, 8, 16"
WRONG = {
    "width": ("--width 0", ["width: must be between 1 and 65536, got 0"]),
    "too wide": ("--width 1000000", ["width: must be between 1 and 65536, got 1000000"]),
    "heads": ("--width 16 --heads 3", [HEADS]),
    "no heads": ("--heads 0", ["heads: must be between 1 and 65536, got 0"]),
    "feed_forward": ("--feed_forward 0", ["feed_forward: must be between 1 and 65536, got 0"]),
    "activation": (
        "--activation sylu",
        ["activation: unknown activation, got 'sylu'; one of silu, gelu, relu, relu_squared"],
    ),
    "one sample": ("--samples 1", ["samples: must be between 2 and 1000000, got 1"]),
    "seed": ("--seed -1", ["seed: must be between 0 and 4294967295, got -1"]),
    "alphas": ("--alphas [0,0.5,.nan,1]", [f"alphas: must be > 0 and < 1, got {x}" for x in ("0.0", "nan", "1.0")]),
    "no alphas": ("--alphas []", ["alphas: must hold at least one number, got []; e.g. [0.05]"]),
    "one width": (
        "--widths [64,64]",
        ["widths: must hold at least two different widths, got [64, 64]; a slope needs two"],
    ),
    "narrow width": ("--widths [0,64]", ["widths: must be between 1 and 65536, got 0"]),
    "widths": (
        "--widths [32,64,100]",
        [
            "widths: must be multiples of width / heads = 64, got 32; 64 would do",
            "widths: must be multiples of width / heads = 64, got 100; 64 or 128 would do",
        ],
    ),
    "a key": ("--widht 8", ["widht: unknown key; did you mean width?"]),
    "a type": ("--gated maybe", ["gated: expected true or false, got 'maybe'"]),
    "several": (
        "--samples 0 --seed -2",
        ["samples: must be between 2 and 1000000, got 0", "seed: must be between 0 and 4294967295, got -2"],
    ),
}


@pytest.mark.parametrize("flags, lines", WRONG.values(), ids=WRONG)
def test_bad_input_is_a_line_each_and_exit_code_2(flags, lines, monkeypatch, capsys):
    outcome = run_here(print_nu, NuConfig, "nu", *flags.split(), monkeypatch=monkeypatch, capsys=capsys)
    assert outcome == (2, "", "".join(f"angpt_jax: error: {line}\n" for line in lines))


def test_help_names_every_field(monkeypatch, capsys):
    outcome = run_here(print_nu, NuConfig, "nu", "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert outcome.code == 0 and "python -m angpt_jax.nu" in outcome.out
    for field in fields(NuConfig):
        assert f"--{field.name} " in outcome.out


def test_the_command_prints_plain_lines_into_a_pipe(tmp_path):
    outcome = run_process(tmp_path, "nu", "--width", "64", "--heads", "2", "--samples", "40", "--widths", "[32, 64]")
    expected = describe(NuConfig(width=64, heads=2, samples=40, widths=[32, 64]))
    assert outcome == (0, "\n".join(expected) + "\n", "")
    assert "\x1b" not in outcome.out and max(map(len, outcome.out.splitlines())) > 80
    assert list(tmp_path.iterdir()) == []


def test_the_library_does_not_load_the_command():
    code = "import sys, angpt_jax.nu; print({'angpt_jax.cli', 'angpt_jax.nu.monte_carlo'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], env=one_device(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")
