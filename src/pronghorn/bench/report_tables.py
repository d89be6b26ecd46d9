"""Results as Markdown tables between markers: nothing in them was typed by hand.

Figures of a contender whose gate was not green are withheld here too, whatever the file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from pronghorn.bench.record import Result
from pronghorn.bench.report import MISSING, Case, Found, by_device, contenders_of
from pronghorn.errors import ConfigError
from pronghorn.parity.distance import listed

REASON_LENGTH = 200
PLACES = 3
_MFU = "MFU at 4N, of TFLOP/s"


def markdown(cases: Iterable[Case], kind: str) -> str:
    """The tables of one kind of results, one a device; empty without results."""
    parts = []
    for device, group in by_device(cases, kind).items():
        columns, common = _columns(group)
        rule = ["---" if name in _FIELDS[kind] else "---:" for name in columns]
        table = [list(columns), rule, *(list(row) for row in zip(*columns.values(), strict=True))]
        parts.append(f"**{_escaped(device)}**")
        parts.append("\n".join(f"| {' | '.join(map(_escaped, row))} |" for row in table))
        parts.append("\n".join(f"- {_escaped(line)}" for line in _remarks(group, columns, common)))
    return "\n\n".join(parts)


def replaced(text: str, kind: str, body: str, file: Path) -> str:
    """`text` with `body` between the markers of a kind; without results, markers may be missing.

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


def images(folder: str, names: Sequence[str]) -> str:
    """The figures in `folder`: times one below the other, memory and time side by side."""
    times = [f"![Time of a step]({folder}/{name})" for name in names if name.startswith("step-")]
    others = [name for name in names if not name.startswith("step-")]
    beside = "\n".join(f'<img src="{folder}/{name}" alt="Memory and time" width="49%">' for name in others)
    return "\n\n".join(filter(None, [*times, beside]))


def _columns(cases: Sequence[Case]) -> tuple[dict[str, list[str]], list[str]]:
    """A table's columns by their heads, and the fields that are the same in every row."""
    kind, names = cases[0].kind, contenders_of(cases)
    columns, common = {}, []
    for i, (field_name, value) in enumerate(_FIELDS[kind].items()):
        cells = [" and ".join(dict.fromkeys(map(value, case.by_contender.values()))) for case in cases]
        if i < _LEADING or len(set(cells)) > 1:
            columns[field_name] = cells
        else:
            common.append(f"{field_name} {cells[0]}")
    columns |= {f"{name}, ms": [_time(case, name) for case in cases] for name in names}
    for head, figure in _FIGURES.items() if kind == "step" else ():
        cells = [_figure(case, names[0], figure) for case in cases]
        if set(cells) != {MISSING}:
            columns[head] = cells
    return columns, common


def _figure(case: Case, name: str, figure: Callable[[Result], str]) -> str:
    found = case.by_contender.get(name)
    if found is None or not found.shown:
        return MISSING
    try:
        return figure(found.result)
    except KeyError:
        return MISSING


def _time(case: Case, name: str) -> str:
    """A contender's time, or why there is none."""
    found = case.by_contender.get(name)
    if found is None:
        return MISSING
    if not found.shown:
        return "not timed" if found.result.gate.get("green") else _verdict(found)
    return _step_time(found.result) if case.kind == "step" else _op_time(found, case)


def _verdict(found: Found) -> str:
    """A gate that says no more than why never saw any numbers."""
    return "failed" if found.result.gate.keys() - {"green", "reasons"} else "not judged"


def _step_time(result: Result) -> str:
    """The median, peak memory, and the ratio to Pronghorn's time in the same pair."""
    time = f"{result.median('step'):.1f}"
    if "peak" in result.memory_bytes:
        time += f", {result.memory_bytes['peak'] / 2**30:.1f} GiB"
    if "step_ratio" not in result.extra.get("beside", {}):
        return time
    median, least, most = result.extra["beside"]["step_ratio"]
    return f"{time}, {median:.2f} × ({least:.2f} to {most:.2f})"


def _op_time(found: Found, case: Case) -> str:
    """Forward and backward together, the ratio to Pronghorn's of the same run, and each part's share of its ceiling."""
    first, result = case.by_contender.get("pronghorn"), found.result
    time = f"{result.median('step'):.3g}"
    if first is not None and first.shown and first is not found and first.path == found.path:
        time += f", {result.median('step') / first.result.median('step'):.2f} ×"
    shares = [f"{share:.0%}" for share in result.extra.get("share_of_ceiling", {}).values()]
    return time + (f" ({', '.join(shares)})" if shares else "")


def _mfu(result: Result) -> str:
    """Full fine-tuning needs the weights' gradients, too: another measure, which is named."""
    mfu, peak = result.extra["mfu"], f"{result.ceilings['matmul_tflops']:.0f}"
    return f"{mfu['6N']:.1%} (6N), {peak}" if result.workload.method == "full" else f"{mfu['4N']:.1%}, {peak}"


def _method(found: Found) -> str:
    rank = found.result.extra.get("rank")
    return found.method + (f" (r {rank})" if rank else "")


Field = Callable[[Found], str]
_RUN: dict[str, Field] = {
    "commit": lambda found: found.result.commit,
    "measured": lambda found: found.result.date[:10],
}
_FIELDS: dict[str, dict[str, Field]] = {
    "step": {
        "model": lambda found: found.result.workload.shape,
        "method": _method,
        "tokens": lambda found: f"{found.result.workload.tokens:,}",
        "recompute": lambda found: found.recompute,
        "lengths": lambda found: found.result.workload.lengths,
        "labelled": lambda found: f"{found.result.workload.labelled_share:.0%}",
        "seed": lambda found: str(found.result.workload.seed),
        **_RUN,
    },
    "ops": {
        "op": lambda found: found.result.workload.method,
        "shape": lambda found: found.result.workload.shape,
        **_RUN,
    },
}
_LEADING = 2
"""So many fields are columns in any case, the others where rows differ in them."""
_FIGURES: dict[str, Callable[[Result], str]] = {
    "tokens/s": lambda result: f"{result.extra['tokens_per_s']['real']:,.0f}",
    _MFU: _mfu,
}


_LEGEND = {
    "step": "Medians, peak memory. ×: times as long as Pronghorn's step, by turns in one run, with least and greatest "
    "of the turns. Tokens a second and MFU are those of the first contender.",
    "ops": "Medians of forward and backward together. ×: times as long as Pronghorn's. In brackets the share of the "
    "ceiling that forward and backward reach: a copy of as many bytes, or a product of the same size, in the same run.",
}


def _remarks(cases: Sequence[Case], columns: Collection[str], common: Sequence[str]) -> list[str]:
    """What must be known to judge a table."""
    every = [found for case in cases for found in case.by_contender.values()]
    lines = [f"All rows: {', '.join(common)}."] if common else []
    lines.append(_LEGEND[cases[0].kind])
    if _MFU in columns:
        lines[-1] += (
            " MFU counts 4 operations a weight and token, the head's for tokens that aren't learned, too, "
            "against a bf16 product measured in the same run."
        )
    withheld: dict[str, list[str]] = {}
    for found in every:
        if not found.result.gate.get("green"):
            reason = " ".join(" ".join(found.result.gate.get("reasons", ["not told why"])).split())[:REASON_LENGTH]
            what = f"{found.result.contender}: {_verdict(found)}, figures withheld: {reason}"
            withheld.setdefault(what, []).append(f"{found.result.workload.method} {found.result.workload.shape}")
    for what, where in withheld.items():
        lines.append(f"{what} ({listed(where, PLACES)})")
    for case in cases:
        files = list(dict.fromkeys(found.path.name for found in case.by_contender.values()))
        if len(files) > 1:
            lines.append(f"{case.any.result.workload.shape}: from {' and '.join(files)}; ratios are each file's own.")
    versions: dict[str, set[str]] = {}
    for found in every:
        for package, version in found.result.versions.items():
            versions.setdefault(package, set()).add(version)
    told = ", ".join(f"{package} {' and '.join(sorted(found))}" for package, found in versions.items())
    lines.append(f"Versions: {told}.")
    return lines


def _escaped(text: str) -> str:
    """Text that is one line, no column's end and no HTML (a marker, say)."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
