"""Several runs on one page: their losses, speeds, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronghorn.errors import ConfigError
from pronghorn.records.charts import RUNS, losses_chart
from pronghorn.records.page import check_page, write_page
from pronghorn.records.record import RunRecord
from pronghorn.text import duration, short


def differing_settings(recipes: Sequence[dict[str, dict[str, Any]]]) -> list[tuple[str, list[str]]]:
    """Return each setting that isn't the same in all recipes, with its value in each; the output folder aside."""
    keys = dict.fromkeys((section, key) for recipe in recipes for section, table in recipe.items() for key in table)
    rows = []
    for section, key in keys:
        values = [recipe.get(section, {}).get(key, "–") for recipe in recipes]
        if (section, key) != ("train", "output") and any(value != values[0] for value in values):
            rows.append((f"{section}.{key}", [short(value) if value is not None else "null" for value in values]))
    return rows


def figures(record: RunRecord) -> list[tuple[str, str]]:
    """Return what is compared of a run."""
    before, after = record.heldout["before"], record.heldout["after"]
    speed, peak = record.tokens_per_second, record.peak_memory_bytes
    return [
        ("Held-out loss before", "–" if before is None else f"{before:.4f}"),
        ("Held-out loss after", "–" if after is None else f"{after:.4f}"),
        ("Last training loss", f"{record.steps[-1]['loss']:.4f}" if record.steps else "–"),
        ("Steps", f"{record.steps[-1]['step']:,}" if record.steps else "0"),
        ("Tokens/s", "–" if speed is None else f"{speed:,.0f}"),
        ("Packing", f"{record.packing['efficiency']:.1%}" if record.packs else "off"),
        ("Documents dropped", f"{record.packing.get('dropped', 0):,}"),
        ("Peak memory", "–" if peak is None else f"{peak / 2**30:.1f} GiB"),
        ("Time", duration(record.seconds)),
        ("Device", record.device),
    ]


def write_comparison(runs: Sequence[Path], page: Path) -> Path:
    """Write one page of the runs and return its path.

    Raises:
        ConfigError: more runs than there are colours, or no page can be written there. DataError: a run that isn't
            finished.
    """
    if len(runs) > len(RUNS):
        raise ConfigError(f"{len(runs)} runs to compare", f"give at most {len(RUNS)}")
    check_page(page)
    records = [RunRecord.read(run) for run in runs]
    names = [(run if run.is_dir() else run.parent).as_posix() for run in runs]
    columns = [dict(figures(record)) for record in records]
    return write_page(
        page,
        Path(__file__).with_name("compare.html.j2"),
        headlines=[
            (f"{number}. {name}", column["Held-out loss after"], "held-out loss after")
            for number, (name, column) in enumerate(zip(names, columns, strict=True), 1)
        ],
        names=names,
        chart=losses_chart(records),
        figures=[(label, [column[label] for column in columns]) for label in columns[0]],
        settings=differing_settings([record.recipe for record in records]),
    )
