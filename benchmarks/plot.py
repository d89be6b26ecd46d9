"""The README's figure, from the committed results: `python -m benchmarks.plot`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "packed-vs-padded-smollm2.json"
FIGURE = ROOT / "docs" / "packed-vs-padded.svg"


def draw(results: list[dict[str, Any]]) -> Figure:
    """Real tokens per second and peak memory of packed and padded batches; red gates are not drawn."""
    results = [result for result in results if result["gate"]["green"]]
    names = [result["candidate"].split(", ")[1] for result in results]
    panels = (
        ("real tokens per second", [statistics.median(r["extra"]["real_tokens_per_s"]) for r in results], "{:,.0f}"),
        ("peak memory, GiB", [r["memory_bytes"]["peak"] / 2**30 for r in results], "{:.1f}"),
    )
    figure = Figure(figsize=(7.6, 2.1), layout="constrained")
    for axes, (title, values, form) in zip(figure.subplots(1, 2), panels, strict=True):
        bars = axes.barh(names, values, color=["#1f5fc4", "#b9c3d3"], height=0.62)
        axes.bar_label(bars, [form.format(value) for value in values], padding=4)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlim(0, 1.25 * max(values))
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
    return figure


def main() -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    draw(json.loads(RESULTS.read_text())).savefig(FIGURE, format="svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
