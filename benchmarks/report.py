"""Write docs/benchmarks.md's tables and figures from the results of benchmarks.step and benchmarks.ops.

Give it all results at once: files, or folders of them; benchmarks/results if nothing is given. Tables go between
<!-- bench:step --> and <!-- /bench:step -->, and the same with ops; figures are SVG. Of two results of the same
candidate and workload the newer counts, and a line says so. Figures of a candidate whose gate was not green are
withheld.

    python -m benchmarks.report
    python -m benchmarks.report --check
    python -m benchmarks.report my-results --page results.md --plots plots

A case is one workload on one device; it is a row of the page, and every candidate's result of it is a column.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.program import parser_of, run
from benchmarks.record import Result, read_results
from benchmarks.tables import MISSING
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
MODES = ("off", "on", "offload", "auto")
ON_CPU = ": says that it works, not how fast a GPU is"
MFU = "MFU at 4N, of TFLOP/s"
REASON_LENGTH, PLACES = 200, 3
LEGEND = {
    "step": "Medians, peak memory. ×: times as long as Pronghorn's step, by turns in one run, with minimum and maximum "
    "of the turns. Tokens a second and MFU are those of the first candidate.",
    "ops": "Medians of forward and backward together. ×: times as long as Pronghorn's. In brackets the share of the "
    "ceiling that forward and backward reach: a copy of as many bytes, or a product of the same size, in the same run.",
}
LEGEND_OF_MFU = (
    " MFU counts 4 operations a weight and token, the head's for unsupervised tokens, too, "
    "against a bf16 product measured in the same run."
)


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
            raise ConfigError(f"{path} is neither a file nor a folder", "give result files, or the folder they are in")
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            of_file = [row for result in read_results(file) if (row := _row(result, file)) is not None]
            if not of_file and file is path:
                raise DataError(f"{path} has no results of benchmarks.step or .ops", "give a file that one wrote")
            if not of_file:
                notes.append(f"{file.name}: nothing of benchmarks.step or .ops, left out")
            rows += of_file
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
    """Return what the page shows of a result; None for results of other programs."""
    kind, work, extra = _KIND.search(result.command), result.workload, result.extra
    if kind is None:
        return None
    try:
        date = pd.Timestamp(result.date)
    except ValueError as error:
        raise DataError(f"{file}: date {result.date!r} is none", "write it like 2026-11-21") from error
    experts = " on experts, too" if extra.get("experts") == "lora" else ""
    judged = bool(result.gate.keys() - {"green", "reasons"})  # a gate of reasons alone never saw any numbers
    recompute = str(extra.get("recompute", MISSING))
    return {
        "kind": kind[1],
        "device": result.device + (ON_CPU if extra.get("on_cpu") else ""),
        "model": work.shape,
        "shape": work.shape,
        "op": work.method,
        "method": work.method + experts + (f" (r {extra['rank']})" if extra.get("rank") else ""),
        "tokens": f"{work.tokens:,}",
        "recompute": recompute,
        "mode": MODES.index(recompute) if recompute in MODES else len(MODES),
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
        "reason": " ".join(" ".join(result.gate.get("reasons", ["no reason given"])).split())[:REASON_LENGTH],
        "n": extra.get("mfu", {}).get("N", 0),
        "step": result.median("step") if result.shown else float("nan"),
        "peak": result.memory_bytes.get("peak", float("nan")) / 2**30,
        "ratio": extra.get("paired_with", {}).get("step_ratio"),
    }


def cases_of(table: pd.DataFrame, kind: str) -> dict[str, list[pd.DataFrame]]:
    """Return the cases of one kind, device by device, small models first; an op's as they were measured."""
    part = table[table["kind"] == kind]
    if kind == "step":
        part = part.sort_values(["size", "model", "method", "tokens", "mode", "supervised", "position"])
    devices: dict[str, list[pd.DataFrame]] = {}
    for _, case in part.groupby("case", sort=False):
        devices.setdefault(case["device"].iloc[0], []).append(case.sort_values("position"))
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
        columns |= {f"{name}, ms": [_cell(case, name, _time) for case in cases] for name in names}
        for head, figure in FIGURES.items() if kind == "step" else ():
            cells = [_cell(case[case["shown"]], names[0], figure) for case in cases]
            if set(cells) != {MISSING}:
                columns[head] = cells
        rule = ["---"] * leading + ["---:"] * (len(columns) - leading)
        lines = [list(columns), rule, *zip(*columns.values(), strict=True)]
        remarks = [f"All rows: {', '.join(common)}."] if common else []
        remarks += [LEGEND[kind] + LEGEND_OF_MFU * (MFU in columns), *_remarks(cases, every)]
        parts.append(f"**{_escaped(device)}**")
        parts.append("\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines))
        parts.append("\n".join(f"- {_escaped(line)}" for line in remarks))
    return "\n\n".join(parts)


def _cell(case: pd.DataFrame, name: str, figure: Callable[[Any, pd.DataFrame], str]) -> str:
    """Return a figure of a candidate in a case, or why there is none."""
    rows = case[case["candidate"] == name]
    if rows.empty:
        return MISSING
    row = rows.iloc[0]
    try:
        return figure(row, case) if row["shown"] else row["verdict"] or "not timed"
    except KeyError:
        return MISSING


def _time(row: Any, case: pd.DataFrame) -> str:
    """Return a candidate's time, memory or shares of ceilings, and its ratio to Pronghorn's."""
    if row["kind"] == "step":
        cell = f"{row['step']:.1f}" + (f", {row['peak']:.1f} GiB" if row["peak"] == row["peak"] else "")
        return cell + (", {:.2f} × ({:.2f} to {:.2f})".format(*row["ratio"]) if row["ratio"] else "")
    cell = f"{row['step']:.3g}"
    first = case[(case["candidate"] == "pronghorn") & case["shown"] & (case["file"] == row["file"])]
    if row["candidate"] != "pronghorn" and not first.empty:
        cell += f", {row['step'] / first['step'].iloc[0]:.2f} ×"
    shares = [f"{share:.0%}" for share in row["result"].extra.get("share_of_ceiling", {}).values()]
    return cell + (f" ({', '.join(shares)})" if shares else "")


def _mfu(row: Any, case: pd.DataFrame) -> str:
    """Return the share of the ceiling; full fine-tuning needs the weights' gradients, too, so its measure is named."""
    result = row["result"]
    mfu, peak = result.extra["mfu"], f"{result.ceilings['matmul_tflops']:.0f}"
    return f"{mfu['6N']:.1%} (6N), {peak}" if result.workload.method == "full" else f"{mfu['4N']:.1%}, {peak}"


FIGURES: dict[str, Callable[[Any, pd.DataFrame], str]] = {
    "tokens/s": lambda row, case: f"{row['result'].extra['tokens_per_s']['real']:,.0f}",
    MFU: _mfu,
}


def _remarks(cases: Sequence[pd.DataFrame], every: pd.DataFrame) -> list[str]:
    """List what must be known to judge a table."""
    lines = []
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
    of_packages = (f"{package} {' and '.join(sorted(numbers))}" for package, numbers in versions.items())
    return [*lines, f"Versions: {', '.join(of_packages)}."]


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
        ConfigError: the page is not a file, or its markers are wrong.
    """
    from benchmarks.plots import draw

    if not page.is_file():
        raise ConfigError(f"{page} is not a file", "name the file with the markers by --page")
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


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__, measures=False)
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE|DIR")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="tables go between its markers")
    parser.add_argument("--plots", type=Path, default=Path("docs/plots"), metavar="DIR", help="for the figures")
    parser.add_argument("--check", action="store_true", help="write nothing; code 1 if page or figures are out of date")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Write what is out of date, or tell; return False if something is and nothing may be written."""
    from benchmarks.plots import STAMP

    table, notes = collect(given.results or [Path("benchmarks/results")])
    wanted = render(table, given.page, given.plots)
    outdated = [path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content]
    drawn = [path for path in sorted(given.plots.glob("*.svg")) if STAMP.encode() in path.read_bytes()]
    unused = [path for path in drawn if path not in wanted]  # others' figures carry no stamp
    print(*notes, sep="\n")
    for path in outdated:
        print(f"{'out of date' if given.check else 'written'}: {path}")
    for path in unused:
        print(f"{'no longer made' if given.check else 'removed'}: {path}")
    if not outdated and not unused:
        print(f"up to date: {given.page} and {len(wanted) - 1} figures in {given.plots}")
    elif given.check:
        print("remedy: python -m benchmarks.report", file=sys.stderr)
        return False
    for path in outdated:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(wanted[path])
    for path in unused:
        path.unlink()
    return True


if __name__ == "__main__":
    run(arguments, main)
