"""The pictures of a report, in their order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from angpt_jax.plots import curves, depth, look
from angpt_jax.plots.curves import Row
from angpt_jax.plots.history import History
from angpt_jax.plots.page import Shown

PIXELS = 96  # of a page, for an inch
MANY, SEVERAL = 40, 6  # steps in one panel


@dataclass(frozen=True)
class Picture:
    """One file of the report.

    Args:
        name: of the file, without suffix
        title: headline
        caption: one sentence
        draw: makes the figure, of runs that have what it shows
        kind: what the instruments must have measured for it; null if the metrics are enough
        compares: makes sense for several runs only
    """

    name: str
    title: str
    caption: str
    draw: Callable[[list[History]], Figure]
    kind: str | None
    compares: bool = False


STREAM = partial(
    depth.over_steps,
    rows={"‖h‖ (mean over tokens)": depth.by_sublayer},
    x="sublayer\n(attention 1, MLP 1, …, final)",
    lines=MANY,
)
LAYERS = partial(depth.over_steps, x="layer", lines=SEVERAL, may_be_log=False)
PICTURES = (
    Picture(
        "loss",
        "Loss",
        "Training loss (light) and validation loss (with markers) against the tokens read and against the time that "
        "training steps took; what lies above the frame belongs to the first tenth of a run.",
        curves.losses,
        None,
    ),
    Picture(
        "input_norms",
        "Norm of the stream by depth",
        "Norm of the stream that each sublayer reads (attention 1, MLP 1, attention 2, …; the last place is what the "
        "head reads), a line for each instrumented step; the band is one standard deviation over tokens at the last.",
        STREAM,
        "norms",
    ),
    Picture(
        "input_norms_apart",
        "Norm of the stream by depth, each run on its own scale",
        "The same as above, but the y axes differ.",
        partial(STREAM, shared=False),
        "norms",
        compares=True,
    ),
    Picture(
        "inner_norms",
        "Norms inside the layers",
        "Norms of what the sublayers add to the stream and of q, k, u and a inside them, at the last instrumented "
        "step; the bands are one standard deviation over tokens.",
        partial(
            depth.last_step,
            rows={
                "‖branch‖ (mean over tokens)": ("attention_branch", "mlp_branch"),
                "‖q‖, ‖k‖, ‖u‖, ‖a‖ (mean over tokens)": ("q", "k", "u", "a"),
            },
        ),
        "norms",
    ),
    Picture(
        "first_moments",
        "Adam's first moment",
        "Variance over the entries of Adam's first moment, parameter by parameter, as the mean over layers.",
        partial(
            curves.by_parameter,
            rows=(
                Row("variance of the first moment\n(matrices)", "first_moment_variance", "matrices"),
                Row("variance of the first moment\n(scales, gains)", "first_moment_variance", "others"),
            ),
        ),
        "first_moment_variance",
    ),
    Picture(
        "alpha",
        "α, the step of the stream towards a branch",
        "α of the attention and MLP joins at several steps; the band is one standard deviation over channels at the "
        "last.",
        partial(
            LAYERS,
            rows={
                "attention α (mean over channels)": partial(depth.by_layer, kind="alpha", name="attention"),
                "MLP α (mean over channels)": partial(depth.by_layer, kind="alpha", name="mlp"),
            },
        ),
        "alpha",
    ),
    Picture(
        "nu_alpha",
        "ν(α), the factor that restores the norm after a join",
        "ν(α) of the attention and MLP joins at several steps; the band is one standard deviation over channels at the "
        "last.",
        partial(
            LAYERS,
            rows={
                "attention ν(α) (mean over channels)": partial(depth.by_layer, kind="nu_alpha", name="attention"),
                "MLP ν(α) (mean over channels)": partial(depth.by_layer, kind="nu_alpha", name="mlp"),
            },
        ),
        "nu_alpha",
    ),
    Picture(
        "logit_scale",
        "Scale of the logits",
        "s_Z, mean and standard deviation (band) over the vocabulary.",
        curves.logit_scales,
        "logit_scale",
    ),
    Picture(
        "updates",
        "Size of the updates",
        "‖ΔW‖/‖W‖ of one step, and the angle between W before and after it, matrix by matrix, as the mean over layers.",
        partial(
            curves.by_parameter,
            rows=(Row("update ratio ‖ΔW‖/‖W‖", "update_ratio"), Row("update angle (degrees)", "update_angle")),
        ),
        "update_ratio",
    ),
    Picture(
        "on_bound",
        "Rows on the bound",
        "Share of the rows of each matrix whose norm sits on the constraint's bound, as the mean over layers.",
        partial(curves.by_parameter, rows=(Row("rows on the bound (%)", "on_bound", percent=True),)),
        "on_bound",
    ),
    Picture(
        "gradient_norms",
        "Gradient norm by depth",
        "Norm of the gradient of the embedding (at 0), of each layer, and of the head (behind the last layer), a line "
        "for each instrumented step.",
        partial(
            depth.over_steps,
            rows={"gradient norm": depth.gradient_by_layer},
            x="layer\n(0: embedding, last: head)",
            lines=MANY,
        ),
        "gradient_norm",
    ),
    Picture(
        "entropy",
        "Entropy of the attention",
        "Entropy of the attention weights by layer at several steps; the band is one standard deviation at the last.",
        partial(LAYERS, rows={"attention entropy (nats)": partial(depth.by_layer, kind="entropy", name="attention")}),
        "entropy",
    ),
)


def put(draw: Callable[[], Figure], path: Path, title: str, caption: str) -> Shown:
    """Draws a figure in our style, writes it, and gives it to a page."""
    with look.style():
        figure = draw()
        png = look.save(figure, path)
    return Shown(path.stem, title, caption, png, round(figure.get_figwidth() * PIXELS))


def draw(runs: list[History], folder: Path) -> list[Shown]:
    """Writes each picture that there is something for, and removes those of an earlier report that have nothing."""
    shown = []
    for picture in PICTURES:
        path = folder / f"{picture.name}.png"
        chosen = [run for run in runs if picture.kind is None or run.seen(picture.kind)]
        missing = [run.name for run in runs if run.instruments and run not in chosen]
        path.unlink(missing_ok=True)
        if len(chosen) < (2 if picture.compares else 1):
            continue
        caption = picture.caption + (f" Not measured in {', '.join(missing)}." if missing else "")
        shown.append(put(partial(picture.draw, chosen), path, picture.title, caption))
    return shown
