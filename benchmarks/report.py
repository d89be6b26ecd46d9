"""Write docs/benchmarks.md's tables and figures from result files: `python -m benchmarks.report`.

    files  ->  a table of results, the newest of each  ->  Markdown between markers, SVG in docs/plots

A case is one workload on one device; it is a row of the page, and every candidate's result of it is a column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from benchmarks.record import Result, read_results
from benchmarks.tables import MISSING
from pronghorn.cli.errors import plain_errors
from pronghorn.cli.options import Debug
from pronghorn.errors import ConfigError, DataError
from pronghorn.parity.distance import listed
from pronghorn.state import new_file

KINDS = ("step", "ops")
_KIND = re.compile(rf"(?:\bbench |\bbenchmarks\.)({'|'.join(KINDS)})\b")
"""In a result's command; before the benchmarks left the package it was `pronghorn bench step`."""
CASE = ["kind", "device", "model", "method", "tokens", "recompute", "lengths", "supervised", "seed"]
"""What results of one case have in common."""
COLUMNS = {
    "step": ["model", "method", "tokens", "recompute", "lengths", "supervised", "seed", "commit", "measured"],
    "ops": ["op", "shape", "commit", "measured"],
}
LEADING = 2
"""So many of them are shown in any case, the others where rows differ in them."""
ON_CPU = ": says that it works, not how fast a GPU is"
MFU = "MFU at 4N, of TFLOP/s"
REASON_LENGTH, PLACES = 200, 3
LEGEND = {
    "step": "Medians, peak memory. ×: times as long as Pronghorn's step, by turns in one run, with minimum and maximum "
    "of the turns. Tokens a second and MFU are those of the first candidate.",
    "ops": "Medians of forward and backward together. ×: times as long as Pronghorn's. In brackets the share of the "
    "ceiling that forward and backward reach: a copy of as many bytes, or a product of the same size, in the same run.",
}


def collect(paths: Sequence[Path]) -> tuple[pd.DataFrame, list[str]]:
    """Read results into a table, the newest of each case and candidate, and notes on that choice.

    Args:
        paths: result files, or folders of them (`*.json`).
    Raises:
        ConfigError: a path that isn't there.
        DataError: no results at all, a file of another schema, or a named file with nothing to report.
    """
    rows, notes = [], []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} is no file and no folder", "give result files, or the folder they are in")
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            found = [row for result in read_results(file) if (row := _row(result, file)) is not None]
            if not found and file is path:
                raise DataError(f"{path} has no results of benchmarks.step or .ops", "give a file that one wrote")
            if not found:
                notes.append(f"{file.name}: nothing of benchmarks.step or .ops, left out")
            rows += found
    if not rows:
        where, remedy = ", ".join(map(str, paths)), "write some: python -m benchmarks.step … --out FILE.json"
        raise DataError(f"no results of benchmarks.step or .ops in {where}", remedy)
    table = pd.DataFrame(rows)
    table["case"] = table.groupby(CASE, sort=False, dropna=False).ngroup()
    table["size"] = table.groupby("model")["n"].transform("max")
    table["position"] = range(len(table))
    table["position"] = table.groupby(["case", "candidate"])["position"].transform("min")  # Pronghorn stays first
    newest = table.sort_values("date", kind="stable").drop_duplicates(["case", "candidate"], keep="last")
    for old in table.drop(newest.index).itertuples():
        new = newest[(newest["case"] == old.case) & (newest["candidate"] == old.candidate)].iloc[0]
        notes.append(
            f"{old.model}, {old.method}, {old.candidate}: measured twice, the newer counts "
            f"({new['date']:%Y-%m-%d %H:%M} in {new['file']}, not {old.date:%Y-%m-%d %H:%M} in {old.file})"
        )
    return newest.sort_values("position"), notes


def _row(result: Result, file: Path) -> dict[str, Any] | None:
    """Return a result's fields, and its cell on the page; None for results of other programs."""
    kind, work, extra = _KIND.search(result.command), result.workload, result.extra
    if kind is None:
        return None
    try:
        date = pd.Timestamp(result.date)
    except ValueError as error:
        raise DataError(f"{file}: date {result.date!r} is none", "write it like 2026-11-21") from error
    experts = " on experts, too" if extra.get("experts") == "lora" else ""
    judged = bool(result.gate.keys() - {"green", "reasons"})  # a gate of reasons alone never saw any numbers
    reason = " ".join(" ".join(result.gate.get("reasons", ["no reason given"])).split())[:REASON_LENGTH]
    return {
        "kind": kind[1],
        "device": result.device + (ON_CPU if extra.get("on_cpu") else ""),
        "model": work.shape,
        "shape": work.shape,
        "op": work.method,
        "method": work.method + experts + (f" (r {extra['rank']})" if extra.get("rank") else ""),
        "tokens": f"{work.tokens:,}",
        "recompute": str(extra.get("recompute", MISSING)),
        "lengths": work.lengths,
        "supervised": f"{work.supervised_share:.0%}",
        "seed": str(work.seed),
        "candidate": result.candidate,
        "commit": result.commit,
        "measured": result.date[:10],
        "date": date.tz_localize("UTC") if date.tz is None else date.tz_convert("UTC"),
        "file": file.name,
        "result": result,
        "shown": result.shown,
        "verdict": None if result.gate.get("green") else "failed" if judged else "not judged",
        "reason": reason,
        "n": extra.get("mfu", {}).get("N", 0),
        "step": result.median("step") if result.shown else float("nan"),
        "peak": result.memory_bytes.get("peak", float("nan")) / 2**30,
        "ratio": extra.get("paired_with", {}).get("step_ratio"),
    }


def cases_of(table: pd.DataFrame, kind: str) -> dict[str, list[pd.DataFrame]]:
    """Return the cases of one kind, device by device, small models first; an op's as they were measured."""
    devices: dict[str, list[pd.DataFrame]] = {}
    order = ["size", "model", "method", "tokens", "recompute", "supervised", "position"]
    part = table[table["kind"] == kind]
    modes = ("off", "on", "offload", "auto")
    rank = {"recompute": lambda column: column.map(lambda mode: modes.index(mode) if mode in modes else len(modes))}
    if kind == "step":
        part = part.sort_values(order, key=lambda column: rank.get(column.name, lambda same: same)(column))
    for case in part["case"].unique():
        found = part[part["case"] == case].sort_values("position")
        devices.setdefault(found["device"].iloc[0], []).append(found)
    return devices


def markdown(table: pd.DataFrame, kind: str) -> str:
    """Render the tables of one kind of results, one a device; empty without results."""
    parts = []
    for device, cases in cases_of(table, kind).items():
        every = pd.concat(cases)
        names = list(dict.fromkeys(every["candidate"]))
        columns, common = {}, []
        for i, field in enumerate(COLUMNS[kind]):
            cells = [" and ".join(dict.fromkeys(case[field])) for case in cases]
            if i < LEADING or len(set(cells)) > 1:
                columns[field] = cells
            else:
                common.append(f"{field} {cells[0]}")
        leading = len(columns)
        columns |= {f"{name}, ms": [_time(case, name) for case in cases] for name in names}
        for head, figure in FIGURES.items() if kind == "step" else ():
            cells = [_figure(case, names[0], figure) for case in cases]
            if set(cells) != {MISSING}:
                columns[head] = cells
        rule = ["---"] * leading + ["---:"] * (len(columns) - leading)
        lines = [list(columns), rule, *zip(*columns.values(), strict=True)]
        parts.append(f"**{_escaped(device)}**")
        parts.append("\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines))
        parts.append("\n".join(f"- {_escaped(line)}" for line in _remarks(cases, kind, MFU in columns, common)))
    return "\n\n".join(parts)


def _of(case: pd.DataFrame, name: str) -> pd.Series | None:
    found = case[case["candidate"] == name]
    return None if found.empty else found.iloc[0]


def _figure(case: pd.DataFrame, name: str, figure: Callable[[Result], str]) -> str:
    found = _of(case, name)
    try:
        return MISSING if found is None or not found["shown"] else figure(found["result"])
    except KeyError:
        return MISSING


def _time(case: pd.DataFrame, name: str) -> str:
    """Return a candidate's time, memory or shares of ceilings, and its ratio to Pronghorn's, or why there is none."""
    found = _of(case, name)
    if found is None:
        return MISSING
    if not found["shown"]:
        return found["verdict"] or "not timed"
    if found["kind"] == "step":
        cell = f"{found['step']:.1f}" + (f", {found['peak']:.1f} GiB" if found["peak"] == found["peak"] else "")
        return cell + (", {:.2f} × ({:.2f} to {:.2f})".format(*found["ratio"]) if found["ratio"] else "")
    first, cell = _of(case, "pronghorn"), f"{found['step']:.3g}"
    if first is not None and first["shown"] and name != "pronghorn" and first["file"] == found["file"]:
        cell += f", {found['step'] / first['step']:.2f} ×"
    shares = [f"{share:.0%}" for share in found["result"].extra.get("share_of_ceiling", {}).values()]
    return cell + (f" ({', '.join(shares)})" if shares else "")


def _mfu(result: Result) -> str:
    """Return the share of the ceiling; full fine-tuning needs the weights' gradients, too, so its measure is named."""
    mfu, peak = result.extra["mfu"], f"{result.ceilings['matmul_tflops']:.0f}"
    return f"{mfu['6N']:.1%} (6N), {peak}" if result.workload.method == "full" else f"{mfu['4N']:.1%}, {peak}"


FIGURES: dict[str, Callable[[Result], str]] = {
    "tokens/s": lambda result: f"{result.extra['tokens_per_s']['real']:,.0f}",
    MFU: _mfu,
}


def _remarks(cases: Sequence[pd.DataFrame], kind: str, has_mfu: bool, common: Sequence[str]) -> list[str]:
    """List what must be known to judge a table."""
    every = pd.concat(cases)
    lines = [f"All rows: {', '.join(common)}."] if common else []
    lines.append(LEGEND[kind])
    if has_mfu:
        lines[-1] += (
            " MFU counts 4 operations a weight and token, the head's for unsupervised tokens, too, "
            "against a bf16 product measured in the same run."
        )
    withheld = every[every["verdict"].notna()]
    for (name, verdict, reason), group in withheld.groupby(["candidate", "verdict", "reason"], sort=False):
        where = listed(list(group["op"] + " " + group["shape"]), PLACES)
        lines.append(f"{name}: {verdict}, figures withheld: {reason} ({where})")
    for case in cases:
        files = list(dict.fromkeys(case["file"]))
        if len(files) > 1:
            lines.append(f"{case['model'].iloc[0]}: from {' and '.join(files)}; ratios are each file's own.")
    versions: dict[str, set[str]] = {}
    for result in every["result"]:
        for package, version in result.versions.items():
            versions.setdefault(package, set()).add(version)
    named = (f"{package} {' and '.join(sorted(found))}" for package, found in versions.items())
    lines.append(f"Versions: {', '.join(named)}.")
    return lines


def _escaped(text: str) -> str:
    """Return the text as one line without a column's end or HTML (a marker, say)."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def replaced(text: str, kind: str, body: str, file: Path) -> str:
    """Return `text` with `body` between the markers of a kind; without results, markers may be missing.

    Raises:
        ConfigError: markers that are missing, doubled or in the wrong order.
    """
    begin, end = (f"<!-- {slash}bench:{kind} -->" for slash in ("", "/"))
    counts = text.count(begin), text.count(end)
    if counts == (0, 0) and not body:
        return text
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise ConfigError(
            f"{file}: {begin} is there {counts[0]} times, {end} {counts[1]} times, or the second comes first",
            "write each once, in this order, on lines of their own where the tables belong",
        )
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return f"{before}{begin}\n{body}\n{after}" if body else f"{before}{begin}\n{after}"


def render(table: pd.DataFrame, page: Path, plots: Path) -> dict[Path, bytes]:
    """Return the files as they should be, the page first.

    Raises:
        ConfigError: the page is no file, or its markers are wrong.
    """
    from benchmarks.plots import draw

    if not page.is_file():
        raise ConfigError(f"{page} is no file", "name the file with the markers by --page")
    figures = {plots / name: content for name, content in draw(table).items()}
    folder = Path(os.path.relpath(plots, page.parent)).as_posix()
    times = [f"![Time of a step]({folder}/{path.name})" for path in figures if path.name.startswith("step-")]
    others = [path.name for path in figures if not path.name.startswith("step-")]
    memory = "\n".join(f'<img src="{folder}/{name}" alt="Memory and time" width="49%">' for name in others)
    text = page.read_bytes().decode()  # line ends stay as they are
    for kind in KINDS:
        images = [*times, memory] if kind == "step" else []
        text = replaced(text, kind, "\n\n".join(filter(None, [markdown(table, kind), *images])), page)
    return {page: text.encode(), **figures}


app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILES|DIR", help="Result files, or folders of them; benchmarks/results if not given."),
    ] = None,
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="Its tables are written between markers.", dir_okay=False)
    ] = Path("docs/benchmarks.md"),
    plots: Annotated[Path, typer.Option(metavar="DIR", help="For the figures.", file_okay=False)] = Path("docs/plots"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with code 1 if page or figures are out of date.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write tables and figures from the results of benchmarks.step and benchmarks.ops, all of them given at once.

    Tables go between <!-- bench:step --> and <!-- /bench:step -->, and the same with ops; figures are SVG. Of two
    results of the same candidate and workload the newer counts, and a line says so. Figures of a candidate whose gate
    was not green are withheld.

    [bold]Examples[/]

      python -m benchmarks.report

      python -m benchmarks.report --check

      python -m benchmarks.report my-results --page results.md --plots plots
    """
    with plain_errors(debug):
        from benchmarks.plots import STAMP

        console = Console(highlight=False, soft_wrap=True)
        table, notes = collect(results or [Path("benchmarks/results")])
        for note in notes:
            console.print(note, style="dim", markup=False)
        wanted = render(table, page, plots)
        outdated = [path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content]
        drawn = [path for path in sorted(plots.glob("*.svg")) if STAMP.encode() in path.read_bytes()]
        unused = [path for path in drawn if path not in wanted]  # others' figures carry no stamp
        for path in outdated:
            console.print(f"{'out of date' if check else 'written'}: {path}", markup=False)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                with new_file(path) as file:
                    file.write(wanted[path])
        for path in unused:
            console.print(f"{'no longer made' if check else 'removed'}: {path}", markup=False)
            if not check:
                path.unlink()
        if not outdated and not unused:
            console.print(f"up to date: {page} and {len(wanted) - 1} figures in {plots}", markup=False)
    if check and (outdated or unused):
        Console(stderr=True).print("[bold]remedy:[/] python -m benchmarks.report")
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
