"""Forward passes of a loaded model that leave it as it was: what the probes look at, and how they compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def after_forward(modules: Iterable[nn.Module], hook: Callable[..., Any], with_kwargs: bool = False) -> Iterator[None]:
    """Call the hook after each module's forward, inside the block."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=with_kwargs))
        yield


@contextmanager
def recorded(base: Any, layers: nn.ModuleList, tokens: int) -> Iterator[list[Tensor]]:
    """Yield the list that a forward fills with the hidden states [T, H] after embeddings and layers, where autograd
    sees them."""
    states: list[Tensor] = []

    def passed(module: Any, args: Any, output: Any) -> Any:
        rows = as_rows(output, tokens)
        if rows is not None:
            states.append(rows)
            if rows.requires_grad:  # what goes on is made of what is looked at
                tensor = output if isinstance(output, Tensor) else output[0]
                again = rows.clone().view(tensor.shape)  # layers may add to it in place
                return again if isinstance(output, Tensor) else (again, *output[1:])
        return None

    def first(module: Any, args: Any, output: Tensor) -> Tensor | None:
        if states:  # other tables of the same module
            return None
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()
        rows = as_rows(output, tokens)
        assert rows is not None
        states.append(rows)
        return rows.clone().view(output.shape)

    with after_forward([base.get_input_embeddings()], first), after_forward(layers, passed):
        yield states


@contextmanager
def undisturbed(base: Any) -> Iterator[None]:
    """Leave gradients, buffers, random state and the modes of modules as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in base.buffers()]
    devices = [base.device] if base.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.shape == value.shape and buffer.device == value.device:
                    buffer.copy_(value)


@contextmanager
def in_evaluation(model: Any) -> Iterator[None]:
    """Leave dropout out, whose draws would differ; give every module its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def seeded(run: Any) -> Any:
    """Run with the same random numbers each time: dropout's masks are of the same shape."""
    torch.manual_seed(0)
    return run()


def as_rows(value: Any, tokens: int) -> Tensor | None:
    """Return what a module is given or returns as [T, H], or None where it has no such rows."""
    value = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
        return None
    fits = value.numel() == tokens * value.shape[-1]
    return value.reshape(tokens, value.shape[-1]) if fits else None


def differs(old: Tensor, new: Tensor, tolerance: float, exact: bool) -> bool:
    """Tell whether values differ: in a bit, or by more than the tolerance where tokens are routed to experts."""
    if exact:
        return not bool(torch.equal(old, new))
    return relative_error(new, old) > tolerance


def relative_error(value: Tensor, right: Tensor) -> float:
    """Return the root mean square of the difference over that of what is right; infinite where it is not a number."""
    value, right = value.detach().double(), right.detach().double()
    error = (value - right).square().mean().sqrt() / right.square().mean().sqrt().clamp(min=1e-30)
    return float("inf") if error.isnan() else error.item()


def short(error: Exception) -> str:
    """Return an error's text in a line."""
    return " ".join(str(error).split())[:200]
