"""What experts give to each token, and its gradients, beside the same in plain torch: token by token.

    y_t = Σ_k w_tk E_k(x_t)        dx_t = Σ_k w_tk E_k'(x_t)ᵀ dy_t        dw_tk = <dy_t, E_k(x_t)>

A whole tensor of them hides a token: one of its experts forgotten changes a mean error little. So the error of each
token is taken over the size of its terms, which is what rounding goes by, cancel as they may. The inputs are the ones
that the model itself gives; dy is random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.layers.linears import products_dtype
from pronghorn.models.experts import index_of, low_rank_weights, refusal
from pronghorn.models.passes import after_forward
from pronghorn.parity.distance import THREE_WAY, ratio
from pronghorn.parity.routing import named_experts


@dataclass(frozen=True)
class TokenError:
    """The worst token of one experts module."""

    name: str
    what: str
    token: int
    """Of the packed row."""
    error: float
    plain: float
    """The largest of plain's errors."""


def excesses(found: Sequence[TokenError]) -> list[float]:
    """Return each error over its limit: of one number chance decides much, so plain's are its largest in all layers."""
    most = {each.what: max(other.plain for other in found if other.what == each.what) for each in found}
    return [ratio(each.error, THREE_WAY.limit(most[each.what])) for each in found]


@contextmanager
def compared_outputs(model: Any, wide: torch.dtype) -> Iterator[list[TokenError]]:
    """Yield the list that forwards of the attached model inside the block fill: output, input's and weights' gradients
    of each experts module.

    Args:
        wide: of the exact reference.
    """
    found: list[TokenError] = []
    names = named_experts(model)

    def compare(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], out: Tensor) -> None:
        index = index_of(arguments, keywords)
        weights = (
            next(keywords[n] for n in ("top_k_weights", "routing_weights") if n in keywords)
            if len(arguments) < 3
            else arguments[2]
        )
        x = (arguments[0] if arguments else keywords["hidden_states"]).detach()
        found.extend(_compared(module, names[module], x, index, weights.detach(), out.detach(), wide))

    with after_forward([module for module in names if refusal(module) is None], compare, with_kwargs=True):
        yield found


def _compared(
    module: Any, name: str, x: Tensor, index: Tensor, weights: Tensor, out: Tensor, wide: torch.dtype
) -> Iterator[TokenError]:
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x)
    with torch.enable_grad():
        given = x.clone().requires_grad_(), weights.clone().requires_grad_()
        again = type(module).forward(module, given[0], index, given[1])
        ours = (out, *torch.autograd.grad(again, given, dy, materialize_grads=True))
    with torch.autocast(x.device.type, enabled=False):
        plain, _ = terms(module, x, index, weights, dy, products_dtype(x))
        exact, sizes = terms(module, x, index, weights, dy, wide)
    for what, mine, near, right, size in zip(("output", "input's gradient", "weights' gradient"),
                                             ours, plain, exact, sizes, strict=True):  # fmt: skip
        error, of_plain = (_over_terms(each, right, size) for each in (mine, near))
        worst = int(error.nan_to_num(torch.inf).argmax())
        token = worst * len(x) // len(error)
        yield TokenError(name, what, token, error[worst].item(), of_plain.max().item())


def _over_terms(value: Tensor, right: Tensor, size: Tensor) -> Tensor:
    """Return the errors [T], or [T·K] of single numbers, over the size of their terms."""
    error = value.to(right.dtype) - right
    error = (error.norm(dim=1) if size.dim() == 1 else error.abs()).flatten()
    return torch.where(error == 0, error, error / size.flatten())


def terms(
    module: Any, x: Tensor, index: Tensor, weights: Tensor, dy: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute y [T, H], dx [T, H] and dw [T, K] in that dtype, expert by expert, and the sizes of their terms, [T], [T]
    and [T, K].

    The adapters are those that a forward of the experts holds at this moment.
    """
    x, w, dy = (each.to(dtype) for each in (x, weights, dy))
    y, dx, dw = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(w)
    of_y, of_dx, of_dw = x.new_zeros(len(x)), x.new_zeros(len(x)), torch.zeros_like(w)
    parts = low_rank_weights(module)
    for e in index.unique().tolist():
        tokens, slots = (index == e).nonzero(as_tuple=True)
        with torch.enable_grad():
            start, scale = x[tokens].requires_grad_(), w[tokens, slots].requires_grad_()
            h = start
            for number, (weight, adapter, bias) in enumerate(parts):
                dense = weight[e].detach().to(dtype)
                product = h @ (dense if module.is_transposed else dense.t())
                if adapter is not None:
                    a, b = adapter.a[e].detach().to(dtype), adapter.b[e].detach().to(dtype)
                    product = product + adapter.scale * (h @ a.t()) @ b.t()
                if bias is not None:
                    product = product + bias[e].detach().to(dtype)
                if number == 0:
                    h = activation = module._apply_gate(product)
                else:
                    h = product
            term = h * scale.unsqueeze(1)
            (d_activation,) = torch.autograd.grad(h, activation, dy[tokens], retain_graph=True)
            d_start, d_scale = torch.autograd.grad(term, (start, scale), dy[tokens])
        term, h, activation = term.detach(), h.detach(), activation.detach()
        y.index_add_(0, tokens, term)
        dx.index_add_(0, tokens, d_start)
        dw[tokens, slots] = d_scale
        of_y.index_add_(0, tokens, term.norm(dim=1))
        of_dx.index_add_(0, tokens, d_start.norm(dim=1))
        # dw is <dy, E(x)> or, a product earlier, <d, activation>: both are sound, and round by the size of their terms
        of_dw[tokens, slots] = h.norm(dim=1) * dy[tokens].norm(dim=1) + activation.norm(dim=1) * d_activation.norm(
            dim=1
        )
    return (y, dx, dw), (of_y, of_dx, of_dw)
