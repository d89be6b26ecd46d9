"""Several processes of one test, which talk by gloo."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2


def together(work: Callable[[int, Path], None], folder: Path) -> None:
    """Call something in WORLD processes that joined, each with its number, and wait until all are done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(_joined, (port, work, folder), nprocs=WORLD, start_method="fork")


def _joined(rank: int, port: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    work(rank, folder)
    dist.barrier()
    dist.destroy_process_group()
