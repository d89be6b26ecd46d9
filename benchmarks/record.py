"""Result JSON v1: one measurement of one candidate, with the gate that had to be green before the clock counted."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pronghorn.device import device_name, versions
from pronghorn.errors import DataError
from pronghorn.records.page import check_writable
from pronghorn.state import write_text

SCHEMA = "pronghorn-result-v1"


@dataclass(frozen=True)
class Workload:
    """What was computed."""

    shape: str
    method: str
    tokens: int
    """Tokens of a step, padding included."""
    lengths: str
    """Where the document lengths come from."""
    supervised_share: float
    seed: int


@dataclass
class Result:
    """One candidate's measurement; `timings_ms` holds every repeat, so that any statistic can be recomputed."""

    command: str
    candidate: str
    workload: Workload
    gate: dict[str, Any]
    """What was compared and how far apart it was; `green` says whether all of it passed."""
    timings_ms: dict[str, list[float]]
    memory_bytes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Figures of this benchmark alone (losses, tokens a second)."""
    commit: str = "unknown"
    schema: str = SCHEMA
    versions: dict[str, str] = field(default_factory=versions)
    device: str = field(default_factory=device_name)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def median(self, part: str) -> float:
        """Return the median of a timing in milliseconds."""
        return statistics.median(self.timings_ms[part])

    @property
    def shown(self) -> bool:
        """Tell whether its figures may be shown: gate green, and timed."""
        return bool(self.gate.get("green")) and bool(self.timings_ms.get("step"))


def command_line() -> str:
    """Tell how this program was called, folders by their names only: a result doesn't tell where it was measured."""
    program, *arguments = sys.argv
    module = f"-m benchmarks.{Path(program).stem}"
    return " ".join(["python", module, *(re.sub(r"[^=]*/(?=.)", "", part.rstrip("/")) for part in arguments)])


def write_results(results: Sequence[Result], path: Path | None) -> None:
    """Write the results of one run as a JSON list; nowhere without a path."""
    if path is not None:
        write_json([asdict(result) for result in results], path)


def write_json(value: Any, path: Path) -> None:
    """Write the whole file or nothing, and delete what was kept of the run so far."""
    write_text(path, json.dumps(value, indent=1) + "\n")
    unfinished(path).unlink(missing_ok=True)


class Facts(dict[str, Any]):
    """Hold what a program found that has a form of its own; written and printed when the block ends without an error.

    Raises:
        ConfigError: --out can't be written, before anything is measured.
    """

    def __init__(self, given: argparse.Namespace, *packages: str) -> None:
        self._path: Path | None = given.out
        if self._path is not None:
            check_writable(self._path)
        super().__init__(schema=1, device=device_name(), versions=versions(*packages), commit=given.commit)

    def keep(self) -> None:
        """Write what there is so far beside the file: the run may be cut off."""
        if self._path is not None:
            write_text(unfinished(self._path), json.dumps(self, indent=1) + "\n")

    def __enter__(self) -> Facts:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            print(json.dumps(self))
            if self._path is not None:
                write_json(self, self._path)


def unfinished(path: Path) -> Path:
    """Return where a run that will write `path` keeps what it has so far: it may be cut off."""
    return path.with_name(f"{path.name}.unfinished")


def keeper(path: Path | None, earlier: Sequence[Result] = ()) -> Callable[[Sequence[Result]], None]:
    """Return what keeps the results so far of a run that will write `path`, after `earlier` ones."""
    return lambda results: write_results([*earlier, *results], None if path is None else unfinished(path))


def read_results(path: Path) -> list[Result]:
    """Read the results that `write_results` wrote.

    Raises:
        DataError: no JSON, results of another schema, or damaged ones.
    """
    rows = _rows(path, SCHEMA)
    names = {field.name for field in fields(Result)}
    try:
        if wrong := next((row.keys() ^ names for row in rows if row.keys() != names), None):
            raise KeyError(*sorted(wrong))  # a default's device and versions would be this machine's
        return [Result(**{**row, "workload": Workload(**row["workload"])}) for row in rows]
    except (KeyError, TypeError) as error:  # says the right schema, but isn't
        raise DataError(f"{path} is damaged ({error})", "measure again, or leave it out") from error


def _rows(path: Path, schema: str) -> list[Any]:
    """Read a file of results, all of one schema."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})", "give a file that benchmarks.step or .ops wrote") from error
    rows = stored if isinstance(stored, list) else [stored]
    schemas = {row.get("schema") if isinstance(row, dict) else None for row in rows}
    if schemas - {schema}:
        found = ", ".join(sorted(map(str, schemas)))
        raise DataError(f"{path} has results of schema {found}, not {schema}", "measure again, or give another file")
    return rows


def check_out(path: Path | None, schema: str = SCHEMA) -> None:
    """Refuse, before measuring, a file without results of that schema (DataError), or one that can't be written
    (ConfigError)."""
    if path is None:
        return
    check_writable(path)
    if path.exists() and schema == SCHEMA:
        read_results(path)
    elif path.exists():
        _rows(path, schema)
