"""The guard before a release: is our step as fast against a plain torch step as the committed figures say?

    python -m benchmarks.guard --out guard.json                    (five minutes on one GPU)
    python -m benchmarks.guard --models Llama-3.2-1B --out guard.json

For each model `benchmarks.step` runs Pronghorn and `hf` (transformers and PEFT, flash varlen, metadata passed in) by
turns in one run, behind its gate. How many times as long the plain step takes is compared with the same ratio in
benchmarks/results: both sides of a ratio are of one run, so a slow host or a hot card moves it little, and another GPU
moves it some. Peak memory is compared by bytes with a committed run that has a graph of the layers where this one has.
Ends with code 1 where a gate is red, the ratio fell by more than `--slower`, or memory grew by more than `--larger`. It
sees whole steps of these models alone, and nothing that takes longer to show: no offloading, no experts, no 4 or 8
bits.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts, Result, read_results
from pronghorn.errors import ConfigError, DataError

RESULTS = Path(__file__).parent / "results"
MODELS = "Qwen3-0.6B", "Llama-3.2-1B"
PLAIN = "hf"


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return our step's figures against the plain one of the same run.

    Raises:
        DataError: one of them is missing.
    """
    by_name = {result.candidate: result for result in results}
    if not {"pronghorn", PLAIN} <= by_name.keys():
        raise DataError(f"the results hold {', '.join(by_name)}", f"measure pronghorn and {PLAIN} in one run")
    ours, plain = by_name["pronghorn"], by_name[PLAIN]
    found: dict[str, Any] = {"green": ours.shown and plain.shown, "device": ours.device, "gate": ours.gate}
    if found["green"]:
        found |= {"step_ms": ours.median("step"), "plain_ms": plain.median("step")}
        found |= {"ratio": found["plain_ms"] / found["step_ms"], "peak_bytes": ours.memory_bytes.get("peak", 0)}
        found["launches"] = ours.counts.get("launches", 0)
    return found


def committed(model: str, folder: Path) -> dict[str, Any]:
    """Return the committed figures of a model: the ratio, and `peaks` of every run of the same workload, oldest first,
    each a pair of its launches a step and its bytes.

    Raises:
        ConfigError: there are none.
    """
    file = folder / f"step-{model.lower()}.json"
    if not file.is_file():
        raise ConfigError(f"--models {model}: {file.name} isn't in {folder.name}", f"use some of {', '.join(MODELS)}")
    first = read_results(file)
    found = figures(first)
    runs = [*first]
    for other in [*folder.glob(f"{file.stem}-*.json"), *folder.glob(f"reports/{file.stem}-*.json")]:
        runs += read_results(other)
    ours = [run for run in runs if run.candidate == "pronghorn" and run.shown and run.workload == first[0].workload]
    ours.sort(key=lambda run: run.date)
    found["peaks"] = [(run.counts.get("launches", 0), run.memory_bytes.get("peak", 0)) for run in ours]
    return found


def peak_of(launches: float, peaks: Sequence[tuple[float, int]]) -> int:
    """Return the peak of the newest run that launches as much, within a half more or less, or else of the newest.

    A graph of the layers launches a tenth and needs other memory than layers launched one by one, and whether there is
    one depends on how fast the host is.
    """
    like = [peak for count, peak in peaks if 2 / 3 <= (count + 1) / (launches + 1) <= 3 / 2]
    return (like or [peak for _, peak in peaks])[-1]


def compare(now: dict[str, Any], before: dict[str, Any], slower: float, larger: float) -> list[str]:
    """Return what is worse than was committed."""
    if not now["green"]:
        return [f"the gate is red: {now['gate']}"]
    found = []
    if now["ratio"] < before["ratio"] * (1 - slower):
        found.append(f"{now['ratio']:.2f} times the plain step; {before['ratio']:.2f} was committed")
    peak = peak_of(now["launches"], before["peaks"])
    if now["peak_bytes"] > peak * (1 + larger):
        found.append(f"{now['peak_bytes'] / 2**30:.2f} GiB; {peak / 2**30:.2f} was committed")
    return found


def measure(model: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.step` and return its figures, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        asked = ["--model", model, "--against", PLAIN, "--repeats", str(given.repeats), "--tokens", str(given.tokens)]
        asked += ["--lengths", given.lengths, "--out", str(out)]
        asked += ["--checkpoints", str(given.checkpoints)] if given.checkpoints else []
        try:
            subprocess.run([sys.executable, "-m", "benchmarks.step", *asked], timeout=given.limit, check=False)
        except subprocess.TimeoutExpired:
            return {"green": False, "gate": f"benchmarks.step took longer than {given.limit} s"}
        if not out.is_file():
            return {"green": False, "gate": "benchmarks.step failed: its output says why"}
        found = figures(read_results(out))
        return found | {"ratios": _ratios(read_results(out))}


def _ratios(results: Sequence[Result]) -> list[float]:
    """Return quartiles of the plain steps over our median: how much of a ratio is the machine's noise."""
    times = {result.candidate: result.timings_ms.get("step", []) for result in results}
    if min(map(len, times.values())) < 2:
        return []
    ours = statistics.median(times["pronghorn"])
    return [quartile / ours for quartile in statistics.quantiles(times[PLAIN], n=4)]


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="shapes with committed figures")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the committed figures")
    parser.add_argument("--slower", type=float, default=0.07, help="share by which a ratio may fall")
    parser.add_argument("--larger", type=float, default=0.03, help="share by which peak memory may grow")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", default="lognormal", help="of documents; the committed figures have a file's")
    parser.add_argument("--checkpoints", type=Path, help="where random weights are kept")
    parser.add_argument("--limit", type=int, default=240, metavar="SECONDS", help="for each model")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure, compare, and tell whether nothing got worse."""
    before = {model: committed(model, given.results) for model in given.models}
    with Facts(given) as facts:
        facts["models"] = {}
        for model in given.models:
            now = measure(model, given)
            worse = compare(now, before[model], given.slower, given.larger)
            facts["models"][model] = {"now": now, "committed": before[model], "worse": worse}
            facts.keep()
    rows = [
        {
            "model": model,
            "times the plain step": f"{one['now']['ratio']:.2f}" if one["now"]["green"] else None,
            "committed": f"{one['committed']['ratio']:.2f}, {one['committed']['device']}",
            "step, ms": f"{one['now']['step_ms']:.1f}" if one["now"]["green"] else None,
            "peak, GiB": f"{one['now'].get('peak_bytes', 0) / 2**30:.2f}",
            "worse": "; ".join(one["worse"]) or "no",
        }
        for model, one in facts["models"].items()
    ]
    show(rows, str(facts["device"]))
    return not any(one["worse"] for one in facts["models"].values())


if __name__ == "__main__":
    run(arguments, main)
