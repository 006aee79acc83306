"""training_plot.png: the loss of each step, its moving mean, the evaluations and the learning rate.

Drawn from log.jsonl alone, so it can be made again at any time, also for a run that has stopped:
`write_plot("output/log.jsonl", "output/training_plot.png", title="my run")`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surogate.errors import UserError
from surogate.report import read_log

_INK = "#1f2933"
_BLUE = "#1f6feb"
_ORANGE = "#d9480f"
_GREY = "#8592a0"

# With fewer steps than this a moving mean says nothing.
_FEW = 25


class Curves(NamedTuple):
    """The numbers of a log: NaN where a loss was not finite."""

    step: Float64[np.ndarray, " steps"]
    loss: Float64[np.ndarray, " steps"]
    lr: Float64[np.ndarray, " steps"]
    eval_step: Float64[np.ndarray, " evals"]
    eval_loss: Float64[np.ndarray, " evals"]


def curves(records: Sequence[dict[str, Any]]) -> Curves:
    """Picks the curves out of a log's records."""

    def column(kind: str, name: str) -> Float64[np.ndarray, " rows"]:
        # None, a number that was not finite, becomes NaN.
        return np.array([r[name] for r in records if r["log"] == kind], dtype=np.float64)

    return Curves(
        step=column("step", "step"),
        loss=column("step", "loss"),
        lr=column("step", "lr"),
        eval_step=column("eval", "step"),
        eval_loss=column("eval", "loss"),
    )


def smooth(values: Float64[np.ndarray, " steps"], *, window: int) -> Float64[np.ndarray, " steps"]:
    """The centred mean of `window` values (odd), NaN left out; at the ends of those there are.

    A window with no number in it gives NaN.
    """
    kernel = np.ones(window)
    known = np.isfinite(values)
    half = window // 2

    def windowed(x: Float64[np.ndarray, " steps"]) -> Float64[np.ndarray, " steps"]:
        return np.convolve(x, kernel)[half : half + len(x)]

    count = windowed(known.astype(np.float64))
    total = windowed(np.where(known, values, 0.0))
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def write_plot(log_path: str | Path, png_path: str | Path, *, title: str) -> None:
    """Draws a log. Does nothing for one without a step; a file that cannot be written is a
    UserError."""
    data = curves(read_log(log_path))
    if not len(data.step):
        return
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    top, bottom = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [5, 1], "hspace": 0.05}
    )
    _draw_loss(top, data)
    # parse_math: a $ in a name is a $.
    top.set_title(title, loc="left", size=13, weight="bold", color=_INK, pad=12, parse_math=False)
    _draw_rate(bottom, data)
    for axes in (top, bottom):
        _tidy(axes)
    png_path = Path(png_path)
    scratch = png_path.with_name(png_path.name + ".tmp")
    try:
        canvas.print_png(str(scratch))
        os.replace(scratch, png_path)
    except OSError as e:
        raise UserError(f"{png_path}: cannot be written: {e.strerror}") from None


def _draw_loss(axes: Axes, data: Curves) -> None:
    steps = len(data.step)
    if steps < _FEW:
        axes.plot(data.step, data.loss, color=_BLUE, marker="o", markersize=5, label="train")
    else:
        window = max(5, steps // 30) | 1
        mean = smooth(data.loss, window=window)
        axes.plot(data.step, data.loss, color=_BLUE, alpha=0.3, linewidth=0.9, label="train")
        label = f"train, mean of {window} steps"
        axes.plot(data.step, mean, color=_BLUE, linewidth=2, label=label)
    if len(data.eval_step):
        axes.plot(
            data.eval_step,
            data.eval_loss,
            color=_ORANGE,
            linewidth=1.2,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="evaluation",
            zorder=3,
        )
        last = data.eval_loss[-1]
        if np.isfinite(last):
            axes.annotate(
                f"{last:.3f}",
                (data.eval_step[-1], last),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=_ORANGE,
                annotation_clip=False,
            )
    axes.set_ylabel("loss, nats per token", color=_INK)
    axes.legend(
        loc="upper right", facecolor="white", framealpha=0.9, edgecolor="none", labelcolor=_INK
    )


def _draw_rate(axes: Axes, data: Curves) -> None:
    marker = "." if len(data.step) == 1 else ""
    axes.plot(data.step, data.lr, color=_GREY, linewidth=1.5, marker=marker)
    if len(data.step) == 1:
        axes.set_xlim(data.step[0] - 1, data.step[0] + 1)
    peak = float(data.lr.max())
    axes.set_ylim(0, peak * 1.15 or 1)
    ticks = [0.0, peak] if peak else [0.0]
    axes.set_yticks(ticks, [f"{tick:.1e}" if tick else "0" for tick in ticks])
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylabel("learning rate", color=_INK)
    axes.set_xlabel("step", color=_INK)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4cdd5")
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color="#e4e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
