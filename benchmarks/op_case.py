"""Describe an op to measure and the ways to compute it, and judge them before the clock.

A case says what goes in, what must come out, and what must be moved or multiplied at the least.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pronghorn.parity.distance import distance

IGNORED = -100
LORA_SCALE = 2.0
Work = tuple[float, float]
"""Of the forward and of the backward: bytes read and written, or operations."""


@dataclass(frozen=True)
class Way:
    """Compute an op as somebody does. `forward` and `backward` may overwrite what `start` made."""

    start: Callable[[], Any]
    """Makes fresh inputs and gradients of the outputs; outside the clock."""
    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any] | None
    """Takes what `forward` returned; None where the forward makes the gradients, or nobody needs any."""
    results: Callable[[Any, Any], dict[str, Tensor]]
    """Names outputs and gradients, from what `forward` and `backward` returned; floats. "x again" is x once more."""
    work: Work


@dataclass(frozen=True)
class Case:
    """Hold one op on one shape."""

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


def by_autograd(case: Case, function: Callable[..., Any], work: Work | None = None) -> Way:
    """Return the way of a function of the case's inputs, differentiable where they are trained.

    Args:
        function: returns one tensor or several.
    """

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
        floats = (x if x.is_floating_point() else x.double() for x in (*state[0], *grads))
        return dict(zip(case.names, floats, strict=True))

    return Way(start, forward, backward if case.trained else None, results, work or case.work)


def by_kernel(
    case: Case,
    forward: Callable[..., tuple[Any, ...]],
    backward: Callable[..., tuple[Any, ...]] | None = None,
    *,
    owned: tuple[int, ...] = (),
    again: tuple[str, ...] = (),
    more: int = 0,
) -> Way:
    """Return the way of kernels without autograd.

    Args:
        forward: from the inputs to the outputs, in the order of `case.names`; what follows them is for `backward`.
        backward: from the forward's outputs, then the inputs, then the outputs' gradients, to the other names.
        owned: inputs that the kernels overwrite, by number; gradients always may be.
        again: what the backward computes once more, as its last result.
        more: bytes that this moves in the backward.
    """

    def start() -> Any:
        return [x.clone() if i in owned else x for i, x in enumerate(case.inputs)], [x.clone() for x in case.grads]

    def results(state: Any, grads: Any) -> dict[str, Tensor]:
        names = (*case.names, *(f"{name} again" for name in again))
        return dict(zip(names, (*state[0][: len(names) - len(grads)], *grads), strict=True))

    def backwards(state: Any) -> Any:
        assert backward is not None
        return backward(state[0], *state[1], *state[2])

    work = case.work[0], case.work[1] + more
    return Way(start, lambda state: (forward(*state[0]), *state), backwards if backward else None, results, work)


class Draw:
    """Draw random tensors, N(0, 1), the same in every run on the same device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def targets(self, rows: int, vocab: int) -> Tensor:
        """Draw labels, int64 [M]; every eighth is ignored."""
        drawn = torch.randint(vocab, (rows,), generator=self.generator, device=self.device)
        drawn[7::8] = IGNORED
        return drawn


@dataclass
class OpCandidate:
    """Hold what became of one candidate in one case."""

    name: str
    make: Callable[[Case], Way]
    gate: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    work: dict[str, float] = field(default_factory=dict)
    """Bytes or operations of each part."""
    ceiling_ms: dict[str, float] = field(default_factory=dict)
    """What a copy of as many bytes, or a product of as many operations, takes."""

    def fail(self, reason: str) -> None:
        """Withhold its figures."""
        self.gate = {**self.gate, "green": False, "reasons": [*self.gate.get("reasons", []), reason]}
        self.timings = {}


def judge(case: Case, candidates: Sequence[OpCandidate]) -> None:
    """Compare each one's outputs and gradients with the formula in float64 (`parity.distance`).

    The limit is twice the error of the formula itself, computed by torch in the dtype measured.
    """
    try:
        plain = _run(by_autograd(case, case.formula))
        inputs, grads = (
            tuple(x.double() if x.is_floating_point() else x for x in tensors) for tensors in (case.inputs, case.grads)
        )
        exact = _run(by_autograd(replace(case, inputs=inputs, grads=grads), case.formula))
    except torch.OutOfMemoryError as error:
        for candidate in candidates:
            candidate.fail(f"can't be judged: {describe(error)}; give fewer --tokens")
        return
    for candidate in candidates:
        try:
            spoilt = [torch.full_like(x, torch.nan) for x in plain.values() for _ in range(2)]
            del spoilt  # memory that is reused holds no right answers
            results = _run(candidate.make(case))
        except Exception as error:
            candidate.fail(describe(error))
            free_memory()
            continue
        reasons = [f"{name} is missing" for name in sorted(set(case.names) - set(results))]
        errors: dict[str, dict[str, dict[str, float]]] = {}
        for index, (name, result) in enumerate(results.items()):
            key = name.removesuffix(" again")
            if result.shape != exact[key].shape:
                reasons.append(f"{name} has shape {tuple(result.shape)}, not {tuple(exact[key].shape)}")
                continue
            off = distance(name, result, plain[key], exact[key], slack=case.slack if index == 0 else 0.0)
            norms = {"rms": (off.rms, off.rms_limit), "max": (off.maximum, off.maximum_limit)}
            errors[name] = {norm: {"error": error, "limit": limit} for norm, (error, limit) in norms.items()}
            reasons += [
                f"{name} is off: {norm} error {error:.2g}, allowed is {limit:.2g}"
                for norm, (error, limit) in norms.items()
                if not error <= limit
            ]
        candidate.gate = {"green": not reasons, "reasons": reasons, "tokens": case.tokens, "errors": errors}


def _run(way: Way) -> dict[str, Tensor]:
    state = way.forward(way.start())
    return {name: x.detach() for name, x in way.results(state, way.backward(state) if way.backward else ()).items()}


def describe(error: Exception) -> str:
    """Return the kind of an error and its first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def free_memory() -> None:
    """Give back what a failed candidate held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
