"""The loss of a packed batch from the hidden states of its supervised tokens; the full logits are never built.

    loss = 1/N Σ_{t in loss_rows} −log softmax(head(h_t))[label_{t+1}]

where N is the supervised tokens of the whole accumulated batch. Rows go through the head in chunks whose float32 logits
stay under `CHUNK_BYTES`; with more than one chunk each is recomputed in the backward pass instead of kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from pronghorn.data.batch import PackedBatch
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.kernels.linear_cross_entropy import linear_cross_entropy
from pronghorn.layers.build import watched
from pronghorn.layers.linears import products_dtype

CHUNK_BYTES = 256 * 2**20


def packed_lm_loss(
    hidden: Tensor,
    labels: Tensor,
    packed: PackedBatch,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return next-token cross-entropy over the supervised positions only.

    Args:
        hidden: [1, T, H], the backbone's last hidden state, or its `loss_rows` [1, M_b, H] where only these were made.
        labels: int64 [1, T], unshifted, -100 where nothing is predicted.
        packed: the batch's metadata, made with labels.
        head: maps [M, H] to logits [M, V].
        vocab_size: V, which decides the rows of a chunk.
        softcap: c of `c · tanh(logits / c)` (Gemma 2), or None.
        scale: what logits are multiplied by (Granite).
        num_items: what the sum is divided by: the supervised tokens of the accumulated batch over all ranks; None for
            this batch's own.
    Returns:
        float32 scalar.
    """
    rows = packed.loss_rows
    assert rows is not None, "packed_lm_loss needs a batch made with labels"
    next_labels = pad(labels.flatten()[1:], (0, 1), value=IGNORE_INDEX)
    selected, targets = hidden.flatten(0, 1), next_labels[rows]
    if len(selected) == packed.tokens:
        selected = selected[rows]
    if scale != 1:
        selected = selected * scale  # logits are linear in them, and there are more logits
    # Nothing supervised anywhere is a loss of 0, not 0 / 0.
    divisor = packed.n_labels if num_items is None else num_items
    if is_fused(head):
        assert isinstance(head, nn.Linear)
        selected, divisor = selected.to(products_dtype(head.weight)), _at_least_one(divisor)
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(selected, head.weight, targets, divisor, IGNORE_INDEX, softcap)

    def chunk_loss(chunk: Tensor, target: Tensor) -> Tensor:
        logits = head(chunk).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="sum")

    step = _rows_of_a_chunk(vocab_size)
    total = hidden.new_zeros((), dtype=torch.float32)
    for chunk, target in zip(selected.split(step), targets.split(step), strict=True):
        if len(selected) <= step or not torch.is_grad_enabled():
            total = total + chunk_loss(chunk, target)
        else:
            part: Any = checkpoint(chunk_loss, chunk, target, use_reentrant=False)
            total = total + part
    return total / _at_least_one(divisor)


def is_fused(head: Any) -> bool:
    """Tell whether a head's loss is computed with it, by `linear_cross_entropy`: adapters, copies, a bias or hooks keep
    it from that."""
    return type(head) is nn.Linear and head.bias is None and not watched([head])


def logits_bytes(head: Any, vocab_size: int, tokens: int, softcap: float | None) -> int:
    """Count what a chunk's logits take at most where the loss isn't fused with the head, else return 0: three times
    their float32, as their gradient is made or an adapter's share is added; where they are capped, four times."""
    rows = 0 if is_fused(head) else min(_rows_of_a_chunk(vocab_size), tokens)
    return rows * vocab_size * (12 if softcap is None else 16)


def _rows_of_a_chunk(vocab_size: int) -> int:
    return max(256, CHUNK_BYTES // (4 * vocab_size) // 256 * 256)


def _at_least_one(divisor: Tensor | int) -> Tensor | int:
    return divisor.clamp(min=1) if isinstance(divisor, Tensor) else max(divisor, 1)
