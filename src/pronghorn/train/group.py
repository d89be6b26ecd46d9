"""Checks of processes that were started together, before one waits for another that can't answer."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from pronghorn.config import Recipe
from pronghorn.device import processes
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.models.load import default_device, resolve_dtype
from pronghorn.text import counted


def check_backend(count: int) -> None:
    """Refuse so many processes on GPUs where torch has no NCCL, by which these exchange.

    Raises:
        UnsupportedError: it has none.
    """
    if count > 1 and torch.cuda.is_available() and not dist.is_nccl_available():
        raise UnsupportedError(
            f"{count} processes on GPUs, and this build of torch ({torch.__version__}) has no NCCL",
            "install torch's CUDA build for Linux, or train on one GPU: --gpus 1",
        )


def check_gpus_apart(device: torch.device) -> None:
    """Refuse two processes on one GPU, which NCCL can't serve. All processes call it.

    Args:
        device: this process's.
    Raises:
        ConfigError: two have the same.
    """
    if processes() == 1 or device.type != "cuda":
        return
    everybody = _told("GPU", identity(device))
    twice = [rank for rank, each in enumerate(everybody) if each in everybody[:rank]]
    if twice:
        there = len(set(everybody))
        raise ConfigError(
            f"{len(everybody)} processes were started, and they have {counted(there, 'GPU')}: process "
            f"{twice[0]} has that of process {everybody.index(everybody[twice[0]])}",
            "start one for each GPU: pronghorn train does, or torchrun --nproc-per-node GPUS",
        )


def identity(device: torch.device) -> str:
    """Return what tells a GPU from all others, of other hosts too."""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def check_one_dtype(recipe: Recipe) -> None:
    """Refuse `precision.dtype: auto` where it means something else on other processes' GPUs. All processes call it.

    Raises:
        ConfigError: with the dtype that all of them have.
    """
    if processes() == 1:
        return
    own = str(resolve_dtype(recipe.precision.dtype, default_device())).removeprefix("torch.")
    dtypes = sorted(set(_told("dtype", own)))
    if len(dtypes) > 1:
        raise ConfigError(
            f"precision.dtype: {recipe.precision.dtype} is {' on some of these GPUs and '.join(dtypes)} on others",
            "set precision.dtype: float16, or leave the older GPUs out by CUDA_VISIBLE_DEVICES",
        )


def _told(what: str, value: str) -> list[str]:
    """Return each process's value, in the order of ranks, by what they share besides collectives: no GPU takes part."""
    store = dist.distributed_c10d._get_default_store()  # torch names it only so
    rank = dist.get_rank()
    times = store.add(f"pronghorn: times that {rank} told its {what}", 1)  # what it told before may still be there
    store.set(f"pronghorn: {what} {times} of {rank}", value)
    return [store.get(f"pronghorn: {what} {times} of {each}").decode() for each in range(processes())]
