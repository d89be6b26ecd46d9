"""From the merged product of q, k and v to what attention is given: norms of queries and keys, then RoPE.

A norm spans a head each (`kernels.rope` norms and rotates at once) or all heads of a token together (OLMoE): an RMSNorm
of the columns of q, and one of those of k, before RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels import rms_norm, rope
from pronghorn.kernels.rope import Heads
from pronghorn.layers.block import Norm


@dataclass(frozen=True)
class HeadNorms:
    """Norms that span all heads of a token: their weights are [H · D] and [H_kv · D]."""

    query: Norm
    key: Norm


@dataclass(frozen=True)
class QKV:
    """How q, k and v are made ready for attention."""

    heads: Heads
    all_heads: HeadNorms | None = None
    gated: bool = False
    """The product has a gate after each query head, [T, (2·H + 2·H_kv)·D]; the heads have norms."""

    @property
    def norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the query's and the key's norm."""
        if self.all_heads is not None:
            return self.all_heads.query.weight, self.all_heads.key.weight
        return self.heads.query_norm, self.heads.key_norm

    @property
    def reads_raw(self) -> bool:
        """Whether the backward needs q, k, v as the product left them."""
        return self.all_heads is not None or self.heads.query_norm is not None

    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return q [T, H, D], k and v [T, H_kv, D] of [T, (H + 2·H_kv)·D], and r of norms that span all heads.

        The argument is overwritten unless `reads_raw`.
        """
        qkv = self._without_gates(qkv)
        if self.all_heads is None:
            return *rope.forward(qkv, cos, sin, self.heads), []
        q, k, v = self.heads.split(qkv)
        columns = [self.heads.query * self.heads.dim, self.heads.key_value * self.heads.dim]
        normed = qkv.new_empty(len(qkv), sum(columns))
        rstd = [
            rms_norm.forward(x.flatten(1), norm.weight, norm.eps, norm.offset, out=y)[1]
            for norm, x, y in zip(self._norms, (q, k), normed.split(columns, 1), strict=True)
        ]
        q, k, _ = rope.forward(normed, cos, sin, self.heads.without_values())
        return q, k, v, rstd

    def backward_(
        self, dqkv: Tensor, cos: Tensor, sin: Tensor, qkv: Tensor | None, rstd: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (the gradient of `forward`'s argument in the place of dqkv [T, H + 2·H_kv, D], the norms' weights').

        Args:
            qkv: what `forward` was given, where `reads_raw`; rstd: what it returned last.
        """
        trained = any(weight is not None and weight.requires_grad for weight in self.norm_weights)
        if self.all_heads is None:
            raw = None if qkv is None else self._without_gates(qkv)
            return rope.backward_(dqkv, cos, sin, self.heads, raw, trained)
        assert qkv is not None
        grad, *_ = rope.backward_(dqkv, cos, sin, self.heads.without_norms(), None)
        found: list[Tensor | None] = []
        parts = zip(self._norms, self.heads.split(qkv)[:2], self.heads.split(grad)[:2], rstd, strict=True)
        for norm, x, dy, r in parts:
            flat = dy.flatten(1)
            found.append(rms_norm.backward(flat, x.flatten(1), norm.weight, r, norm.offset, trained, out=flat)[1])
        return grad, found[0], found[1]

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

    @property
    def _norms(self) -> tuple[Norm, Norm]:
        assert self.all_heads is not None
        return self.all_heads.query, self.all_heads.key
