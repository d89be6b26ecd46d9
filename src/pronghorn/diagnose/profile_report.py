"""Hold a profile, write and read its file, and show it in the terminal and on a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pronghorn.diagnose.profile_trace import Cause
from pronghorn.diagnose.tables import Table
from pronghorn.records.page import write_page, write_text
from pronghorn.records.record import read_table

SCHEMA = "pronghorn-profile-v1"
PHASES = "what the trainer does"
"""The timeline's lane of phases, which are no causes."""
TERMINAL_KERNELS, PAGE_KERNELS = 12, 20
"""Kernels that the terminal lists, and the page before one unfolds the rest."""
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
    """Hold what `pronghorn profile` measured; times are milliseconds per step."""

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
        """Return the exposed time of a cause."""
        return sum(row.ms for row in self.rows if row.cause == cause)

    @property
    def explained(self) -> float:
        """Return the share of the step that has a cause."""
        return 1 - (self.ms(Cause.UNEXPLAINED) + max(self.step_ms - sum(row.ms for row in self.rows), 0)) / self.step_ms

    @property
    def idle_ms(self) -> float:
        """Return the most that the device is idle without the profiler: the plain step less the device's work.

        The profiler makes the host slower but not the device.
        """
        return max(self.plain_ms - (self.step_ms - self.idle_under_profiler_ms), 0.0)

    @property
    def idle_under_profiler_ms(self) -> float:
        """Return how long the device is idle under the profiler, whatever the host does meanwhile."""
        return sum(map(self.ms, (Cause.IDLE, Cause.AFTER_SYNC, Cause.DATA, Cause.LOGGING)))

    @property
    def memory(self) -> str | None:
        """Say how much of the device's memory is used at most; None on a CPU."""
        if self.peak_memory_bytes is None or self.memory_bytes is None:
            return None
        return f"{self.peak_memory_bytes / 2**30:.1f} of {self.memory_bytes / 2**30:.1f} GiB"

    def write(self, path: Path) -> None:
        """Write the profile as JSON; ConfigError where no file can be written."""
        write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def read_profile(path: Path) -> Profile:
    """Read a profile that `Profile.write` wrote.

    Raises:
        DataError: no file, no JSON, another schema, or damaged.
    """
    return read_table(path, SCHEMA, Profile, "give a file that this version's pronghorn profile --json wrote")


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


def advise(profile: Profile, unfused: str | None) -> list[Advice]:
    """List the costs that can be avoided, the largest first.

    Args:
        unfused: why decoder layers aren't all fused; None where they are.
    """
    on_device, ms = profile.launches > 0, profile.ms
    # The profiler slows the host: only idle time that the plain step has room for is worth a change. On a CPU it slows
    # everything.
    idle_share = min(profile.idle_ms / max(profile.idle_under_profiler_ms, 1e-9), 1.0) if on_device else 1.0
    share = 1.0 if on_device else min(profile.plain_ms / profile.step_ms, 1)
    waits = {Cause.DATA: idle_share, Cause.LOGGING: idle_share}
    advice = [Advice(waits.get(cause, 1.0) * ms(cause), *change) for cause, change in _CHANGES.items()]

    cost = "layers are computed a second time in the backward pass"
    cost += f" ({profile.memory} are used)" if profile.memory else ""
    change = "memory.gradient_checkpointing: false, if the activations fit"
    advice.append(Advice(share * profile.recomputed_ms, cost, change))
    if on_device:
        sites = ", ".join(sync.site for sync in profile.syncs[:3]) or "none was seen"
        change = f"take synchronisations away, or do them less often (train.logging_steps): {sites}"
        advice.append(
            Advice(idle_share * ms(Cause.AFTER_SYNC), "the device runs dry while the host waits for it", change)
        )
        late = idle_share * ms(Cause.IDLE)
        if late > 0.1 * profile.plain_ms:
            change = f"packing.graph: auto launches the layers at once where it can; {_LARGER}"
            advice.append(Advice(late, "the host can't launch as fast as the device computes", change))
    else:
        advice.append(Advice(share * ms(Cause.HOST), "Python and autograd between operations", _LARGER))
    if on_device and unfused is not None:
        # half is a rough figure: no share is the same for all models
        half = sum(map(ms, (Cause.NORM, Cause.ELEMENTWISE, Cause.ON_DEVICE, Cause.LORA))) / 2
        advice.append(Advice(half, "decoder layers are not fused", f"take the reason away: {unfused}"))
    if ms(Cause.OPTIMISER) > 0.1 * profile.step_ms:
        change = "twice the train.gradient_accumulation_steps halves it"
        advice.append(Advice(ms(Cause.OPTIMISER) / 2, "the optimiser takes long for so short a step", change))
    return sorted((entry for entry in advice if entry.ms > LEAST * profile.step_ms), key=lambda entry: -entry.ms)


def headlines(profile: Profile) -> list[tuple[str, str, str]]:
    """List (label, figure, note) for the whole step."""
    slower = profile.step_ms / profile.plain_ms - 1
    lines = [
        ("A step", f"{profile.plain_ms:,.1f} ms", f"{slower:+.0%} under the profiler, over {profile.steps} steps"),
        ("Explained", f"{profile.explained:.1%}", f"of the {profile.step_ms:,.1f} ms under the profiler"),
    ]
    if profile.launches:
        idle = profile.idle_under_profiler_ms
        lines += [
            ("Device idle", f"{profile.idle_ms / profile.plain_ms:.1%}", f"at most; {idle:,.1f} ms under the profiler"),
            ("Launches", f"{profile.launches:,.0f}", f"{profile.launch_ms:,.1f} ms of the host's time a step"),
        ]
    if profile.memory:
        lines.append(("Device memory", profile.memory, "at most"))
    return lines


def tables(profile: Profile, other: Profile | None) -> dict[str, Table]:
    """Make the tables by their headings; one that has no rows is left out."""
    causes = [
        (
            row.cause,
            f"{row.ms:,.2f}",
            f"{row.ms / profile.step_ms:.1%}",
            f"{row.hidden_ms:,.2f}" if row.hidden_ms >= 0.005 else "",
            f"{row.count:,.0f}" if row.count else "",
        )
        for row in sorted(profile.rows, key=lambda row: -row.ms)
    ]
    whole = sum(row.ms for row in profile.rows)
    causes.append(("sum", f"{whole:,.2f}", f"{whole / profile.step_ms:.1%}", "", ""))
    differences = []
    if other is not None:
        names = dict.fromkeys(row.cause for row in [*profile.rows, *other.rows])
        times = sorted(((name, profile.ms(name), other.ms(name)) for name in names), key=lambda t: -abs(t[1] - t[2]))
        times += [("step", profile.step_ms, other.step_ms), ("without the profiler", profile.plain_ms, other.plain_ms)]
        differences = [(name, f"{ms:,.2f}", f"{its:,.2f}", f"{ms - its:+,.2f}") for name, ms, its in times]
    syncs = [(sync.site, f"{sync.count:,.0f}", f"{sync.ms:,.2f}", sync.call) for sync in profile.syncs]
    kernels = [(k.name, f"{k.ms:,.3f}", f"{k.count:,.0f}", k.cause) for k in profile.kernels]
    made = {
        "Where a step goes": Table("Cause", ("ms a step", "share", "hidden, ms", "pieces"), causes),
        "Against the other profile": Table("Cause", ("ms a step", "the other's", "difference"), differences),
        "Kernels" if profile.launches else "Operations": Table("Name", ("ms a step", "times"), kernels, "cause"),
        "Synchronisations": Table("Where", ("times", "ms waited"), syncs, "call"),
    }
    return {heading: table for heading, table in made.items() if table.rows}


def show(profile: Profile, console: Console, other: Profile | None = None) -> None:
    """Print causes (or differences from `other`), kernels, synchronisations and, last, what to change."""
    console.print(Text(f"A step of {profile.recipe['model']['name']} on {profile.device}", style="bold"))
    for label, figure, note in headlines(profile):
        console.print(Text(f"{label}: {figure} ({note})"), highlight=False)
    for heading, table in tables(profile, other).items():
        if other is None or heading != "Where a step goes":
            console.print()
            console.print(table.render(TERMINAL_KERNELS if heading in ("Kernels", "Operations") else None))
    console.print()
    if not profile.advice:
        console.print(Text("Nothing avoidable takes more than 2 % of the step.", style="bold green"))
    for number, advice in enumerate(profile.advice, 1):
        console.print(Text(f"{number}. {advice.cost}: up to {advice.ms:,.2f} ms a step", style="bold"), highlight=False)
        console.print(Text(f"   {advice.change}"), highlight=False)


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
        headlines=headlines(profile),
        tables=tables(profile, other),
        unfolded=PAGE_KERNELS,
        colours={str(cause): (f"c{i}", colour) for i, (cause, colour) in enumerate(zip(Cause, _COLOURS, strict=True))},
        rows=sorted(profile.rows, key=lambda row: -row.ms),
        end=max((end for shapes in profile.timeline.values() for _, end, _ in shapes), default=1.0),
        phases=PHASES,
    )
