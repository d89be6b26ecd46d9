"""Padded batches with less padding: a step's documents are sorted by length before they are cut into micro-batches.
Where a script asks for transformers' own groups of like lengths instead, each epoch's are the same after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from pronghorn.data.dealing import ByLength, Share
from pronghorn.data.packed_rows import lengths_of
from pronghorn.models.causal_lm import has_own_loss
from pronghorn.models.families import balances_experts, base_causal_lm, rope_limit
from pronghorn.models.metadata import mixing_adapter
from pronghorn.train.ranks import data_seed


def sort_steps(loader: Any, trainer: Any) -> DataLoader:
    """Let stock's loader of padded batches deal each step's documents by their lengths, and return it.

    It stays as it is where a step is one micro-batch or has no padding, lengths are not known, the order is another
    than stock's random or sequential one, or where micro-batches of other documents would make another step.
    """
    args, rows, how = trainer.args, trainer.train_dataset, trainer.args.accelerator_config
    if not (isinstance(rows, Dataset) and "input_ids" in rows.column_names and adds_up(trainer)):
        return loader
    cut = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)  # accelerate deals its batches in turn
    sampler = getattr(cut, "sampler", None)
    in_turn = how.even_batches and not how.split_batches and not how.dispatch_batches
    if not (in_turn and isinstance(sampler, (RandomSampler, SequentialSampler))):
        return loader
    share = Share(args.process_index, args.world_size, cut.batch_size, args.gradient_accumulation_steps)
    if share.micro_batches > 1 and share.rows * share.processes > 1:
        loader.set_sampler(ByLength(sampler, partial(lengths_of, rows), share, cut.drop_last))
    return loader


class GroupedByLength(Sampler):
    """transformers' groups of documents of like lengths, which the seed and the epoch alone decide.

    Without a generator it draws from torch's random state at the beginning of an epoch, and a training that was resumed
    in its second epoch has another one, as has each process of several after dropout.
    """

    def __init__(self, stock: LengthGroupedSampler, seed: int) -> None:
        self.stock, self._seed, self._epoch = stock, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.stock.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return iter(self.stock)

    def __len__(self) -> int:
        return len(self.stock)


def seed_groups(loader: Any, args: Any) -> DataLoader:
    """Let a loader that draws transformers' groups of like lengths draw them by the seed and the epoch; return it."""
    cut = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)  # of several processes accelerate's
    stock = getattr(cut, "sampler", None)
    if isinstance(stock, LengthGroupedSampler) and stock.generator is None:
        loader.set_sampler(GroupedByLength(stock, data_seed(args)))
    return loader


def adds_up(trainer: Any) -> bool:
    """Tell whether a step's gradient is a sum over its documents, each by itself, whatever their micro-batches are.

    It isn't where a loss is a mean over micro-batches (the routers' auxiliary loss, models that take no count of
    labels, a loss function or `compute_loss` of somebody's own) or processes, or RoPE or NEFTune's noise depends on a
    batch's longest document, or an adapter on all tokens of a batch.
    """
    args, base = trainer.args, base_causal_lm(trainer.model)
    limit = rope_limit(base.config)
    return (
        trainer.model_accepts_loss_kwargs
        and (args.world_size == 1 or args.average_tokens_across_devices)
        and not balances_experts(base.config)
        and not (has_own_loss(base) or trainer.has_own_loss)
        and not args.neftune_noise_alpha
        and mixing_adapter(trainer.model) is None
        and (limit is None or (args.max_length or limit + 1) <= limit)
    )
