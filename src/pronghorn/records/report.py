"""A run record as one HTML page."""

from __future__ import annotations

import math
from pathlib import Path

from jinja2 import UndefinedError

from pronghorn.data.overflow import MUCH, lost_documents
from pronghorn.errors import DataError, PronghornError
from pronghorn.records.charts import SMOOTHED_FROM, loss_chart, speed_chart, step_chart
from pronghorn.records.page import write_page
from pronghorn.records.record import RunRecord
from pronghorn.text import counted, duration

FILE_NAME = "report.html"


def write_report(record: RunRecord, folder: str | Path, refresh: int | None = None) -> Path:
    """Render `record` into `folder/report.html` (one file, a few ten kB) and return its path.

    Args:
        refresh: seconds after which the page reloads itself, of a run that still trains.
    """
    import yaml

    smooth = "smoothed, " if len(record.steps) >= SMOOTHED_FROM else ""
    return write_page(
        Path(folder) / FILE_NAME,
        Path(__file__).with_name("report.html.j2"),
        record=record,
        headlines=headlines(record, live=refresh is not None),
        refresh=refresh,
        warnings=warnings(record),
        name=Path(str(record.recipe.get("train", {}).get("output", ""))).name,
        charts=[
            (caption, note, chart)
            for caption, note, chart in (
                ("Loss", f"by step, {smooth}held-out marked", loss_chart(record)),
                ("Tokens per second", "first log left out, median dashed", speed_chart(record)),
                ("Learning rate", "by step", step_chart(record, "learning_rate", "Learning rate by step")),
                ("Gradient norm", "before clipping", step_chart(record, "grad_norm", "Gradient norm by step", True)),
                ("Peak memory", "GiB so far", step_chart(record, "peak_memory_gib", "Peak memory in GiB by step")),
            )
            if chart
        ],
        packing=_packing_table(record),
        recipe=yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True),
    )


def is_final(page: Path) -> bool:
    """Tell whether the page is there and isn't one that was written during training."""
    return page.exists() and 'http-equiv="refresh"' not in page.read_text(encoding="utf-8", errors="replace")


def rewrite_report(path: Path) -> Path:
    """Render the `run.json` at `path`, a file or the folder that holds it, into `report.html` beside it.

    Returns:
        The report's path.
    Raises:
        DataError: no such file, or no whole record.
    """
    record = RunRecord.read(path)
    folder = path if path.is_dir() else path.parent
    try:
        return write_report(record, folder)
    except PronghornError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, UndefinedError) as error:
        raise DataError(f"the record in {folder} is not whole ({error!r})", "restore run.json or run again") from error


def headlines(record: RunRecord, live: bool = False) -> list[tuple[str, str, str]]:
    """Return (label, figure, note) of each card; of a run that trains the last evaluation stands for the one after."""
    before, after = record.heldout["before"], record.heldout["after"]
    if after is None and record.evaluations:
        after = record.evaluations[-1]["loss"]
    cards = []
    if before is not None and after is not None:
        note = f"over {counted(int(record.heldout['rows'] or 0), 'row')}, nats per supervised token"
        change = (after - before) / before if before else math.nan
        if math.isfinite(change):
            note = f"{change:+.1%} ".replace("-", "−") + note
        if record.kept_step is not None:
            note += f"; the result is of step {record.kept_step:,}, where it was lowest"
        cards.append(("Held-out loss", f"{before:.4f} → {after:.4f}", note))
    elif record.steps:
        first, last = record.steps[0]["loss"], record.steps[-1]["loss"]
        note = "no held-out data in this run" if before is None else f"the held-out loss was {before:.4f} before"
        cards.append(("Training loss", f"{first:.4f} → {last:.4f}", note))
    speed = record.tokens_per_second
    packing = record.packing
    resumed = f"; taken up again at step {', '.join(map(str, record.resumed_at))}" if record.resumed_at else ""
    cards += [
        ("Speed", "–" if speed is None else f"{speed:,.0f} tokens/s", "median over steps, padding not counted"),
        ("Packing", f"{packing['efficiency']:.1%}", f"of the rows is text; {packing['ceiling']:.1%} is the ceiling")
        if record.packs
        else ("Packing", "off", f"packed rows would be {packing['efficiency']:.1%} text"),
        (
            "Time",
            duration(record.seconds),
            f"{counted(int(record.steps[-1]['step']) if record.steps else 0, 'step')}"
            + (" so far" if live else f", limited by {record.stopped}")
            + resumed,
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


ROSE = 0.01
"""The share by which a held-out loss is higher after a training that made the model worse."""


def warnings(record: RunRecord) -> list[str]:
    """Say what looks wrong: more than a hundredth of the documents dropped or cut, a held-out loss that rose."""
    packing, found = record.packing, list[str]()
    shares = packing.get("dropped_share", 0.0), packing.get("cut_share", 0.0)
    if max(shares) > MUCH:
        lost = lost_documents(packing["dropped"], shares[0], packing["truncated"], shares[1])
        found.append(f"{lost}: see data.overflow")
    before, after = record.heldout["before"], record.heldout["after"]
    if before is not None and after is not None and math.isfinite(before) and not after <= before * (1 + ROSE):
        found.append(
            f"The held-out loss rose from {before:.4f} to {after:.4f}: lower train.learning_rate, set train.eval_steps "
            "(the best weights are kept), or look at the data"
        )
    return found


def _short(count: float) -> str:
    """Return 1,234,567 as 1.2M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def _packing_table(record: RunRecord) -> list[tuple[str, str]]:
    """Return names and figures in reading order; what a record doesn't hold is left out."""
    packing, would = record.packing, "" if record.packs else ", if packed"
    names = {
        "documents": "Documents",
        "dropped": "Documents dropped",
        "truncated": "Documents truncated",
        "tokens": "Tokens",
        "labelled_tokens": "Supervised tokens",
        "rows": f"Rows{would}",
        "row_tokens": "Tokens of a row",
    }
    table = [(label, f"{packing[name]:,}") for name, label in names.items() if name in packing]
    return [
        *table,
        (f"Rows filled{would}", f"{packing['efficiency']:.2%}"),
        ("Most any packing could fill", f"{packing['ceiling']:.2%}"),
    ]
