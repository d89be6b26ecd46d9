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
from pronghorn.layers.block import Call, Norm


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
    rotates: bool = True
    """Whether queries and keys are turned by RoPE; without it they have no norms a head."""
    query_scale: tuple[float, int] | None = None
    """(β, tokens) of 1 + β log(1 + ⌊position / tokens⌋), by which queries are multiplied after RoPE."""

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

    def forward(self, qkv: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return q [T, H, D], k and v [T, H_kv, D] of [T, (H + 2·H_kv)·D], and r of norms that span all heads.

        The argument is overwritten unless `reads_raw`.
        """
        rstd: list[Tensor] = []
        if self.all_heads is None:
            q, k, v = self._turned(qkv, self.heads, call)
        else:
            q, k, v = self.heads.split(qkv)
            normed = qkv.new_empty(len(qkv), self.heads.turned)
            columns = normed.split([self.heads.query * self.heads.dim, self.heads.key_value * self.heads.dim], 1)
            rstd = [
                rms_norm.forward(x.flatten(1), norm.weight, norm.eps, norm.offset, out=y)[1]
                for norm, x, y in zip(self._norms, (q, k), columns, strict=True)
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
        trained = any(weight is not None and weight.requires_grad for weight in self.norm_weights)
        dq = self.heads.split(dqkv)[0]
        if (scale := self._scale_of(dq, call)) is not None:
            dq.mul_(scale)
        grad = dqkv.flatten(1)
        if self.all_heads is None:
            return (
                rope.backward_(dqkv, call.cos, call.sin, self.heads, qkv, trained)
                if self.rotates
                else (grad, None, None)
            )
        assert qkv is not None
        if self.rotates:
            rope.backward_(dqkv, call.cos, call.sin, self.heads.without_norms(), None)
        found: list[Tensor | None] = []
        parts = zip(self._norms, self.heads.split(qkv)[:2], self.heads.split(grad)[:2], rstd, strict=True)
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

    @property
    def _norms(self) -> tuple[Norm, Norm]:
        assert self.all_heads is not None
        return self.all_heads.query, self.all_heads.key
