"""Make the cases of a dense layer's ops and of the loss: the formula as transformers writes it, inputs, ways."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.op_case import IGNORED, LORA_SCALE, Case, Draw, Way, Work, by_autograd, by_kernel
from pronghorn.attention import explicit
from pronghorn.attention.backends import Backend
from pronghorn.attention.varlen import MAX_HEAD_DIM
from pronghorn.data.batch import PackedBatch
from pronghorn.kernels import adapter_gradients, cross_entropy, glu, linear_cross_entropy, residual, rms_norm, rope

EPS = 1e-6
GATE_ROWS = 2560
"""Of linear cross-entropy, whose logits in float64 would fill a GPU otherwise: more than two chunks."""
GATE_DOCUMENT = 4096
"""Of attention, for its scores in float64: long enough for `attention.long_documents`."""


# --- RMSNorm


def norm_formula(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """transformers' LlamaRMSNorm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype),)


def norm_case(draw: Draw, tokens: int, width: int, trained: bool = False) -> Case:
    """x: [T, H]; the weight's gradient only if it is trained."""

    def liger(case: Case) -> Way:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return by_autograd(case, lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama"))

    x, weight, dy = draw(tokens, width), draw(width), draw(tokens, width)
    label = f"{tokens}x{width}" + (", weight trained" if trained else "")
    return Case(
        "rms_norm", label, tokens, norm_formula, (x, weight), (dy,), ("y", "dx", "dw")[: 2 + trained],
        (2 * x.nbytes, 3 * x.nbytes), lambda case: by_autograd(case, lambda x, w: rms_norm.rms_norm(x, w, EPS)),
        liger, trained=1 + trained,
    )  # fmt: skip


# --- gated activation


def glu_case(draw: Draw, tokens: int, width: int, activation: glu.Activation) -> Case:
    """gate and up: [T, I] each, side by side."""

    def formula(gate_up: Tensor) -> tuple[Tensor, ...]:
        gate, up = gate_up.chunk(2, -1)
        act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return (act * up,)

    def pronghorn(case: Case) -> Way:
        return by_kernel(
            case,
            lambda gate_up: (glu.forward(gate_up, activation),),
            lambda _, gate_up, da: (glu.backward_(da, gate_up, activation), da),  # a in da's place, for LoRA
            owned=(0,),
            again=("a",),
            more=case.grads[0].nbytes,
        )

    def liger(case: Case) -> Way:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        function = LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction
        gate, up = case.inputs[0].chunk(2, -1)  # as two products leave them
        apart = replace(case, inputs=(gate.contiguous(), up.contiguous()), trained=2, names=("a", "d gate", "d up"))
        way = by_autograd(apart, function.apply)

        def results(state: Any, grads: Any) -> dict[str, Tensor]:
            return {"a": state[0][0], "d gate_up": torch.cat(grads, -1)}

        return replace(way, results=results)

    gate_up, da = draw(tokens, 2 * width), draw(tokens, width)
    return Case(
        "swiglu" if activation == "silu" else "geglu", f"{tokens}x{width}", tokens, formula, (gate_up,), (da,),
        ("a", "d gate_up"), (3 * da.nbytes, 5 * da.nbytes), pronghorn, liger,
    )  # fmt: skip


def glu_lora_case(draw: Draw, tokens: int, width: int, rank: int) -> Case:
    """Make SwiGLU of gate and up, LoRA's part added on the way; gate_up: [T, 2·I], xa: [T, R], b: [2·I, R], half
    of whose ranks are gate's adapter's and half up's: the rest is zero."""

    def formula(gate_up: Tensor, xa: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        whole = gate_up + LORA_SCALE * (xa @ b.t())
        gate, up = whole.chunk(2, -1)
        return functional.silu(gate) * up, whole

    def forward(h: Tensor, xa: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return glu.forward_with_low_rank_(h, xa, b, LORA_SCALE, "silu", ranks), h

    ranks = rank - rank // 2, rank // 2
    inputs = draw(tokens, 2 * width), draw(tokens, rank), draw(2 * width, rank)
    inputs[2][:width, ranks[0] :] = 0
    inputs[2][width:, : ranks[0]] = 0
    moved = 2.5 * inputs[0].nbytes + inputs[1].nbytes + width * rank * inputs[2].element_size()
    return Case(
        "swiglu_lora", f"{tokens}x{width}, rank {rank}", tokens, formula, inputs, (), ("a", "gate_up"), (moved, 0.0),
        lambda case: by_kernel(case, forward, owned=(0,)), trained=0,
    )  # fmt: skip


# --- the residual sum


def residual_case(draw: Draw, tokens: int, width: int, rank: int) -> Case:
    """x + y + s · xa bᵀ; y, x: [T, H], xa: [T, R], b: [H, R]."""

    def formula(y: Tensor, x: Tensor, xa: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (x + (y + LORA_SCALE * (xa @ b.t())),)

    def forward(y: Tensor, x: Tensor, xa: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (residual.add_(y, x, (xa, b, LORA_SCALE)),)

    inputs = draw(tokens, width), draw(tokens, width), draw(tokens, rank), draw(width, rank)
    moved = 3.0 * inputs[0].nbytes + inputs[2].nbytes + inputs[3].nbytes
    return Case(
        "residual_lora", f"{tokens}x{width}, rank {rank}", tokens, formula, inputs, (), ("out",), (moved, 0.0),
        lambda case: by_kernel(case, forward, owned=(0,)), trained=0,
    )  # fmt: skip


def wide_residual_case(draw: Draw, tokens: int, width: int) -> Case:
    """x + y; x: [T, H] in float32 (at the least), y: [T, H] as drawn: full fine-tuning under autocast."""

    y, x = draw(tokens, width), draw(tokens, width)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return Case(
        "residual_wide", f"{tokens}x{width}", tokens, lambda y, x: (x + y,), (y, x), (), ("out",),
        (y.nbytes + 2.0 * x.nbytes, 0.0),
        lambda case: by_kernel(case, lambda y, x: (residual.add_(y, x, None),), owned=(0,)), trained=0,
    )  # fmt: skip


# --- what adapters' gradients need of dy


def adapters_case(draw: Draw, tokens: int, rank: int, *widths: int) -> Case:
    """dy: [T, N], b: [N, R], xa: [T, R]; one adapter for each of `widths`, which are N together."""
    ends = list(accumulate(widths))
    columns, ranks = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)], [rank] * len(widths)
    wide = torch.promote_types(draw.dtype, torch.float32)

    def formula(dy: Tensor, b: Tensor, xa: Tensor) -> tuple[Tensor, ...]:
        """Round the gradients of B to the products' dtype first, as under autocast."""
        parts = zip(columns, xa.split(ranks, 1), strict=True)
        db = torch.cat([dy[:, own].t() @ part for own, part in parts])
        return LORA_SCALE * (dy @ b), LORA_SCALE * db.to(torch.promote_types(db.dtype, wide))

    def pronghorn(case: Case) -> Way:
        way = by_kernel(case, lambda dy, b, xa: adapter_gradients.products(dy, b, xa, columns, ranks, LORA_SCALE, wide))
        return replace(way, results=lambda state, _: {"dya": state[0][0], "db": torch.cat(state[0][1])})

    dy, xa = draw(tokens, sum(widths)), draw(tokens, sum(ranks))
    b = torch.block_diag(*(draw(width, rank) for width in widths))
    moved = float(dy.nbytes + 2 * xa.nbytes + sum(widths) * rank * (b.itemsize + wide.itemsize))
    return Case(
        "adapter_gradients", f"{tokens}x{'+'.join(map(str, widths))}, rank {rank}", tokens, formula, (dy, b, xa), (),
        ("dya", "db"), (moved, 0.0), pronghorn, trained=0,
    )  # fmt: skip


# --- RoPE


def rope_formula(qkv: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor, heads: rope.Heads) -> tuple[Tensor, ...]:
    """transformers' apply_rotary_pos_emb, after Qwen3's norm of each head."""
    q, k, v = heads.split(qkv)
    if norms:
        (q,), (k,) = norm_formula(q, norms[0]), norm_formula(k, norms[1])

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return turned(q), turned(k), v


def rope_case(draw: Draw, tokens: int, query: int, key_value: int, dim: int, norm: bool) -> Case:
    """q: [T, H, D], k and v: [T, H_kv, D], side by side."""
    heads = rope.Heads(query, key_value, dim)

    def pronghorn(case: Case) -> Way:
        _, cos, sin, *norms = case.inputs
        own = replace(heads, query_norm=norms[0], key_norm=norms[1], eps=EPS) if norms else heads
        side_by_side = replace(case, grads=(torch.cat(case.grads, 1),))  # as flash writes its gradients

        def backward(_: Any, qkv: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            return (rope.backward_(others[-1], cos, sin, own, qkv if norms else None)[0],)

        return by_kernel(side_by_side, lambda qkv, *_: rope.forward(qkv, cos, sin, own), backward, owned=(0,))

    def liger(case: Case) -> Way:
        from liger_kernel.ops.rope import LigerRopeFunction

        qkv, cos, sin = case.inputs
        q, k, v = heads.split(qkv)
        dq, dk, dv = case.grads
        q, k, dq, dk = (x.contiguous()[None].transpose(1, 2) for x in (q, k, dq, dk))  # [1, H, T, D]
        apart = replace(case, inputs=(q, k, cos[None], sin[None]), grads=(dq, dk), trained=2)
        way = by_autograd(apart, LigerRopeFunction.apply)

        def results(state: Any, grads: Any) -> dict[str, Tensor]:
            q, k, *turned_back = (x.transpose(1, 2)[0] for x in (*state[0], *grads))
            return {"q": q, "k": k, "v": v, "d qkv": torch.cat([*turned_back, dv], 1).flatten(1)}

        return replace(way, results=results)

    angles = torch.rand(tokens, dim // 2, generator=draw.generator, device=draw.device) * 2 * math.pi
    cos, sin = (f(torch.cat([angles, angles], -1)).to(draw.dtype) for f in (torch.cos, torch.sin))
    qkv = draw(tokens, (query + 2 * key_value) * dim)
    grads = tuple(draw(tokens, n, dim) for n in (query, key_value, key_value))
    turned = grads[0].nbytes + grads[1].nbytes
    return Case(
        "rope_qk_norm" if norm else "rope", f"{tokens}x({query}+{key_value})x{dim}", tokens,
        lambda *inputs: rope_formula(*inputs, heads=heads), (qkv, cos, sin, *(draw(dim) for _ in range(2 * norm))),
        grads, ("q", "k", "v", "d qkv"),  # half of cos and of sin says it all; the norm's backward reads its input, too
        (2 * turned + cos.nbytes, (3 if norm else 2) * turned + cos.nbytes), pronghorn, None if norm else liger,
    )  # fmt: skip


# --- cross-entropy


def loss_case(draw: Draw, tokens: int, vocab: int) -> Case:
    """Make logits [M, V] of as many rows as a chunk of linear cross-entropy has, an eighth without a label."""
    rows = min(tokens, linear_cross_entropy.rows_of_a_chunk(torch.empty(vocab, 1, dtype=draw.dtype, device="meta")))
    targets = draw.targets(rows, vocab)

    def formula(logits: Tensor) -> tuple[Tensor, ...]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum"),)

    def forward(logits: Tensor) -> tuple[Tensor, ...]:
        return cross_entropy.cross_entropy_(logits, targets, IGNORED, None).sum(), logits  # the gradient in their place

    def pronghorn(case: Case) -> Way:
        return replace(by_kernel(case, forward, owned=(0,)), work=(2 * case.inputs[0].nbytes, 0.0))

    def liger(case: Case) -> Way:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        def loss(logits: Tensor) -> Tensor:
            return LigerCrossEntropyFunction.apply(logits, targets, None, IGNORED, 0.0, 0.0, "sum")[0]

        return by_autograd(case, loss, (2 * case.inputs[0].nbytes, 0.0))

    logits = draw(rows, vocab) * 4
    one = torch.ones((), dtype=torch.float32, device=draw.device)
    work = logits.nbytes, 2.0 * logits.nbytes
    return Case(
        "cross_entropy", f"{rows}x{vocab}", rows, formula, (logits,), (one,), ("loss", "d logits"), work, pronghorn,
        liger,
    )  # fmt: skip


def linear_loss_case(draw: Draw, tokens: int, width: int, vocab: int, trained: bool = False) -> Case:
    """hidden: [M, H], weight: [V, H]; the weight's gradient only if it is trained."""
    small = None if tokens <= GATE_ROWS else linear_loss_case(draw, GATE_ROWS, width, vocab, trained)
    targets = draw.targets(tokens, vocab)
    count = int((targets != IGNORED).sum())

    def formula(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logits = hidden @ weight.t()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (functional.cross_entropy(wide, targets, ignore_index=IGNORED),)

    def at_once(case: Case) -> Work:  # the forward makes the gradients
        return sum(case.work), 0.0

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy.linear_cross_entropy(hidden, weight, targets, count, IGNORED)

    def liger(case: Case) -> Way:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)[0]

        return by_autograd(case, loss, at_once(case))

    product = 2.0 * tokens * width * vocab
    weight = draw(vocab, width) * (4 / math.sqrt(width))
    one = torch.ones((), dtype=torch.float32, device=draw.device)
    return Case(
        "linear_cross_entropy", f"{tokens}x{width}, vocabulary {vocab}" + (", weight trained" if trained else ""),
        tokens, formula, (draw(tokens, width), weight), (one,), ("loss", "dh", "dw")[: 2 + trained],
        (product, (1 + trained) * product), lambda case: by_autograd(case, ours, at_once(case)), liger,
        trained=1 + trained, product=(tokens, width, vocab), small=small,
        slack=torch.finfo(draw.dtype).eps / math.sqrt(tokens),
    )  # fmt: skip


# --- attention


def attention_formula(q: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, ...]:
    """torch's SDPA, a batch of documents of one length: the fastest that torch has where nothing must be packed.

    Wide heads are repeated, as transformers does beside a mask: its grouped ones go through products in float32 then,
    which take six times as long and round the results alone.
    """
    if q.shape[2] > MAX_HEAD_DIM:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q_BHLD, k_BHLD, v_BHLD = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True, enable_gqa=True)
    return (out.transpose(1, 2).reshape(q.shape),)


def attention_case(
    draw: Draw, tokens: int, heads: int, kv_heads: int, dim: int, length: int, backend: Backend = "auto"
) -> Case:
    """q: [T, H, D], k and v: [T, H_kv, D], in packed documents of `length` tokens each."""
    gate = GATE_DOCUMENT, heads, kv_heads, dim, GATE_DOCUMENT, backend
    small = attention_case(draw, *gate) if length > GATE_DOCUMENT else None
    documents = max(1, tokens // length)
    tokens = documents * length

    def pronghorn(case: Case) -> Way:
        lengths = [min(length, case.tokens)] * max(1, case.tokens // length)  # the small case is one document
        packed = PackedBatch.build(lengths, tokens=case.tokens, device=draw.device)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return explicit.attention(q, k, v, explicit.Options.choose(backend, q, packed, dim**-0.5, None))

        return by_autograd(case, ours)

    q, k, v, d_out = (draw(tokens, count, dim) for count in (heads, kv_heads, kv_heads, heads))
    forward, way = 2.0 * q.nbytes + k.nbytes + v.nbytes, "" if backend == "auto" else f", {backend}"
    return Case(
        "attention", f"{tokens}x{heads}/{kv_heads}x{dim}, documents of {length}{way}", tokens,
        functools.partial(attention_formula, length=length), (q, k, v), (d_out,), ("out", "dq", "dk", "dv"),
        (forward, 2 * forward), pronghorn, trained=3, small=small,
    )  # fmt: skip
