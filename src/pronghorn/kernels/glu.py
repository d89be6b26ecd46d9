"""The gated activation of decoder MLPs: SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202).

    a = f(g) ∘ u        f = silu, or gelu by its tanh approximation
    du = da ∘ f(g)      dg = da ∘ u ∘ f′(g)

g and u lie side by side in one tensor, as one product of gate and up leaves them. The backward computes a again instead
of keeping it.

SwiGLU and GeGLU in Triton: one pass each way, near the copy bandwidth. Where 8-bit products read a, or dg and du, a
program takes whole rows and writes their codes (`kernels.quantise`), too. LoRA's part is added by tiles: whole rows of
so many tokens as tensor cores want (16 of 14,336 columns are 448 KB) fit nowhere on a multiprocessor, and all of them
not into the L2, so that a pass of its own, which reads a once more, costs no more.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from pronghorn.kernels.launch import by_device, cdiv, launch, next_power_of_2, tl, triton
from pronghorn.kernels.quantise import RowCodes, larger, store_codes_of_parts
from pronghorn.kernels.tanh import tanh

Activation = Literal["silu", "gelu_tanh"]
MAX_RANK = 128
"""Ranks of gate and up together up to which the Triton kernel adds LoRA's part."""


def forward_reference(gate_up: Tensor, activation: Activation, codes: RowCodes | None = None) -> Tensor:
    """Return a [T, I].

    Args:
        gate_up: [T, 2·I], contiguous, g in the first I columns.
        codes: where those of a are written, if they are wanted.
    """
    gate, up = gate_up.chunk(2, -1)
    a = _activate_reference(gate, activation) * up
    if codes is not None:
        codes.fill_reference(a)
    return a


def forward_with_low_rank_reference_(
    gate_up: Tensor, xa: Tensor, b: Tensor, scale: float, activation: Activation, ranks: tuple[int, int]
) -> Tensor:
    """Do what `forward_with_low_rank_` does, in plain torch."""
    width, rank = gate_up.shape[1] // 2, ranks[0]
    gate_up[:, :width].addmm_(xa[:, :rank], b[:width, :rank].t(), alpha=scale)
    gate_up[:, width:].addmm_(xa[:, rank:], b[width:, rank:].t(), alpha=scale)
    return forward_reference(gate_up, activation)


def backward_reference_(
    da: Tensor,
    gate_up: Tensor,
    activation: Activation,
    donated: bool = False,
    codes: RowCodes | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """Compute d gate_up [T, 2·I] from da [T, I], contiguous, whose place a, computed again, takes.

    Args:
        donated: nobody needs `gate_up` any more: its place may be taken.
        codes: where those of d gate_up · columns are written, if they are wanted.
        columns: [2·I], given with `codes`.
    """
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        a = forward_reference(leaf, activation)
    (grad,) = torch.autograd.grad(a, leaf, da)
    da.copy_(a.detach())
    if codes is not None:
        codes.fill_reference(grad, columns)
    return grad


def _activate_reference(gate: Tensor, activation: Activation) -> Tensor:
    return silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")


BLOCK = 1024
CODES_BLOCK, CODES_WARPS = 4096, 16
"""Columns that a program with codes goes over at a time, and warps: two programs a multiprocessor or four, whose rows
stay in the L2 until they are read again. Chosen by counting, not measured yet."""


@triton.jit
def _activate(g, GELU: tl.constexpr):
    """Return (f(g), f′(g)) in float32."""
    if GELU:
        c = 0.7978845608028654  # sqrt(2/π)
        t = tanh(c * (g + 0.044715 * g * g * g))
        f = 0.5 * g * (1.0 + t)
        df = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * g * g)
    else:
        s = tl.sigmoid(g)
        f = g * s
        df = s * (1.0 + g * (1.0 - s))
    return f, df


@triton.jit
def _forward(gu_ptr, a_ptr, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Activate a part of a row: gu [T, 2·WIDTH]; a [T, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    g = tl.load(gu_ptr + row * 2 * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + row * 2 * WIDTH + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    f, _ = _activate(g, GELU)
    tl.store(a_ptr + row * WIDTH + cols, (f * u).to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])  # it differs from row to row, the instructions don't
def _forward_with_low_rank(
    gu_ptr, xa_ptr, b_ptr, a_ptr, T, WIDTH, scale,
    GELU: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add the low-rank products to a tile and activate it.

    gu: [T, 2·WIDTH]; xa: [T, GATE + UP]; b: [2·WIDTH, GATE + UP]; a: [T, WIDTH].
    """
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, R)
    there, known = (rows < T)[:, None], (cols < WIDTH)[None, :]
    here = gu_ptr + rows[:, None].to(tl.int64) * 2 * WIDTH + cols[None, :]
    # all loads before the first store, which none of them could be moved across
    g = tl.load(here, mask=there & known)
    u = tl.load(here + WIDTH, mask=there & known)
    xa = xa_ptr + rows[:, None] * (GATE + UP) + k[None, :]
    b = b_ptr + cols[None, :].to(tl.int64) * (GATE + UP) + k[:, None]
    gate_xa = tl.load(xa, mask=there & (k < GATE)[None, :], other=0.0)
    up_xa = tl.load(xa + GATE, mask=there & (k < UP)[None, :], other=0.0)
    gate_b = tl.load(b, mask=(k < GATE)[:, None] & known, other=0.0)
    up_b = tl.load(b + WIDTH * (GATE + UP) + GATE, mask=(k < UP)[:, None] & known, other=0.0)
    # g and u go to where the products will be before they are made: after it that takes barriers more
    g = (g.to(tl.float32) + scale * tl.dot(gate_xa, gate_b, input_precision="ieee")).to(gu_ptr.dtype.element_ty)
    u = (u.to(tl.float32) + scale * tl.dot(up_xa, up_b, input_precision="ieee")).to(gu_ptr.dtype.element_ty)
    tl.store(here, g, mask=there & known)
    tl.store(here + WIDTH, u, mask=there & known)
    f, _ = _activate(g.to(tl.float32), GELU)
    a = (f * u.to(tl.float32)).to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + rows[:, None].to(tl.int64) * WIDTH + cols[None, :], a, mask=there & known)


@triton.jit
def _backward(da_ptr, gu_ptr, dgu_ptr, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Write dg and du, and a over da: da [T, WIDTH]; gu, dgu [T, 2·WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    here = row * 2 * WIDTH + cols
    g = tl.load(gu_ptr + here, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + here + WIDTH, mask=inside, other=0.0).to(tl.float32)
    da = tl.load(da_ptr + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    f, df = _activate(g, GELU)
    tl.store(dgu_ptr + here, (da * u * df).to(dgu_ptr.dtype.element_ty), mask=inside)
    tl.store(dgu_ptr + here + WIDTH, (da * f).to(dgu_ptr.dtype.element_ty), mask=inside)
    tl.store(da_ptr + row * WIDTH + cols, (f * u).to(da_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_codes(gu_ptr, a_ptr, codes_ptr, scales_ptr, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Activate a row and quantise it: gu [T, 2·WIDTH]; a, codes [T, WIDTH]; scales [T]."""
    row = tl.program_id(0).to(tl.int64)
    gu, a = gu_ptr + row * 2 * WIDTH, a_ptr + row * WIDTH
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < WIDTH
        g = tl.load(gu + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        u = tl.load(gu + WIDTH + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        f, _ = _activate(g, GELU)
        product = (f * u).to(a_ptr.dtype.element_ty)
        tl.store(a + cols, product, mask=inside)
        most = larger(most, product.to(tl.float32))
    store_codes_of_parts(a, a, codes_ptr + row * WIDTH, scales_ptr + row, most, WIDTH, COLUMNS=False, BLOCK=BLOCK)


@triton.jit
def _backward_codes(
    da_ptr, gu_ptr, dgu_ptr, columns_ptr, codes_ptr, scales_ptr, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a row of dg and du, and a over da, and quantise the former: da [T, WIDTH]; gu, dgu, codes [T, 2·WIDTH];
    columns [2·WIDTH]; scales [T]."""
    row = tl.program_id(0).to(tl.int64)
    da, gu, dgu = da_ptr + row * WIDTH, gu_ptr + row * 2 * WIDTH, dgu_ptr + row * 2 * WIDTH
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < WIDTH
        g = tl.load(gu + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        u = tl.load(gu + WIDTH + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        d = tl.load(da + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        f, df = _activate(g, GELU)
        dg, du = (d * u * df).to(dgu_ptr.dtype.element_ty), (d * f).to(dgu_ptr.dtype.element_ty)
        tl.store(dgu + cols, dg, mask=inside)
        tl.store(dgu + WIDTH + cols, du, mask=inside)
        tl.store(da + cols, (f * u).to(da_ptr.dtype.element_ty), mask=inside)
        of_gate = tl.load(columns_ptr + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        of_up = tl.load(columns_ptr + WIDTH + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        most = larger(larger(most, dg.to(tl.float32) * of_gate), du.to(tl.float32) * of_up)
    codes, scale = codes_ptr + row * 2 * WIDTH, scales_ptr + row
    store_codes_of_parts(dgu, columns_ptr, codes, scale, most, 2 * WIDTH, COLUMNS=True, BLOCK=BLOCK)


def forward_triton(gate_up: Tensor, activation: str, codes: RowCodes | None = None) -> Tensor:
    """Do what `forward` does, by its Triton kernels."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    a = gate_up.new_empty(tokens, width)
    if codes is not None:
        block, warps = codes_block(width)
        launch(
            _forward_codes, (tokens,), gate_up, a, *codes, width,
            GELU=activation == "gelu_tanh", BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return a
    launch(_forward, (tokens, cdiv(width, BLOCK)), gate_up, a, width, GELU=activation == "gelu_tanh", BLOCK=BLOCK)
    return a


def codes_block(width: int) -> tuple[int, int]:
    """Return (columns at a time, warps) of the kernels with codes, fewer where a row is narrower."""
    block = min(CODES_BLOCK, next_power_of_2(width))
    return block, max(CODES_WARPS * block // CODES_BLOCK, 1)


def tile(rank: int, bytes_: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of the low-rank kernel for a padded rank and numbers of `bytes_`.

    Each row of tiles reads all of b and each column of tiles all of xa, from the cache. On a H200, 8,192 tokens and
    14,336 columns, 98 % of a copy at ranks of 16, 92 at 32, 73 at 64.
    """
    if rank <= 16:
        return 32, 128, 8
    # float32 has no tensor cores: ranks of 64 want more registers than there are, ranks of 128 more shared memory, too
    return (64, 64, 4) if bytes_ == 2 or rank <= 32 else (32, 32, 4)


def forward_with_low_rank_triton_(
    gate_up: Tensor, xa: Tensor, b: Tensor, scale: float, activation: str, ranks: tuple[int, int]
) -> Tensor:
    """Do what `forward_with_low_rank_` does, by its Triton kernels."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    a = gate_up.new_empty(tokens, width)
    padded = max(16, next_power_of_2(max(ranks)))
    rows, cols, warps = tile(padded, xa.element_size())
    launch(
        _forward_with_low_rank, (cdiv(width, cols), cdiv(tokens, rows)),
        gate_up, xa, b, a, tokens, width, scale, GELU=activation == "gelu_tanh",
        GATE=ranks[0], UP=ranks[1], R=padded, ROWS=rows, COLS=cols, num_warps=warps,
    )  # fmt: skip
    return a


def backward_triton_(
    da: Tensor,
    gate_up: Tensor,
    activation: str,
    donated: bool = False,
    codes: RowCodes | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """Do what `backward_` does, by its Triton kernels."""
    assert codes is None or columns is not None
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    dgu = gate_up if donated else torch.empty_like(gate_up)
    if codes is not None:
        block, warps = codes_block(width)
        launch(
            _backward_codes, (tokens,), da, gate_up, dgu, columns, *codes, width,
            GELU=activation == "gelu_tanh", BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return dgu
    grid = (tokens, cdiv(width, BLOCK))
    launch(_backward, grid, da, gate_up, dgu, width, GELU=activation == "gelu_tanh", BLOCK=BLOCK)
    return dgu


forward = by_device(forward_reference, forward_triton)


def forward_with_low_rank_(
    gate_up: Tensor, xa: Tensor, b: Tensor, scale: float, activation: Activation, ranks: tuple[int, int]
) -> Tensor:
    """Compute `forward`, after adding s · xa bᵀ to `gate_up` in place: in one pass where the ranks allow it.

    Args:
        xa: [T, R]; b: [2·I, R], contiguous, in gate_up's dtype.
        ranks: of gate's adapter and of up's, R together; 0 for one without. xa's first columns and b's first rows are
            gate's: what b holds beside these two blocks is never read.
    """
    if gate_up.is_cuda and xa.shape[1] <= MAX_RANK:
        return forward_with_low_rank_triton_(gate_up, xa, b, scale, activation, ranks)
    return forward_with_low_rank_reference_(gate_up, xa, b, scale, activation, ranks)


backward_ = by_device(backward_reference_, backward_triton_, at=1)
