"""What the gate compares with: transformers and PEFT in float32, one document at a time (`parity.reference`), and how
far the same passes in the dtype of training are from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pronghorn.bench.contenders.base import Spec, autocast, device, set_adapters, trainable
from pronghorn.bench.workload import Row
from pronghorn.data.packing import Document
from pronghorn.models.families import base_causal_lm
from pronghorn.parity.reference import accumulate, kept_gradients, part_by_part


@dataclass(frozen=True)
class Reference:
    """What is right, and how far the plain path in training's own dtype is from it."""

    loss: float
    grad_norm: float
    document_losses: tuple[float | None, ...]
    """Mean loss over each document's labels; None for a document without."""
    names: tuple[str, ...]
    """Every trained tensor."""
    plain_error: float
    """Relative L2 error of the plain path's gradient, all kept tensors as one vector."""
    plain_errors: dict[str, float]
    """The same for each kept tensor."""
    gradients: str
    """The safetensors file with the kept gradients."""

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text()))


def compute_reference(spec: Spec, row: Row, folder: Path) -> Reference:
    """Loss, gradients and document losses of a row, and the plain path's own error.

    Args:
        spec: what contenders will build; its contender is ignored.
        row: the row the gate judges on.
        folder: where the gradients are written.
    """
    model = _load(spec)
    parameters = trainable(model)
    documents = [Document(list(row.input_ids[a:b]), list(row.labels[a:b])) for a, b in row.bounds]
    with part_by_part(base_causal_lm(model)) as widen:
        with autocast(spec.method):
            accumulate(model, documents, row.n_labels)
        kept = kept_gradients(parameters)
        plain = {name: parameters[name].grad.detach().clone() for name in kept}
        model.zero_grad()
        widen(torch.float32)
        passed = accumulate(model, documents, row.n_labels)
    losses = [None if each.losses is None else each.losses.sum().item() for each in passed]
    gradients = {name: parameters[name].grad.float() for name in kept}
    squared = {name: gradients[name].norm().item() ** 2 for name in kept}
    errors = {name: (plain[name].float() - gradients[name]).norm().item() ** 2 for name in kept}
    save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, folder / "gradients.safetensors")
    return Reference(
        loss=sum(loss for loss in losses if loss is not None) / row.n_labels,
        grad_norm=torch.stack([p.grad.float().norm() for p in parameters.values()]).norm().item(),
        document_losses=tuple(
            None if loss is None else loss / row.labelled_where(document.__eq__).n_labels
            for document, loss in enumerate(losses)
        ),
        names=tuple(parameters),
        plain_error=(sum(errors.values()) / sum(squared.values())) ** 0.5,
        plain_errors={name: (errors[name] / squared[name]) ** 0.5 for name in kept},
        gradients=str(folder / "gradients.safetensors"),
    )


def gradient_errors(parameters: dict[str, Tensor], reference: Reference) -> tuple[float, dict[str, float]]:
    """Relative L2 distance of parameters' gradients from the reference: of all kept tensors as one vector, and of each.
    A missing gradient counts as zero, an error of 1."""
    errors, squared = {}, {}
    with safe_open(reference.gradients, "pt", device=str(device())) as file:
        for name in file.keys():  # noqa: SIM118  a safetensors file is no mapping
            right = file.get_tensor(name)
            ours = parameters[name].grad if name in parameters else None
            difference = right if ours is None else ours.detach().float() - right
            errors[name], squared[name] = difference.norm().item() ** 2, right.norm().item() ** 2
    total = (sum(errors.values()) / sum(squared.values())) ** 0.5
    return total, {name: (errors[name] / squared[name]) ** 0.5 for name in errors}


def _load(spec: Spec) -> Any:
    from pronghorn.bench.contenders.stock import build

    model = build(replace(spec, recompute="off"), attention="sdpa", padded=False).model
    set_adapters(model, spec.seed)
    return model
