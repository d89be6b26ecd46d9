"""Make the cases of kernels that write codes in 8 bits beside what they make, and of the same with a pass of its own.

The formulas quantise as `kernels.quantise` says. Rounding moves a code to its neighbour now and then, in anybody's
arithmetic, so codes are judged by the three-way rule like all else; besides, Pronghorn's must be those of a pass over
the very rows that it made, bit for bit ("equal codes" counts those that are, with their scale, by rows).

Predicted before the first run, and not measured yet: benchmarks/log/2026-11-25-codes-from-producers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.op_case import Case, Draw, Way, by_kernel
from benchmarks.op_cases import EPS, norm_formula
from pronghorn.kernels import glu, rms_norm
from pronghorn.kernels.quantise import RowCodes, quantise_rows, quantise_rows_reference

How = Literal["apart"] | None
"""None: by one kernel; "apart": by the kernel without codes, and a pass over what it made."""
Function = Callable[..., tuple[Tensor, ...]]


def norm_case(draw: Draw, tokens: int, width: int, how: How = None) -> Case:
    """Make the norm before a product: x, y: [T, H]."""

    def kernel(codes: RowCodes | None, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return rms_norm.forward(x, weight, EPS, 0.0, codes=codes)[:1]

    x, weight = draw(tokens, width), draw(width)
    return _case("rms_norm_codes", norm_formula, kernel, (x, weight), ("y",), x, 2 * x.nbytes, how)


def norm_backward_case(draw: Draw, tokens: int, width: int, how: How = None) -> Case:
    """Make the backward of the norm after a product: dy, x, dx: [T, H]; dx is multiplied by the columns' factors."""
    x, weight, dy, columns = draw(tokens, width), draw(width), draw(tokens, width), _factors(draw, width)
    _, rstd = rms_norm.forward(x, weight, EPS, 0.0)

    def formula(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        g, n = dy.to(wide) * weight.to(wide), x.to(wide)
        r = torch.rsqrt(n.square().mean(-1, keepdim=True) + EPS)
        return ((r * (g - n * r.square() * (g * n).mean(-1, keepdim=True))).to(x.dtype),)

    def kernel(codes: RowCodes | None, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (rms_norm.backward(dy, x, weight, rstd, 0.0, False, codes=codes, columns=columns)[0],)

    inputs = dy, x, weight
    return _case("rms_norm_back_codes", formula, kernel, inputs, ("dx",), x, 3 * x.nbytes, how, columns)


def glu_case(draw: Draw, tokens: int, width: int, how: How = None) -> Case:
    """Make SwiGLU before down: gate and up: [T, I] each, side by side."""

    def formula(gate_up: Tensor) -> tuple[Tensor, ...]:
        gate, up = gate_up.chunk(2, -1)
        return (silu(gate) * up,)

    def kernel(codes: RowCodes | None, gate_up: Tensor) -> tuple[Tensor, ...]:
        return (glu.forward(gate_up, "silu", codes),)

    gate_up = draw(tokens, 2 * width)
    rows = gate_up.chunk(2, 1)[0]
    return _case("swiglu_codes", formula, kernel, (gate_up,), ("a",), rows, 3 * rows.nbytes, how)


def glu_backward_case(draw: Draw, tokens: int, width: int, how: How = None) -> Case:
    """Make SwiGLU's backward: da: [T, I], gate and up side by side; their gradients are multiplied by the columns'
    factors."""
    da, gate_up, columns = draw(tokens, width), draw(tokens, 2 * width), _factors(draw, 2 * width)

    def formula(da: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        gate, up = gate_up.chunk(2, -1)
        f = silu(gate)
        return torch.cat([torch.ops.aten.silu_backward(da * up, gate), da * f], -1), f * up

    def kernel(codes: RowCodes | None, da: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        return glu.backward_(da, gate_up, "silu", True, codes, columns), da  # a in da's place

    names, moved = ("d gate_up", "a"), 2 * (da.nbytes + gate_up.nbytes)
    return _case("swiglu_back_codes", formula, kernel, (da, gate_up), names, gate_up, moved, how, columns, (0, 1))


def _factors(draw: Draw, width: int) -> Tensor:
    """Draw scales of a weight's rows."""
    return (draw(width).float().abs() + 0.5).bfloat16()


def _case(
    op: str,
    dense: Function,
    kernel: Function,
    inputs: tuple[Tensor, ...],
    made: tuple[str, ...],
    rows: Tensor,
    moved: int,
    how: How,
    columns: Tensor | None = None,
    owned: tuple[int, ...] = (),
) -> Case:
    """Make a case of rows and their codes.

    Args:
        dense: the formula of what is made: the rows, and what else.
        kernel: makes it, and writes codes where it is given room for some.
        made: names of what is made.
        rows: of the rows' shape and dtype.
        moved: bytes, the codes' aside.
    """

    def formula(*given: Tensor) -> tuple[Tensor, ...]:
        results = dense(*given)
        codes, scales = quantise_rows_reference(results[0], columns)
        return *results, codes.float(), scales, torch.full_like(scales, 1 + codes.shape[1])

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        codes = None if how == "apart" else RowCodes.like(rows)
        results = kernel(codes, *given)
        return *results, *(codes or quantise_rows(results[0], columns))

    def pronghorn(case: Case) -> Way:
        def results(state: Any, grads: Any) -> dict[str, Tensor]:
            *found, codes, scales = state[0]
            again = quantise_rows(found[0], columns)
            equal = (codes.view(torch.uint8) == again.codes.view(torch.uint8)).sum(1, keepdim=True)
            equal += scales == again.scales
            return dict(zip(case.names, (*found, codes.float(), scales, equal.float()), strict=True))

        read_again = rows.nbytes if how == "apart" else 0
        way = by_kernel(case, forward, owned=owned)
        return replace(way, results=results, work=(case.work[0] + read_again, 0.0))

    tokens, width = rows.shape
    work = float(moved + rows.numel() + 4 * tokens)
    label = f"{tokens}x{width}" + (", a pass of its own" if how else "")
    names = *made, "codes", "scales", "equal codes"
    return Case(op, label, tokens, formula, inputs, (), names, (work, 0.0), pronghorn, trained=0)
