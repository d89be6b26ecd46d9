"""`pronghorn bench report`: the README's tables and figures from result files."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Debug
from pronghorn.errors import ConfigError

if TYPE_CHECKING:
    from pronghorn.bench.report import Case


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILES|DIR", help="Result files, or folders of them; benchmarks/results if not given."),
    ] = None,
    readme: Annotated[
        Path, typer.Option(metavar="FILE", help="Its tables are written between markers.", dir_okay=False)
    ] = Path("README.md"),
    plots: Annotated[Path, typer.Option(metavar="DIR", help="For the figures.", file_okay=False)] = Path("docs/plots"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with code 1 if README or figures are out of date.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the README's tables and figures from the results of bench step and bench ops, all of them given at once.

    Tables go between <!-- bench:step --> and <!-- /bench:step -->, and the same with ops; figures are SVG. Of two
    results of the same contender and workload the newer counts, and a line says so. Figures of a contender whose gate
    was not green are withheld.

    [bold]Examples[/]

      pronghorn bench report

      pronghorn bench report --check

      pronghorn bench report my-results --readme results.md --plots plots
    """
    with plain_errors(debug):
        from pronghorn.bench.report import collect

        console = Console(highlight=False, soft_wrap=True)
        cases, notes = collect(results or [Path("benchmarks/results")])
        for note in notes:
            console.print(note, style="dim", markup=False)
        wanted = _wanted(cases, readme, plots)
        outdated = [path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content]
        left = _left_over(plots, wanted)
        if not check:
            for path in outdated:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(wanted[path])
            for path in left:
                path.unlink()
        for path in outdated:
            console.print(f"{'out of date' if check else 'written'}: {path}", markup=False)
        for path in left:
            console.print(f"{'no longer made' if check else 'removed'}: {path}", markup=False)
        if not outdated and not left:
            console.print(f"up to date: {readme} and {len(wanted) - 1} figures in {plots}", markup=False)
    if check and (outdated or left):
        Console(stderr=True).print("[bold]remedy:[/] pronghorn bench report")
        raise typer.Exit(1)


def _wanted(cases: Sequence[Case], readme: Path, plots: Path) -> dict[Path, bytes]:
    """The files as they should be, README first."""
    from pronghorn.bench.report import KINDS
    from pronghorn.bench.report_plots import draw
    from pronghorn.bench.report_tables import images, markdown, replaced

    if not readme.is_file():
        raise ConfigError(f"{readme} is no file", "name the file with the markers by --readme")
    figures = {plots / name: content for name, content in draw(cases).items()}
    text = readme.read_bytes().decode()  # line ends stay as they are
    folder = Path(os.path.relpath(plots, readme.parent)).as_posix()
    for kind in KINDS:
        parts = [markdown(cases, kind), images(folder, [path.name for path in figures]) if kind == "step" else ""]
        body = "\n\n".join(filter(None, parts))
        text = replaced(text, kind, body, readme)
    return {readme: text.encode(), **figures}


def _left_over(plots: Path, wanted: Collection[Path]) -> list[Path]:
    """Figures of an earlier report that this one doesn't make; others' files carry no stamp."""
    from pronghorn.bench.report_plots import STAMP

    return [path for path in sorted(plots.glob("*.svg")) if path not in wanted and STAMP.encode() in path.read_bytes()]
