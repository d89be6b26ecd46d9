"""Checks of processes that were started together, before one waits for another that can't answer."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import torch
import torch.distributed as dist
from datasets import IterableDataset

from pronghorn.config.recipe import Recipe
from pronghorn.device import processes
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.loading.load import default_device, resolve_dtype
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
    if device.type != "cuda":
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


def share_output(args: Any) -> None:
    """Let all processes use the `output_dir` of the first, which may be named by the time: there checkpoints are saved,
    and from there each loads the best. All processes call it."""
    if processes() > 1:
        args.output_dir = _told("output_dir", str(args.output_dir))[0]


def settle_loading(args: Any, packs_train: bool, packs_eval: bool | None, evaluated: Any) -> None:
    """Refuse what makes processes' batches unlike, or a step another one, and let each process read streamed rows by
    itself, as TRL does for training: accelerate would join the processes' batches, whose widths differ.

    Args:
        packs_eval: None where nothing is evaluated.
        evaluated: the trainer's `eval_dataset`.
    """
    if processes() == 1:
        return
    how, packs_all = args.accelerator_config, packs_train and packs_eval is not False
    if packs_train and not args.average_tokens_across_devices:
        raise UnsupportedError(
            "average_tokens_across_devices = False with packed rows, of which an epoch's last step has too few for all "
            "processes: one without labels would count as much as the others",
            "leave it at True, or set packing=False",
        )
    if packs_train and how.split_batches:
        raise UnsupportedError(
            "accelerator_config's split_batches with packed rows",
            "leave it out: per_device_train_batch_size are the rows of each process",
        )
    if not (how.even_batches or packs_all or args.dataloader_drop_last):
        raise ConfigError(
            f"accelerator_config's even_batches = False, and {processes()} processes that may have unlike many "
            "batches: one would wait for another that has ended",
            "leave it out, or set dataloader_drop_last=True",
        )
    of_one_width = args.pad_to_multiple_of and args.max_length and args.pad_to_multiple_of >= args.max_length
    if how.dispatch_batches and not (how.split_batches or packs_all or of_one_width):
        raise ConfigError(
            "accelerator_config's dispatch_batches joins the processes' batches, which are padded to unlike lengths",
            "leave it out: each process reads its own; or set split_batches beside it",
        )
    given = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
    if how.dispatch_batches is None and any(isinstance(each, IterableDataset) for each in given):
        how.dispatch_batches = False


def check_same_data(name: str, given: Any) -> None:
    """Refuse data sets that differ between processes, by their length and three documents: each would take its share
    of another order, and one with more rows wait forever. All processes call it.

    Raises:
        DataError: they differ.
    """
    if processes() == 1:
        return
    own = hashlib.blake2b(digest_size=8)
    for dataset in given.values() if isinstance(given, dict) else [given]:
        documents: Any = getattr(dataset, "documents", dataset)
        count = len(documents) if hasattr(documents, "__len__") else 0
        own.update(repr([count, *(documents[at] for at in (0, count // 2, count - 1) if count)]).encode())
    if len(set(_told(name, own.hexdigest()))) > 1:
        raise DataError(
            f"{name} is another one in each of {processes()} processes",
            "give all of them the same rows in the same order (shuffle with a seed, don't split by process): the "
            "trainer gives each its share",
        )


def check_one_dtype(recipe: Recipe) -> None:
    """Refuse `precision.dtype: auto` where it means something else on other processes' GPUs. All processes call it.

    Raises:
        ConfigError: with the dtype that all of them have.
    """
    own = str(resolve_dtype(recipe.precision.dtype, default_device())).removeprefix("torch.")
    dtypes = sorted(set(_told("dtype", own)))
    if len(dtypes) > 1:
        raise ConfigError(
            f"precision.dtype: {recipe.precision.dtype} is {' on some of these GPUs and '.join(dtypes)} on others",
            "set precision.dtype: float16, or leave the older GPUs out by CUDA_VISIBLE_DEVICES",
        )


def agreed(what: str, own: bool) -> bool:
    """Tell whether something holds in all processes. All of them call it."""
    return set(_told(what, str(own))) == {str(True)}


def _told(what: str, value: str) -> list[str]:
    """Return each process's value, in the order of ranks, by what they share besides collectives: no GPU takes part."""
    if processes() == 1:
        return [value]
    store = dist.distributed_c10d._get_default_store()  # torch names it only so
    rank = dist.get_rank()
    times = store.add(f"pronghorn: times that {rank} told its {what}", 1)  # what it told before may still be there
    store.set(f"pronghorn: {what} {times} of {rank}", value)
    return [store.get(f"pronghorn: {what} {times} of {each}").decode() for each in range(processes())]
