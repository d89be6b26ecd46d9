"""A verdict in the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pronghorn.diagnose.verify import Report


def render(report: Report) -> RenderableType:
    """Checks, the ten worst gradients, and the verdict."""
    verdict = "[bold green]The numbers are right.[/]" if report.ok else "[bold red]The numbers are wrong.[/]"
    lines = [escape(f"{cause[0].upper()}{cause[1:]}.") for cause in report.causes]
    rows = " and ".join(f"{len(row)} documents ({sum(row):,} tokens)" for row in report.rows)
    about = (
        f"{report.name}: {report.dtype}, against {report.reference} one document at a time; {rows}, "
        f"{report.labels:,} labels; {report.device}, {report.seconds:.0f} s"
    )
    ways = {each.part: each for each in report.paths}
    if "activations" in ways:
        about += f"\nLayers: {ways['decoder layers'].path}. Their activations: {ways['activations'].path}."
    return Group(escape(about), "", _checks(report), "", _worst(report), "", verdict, *lines)


def _checks(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("Check", "", "Value", "Limit"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("Value", "Limit") else "left")
    table.add_column("", overflow="fold")
    for check in report.checks:
        mark = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        table.add_row(check.name, mark, f"{check.value:.2g}", f"{check.limit:.2g}", escape(check.detail))
    return table


def _worst(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(f"Worst of {report.tensors:,} gradients", overflow="fold")
    for name in ("of limit", "L2", "plain's", "max", "1-cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in report.worst:
        name = each.name.removeprefix("model.").removesuffix(".weight")
        figures = (each.relative, each.plain_relative, each.maximum, 1 - each.cosine)
        style = None if each.excess <= 1 else "red"
        table.add_row(name, f"{each.excess:.0%}", *(f"{x:.0e}" for x in figures), style=style)
    return table
