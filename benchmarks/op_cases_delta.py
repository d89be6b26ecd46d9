"""Make the cases of the ops around the gated delta rule: the formula in plain torch, inputs, ways.

Predicted on an H200 before the first run, of Qwen3.5-4B's 8,192 tokens: the convolution .09 ms and .25 (it reads x
again and again from the cache), the norm .06 and .11, the gates .01 each. Measured: .112 and .743, .060 and .135, .006
each. The convolution's backward was then cut in two, which should take .15 and .11; not measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_case import Case, Draw, by_kernel
from pronghorn.kernels import causal_conv, delta_gates, gated_norm

EPS = 1e-6
DOCUMENT = 178
"""Tokens of a document: 46 of them in 8,192, as instructions have."""


def convolution_case(draw: Draw, tokens: int, channels: int, size: int = 4) -> Case:
    """x: [T, C], of documents of `DOCUMENT` tokens; the weight is frozen."""
    ids = (torch.arange(tokens, device=draw.device) // DOCUMENT).int()
    x, weight, dy = draw(tokens, channels), draw(channels, size), draw(tokens, channels)

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (causal_conv.forward(x, weight, ids),)

    def backward(_: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return (causal_conv.backward(dy, x, weight, ids, weight_grad=False)[0],)

    return Case(
        "causal_conv", f"{tokens}x{channels}, width {size}", tokens,
        lambda x, weight: (causal_conv.forward_reference(x, weight, ids),), (x, weight), (dy,), ("y", "dx"),
        (2 * x.nbytes, 3 * x.nbytes), lambda case: by_kernel(case, forward, backward),
    )  # fmt: skip


def gated_norm_case(draw: Draw, tokens: int, heads: int, dim: int) -> Case:
    """x, z: [T, H, D]; the weight is frozen."""
    x, z, dy = (draw(tokens, heads, dim) for _ in range(3))

    def forward(x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (gated_norm.forward(x, z, weight, EPS),)

    def backward(_: Tensor, x: Tensor, z: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return gated_norm.backward(dy, x, z, weight, EPS, weight_grad=False)[:2]

    return Case(
        "gated_norm", f"{tokens}x{heads}x{dim}", tokens,
        lambda x, z, weight: (gated_norm.forward_reference(x, z, weight, EPS),), (x, z, draw(dim)), (dy,),
        ("y", "dx", "dz"), (3 * x.nbytes, 5 * x.nbytes), lambda case: by_kernel(case, forward, backward), trained=2,
    )  # fmt: skip


def gates_case(draw: Draw, tokens: int, heads: int) -> Case:
    """b, a: [T, H]; A and dt are frozen."""
    b, a, dg, d_beta = (draw(tokens, heads) for _ in range(4))
    decay, step = draw(heads).float(), draw(heads).float()

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        _, b, a, decay, step, dg, d_beta = tensors
        return delta_gates.backward(dg, d_beta, b, a, decay, step)

    return Case(
        "delta_gates", f"{tokens}x{heads}", tokens, delta_gates.forward_reference, (b, a, decay, step),
        (dg.float(), d_beta), ("g", "beta", "db", "da"), (3 * b.nbytes + b.numel() * 4, 5 * b.nbytes + b.numel() * 4),
        lambda case: by_kernel(case, delta_gates.forward, backward), trained=2,
    )  # fmt: skip
