"""Charts of run records as SVG elements for an HTML page, in the page's own colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pronghorn.errors import ConfigError
from pronghorn.records.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours no chart would use, exchanged for the page's own, so that a chart follows the reader's light or dark scheme.
_INK, _GRID, _LINE, _FAINT, _MARK = "#010101", "#010102", "#010103", "#010104", "#010105"
_VARIABLES = {_INK: "--muted", _GRID: "--rule", _LINE: "--accent", _FAINT: "--accent-faint", _MARK: "--mark"}
RUNS = ("#010106", "#010107", "#010108", "#010109", "#01010a", "#01010b")
"""Colours of runs that are compared, in the order of the page's variables --run-1 to --run-6."""
_VARIABLES |= {colour: f"--run-{number}" for number, colour in enumerate(RUNS, 1)}
SMOOTHED_FROM = 60
"""Points of a curve from which on its moving mean is drawn, too."""
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: sharp, selectable, in the page's font
    "svg.hashsalt": "pronghorn",
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.axisbelow": True,
}


def loss_chart(record: RunRecord) -> str:
    """Draw the training loss, the evaluations, and the held-out loss before and after."""
    steps = [step["step"] for step in record.steps]
    losses = [step["loss"] for step in record.steps]

    def draw(axes: Axes) -> None:
        _curve(axes, steps, losses)
        for step in record.resumed_at:
            axes.axvline(step, color=_GRID, linewidth=1.5, linestyle=(0, (2, 2)))
        if record.evaluations:
            points = [(entry["step"], entry["loss"]) for entry in record.evaluations if math.isfinite(entry["loss"])]
            axes.plot(*zip(*points, strict=True), "o-", color=_MARK, linewidth=1, markersize=4, zorder=3)
        before, after = record.heldout["before"], record.heldout["after"]
        ends = (steps[0], record.kept_step or steps[-1]) if steps else (0, 1)
        for x, y, words, side in ((ends[0], before, "before", 0.0), (ends[1], after, "after", 1.0)):
            if y is not None and math.isfinite(y):
                axes.plot([x], [y], "o", color=_MARK, markersize=7, clip_on=False, zorder=4)
                text = f"● held-out {words} {y:.3f}"  # above the axes, where no curve is
                at: dict[str, Any] = {"ha": "right" if side else "left", "va": "bottom", "transform": axes.transAxes}
                axes.text(side, 1.02, text, color=_MARK, fontweight="bold", **at)

    return svg("loss", "Training loss by step, held-out loss before and after", draw)


def speed_chart(record: RunRecord) -> str:
    """Draw the tokens per second of each logged step, and their median."""
    timed = [step for step in record.steps if step["seconds"] > 0]
    timed = timed[1:] or timed  # the first has the warm-up; the median leaves it out too

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter

        rates = [step["tokens"] / step["seconds"] for step in timed]
        _curve(axes, [step["step"] for step in timed], rates)
        if record.tokens_per_second is not None:
            axes.axhline(record.tokens_per_second, color=_MARK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_ylim(bottom=0, top=1.15 * max(rates, default=1.0))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    return svg("speed", "Tokens per second by step, with their median", draw)


def step_chart(record: RunRecord, name: str, title: str, smooth: bool = False) -> str:
    """Draw a figure that each logged step has by `name`, one that scatters smoothed; "" where none has it."""
    points = [(step["step"], step[name]) for step in record.steps if name in step and math.isfinite(step[name])]
    if not points:
        return ""

    def draw(axes: Axes) -> None:
        steps, values = zip(*points, strict=True)
        _curve(axes, steps, values, smooth)
        axes.set_ylim(bottom=0, top=1.1 * max(value for _, value in points) or 1)

    return svg(name.replace("_", "-"), title, draw)


def losses_chart(records: Sequence[RunRecord]) -> str:
    """Draw the smoothed training losses of several runs, with the last held-out loss of each."""

    def draw(axes: Axes) -> None:
        for number, record in enumerate(records):
            colour = RUNS[number]
            steps, losses = [step["step"] for step in record.steps], [step["loss"] for step in record.steps]
            axes.plot(steps, smoothed(losses), color=colour, linewidth=2, label=str(number + 1))
            after = record.heldout["after"]
            if steps and after is not None and math.isfinite(after):
                axes.plot([record.kept_step or steps[-1]], [after], "o", color=colour, markersize=7, clip_on=False)

    return svg("losses", "Smoothed training loss by step of each run, held-out loss after it marked", draw)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the moving mean over a twentieth of the values."""
    reach = len(values) // 40
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(near) / len(near) for near in around]


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float], smooth: bool = True) -> None:
    """Plot few points as they are; many, if they scatter, faintly under their moving mean."""
    if len(y) < SMOOTHED_FROM or not smooth:
        axes.plot(x, y, color=_LINE, linewidth=2, marker="o" if len(y) < 12 else None, markersize=4)
        return
    axes.plot(x, y, color=_FAINT, linewidth=1)
    axes.plot(x, smoothed(y), color=_LINE, linewidth=2)


def svg(name: str, title: str, draw: Callable[[Axes], None]) -> str:
    """Return a chart as an SVG element for an HTML page; `name` keeps its ids apart from the other charts'."""
    from markupsafe import Markup

    try:
        import matplotlib.style
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except (ImportError, ValueError) as error:  # built for another NumPy; a script's MPLBACKEND that isn't installed
        raise ConfigError(
            f"matplotlib, which draws reports, can't be imported ({error})",
            "install it again, or set report.html=false and unset MPLBACKEND if that is what is wrong",
        ) from error
    with matplotlib.style.context(["default", _STYLE]):  # a user's own settings may ask for LaTeX, or other colours
        figure = Figure(figsize=(6.6, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.margins(x=0.02)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows them; the page names no address at all
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)
