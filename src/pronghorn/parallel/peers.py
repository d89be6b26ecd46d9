"""Let the GPUs of one host read each other's memory, where layers are shared.

NCCL gathers by kernels that take multiprocessors from the products beside them: of 8B's layers on two H100s these took
7 % longer. Here what others read lies in memory that every process maps (torch's symmetric memory), and is copied by
the copy engines: frozen weights' parts themselves, which never change, and of weights that are trained what
`parallel.copies` puts there. Where that can't be had, NCCL gathers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.parallel.unit import Unit


class Mapped(NamedTuple):
    """Memory of this process that the others of a group read, until no process has a reference to its `own`."""

    own: Tensor
    """uint8 [bytes]."""
    peers: list[Tensor]
    """That of all processes, in the order of their ranks."""


def open_parts(units: Sequence[Unit], group: Any) -> str:
    """Move parts into memory that all processes of a group read, or say why not. All processes call it."""
    device = units[0].part.device

    def move() -> None:
        for unit in units:
            own = _allocate(unit.part.numel(), device)
            unit.part = own.copy_(unit.part)
            torch.cuda.empty_cache()  # the next one's memory isn't an allocator's: this one's must be free again

    def read() -> None:
        for unit in units:
            unit.peers = _map(unit.part, group)

    reason = _agreed((move, read), device, group)
    if reason:
        for unit in units:
            unit.peers = []
        return reason
    torch.cuda.synchronize(device)  # what was moved is there before anybody reads it
    dist.barrier(group)
    return ""


def open_memory(sizes: Sequence[int], device: torch.device, group: Any) -> list[Mapped] | str:
    """Return memory of these bytes that all processes of a group read, or why there is none. All processes call it."""
    made = list[Tensor]()
    found = list[Mapped]()

    def allocate() -> None:
        torch.cuda.empty_cache()
        made.extend(_allocate(size, device) for size in sizes)

    reason = _agreed((allocate, lambda: found.extend(Mapped(own, _map(own, group)) for own in made)), device, group)
    return reason or found


def _agreed(steps: Sequence[Callable[[], None]], device: torch.device, group: Any) -> str:
    """Do what all processes do or none; return why one couldn't. They may wait for each other within a step."""
    reason = _refused(device, group)
    for step in steps:  # all agree after each
        if reason:
            break
        try:
            step()
        except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = f"torch's symmetric memory failed: {lines[0]}"
        reason = next((each for each in _of_all(reason, group) if each), "")
    return reason


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


def _allocate(size: int, device: torch.device) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric  # documented by torch, in spite of its name

    return symmetric.empty(size, dtype=torch.uint8, device=device)


def _map(own: Tensor, group: Any) -> list[Tensor]:
    """Return all processes' memory; each gives as much."""
    import torch.distributed._symmetric_memory as symmetric

    handle: Any = symmetric.rendezvous(own, group)
    return [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(dist.get_world_size(group))]


def _of_all(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
