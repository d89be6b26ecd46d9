"""The tables in the terminal that `pronghorn bench step` and `bench ops` end with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pronghorn.bench.record import Result
from pronghorn.bench.report import MISSING
from pronghorn.bench.timing import spread
from pronghorn.parity.distance import listed

Figure = Callable[[Result], str]


def step_table(results: Sequence[Result]) -> RenderableType:
    """A column a contender, a row a figure; then why contenders failed, and what must be known to judge the figures."""
    work, extra = results[0].workload, results[0].extra
    title = (
        f"{work.shape}, {work.method}, {work.tokens} tokens a step ({work.lengths}, {work.labelled_share:.0%} "
        f"labelled), recompute {extra['recompute']}, {_device(results[0])}"
    )
    table = Table("", title=escape(title), title_justify="left")
    for result in results:
        table.add_column(escape(result.contender), justify="right")
    table.add_row("gate", *("[green]green[/]" if result.gate["green"] else "[red]FAILED[/]" for result in results))
    for name, figure in _STEP.items():
        table.add_row(name, *(_cell(result, figure) for result in results))
    return Group(table, *_remarks(results, lambda result: ""))


def ops_table(results: Sequence[Result]) -> RenderableType:
    """A table an op, a contender a row, shape by shape; then the same, each thing once."""
    ops = dict.fromkeys(result.workload.method for result in results)
    tables = [_of_op([result for result in results if result.workload.method == op]) for op in ops]
    return Group(escape(_device(results[0])), *tables, *_remarks(results, _case))


def _of_op(results: Sequence[Result]) -> Table:
    rate = max(results, key=lambda result: bool(result.timings_ms)).extra["rate"]  # who failed may not know it
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
        gate = "[green]green[/]" if result.gate["green"] else "[red]FAILED[/]" if "errors" in result.gate else MISSING
        table.add_row(escape(label), result.contender, gate, *(_cell(result, figure) for figure in _OPS))
    return table


def _device(result: Result) -> str:
    on_cpu = "\nOn the CPU: says that it works, not how fast a GPU is" if result.extra["on_cpu"] else ""
    return result.device + on_cpu


def _remarks(results: Sequence[Result], case: Figure) -> Iterable[str]:
    """Each failure, with the cases it is about, and each note, once."""
    failures: dict[str, list[str]] = {}
    for result in results:
        for reason in result.gate["reasons"]:
            what = f"[red]{escape(result.contender)}:[/] {escape(reason)}"
            failures.setdefault(what, []).append(case(result))
    told = [what + escape(f" ({listed(where)})" if any(where) else "") for what, where in failures.items()]
    notes = [f"[dim]{escape(f'{r.contender}: {note}')}[/]" for r in results for note in r.extra["notes"]]
    return dict.fromkeys(told + notes)


def _case(result: Result) -> str:
    return f"{result.workload.method}, {result.workload.shape}"


def _cell(result: Result, figure: Figure) -> str:
    """A figure, or a dash where it wasn't measured or is withheld."""
    if not result.gate["green"] or not result.timings_ms:
        return MISSING
    try:
        return figure(result)
    except KeyError:
        return MISSING


def _milliseconds(part: str, form: str) -> Figure:
    return lambda result: _spread(spread(result.timings_ms[part]), form)


def _spread(figures: Sequence[float], form: str, unit: str = "") -> str:
    median, least, most = figures
    return f"{median:{form}}{unit} ({least:{form}} to {most:{form}})"


def _reached(part: str) -> Figure:
    def cell(result: Result) -> str:
        share = result.extra["share_of_ceiling"].get(part)
        return f"{result.extra['reached'][part]:.3g}" + ("" if share is None else f" ({share:.0%})")

    return cell


def _gigabytes(kind: str) -> Figure:
    return lambda result: f"{result.memory_bytes[kind] / 2**30:.2f}"


def _extra(*keys: str, form: str) -> Figure:
    def cell(result: Result) -> str:
        value: Any = result.extra
        for key in keys:
            value = value[key]
        return format(value, form)

    return cell


_STEP: dict[str, Figure] = {
    "forward, ms": _milliseconds("forward", ".1f"),
    "backward, ms": _milliseconds("backward", ".1f"),
    "step, ms (min to max)": _milliseconds("step", ".1f"),
    "step, against the first": lambda result: _spread(result.extra["beside"]["step_ratio"], ".2f", " x"),
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
_OPS = (
    _milliseconds("forward", ".3g"),
    _reached("forward"),
    _milliseconds("backward", ".3g"),
    _reached("backward"),
    _milliseconds("step", ".3g"),
)
