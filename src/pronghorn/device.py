"""What the machine offers, found out once and handed on as a value."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pronghorn.errors import ConfigError, PronghornError

if TYPE_CHECKING:
    import torch

AMPERE = (8, 0)
"""The first compute capability with bfloat16 and flash kernels."""

HOPPER = (9, 0)
"""That of H100 and H200, which cuDNN's attention was measured on."""

_FLASH_ARGUMENTS = {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size_left"}
_CUDNN_ARGUMENTS = {"query", "attn_bias", "compute_log_sumexp", "is_causal", "return_debug_mask", "scale"}
_OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")
"""What RuntimeErrors of the driver and pinned memory, of cuBLAS and cuDNN, and of the CPU's allocator say."""
_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "triton")


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
    """Probe the GPU `index` (None: the current one), or the CPU where there is no GPU.

    Raises:
        ConfigError: no GPU of that index.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index is not None and not 0 <= index < count:
        raise ConfigError(f"GPU {index} of {count}", f"give an index below {count}" if count else "leave the index out")
    ram = _ram_bytes()
    if count == 0:
        return Device("CPU", "cpu", None, None, ram, False, False, cores(), ram)
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    modern = capability >= AMPERE
    flash = modern and has_flash_varlen()
    return Device(properties.name, "cuda", index, capability, properties.total_memory, modern, flash, cores(), ram)


@functools.cache
def has_flash_varlen() -> bool:
    """Tell whether this build of torch has the flash varlen kernel with grouped heads and windows (asks no device)."""
    import torch

    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return operator is not None and {a.name for a in operator.default._schema.arguments} >= _FLASH_ARGUMENTS


@functools.cache
def has_efficient_varlen() -> bool:
    """Tell whether this build of torch has the memory-efficient kernels with documents' bounds (asks no device)."""
    import torch

    names = ("_efficient_attention_forward", "_efficient_attention_backward")
    operators = [getattr(torch.ops.aten, name, None) for name in names]
    return all(op is not None and "cu_seqlens_q" in {a.name for a in op.default._schema.arguments} for op in operators)


@functools.cache
def has_cudnn_attention() -> bool:
    """Tell whether this build of torch has cuDNN's attention with the log-sum-exp for its backward (asks no device)."""
    import torch

    names = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
    operator, backward = (getattr(torch.ops.aten, name, None) for name in names)
    if operator is None or backward is None or not torch.backends.cudnn.is_available():
        return False
    return {a.name for a in operator.default._schema.arguments} >= _CUDNN_ARGUMENTS


@functools.cache
def has_triton() -> bool:
    """Tell whether Triton, which kernels are written in, is installed (it comes with torch for CUDA on Linux)."""
    return importlib.util.find_spec("triton") is not None


def graph_bytes() -> int:
    """Return the bytes that CUDA graphs hold for their own tensors, which torch does not count as allocated."""
    import torch

    ours = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in ours)


def peak_bytes(device: torch.device) -> int:
    """Return the most GPU memory in use since torch's counts were reset, that of CUDA graphs included.

    What was allocated before graphs were captured may be given back for them, so the most allocated and what they hold
    may sum to more than there ever was; the most that the allocator held is a bound, too."""
    import torch

    held = torch.cuda.max_memory_allocated(device) + graph_bytes()
    return min(held, torch.cuda.max_memory_reserved(device))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory ran out: by the error itself, or by one during whose handling it was raised (a CUDA graph's
    capture that is broken off says only that it was)."""
    import torch

    while isinstance(error, RuntimeError) and not isinstance(error, PronghornError):
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_bfloat16_supported() -> bool:
    """Tell whether this machine's GPU computes in bfloat16 at full speed: `SFTConfig(bf16=…)` of Unsloth's scripts."""
    return probe().bf16


is_bf16_supported = is_bfloat16_supported
"""Unsloth's shorter name."""


def device_name() -> str:
    """Return the current GPU's name, or CPU with its architecture."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def processes() -> int:
    """Return how many processes train together; 1 without torch.distributed."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def versions(*more: str) -> dict[str, str]:
    """Return the versions of what a figure depends on, and of `more` packages that are installed."""
    found = {package: version for package in (*_PACKAGES, *more) if (version := installed(package)) is not None}
    return {"python": platform.python_version(), **found}


def installed(package: str) -> str | None:
    """Return the installed version, found without importing the package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Count the cores this process may run on, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram_bytes() -> int:
    """Return the physical memory of the host; 0 where the system doesn't say."""
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
