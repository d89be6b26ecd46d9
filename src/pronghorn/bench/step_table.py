"""The table that `pronghorn bench step` ends with: a column a contender, a row a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pronghorn.bench.record import Result
from pronghorn.bench.timing import spread

WITHHELD = "–"


def render(results: Sequence[Result]) -> RenderableType:
    """The table, then why a contender failed, and what must be known to judge the figures."""
    work, extra = results[0].workload, results[0].extra
    title = (
        f"{work.shape}, {work.method}, {work.tokens} tokens a step ({work.lengths}, {work.labelled_share:.0%} "
        f"labelled), recompute {extra['recompute']}, {results[0].device}"
    )
    if extra["on_cpu"]:
        title += "\nOn the CPU: says that it works, not how fast a GPU is"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(escape(result.contender), justify="right")
    table.add_row("gate", *("[green]green[/]" if result.gate["green"] else "[red]FAILED[/]" for result in results))
    for name, figure in _FIGURES.items():
        table.add_row(name, *(_cell(result, figure) for result in results))
    lines: list[str] = []
    for result in results:
        lines += [f"[red]{escape(result.contender)}:[/] {escape(reason)}" for reason in result.gate.get("reasons", [])]
        lines += [f"[dim]{escape(f'{result.contender}: {note}')}[/]" for note in result.extra["notes"]]
    return Group(table, *lines)


def _cell(result: Result, figure: Callable[[Result], str]) -> str:
    """A figure, or a dash where it wasn't measured or is withheld."""
    if not result.gate["green"] or not result.timings_ms:
        return WITHHELD
    try:
        return figure(result)
    except KeyError:
        return WITHHELD


def _milliseconds(part: str) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        median, least, most = spread(result.timings_ms[part])
        return f"{median:.1f} ({least:.1f} to {most:.1f})"

    return cell


def _ratio(result: Result) -> str:
    median, least, most = result.extra["beside"]["step_ratio"]
    return f"{median:.2f} x ({least:.2f} to {most:.2f})"


def _gigabytes(kind: str) -> Callable[[Result], str]:
    return lambda result: f"{result.memory_bytes[kind] / 2**30:.2f}"


def _extra(*keys: str, form: str) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        value: Any = result.extra
        for key in keys:
            value = value[key]
        return format(value, form)

    return cell


_FIGURES: dict[str, Callable[[Result], str]] = {
    "forward, ms": _milliseconds("forward"),
    "backward, ms": _milliseconds("backward"),
    "step, ms (min to max)": _milliseconds("step"),
    "step, against the first": _ratio,
    "tokens/s": _extra("tokens_per_s", "real", form=",.0f"),
    "supervised tokens/s": _extra("tokens_per_s", "supervised", form=",.0f"),
    "MFU at 4N": _extra("mfu", "4N", form=".1%"),
    "MFU at 6N": _extra("mfu", "6N", form=".1%"),
    "resting memory, GiB": _gigabytes("resting"),
    "peak memory, GiB": _gigabytes("peak"),
    "launches a step": lambda result: f"{result.counts['launches']:,}",
    "synchronisations a step": lambda result: f"{result.counts['syncs']:,}",
    "import, s": _extra("import_s", form=".1f"),
    "first step, s": _extra("first_step_s", form=".1f"),
}
