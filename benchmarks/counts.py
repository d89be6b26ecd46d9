"""Count what a step asks of the host and multiplies, and measure what the GPU reaches at most."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import CudaClock
from pronghorn.diagnose.shapes import shape_of

_LAUNCHES = ("LaunchKernel", "GraphLaunch")


def profile_step(step: Callable[[], None]) -> dict[str, float]:
    """Count the kernels and graphs that a step launches, as the profiler sees the driver's calls, and the milliseconds
    that kernels, copies and fills took on the device, all streams together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    launches = sum(event.count for event in events if any(name in event.key for name in _LAUNCHES))
    on_device = (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA)
    return {"launches": launches, "device_ms": sum(event.self_device_time_total for event in on_device) / 1e3}


def count_synchronisations(step: Callable[[], None]) -> int:
    """Count the host's waits for the device in a step, as torch's own debug mode reports them."""
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


def matmul_parameters(model: str) -> int:
    """Count N of "4N" and "6N": the weights that a token is multiplied by, without making them.

    The head counts, the embedding's lookup doesn't; of experts as many count as a token goes to.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(model)
    config = AutoConfig.from_pretrained(model) if shape is None else AutoConfig.for_model(**shape)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config)
    total = 0
    for module in meta.modules():
        if isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Router"):
            total += module.weight.numel()
        experts = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        total += sum(p.numel() // len(p) for p in experts) * getattr(config, "num_experts_per_tok", 0)
    return total


def measure_ceilings() -> dict[str, float]:
    """Measure what this GPU reaches now: a bf16 product of 8,192³ (TFLOP/s), a 2 GiB copy (bytes/s read + written)."""
    side, repeats, warm = 8192, 10, 3
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    clock = CudaClock()

    def milliseconds(work: Callable[[], Any]) -> float:
        marks = [clock.mark()]
        for _ in range(warm + repeats):
            work()
            marks.append(clock.mark())
        return statistics.median(clock.milliseconds(marks)[warm:])

    product = milliseconds(lambda: a @ b)
    copy = milliseconds(lambda: target.copy_(source))
    return {
        "matmul_tflops": 2 * side**3 / product / 1e9,
        "copy_bytes_per_s": 2 * source.numel() * source.element_size() / copy * 1e3,
    }
