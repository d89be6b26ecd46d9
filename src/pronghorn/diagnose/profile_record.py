"""A profile as a value and as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pronghorn.diagnose.profile_causes import Cause
from pronghorn.errors import DataError
from pronghorn.train.page import write_text

SCHEMA = "pronghorn-profile-v1"
PHASES = "what the trainer does"
"""The timeline's lane of phases, which are no causes."""
Shape = tuple[float, float, str]
"""Start and end in milliseconds from the step's start, and what it is."""


@dataclass(frozen=True)
class Row:
    """One cause, per step."""

    cause: str
    ms: float
    """Exposed: these add up to the step."""
    hidden_ms: float
    """Behind something else's time."""
    count: float


@dataclass(frozen=True)
class KernelTime:
    """All kernels (on a CPU, operations) of one name and cause, per step."""

    name: str
    cause: str
    ms: float
    count: float


@dataclass(frozen=True)
class Sync:
    """A place at which the host waits for the device, per step."""

    call: str
    """What was called: the operation, or the CUDA function."""
    site: str
    """file:line function."""
    count: float
    ms: float


@dataclass(frozen=True)
class Advice:
    """A cost that can be avoided."""

    ms: float
    """At most, per step."""
    cost: str
    change: str


@dataclass
class Profile:
    """What `pronghorn profile` found; times are milliseconds per step."""

    steps: int
    step_ms: float
    """Wall time under the profiler."""
    rows: list[Row]
    kernels: list[KernelTime]
    recomputed_ms: float
    launches: float
    """Calls that gave the device work; 0 on a CPU."""
    launch_ms: float
    plain_ms: float = 0.0
    """Wall time without the profiler."""
    warmup: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    paths: list[dict[str, str]] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    memory_bytes: int | None = None
    timeline: dict[str, list[Shape]] = field(default_factory=dict)
    """Of the last step, by lane."""
    schema: str = SCHEMA

    def ms(self, cause: str) -> float:
        """The exposed time of a cause."""
        return sum(row.ms for row in self.rows if row.cause == cause)

    @property
    def explained(self) -> float:
        """The share of the step that has a cause."""
        return 1 - (self.ms(Cause.UNEXPLAINED) + max(self.step_ms - sum(row.ms for row in self.rows), 0)) / self.step_ms

    @property
    def idle_ms(self) -> float:
        """What the device is idle at most without the profiler, which makes the host slower but not the device: what is
        left of that step."""
        return max(self.plain_ms - (self.step_ms - self.idle_under_profiler_ms), 0.0)

    @property
    def idle_under_profiler_ms(self) -> float:
        """What the device is idle under the profiler, whatever the host does meanwhile."""
        return sum(map(self.ms, (Cause.IDLE, Cause.AFTER_SYNC, Cause.DATA, Cause.LOGGING)))

    def write(self, path: Path) -> None:
        """Write it as JSON; ConfigError where no file can be written."""
        write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def read_profile(path: Path) -> Profile:
    """A profile that `Profile.write` wrote.

    Raises:
        DataError: no file, no JSON, another schema, or damaged.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not JSON ({error})", "give a file of pronghorn profile --json") from error
    schema = table.get("schema") if isinstance(table, dict) else None
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema!r}, not {SCHEMA!r}", "profile again with this version")
    try:
        return TypeAdapter(Profile).validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path} is damaged: {where}: {first['msg']}", "profile again") from error
