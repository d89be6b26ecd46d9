"""From the merged product of q, k and v to what attention is given: norms of queries and keys, then RoPE.

A norm spans a head each (`kernels.rope` norms and rotates at once) or all heads of a token together (OLMoE): an RMSNorm
of the columns of q, and one of those of k, before RoPE. Values may have a norm of their own, and may be the keys as the
product left them (Gemma 4); k and v may also be another layer's, then q is alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels import rms_norm, rope
from pronghorn.kernels.rope import Heads
from pronghorn.layers.block import Call, Norm


@dataclass(frozen=True)
class QKV:
    """How q, k and v are made ready for attention."""

    heads: Heads
    all_heads: tuple[Norm, Norm] | None = None
    """The query's and the key's norm that span all heads of a token: their weights are [H · D] and [H_kv · D]."""
    rotates: bool = True
    """Whether queries and keys are rotated by RoPE; without it they have no norms a head."""
    query_scale: tuple[float, int] | None = None
    """(β, tokens) of 1 + β log(1 + ⌊position / tokens⌋), by which queries are multiplied after RoPE."""
    value_norm: Norm | None = None
    """Of each value head, or of what the product left of the key's where `heads.value` is 0; its weight isn't trained.
    It comes with norms of each query and key head."""
    gated: bool = False
    """The product has a gate after each query head, [T, (2·H + 2·H_kv)·D]; the heads have norms."""

    @property
    def norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the query's and the key's norm."""
        if self.all_heads is not None:
            return self.all_heads[0].weight, self.all_heads[1].weight
        return self.heads.query_norm, self.heads.key_norm if self.heads.key_value else None

    @property
    def reads_raw(self) -> bool:
        """Whether the backward needs q, k, v as the product left them."""
        return self.all_heads is not None or self.heads.query_norm is not None

    def forward(self, qkv: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return q [T, H, D], k and v [T, H_kv, D] of [T, (H + 2·H_kv)·D], and r of norms that span all heads.

        The argument is overwritten unless `reads_raw`.
        """
        rstd: list[Tensor] = []
        qkv = self._without_gates(qkv)
        if self.all_heads is None:
            q, k, v = self._turned(qkv, self.heads, call)
            if self.value_norm is not None:
                raw = self._raw_values(qkv)
                v = self.value_norm.forward(raw.flatten(0, 1), raw.dtype)[0].dense.view_as(raw)
        else:
            q, k, v = self.heads.split(qkv)
            normed = qkv.new_empty(len(qkv), self.heads.turned)
            columns = normed.split([self.heads.query * self.heads.dim, self.heads.key_value * self.heads.dim], 1)
            rstd = [
                rms_norm.forward(x.flatten(1), norm.weight, norm.eps, norm.offset, out=y)[1]
                for norm, x, y in zip(self.all_heads, (q, k), columns, strict=True)
            ]
            q, k, _ = self._turned(normed, self.heads.without_values(), call)
        scale = self._scale_of(q, call)
        return q if scale is None else q.mul_(scale), k, v, rstd

    def backward_(
        self, dqkv: Tensor, call: Call, qkv: Tensor | None, rstd: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (the gradient of `forward`'s argument in the place of dqkv [T, H + 2·H_kv, D], the norms' weights').

        Args:
            qkv: what `forward` was given, where `reads_raw`; rstd: what it returned last.
        """
        if self.value_norm is not None:
            assert qkv is not None
            return self._backward_with_values(dqkv, call, qkv)
        # back through the factor of queries
        trained = any(weight is not None and weight.requires_grad for weight in self.norm_weights)
        dq = self.heads.split(dqkv)[0]
        if (scale := self._scale_of(dq, call)) is not None:
            dq.mul_(scale)
        # back through RoPE, and through norms of each head with it
        grad = dqkv.flatten(1)
        if self.all_heads is None:
            raw = None if qkv is None else self._without_gates(qkv)
            return (
                rope.backward_(dqkv, call.cos, call.sin, self.heads, raw, trained)
                if self.rotates
                else (grad, None, None)
            )
        assert qkv is not None
        if self.rotates:
            rope.backward_(dqkv, call.cos, call.sin, self.heads.without_norms(), None)
        # back through norms that span all heads, which come before RoPE
        found: list[Tensor | None] = []
        parts = zip(self.all_heads, self.heads.split(qkv)[:2], self.heads.split(grad)[:2], rstd, strict=True)
        for norm, x, dy, r in parts:
            flat = dy.flatten(1)
            found.append(rms_norm.backward(flat, x.flatten(1), norm.weight, r, norm.offset, trained, out=flat)[1])
        return grad, found[0], found[1]

    def _turned(self, qkv: Tensor, heads: Heads, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        return rope.forward(qkv, call.cos, call.sin, heads) if self.rotates else heads.split(qkv)

    def _scale_of(self, query: Tensor, call: Call) -> Tensor | None:
        """Return what queries are multiplied by, [T, 1, 1], or None where no document is long enough."""
        if self.query_scale is None or call.packed.tokens <= self.query_scale[1]:
            return None
        assert call.positions is not None
        beta, tokens = self.query_scale
        scale = 1 + beta * torch.log(1 + torch.floor(call.positions.flatten() / tokens))
        return scale.to(query.dtype)[:, None, None]

    def _backward_with_values(
        self, dqkv: Tensor, call: Call, qkv: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert self.value_norm is not None
        # back through the values' norm
        own, turned = self.heads.value is None, self.heads.query + self.heads.key_value
        raw, dv = self._raw_values(qkv), dqkv[:, turned:]
        flat = raw.flatten(0, 1)
        rstd = self.value_norm.forward(flat, flat.dtype)[1]
        d_raw = self.value_norm.backward(dv.flatten(0, 1), flat, rstd)[0].view_as(raw)
        # back through RoPE and the norms of q and k
        dqkv = dqkv if own else dqkv[:, :turned].contiguous()
        trained = any(weight is not None and weight.requires_grad for weight in self.norm_weights)
        grad, d_query, d_key = rope.backward_(dqkv, call.cos, call.sin, self.heads, qkv, trained)
        # values that are keys as the product left them add to the gradient that keys have there
        if own:
            dv.copy_(d_raw)
        else:
            dqkv[:, self.heads.query :].add_(d_raw)
        return grad, d_query, d_key

    def _raw_values(self, qkv: Tensor) -> Tensor:
        _, k, v = self.heads.split(qkv)
        return v if self.heads.value is None else k

    def gate(self, mixed: Tensor, qkv: Tensor) -> Tensor:
        """Return attention's output [M, H·D] times σ(gate), given the product's rows [M, …]; itself without gates."""
        return mixed * self._gates(qkv).sigmoid() if self.gated else mixed

    def gate_backward(self, d_out: Tensor, mixed: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (the gradient of `gate`'s first argument, that of the gates [M, H·D] or None without)."""
        if not self.gated:
            return d_out, None
        s = self._gates(qkv).to(torch.promote_types(qkv.dtype, torch.float32)).sigmoid()
        return (d_out * s).to(d_out.dtype), (d_out * mixed * s * (1 - s)).to(d_out.dtype)

    def merge(self, d_qkv: Tensor, d_gate: Tensor | None) -> Tensor:
        """Return the gradient of the product from that of q, k, v [T, (H + 2·H_kv)·D] and of the gates."""
        if d_gate is None:
            return d_qkv
        columns = self.heads.query * self.heads.dim
        queries = (d_qkv[:, :columns].unflatten(1, (-1, self.heads.dim)), d_gate.unflatten(1, (-1, self.heads.dim)))
        return torch.cat([torch.stack(queries, 2).flatten(1), d_qkv[:, columns:]], 1)

    def _queries(self, qkv: Tensor) -> Tensor:
        """View the queries and gates as [T, H, 2, D]."""
        width = 2 * self.heads.query * self.heads.dim
        return qkv[:, :width].unflatten(1, (self.heads.query, 2, self.heads.dim))

    def _gates(self, qkv: Tensor) -> Tensor:
        return self._queries(qkv)[:, :, 1].flatten(1)

    def _without_gates(self, qkv: Tensor) -> Tensor:
        if not self.gated:
            return qkv
        rest = qkv[:, 2 * self.heads.query * self.heads.dim :]
        return torch.cat([self._queries(qkv)[:, :, 0].flatten(1), rest], 1)
