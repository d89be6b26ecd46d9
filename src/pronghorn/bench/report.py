"""What is reported: results from files, the newest of each, sorted into cases.

    files  ->  cases (here)  ->  tables (`report_tables`), figures (`report_plots`)  ->  the README

A case is one workload on one device, and holds each contender's result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pronghorn.bench.record import Result, read_results
from pronghorn.errors import ConfigError, DataError

KINDS = ("step", "ops")
"""Commands of `pronghorn bench` whose results are rendered; each has its markers."""
MISSING = "–"
ON_CPU = ": says that it works, not how fast a GPU is"
_COMMANDS = f"bench {' or '.join(KINDS)}"
_COMMAND = re.compile(rf"\bbench ({'|'.join(KINDS)})\b")
_RECOMPUTE = ("off", "on", "offload", "auto")


@dataclass(frozen=True)
class Found:
    """A result and the file it came from."""

    result: Result
    path: Path

    @property
    def recompute(self) -> str:
        """What the step recomputed; results of other commands don't say."""
        return str(self.result.extra.get("recompute", MISSING))

    @property
    def method(self) -> str:
        """What is trained; of an op, its name."""
        return self.result.workload.method + (" on experts, too" if self.result.extra.get("experts") == "lora" else "")

    @property
    def shown(self) -> bool:
        """Whether its figures may be shown: gate green, and timed."""
        return bool(self.result.gate.get("green")) and bool(self.result.timings_ms.get("step"))


@dataclass
class Case:
    """One workload on one device, and what each contender made of it."""

    by_contender: dict[str, Found] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`step` or `ops`."""
        return kind_of(self.any.result) or MISSING

    @property
    def any(self) -> Found:
        """For what all contenders have in common."""
        return next(iter(self.by_contender.values()))

    @property
    def model(self) -> str:
        """The shape's name."""
        return self.any.result.workload.shape

    @property
    def parameters(self) -> int:
        """N, or 0 where nobody was timed on a GPU."""
        return max(found.result.extra.get("mfu", {}).get("N", 0) for found in self.by_contender.values())


def kind_of(result: Result) -> str | None:
    """`step` or `ops`; None for results of other programs, which the README tells in words."""
    match = _COMMAND.search(result.command)
    return match.group(1) if match else None


def collect(paths: Sequence[Path]) -> tuple[list[Case], list[str]]:
    """Cases in the order of the report, and what a reader should know of the choice.

    Args:
        paths: result files, or folders of them (`*.json`).
    Raises:
        ConfigError: a path that isn't there.
        DataError: no results at all, a file of another schema, or a named file with nothing to report.
    """
    notes: list[str] = []
    cases: dict[tuple[object, ...], Case] = {}
    for path, named in _files(paths):
        reported = [Found(result, path) for result in read_results(path) if kind_of(result)]
        if named and not reported:
            raise DataError(f"{path} has no results of {_COMMANDS}", "give a file that one of these wrote")
        if not reported:
            notes.append(f"{path.name}: nothing of {_COMMANDS}, left out")
        for found in reported:
            by_contender = cases.setdefault(_key(found), Case()).by_contender
            name = found.result.contender
            older, newer = sorted((by_contender.get(name, found), found), key=_date)
            if older is not newer:
                work = found.result.workload
                notes.append(
                    f"{work.shape}, {work.method}, {name}: measured twice, the newer counts "
                    f"({newer.result.date} in {newer.path.name}, not {older.result.date} in {older.path.name})"
                )
            by_contender[name] = newer
    if not cases:
        where = ", ".join(map(str, paths))
        raise DataError(f"no results of {_COMMANDS} in {where}", "write some: pronghorn bench step … --out FILE.json")
    sizes: dict[str, int] = {}
    for case in cases.values():
        sizes[case.model] = max(sizes.get(case.model, 0), case.parameters)
    steps = [case for case in cases.values() if case.kind == "step"]
    ops = [case for case in cases.values() if case.kind == "ops"]  # stay as they were measured
    return sorted(steps, key=lambda case: (sizes[case.model], *_order(case))) + ops, notes


def _files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Every file with whether it was named itself."""
    files: list[tuple[Path, bool]] = []
    for path in paths:
        if path.is_dir():
            files += [(file, False) for file in sorted(path.glob("*.json"))]
        elif path.is_file():
            files.append((path, True))
        else:
            raise ConfigError(f"{path} is no file and no folder", "give result files, or the folder they are in")
    return files


def _date(found: Found) -> datetime:
    try:
        return datetime.fromisoformat(found.result.date).astimezone(UTC)
    except ValueError as error:
        raise DataError(f"{found.path}: date {found.result.date!r} is none", "write it like 2026-11-21") from error


def _key(found: Found) -> tuple[object, ...]:
    """What contenders of one case have in common."""
    result = found.result
    return kind_of(result), result.device, result.workload, found.method, found.recompute, result.extra.get("rank")


def _order(case: Case) -> tuple[object, ...]:
    work, recompute = case.any.result.workload, case.any.recompute
    known = _RECOMPUTE.index(recompute) if recompute in _RECOMPUTE else len(_RECOMPUTE)
    return work.shape, case.any.method, work.tokens, known, recompute, repr(work), case.any.result.device


def contenders_of(cases: Iterable[Case]) -> list[str]:
    """Every contender once, in the order of appearance; results are written with Pronghorn first."""
    return list(dict.fromkeys(name for case in cases for name in case.by_contender))


def by_device(cases: Iterable[Case], kind: str) -> dict[str, list[Case]]:
    """The cases of one kind, device by device; what ran on a CPU says so."""
    groups: dict[str, list[Case]] = {}
    for case in (case for case in cases if case.kind == kind):
        on_cpu = any(found.result.extra.get("on_cpu") for found in case.by_contender.values())
        groups.setdefault(case.any.result.device + (ON_CPU if on_cpu else ""), []).append(case)
    return groups
