"""`python -m angpt_jax.nu`: the ν of given sizes beside a Monte-Carlo check, and how norms concentrate with width."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from angpt_jax import cli
from angpt_jax.nu import ACTIVATIONS, lerp_nu, monte_carlo
from angpt_jax.nu.monte_carlo import VECTORS_PER_MATRIX, Layer
from angpt_jax.schema import show

WIDEST = 65_536
Measured = dict[str, np.ndarray]


@dataclass(frozen=True)
class NuConfig:
    """Prints the ν of a layer beside a Monte-Carlo check, and the spread of the norms at several widths.

    Args:
        width: length of the residual stream (D)
        heads: attention heads (H); must divide width
        feed_forward: width of the MLP (F); null is 4 * width
        activation: the non-linearity of the MLP, a name in angpt_jax.nu.ACTIVATIONS
        gated: two maps feed the activation, u * f(sqrt(D) * z); false is f(sqrt(D) * u)
        alphas: step sizes of the join whose factor is printed
        samples: norms that each mean and spread is taken from
        widths: of the second table; head width and feed_forward / width are those of the first
        seed: seed of the random matrices and vectors
    """

    width: int = 1024
    heads: int = 16
    feed_forward: int | None = None
    activation: str = "silu"
    gated: bool = True
    alphas: list[float] = field(default_factory=lambda: [0.01, 0.05, 0.25])
    samples: int = 512
    widths: list[int] = field(default_factory=lambda: [128, 256, 512, 1024])
    seed: int = 0

    @property
    def layer(self) -> Layer:
        """What is measured in the first table."""
        feed_forward = 4 * self.width if self.feed_forward is None else self.feed_forward
        return Layer(self.width, self.width // self.heads, feed_forward, self.activation, self.gated)


def print_nu(config: NuConfig, name: str) -> int:
    """Prints both tables; returns the exit code."""
    cli.raise_problems(check(config))
    print("\n".join(describe(config)))
    return 0


def describe(config: NuConfig) -> Iterator[str]:
    """Both tables and what must be known to read them."""
    layer, samples = config.layer, config.samples
    gated = "gated" if layer.gated else "not gated"
    yield f"width D = {layer.width}, {layer.heads} heads (H) of width K = {layer.head_width},"
    yield f"feed_forward F = {layer.feed_forward}, activation f = {layer.activation}, {gated}; g ~ N(0, 1)"
    yield f"{samples} norms each, {VECTORS_PER_MATRIX} for each random matrix, seed {config.seed}\n"
    layers = list(dict.fromkeys(layer.at(width) for width in sorted(config.widths)))
    measured = {each: monte_carlo.norms(each, samples, config.seed) for each in dict.fromkeys([layer, *layers])}
    yield aligned(factor_rows(config, measured[layer]), left=(0, 1, 3))
    yield "\nE[norm²] is 1 (of the activation: in the limit of large widths), so that the mean of the norm is below 1,"
    yield "by half the square of its spread.\n"
    joined = max(config.alphas)
    spreads = {each.width: spread_of(each, measured[each], joined, config) for each in layers}
    yield "Spread of the norm (standard deviation / mean) in % by width; K and F/D are those of above\n"
    yield aligned(spread_rows(spreads, samples), left=(0,))
    flat = 100 / math.sqrt(2 * layer.head_width)
    yield f"\nq has {layer.head_width} entries at each width: its spread stays near 1/√(2K) = {flat:.1f} %."
    yield f"a is what the activation gives, x_M is W_d of it, join is that of α = {joined:g}."
    yield "-0.5 is the limit of large widths."


def factor_rows(config: NuConfig, norms: Measured) -> Iterator[list[str]]:
    """Rows of the first table: formula, value, what is measured, mean ± spread, error of the mean."""
    activated = "u ⊙ f(√D·z)" if config.gated else "f(√D·u)"
    mean_square = "1/√E[f(√(D/F)·g)²]" if config.gated else "1/√(F·E[f(√(D/F)·g)²])"
    formulas = {
        "query": ("√(D/K)", "‖ν W x‖, one head"),
        "key": ("√(D/K)", "‖ν W x‖, one head"),
        "value": ("√(D/K)", "‖ν W x‖, one head"),
        "attention_out": ("√(K/D)", "‖ν W y‖, y of H unit heads"),
        "up": ("√(D/F)", "‖ν W x‖"),
        "gate": ("√(D/F)", "‖ν W x‖"),
        "down": ("√(F/D)", "‖ν W x‖"),
        "activation": (mean_square, f"‖ν · {activated}‖"),
    }
    nu = config.layer.nu
    yield ["factor", "formula", "value", "measured", "mean ± spread", "error of the mean"]
    for name, (formula, what) in formulas.items():
        if name in norms:
            yield [name, formula, f"{getattr(nu, name):#.6g}", what, *statistics(norms[name])]
    for alpha in config.alphas:
        joined = monte_carlo.join_norms(config.width, alpha, config.samples, config.seed)
        value = f"{lerp_nu(alpha):#.6g}"
        yield [f"ν({alpha:g})", "1/√(α² + (1−α)²)", value, "‖ν · (h + α(x − h))‖", *statistics(joined)]


def statistics(norms: np.ndarray) -> list[str]:
    """Mean ± standard deviation, and the standard error of the mean."""
    spread = norms.std(ddof=1)
    return [f"{norms.mean():.5f} ± {spread:.5f}", f"{spread / math.sqrt(len(norms)):.5f}"]


def spread_of(layer: Layer, norms: Measured, alpha: float, config: NuConfig) -> dict[str, float]:
    """Standard deviation / mean of each norm of the second table."""
    join = monte_carlo.join_norms(layer.width, alpha, config.samples, config.seed)
    shown = {"q": norms["query"], "u": norms["up"], "a": norms["activation"], "x_M": norms["x_M"], "join": join}
    return {name: float(values.std(ddof=1) / values.mean()) for name, values in shown.items()}


def spread_rows(spreads: dict[int, dict[str, float]], samples: int) -> Iterator[list[str]]:
    """Rows of the second table: the spreads in %, their power of the width, its error, and what is expected."""
    names = ["q", "u", "a", "x_M", "join"]
    widths = np.log(list(spreads))
    yield ["width", *names]
    for width, spread in spreads.items():
        yield [str(width), *(f"{100 * spread[name]:.3f}" for name in names)]
    logarithms = np.log([[spread[name] for name in names] for spread in spreads.values()])
    slopes = np.polyfit(widths, logarithms, 1)[0]
    error = 1 / math.sqrt(2 * (samples - 1) * np.square(widths - widths.mean()).sum())  # each spread: 1/√(2(n − 1))
    yield ["exponent", *(f"{slope:.3f}" for slope in slopes)]
    yield ["± about", *(f"{error:.3f}" for _ in names)]
    yield ["expected", *("0" if name == "q" else "-0.5" for name in names)]


def aligned(rows: Iterator[list[str]], left: tuple[int, ...]) -> str:
    """The rows as plain text; `left` are the columns that are not numbers."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def check(config: NuConfig) -> list[str]:
    """Problems of the values themselves."""
    counts = [("width", config.width, 1, WIDEST), ("heads", config.heads, 1, WIDEST)]
    counts += [("feed_forward", config.feed_forward, 1, WIDEST), ("samples", config.samples, 2, 1_000_000)]
    counts += [("widths", width, 1, WIDEST) for width in config.widths] + [("seed", config.seed, 0, 2**32 - 1)]
    problems = [
        f"{key}: must be between {least} and {most}, got {value}"
        for key, value, least, most in counts
        if value is not None and not least <= value <= most
    ]
    if config.activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        problems.append(f"activation: unknown activation, got {show(config.activation)}; one of {names}")
    problems += [
        f"alphas: must be > 0 and < 1, got {alpha}"
        for alpha in config.alphas
        if not 0 < alpha < 1  # false for nan
    ]
    if not config.alphas:
        problems.append("alphas: must hold at least one number, got []; e.g. [0.05]")
    if len(set(config.widths)) < 2:
        problems.append(f"widths: must hold at least two different widths, got {config.widths}; a slope needs two")
    return problems or [*_heads(config)]


def _heads(config: NuConfig) -> Iterator[str]:
    if config.width % config.heads:
        divisors = [str(n) for n in range(1, config.width + 1) if config.width % n == 0]
        known = ", ".join(divisors)
        yield f"heads: must divide width, got {config.heads} with width {config.width}; one of {known}"
        return
    head_width = config.width // config.heads
    for width in config.widths:
        if width % head_width:
            below = width // head_width * head_width
            near = " or ".join(str(n) for n in (below, below + head_width) if n)
            yield f"widths: must be multiples of width / heads = {head_width}, got {width}; {near} would do"


if __name__ == "__main__":
    cli.main(print_nu, NuConfig, command="nu", default_config=None)
