"""Charts of run records as SVG elements for an HTML page, in the page's own colours; written as text, by no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pronghorn.train.record import RunRecord

RUNS = ("--run-1", "--run-2", "--run-3", "--run-4", "--run-5", "--run-6")
"""Colours of runs that are compared: variables of their page."""
SMOOTHED_FROM = 60
"""Points of a curve from which on its moving mean is drawn, too."""
_WIDTH, _HEIGHT = 480, 270
_TOP, _RIGHT, _BOTTOM = 8, 24, 42
"""Room around the axes, in the chart's own units; on the left it goes by the labels."""
_DIGIT = 7
"""The most that a letter of a label is wide: of 12 units high text, a little larger on narrow pages."""
_MOST = 300
"""Points of a curve from which on only the lowest and the highest of each so many neighbours are drawn."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """Points that a line joins, or of which each is a dot; those that aren't finite leave a gap."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str = "--accent"
    width: float = 2
    dot: float = 0
    """Radius of the points, 0 for none."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points that are finite."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]


def loss_chart(record: RunRecord) -> str:
    """Draw the training loss, the evaluations, and the held-out loss before and after."""
    steps = [step["step"] for step in record.steps]
    curves = _curves(steps, [step["loss"] for step in record.steps])
    if record.evaluations:
        done, losses = zip(*((entry["step"], entry["loss"]) for entry in record.evaluations), strict=True)
        curves.append(_Curve(done, losses, "--mark", 1, 2.5))
    ends, words = (steps[0], steps[-1]) if steps else (0, 1), ["", ""]
    for side, when in enumerate(("before", "after")):
        loss = record.heldout[when]
        if loss is not None and math.isfinite(loss):
            curves.append(_Curve([ends[side]], [loss], "--mark", 0, 4))
            words[side] = f"● held-out {when} {loss:.3f}"  # above the axes, where no curve is
    return _chart("Training loss by step, held-out loss before and after", curves, words=words, marks=record.resumed_at)


def speed_chart(record: RunRecord) -> str:
    """Draw the tokens per second of each logged step, and their median."""
    timed = [step for step in record.steps if step["seconds"] > 0]
    timed = timed[1:] or timed  # the first has the warm-up; the median leaves it out too
    rates = [step["tokens"] / step["seconds"] for step in timed]
    curves = _curves([step["step"] for step in timed], rates)
    limits = 0, 1.15 * max(rates, default=0) or 1
    return _chart("Tokens per second by step, with their median", curves, limits, record.tokens_per_second)


def step_chart(record: RunRecord, name: str, title: str, smooth: bool = False) -> str:
    """Draw a figure that each logged step has by `name`, one that scatters smoothed; "" where none has it."""
    points = [(step["step"], step[name]) for step in record.steps if name in step and math.isfinite(step[name])]
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    curves = _curves(steps, values) if smooth else [_Curve(steps, values, dot=2.5 if len(values) < 12 else 0)]
    return _chart(title, curves, (0, 1.1 * max(values) or 1))


def losses_chart(records: Sequence[RunRecord]) -> str:
    """Draw the smoothed training losses of several runs, with the last held-out loss of each."""
    curves = []
    for number, record in enumerate(records):
        colour = RUNS[number % len(RUNS)]
        steps, losses = [step["step"] for step in record.steps], [step["loss"] for step in record.steps]
        curves.append(_Curve(steps, smoothed(losses), colour))
        after = record.heldout["after"]
        if steps and after is not None:
            curves.append(_Curve([steps[-1]], [after], colour, 0, 4))
    return _chart("Smoothed training loss by step of each run, held-out loss after it marked", curves)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the moving mean over a twentieth of the values."""
    reach = len(values) // 40
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(near) / len(near) for near in around]


def _curves(x: Sequence[float], y: Sequence[float]) -> list[_Curve]:
    """Return the curve of few points as they are; of many faintly, under their moving mean."""
    if len(y) < SMOOTHED_FROM:
        return [_Curve(x, y, dot=2.5 if len(y) < 12 else 0)]
    return [_Curve(x, y, "--accent-faint", 1), _Curve(x, smoothed(y))]


def _chart(
    title: str,
    curves: Sequence[_Curve],
    limits: tuple[float, float] | None = None,
    level: float | None = None,
    words: Sequence[str] = (),
    marks: Sequence[float] = (),
) -> str:
    """Return a chart over training steps as an SVG element.

    Args:
        limits: of the axis upwards; without them it holds the points.
        level: where a dashed line lies.
        words: what stands above the axes, on the left and on the right.
        marks: steps at which dashed lines stand.
    """
    from markupsafe import Markup

    points = [point for curve in curves for point in curve.points]
    low, high = limits or _around([y for _, y in points])
    first, last = (min(x for x, _ in points), max(x for x, _ in points)) if points else (0, 1)
    if first == last:
        first, last = first - 1, last + 1
    upwards, onwards = ticks(low, high, 6), [step for step in ticks(first, last, 7) if step == int(step)]
    labels = _labels(upwards)
    left = 10 + _DIGIT * max(map(len, labels), default=0)
    top, right, bottom = _TOP + (18 if any(words) else 0), _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[str, str]:
        across = left + 6 + (right - left - 12) * (x - first) / (last - first)
        return f"{across:.1f}", f"{bottom - (bottom - top) * (y - low) / (high - low):.1f}"

    parts = []
    for value, label in zip(upwards, labels, strict=True):
        y = at(first, value)[1]
        parts.append(_line(left, y, right, y, "--rule"))
        parts.append(_text(left - 6, float(y) + 4, label, "end"))
    parts.append(_line(left, bottom, right, bottom, "--rule"))
    parts += [_text(at(step, low)[0], bottom + 17, f"{step:,.0f}", "middle") for step in onwards]
    parts.append(_text((left + right) / 2, _HEIGHT - 5, "step", "middle"))
    parts += [_line(at(x, low)[0], top, at(x, low)[0], bottom, "--muted", "2 2") for x in marks if first <= x <= last]
    for curve in curves:
        colour = f"stroke: var({curve.colour}); stroke-width: {curve.width}"
        if path := _path([at(x, y) if math.isfinite(y) else None for x, y in _thinned(curve)]) if curve.width else "":
            parts.append(f'<path d="{path}" style="fill: none; {colour}; stroke-linejoin: round"/>')
        for x, y in (at(*point) for point in curve.points) if curve.dot else ():
            parts.append(f'<circle cx="{x}" cy="{y}" r="{curve.dot}" style="fill: var({curve.colour})"/>')
    if level is not None:
        parts.append(_line(left, at(first, level)[1], right, at(first, level)[1], "--mark", "4 3"))
    for word, side, anchor in zip(words, (left, right), ("start", "end"), strict=False):
        parts.append(_text(side, 15, word, anchor, "font-weight: 600; fill: var(--mark)"))
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>')


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many round numbers from `low` to `high`, steps of 1, 2 or 5 times a power of ten apart."""
    exponent = math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20):
        every = factor * 10.0**exponent
        start, end = math.ceil(low / every - 1e-9), math.floor(high / every + 1e-9)
        if end - start < most:
            break
    return [round(number * every, max(0, -exponent)) for number in range(start, end + 1)]


def _labels(values: Sequence[float]) -> list[str]:
    """Return numbers with as many digits as tell them apart, learning rates as people write them: 1.5e-4."""
    if 0 < max(map(abs, values), default=0) < 2e-3:
        parts = [f"{value:.10e}".split("e") for value in values]
        return [f"{float(number):.10g}e{int(power)}" if float(number) else "0" for number, power in parts]
    digits = next(n for n in range(16) if all(abs(round(v, n) - v) <= 1e-9 * abs(v) for v in values))
    return [f"{value:,.{digits}f}".replace("-", "−") for value in values]


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Return limits a little outside of the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _thinned(curve: _Curve) -> list[tuple[float, float]]:
    """Return a curve's points in order; of very many only the lowest and the highest of each stretch."""
    points = list(zip(curve.x, curve.y, strict=True))
    if len(points) <= 2 * _MOST:
        return points
    size = math.ceil(len(points) / _MOST)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        near = points[start : start + size]
        ends = {min(near, key=lambda point: point[1]), max(near, key=lambda point: point[1])}
        kept += [point for point in near if point in ends or not math.isfinite(point[1])]
    return kept


def _path(points: Sequence[tuple[str, str] | None]) -> str:
    """Return the path through points, interrupted where there is none."""
    drawn, parts = False, []
    for point in points:
        if point is not None:
            parts.append(f"{'L' if drawn else 'M'}{point[0]} {point[1]}")
        drawn = point is not None
    return "".join(parts)


def _line(x1: Any, y1: Any, x2: Any, y2: Any, colour: str, dashes: str = "") -> str:
    dashed = f'; stroke-dasharray: {dashes}"' if dashes else '"'
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" style="stroke: var({colour}){dashed}/>'


def _text(x: Any, y: Any, words: str, anchor: str, style: str = "") -> str:
    from markupsafe import escape

    styled = f' style="{style}"' if style else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{styled}>{escape(words)}</text>' if words else ""
