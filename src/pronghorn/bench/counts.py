"""What a step asks of the host: kernel launches, and waits for the device (CUDA)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

_LAUNCHES = ("LaunchKernel", "GraphLaunch")


def count_launches(step: Callable[[], None]) -> int:
    """Kernels and graphs launched by a step, as the profiler sees the driver's calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if any(name in event.key for name in _LAUNCHES))


def count_synchronisations(step: Callable[[], None]) -> int:
    """Host waits in a step, as torch's own debug mode reports them."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    return sum("called a synchronizing" in str(warning.message) for warning in caught)
