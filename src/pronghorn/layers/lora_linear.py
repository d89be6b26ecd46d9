"""PEFT's LoRA linears as one autograd function each, in families whose layers are transformers' own.

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ        dx = dy W + (s · dy B) A        dA = (s · dy B)ᵀ x        dB = s · dyᵀ (x Aᵀ)

PEFT's forward copies x to the adapters' float32, keeps that copy for each linear, and adds in float32. Moving these
bytes takes a GPU about as long as the product itself. Here x is kept as it is, A and B are rounded to the products'
dtype as in fused layers, and their gradients are summed in their own. Steps that wait for the host get no faster.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pronghorn.kernels.adapter_gradients import matmul
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.layers.linears import Adapter, adapter_of, products_dtype, unfused_reason
from pronghorn.layers.subclass import own_class, subclass
from pronghorn.layers.watch import HOOKS


class _LoRALinear(torch.autograd.Function):
    """y [T, N] of x [T, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low, high = a.to(x.dtype), b.to(x.dtype)
        xa = x @ low.t()
        ctx.save_for_backward(x, weight, low, high, xa)
        ctx.scale, ctx.dtypes = scale, (a.dtype, b.dtype)
        return linear(x, weight, bias).addmm_(xa, high.t(), alpha=scale)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, low, high, xa = ctx.saved_tensors
        wants_x, _, _, wants_a, wants_b, _ = ctx.needs_input_grad
        dya = torch.addmm(dy.new_empty(1, 1), dy, high, beta=0, alpha=ctx.scale)
        dx = da = db = None
        if wants_x:
            dx = (dy @ weight).addmm_(dya, low)
        if wants_a:
            da = matmul(dya.t(), x, ctx.dtypes[0])
        if wants_b:
            db = matmul(dy.t(), xa, ctx.dtypes[1]).mul_(ctx.scale)
        return dx, None, None, da, db, None


@functools.cache
def _class(original: Any) -> type[nn.Module]:
    """Make a subclass of PEFT's LoRA linear that trains by one function, and does all else as PEFT does."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None if args or kwargs else _served(self, x)
        if adapter is None:
            return original.forward(self, x, *args, **kwargs)
        base, rows = self.base_layer, x.to(products_dtype(x)).reshape(-1, x.shape[-1])
        y = _LoRALinear.apply(rows, base.weight, base.bias, adapter.a, adapter.b, adapter.scale)
        return y.view(*x.shape[:-1], y.shape[-1])  # here: of a view made in the function nobody could write in place

    return subclass(original, forward=functools.wraps(original.forward)(forward))


def _served(module: Any, x: Tensor) -> Adapter | None:
    """Return the adapter that the function serves in a training forward of x, or None: it is PEFT's to compute."""
    if not module.training or torch.compiler.is_compiling() or module.base_layer.weight.requires_grad:
        return None
    adapter = adapter_of(module)
    if adapter is None or unfused_reason([module], products_dtype(x)) is not None:
        return None
    name = module.active_adapters[0] if len(module.active_adapters) == 1 else None
    inside = () if name is None else (module.base_layer, module.lora_A[name], module.lora_B[name])
    if not inside or any(getattr(each, hooks) for each in inside for hooks in HOOKS):
        return None  # somebody looks at what PEFT calls
    parameters = module.base_layer.weight, adapter.a, adapter.b
    plain = all(type(each) is nn.Parameter and each.device == x.device for each in parameters)
    return adapter if plain and not any("forward" in each.__dict__ for each in inside) else None


def use_one_function(model: nn.Module) -> None:
    """Let a model's LoRA linears train by one function each; those that have it are left alone.

    `subclass.restore` gives them their own classes back.
    """
    from peft.tuners.lora import Linear

    linears: list[Any] = [module for module in model.modules() if type(module) is Linear]
    for each in linears:
        each.__class__ = _class(Linear)


def lora_linears(model: nn.Module) -> list[nn.Module]:
    """List the linears that `use_one_function` changed."""
    from peft.tuners.lora import Linear

    return [module for module in model.modules() if own_class(module) is Linear]
