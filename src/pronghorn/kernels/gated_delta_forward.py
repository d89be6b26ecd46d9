"""The gated delta rule's forward in Triton (`kernels.gated_delta` has the formulas): three kernels.

`_prepare`, by chunk and value head: Tm = (I + A)⁻¹, w = Tm β exp(b) k and u = Tm β v. `_states`, in order over the
chunks of a document: N = u − w S, and the state S at the start of each chunk but the first. `_output`, by chunk and
value head: o.

Factors of single tokens, such as one over the lengths of q and k, are multiplied in float32, after a product or into an
operand that is rounded anyway; so q, k and v enter products as they are. Products have float32 sums and operands of the
inputs' dtype. S is float32 from chunk to chunk and in the inputs' dtype where a product reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pronghorn.chunks import CHUNK, Chunks
from pronghorn.errors import UnsupportedError
from pronghorn.kernels.launch import cdiv, launch, tl, triton

L2_EPS = 1e-6


class Tile(NamedTuple):
    """How a kernel is launched."""

    columns: int
    """Of v's that a program takes at a time."""
    warps: int
    stages: int


TILES = {"prepare": Tile(64, 4, 1), "states": Tile(32, 4, 2), "output": Tile(128, 8, 1)}
MANY = {"states": Tile(64, 4, 2)}
"""Instead of `TILES` with room for more than `FEW_DOCUMENTS`: enough programs without small tiles, which all read k."""
FEW_DOCUMENTS = 16
NARROW = {"states": TILES["states"], "output": Tile(32, 4, 1)}
"""Instead of both in float32 where a block has less shared memory than `SHARED`, as on Ada."""
SHARED = 160 * 1024
LEAST_HEAD = 64
"""Smaller heads are filled up with zeros on a GPU: for some of their products ptxas 12.8 makes descriptors of operands
in shared memory from registers that aren't set, which is an illegal memory access on Hopper."""


class Saved(NamedTuple):
    """What the backward needs besides the arguments."""

    w: Tensor
    """[T, H_v, D_k]."""
    new: Tensor
    """N, [T, H_v, D_v]."""
    inverse: Tensor
    """[T, H_v, 64]."""
    sums: Tensor
    """float32 [T, H_v]: g summed up from the chunk's start."""
    q_unit: Tensor
    """float32 [T, H_k]: one over q's length, and over k's."""
    k_unit: Tensor
    states: Tensor
    """[T // 64, H_v, D_k, D_v]: S at the start of each chunk that isn't its document's first."""


@triton.jit
def dot(a, b):
    """Multiply; float32 operands are not rounded first."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def decays(b, L: tl.constexpr):
    """Return D [L, L]: exp(b_i − b_j) for i ≥ j, else 0."""
    rows = tl.arange(0, L)
    return tl.exp(tl.where(rows[:, None] >= rows[None, :], b[:, None] - b[None, :], float("-inf")))


@triton.jit
def _inverse(a, dtype: tl.constexpr, L: tl.constexpr):
    """Return (I + a)⁻¹ of a strictly lower triangular a [64, 64], by products whose operands have dtype.

    If x inverts the diagonal blocks of some size and o is what a has beside them in those of twice the size, x − x o x
    inverts the latter. In 16 bits a step of Newton's method follows. Its residual is exact but for float32's rounding,
    so of x's error the square is left, far below the rounding of the result.
    """
    rows = tl.arange(0, L)
    apart = rows[:, None] ^ rows[None, :]  # < 2ⁿ: in the same diagonal block of 2ⁿ
    high = a.to(dtype)
    low = (a - high.to(tl.float32)).to(dtype)
    x = tl.where(apart == 0, 1.0, tl.where(apart < 2, -a, 0.0))
    for n in tl.static_range(1, 6):
        beside = tl.where((apart >> n) == 1, high, 0.0).to(dtype)
        rounded = x.to(dtype)
        x -= dot(rounded, dot(beside, rounded).to(dtype))
    if dtype != tl.float32:
        rounded = x.to(dtype)
        x = rounded.to(tl.float32)
        residual = tl.where(apart == 0, 1.0, 0.0) - x - (dot(high, rounded) + dot(low, rounded))
        x += dot(rounded, residual.to(dtype))
    return x


@triton.jit
def _prepare(
    q_ptr, k_ptr,  # [T, H_k, DK]
    v_ptr,  # [T, H, DV]
    g_ptr, beta_ptr,  # [T, H]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    w_ptr,  # [T, H, DK]
    u_ptr,  # [T, H, DV]
    inverse_ptr,  # [T, H, L]
    sums_ptr,  # float32 [T, H]
    q_unit_ptr, k_unit_ptr,  # float32 [T, H_k]
    q_row, q_head, k_row, k_head, v_row, v_head, eps,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write Tm, w, u and b of one chunk and value head, and one over the lengths of its q and k."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunks_ptr + 4 * chunk + 1)
    if length == 0:  # the list is as long as any row may need
        return
    rows, wide = tl.arange(0, L), tl.arange(0, DK)
    token = tl.load(chunks_ptr + 4 * chunk).to(tl.int64) + rows
    inside, key = rows < length, head // GROUP
    whole = inside[:, None]
    k = tl.load(k_ptr + token[:, None] * k_row + key * k_head + wide[None, :], mask=whole, other=0.0)
    k_unit = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + eps)
    if head % GROUP == 0:  # once for the value heads that share a key head
        q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0).to(tl.float32)
        by_key = token * (H // GROUP) + key
        tl.store(q_unit_ptr + by_key, tl.rsqrt(tl.sum(q * q, 1) + eps), mask=inside)
        tl.store(k_unit_ptr + by_key, k_unit, mask=inside)
    g = tl.load(g_ptr + token * H + head, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + token * H + head, mask=inside, other=0.0).to(tl.float32)
    # b; past the chunk's end it stays the last token's, so that no exp overflows there: inf · 0 would be nan
    b = tl.cumsum(g, 0)
    tl.store(sums_ptr + token * H + head, b, mask=inside)
    # A, and Tm = (I + A)⁻¹
    a = dot(k, tl.trans(k)) * (beta * k_unit)[:, None] * k_unit[None, :] * decays(b, L)
    inverse = _inverse(tl.where(rows[:, None] > rows[None, :], a, 0.0), k_ptr.dtype.element_ty, L)
    square = (token[:, None] * H + head) * L + rows[None, :]
    tl.store(inverse_ptr + square, inverse.to(inverse_ptr.dtype.element_ty), mask=whole)
    # w = Tm β exp(b) k, and u = Tm β v
    w = dot((inverse * (beta * tl.exp(b) * k_unit)[None, :]).to(k.dtype), k)
    tl.store(w_ptr + (token[:, None] * H + head) * DK + wide[None, :], w.to(w_ptr.dtype.element_ty), mask=whole)
    times_beta = (inverse * beta[None, :]).to(k.dtype)
    for first in range(0, DV, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        v = tl.load(v_ptr + token[:, None] * v_row + head * v_head + columns[None, :], mask=whole, other=0.0)
        at = (token[:, None] * H + head) * DV + columns[None, :]
        tl.store(u_ptr + at, dot(times_beta, v).to(u_ptr.dtype.element_ty), mask=whole)


@triton.jit
def _states(
    k_ptr,  # [T, H_k, DK]
    w_ptr,  # [T, H, DK]
    new_ptr,  # [T, H, DV]: u, and then N
    sums_ptr,  # float32 [T, H]
    k_unit_ptr,  # float32 [T, H_k]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    documents_ptr,  # int32 [documents, 2]: first chunk, number of chunks
    states_ptr,  # [states, H, DK, DV]
    k_row, k_head,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write N over u, and the states S: some columns of one document and value head."""
    columns, head, document = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(documents_ptr + 2 * document), tl.load(documents_ptr + 2 * document + 1)
    rows, wide, key = tl.arange(0, L), tl.arange(0, DK), head // GROUP
    state = tl.zeros((DK, COLUMNS), tl.float32)
    for done in tl.range(0, count, num_stages=STAGES):
        chunk = first + done
        start, length = tl.load(chunks_ptr + 4 * chunk).to(tl.int64), tl.load(chunks_ptr + 4 * chunk + 1)
        token, inside = start + rows, rows < length
        whole = inside[:, None]
        k = tl.load(k_ptr + token[:, None] * k_row + key * k_head + wide[None, :], mask=whole, other=0.0)
        w = tl.load(w_ptr + (token[:, None] * H + head) * DK + wide[None, :], mask=whole, other=0.0)
        at = new_ptr + (token[:, None] * H + head) * DV + columns[None, :]
        u = tl.load(at, mask=whole, other=0.0)
        last = tl.load(sums_ptr + (start + length - 1) * H + head)
        b = tl.load(sums_ptr + token * H + head, mask=inside, other=last)
        unit = tl.load(k_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
        rounded = state.to(k.dtype)
        number = tl.load(chunks_ptr + 4 * chunk + 2)
        to = states_ptr + (number.to(tl.int64) * H + head) * DK * DV + wide[:, None] * DV + columns[None, :]
        tl.store(to, rounded, mask=number >= 0)
        # N = u − w S
        new = u.to(tl.float32) - dot(w, rounded)
        tl.store(at, new.to(u.dtype), mask=whole)
        # S' = exp(b_L) S + (exp(b_L − b) k)ᵀ N; the factors of k go to N, which is rounded anyway
        scaled = (new * (tl.exp(last - b) * unit)[:, None]).to(k.dtype)
        state = state * tl.exp(last) + dot(tl.trans(k), scaled)


@triton.jit
def _output(
    q_ptr, k_ptr,  # [T, H_k, DK]
    new_ptr,  # N [T, H, DV]
    sums_ptr,  # float32 [T, H]
    q_unit_ptr, k_unit_ptr,  # float32 [T, H_k]
    states_ptr,  # [states, H, DK, DV]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    o_ptr,  # [T, H, DV]
    q_row, q_head, k_row, k_head, scale,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write o = scale (exp(b) q S + (q kᵀ ∘ D) N): some columns of one chunk and value head."""
    chunk, head, columns = tl.program_id(0), tl.program_id(1), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(chunks_ptr + 4 * chunk + 1)
    if length == 0:
        return
    rows, wide, key = tl.arange(0, L), tl.arange(0, DK), head // GROUP
    start = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
    token, inside = start + rows, rows < length
    whole = inside[:, None]
    q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0)
    k = tl.load(k_ptr + token[:, None] * k_row + key * k_head + wide[None, :], mask=whole, other=0.0)
    b = tl.load(sums_ptr + token * H + head, mask=inside, other=tl.load(sums_ptr + (start + length - 1) * H + head))
    q_unit = tl.load(q_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0) * scale
    k_unit = tl.load(k_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
    at = (token[:, None] * H + head) * DV + columns[None, :]
    new = tl.load(new_ptr + at, mask=whole, other=0.0)
    p = dot(q, tl.trans(k)) * q_unit[:, None] * k_unit[None, :] * decays(b, L)
    o = dot(p.to(q.dtype), new)
    number = tl.load(chunks_ptr + 4 * chunk + 2)
    if number >= 0:
        of_state = (number.to(tl.int64) * H + head) * DK * DV + wide[:, None] * DV + columns[None, :]
        o += dot(q, tl.load(states_ptr + of_state)) * (q_unit * tl.exp(b))[:, None]
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=whole)


def forward_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, scale: float
) -> tuple[Tensor, Saved]:
    """Do what `forward` does, by these kernels.

    Raises:
        UnsupportedError: heads of sizes that the kernels don't take.
    """
    check_heads(k.shape[2], v.shape[2])
    given, (q, k, v) = v.shape[2], map(filled, (q, k, v))
    (tokens, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    count = len(chunks.chunks)
    saved = Saved(
        w=v.new_empty(tokens, heads, key_dim),
        new=v.new_empty(tokens, heads, value_dim),
        inverse=v.new_empty(tokens, heads, CHUNK),
        sums=v.new_empty(tokens, heads, dtype=torch.float32),
        q_unit=v.new_empty(tokens, key_heads, dtype=torch.float32),
        k_unit=v.new_empty(tokens, key_heads, dtype=torch.float32),
        states=v.new_empty(tokens // CHUNK, heads, key_dim, value_dim),
    )
    sizes = {"H": heads, "GROUP": heads // key_heads, "DK": key_dim, "DV": value_dim, "L": CHUNK}
    strides = *q.stride()[:2], *k.stride()[:2]
    tiles = TILES | MANY if len(chunks.documents) > FEW_DOCUMENTS else TILES
    columns, warps, stages = fit("prepare", tiles, NARROW, v)
    launch(
        _prepare, (count, heads),
        q, k, v, g.contiguous(), beta.contiguous(), chunks.chunks,
        saved.w, saved.new, saved.inverse, saved.sums, saved.q_unit, saved.k_unit, *strides, *v.stride()[:2], L2_EPS,
        **sizes, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns, warps, stages = fit("states", tiles, NARROW, v)
    launch(
        _states, (cdiv(value_dim, columns), heads, len(chunks.documents)),
        k, saved.w, saved.new, saved.sums, saved.k_unit, *reversed(chunks), saved.states, *strides[2:],
        **sizes, COLUMNS=columns, STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    o = torch.empty_like(saved.new)
    columns, warps, stages = fit("output", tiles, NARROW, v)
    launch(
        _output, (count, heads, cdiv(value_dim, columns)),
        q, k, saved.new, saved.sums, saved.q_unit, saved.k_unit, saved.states, chunks.chunks, o, *strides, scale,
        **sizes, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o[..., :given].contiguous(), saved


def filled(x: Tensor) -> Tensor:
    """Return heads [T, H, D]; on a GPU filled up with zeros to `LEAST_HEAD` numbers each."""
    return functional.pad(x, (0, LEAST_HEAD - x.shape[2])) if x.is_cuda and x.shape[2] < LEAST_HEAD else x


def check_heads(key_dim: int, value_dim: int) -> None:
    """Refuse sizes of heads that the kernels don't take.

    Raises:
        UnsupportedError: one is not a power of two, or below 16.
    """
    for name, size in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
        if size < 16 or size & (size - 1):
            raise UnsupportedError(
                f"gated delta nets with {name} = {size}: the kernels take powers of two from 16 on",
                "train this model without packing and Pronghorn: transformers' own code mixes a row's documents",
            )


def fit(name: str, tiles: dict[str, Tile], narrow: dict[str, Tile], v: Tensor) -> Tile:
    """Return a kernel's tile, no wider than v, and narrower where float32 wouldn't fit the device's shared memory."""
    tile = tiles[name]
    if v.dtype is torch.float32 and v.is_cuda:
        device: Any = torch.cuda.get_device_properties(v.device)
        tile = narrow.get(name, tile) if device.shared_memory_per_block_optin < SHARED else tile
    return tile._replace(columns=min(tile.columns, v.shape[-1]))
