"""Compute a block that takes each row by itself in tiles of rows, forward and backward.

    forward     out_t = f(x_t)                                     for every tile t; x alone is kept
    backward    f(x_t) again, dx_t, and dW = Σ_t dW_t              in float32

So no tensor of all rows is as wide as the MLP. It computes what a recomputed MLP computes, but a layer's recomputation
leaves the MLP out, since its backward comes back to it; a tile's products are as large as a short row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pronghorn.layers.block import Block, Call, Gradients, Result
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.memory.plan import Policy


def forward(block: Block, x: Tensor, linears: Sequence[FusedLinear], call: Call) -> Result:
    """Compute a block without named inputs or outputs of x [T, H], `call.mlp_rows` rows at a time."""
    saved = block.Saved._make(x if name == "x" else None for name in block.Saved._fields)  # type: ignore[attr-defined]
    if not call.output_wanted:
        return Result(x.new_empty(()).expand_as(x), (), saved)
    whole, out = replace(call, mlp_rows=0), torch.empty_like(x)
    for x_tile, out_tile in zip(x.split(call.mlp_rows), out.split(call.mlp_rows), strict=True):
        out_tile.copy_(block.compute(x_tile, (), linears, whole).x)
    return Result(out, (), saved)


def gradients(block: Block, dx: Tensor, x: Tensor, linears: Sequence[FusedLinear], call: Call) -> Gradients:
    """Compute the gradients from dx [T, H], those of the result, and x [T, H].

    Those of trained tensors are summed in float32 (float64 for float64).
    """
    whole = replace(call, mlp_rows=0, policy=Policy.KEEP, output_wanted=False)
    linears, out = [linear.summing() for linear in linears], torch.empty_like(x)
    sums: list[Tensor | None] = []
    tiles = (tensor.split(call.mlp_rows) for tensor in (x, dx, out))
    for x_tile, dx_tile, out_tile in zip(*tiles, strict=True):
        # the tile's forward again, for what its backward reads: its output is left out
        saved = block.compute(x_tile, (), linears, whole).saved
        found = block.gradients(dx_tile, (), saved, (), linears, whole, True)
        del saved
        assert found.x is not None
        out_tile.copy_(found.x)
        if not sums:
            sums = [None if grad is None else grad.to(linears[0].gradient_dtype) for grad in found.trained]
            continue
        for total, grad in zip(sums, found.trained, strict=True):
            if total is not None and grad is not None:
                total.add_(grad)
    pairs = zip(sums, block.trained, strict=True)
    trained = [None if total is None or each is None else total.to(each.dtype) for total, each in pairs]
    return Gradients(out, (), trained)
