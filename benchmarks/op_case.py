"""Describe an op to measure and the ways to compute it: what goes in, what must come out, what must be moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
LORA_SCALE = 2.0
Work = tuple[float, float]
"""Of the forward and of the backward: bytes read and written, or operations."""


@dataclass(frozen=True)
class Way:
    """How somebody computes an op. `forward` and `backward` may overwrite what `start` made."""

    start: Callable[[], Any]
    """Fresh inputs and gradients of the outputs; outside the clock."""
    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any] | None
    """From what `forward` returned; None where the forward makes the gradients, or nobody needs any."""
    results: Callable[[Any, Any], dict[str, Tensor]]
    """Outputs and gradients by name, from what `forward` and `backward` returned; floats. "x again" is x once more."""
    work: Work


@dataclass(frozen=True)
class Case:
    """One op on one shape."""

    op: str
    shape: str
    tokens: int
    formula: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    """Of the formula's outputs."""
    names: tuple[str, ...]
    """Of the outputs, then of the inputs' gradients."""
    work: Work
    """Of a way that keeps nothing back and does nothing twice."""
    pronghorn: Callable[[Case], Way]
    liger: Callable[[Case], Way] | None = None
    trained: int = 1
    """So many inputs have gradients, the first ones; 0: an op that only runs forward."""
    product: tuple[int, int, int] | None = None
    """(rows, inner, columns) of the product that is the ceiling; otherwise a copy is."""
    slack: float = 0.0
    """Of the first output, an average (`parity.distance`)."""
    calls: int = 0
    """Of torch, beyond a few dozen: so many the formula makes in each part, one after another."""
    small: Case | None = None
    """What the gate judges on, where that isn't the case itself."""

    def double(self) -> Case:
        """The same numbers in float64."""
        inputs, grads = (
            tuple(x.double() if x.is_floating_point() else x for x in y) for y in (self.inputs, self.grads)
        )
        return replace(self, inputs=inputs, grads=grads)


def by_autograd(case: Case, function: Callable[..., Any], work: Work | None = None) -> Way:
    """A function of the case's inputs, differentiable where they are trained; it may return one tensor or several."""

    def start() -> Any:
        inputs = [x.clone().requires_grad_(i < case.trained) for i, x in enumerate(case.inputs)]
        return inputs, [x.clone() for x in case.grads]

    def forward(state: Any) -> Any:
        outputs = function(*state[0])
        return (outputs if isinstance(outputs, tuple) else (outputs,)), *state

    def backward(state: Any) -> Any:
        outputs, inputs, grads = state
        return torch.autograd.grad(outputs, inputs[: case.trained], grads)

    def results(state: Any, grads: Any) -> dict[str, Tensor]:
        found = (x if x.is_floating_point() else x.double() for x in (*state[0], *grads))
        return dict(zip(case.names, found, strict=True))

    return Way(start, forward, backward if case.trained else None, results, work or case.work)


def by_kernel(
    case: Case,
    forward: Callable[..., tuple[Any, ...]],
    backward: Callable[..., tuple[Any, ...]] | None = None,
    *,
    owned: tuple[int, ...] = (),
    again: str | None = None,
    more: int = 0,
) -> Way:
    """Return the way of kernels without autograd.

    Args:
        forward: from the inputs to the outputs, in the order of `case.names`; what follows them is for `backward`.
        backward: from the forward's outputs, then the inputs, then the outputs' gradients, to the other names.
        owned: inputs that the kernels overwrite, by number; gradients always may be.
        again: a name that the backward computes once more, as its last result.
        more: bytes that this moves in the backward.
    """

    def start() -> Any:
        return [x.clone() if i in owned else x for i, x in enumerate(case.inputs)], [x.clone() for x in case.grads]

    def forwards(state: Any) -> Any:
        return forward(*state[0]), *state

    def backwards(state: Any) -> Any:
        assert backward is not None
        outputs, inputs, grads = state
        return backward(outputs, *inputs, *grads)

    def results(state: Any, found: Any) -> dict[str, Tensor]:
        names = case.names + ((f"{again} again",) if again else ())
        outputs = state[0][: len(names) - len(found)]
        return dict(zip(names, (*outputs, *found), strict=True))

    return Way(start, forwards, backwards if backward else None, results, (case.work[0], case.work[1] + more))


class Draw:
    """Draw random tensors, N(0, 1), the same in every run on the same device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def targets(self, rows: int, vocab: int) -> Tensor:
        """Labels, int64 [M]; every eighth is ignored."""
        drawn = torch.randint(vocab, (rows,), generator=self.generator, device=self.device)
        drawn[7::8] = IGNORED
        return drawn
