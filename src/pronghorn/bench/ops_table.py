"""The table that `pronghorn bench ops` ends with: an op a table, a contender a row, shape by shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pronghorn.bench.record import Result
from pronghorn.bench.timing import spread

WITHHELD = "–"


def render(results: Sequence[Result]) -> RenderableType:
    """A table an op, then what must be known to judge the figures, each thing once."""
    head = escape(results[0].device)
    if results[0].extra["on_cpu"]:
        head += "\nOn the CPU: says that it works, not how fast a GPU is"
    ops = _once(result.workload.method for result in results)
    tables = [_table([result for result in results if result.workload.method == op]) for op in ops]
    lines = _once(
        f"[red]{escape(result.contender)}:[/] {escape(reason)}" + escape(_where(result, reason))
        for result in results
        for reason in result.gate["reasons"]
    )
    lines += _once(f"[dim]{escape(f'{r.contender}: {note}')}[/]" for r in results for note in r.extra["notes"])
    return Group(head, *tables, *lines)


def _table(results: Sequence[Result]) -> Table:
    rate = results[0].extra["rate"]
    table = Table(title=escape(results[0].workload.method), title_justify="left")
    for name in ("shape", "contender", "gate"):
        table.add_column(name, overflow="fold")
    for name in ("forward, ms", f"{rate} (of ceiling)", "backward, ms", f"{rate} (of ceiling)", "both, ms"):
        table.add_column(name, justify="right")
    shape = None
    for result in results:
        if shape not in (None, result.workload.shape):
            table.add_section()
        label = "" if shape == result.workload.shape else result.workload.shape
        shape = result.workload.shape
        gate = "[green]green[/]" if result.gate["green"] else "[red]FAILED[/]" if "errors" in result.gate else WITHHELD
        cells = (_times(result, "forward"), _reached(result, "forward"), _times(result, "backward"),
                 _reached(result, "backward"), _times(result, "step"))  # fmt: skip
        table.add_row(escape(label), result.contender, gate, *cells)
    return table


def _times(result: Result, part: str) -> str:
    if part not in result.timings_ms:
        return WITHHELD
    median, least, most = spread(result.timings_ms[part])
    return f"{median:.3g} ({least:.3g} to {most:.3g})"


def _reached(result: Result, part: str) -> str:
    if part not in result.extra["reached"]:
        return WITHHELD
    share = result.extra["share_of_ceiling"].get(part)
    return f"{result.extra['reached'][part]:.3g}" + ("" if share is None else f" ({share:.0%})")


def _where(result: Result, reason: str) -> str:
    """Which case a reason is about, unless it is the same for all."""
    return f" ({result.workload.method}, {result.workload.shape})" if "errors" in result.gate else ""


def _once(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
