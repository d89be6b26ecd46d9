"""A profile in the terminal, beside another one if there is one."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronghorn.diagnose.profile_record import Profile

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
