"""A run record as one HTML page."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import UndefinedError

from pronghorn.errors import DataError, PronghornError, UnsupportedError
from pronghorn.train.page import write_page
from pronghorn.train.progress import duration
from pronghorn.train.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "report.html"
# Colours no chart would use, exchanged for the page's own, so that a chart follows the reader's light or dark scheme.
_INK, _GRID, _LINE, _FAINT, _MARK = "#010101", "#010102", "#010103", "#010104", "#010105"
_VARIABLES = {_INK: "--muted", _GRID: "--rule", _LINE: "--accent", _FAINT: "--accent-faint", _MARK: "--mark"}
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


def check_report_dependencies() -> None:
    """Refuse to train (UnsupportedError) where the report can't be drawn afterwards."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "report.html needs matplotlib, which is not installed",
            "pip install 'pronghorn[report]', or set report.html: false",
        )


def write_report(record: RunRecord, folder: str | Path) -> Path:
    """Render `record` into `folder/report.html` (one file, a few ten kB) and return its path.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    check_report_dependencies()
    import yaml

    return write_page(
        Path(folder) / FILE_NAME,
        Path(__file__).with_name("report.html.j2"),
        record=record,
        headlines=headlines(record),
        loss_chart=_loss_chart(record),
        speed_chart=_speed_chart(record),
        packing=_packing_table(record.packing),
        recipe=yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True),
    )


def rewrite_report(path: Path) -> Path:
    """Render the `run.json` at `path`, a file or the folder that holds it, into `report.html` beside it.

    Returns:
        The report's path.
    Raises:
        DataError: no such file, or no whole record. UnsupportedError: matplotlib is missing.
    """
    record = RunRecord.read(path)
    folder = path if path.is_dir() else path.parent
    try:
        return write_report(record, folder)
    except PronghornError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, UndefinedError) as error:
        raise DataError(f"the record in {folder} is not whole ({error!r})", "restore run.json or run again") from error


def headlines(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return (label, figure, note) of each card."""
    before, after = record.heldout["before"], record.heldout["after"]
    cards = []
    if before is not None and after is not None:
        note = f"over {record.heldout['rows']:,} rows, nats per supervised token"
        change = (after - before) / before if before else math.nan
        if math.isfinite(change):
            note = f"{change:+.1%} ".replace("-", "−") + note
        cards.append(("Held-out loss", f"{before:.4f} → {after:.4f}", note))
    elif record.steps:
        first, last = record.steps[0]["loss"], record.steps[-1]["loss"]
        cards.append(("Training loss", f"{first:.4f} → {last:.4f}", "no held-out data in this run"))
    speed = record.tokens_per_second
    packing = record.packing
    resumed = f"; taken up again at step {', '.join(map(str, record.resumed_at))}" if record.resumed_at else ""
    cards += [
        ("Speed", "–" if speed is None else f"{speed:,.0f} tokens/s", "median over steps, padding not counted"),
        ("Packing", f"{packing['efficiency']:.1%}", f"of the rows is text; {packing['ceiling']:.1%} is the ceiling"),
        (
            "Time",
            duration(record.seconds),
            f"{record.steps[-1]['step'] if record.steps else 0:,} steps, limited by {record.stopped}" + resumed,
        ),
    ]
    peak = record.peak_memory_bytes
    if peak is None:
        cards.append(("Peak memory", "–", "measured on GPUs only"))
    else:
        cards.append(("Peak memory", f"{peak / 2**30:.1f} GiB", f"allocated on {record.device}"))
    if record.out_of_memory:
        steps = ", ".join(str(event["step"]) for event in record.out_of_memory)
        cards.append(("Out of memory", f"{len(record.out_of_memory)} ×", f"survived, at step {steps}"))
    skipped = record.steps[-1].get("skipped") if record.steps else 0
    if skipped:
        scale = record.steps[-1].get("loss_scale", math.nan)
        cards.append(("Skipped steps", f"{skipped:,}", f"gradients overflowed float16; the loss scale is {scale:,.6g}"))
    parameters, share = record.trainable["parameters"], record.trainable["share"]
    cards.append(("Trained", f"{_short(parameters)} parameters", f"{share:.2%} of the model"))
    return cards


def _short(count: float) -> str:
    """Return 1,234,567 as 1.2M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def _packing_table(packing: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and figures in reading order; what a record doesn't hold is left out."""
    names = {
        "documents": "Documents",
        "dropped": "Documents dropped",
        "truncated": "Documents truncated",
        "tokens": "Tokens",
        "labelled_tokens": "Supervised tokens",
        "rows": "Rows",
        "row_tokens": "Tokens of a row",
    }
    table = [(label, f"{packing[name]:,}") for name, label in names.items() if name in packing]
    return [
        *table,
        ("Rows filled", f"{packing['efficiency']:.2%}"),
        ("Most any packing could fill", f"{packing['ceiling']:.2%}"),
    ]


def _loss_chart(record: RunRecord) -> str:
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
        ends = (steps[0], steps[-1]) if steps else (0, 1)
        for x, y, side in ((ends[0], before, 1), (ends[1], after, -1)):
            if y is not None and math.isfinite(y):
                axes.plot([x], [y], "o", color=_MARK, markersize=7, clip_on=False, zorder=4)
                axes.annotate(
                    f"held-out {y:.3f}",
                    (x, y),
                    (9 * side, 9),
                    textcoords="offset points",
                    ha="left" if side > 0 else "right",
                    color=_MARK,
                    fontweight="bold",
                    zorder=5,
                )

    return _svg("loss", "Training loss by step, held-out loss before and after", draw)


def _speed_chart(record: RunRecord) -> str:
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

    return _svg("speed", "Tokens per second by step, with their median", draw)


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Plot few points as they are; many faintly, under their moving mean over a twentieth of them."""
    if len(y) < 60:
        axes.plot(x, y, color=_LINE, linewidth=2, marker="o" if len(y) < 12 else None, markersize=4)
        return
    reach = len(y) // 40
    around = [y[max(0, i - reach) : i + reach + 1] for i in range(len(y))]
    axes.plot(x, y, color=_FAINT, linewidth=1)
    axes.plot(x, [sum(near) / len(near) for near in around], color=_LINE, linewidth=2)


def _svg(name: str, title: str, draw: Any) -> str:
    """Return a chart as an SVG element for an HTML page; `name` keeps its ids apart from the other charts'."""
    import matplotlib
    from markupsafe import Markup
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_STYLE):
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
