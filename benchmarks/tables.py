"""Show results in the terminal, as `benchmarks.step` and `benchmarks.ops` end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from benchmarks.record import Result
from benchmarks.timing import spread
from pronghorn.parity.distance import listed

MISSING = "–"
Figure = Callable[[Result], str]


def _milliseconds(part: str, form: str) -> Figure:
    def cell(result: Result) -> str:
        median, least, most = (format(value, form) for value in spread(result.timings_ms[part]))
        return f"{median} ({least} to {most})"

    return cell


def _ratio(result: Result) -> str:
    median, least, most = result.extra["paired_with"]["step_ratio"]
    return f"{median:.2f} x ({least:.2f} to {most:.2f})"


def _reached(part: str) -> Figure:
    def cell(result: Result) -> str:
        share = result.extra["share_of_ceiling"].get(part)
        return f"{result.extra['reached'][part]:.3g}" + ("" if share is None else f" ({share:.0%})")

    return cell


STEP: dict[str, Figure] = {
    "forward, ms": _milliseconds("forward", ".1f"),
    "backward, ms": _milliseconds("backward", ".1f"),
    "step, ms (min to max)": _milliseconds("step", ".1f"),
    "step, against the first": _ratio,
    "tokens/s": lambda result: f"{result.extra['tokens_per_s']['real']:,.0f}",
    "supervised tokens/s": lambda result: f"{result.extra['tokens_per_s']['supervised']:,.0f}",
    "MFU at 4N": lambda result: f"{result.extra['mfu']['4N']:.1%}",
    "MFU at 6N": lambda result: f"{result.extra['mfu']['6N']:.1%}",
    "resting memory, GiB": lambda result: f"{result.memory_bytes['resting'] / 2**30:.2f}",
    "peak memory, GiB": lambda result: f"{result.memory_bytes['peak'] / 2**30:.2f}",
    "launches a step": lambda result: f"{result.counts['launches']:,}",
    "synchronisations a step": lambda result: f"{result.counts['syncs']:,}",
    "import, s": lambda result: f"{result.extra['import_s']:.1f}",
    "first step, s": lambda result: f"{result.extra['first_step_s']:.1f}",
}
OPS: tuple[Figure, ...] = (
    _milliseconds("forward", ".3g"),
    _reached("forward"),
    _milliseconds("backward", ".3g"),
    _reached("backward"),
    _milliseconds("step", ".3g"),
)


def step_table(results: Sequence[Result]) -> RenderableType:
    """Show a column a candidate and a row a figure; then why candidates failed, and notes."""
    work = results[0].workload
    title = (
        f"{work.shape}, {work.method}, {work.tokens} tokens a step ({work.lengths}, {work.supervised_share:.0%} "
        f"supervised), recompute {results[0].extra['recompute']}, {_device(results[0])}"
    )
    table = Table("", title=escape(title), title_justify="left")
    for result in results:
        table.add_column(escape(result.candidate), justify="right")
    table.add_row("gate", *("[green]green[/]" if result.gate["green"] else "[red]FAILED[/]" for result in results))
    for name, figure in STEP.items():
        table.add_row(name, *(_cell(result, figure) for result in results))
    return Group(table, *_remarks(results, with_case=False))


def ops_table(results: Sequence[Result]) -> RenderableType:
    """Show a table an op with a candidate a row, shape by shape; then why candidates failed, and notes, each once."""
    ops = dict.fromkeys(result.workload.method for result in results)
    tables = [_op_table([result for result in results if result.workload.method == op]) for op in ops]
    return Group(escape(_device(results[0])), *tables, *_remarks(results, with_case=True))


def _op_table(results: Sequence[Result]) -> Table:
    rate = max(results, key=lambda result: bool(result.timings_ms)).extra["rate"]  # who failed may not know it
    table = Table(title=escape(results[0].workload.method), title_justify="left")
    for name in ("shape", "candidate", "gate"):
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
        table.add_row(escape(label), result.candidate, gate, *(_cell(result, figure) for figure in OPS))
    return table


def _device(result: Result) -> str:
    on_cpu = "\nOn the CPU: says that it works, not how fast a GPU is" if result.extra["on_cpu"] else ""
    return result.device + on_cpu


def _remarks(results: Sequence[Result], with_case: bool) -> list[str]:
    """List each failure, with the cases it is about, and each note, once."""
    failures: dict[str, list[str]] = {}
    for result in results:
        for reason in result.gate["reasons"]:
            what = f"[red]{escape(result.candidate)}:[/] {escape(reason)}"
            failures.setdefault(what, []).append(f"{result.workload.method}, {result.workload.shape}")
    lines = [what + (escape(f" ({listed(where)})") if with_case else "") for what, where in failures.items()]
    lines += [f"[dim]{escape(f'{r.candidate}: {note}')}[/]" for r in results for note in r.extra["notes"]]
    return list(dict.fromkeys(lines))


def _cell(result: Result, figure: Figure) -> str:
    """Return a figure, or a dash where it wasn't measured or is withheld."""
    if not result.shown:
        return MISSING
    try:
        return figure(result)
    except KeyError:
        return MISSING
