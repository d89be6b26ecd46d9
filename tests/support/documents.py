"""Documents one at a time: the reference that a packed row is compared with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.models.attach import attach
from pronghorn.models.families import base_causal_lm
from pronghorn.parity.own_code import own_code
from support.tiny import DELTA_FAMILIES
from support.tolerance import ThreeWay

# One-token documents at the start, in the middle and before the tail; a document longer than every window.
LENGTHS = [1, 40, 1, 13, 22, 1]


ROW = 96


DRAWS, MOST_DRAWS = 8, 64
"""Batches whose errors are put together, as 16 bits make single ones a matter of luck, and where these are in doubt."""


def attach_options(attention: str, metadata: str = "once") -> dict[str, Any]:
    """Arguments of attach for a backend of attention, `masked` among them, and a way to make the metadata."""
    masked = attention == "masked"
    experimental = {"packing_metadata": metadata, "masked_attention": masked}
    return {"attention": "auto" if masked else attention, "experimental": experimental}


class _Float64:
    """torch for a modelling file that computes parts in float32: these are in float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def float64_throughout(model: Any) -> Iterator[None]:
    """Let transformers' gated delta rule compute in float64 where the model is: in float32 its decays' gradients are
    right to four digits only. Documents are right alone; this is a reference, and nothing that Pronghorn computes."""
    module: Any = sys.modules[type(base_causal_lm(model)).__module__]
    if next(model.parameters()).dtype is not torch.float64 or not hasattr(module, "torch_chunk_gated_delta_rule"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _Float64())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def one_document_at_a_time(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and the mean loss, each document through the model alone (and the unlabelled padded tail)."""
    logits, total, start = [], torch.zeros((), dtype=torch.float64), 0
    for length in batch["packed"].lengths:
        part = slice(start, start + length)
        with float64_throughout(model), own_code(model):
            out = model(input_ids=batch["input_ids"][:, part], use_cache=False).logits[0]
        target = batch["labels"][0, part][1:]
        if (target != IGNORE_INDEX).any():
            total = total + cross_entropy(out[:-1].double(), target, ignore_index=IGNORE_INDEX, reduction="sum")
        logits.append(out)
        start += length
    return torch.cat(logits), total / batch["packed"].n_labels


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient for {missing}"
    return found  # type: ignore[return-value]


def check_by_documents(
    model: Any, batch: dict[str, Any], loss: float, found: dict[str, torch.Tensor], cosine: float
) -> None:
    """Assert that a packed row's loss is that of its documents one at a time, and that no gradient has less than a
    cosine to theirs."""
    _, right = one_document_at_a_time(model, batch)
    right.backward()
    assert loss == pytest.approx(right.item(), rel=0.01)
    for name, gradient in gradients(model).items():
        pair = found[name].double().flatten(), gradient.double().flatten()
        assert torch.nn.functional.cosine_similarity(*pair, 0) > cosine, name


def compare(model: Any, batch: dict[str, Any], device: str, dtype: torch.dtype, **options: Any) -> None:
    """Run the three paths and compare them; `model` is float32 on the CPU and stays untouched."""
    errors = ThreeWay()
    measure(errors, model, batch, device, dtype, **options)
    errors.check()


def compare_draws(
    model: Any, batch: Callable[[int], dict[str, Any]], device: str, dtype: torch.dtype, **options: Any
) -> None:
    """`compare`, the errors of several batches, made from their numbers, put together."""
    errors = ThreeWay()
    errors.judge(lambda seed: measure(errors, model, batch(seed), device, dtype, **options), DRAWS, MOST_DRAWS)


def measure(
    errors: ThreeWay, model: Any, batch: dict[str, Any], device: str, dtype: torch.dtype, **options: Any
) -> None:
    reference = copy.deepcopy(model).double()
    exact_logits, exact_loss = one_document_at_a_time(reference, batch)
    exact_loss.backward()

    plain = copy.deepcopy(model).to(device, dtype)
    on_device = {name: value.to(device) for name, value in batch.items()}
    if model.config.model_type in DELTA_FAMILIES:  # which transformers mixes when they are packed
        plain_logits, plain_loss = one_document_at_a_time(plain, on_device)
    else:
        stock = {name: on_device[name] for name in ("input_ids", "position_ids", "labels")}
        out = plain(**stock, use_cache=False)
        plain_logits, plain_loss = out.logits[0], out.loss
    plain_loss.backward()

    ours = copy.deepcopy(model).to(device, dtype)
    handle = attach(ours, **options)
    loss = ours(**on_device).loss
    loss.backward()
    with torch.no_grad():
        logits = ours(**{k: v for k, v in on_device.items() if k != "labels"}).logits[0]

    errors.add("loss", loss, plain_loss, exact_loss)
    errors.add("logits", logits, plain_logits, exact_logits)
    exact, stock_grads = gradients(reference), gradients(plain)
    for name, grad in gradients(ours).items():
        errors.add(f"gradient of {name}", grad, stock_grads[name], exact[name])
    handle.detach()
