"""Show results in the terminal, as `benchmarks.step` and `benchmarks.ops` end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from benchmarks.record import Result
from benchmarks.timing import spread
from pronghorn.parity.distance import listed

MISSING = "–"
ON_CPU = "On the CPU: says that it works, not how fast a GPU is"
Figure = Callable[[Result], str]


def _milliseconds(part: str, form: str) -> Figure:
    return lambda result: "{:{f}} ({:{f}} to {:{f}})".format(*spread(result.timings_ms[part]), f=form)


def _reached(part: str) -> Figure:
    def cell(result: Result) -> str:
        share = result.extra["share_of_ceiling"].get(part)
        reached = f"{result.extra['reached'][part]:.3g} {result.extra['rate']}"
        return reached + ("" if share is None else f" ({share:.0%})")

    return cell


STEP: dict[str, Figure] = {
    "forward, ms": _milliseconds("forward", ".1f"),
    "backward, ms": _milliseconds("backward", ".1f"),
    "step, ms (min to max)": _milliseconds("step", ".1f"),
    "step, against the first": lambda r: "{:.2f} x ({:.2f} to {:.2f})".format(*r.extra["paired_with"]["step_ratio"]),
    "tokens/s": lambda result: f"{result.extra['tokens_per_s']['real']:,.0f}",
    "supervised tokens/s": lambda result: f"{result.extra['tokens_per_s']['supervised']:,.0f}",
    "MFU at 4N": lambda result: f"{result.extra['mfu']['4N']:.1%}",
    "MFU at 6N": lambda result: f"{result.extra['mfu']['6N']:.1%}",
    "resting memory, GiB": lambda result: f"{result.memory_bytes['resting'] / 2**30:.2f}",
    "peak memory, GiB": lambda result: f"{result.memory_bytes['peak'] / 2**30:.2f}",
    "on the device, ms": lambda result: f"{result.counts['device_ms']:.1f}",
    "launches a step": lambda result: f"{result.counts['launches']:,}",
    "synchronisations a step": lambda result: f"{result.counts['syncs']:,}",
    "import, s": lambda result: f"{result.extra['import_s']:.1f}",
    "first step, s": lambda result: f"{result.extra['first_step_s']:.1f}",
}
OPS: dict[str, Figure] = {
    "forward, ms": _milliseconds("forward", ".3g"),
    "reached (of ceiling)": _reached("forward"),
    "backward, ms": _milliseconds("backward", ".3g"),
    "reached (of ceiling) ": _reached("backward"),
    "both, ms": _milliseconds("step", ".3g"),
}


def step_table(results: Sequence[Result]) -> pd.DataFrame:
    """Return a column a candidate and a row a figure."""
    cells = {result.candidate: [_gate(result), *_cells(result, STEP)] for result in results}
    return pd.DataFrame(cells, index=["gate", *STEP])


def ops_table(results: Sequence[Result]) -> pd.DataFrame:
    """Return a row an op, shape and candidate."""
    rows = [(r.workload.method, r.workload.shape, r.candidate, _gate(r), *_cells(r, OPS)) for r in results]
    return pd.DataFrame(rows, columns=["op", "shape", "candidate", "gate", *OPS]).set_index(["op", "shape"])


def print_results(results: Sequence[Result], table: pd.DataFrame, title: str) -> None:
    """Print a table with its device; then why candidates failed, with the cases it is about, and notes, each once."""
    print(f"\n{title}, {results[0].device}", *[ON_CPU] * bool(results[0].extra.get("on_cpu")), sep="\n")
    print(table.to_string())
    reasons: dict[str, list[str]] = {}
    for result in results:
        for reason in result.gate.get("reasons", []):
            reasons.setdefault(f"{result.candidate}: {reason}", []).append(
                f"{result.workload.method}, {result.workload.shape}"
            )
    print(*(f"{reason} ({listed(cases)})" for reason, cases in reasons.items()), sep="\n")
    notes = [f"{result.candidate}: {note}" for result in results for note in result.extra.get("notes", [])]
    print(*dict.fromkeys(notes), sep="\n", flush=True)


def _gate(result: Result) -> str:
    judged = result.gate.keys() - {"green", "reasons"}
    return "green" if result.gate["green"] else "FAILED" if judged or not result.gate.get("reasons") else "not judged"


def _cells(result: Result, figures: dict[str, Figure]) -> list[str]:
    """Return each figure, or a dash where it wasn't measured or is withheld."""
    cells = []
    for figure in figures.values():
        try:
            cells.append(figure(result) if result.shown else MISSING)
        except (KeyError, TypeError):
            cells.append(MISSING)
    return cells
