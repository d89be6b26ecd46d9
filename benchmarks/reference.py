"""Compute what the gate compares with: transformers and PEFT in float32, one document at a time (`parity.reference`).

The same passes in training's dtype tell how much of a difference is rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.candidates import stock
from benchmarks.candidates.base import Spec, autocast, device, set_adapters, trainable
from benchmarks.workload import Row
from pronghorn.data.packing import Document
from pronghorn.models.families import base_causal_lm
from pronghorn.parity.reference import accumulate, kept_gradients, upcast_of


@dataclass(frozen=True)
class Reference:
    """What is right, and how far the plain path in training's own dtype is from it."""

    loss: float
    grad_norm: float
    document_losses: tuple[float | None, ...]
    """Mean loss over each document's labels; None for a document without labels."""
    names: tuple[str, ...]
    """Every trained tensor."""
    plain_error: float
    """Relative L2 error of the plain path's gradient, all kept tensors as one vector."""
    plain_errors: dict[str, float]
    """The same for each kept tensor."""
    gradients: str
    """The safetensors file with the kept gradients."""


def compute_reference(spec: Spec, row: Row, folder: Path) -> Reference:
    """Compute loss, gradients and document losses of a row, and the plain path's own error.

    Args:
        spec: what candidates will build; its candidate is ignored.
        row: the row that the gate judges on.
        folder: where the gradients are written.
    """
    model = stock.build(replace(spec, recompute="off"), attention="sdpa", padded=False).model
    set_adapters(model, spec.seed)
    parameters = trainable(model)
    documents = [Document(list(row.input_ids[a:b]), list(row.labels[a:b])) for a, b in row.bounds]
    with upcast_of(base_causal_lm(model)) as upcast:
        with autocast(spec.method):
            accumulate(model, documents, row.n_labels)
        kept = kept_gradients(parameters)
        plain = {name: parameters[name].grad.detach().clone() for name in kept}
        model.zero_grad()
        upcast(torch.float32)
        passed = accumulate(model, documents, row.n_labels)
    sums = [None if each.losses is None else each.losses.sum().item() for each in passed]
    gradients = {name: parameters[name].grad.float().contiguous() for name in kept}
    errors = {name: (plain[name].float() - gradient).norm().item() for name, gradient in gradients.items()}
    total, relative = _relative(errors, {name: gradient.norm().item() for name, gradient in gradients.items()})
    file = folder / "gradients.safetensors"
    save_file(gradients, file)
    return Reference(
        loss=sum(loss for loss in sums if loss is not None) / row.n_labels,
        grad_norm=torch.stack([p.grad.float().norm() for p in parameters.values()]).norm().item(),
        document_losses=tuple(
            None if loss is None else loss / row.supervised_where(document.__eq__).n_labels
            for document, loss in enumerate(sums)
        ),
        names=tuple(parameters),
        plain_error=total,
        plain_errors=relative,
        gradients=str(file),
    )


def gradient_errors(parameters: dict[str, Tensor], reference: Reference) -> tuple[float, dict[str, float]]:
    """Return the gradients' relative L2 distance from the reference: of all kept tensors as one vector, and of each.

    A missing gradient counts as zero, an error of 1.
    """
    errors, norms = {}, {}
    with safe_open(reference.gradients, "pt", device=str(device())) as file:
        for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
            right = file.get_tensor(name)
            ours = parameters[name].grad if name in parameters else None
            errors[name] = (right if ours is None else ours.detach().float() - right).norm().item()
            norms[name] = right.norm().item()
    return _relative(errors, norms)


def gradient_cosines(parameters: dict[str, Tensor], reference: Reference) -> dict[str, float]:
    """Return the cosine between each kept tensor's gradient and the reference's; 0 where one is missing."""
    cosines = {}
    with safe_open(reference.gradients, "pt", device=str(device())) as file:
        for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
            right = file.get_tensor(name).flatten()
            ours = parameters[name].grad if name in parameters else None
            similar = 0.0 if ours is None else torch.cosine_similarity(ours.detach().float().flatten(), right, dim=0)
            cosines[name] = float(similar)
    return cosines


def _relative(errors: dict[str, float], norms: dict[str, float]) -> tuple[float, dict[str, float]]:
    total = (sum(e**2 for e in errors.values()) / sum(n**2 for n in norms.values())) ** 0.5
    return total, {name: errors[name] / norms[name] for name in errors}
