"""Micro-batches without padding where rows aren't packed: the documents of one lie end to end in a row of their own.

Each optimiser step has the documents that it would have had padded, and the same loss: documents don't see each other.
What can't keep them apart is padded: families that the probe refuses, and what reads a batch as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pronghorn.data.batch import LONGEST_TAIL, TILE_ROWS, Collator, PackedBatch, coarse, round_up
from pronghorn.device import processes
from pronghorn.errors import UnsupportedError
from pronghorn.families.generic import scales_queries_from, text_config
from pronghorn.models.attach import Handle, attached
from pronghorn.models.causal_lm import has_own_loss
from pronghorn.models.families import balances_experts, base_causal_lm, longest_tail, position_limits, rope_limit
from pronghorn.models.generic import PACKING
from pronghorn.models.metadata import mixing_adapter
from pronghorn.models.padded_probe import require_padded
from pronghorn.models.probe import require_isolation
from pronghorn.models.report import PathTaken
from pronghorn.precision.compute import Compute


@dataclass(frozen=True)
class EndToEnd:
    """Makes a batch dict of documents as they are: one row, filled up to a multiple of some tokens.

    Args:
        pad_token_id: what fills the tail (None: 0).
        multiple: of tokens; so that few lengths of rows differ.
        few: a flag [1] in shared memory, which worker processes see change: while it is set lengths are rounded up
            further (`coarse`), so that few are left. None: they never are.
        longest_tail: the most tokens that this may add to a row.
    """

    pad_token_id: int | None
    multiple: int = TILE_ROWS
    few: Tensor | None = field(default=None, compare=False)
    longest_tail: int = LONGEST_TAIL

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate documents of `input_ids` and, where not all tokens are trained, `labels` (unshifted): lists, arrays
        or tensors."""
        ids = [row["input_ids"] for row in rows]
        labels = [row.get("labels", row["input_ids"]) for row in rows]
        whole: dict[str, list[int]] = {
            "input_ids": [*chain(*map(_listed, ids))],
            "labels": [*chain(*map(_listed, labels))],
            "lengths": [len(each) for each in ids],
        }
        tokens = len(whole["input_ids"])
        step = self.multiple
        if self.few is not None and self.few.item():
            step = coarse(tokens, step, self.longest_tail)
        return Collator(round_up(tokens, step), self.pad_token_id)([whole])

    def is_one_of_few(self, packed: PackedBatch) -> bool:
        """Tell whether a row's length is among those that are left where few are wanted."""
        tokens = packed.real_tokens
        return packed.tokens == round_up(tokens, coarse(tokens, self.multiple, self.longest_tail))


def _listed(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else values


def end_to_end(batch: dict[str, Any], collate: EndToEnd) -> dict[str, Any]:
    """Return a padded batch with its documents in one row; as it is where there is more than tokens, a mask and labels,
    or a sequence begins with padding, from which transformers' loss predicts its first token."""
    if set(batch) != {"input_ids", "attention_mask", "labels"}:
        return batch
    ids, mask, labels = (batch[name].cpu().numpy() for name in ("input_ids", "attention_mask", "labels"))
    if mask.shape != ids.shape or not mask[:, 0].all():
        return batch
    rows = [
        {"input_ids": each[there].tolist(), "labels": wanted[there].tolist()}
        for each, there, wanted in zip(ids, mask.astype(bool), labels, strict=True)
    ]
    return {name: value.to(batch["input_ids"].device) for name, value in collate(rows).items()}


def joining(trainer: Any, pad_token_id: int | None) -> EndToEnd:
    """Make a trainer's collator of documents end to end; its tail is no longer than the model's documents may be."""
    base = base_causal_lm(trainer.model)
    if PACKING in base.__dict__ and balances_experts(base.config):
        return EndToEnd(pad_token_id, 1)  # transformers' auxiliary loss would count the tail
    handle = attached(trainer.model)
    multiple = min([int(trainer.args.pad_to_multiple_of or TILE_ROWS), *position_limits(base.config)])
    graphed = handle is not None and handle.graphs is not None
    few = torch.zeros(1, dtype=torch.bool).share_memory_() if graphed else None
    return EndToEnd(pad_token_id, multiple, few, longest_tail(base.config))


@contextmanager
def few_lengths(collate: EndToEnd | None, model: Any, packed: PackedBatch | None) -> Iterator[None]:
    """Let a micro-batch be trained. Its collators learn whether CUDA graphs are replayed, each of which serves rows of
    one length; a row that was made before they knew goes without, so that none is captured for it."""
    handle = attached(model)
    if handle is None or handle.graphs is None or collate is None or collate.few is None or packed is None:
        yield
        return
    graphs, paused = handle.graphs, handle.graphs.paused
    collate.few.fill_(graphs.replayed)
    graphs.paused = paused or (graphs.replayed and not collate.is_one_of_few(packed))
    try:
        yield
    finally:
        graphs.paused = paused


def why_padded(model: Any, noise: Any, most: int | None) -> str | None:
    """Say why a model's documents can't lie in one row, as far as it is known without its weights; None: they can.

    Args:
        noise: NEFTune's, or None.
        most: tokens of the longest document, or None if nobody knows.
    """
    base = base_causal_lm(model)
    limit = rope_limit(base.config)
    config = getattr(model, "active_peft_config", None)
    if noise:
        return "NEFTune's noise goes by a batch's padded width"
    if config is not None and getattr(config, "is_prompt_learning", False):
        return f"{config.peft_type.value} puts virtual tokens before the prompt"
    if (adapter := mixing_adapter(model)) is not None:
        return f"documents see each other by {adapter}"
    if limit is not None and (most or limit + 1) > limit:
        return f"beyond {limit:,} tokens this model's RoPE depends on the longest document of a row"
    if (first := scales_queries_from(text_config(base.config))) is not None:
        return f"this model scales queries of tokens beyond {first:,} by their place in a row"
    return "the model's loss_function is its own" if has_own_loss(base) else None


def how_batched(trainer: Any, packs: bool) -> list[PathTaken]:
    """Say how documents lie in batches: the line of a run without packing, beside those of its model."""
    if packs:
        return []
    if trainer.padded is not None:
        return [PathTaken("documents", "padded to the longest of a micro-batch", trainer.padded)]
    return [PathTaken("documents", "end to end in one row, without padding", "packing is off")]


def settle(trainer: Any, handle: Handle, packs_train: bool, packs_eval: bool) -> str | None:
    """Prove what training needs of a generic family; return why micro-batches are padded, None where they aren't.

    Raises:
        UnsupportedError: documents that are to be packed, or padded ones, aren't what they mean; or padding is refused
            by another argument.
    """
    args, model = trainer.args, handle.model
    generic = PACKING in model.__dict__
    why = None
    with trainer.accelerator.autocast():
        if generic and (packs_train or packs_eval):
            require_isolation(model)
        if not packs_train:
            why = why_padded(trainer.model, args.neftune_noise_alpha, args.max_length)
            if why is None and trainer.has_own_loss and not args.padding_free:
                why = "compute_loss is a subclass's and may read logits: padding_free=True if it doesn't"
            if why is None and processes() > 1 and args.accelerator_config.dispatch_batches:
                why = "dispatch_batches lets one process read for all, by rows of a batch"
            if why is None and generic:
                try:
                    require_isolation(model)
                except UnsupportedError as error:
                    why = error.problem
        evaluates = trainer.eval_dataset is not None and not packs_eval
        if generic and (why is not None or evaluates):
            require_padded(model)
    if why is not None and (args.padding_free or handle.options.compute is not Compute.DTYPE):
        name = "padding_free" if args.padding_free else "compute"
        raise UnsupportedError(f"{name} with documents that have to be padded: {why}", f"leave {name} out")
    return why
