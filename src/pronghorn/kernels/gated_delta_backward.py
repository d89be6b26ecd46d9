"""The gated delta rule's backward in Triton: five kernels, without atomics.

With the names of `kernels.gated_delta`, Tm = (I + A)⁻¹, P = q kᵀ ∘ D, do' = scale · do, dS the gradient of the state at
a chunk's end, and X' the next chunk's X:

    dN = Pᵀ do' + exp(b_L − b) k dS'        dS = exp(b_L) dS' + (exp(b) q)ᵀ do' − wᵀ dN
    y = Tmᵀ dN      dv = β y      dA = −tril(y Nᵀ, −1)      dP = tril(do' Nᵀ)      X = β dA ∘ D
    dq = exp(b) do' Sᵀ + (dP ∘ D) k
    dk = −exp(b) β y Sᵀ + exp(b_L − b) N dS'ᵀ + (dP ∘ D)ᵀ q + (X + Xᵀ) k
    dβ = Σ y ∘ (v − exp(b) k S) + Σ dA ∘ k kᵀ ∘ D

db is the sum over rows less the sum over columns of dA ∘ A + dP ∘ P, and what the factors exp(b), exp(b_L − b) and
exp(b_L) receive; dg sums it from the chunk's end. `_direct` computes Pᵀ do' by chunk, `_state_gradients` dN and dS from
a document's last chunk to its first, `_inner` y, dv and what tokens of a chunk give each other,
`_query_gradients` dq and `_key_gradients` the rest, by chunk and key head over the value heads it serves. As one kernel
the last three spill a thousand bytes a thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.chunks import CHUNK, Chunks
from pronghorn.kernels.gated_delta_forward import FEW_DOCUMENTS, Saved, Tile, decays, dot, filled, fit
from pronghorn.kernels.launch import cdiv, launch, tl, triton

TILES = {
    "direct": Tile(128, 4, 1),
    "state gradients": Tile(32, 4, 2),
    "inner": Tile(64, 4, 1),
    "query gradients": Tile(128, 8, 1),
    "key gradients": Tile(64, 8, 1),  # with two stages .03 ms faster, and single numbers of dk wrong (Triton 3.6)
}
MANY = {"state gradients": Tile(64, 4, 1)}
NARROW = {"state gradients": Tile(16, 4, 1), "inner": Tile(16, 4, 1)}
"""As those of `gated_delta_forward`."""


@triton.jit
def _direct(
    q_ptr, k_ptr,  # [T, H_k, DK]
    do_ptr,  # [T, H, DV]
    sums_ptr,  # float32 [T, H]
    q_unit_ptr, k_unit_ptr,  # float32 [T, H_k]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    dn_ptr,  # [T, H, DV]
    q_row, q_head, k_row, k_head, scale,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write Pᵀ do': some columns of one chunk and value head."""
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
    do = tl.load(do_ptr + at, mask=whole, other=0.0)
    # scale · P, as q_unit has the scale that do' would have
    p = dot(q, tl.trans(k)) * q_unit[:, None] * k_unit[None, :] * decays(b, L)
    tl.store(dn_ptr + at, dot(tl.trans(p.to(q.dtype)), do).to(dn_ptr.dtype.element_ty), mask=whole)


@triton.jit
def _state_gradients(
    q_ptr, k_ptr,  # [T, H_k, DK]
    w_ptr,  # [T, H, DK]
    do_ptr,  # [T, H, DV]
    sums_ptr,  # float32 [T, H]
    q_unit_ptr, k_unit_ptr,  # float32 [T, H_k]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    documents_ptr,  # int32 [documents, 2]: first chunk, number of chunks
    dn_ptr,  # [T, H, DV]: Pᵀ do', and then dN
    ds_ptr,  # [states, H, DK, DV]
    q_row, q_head, k_row, k_head, scale,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write dN over Pᵀ do', and dS' at chunks' ends: some columns of one document and value head."""
    columns, head, document = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(documents_ptr + 2 * document), tl.load(documents_ptr + 2 * document + 1)
    rows, wide, key = tl.arange(0, L), tl.arange(0, DK), head // GROUP
    ds = tl.zeros((DK, COLUMNS), tl.float32)
    for done in tl.range(0, count, num_stages=STAGES):
        chunk = first + count - 1 - done
        start, length = tl.load(chunks_ptr + 4 * chunk).to(tl.int64), tl.load(chunks_ptr + 4 * chunk + 1)
        token, inside = start + rows, rows < length
        whole = inside[:, None]
        k = tl.load(k_ptr + token[:, None] * k_row + key * k_head + wide[None, :], mask=whole, other=0.0)
        at = (token[:, None] * H + head) * DV + columns[None, :]
        do = tl.load(do_ptr + at, mask=whole, other=0.0).to(tl.float32)
        dn = tl.load(dn_ptr + at, mask=whole, other=0.0).to(tl.float32)
        last = tl.load(sums_ptr + (start + length - 1) * H + head)
        b = tl.load(sums_ptr + token * H + head, mask=inside, other=last)
        q_unit = tl.load(q_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0) * scale
        k_unit = tl.load(k_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
        rounded = ds.to(k.dtype)
        number = tl.load(chunks_ptr + 4 * chunk + 3)
        to = ds_ptr + (number.to(tl.int64) * H + head) * DK * DV + wide[:, None] * DV + columns[None, :]
        tl.store(to, rounded, mask=number >= 0)
        # dN = Pᵀ do' + exp(b_L − b) k dS'
        dn = (dn + dot(k, rounded) * (tl.exp(last - b) * k_unit)[:, None]).to(k.dtype)
        tl.store(dn_ptr + at, dn, mask=whole)
        # dS = exp(b_L) dS' + (exp(b) q)ᵀ do' − wᵀ dN
        q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0)
        of_o = dot(tl.trans(q), (do * (tl.exp(b) * q_unit)[:, None]).to(k.dtype))
        w = tl.load(w_ptr + (token[:, None] * H + head) * DK + wide[None, :], mask=whole, other=0.0)
        of_new = dot(tl.trans(w), dn)
        ds = ds * tl.exp(last) + (of_o - of_new)


@triton.jit
def _inner(
    q_ptr, k_ptr,  # [T, H_k, DK]
    v_ptr,  # [T, H, DV]
    beta_ptr,  # [T, H]
    do_ptr, new_ptr,  # [T, H, DV]
    inverse_ptr,  # Tm [T, H, L]
    sums_ptr,  # float32 [T, H]
    q_unit_ptr, k_unit_ptr,  # float32 [T, H_k]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    y_ptr,  # [T, H, DV]: dN, and then y
    dv_ptr,  # [T, H, DV]
    to_q_ptr, q_to_k_ptr, k_to_k_ptr,  # [T, H, L]: what multiplies k in dq, q in dk (transposed), k in dk
    db_inner_ptr, dbeta_inner_ptr,  # float32 [T, H]
    q_row, q_head, k_row, k_head, v_row, v_head, scale,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write y over dN, dv, and what the products inside a chunk give: of one chunk and value head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunks_ptr + 4 * chunk + 1)
    if length == 0:
        return
    rows, wide, key = tl.arange(0, L), tl.arange(0, DK), head // GROUP
    start = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
    token, inside = start + rows, rows < length
    whole = inside[:, None]
    beta = tl.load(beta_ptr + token * H + head, mask=inside, other=0.0).to(tl.float32)
    square = (token[:, None] * H + head) * L + rows[None, :]
    inverse = tl.load(inverse_ptr + square, mask=whole, other=0.0)
    da = tl.zeros((L, L), tl.float32)
    dp = tl.zeros((L, L), tl.float32)
    dbeta = tl.zeros((L,), tl.float32)
    for first in range(0, DV, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        at = (token[:, None] * H + head) * DV + columns[None, :]
        do = tl.load(do_ptr + at, mask=whole, other=0.0)
        new = tl.load(new_ptr + at, mask=whole, other=0.0)
        dn = tl.load(y_ptr + at, mask=whole, other=0.0)
        v = tl.load(v_ptr + token[:, None] * v_row + head * v_head + columns[None, :], mask=whole, other=0.0)
        # y = Tmᵀ dN, dv = β y, and what it gives to β, A and P
        y = dot(tl.trans(inverse), dn)
        tl.store(dv_ptr + at, (y * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=whole)
        dbeta += tl.sum(y * v.to(tl.float32), 1)
        y = y.to(inverse.dtype)
        tl.store(y_ptr + at, y, mask=whole)
        da -= dot(y, tl.trans(new))
        dp += dot(do, tl.trans(new))
    q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0)
    k = tl.load(k_ptr + token[:, None] * k_row + key * k_head + wide[None, :], mask=whole, other=0.0)
    q_unit = tl.load(q_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
    k_unit = tl.load(k_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
    b = tl.load(sums_ptr + token * H + head, mask=inside, other=tl.load(sums_ptr + (start + length - 1) * H + head))
    decay = decays(b, L)
    da = tl.where(rows[:, None] > rows[None, :], da * decay, 0.0)  # from here on dA ∘ D and dP ∘ D
    dp = tl.where(rows[:, None] >= rows[None, :], dp * decay, 0.0) * scale
    # db: rows less columns of dA ∘ A + dP ∘ P
    kk = dot(k, tl.trans(k)) * k_unit[:, None] * k_unit[None, :] * da
    dbeta += tl.sum(kk, 1)
    both = kk * beta[:, None] + dot(q, tl.trans(k)) * q_unit[:, None] * k_unit[None, :] * dp
    tl.store(db_inner_ptr + token * H + head, tl.sum(both, 1) - tl.sum(both, 0), mask=inside)
    tl.store(dbeta_inner_ptr + token * H + head, dbeta, mask=inside)
    # dP ∘ D, dP ∘ D and X + Xᵀ, with the factors of the operand that they multiply
    da = da * beta[:, None]
    dtype = to_q_ptr.dtype.element_ty
    tl.store(to_q_ptr + square, (dp * k_unit[None, :]).to(dtype), mask=whole)
    tl.store(q_to_k_ptr + square, (dp * q_unit[:, None]).to(dtype), mask=whole)
    tl.store(k_to_k_ptr + square, ((da + tl.trans(da)) * k_unit[None, :]).to(dtype), mask=whole)


@triton.jit
def _query_gradients(
    q_ptr, k_ptr,  # [T, H_k, DK]
    do_ptr,  # [T, H, DV]
    sums_ptr,  # float32 [T, H]
    q_unit_ptr,  # float32 [T, H_k]
    states_ptr,  # [states, H, DK, DV]
    to_q_ptr,  # [T, H, L]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    dq_ptr,  # [T, H_k, DK]
    db_inner_ptr,  # float32 [T, H], to which is added
    q_row, q_head, k_row, k_head, scale,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dq of one chunk and key head, and add to db what exp(b) receives by it."""
    chunk, key = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunks_ptr + 4 * chunk + 1)
    if length == 0:
        return
    rows, wide = tl.arange(0, L), tl.arange(0, DK)
    token, inside = tl.load(chunks_ptr + 4 * chunk).to(tl.int64) + rows, rows < length
    whole = inside[:, None]
    q_unit = tl.load(q_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
    number = tl.load(chunks_ptr + 4 * chunk + 2)
    dq = tl.zeros((L, DK), tl.float32)
    for served in range(GROUP):
        head = key * GROUP + served
        part = tl.zeros((L, DK), tl.float32)
        if number >= 0:
            of_state = (number.to(tl.int64) * H + head) * DK * DV + wide[:, None] * DV
            for first in range(0, DV, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                do = tl.load(do_ptr + (token[:, None] * H + head) * DV + columns[None, :], mask=whole, other=0.0)
                part += dot(do, tl.trans(tl.load(states_ptr + of_state + columns[None, :])))
        # exp(b) do' Sᵀ
        part *= (tl.exp(tl.load(sums_ptr + token * H + head, mask=inside, other=0.0)) * scale)[:, None]
        q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0)
        by_since = q_unit * tl.sum(part * q.to(tl.float32), 1)
        db = tl.load(db_inner_ptr + token * H + head, mask=inside, other=0.0)
        tl.store(db_inner_ptr + token * H + head, db + by_since, mask=inside)
        # (dP ∘ D) k
        to_q = tl.load(to_q_ptr + (token[:, None] * H + head) * L + rows[None, :], mask=whole, other=0.0)
        k = tl.load(k_ptr + token[:, None] * k_row + key * k_head + wide[None, :], mask=whole, other=0.0)
        dq += part + dot(to_q, k)
    # through the division by q's length
    q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0)
    unit = q.to(tl.float32) * q_unit[:, None]
    dq = (dq - unit * tl.sum(unit * dq, 1)[:, None]) * q_unit[:, None]
    at = (token[:, None] * (H // GROUP) + key) * DK + wide[None, :]
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=whole)


@triton.jit
def _key_gradients(
    q_ptr, k_ptr,  # [T, H_k, DK]
    beta_ptr,  # [T, H]
    new_ptr, y_ptr,  # [T, H, DV]
    sums_ptr,  # float32 [T, H]
    k_unit_ptr,  # float32 [T, H_k]
    states_ptr, ds_ptr,  # S and dS' [states, H, DK, DV]
    q_to_k_ptr, k_to_k_ptr,  # [T, H, L]
    db_inner_ptr, dbeta_inner_ptr,  # float32 [T, H]
    chunks_ptr,  # int32 [chunks, 4]: `Chunks.chunks`
    dk_ptr,  # [T, H_k, DK]
    dg_ptr, dbeta_ptr,  # [T, H]
    q_row, q_head, k_row, k_head,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dk of one chunk and key head, and dg and dβ of its value heads."""
    chunk, key = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunks_ptr + 4 * chunk + 1)
    if length == 0:
        return
    rows, wide = tl.arange(0, L), tl.arange(0, DK)
    start = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
    token, inside = start + rows, rows < length
    whole = inside[:, None]
    k_unit = tl.load(k_unit_ptr + token * (H // GROUP) + key, mask=inside, other=0.0)
    of_k = k_ptr + token[:, None] * k_row + key * k_head + wide[None, :]
    before, after = tl.load(chunks_ptr + 4 * chunk + 2), tl.load(chunks_ptr + 4 * chunk + 3)
    dk = tl.zeros((L, DK), tl.float32)
    for served in range(GROUP):
        head = key * GROUP + served
        last = tl.load(sums_ptr + (start + length - 1) * H + head)
        b = tl.load(sums_ptr + token * H + head, mask=inside, other=last)
        beta = tl.load(beta_ptr + token * H + head, mask=inside, other=0.0).to(tl.float32)
        of_state = (before.to(tl.int64) * H + head) * DK * DV + wide[:, None] * DV
        of_ds = (after.to(tl.int64) * H + head) * DK * DV + wide[:, None] * DV
        # −exp(b) β y Sᵀ, what β and exp(b) receive by it, and what exp(b_L) does
        part = tl.zeros((L, DK), tl.float32)
        by_last = tl.zeros((COLUMNS,), tl.float32)
        if before >= 0:
            for first in range(0, DV, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                at = (token[:, None] * H + head) * DV + columns[None, :]
                state = tl.load(states_ptr + of_state + columns[None, :])
                ds = tl.load(ds_ptr + of_ds + columns[None, :], mask=after >= 0, other=0.0)
                by_last += tl.sum(state.to(tl.float32) * ds.to(tl.float32), 0)
                part += dot(tl.load(y_ptr + at, mask=whole, other=0.0), tl.trans(state))
        part *= tl.exp(b)[:, None]
        along = k_unit * tl.sum(part * tl.load(of_k, mask=whole, other=0.0).to(tl.float32), 1)
        dk -= part * beta[:, None]
        # exp(b_L − b) N dS'ᵀ, and what exp(b_L − b) receives
        part = tl.zeros((L, DK), tl.float32)
        if after >= 0:
            for first in range(0, DV, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                at = (token[:, None] * H + head) * DV + columns[None, :]
                ds = tl.load(ds_ptr + of_ds + columns[None, :])
                part += dot(tl.load(new_ptr + at, mask=whole, other=0.0), tl.trans(ds))
        part *= tl.exp(last - b)[:, None]
        by_until = k_unit * tl.sum(part * tl.load(of_k, mask=whole, other=0.0).to(tl.float32), 1)
        dk += part
        # (dP ∘ D)ᵀ q and (X + Xᵀ) k
        square = (token[:, None] * H + head) * L + rows[None, :]
        q = tl.load(q_ptr + token[:, None] * q_row + key * q_head + wide[None, :], mask=whole, other=0.0)
        dk += dot(tl.trans(tl.load(q_to_k_ptr + square, mask=whole, other=0.0)), q)
        dk += dot(tl.load(k_to_k_ptr + square, mask=whole, other=0.0), tl.load(of_k, mask=whole, other=0.0))
        # dg sums db up from the chunk's end; exp(b_L − b) and exp(b_L) have the last token's b, which is in every sum
        db = tl.load(db_inner_ptr + token * H + head, mask=inside, other=0.0) - beta * along - by_until
        # Triton 3.7 can't compile tl.cumsum here for Blackwell
        later = tl.where(rows[:, None] >= rows[None, :], db[:, None], 0.0)
        dg = tl.sum(later + by_until[:, None], 0) + tl.exp(last) * tl.sum(by_last, 0)
        tl.store(dg_ptr + token * H + head, dg, mask=inside)
        dbeta = tl.load(dbeta_inner_ptr + token * H + head, mask=inside, other=0.0) - along
        tl.store(dbeta_ptr + token * H + head, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)
    # through the division by k's length
    unit = tl.load(of_k, mask=whole, other=0.0).to(tl.float32) * k_unit[:, None]
    dk = (dk - unit * tl.sum(unit * dk, 1)[:, None]) * k_unit[:, None]
    at = (token[:, None] * (H // GROUP) + key) * DK + wide[None, :]
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=whole)


def backward_triton(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, saved: Saved, chunks: Chunks, scale: float
) -> tuple[Tensor, ...]:
    """Do what `backward` does, by these kernels."""
    key_given, value_given = k.shape[2], v.shape[2]
    q, k, v, do = map(filled, (q, k, v, do.to(v.dtype).contiguous()))
    heads, value_dim, count = *v.shape[1:], len(chunks.chunks)
    sizes = {"H": heads, "GROUP": heads // k.shape[1], "DK": k.shape[2], "DV": value_dim, "L": CHUNK}
    strides = *q.stride()[:2], *k.stride()[:2]
    decay = saved.sums, saved.q_unit, saved.k_unit
    dn, ds = torch.empty_like(saved.new), torch.empty_like(saved.states)
    tiles = TILES | MANY if len(chunks.documents) > FEW_DOCUMENTS else TILES
    columns, warps, stages = fit("direct", tiles, NARROW, v)
    launch(
        _direct, (count, heads, cdiv(value_dim, columns)),
        q, k, do, *decay, chunks.chunks, dn, *strides, scale,
        **sizes, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns, warps, stages = fit("state gradients", tiles, NARROW, v)
    launch(
        _state_gradients, (cdiv(value_dim, columns), heads, len(chunks.documents)),
        q, k, saved.w, do, *decay, *reversed(chunks), dn, ds, *strides, scale,
        **sizes, COLUMNS=columns, STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dq, dk, dv, dg, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    within = v.new_empty(3, *saved.inverse.shape).unbind()
    inner = v.new_empty(2, *g.shape, dtype=torch.float32).unbind()
    beta = beta.contiguous()
    columns, warps, stages = fit("inner", tiles, NARROW, v)
    launch(
        _inner, (count, heads),
        q, k, v, beta, do, saved.new, saved.inverse, *decay, chunks.chunks, dn, dv, *within, *inner,
        *strides, *v.stride()[:2], scale,
        **sizes, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    to_q, q_to_k, k_to_k = within
    columns, warps, stages = fit("query gradients", tiles, NARROW, v)
    launch(
        _query_gradients, (count, k.shape[1]),
        q, k, do, saved.sums, saved.q_unit, saved.states, to_q, chunks.chunks, dq, inner[0], *strides, scale,
        **sizes, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns, warps, stages = fit("key gradients", tiles, NARROW, v)
    launch(
        _key_gradients, (count, k.shape[1]),
        q, k, beta, saved.new, dn, saved.sums, saved.k_unit, saved.states, ds, q_to_k, k_to_k, *inner, chunks.chunks,
        dk, dg, dbeta, *strides,
        **sizes, COLUMNS=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dq, dk, dv = dq[..., :key_given], dk[..., :key_given], dv[..., :value_given]
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dg, dbeta
