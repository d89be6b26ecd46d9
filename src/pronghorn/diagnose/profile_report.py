"""Hold a profile, write and read its file, show it (in the terminal, on a page) and advise what to change."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronghorn.diagnose.profile_trace import Cause
from pronghorn.errors import DataError
from pronghorn.train.page import write_page, write_text

if TYPE_CHECKING:
    from pronghorn.models.attach import PathTaken

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


LEAST = 0.02
"""Costs below this share of a step are not worth a change."""
_LARGER = "give a step more work: a larger model.max_seq_length or packing.rows_per_step"
_CHANGES = {
    Cause.DATA: ("the step waits for data", "make rows cheaper to collate: the timeline shows when the step waits"),
    Cause.TO_DEVICE: ("copies to the device are not hidden", "copy from pinned memory, and earlier"),
    Cause.TO_HOST: ("copies to the host are not hidden", "read fewer values back (a larger train.logging_steps)"),
    Cause.COMMUNICATION: ("communication is not hidden", "a larger train.gradient_accumulation_steps"),
    Cause.LOGGING: ("the step waits for logging", "a larger train.logging_steps"),
}


def unfused(paths: list[PathTaken]) -> str | None:
    """Why decoder layers aren't fused, by a handle's report; None where they are, but for experts."""
    layers = next(path for path in paths if path.part == "decoder layers")
    return None if "fused" in layers.path else layers.why


def advise(profile: Profile, unfused: str | None) -> list[Advice]:
    """Args: unfused: why decoder layers aren't fused; None where they are."""
    # the profiler slows the host: of the device's idle time only what can be there without it is worth a change
    kept = min(profile.idle_ms / max(profile.idle_under_profiler_ms, 1e-9), 1.0) if profile.launches else 1.0
    shares = {Cause.DATA: kept, Cause.LOGGING: kept}
    found = [Advice(shares.get(cause, 1.0) * profile.ms(cause), *change) for cause, change in _CHANGES.items()]
    found += _on_device(profile, unfused, kept) if profile.launches else _on_processor(profile)
    if profile.ms(Cause.OPTIMISER) > 0.1 * profile.step_ms:
        change = "twice the train.gradient_accumulation_steps halves it"
        found.append(Advice(profile.ms(Cause.OPTIMISER) / 2, "the optimiser takes long for so short a step", change))
    return sorted((each for each in found if each.ms > LEAST * profile.step_ms), key=lambda each: -each.ms)


def _on_device(profile: Profile, unfused: str | None, kept: float) -> list[Advice]:
    late, after_sync = profile.ms(Cause.IDLE), profile.ms(Cause.AFTER_SYNC)
    sites = ", ".join(sync.site for sync in profile.syncs[:3]) or "none was seen"
    change = f"take synchronisations away, or do them less often (train.logging_steps): {sites}"
    found = [
        Advice(kept * after_sync, "the device runs dry while the host waits for it", change),
        _recomputed(profile, profile.recomputed_ms),
    ]
    if kept * late > 0.1 * profile.plain_ms:
        change = f"packing.graph: auto launches the layers at once where it can; {_LARGER}"
        found.append(Advice(kept * late, "the host can't launch as fast as the device computes", change))
    if unfused is not None:
        parts = (Cause.NORM, Cause.ELEMENTWISE, Cause.ON_DEVICE, Cause.LORA)
        cost = sum(map(profile.ms, parts)) / 2  # a rough figure: no share of it is the same for all models
        found.append(Advice(cost, "decoder layers are not fused", f"take the reason away: {unfused}"))
    return found


def _on_processor(profile: Profile) -> list[Advice]:
    share = min(profile.plain_ms / profile.step_ms, 1)  # here the profiler slows everything
    return [
        _recomputed(profile, share * profile.recomputed_ms),
        Advice(share * profile.ms(Cause.HOST), "Python and autograd between operations", _LARGER),
    ]


def _recomputed(profile: Profile, ms: float) -> Advice:
    cost = "layers are computed a second time in the backward pass"
    if profile.peak_memory_bytes is not None and profile.memory_bytes is not None:
        cost += f" ({profile.peak_memory_bytes / 2**30:.1f} of {profile.memory_bytes / 2**30:.1f} GiB are used)"
    return Advice(ms, cost, "memory.gradient_checkpointing: false, if the activations fit")


KERNELS = 12
"""The kernels that are listed."""


def show(profile: Profile, console: Console, other: Profile | None = None) -> None:
    """Print causes, kernels, synchronisations and, last, what to change."""
    console.print(Text(f"A step of {profile.recipe['model']['name']} on {profile.device}", style="bold"))
    for label, figure, note in headlines(profile):
        console.print(Text(f"{label}: {figure} ({note})"), highlight=False)
    console.print()
    console.print(_causes(profile, other))
    console.print()
    console.print(_kernels(profile))
    if profile.syncs:
        console.print()
        console.print(_syncs(profile))
    console.print()
    if not profile.advice:
        console.print(Text("Nothing avoidable takes more than 2 % of the step.", style="bold green"))
    for number, each in enumerate(profile.advice, 1):
        console.print(Text(f"{number}. {each.cost}: up to {each.ms:.2f} ms a step", style="bold"), highlight=False)
        console.print(Text(f"   {each.change}"), highlight=False)


def headlines(profile: Profile) -> list[tuple[str, str, str]]:
    """(label, figure, note) of what is told of the whole step."""
    slower = profile.step_ms / profile.plain_ms - 1
    found = [
        ("A step", f"{profile.plain_ms:,.1f} ms", f"{slower:+.0%} under the profiler, over {profile.steps} steps"),
        ("Explained", f"{profile.explained:.1%}", f"of the {profile.step_ms:,.1f} ms under the profiler"),
    ]
    if profile.launches:
        idle = profile.idle_under_profiler_ms
        found += [
            ("Device idle", f"{profile.idle_ms / profile.plain_ms:.1%}", f"at most; {idle:,.1f} ms under the profiler"),
            ("Launches", f"{profile.launches:,.0f}", f"{profile.launch_ms:,.1f} ms of the host's time a step"),
        ]
    if profile.peak_memory_bytes is not None and profile.memory_bytes is not None:
        used, there = profile.peak_memory_bytes / 2**30, profile.memory_bytes / 2**30
        found.append(("Device memory", f"{used:.1f} GiB", f"at most, of {there:.1f}"))
    return found


def differences(profile: Profile, other: Profile) -> list[tuple[str, float, float]]:
    """(what, this profile's ms, the other's): each cause of either, the largest change first, then the whole step."""
    causes = dict.fromkeys([row.cause for row in profile.rows] + [row.cause for row in other.rows])
    found = [(cause, profile.ms(cause), other.ms(cause)) for cause in causes]
    found.sort(key=lambda row: -abs(row[1] - row[2]))
    whole = ("step", profile.step_ms, other.step_ms)
    return [*found, whole, ("without the profiler", profile.plain_ms, other.plain_ms)]


def _causes(profile: Profile, other: Profile | None) -> Table:
    if other is not None:
        table = _table("Cause", "ms a step", "the other's", "difference")
        for cause, mine, its in differences(profile, other):
            table.add_row(cause, f"{mine:.2f}", f"{its:.2f}", f"{mine - its:+.2f}")
        return table
    table = _table("Cause", "ms a step", "share", "hidden", "pieces")
    for row in sorted(profile.rows, key=lambda row: -row.ms):
        hidden = f"{row.hidden_ms:.2f}" if row.hidden_ms >= 0.005 else ""
        count = f"{row.count:,.0f}" if row.count else ""
        table.add_row(row.cause, f"{row.ms:.2f}", f"{row.ms / profile.step_ms:.1%}", hidden, count)
    table.add_row("sum", f"{sum(row.ms for row in profile.rows):.2f}", style="bold")
    return table


def _kernels(profile: Profile) -> Table:
    table = _table("Kernel or operation", "ms a step", "times", last="cause")
    for kernel in profile.kernels[:KERNELS]:
        name = kernel.name if len(kernel.name) <= 60 else f"{kernel.name[:59]}…"
        table.add_row(Text(name), f"{kernel.ms:.2f}", f"{kernel.count:,.0f}", kernel.cause)
    return table


def _syncs(profile: Profile) -> Table:
    table = _table("Synchronisation", "times", "ms waited", last="call")
    for sync in profile.syncs:
        table.add_row(Text(sync.site), f"{sync.count:,.0f}", f"{sync.ms:.2f}", Text(sync.call))
    return table


def _table(first: str, *numbers: str, last: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, no_wrap=True)
    return table


_COLOURS = [
    "#3b6fd4", "#8257d0", "#1f9e8f", "#4aa84e", "#9db23a", "#d9a521", "#e07b30", "#a9714b", "#d65f8f", "#a83e77",
    "#5c7a99", "#d43f3f", "#c98a8a", "#8f97a6", "#eaa3a3", "#c9cfda", "#b9bfca", "#5b5f66",
]  # fmt: skip
"""Of each `Cause`, in their order."""


def write_report(profile: Profile, path: Path, other: Profile | None = None) -> Path:
    """Write the page to `path` and return it; ConfigError where no file can be written there."""
    return write_page(
        path,
        Path(__file__).with_name("profile.html.j2"),
        profile=profile,
        other=other,
        differences=differences(profile, other) if other is not None else [],
        headlines=headlines(profile),
        colours={str(cause): (f"c{i}", _COLOURS[i]) for i, cause in enumerate(Cause)},
        rows=sorted(profile.rows, key=lambda row: -row.ms),
        end=max((end for shapes in profile.timeline.values() for _, end, _ in shapes), default=1.0),
        phases=PHASES,
    )
