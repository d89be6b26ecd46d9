"""Let the GPUs of one host read each other's parts of frozen weights, which never change.

NCCL gathers by kernels that take multiprocessors from the products beside them: of 8B's layers on two H100s these took
7 % longer. Here parts lie in memory that every process maps (torch's symmetric memory), and are copied by the copy
engines. Where that can't be had, NCCL gathers.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pronghorn.memory.sharded_unit import Unit


def open_parts(units: Sequence[Unit], group: Any) -> str:
    """Move parts into memory that all processes of a group read, or say why not. All processes call it."""
    reason = _refused(units[0].part.device, group)
    for step in (_move, _map):  # all agree after each: in the second they wait for each other
        if reason:
            break
        try:
            step(units, group)
        except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = f"torch's symmetric memory failed: {lines[0]}"
        reason = next((each for each in _of_all(reason, group) if each), "")
    if reason:
        for unit in units:
            unit.peers = []
        return reason
    torch.cuda.synchronize(units[0].part.device)  # what was moved is there before anybody reads it
    dist.barrier(group)
    return ""


def _refused(device: torch.device, group: Any) -> str:
    """Say why no process may even try; the same everywhere."""
    if device.type != "cuda":
        return "not on GPUs"
    everybody = _of_all((socket.gethostname(), device.index), group)
    if len({host for host, _ in everybody}) > 1:
        return "GPUs of several hosts"
    others = [index for _, index in everybody if index != device.index]
    able = all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    return "" if all(_of_all(able, group)) else "these GPUs don't read each other's memory"


def _move(units: Sequence[Unit], group: Any) -> None:
    """Move each part into memory that can be mapped."""
    import torch.distributed._symmetric_memory as symmetric  # documented by torch, in spite of its name

    for unit in units:
        own = symmetric.empty(unit.part.numel(), dtype=unit.part.dtype, device=unit.part.device)
        unit.part = own.copy_(unit.part)
        torch.cuda.empty_cache()  # the next one's memory is no allocator's: what this one freed must be the device's


def _map(units: Sequence[Unit], group: Any) -> None:
    """Map every process's parts."""
    import torch.distributed._symmetric_memory as symmetric

    for unit in units:
        handle: Any = symmetric.rendezvous(unit.part, group)
        sizes, dtype = unit.part.shape, unit.part.dtype
        unit.peers = [handle.get_buffer(rank, sizes, dtype) for rank in range(dist.get_world_size(group))]


def _of_all(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
