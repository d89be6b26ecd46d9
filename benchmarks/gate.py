"""Judge a candidate's numbers before its time is taken, since a step that computes less is no faster.

`measure` runs in the candidate's process, `judge` in the parent's. Against the reference (`benchmarks.reference`): the
loss, single documents' losses, the gradient's norm and its direction, tensor by tensor. By itself: gradients finite and
not zero, documents isolated, every trained tensor moved by a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates.base import Built, Spec, autocast, device, trainable
from benchmarks.reference import Reference, gradient_cosines, gradient_errors
from benchmarks.workload import Row
from pronghorn.parity.distance import Rule, listed


@dataclass(frozen=True)
class Tolerance:
    """How much may differ from the reference, relative to it; plain's error is measured for gradients alone."""

    loss: Rule
    document_loss: Rule
    grad_norm: Rule
    gradient: Rule
    """L2 distance of the whole gradient."""
    tensor: Rule
    """The same of any one tensor."""
    isolation: Rule
    """Change of the other documents' loss when one document's tokens change."""


# Directions of gradients get worse with size and have no fixed bound: hence the plain path's own error (1.6 % for
# SmolLM2-135M, 11.6 % for Llama-3.1-8B with random weights). Sound candidates had 0.86 to 1.03 times that; a defect
# adds to it as a hypotenuse, so the factor must be small. The floor is for tensors whose plain error is small by
# chance. Queries rotated by one position too many leave SmolLM2's loss right to 6e-5 and its norm to 2e-3, but are 13
# to 25 % off in the gradients of q_proj and k_proj.
PLAIN_FACTOR = 1.5
TOLERANCES = {
    # A bf16 loss differs by up to 1e-3 (8 bits of mantissa, averaged over thousands of labels; fewer in a document), a
    # gradient's norm by some 3e-3.
    "bfloat16": Tolerance(
        loss=Rule(0.0, 2e-3),
        document_loss=Rule(0.0, 5e-3),
        grad_norm=Rule(0.0, 2e-2),
        gradient=Rule(PLAIN_FACTOR, 1e-2),
        tensor=Rule(PLAIN_FACTOR, 3e-2),
        isolation=Rule(0.0, 1e-5),
    ),
    # In float32 packed and unpacked differ by the order of sums.
    "float32": Tolerance(
        loss=Rule(0.0, 1e-5),
        document_loss=Rule(0.0, 1e-5),
        grad_norm=Rule(0.0, 1e-4),
        gradient=Rule(PLAIN_FACTOR, 1e-4),
        tensor=Rule(PLAIN_FACTOR, 1e-3),
        isolation=Rule(0.0, 1e-6),
    ),
    # Products in 8 bits, of the forward, too: e4m3 keeps 4 bits of mantissa less than bfloat16, so what plain differs
    # by in bfloat16 may differ 16 times as much. Where that leaves a direction, it is judged by its cosine.
    "fp8_both": Tolerance(
        loss=Rule(0.0, 1e-2),
        document_loss=Rule(0.0, 2e-2),
        grad_norm=Rule(0.0, 5e-2),
        gradient=Rule(PLAIN_FACTOR * 16, 1e-2),
        tensor=Rule(PLAIN_FACTOR * 16, 3e-2),
        isolation=Rule(0.0, 1e-5),
    ),
}
TOLERANCES["fp8_exact"] = TOLERANCES["fp8_both"]
# Input gradients alone: losses are bfloat16's.
TOLERANCES["fp8"] = replace(
    TOLERANCES["fp8_both"], loss=TOLERANCES["bfloat16"].loss, document_loss=TOLERANCES["bfloat16"].document_loss
)
# Integers of rotated rows: a product is a third as far off as in e4m3.
TOLERANCES["int8"] = Tolerance(
    loss=Rule(0.0, 4e-3),
    document_loss=Rule(0.0, 1e-2),
    grad_norm=Rule(0.0, 3e-2),
    gradient=Rule(PLAIN_FACTOR * 6, 1e-2),
    tensor=Rule(PLAIN_FACTOR * 6, 3e-2),
    isolation=Rule(0.0, 1e-5),
)
COSINE = 0.98
"""The least between an adapter's gradient in 8 bits and float32's, where plain's own error leaves a direction."""


def measure(
    built: Built, spec: Spec, row: Row, reference: Reference, optimizer: Any, synchronize: Callable[[], None]
) -> dict[str, Any]:
    """Measure what `judge` compares, of a freshly built candidate, and take one step of the optimiser.

    Args:
        built: the candidate, its adapters set; it has not run yet, so this times its first step.
        row: the row that `reference` was computed on.
        optimizer: over the trained parameters.
        synchronize: waits for the device.
    """
    parameters = trainable(built.model)

    def loss_of(other: Row) -> Tensor:
        with autocast(spec.method):
            return built.model(**built.make_batch(other)).loss

    synchronize()
    start = time.perf_counter()
    loss = loss_of(row)
    loss.backward()
    synchronize()
    first_step_s = time.perf_counter() - start
    norms = {name: p.grad.float().norm().item() for name, p in parameters.items() if p.grad is not None}
    error, errors = gradient_errors(parameters, reference)
    cosines = gradient_cosines(parameters, reference)

    last = len(row.lengths) - 1
    changed = last // 2
    others = row.supervised_where(lambda document: document != changed)
    alone = [d for d in sorted({0, changed, last}) if reference.document_losses[d] is not None]
    isolation = None
    if last and others.n_labels:
        isolation = [loss_of(others).item(), loss_of(others.with_other_tokens(changed)).item()]
    document_losses = {document: loss_of(row.supervised_where(document.__eq__)).item() for document in alone}

    before = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
    start = time.perf_counter()
    optimizer.step()
    synchronize()
    first_step_s += time.perf_counter() - start
    unmoved = [name for name, p in parameters.items() if torch.equal(before[name], p.detach().cpu())]
    optimizer.zero_grad()
    compute = spec.switches.get("compute", "dtype")
    of_dtype = "bfloat16" if device().type == "cuda" else "float32"
    return {
        "dtype": of_dtype if compute == "dtype" else compute,
        "cosines": cosines,
        "loss": loss.item(),
        "grad_norm": torch.tensor(list(norms.values()), dtype=torch.float64).norm().item(),
        "gradient_error": error,
        "gradient_errors": errors,
        "trained": list(parameters),
        "dead": [name for name in parameters if not 0.0 < norms.get(name, 0.0) < math.inf],
        "isolation": isolation,
        "document_losses": document_losses,
        "unmoved": unmoved,
        "first_step_s": first_step_s,
    }


def judge(measured: Mapping[str, Any], reference: Reference) -> dict[str, Any]:
    """Return the verdict: `green`, the `reasons` if it isn't, and what was compared.

    Comparisons are written so that NaN fails them.
    """
    allowed = TOLERANCES[measured["dtype"]]
    reasons: list[str] = []

    def check(what: str, value: float, rule: Rule, plain_error: float = 0.0) -> None:
        limit = rule.limit(plain_error)
        if not value <= limit:
            reasons.append(f"{what} by {value:.2g}, allowed is {limit:.2g}")

    check("loss is off", abs(measured["loss"] / reference.loss - 1), allowed.loss)
    check("gradient norm is off", abs(measured["grad_norm"] / reference.grad_norm - 1), allowed.grad_norm)
    check("gradient is off", measured["gradient_error"], allowed.gradient, reference.plain_error)
    errors = measured["gradient_errors"]
    limits = {name: allowed.tensor.limit(error) for name, error in reference.plain_errors.items()}
    wrong = [name for name, error in errors.items() if not error <= limits[name]]
    wrong.sort(key=lambda name: errors[name] / limits[name], reverse=True)
    if wrong:
        what = f"{listed(wrong)}: gradient is off, the first"
        check(what, errors[wrong[0]], allowed.tensor, reference.plain_errors[wrong[0]])
    cosines = measured["cosines"]
    if measured["dtype"].startswith(("fp8", "int8")):
        judged = [name for name in cosines if limits[name] < math.sqrt(1 - COSINE**2)]
        turned = [name for name in judged if not cosines[name] >= COSINE]
        if turned:
            least = min(turned, key=cosines.__getitem__)
            reasons.append(
                f"{listed(turned)}: the gradient's cosine to float32's is below {COSINE}, "
                f"the least is {cosines[least]:.3g}"
            )
    for document, loss in measured["document_losses"].items():
        right = reference.document_losses[document]
        assert right is not None
        check(f"loss of document {document} alone is off", abs(loss / right - 1), allowed.document_loss)
    if measured["isolation"] is not None:
        before, after = measured["isolation"]
        what = "documents are not isolated: changing one changes the others' loss"
        check(what, abs(after / before - 1), allowed.isolation)
    for what, names in (
        ("no gradient, a zero or one that is not finite", measured["dead"]),
        ("not moved by a step", measured["unmoved"]),
        ("not trained", set(reference.names) - set(measured["trained"])),
        ("trained, but not asked for", set(measured["trained"]) - set(reference.names)),
    ):
        if names:
            reasons.append(f"{listed(sorted(names))}: {what}")
    return {
        "green": not reasons,
        "reasons": reasons,
        "loss": measured["loss"],
        "loss_fp32": reference.loss,
        "grad_norm": measured["grad_norm"],
        "grad_norm_fp32": reference.grad_norm,
        "gradient_error": measured["gradient_error"],
        "gradient_error_plain": reference.plain_error,
        "least_cosine": min(cosines.values()),
        "worst_tensor_error": max(errors.values()),
        "worst_tensor_error_plain": max(reference.plain_errors.values()),
        "isolation": measured["isolation"],
        "trained_tensors": len(measured["trained"]),
    }
