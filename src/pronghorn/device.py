"""What the machine offers, found out once and handed on as a value."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pronghorn.errors import ConfigError

AMPERE = (8, 0)
"""The first compute capability with bfloat16 and flash kernels."""


@dataclass(frozen=True)
class Device:
    """A GPU, or the processor, and the host around it."""

    name: str
    type: str
    """cuda or cpu."""
    index: int | None
    capability: tuple[int, int] | None
    """CUDA compute capability."""
    total_memory_bytes: int
    """Of the GPU; of the host for the CPU."""
    bf16: bool
    """Whether bfloat16 products run at full speed."""
    flash_varlen: bool
    """Whether packed rows can go through torch's flash varlen kernel."""
    cores: int
    """Processor cores this process may use."""
    ram_bytes: int


def probe(index: int | None = None) -> Device:
    """The GPU `index` (None: the current one), or the CPU where there is no GPU.

    Raises:
        ConfigError: no GPU of that index.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index is not None and not 0 <= index < count:
        raise ConfigError(f"GPU {index} of {count}", f"give an index below {count}" if count else "leave the index out")
    cores, ram = _cores(), _ram_bytes()
    if count == 0:
        return Device("CPU", "cpu", None, None, ram, False, False, cores, ram)
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    modern = capability >= AMPERE
    flash = modern and hasattr(torch.ops.aten, "_flash_attention_forward")
    return Device(properties.name, "cuda", index, capability, properties.total_memory, modern, flash, cores, ram)


def _cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram_bytes() -> int:
    """Physical memory of the host; 0 where the system doesn't say."""
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
