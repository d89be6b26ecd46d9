"""The README's figures as SVG: what a step takes in time, and in memory.

The same results give the same bytes, so that an outdated figure can be told. The background is clear and the colours
are of middle brightness: they can be read on white and on black pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from pronghorn.bench.record import Result
from pronghorn.bench.report import Case, by_device, contenders_of
from pronghorn.errors import UnsupportedError

STAMP = "pronghorn bench report"
"""Creator in every figure's metadata: what carries it was written here, and goes when no result needs it any more."""
INK = "#768088"
COLOURS = ("#3b82e0", "#e08a2e", "#2fa37c", "#c2609e", "#8f7ae0", "#c9a227", "#d4564d", "#4aa5c4")
_STYLE: dict[str, Any] = {
    "svg.hashsalt": STAMP,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)


def draw(cases: Sequence[Case]) -> dict[str, bytes]:
    """Every figure by its file's name: of each device the times, of each model there memory and time.

    Contenders whose figures are withheld are not drawn.

    Raises:
        UnsupportedError: matplotlib isn't installed.
    """
    names = contenders_of(case for case in cases if case.kind == "step")
    colours, figures = _colours(names), {}
    with _style():
        for device, group in by_device(cases, "step").items():
            models: dict[str, list[Case]] = {}
            for case in group:
                if any(found.shown for found in case.by_contender.values()):
                    models.setdefault(case.model, []).append(case)
            slug = _slug(group[0].any.result.device)
            if models:
                figures[f"step-{slug}.svg"] = _svg(_times(device, models, colours))
            for model, of_model in models.items():
                if lines := _lines(of_model):
                    figure = _memory_time(f"{model}, {device}", lines, colours)
                    figures[f"memory-time-{slug}-{_slug(model)}.svg"] = _svg(figure)
    return figures


def memory_time(title: str, results: Sequence[Result]) -> bytes:
    """Time over memory of results of `bench step` and `benchmarks/memory_time.py`: a contender's limits are one line.

    Raises:
        UnsupportedError: matplotlib isn't installed.
    """
    lines: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for each in results:
        mode = each.extra["recompute"]
        limited = "," in mode
        name = each.contender.removesuffix(f", {mode}") + ", limited" * limited
        point = each.memory_bytes["peak"] / 2**30, each.median("step"), "" if limited else mode
        lines.setdefault((name, ""), []).append(point)
    lines = {key: sorted(line) for key, line in lines.items()}
    with _style():
        return _svg(_memory_time(title, lines, _colours([name for name, _ in lines])), "memory_time.py")


def _style() -> Any:
    """Of every figure; nothing of the user's own."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise UnsupportedError("figures need matplotlib", "pip install 'pronghorn[report]'") from error
    return style.context(["default", _STYLE])


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _svg(figure: Any, creator: str = STAMP) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": creator})
    return written.getvalue()


def _difference(case: Case, among: Sequence[Case], recompute: bool = True) -> str:
    """What tells a case from others of its model, recompute apart if that is told elsewhere."""
    fields = [
        (each.any.method, f"{work.tokens:,} tokens", f"recompute {each.any.recompute}" if recompute else "",
         work.lengths, f"{work.labelled_share:.0%} labelled", f"seed {work.seed}")
        for each in (case, *among) for work in [each.any.result.workload]
    ]  # fmt: skip
    return ", ".join(own for own, *others in zip(*fields, strict=True) if {own} != {own, *others})


def _times(title: str, models: dict[str, list[Case]], colours: dict[str, str]) -> Any:
    """Bars of a step's median: a panel a model (each with its own scale), a group a case."""
    from matplotlib.figure import Figure

    bars = {
        model: [(i, case, found) for i, case in enumerate(cases) for found in case.by_contender.values() if found.shown]
        for model, cases in models.items()
    }
    heights = [len(found) + len(models[model]) for model, found in bars.items()]
    figure = Figure(figsize=(7.6, 0.3 + sum(0.3 + 0.24 * height for height in heights)))
    figure.suptitle(f"Time of a step, {title}", fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(len(bars), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (model, shown) in zip(panels, bars.items(), strict=True):
        places = [row + 0.7 * group for row, (group, *_) in enumerate(shown)]
        medians = [found.result.median("step") for *_, found in shown]
        drawn = axes.barh(places, medians, color=[colours[found.result.contender] for *_, found in shown])
        ratios = [found.result.extra.get("beside", {}).get("step_ratio") for *_, found in shown]
        texts = [f"{m:.1f} ms" + (f", {r[0]:.2f} ×" if r else "") for m, r in zip(medians, ratios, strict=True)]
        axes.bar_label(drawn, texts, padding=4)
        names = [(found.result.contender, _difference(case, models[model])) for _, case, found in shown]
        axes.set_yticks(places, [", ".join(filter(None, name)) for name in names])
        axes.set_title(model)
        axes.set_xlim(0, 1.4 * max(medians))
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
    return figure


def _lines(cases: Sequence[Case]) -> dict[tuple[str, str], list[tuple[float, float, str]]]:
    """(GiB, ms, recompute) from little memory to much, by contender and by what else differs."""
    lines: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for case in cases:
        rest = _difference(case, cases, recompute=False)
        for name, found in case.by_contender.items():
            if found.shown and "peak" in found.result.memory_bytes:
                point = (found.result.memory_bytes["peak"] / 2**30, found.result.median("step"), found.recompute)
                lines.setdefault((name, rest), []).append(point)
    return {key: sorted(line) for key, line in lines.items()}


def _memory_time(
    title: str, lines: dict[tuple[str, str], list[tuple[float, float, str]]], colours: dict[str, str]
) -> Any:
    """A step's time over its peak memory, a contender's ways to recompute joined. Down and left is better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2))
    axes = figure.subplots()
    for (name, rest), line in lines.items():
        memory, times, _ = zip(*line, strict=True)
        label = ", ".join(filter(None, (name, rest)))
        axes.plot(memory, times, "o-", color=colours[name], linewidth=1.2, markersize=5, label=label)
        for i, (x, y, mode) in enumerate(line):
            at_left = i == 0 and len(line) > 1
            place: dict[str, Any] = {"xytext": (-6, 0), "ha": "right"} if at_left else {"xytext": (6, 0)}
            axes.annotate(
                mode, (x, y), **place, textcoords="offset points", va="center", fontsize=8, color=colours[name]
            )
    every = [point for line in lines.values() for point in line]
    axes.set_xlim(*_limits([x for x, *_ in every]))
    axes.set_ylim(*_limits([y for _, y, _ in every]))
    figure.legend(loc="outside lower center", ncols=2, labelcolor="linecolor", fontsize=8)
    axes.set_title(title)
    axes.set_xlabel("peak memory, GiB (at the points: recompute)")
    axes.set_ylabel("step, ms")
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    return figure


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """An axis that is wide enough for noise not to look large, though it doesn't begin at zero."""
    middle, span = (max(values) + min(values)) / 2, max(max(values) - min(values), 0.4 * max(values))
    return middle - 0.65 * span, middle + 0.65 * span
