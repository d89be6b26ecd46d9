"""Causal attention inside the documents of a packed row, tile by tile, forward and backward.

    s_ij = scale · q_i·k_j        p_ij = exp(s_ij − lse_i)        o_i = Σ_j p_ij v_j        j ≤ i, same document
    dv_j = Σ_i p_ij do_i          ds_ij = p_ij (do_i·v_j − δ_i)   δ_i = do_i·o_i
    dq_i = scale · Σ_j ds_ij k_j          dk_j = scale · Σ_i ds_ij q_i

A head may have a sink, a learned score σ that takes part in the softmax and has no value (gpt-oss): lse_i then counts
exp(σ), nothing else changes, and dσ = −Σ_i exp(σ − lse_i) δ_i.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691. Its varlen kernels launch (documents × longest / 128) blocks a
head, nearly all of them empty where documents are short, add dq atomically and write dk and dv once for each query
head. Here a list of tiles, made once a batch, says where the work is; each tile's owner writes it once, so results
don't vary from run to run.

In Triton a program has a tile of queries (forward, dq) or of keys (dk, dv) of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.launch import by_device, launch, tl, triton

LOG2_E = 1.4426950408889634


def forward_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, D], lse [H, T]: base-2 logarithm of the sum of exp(s), in float32, or float64).

    Args:
        q: [T, H, D]; k, v: [T, H_kv, D], of any strides but for the last (slices of one product, for instance).
        tiles: int32 [N, 3], each tile's first row and its document's start and end; empty where first ≥ end.
        tile_rows: rows of a tile, of which those past its document's end are nobody's.
        window: a query sees itself and the `window - 1` tokens before it; None for no limit.
        sinks: [H], any float dtype, or None.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide)
    for start, end in _documents(tiles):
        scores = _scores(q[start:end], k[start:end], scale, window)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None].to(wide))
        lse[:, start:end] = total * LOG2_E
        p = torch.exp(scores - total[..., None])
        out[start:end] = (p.to(q.dtype) @ _heads_first(v[start:end], q.shape[1])).transpose(0, 1)
    return out, lse


def backward_reference(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return dq, dk and dv side by side, [T, H + 2·H_kv, D], as one product leaves q, k and v.

    Args: those of `forward` (lse has counted the sinks), its results, and d_out [T, H, D], contiguous.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    grads = q.new_empty(q.shape[0], heads + 2 * kv_heads, q.shape[2])
    for start, end in _documents(tiles):
        rows = slice(start, end)
        p = torch.exp2(_scores(q[rows], k[rows], scale, window) * LOG2_E - lse[:, rows, None])
        do, o = d_out[rows].transpose(0, 1), out[rows].transpose(0, 1)
        delta = (do.to(p.dtype) * o.to(p.dtype)).sum(-1, keepdim=True)
        dv = p.to(q.dtype).mT @ do
        ds = (p * ((do @ _heads_first(v[rows], heads).mT).to(p.dtype) - delta)).to(q.dtype)
        dq = (ds @ _heads_first(k[rows], heads)) * scale
        dk = (ds.mT @ q[rows].transpose(0, 1)) * scale
        shared = [x.unflatten(0, (kv_heads, -1)).sum(1) for x in (dk, dv)]
        grads[rows] = torch.cat([dq, *shared]).transpose(0, 1).to(q.dtype)
    return grads


def sink_grad(sinks: Tensor, d_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return dσ [H], in the sinks' dtype.

    Args:
        sinks: [H].
        d_out, out: [T, H, D].
        lse: [H, T], natural logarithm, the sinks counted.
    """
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
    return -(torch.exp(sinks[:, None].to(lse.dtype) - lse) * delta).sum(1).to(sinks.dtype)


def _documents(tiles: Tensor) -> list[tuple[int, int]]:
    return sorted({(start, end) for first, start, end in tiles.tolist() if first < end})


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """Turn [L, H_kv, D] into [H, L, D], each head repeated for the query heads that share it."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


def _scores(q: Tensor, k: Tensor, scale: float, window: int | None) -> Tensor:
    """Return scale · q kᵀ [H, L, L] in float32 (float64), −inf where a query doesn't look."""
    scores = q.transpose(0, 1) @ _heads_first(k, q.shape[1]).mT
    position = torch.arange(q.shape[0])
    distance = position[:, None] - position[None, :]
    hidden = (distance < 0) | (distance >= (window or q.shape[0]))
    wide = torch.promote_types(q.dtype, torch.float32)
    return (scores.to(wide) * scale).masked_fill(hidden, float("-inf"))


NEVER: tl.constexpr = tl.constexpr(-1e30)
"""A score that isn't looked at: finite, so that a row's first block may be wholly outside its window. What is summed
up there is multiplied by exp2(−1e30) = 0 when the first real score comes."""
BITS: tl.constexpr = tl.constexpr(LOG2_E)
"""From natural logarithms to base 2."""


@triton.jit
def _tile(tiles_ptr, index):
    """Return (first row, document's start, its end) of a tile of int32 [N, 3]."""
    return tl.load(tiles_ptr + index * 3), tl.load(tiles_ptr + index * 3 + 1), tl.load(tiles_ptr + index * 3 + 2)


@triton.jit
def _rows_of(ptr, rows, row_stride, end, D: tl.constexpr):
    """Load [ROWS, D] of one head; zeros past the document's end."""
    at = ptr + rows.to(tl.int64)[:, None] * row_stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(rows < end)[:, None], other=0.0)


@triton.jit
def _store_rows(ptr, value, rows, row_stride, end, D: tl.constexpr):
    """Store [ROWS, D] of one head, up to the document's end."""
    at = ptr + rows.to(tl.int64)[:, None] * row_stride + tl.arange(0, D)[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])  # they may be a tail of the batch's
def _forward(
    q_ptr,  # [T, H, D]
    k_ptr, v_ptr,  # [T, H_kv, D]
    sinks_ptr,  # [H]; read with SINK only
    out_ptr,  # [T, H, D]
    lse_ptr,  # float32 [H, T], base 2
    tiles_ptr,  # int32 [N, 3]
    T, q_row, q_head, k_row, k_head, v_row, v_head, out_row,  # elements from row to row, from head to head
    group,  # H / H_kv
    scale,  # of base-2 scores: scale · log₂ e
    window,
    WINDOW: tl.constexpr, SINK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries of one head."""
    head = tl.program_id(0).to(tl.int64)
    first, start, end = _tile(tiles_ptr, tl.program_id(1))
    if first < end:
        rows = first + tl.arange(0, ROWS)
        k_ptr += head // group * k_head
        v_ptr += head // group * v_head
        q = _rows_of(q_ptr + head * q_head, rows, q_row, end, D)
        top = tl.full((ROWS,), NEVER, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if SINK:  # a score that every query has seen before it looks at a key
            top = tl.zeros((ROWS,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * BITS
            total += 1.0
        out = tl.zeros((ROWS, D), tl.float32)
        begin = start
        if WINDOW:
            begin = tl.maximum(start, first - window + 1)
        for n in range(begin, tl.minimum(first + ROWS, end), COLS):
            cols = n + tl.arange(0, COLS)
            k = _rows_of(k_ptr, cols, k_row, end, D)
            v = _rows_of(v_ptr, cols, v_row, end, D)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = cols[None, :] <= rows[:, None]  # which hides keys past the document's end, too
            if WINDOW:
                seen = seen & (rows[:, None] - cols[None, :] < window)
            s = tl.where(seen, s, NEVER)
            # p is relative to the highest score so far; the sums before it are rescaled when a higher one comes
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
            top = higher
        _store_rows(out_ptr + head * D, out / total[:, None], rows, out_row, end, D)
        tl.store(lse_ptr + head * T + rows, top + tl.log2(total), mask=rows < end)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])  # they may be a tail of the batch's
def _backward_queries(
    do_ptr, q_ptr,  # [T, H, D]
    k_ptr, v_ptr,  # [T, H_kv, D]
    out_ptr,  # [T, H, D]
    lse_ptr, delta_ptr,  # float32 [H, T]
    dq_ptr,  # [T, H, D], rows grad_row apart
    tiles_ptr,  # int32 [N, 3]
    T, q_row, q_head, k_row, k_head, v_row, v_head,
    out_row,  # of do and out
    grad_row, group,
    scale, unit,  # scale · log₂ e, and scale
    window,
    WINDOW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write δ and dq of a tile of queries."""
    head = tl.program_id(0).to(tl.int64)
    first, start, end = _tile(tiles_ptr, tl.program_id(1))
    if first < end:
        rows = first + tl.arange(0, ROWS)
        k_ptr += head // group * k_head
        v_ptr += head // group * v_head
        q = _rows_of(q_ptr + head * q_head, rows, q_row, end, D)
        do = _rows_of(do_ptr + head * D, rows, out_row, end, D)
        out = _rows_of(out_ptr + head * D, rows, out_row, end, D)
        # δ_i = do_i·o_i, which `_backward_keys` reads, too
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        here = head * T + rows
        tl.store(delta_ptr + here, delta, mask=rows < end)
        lse = tl.load(lse_ptr + here, mask=rows < end, other=0.0)
        dq = tl.zeros((ROWS, D), tl.float32)
        begin = start
        if WINDOW:
            begin = tl.maximum(start, first - window + 1)
        for n in range(begin, tl.minimum(first + ROWS, end), COLS):
            cols = n + tl.arange(0, COLS)
            k = _rows_of(k_ptr, cols, k_row, end, D)
            v = _rows_of(v_ptr, cols, v_row, end, D)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = cols[None, :] <= rows[:, None]
            if WINDOW:
                seen = seen & (rows[:, None] - cols[None, :] < window)
            # p_ij, ds_ij = p_ij (do_i·v_j − δ_i), and ds_ij k_j
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        _store_rows(dq_ptr + head * D, dq * unit, rows, grad_row, end, D)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])  # they may be a tail of the batch's
def _backward_keys(
    do_ptr, q_ptr,  # [T, H, D]
    k_ptr, v_ptr,  # [T, H_kv, D]
    lse_ptr, delta_ptr,  # float32 [H, T]
    dk_ptr, dv_ptr,  # [T, H_kv, D], rows grad_row apart
    tiles_ptr,  # int32 [N, 3]
    T, q_row, q_head, k_row, k_head, v_row, v_head, out_row, grad_row, group, scale, unit, window,
    WINDOW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a tile of keys, over all queries and query heads that see it."""
    kv_head = tl.program_id(0).to(tl.int64)
    first, _, end = _tile(tiles_ptr, tl.program_id(1))
    if first < end:
        cols = first + tl.arange(0, COLS)
        k = _rows_of(k_ptr + kv_head * k_head, cols, k_row, end, D)
        v = _rows_of(v_ptr + kv_head * v_head, cols, v_row, end, D)
        dk = tl.zeros((COLS, D), tl.float32)
        dv = tl.zeros((COLS, D), tl.float32)
        stop = end
        if WINDOW:  # the last key's last query
            stop = tl.minimum(end, first + COLS + window - 1)
        # all query heads of these keys in one program: their parts are added in order, without atomics
        for head in range(kv_head * group, (kv_head + 1) * group):
            for m in range(first, stop, ROWS):
                rows = m + tl.arange(0, ROWS)
                q = _rows_of(q_ptr + head * q_head, rows, q_row, end, D)
                do = _rows_of(do_ptr + head * D, rows, out_row, end, D)
                here = head * T + rows
                lse = tl.load(lse_ptr + here, mask=rows < end, other=0.0)
                delta = tl.load(delta_ptr + here, mask=rows < end, other=0.0)
                s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
                seen = (cols[:, None] <= rows[None, :]) & (rows < end)[None, :]
                if WINDOW:
                    seen = seen & (rows[None, :] - cols[:, None] < window)
                # p_ij do_i
                p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                # ds_ij = p_ij (do_i·v_j − δ_i), and ds_ij q_i
                ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        _store_rows(dk_ptr + kv_head * D, dk * unit, cols, grad_row, end, D)
        _store_rows(dv_ptr + kv_head * D, dv, cols, grad_row, end, D)


def forward_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `forward` does, by its Triton kernels."""
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads, dim)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    launch(
        _forward, (heads, len(tiles)),
        q, k, v, q if sinks is None else sinks, out, lse, tiles, tokens, *_strides(q, k, v), out.stride(0),
        heads // k.shape[1], scale * LOG2_E, window or 0,
        WINDOW=window is not None, SINK=sinks is not None, D=dim, ROWS=tile_rows, COLS=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


def backward_triton(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Do what `backward` does, by its Triton kernels."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    grads = q.new_empty(tokens, heads + 2 * kv_heads, dim)
    dq, dk, dv = grads.split([heads, kv_heads, kv_heads], 1)
    delta = torch.empty_like(lse)
    strides = *_strides(q, k, v), out.stride(0), grads.stride(0)
    numbers = tokens, *strides, heads // kv_heads, scale * LOG2_E, scale, window or 0
    launch(
        _backward_queries, (heads, len(tiles)),
        d_out, q, k, v, out, lse, delta, dq, tiles, *numbers,
        WINDOW=window is not None, D=dim, ROWS=tile_rows, COLS=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    launch(
        _backward_keys, (kv_heads, len(tiles)),
        d_out, q, k, v, lse, delta, dk, dv, tiles, *numbers,
        WINDOW=window is not None, D=dim, ROWS=64, COLS=tile_rows, num_warps=4, num_stages=2,
    )  # fmt: skip
    return grads


def _strides(*tensors: Tensor) -> list[int]:
    """Return the elements from row to row and from head to head of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


forward = by_device(forward_reference, forward_triton)
backward = by_device(backward_reference, backward_triton, at=1)
