"""Sort the slots of a top-k choice by expert, slots of one expert in their order.

    offsets_e = Σ_{e' ≤ e} |{s: choice_s = e'}|        rows: slots sorted by (choice_s, s)

By torch a stable sort; in Triton a counting sort: count in blocks, one running sum, place. No atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton

BLOCK = 128


def route_reference(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Return offsets [E], slots [S], tokens [S], experts [S] and inverse [T, K], int32 (`moe.route.Routing`).

    Args:
        top_k_index: integers [T, K] in [0, num_experts); S = T·K.
        num_experts: E.
    """
    ids = top_k_index.flatten().to(torch.int32)
    experts, slots = ids.sort(stable=True)
    every = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
    rows = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    inverse = torch.empty_like(rows).scatter_(0, slots, rows)
    slots = slots.to(torch.int32)
    return offsets, slots, slots // top_k_index.shape[1], experts, inverse.view(top_k_index.shape)


@triton.jit
def _count(
    ids_ptr,  # integers [S]
    counts_ptr,  # int32 [E, blocks]
    S, blocks, EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a block's slots of each expert."""
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + slots, mask=slots < S, other=E).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + experts * blocks + block, counts, mask=experts < E)


@triton.jit
def _place(
    ids_ptr,  # integers [S]
    counts_ptr, upto_ptr,  # int32 [E, blocks]: counts, and their running sum, expert by expert
    offsets_ptr,  # int32 [E]
    slots_ptr, tokens_ptr, experts_ptr, inverse_ptr,  # int32 [S]
    S, K, blocks,
    EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place a block's slots."""
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    inside = slots < S
    ids = tl.load(ids_ptr + slots, mask=inside, other=E).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    upto = tl.load(upto_ptr + experts * blocks + block, mask=experts < E, other=0)
    before = upto - tl.load(counts_ptr + experts * blocks + block, mask=experts < E, other=0)
    # a slot's row: slots of earlier experts and blocks, and those of its expert before it in this block
    mine = (ids[:, None] == experts[None, :]).to(tl.int32)
    rows = tl.sum(mine * (tl.cumsum(mine, 0) - 1 + before[None, :]), 1)
    tl.store(slots_ptr + rows, slots, mask=inside)
    tl.store(tokens_ptr + rows, slots // K, mask=inside)
    tl.store(experts_ptr + rows, ids, mask=inside)
    tl.store(inverse_ptr + slots, rows, mask=inside)
    if block == blocks - 1:  # whose running sums are where experts end
        tl.store(offsets_ptr + experts, upto, mask=experts < E)


def route_triton(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Do what `route` does, by its Triton kernels."""
    ids = top_k_index.contiguous()
    size, k = ids.numel(), ids.shape[1]
    blocks = max(cdiv(size, BLOCK), 1)  # without tokens, too, somebody writes the offsets
    counts = torch.empty(num_experts * blocks, dtype=torch.int32, device=ids.device)
    options = {"EXPERTS": next_power_of_2(num_experts), "E": num_experts, "BLOCK": BLOCK, "num_warps": 8}
    launch(_count, (blocks,), ids, counts, size, blocks, **options)
    upto = torch.cumsum(counts, 0, dtype=torch.int32)  # expert by expert: what lies before a block's slots of one
    offsets = counts.new_empty(num_experts)
    slots, tokens, experts, inverse = (counts.new_empty(size) for _ in range(4))
    launch(_place, (blocks,), ids, counts, upto, offsets, slots, tokens, experts, inverse, size, k, blocks, **options)
    return offsets, slots, tokens, experts, inverse.view(top_k_index.shape)


route = by_device(route_reference, route_triton)
