"""Which rows each tile of a grouped product has, and of which expert: found once, and read by every program.

A program that looked for its expert by itself would add up all experts' tiles, 128 of them in Qwen3-30B-A3B, which
takes as long as a fifth of its product in 8 bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton

BLOCK = 16
"""Tiles that a program finds."""


def most_tiles(rows: int, experts: int, tile: int) -> int:
    """Return the most tiles of so many rows that any grouping could need."""
    return cdiv(rows, tile) + experts


def expert_tiles_reference(offsets: Tensor, rows: int, tile: int) -> Tensor:
    """Cut each expert's rows into tiles.

    Args:
        offsets: int32 [E], where each expert's rows end; the last is S.
        rows: S, as the host knows it.
        tile: rows of a tile.
    Returns:
        int32 [3, `most_tiles`]: each tile's expert, its first row and its expert's last row + 1; E, S and S past the
        last tile.
    """
    found = [
        (expert, first, end)
        for expert, (start, end) in enumerate(pairwise([0, *offsets.tolist()]))
        for first in range(start, end, tile)
    ]
    found += [(len(offsets), rows, rows)] * (most_tiles(rows, len(offsets), tile) - len(found))
    return torch.tensor(found, dtype=torch.int32, device=offsets.device).t().contiguous()


@triton.jit
def _tiles(
    offsets_ptr,  # int32 [E]
    tiles_ptr,  # int32 [3, COUNT]
    COUNT, S, TILE: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find some tiles' experts and rows."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + ids, mask=ids < E, other=0)
    starts = tl.load(offsets_ptr + ids - 1, mask=(ids > 0) & (ids < E), other=0)
    counts = tl.where(ids < E, (ends - starts + TILE - 1) // TILE, 0)
    upto = tl.cumsum(counts, 0)
    done = (upto[None, :] <= tile[:, None]) & (ids < E)[None, :]
    expert = tl.sum(done.to(tl.int32), 1)  # so many have all of their tiles before this one
    mine = ids[None, :] == expert[:, None]
    firsts = (starts + (counts - upto) * TILE)[None, :] + tile[:, None] * TILE
    past = expert == E
    first = tl.where(past, S, tl.sum(tl.where(mine, firsts, 0), 1))
    end = tl.where(past, S, tl.sum(tl.where(mine, ends[None, :], 0), 1))
    inside = tile < COUNT
    tl.store(tiles_ptr + tile, expert, mask=inside)
    tl.store(tiles_ptr + COUNT + tile, first, mask=inside)
    tl.store(tiles_ptr + 2 * COUNT + tile, end, mask=inside)


def expert_tiles_triton(offsets: Tensor, rows: int, tile: int) -> Tensor:
    """Do what `expert_tiles` does, by its Triton kernel."""
    experts = len(offsets)
    count = most_tiles(rows, experts, tile)
    tiles = torch.empty(3, count, dtype=torch.int32, device=offsets.device)
    launch(
        _tiles, (cdiv(count, BLOCK),), offsets, tiles, count, rows,
        TILE=tile, E=experts, EXPERTS=next_power_of_2(experts), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return tiles


expert_tiles = by_device(expert_tiles_reference, expert_tiles_triton)
