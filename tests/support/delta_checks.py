"""The gated delta rule's Triton kernels against the token-by-token recurrence in float64, into poisoned memory.

tests/kernels/test_gated_delta_kernels.py calls it with a CUDA device, and runs this file under Triton's interpreter:

    TRITON_INTERPRET=1 python tests/support/delta_checks.py        each decay once
    TRITON_INTERPRET=1 python tests/support/delta_checks.py all    with each dtype, and more draws
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pronghorn.chunks import Chunks, chunks_of
from pronghorn.kernels import gated_delta
from pronghorn.kernels.gated_delta_backward import backward_triton
from pronghorn.kernels.gated_delta_forward import L2_EPS, forward_triton
from support.interpreted import begin
from support.tolerance import ThreeWay

NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
LENGTHS = (1, 2, 3, 63, 64, 65, 129)
SMALL = 2, 4, 16, 32
"""Key heads, value heads, D_k, D_v."""
DECAYS = 1e-6, 1.0, 30.0


def case(
    lengths: Sequence[int],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    decay: float,
    seed: int,
    alike: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Make (q, k, v, g, beta) and do on the CPU; q, k, v are views of one tensor.

    Where they are `alike`, keys have two directions and β is near 1: what the inverse amplifies most.
    """
    key_heads, heads, key_dim, value_dim = sizes
    torch.manual_seed(seed)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, 2 * key_heads * key_dim + heads * value_dim).to(dtype)
    q, k, v = qkv.split([key_heads * key_dim] * 2 + [heads * value_dim], 1)
    q, k = (x.unflatten(1, (key_heads, key_dim)) for x in (q, k))
    g = -decay * torch.rand(tokens, heads) * torch.rand(tokens, heads)
    beta = torch.randn(tokens, heads).sigmoid()
    if alike:
        k.copy_(torch.randn(tokens, key_heads, 2) @ torch.randn(2, key_dim))
        beta = 1 - 0.05 * beta
    beta = beta.to(dtype)
    return [q, k, v.unflatten(1, (heads, value_dim)), g, beta], torch.randn(tokens, heads, value_dim).to(dtype)


def gradients(rule: Any, given: Sequence[Tensor], do: Tensor, chunks: Chunks, scale: float) -> list[Tensor]:
    """Return o and the gradients by autograd."""
    leaves = [x.detach().requires_grad_() for x in given]
    o = rule(*leaves, chunks, scale)
    return [o, *torch.autograd.grad(o, leaves, do)]


def check(
    device: str,
    dtype: torch.dtype,
    lengths: Sequence[int] = LENGTHS,
    sizes: tuple[int, int, int, int] = SMALL,
    decays: Sequence[float] = DECAYS,
    draws: int = 2,
    alike: bool = False,
) -> None:
    """Assert that o and all gradients are within the rule, these draws together, or 16 where they are in doubt. The
    plain path is the chunked reference, in 16 bits with its products' operands in 16 bits, as autocast rounds them."""
    scale, chunks = sizes[2] ** -0.5, chunks_of(lengths, len(lengths) + 3, sum(lengths))

    def draw(judged: ThreeWay, decay: float, seed: int) -> None:
        given, do = case(lengths, sizes, dtype, decay, seed, alike)
        exact = [x.double() for x in given]
        right = gradients(gated_delta.recurrent_reference, exact, do.double(), chunks, scale)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            plain = gradients(gated_delta.chunked_reference, given, do, chunks, scale)
        moved = [x.to(device) for x in given]
        if device != "cpu":
            moved[:3] = given[0].new_empty(0), given[1].new_empty(0), given[2].new_empty(0)
            whole = torch.cat([x.flatten(1) for x in given[:3]], 1).to(device)
            parts = whole.split([x.flatten(1).shape[1] for x in given[:3]], 1)
            moved[:3] = [p.unflatten(1, x.shape[1:]) for p, x in zip(parts, given[:3], strict=True)]
        on_device = Chunks(*(x.to(device) for x in chunks))
        o, saved = forward_triton(*moved, on_device, scale)
        ours = [o, *backward_triton(do.to(device), *moved, saved, on_device, scale)]
        for name, mine, theirs, wanted in zip(NAMES, ours, plain, right, strict=True):
            assert mine.dtype is theirs.dtype and mine.is_contiguous(), (name, mine.dtype)
            judged.add(f"{name}, {dtype}, g · {decay}", mine, theirs, wanted)

    for decay in decays:
        judged = ThreeWay()
        judged.judge(functools.partial(draw, judged, decay), draws, 16)


def check_inverse(device: str, dtype: torch.dtype) -> None:
    """Assert that (I + A)⁻¹ is as near to the exact one as its own rounding lets it be."""
    (q, k, v, g, beta), _ = case((64,), (1, 3, 32, 16), dtype, 1e-6, 0, alike=True)
    chunks = Chunks(*(x.to(device) for x in chunks_of((64,), 1, 64)))
    ours = forward_triton(*(x.to(device) for x in (q, k, v, g, beta)), chunks, 1.0)[1].inverse.double().cpu()
    k, g, beta = k[:, 0].double(), g.double(), beta.double()
    k = k / (k.square().sum(1, keepdim=True) + L2_EPS).sqrt()
    for head in range(v.shape[1]):
        total = g[:, head].cumsum(0)
        a = (beta[:, head, None] * (k @ k.T) * (total[:, None] - total).exp()).tril(-1)
        exact = (a + torch.eye(64, dtype=a.dtype)).inverse()
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (ours[:, head] - exact).norm() <= 1.2 * rounding + 1e-5 * exact.norm(), head


CHECKS: dict[str, dict[str, Any]] = {
    "documents": {"lengths": LENGTHS, "sizes": SMALL},
    "one document": {"lengths": (300,), "sizes": (1, 3, 32, 16)},
    "keys alike": {"lengths": (64, 65), "sizes": (1, 3, 32, 16), "alike": True},
}

FIRST = {
    ("documents", torch.float32): (1e-6, 30.0),
    ("documents", torch.float16): (1.0,),
    ("one document", torch.float32): (1.0,),
    ("one document", torch.float16): (1e-6, 30.0),
    ("keys alike", torch.float32): (1e-6,),
    ("keys alike", torch.float16): (1e-6,),
}
"""The decays of what is checked always: the interpreter takes seconds a draw."""

if __name__ == "__main__":
    begin()
    for name, given in CHECKS.items():
        for dtype in (torch.float32, torch.float16):  # the interpreter multiplies bfloat16's bits
            if sys.argv[1:] == ["all"]:
                check("cpu", dtype, **given)
            else:
                check("cpu", dtype, decays=FIRST[name, dtype], draws=1, **given)
        print(name, "ok", flush=True)
    for dtype in (torch.float32, torch.float16):
        check_inverse("cpu", dtype)
    print("inverse ok", flush=True)
