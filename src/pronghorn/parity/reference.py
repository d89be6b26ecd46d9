"""transformers and PEFT one document at a time, in the dtype of training and in a wider one.

Nothing is packed here, so whatever leaks between packed documents shows, and transformers calls its own functions only
(`own_code`). Each part's weights (a decoder layer, the embeddings, the last norm, the head) are upcast only while the
part runs, and again with it in the backward pass, so that a model is judged on the GPU that trains it, whatever its
size. The same passes in the dtype of training tell how much of a difference is rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.families.registry import family_of
from pronghorn.models.families import base_causal_lm, has_experts, set_experts
from pronghorn.parity.distance import kind_of
from pronghorn.parity.own_code import own_code

KEPT_ELEMENTS = 2**29
"""Gradients are kept for comparison up to so many elements (2 GiB): all of a LoRA's, and of full fine-tuning as many
as make a comparison worth its time."""


class UpcastPart(nn.Module):
    """A part of a model that runs in `dtype` (None: as it is), recomputed in the backward pass."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.dtype: torch.dtype | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask their layers what kind of attention they have
            return getattr(super().__getattr__("part"), name)

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the part's own forward."""
        return checkpoint(self._run, inputs, *args, use_reentrant=False, **kwargs)

    def _run(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is None:
            return self.part(inputs, *args, **kwargs)
        weights = {
            # what is frozen stays a parameter: PEFT parametrises experts' weights, and gives others back as buffers
            name: p.to(self.dtype) if p.requires_grad else nn.Parameter(p.to(self.dtype), requires_grad=False)
            for name, p in self.part.named_parameters()
            if p.is_floating_point()
        }
        return functional_call(self.part, weights, (inputs, *args), kwargs)


def upcast_of(model: Any) -> AbstractContextManager[Callable[[torch.dtype], None]]:
    """Run a transformers causal LM that isn't attached, and leave it as it was: part by part, or whole where its parts
    aren't known.

    Yields:
        A function that makes the model compute in the given dtype from then on; until it is called it runs as is.
    """
    return _whole_upcast(model) if family_of(model.config).generic else layerwise_upcast(model)


@contextmanager
def _whole_upcast(model: Any) -> Iterator[Callable[[torch.dtype], None]]:
    """Hold all weights in the wide dtype at once, beside their own."""
    own = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    quantised = [(module, module.compute_dtype) for module in model.modules() if hasattr(module, "compute_dtype")]
    experts = getattr(model.config, "_experts_implementation", None)

    def upcast(dtype: torch.dtype) -> None:
        if dtype is torch.float64 and experts is not None:
            set_experts(model, "eager")  # grouped products have no float64
        for tensor, data in own:
            tensor.data = data.to(dtype)
        for module, _ in quantised:
            module.compute_dtype = dtype

    try:
        with own_code(model):
            yield upcast
    finally:
        if experts is not None:
            set_experts(model, experts)
        for tensor, data in own:
            tensor.data = data
        for module, dtype in quantised:
            module.compute_dtype = dtype


@contextmanager
def layerwise_upcast(model: Any) -> Iterator[Callable[[torch.dtype], None]]:
    """Run a causal LM of a family that is known part by part, as `upcast_of` says."""
    layers, backbone = model.base_model.layers, model.base_model
    plain = list(layers)
    embedding, norm, head = model.get_input_embeddings(), backbone.norm, model.get_output_embeddings()
    quantised = [(m, m.compute_dtype) for m in model.modules() if hasattr(m, "compute_dtype")]
    precision = torch.get_float32_matmul_precision()
    known = layers, embedding, norm
    beside = ((name, child) for name, child in backbone.named_children() if child not in known)
    others = {name: child for name, child in beside if any(True for _ in child.parameters())}
    parts = [UpcastPart(part) for part in (*plain, embedding, norm, head, *others.values())]

    def place(
        layer_parts: Sequence[nn.Module], embedding: nn.Module, norm: nn.Module, head: nn.Module, *rest: nn.Module
    ) -> None:
        for name, part in zip(others, rest, strict=True):
            setattr(backbone, name, part)
        for i, part in enumerate(layer_parts):
            layers[i] = part
        model.set_input_embeddings(embedding)
        backbone.norm = norm
        model.set_output_embeddings(head)

    experts = getattr(model.config, "_experts_implementation", None)

    def upcast(dtype: torch.dtype) -> None:
        if dtype is torch.float64 and has_experts(model.config):
            set_experts(model, "eager")  # grouped products have no float64
        for part in parts:
            part.dtype = dtype
        for module, _ in quantised:  # 4-bit linears
            module.compute_dtype = dtype

    torch.set_float32_matmul_precision("highest")
    place(parts[: len(plain)], *parts[len(plain) :])
    try:
        with own_code(model):
            yield upcast
    finally:
        place(plain, embedding, norm, head, *others.values())
        if has_experts(model.config):
            set_experts(model, experts)
        for module, dtype in quantised:
            module.compute_dtype = dtype
        torch.set_float32_matmul_precision(precision)


def without_dropout(model: nn.Module) -> None:
    """Set dropout to 0: two passes with different noise can't be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # some families keep the share, and call the function (OPT)
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@dataclass(frozen=True)
class Passed:
    """What one document came to."""

    losses: Tensor | None
    """[labels], the cross-entropy of each label, on the host; None for a document without labels."""
    logits: Tensor | None
    """[kept, V] at the positions asked for, on the host; None if none were."""


def logits_at(model: Any, rows: Tensor, **batch: Any) -> Tensor:
    """Return the logits [R, V] of a batch's rows (int64 [R]); a model that can't leave the others out computes all."""
    if "logits_to_keep" in signature(base_causal_lm(model).forward).parameters:
        logits: Tensor = model(**batch, use_cache=False, logits_to_keep=rows).logits[0]
        return logits
    every: Tensor = model(**batch, use_cache=False).logits[0]
    return every[rows]


def accumulate(
    model: Any,
    documents: Sequence[Document],
    n_labels: int,
    keep: Sequence[Sequence[int]] | None = None,
    begin: Callable[[int], None] = lambda number: None,
) -> list[Passed]:
    """Accumulate the gradient of the mean loss over `n_labels`, one document at a time; without autograd only look.

    Args:
        keep: for each document the positions whose logits are kept.
        begin: is told which document comes.
    """
    passed = []
    for number, document in enumerate(documents):
        kept = list(keep[number]) if keep is not None else []
        labels = torch.tensor(document.labels, device=model.device)
        predicting = (labels[1:] != IGNORE_INDEX).nonzero().flatten()
        if not len(predicting) and not kept:
            passed.append(Passed(None, None))
            continue
        begin(number)
        ids = torch.tensor(document.input_ids, device=model.device)
        rows = torch.cat([predicting, torch.tensor(kept, dtype=torch.int64, device=model.device)])
        logits = logits_at(model, rows, input_ids=ids[None])
        losses = None
        if len(predicting):
            scores = logits[: len(predicting)]
            scores = scores if scores.dtype is torch.float64 else scores.float()
            losses = cross_entropy(scores, labels[predicting + 1], reduction="none")
            if torch.is_grad_enabled():
                (losses.sum() / n_labels).backward()
            losses = losses.detach().cpu()
        passed.append(Passed(losses, logits[len(predicting) :].detach().cpu() if kept else None))
    return passed


def kept_gradients(parameters: dict[str, Tensor]) -> list[str]:
    """List the tensors whose gradients are compared: the first layer's of every kind, smallest first, then the
    second's, and so on, those that fit into `KEPT_ELEMENTS`; so no kind of weight goes unseen for its size."""
    kinds: Counter[str] = Counter()
    order = {}
    for name, parameter in parameters.items():
        order[name] = kinds[kind_of(name)], parameter.numel(), name
        kinds[kind_of(name)] += 1
    kept, room = [], KEPT_ELEMENTS
    for name in sorted(parameters, key=order.__getitem__):
        if parameters[name].numel() <= room:
            room -= parameters[name].numel()
            kept.append(name)
    return kept
