"""The gate of an op: each candidate's outputs and gradients, compared with the formula in float64, before the clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_case import Case, Way, by_autograd
from pronghorn.parity.distance import distance


@dataclass
class OpCandidate:
    """One candidate in one case."""

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
        double = case.double()
        exact = _run(by_autograd(double, double.formula))
    except torch.OutOfMemoryError as error:
        for candidate in candidates:
            candidate.fail(f"can't be judged: {describe(error)}; give fewer --tokens")
        return
    for candidate in candidates:
        try:
            spoilt = [torch.full_like(x, torch.nan) for x in plain.values() for _ in range(2)]
            del spoilt  # memory that is reused holds no right answers
            found = _run(candidate.make(case))
        except Exception as error:
            candidate.fail(describe(error))
            free_memory()
            continue
        reasons = [f"{name} is missing" for name in sorted(set(case.names) - set(found))]
        errors: dict[str, dict[str, dict[str, float]]] = {}
        for index, (name, mine) in enumerate(found.items()):
            key = name.removesuffix(" again")
            if mine.shape != exact[key].shape:
                reasons.append(f"{name} has shape {tuple(mine.shape)}, not {tuple(exact[key].shape)}")
                continue
            off = distance(name, mine, plain[key], exact[key], slack=case.slack if index == 0 else 0.0)
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
    """The kind of an error and its first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def free_memory() -> None:
    """Give back what a failed candidate held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
