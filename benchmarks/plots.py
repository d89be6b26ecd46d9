"""Draw what a step takes in time, and in memory, as SVG.

The same results give the same bytes, so that an outdated figure can be told. The background is clear and the colours
are of middle brightness: they can be read on white and on black pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchmarks.record import Result
from benchmarks.report import cases_of
from pronghorn.errors import UnsupportedError

STAMP = "benchmarks.report"
"""Creator in every figure's metadata: what carries it was written here, and goes when no result needs it any more."""
INK = "#768088"
COLOURS = ("#3b82e0", "#e08a2e", "#2fa37c", "#c2609e", "#8f7ae0", "#c9a227", "#d4564d", "#4aa5c4")
STYLE: dict[str, Any] = {
    "svg.hashsalt": STAMP,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
WORDS = {"tokens": "{} tokens", "recompute": "recompute {}", "supervised": "{} supervised", "seed": "seed {}"}
FIELDS = ["method", "tokens", "recompute", "lengths", "supervised", "seed"]


def draw(table: pd.DataFrame) -> dict[str, bytes]:
    """Draw every figure, by its file's name: of each device the times, of each model there memory and time.

    Candidates whose figures are withheld are not drawn.

    Raises:
        UnsupportedError: matplotlib isn't installed.
    """
    colours, figures = _colours(table[table["kind"] == "step"]["candidate"]), {}
    with _style():
        for device, cases in cases_of(table, "step").items():
            every = pd.concat(cases)
            slug = _slug(every["result"].iloc[0].device)
            if every["shown"].any():
                figures[f"step-{slug}.svg"] = _svg(_times(device, every, colours))
            for model, rows in every.groupby("model", sort=False):
                points = rows[rows["shown"] & rows["peak"].notna()]
                if not points.empty:
                    label = _differences(rows, [field for field in FIELDS if field != "recompute"])
                    points = points.assign(line=points["candidate"] + label, mode=points["recompute"])
                    figure = _memory_time(f"{model}, {device}", points, colours)
                    figures[f"memory-time-{slug}-{_slug(str(model))}.svg"] = _svg(figure)
    return figures


def memory_time(title: str, results: Sequence[Result]) -> bytes:
    """Draw time over memory of results of `benchmarks.step` and `.memory_time`; a candidate's limits are one line.

    Raises:
        UnsupportedError: matplotlib isn't installed.
    """
    rows = []
    for result in results:
        mode = result.extra["recompute"]
        limited = "," in mode
        name = result.candidate.removesuffix(f", {mode}") + ", limited" * limited
        peak = result.memory_bytes["peak"] / 2**30
        rows.append((name, name, peak, result.median("step"), "" if limited else mode))
    points = pd.DataFrame(rows, columns=["line", "candidate", "peak", "step", "mode"])
    with _style():
        return _svg(_memory_time(title, points, _colours(points["candidate"])), "memory_time.py")


def _style() -> Any:
    """Return the style of every figure, with nothing of the user's own."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise UnsupportedError("figures need matplotlib", "pip install matplotlib") from error
    return style.context(["default", STYLE])


def _colours(names: pd.Series) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _svg(figure: Any, creator: str = STAMP) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": creator})
    return written.getvalue()


def _differences(rows: pd.DataFrame, fields: Sequence[str]) -> pd.Series:
    """Return for each row what tells its case from others of its model, as ", field, field"."""
    text = pd.Series("", index=rows.index)
    for field in fields:
        if rows[field].nunique() > 1:
            text += ", " + rows[field].map(WORDS.get(field, "{}").format)
    return text


def _times(title: str, rows: pd.DataFrame, colours: dict[str, str]) -> Any:
    """Draw bars of a step's median: a panel a model (each with its own scale), a group of bars a case."""
    from matplotlib.figure import Figure

    panels = []
    for model, of_model in rows.groupby("model", sort=False):
        bars = of_model.assign(label=of_model["candidate"] + _differences(of_model, FIELDS))
        bars["group"] = bars.groupby("case", sort=False).ngroup()
        if bars["shown"].any():
            panels.append((model, bars[bars["shown"]]))
    heights = [len(bars) + bars["group"].nunique() for _, bars in panels]
    # rounded, since from Python 3.12 on sums of numbers differ in their last digit
    figure = Figure(figsize=(7.6, round(0.3 + sum(0.3 + 0.24 * height for height in heights), 6)))
    figure.suptitle(f"Time of a step, {title}", fontsize=10, x=0.01, ha="left")
    every_axes = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (model, bars) in zip(every_axes, panels, strict=True):
        places = [i + 0.7 * group for i, group in enumerate(bars["group"])]
        drawn = axes.barh(places, bars["step"], color=[colours[name] for name in bars["candidate"]])
        ratios = [f", {ratio[0]:.2f} ×" if ratio else "" for ratio in bars["ratio"]]
        axes.bar_label(drawn, [f"{ms:.1f} ms{text}" for ms, text in zip(bars["step"], ratios, strict=True)], padding=4)
        axes.set_yticks(places, list(bars["label"]))
        axes.set_title(model)
        axes.set_xlim(0, 1.4 * bars["step"].max())
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
    return figure


def _memory_time(title: str, points: pd.DataFrame, colours: dict[str, str]) -> Any:
    """Draw a step's time over its peak memory, a candidate's ways to recompute joined. Down and left is better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2))
    axes = figure.subplots()
    for line, group in points.groupby("line", sort=False):
        group = group.sort_values(["peak", "step"])
        colour = colours[group["candidate"].iloc[0]]
        axes.plot(group["peak"], group["step"], "o-", color=colour, linewidth=1.2, markersize=5, label=line)
        for i, point in enumerate(group.itertuples()):
            side, ends = (-6, "right") if i == 0 and len(group) > 1 else (6, "left")
            text = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": colour}
            axes.annotate(point.mode, (point.peak, point.step), xytext=(side, 0), ha=ends, **text)
    axes.set_xlim(*_limits(points["peak"]))
    axes.set_ylim(*_limits(points["step"]))
    figure.legend(loc="outside lower center", ncols=2, labelcolor="linecolor", fontsize=8)
    axes.set_title(title)
    axes.set_xlabel("peak memory, GiB (at the points: recompute)")
    axes.set_ylabel("step, ms")
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    return figure


def _limits(values: pd.Series) -> tuple[float, float]:
    """Return an axis that is wide enough for noise not to look large, though it doesn't begin at zero."""
    middle, span = (values.max() + values.min()) / 2, max(values.max() - values.min(), 0.4 * values.max())
    return middle - 0.65 * span, middle + 0.65 * span
