"""Let the GPUs of one host read each other's parts of frozen weights, which never change.

NCCL gathers by kernels that take multiprocessors from the products beside them: of 8B's layers on two H100s these took
7 % longer. Here parts lie in memory that every process maps (torch's symmetric memory), and are copied by the copy
engines. Where that can't be had, NCCL gathers.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Opened(NamedTuple):
    """One part, in memory that other processes read."""

    part: Tensor
    """This process's."""
    all: list[Tensor]
    """Every process's, in the order of ranks."""


def open_parts(parts: Sequence[Tensor], group: Any) -> list[Opened] | str:
    """Move parts into memory that all processes of a group read, or say why not. All processes call it.

    Args:
        parts: uint8, each of one size in all processes; may be freed one by one.
    """
    found: list[Opened] | str = ""
    if (reason := _refused(parts[0].device, group)) == "":
        try:
            found = [_open(part, group) for part in parts]
        except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError) as error:
            reason = (
                f"torch's symmetric memory failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
    reasons = _of_all(reason, group)
    if any(reasons):
        return next(each for each in reasons if each)
    torch.cuda.synchronize(parts[0].device)  # what was copied is there before anybody reads it
    dist.barrier(group)
    return found


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


def _open(part: Tensor, group: Any) -> Opened:
    import torch.distributed._symmetric_memory as symmetric  # documented by torch, in spite of its name

    own = symmetric.empty(part.numel(), dtype=part.dtype, device=part.device)
    handle: Any = symmetric.rendezvous(own, group)
    own.copy_(part)
    return Opened(own, [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(dist.get_world_size(group))])


def _of_all(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
