"""Several linears of one input as one product, with their LoRA adapters.

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ        W: the weights of the linears, one below the other
                                        A: their A one below the other, B: their B along the diagonal

The model's own weights become row slices of one storage, so they save, load and move as before; what moved them is
noticed, and they are put together again. Adapters are copied once a forward, in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Adapter:
    """A linear's active LoRA adapter: the parameters a [r, in] and b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float


def adapter_of(linear: nn.Module) -> Adapter | None:
    """The one active adapter of PEFT's LoRA linear; None where there is none, or it is disabled or merged."""
    module: Any = linear
    if not hasattr(module, "lora_A") or module.disable_adapters or module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if not active:
        return None
    name = active[0]
    return Adapter(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


def base_of(linear: Any) -> Any:
    """The linear under PEFT's wrapper, or the linear itself."""
    return getattr(linear, "base_layer", linear)


def refusal(linears: list[nn.Module]) -> str | None:
    """Why these linears can't be computed as one product, or None."""
    bases = [base_of(linear) for linear in linears]
    for base in bases:
        if type(base) is not nn.Linear:
            return f"{type(base).__name__} is not a plain linear"
        if base.weight.requires_grad:
            return "the linears' own weights are trained"
        if hasattr(base.weight, "device_mesh"):
            return "the weights are sharded"
    if len({(base.weight.dtype, base.weight.device, base.bias is None) for base in bases}) > 1:
        return "the linears differ in dtype, device or bias"
    scales = set()
    for module in linears:
        linear: Any = module
        if not hasattr(linear, "lora_A"):
            continue
        active = [name for name in linear.active_adapters if name in linear.lora_A]
        if len(active) > 1:
            return f"{len(active)} adapters are active at once"
        for name in active:
            if type(linear.lora_dropout[name]) is not nn.Identity:
                return "LoRA dropout"
            if linear.use_dora.get(name) or linear.lora_bias.get(name) or type(linear.lora_A[name]) is not nn.Linear:
                return "an adapter that is not plain LoRA"
            scales.add(linear.scaling[name])
    return "the linears' LoRA scales differ" if len(scales) > 1 else None


class LinearGroup:
    """Linears with the same input, which `refusal` doesn't refuse."""

    def __init__(self, linears: list[nn.Module]) -> None:
        self.linears = linears
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._copies: tuple[Tensor, Tensor] | None = None
        self._scale = 1.0

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return base_of(self.linears[0]).weight.dtype

    @property
    def weight(self) -> Tensor:
        """[N, in]; the linears' weights are its slices."""
        weights = [base_of(linear).weight for linear in self.linears]
        if self._weight is None or not _in_place(self._weight, weights):
            self._weight = _merge(weights)
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """[N], or None."""
        biases = [base_of(linear).bias for linear in self.linears]
        if biases[0] is None:
            return None
        if self._bias is None or not _in_place(self._bias, biases):
            self._bias = _merge(biases)
        return self._bias

    def adapters(self) -> list[tuple[slice, Adapter]]:
        """The active adapters and the columns of y that each adds to."""
        found, start = [], 0
        for linear in self.linears:
            width = base_of(linear).out_features
            adapter = adapter_of(linear)
            if adapter is not None:
                found.append((slice(start, start + width), adapter))
            start += width
        return found

    def copy_adapters(self) -> tuple[Tensor, Tensor]:
        """A [R, in] and B [N, R] of all adapters in the weights' dtype; made anew, B's other blocks stay zero."""
        adapters, weight = self.adapters(), self.weight
        ranks = sum(adapter.a.shape[0] for _, adapter in adapters)
        kept = self._copies
        if (
            kept is None
            or kept[0].shape[0] != ranks
            or (kept[0].dtype, kept[0].device) != (weight.dtype, weight.device)
        ):
            kept = weight.new_zeros(ranks, weight.shape[1]), weight.new_zeros(weight.shape[0], ranks)
            self._copies = kept
        targets, sources, rank = [], [], 0
        for columns, adapter in adapters:
            r = adapter.a.shape[0]
            targets += [kept[0][rank : rank + r], kept[1][columns, rank : rank + r]]
            sources += [adapter.a.detach(), adapter.b.detach()]
            rank += r
        torch._foreach_copy_(targets, sources)
        return kept

    def parameters(self) -> list[Tensor]:
        """The trained tensors, in the order of `backward`'s gradients: a and b of each adapter."""
        return [tensor for _, adapter in self.adapters() for tensor in (adapter.a, adapter.b)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(y [T, N], x Aᵀ [T, R] or None without adapters) of x [T, in]."""
        y, low_rank = self.parts(x)
        if low_rank is None:
            return y, None
        xa, b, scale = low_rank
        return y.addmm_(xa, b.t(), alpha=scale), xa

    def parts(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, float] | None]:
        """x Wᵀ + b, and what is to be added to it: (x Aᵀ, B, s) of s · (x Aᵀ) Bᵀ, or None without adapters."""
        weight, bias, adapters = self.weight, self.bias, self.adapters()
        y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        if not adapters:
            self._copies = None
            return y, None
        self._scale = adapters[0][1].scale
        a, b = self.copy_adapters()
        return y, (x @ a.t(), b, self._scale)

    def input_grad(self, dy: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
        """(dx [T, in], if wanted; s·dy B [T, R], if there are adapters) from dy [T, N]."""
        dx = dy @ self.weight if wanted else None
        if self._copies is None:
            return dx, None
        a, b = self._copies
        dya = torch.addmm(dy.new_empty(1, 1), dy, b, beta=0, alpha=self._scale)
        return dx if dx is None else dx.addmm_(dya, a), dya

    def adapter_grads(self, dy: Tensor, dya: Tensor | None, x: Tensor, xa: Tensor | None) -> list[Tensor]:
        """The gradients of `parameters`, from dy [T, N], what `input_grad` gave, x [T, in], what `forward` gave."""
        if dya is None or xa is None:
            return []
        grads: list[Tensor] = []
        adapters = self.adapters()
        da = _product(dya.t(), x, adapters[0][1].a.dtype)
        rank = 0
        for columns, adapter in adapters:
            r = adapter.a.shape[0]
            db = _product(dy[:, columns].t(), xa[:, rank : rank + r], adapter.b.dtype)
            grads += [da[rank : rank + r], db if self._scale == 1 else db.mul_(self._scale)]
            rank += r
        return grads


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed in float32 and rounded to `dtype` only."""
    if a.is_cuda and dtype is torch.float32 and a.dtype is not dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _in_place(merged: Tensor, parts: list[Tensor]) -> bool:
    """Whether the parts are still the slices of the merged tensor that they were made."""
    at = merged.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype is not merged.dtype or part.device != merged.device:
            return False
        at += part.numel() * part.element_size()
    return at == merged.data_ptr() + merged.numel() * merged.element_size()


def _merge(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].detach()
    merged = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, merged.split([part.shape[0] for part in parts]), strict=True):
        part.data = place
    return merged
