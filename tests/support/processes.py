"""Several processes of one test, which talk by gloo."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from accelerate.state import AcceleratorState
from torch import Tensor

from pronghorn.models.families import base_causal_lm
from pronghorn.parallel.sharded import sharded
from pronghorn.parallel.state import gathering

WORLD = 2
_LAST: deque[Any] = deque(maxlen=1)


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return a parameter's values in those of a file's tests that were selected, in order: what to compute for them."""
    variants = [
        item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(each.params[name] for each in variants if name in each.params))


def together(work: Callable[[int, Path], None], folder: Path, world: int = WORLD) -> None:
    """Call something in processes that joined, each with its number, and wait until all are done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(_joined, (world, port, work, folder), nprocs=world, start_method="fork")


@contextmanager
def alone() -> Iterator[None]:
    """Join a group of this process alone while the block runs, and keep the group until the next one is joined.

    DDP's reducer, if it were the last to hold the group, would destroy it with Python's lock held and wait for gloo's
    threads, of which one may wait for this lock to free the last sum's tensors (once in some 6,000 times).
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _LAST.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather_gradients(model: Any) -> None:
    """Give the weights of layers that are trained in parts their whole gradients. All processes call it."""
    shared = sharded(base_causal_lm(model))
    if shared is None or shared.trained is None:
        return
    shared.trained.finish()
    for index, gradient in enumerate(shared.trained.gradients):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        whole = torch.cat(parts)
        for parameter, begin in shared.trained.spans(index):
            parameter.grad = whole[begin : begin + parameter.numel()].view(parameter.shape)


def whole_state(model: Any) -> dict[str, Tensor]:
    """Return the state of a model whose layers are trained in parts, in the first process; others get nothing."""
    with gathering(model) as read:
        named = model.named_parameters(remove_duplicate=False)
        return {} if read is None else model.state_dict() | {name: read(p).clone() for name, p in named}


def _joined(rank: int, world: int, port: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # earlier tests had one process
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    work(rank, folder)
    dist.barrier()
    dist.destroy_process_group()
