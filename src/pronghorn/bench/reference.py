"""What the gate compares with: transformers and PEFT in float32, one document at a time.

Nothing is packed here, so whatever leaks between packed documents shows. Each decoder layer's weights are widened to
float32 only while the layer runs and recomputed with it in the backward pass, so that a model is judged on the GPU that
trains it, whatever its size. The same passes in the dtype of training tell how much of a difference is rounding.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pronghorn.bench.contenders.base import Spec, autocast, device, set_adapters, trainable
from pronghorn.bench.workload import Row
from pronghorn.data.packing import IGNORE_INDEX

KEPT_ELEMENTS = 2**29
"""Gradients are kept for comparison, smallest tensors first, up to so many elements (2 GiB): all of a LoRA's, and of
full fine-tuning as many as make a comparison worth its time. The norm is over all of them in any case."""


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


class WidenedLayer(nn.Module):
    """A decoder layer that runs in float32 (or as it is), recomputed in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.exact = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask their layers what kind of attention they have
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward."""
        return checkpoint(self._run, hidden, *args, use_reentrant=False, **kwargs)

    def _run(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.exact:
            return self.layer(hidden, *args, **kwargs)
        widened = {name: p.float() for name, p in self.layer.named_parameters() if p.is_floating_point()}
        return functional_call(self.layer, widened, (hidden, *args), kwargs)


def compute_reference(spec: Spec, row: Row, folder: Path) -> Reference:
    """Loss, gradients and document losses of a row, and the plain path's own error.

    Args:
        spec: what contenders will build; its contender is ignored.
        row: the row the gate judges on.
        folder: where the gradients are written.
    """
    torch.set_float32_matmul_precision("highest")
    model = _load(spec)
    parameters = trainable(model)
    base = model.get_base_model() if spec.method != "full" else model
    layers = base.base_model.layers
    for i, layer in enumerate(layers):
        layers[i] = WidenedLayer(layer)
    with autocast(spec.method):
        _backward(model, row)
    kept = _kept(parameters)
    plain = {name: parameters[name].grad.detach().clone() for name in kept}
    model.zero_grad()

    for layer in layers:
        layer.exact = True
    for part in (base.get_input_embeddings(), base.base_model.norm, base.get_output_embeddings()):
        part.float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # 4-bit linears
            module.compute_dtype = torch.float32
    losses = _backward(model, row)
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

    model = build(replace(spec, recompute="off"), attention="sdpa").model
    set_adapters(model, spec.seed)
    return model


def _kept(parameters: dict[str, Tensor]) -> list[str]:
    kept, elements = [], 0
    for name in sorted(parameters, key=lambda name: (parameters[name].numel(), name)):
        elements += parameters[name].numel()
        if elements > KEPT_ELEMENTS:
            break
        kept.append(name)
    return kept


def _backward(model: Any, row: Row) -> list[float | None]:
    """Accumulate the gradient of the row's mean loss, document by document; each one's summed loss."""
    losses: list[float | None] = []
    for start, end in row.bounds:
        labels = torch.tensor(row.labels[start:end], device=device())
        if (labels[1:] == IGNORE_INDEX).all():
            losses.append(None)
            continue
        ids = torch.tensor(row.input_ids[start:end], device=device())
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        loss = cross_entropy(logits, labels[1:], ignore_index=IGNORE_INDEX, reduction="sum")
        (loss / row.n_labels).backward()
        losses.append(loss.item())
    return losses
