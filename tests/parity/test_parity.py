"""Packed equals one document at a time: logits and every gradient, for every family and backend.

Three paths compute the same packed row: Pronghorn's; the plain one (transformers' own SDPA masks, same dtype); and the
reference, one document at a time in float64 on the CPU. Pronghorn's error must be within twice the plain path's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pronghorn.errors import UnsupportedError
from pronghorn.models.attach import attach
from support.documents import (
    LENGTHS,
    ROW,
    attach_options,
    compare,
    compare_draws,
    gradients,
    one_document_at_a_time,
)
from support.tiny import FAMILIES, packed_row, tiny_model
from support.tolerance import assert_three_way

BACKENDS = [("per_document", "once"), ("masked", "once"), ("auto", "per_layer"), ("auto", "per_layer_mask")]


@contextmanager
def positions_told(metadata: str) -> Iterator[None]:
    """Skip the ablation where a family's layers, by some versions of transformers, keep the positions to themselves."""
    try:
        yield
    except UnsupportedError as error:
        if metadata == "once" or "not told `position_ids`" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.matrix(22)
@pytest.mark.parametrize("attention,metadata", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_document_at_a_time(family: str, attention: str, metadata: str, nan_memory: None) -> None:
    with positions_told(metadata):
        compare(
            tiny_model(family), packed_row(LENGTHS, ROW), "cpu", torch.float32, **attach_options(attention, metadata)
        )


@pytest.mark.parametrize("tail", [0, 1, 50])
def test_any_tail(tail: int, nan_memory: None) -> None:
    batch = packed_row(LENGTHS, sum(LENGTHS) + tail)
    assert batch["packed"].lengths == (*LENGTHS, *([tail] if tail else []))
    compare(tiny_model("qwen3"), batch, "cpu", torch.float32)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [63], [64, 64], [5] * 40])
def test_odd_rows(lengths: list[int]) -> None:
    batch = packed_row(lengths, sum(lengths) + 3, seed=4)
    if batch["packed"].n_labels == 0:  # rows of one-token documents predict nothing: a zero loss with zero gradients
        model = tiny_model("llama")
        attach(model)
        loss = model(**batch).loss
        loss.backward()
        assert loss.item() == 0.0
        assert all((grad == 0).all() for grad in gradients(model).values())
    else:
        compare(tiny_model("gemma3_text"), batch, "cpu", torch.float32)


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_tied_embeddings(changes: dict[str, Any]) -> None:
    compare(tiny_model("llama", **changes), packed_row(LENGTHS, ROW), "cpu", torch.float32)


def test_real_model(stories: Any, nan_memory: None) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa").train()
    batch = packed_row([1, 100, 37, 1, 90], 256, vocab=512)
    compare(model, batch, "cpu", torch.float32)


@pytest.mark.parametrize("attention", ["per_document", "masked"])
def test_recompute_changes_nothing(attention: str) -> None:
    batch = packed_row(LENGTHS, ROW)
    found = []
    for recompute in (False, True):
        model = tiny_model("gemma3_text")
        attach(model, **attach_options(attention))
        if recompute:
            from pronghorn.models.families import recompute_layers

            recompute_layers(model, True)
        model(**batch).loss.backward()
        found.append(gradients(model))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_what_a_document_computes_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, document by document, even with NaN everywhere else."""
    model = tiny_model("mistral").eval()
    attach(model, attention="per_document")
    batch = packed_row(LENGTHS, ROW)
    inputs = {name: batch[name] for name in ("position_ids", "packed")}
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    poisoned = embeddings.clone()
    start, end = 1, 41  # the second document
    poisoned[:, :start], poisoned[:, end:] = float("nan"), float("nan")
    with torch.no_grad():
        clean = model(inputs_embeds=embeddings, **inputs).logits[0, start:end]
        among_nans = model(inputs_embeds=poisoned, **inputs).logits[0, start:end]
    assert torch.equal(clean, among_nans)


def test_parity_test_can_fail() -> None:
    """A leaking mask and a shifted RoPE are caught by the comparison above."""
    batch = packed_row(LENGTHS, ROW)
    leaking = {**batch, "packed": type(batch["packed"]).build([ROW], tokens=ROW, labels=batch["labels"][0])}
    shifted = {**batch, "position_ids": torch.arange(ROW)[None] // 2}
    for planted in (leaking, shifted):
        model = tiny_model("llama")
        attach(model)
        reference = copy.deepcopy(tiny_model("llama")).double()
        exact, _ = one_document_at_a_time(reference, batch)
        logits = model(**{k: v for k, v in planted.items() if k != "labels"}).logits[0]
        with pytest.raises(AssertionError, match="logits"):
            assert_three_way("logits", logits, exact.float(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("attention,metadata", [("auto", "once"), ("masked", "once"), ("auto", "per_layer")])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_on_the_gpu(family: str, attention: str, metadata: str, dtype: torch.dtype, nan_memory: None) -> None:
    model = tiny_model(family)
    model.load_state_dict({k: v.to(dtype).float() for k, v in model.state_dict().items()})  # no rounding of weights
    with positions_told(metadata):
        compare_draws(
            model,
            lambda seed: packed_row(LENGTHS, ROW, seed=seed),
            "cuda",
            dtype,
            **attach_options(attention, metadata),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_real_model_on_the_gpu(stories: Any, dtype: torch.dtype, nan_memory: None) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa").train()
    model.load_state_dict({k: v.to(dtype).float() for k, v in model.state_dict().items()})
    lengths = [1, 100, 37, 1, 90]
    compare_draws(model, lambda seed: packed_row(lengths, 256, vocab=512, seed=seed), "cuda", dtype)
