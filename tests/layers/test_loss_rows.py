"""The last layer computed for the loss's rows alone: the same loss and gradients, and whoever looks sees all rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pronghorn.data import batch as batches
from pronghorn.data.batch import Collator
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models import causal_lm
from pronghorn.models.attach import attach
from pronghorn.models.metadata import LOSS_ROWS_ONLY
from support.documents import DRAWS, LENGTHS, ROW
from support.fused import compare, loss_and_gradients, with_adapters
from support.tiny import FAMILIES, VOCAB, tiny_model


@pytest.fixture(autouse=True)
def small_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LOSS_ROWS_BUCKET", 8)


def few_labels(labelled: float = 0.3, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (sum(LENGTHS),), generator=generator)
    labels = torch.where(torch.rand(len(ids), generator=generator) < labelled, ids, -100)
    batch = Collator(ROW, pad_token_id=0)([{"input_ids": ids.tolist(), "labels": labels.tolist(), "lengths": LENGTHS}])
    assert len(batch["packed"].loss_rows) < ROW // 2
    return batch


def on(device: str, batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, nan_memory: None) -> None:
    compare(with_adapters(tiny_model(family)), *(few_labels(seed=seed) for seed in range(4)))  # one may be off by luck
    compare(tiny_model(family, tie_word_embeddings=True), few_labels())


def test_as_many_rows_as_tokens() -> None:
    """Rounded up to the row's length, some repeated: the last layer's states are those of all tokens."""
    ids = torch.arange(3, 3 + ROW)
    labels = torch.where((ids > 5) & (ids < 9), -100, ids)
    row = {"input_ids": ids.tolist(), "labels": labels.tolist(), "lengths": [ROW]}
    batch = Collator(ROW, pad_token_id=0)([row])
    assert len(batch["packed"].loss_rows) == ROW > batch["packed"].n_labels
    compare(with_adapters(tiny_model("llama")), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_a_gpu(family: str, nan_memory: None) -> None:
    draws = [few_labels(seed=seed) for seed in range(DRAWS)]
    for dtype in (torch.bfloat16, torch.float32):
        compare(with_adapters(tiny_model(family)), *draws, device="cuda", dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_backbone_gives_these_rows(device: str) -> None:
    model, batch = with_adapters(tiny_model("qwen3")).to(device), on(device, few_labels())
    attach(model, layers="fused", graph="off", attention="per_document" if device == "cpu" else "auto")
    backbone, packed = model.get_base_model().model, batch["packed"]
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    whole = backbone(**inputs, packed=packed).last_hidden_state
    some = backbone(**inputs, packed=packed, **{LOSS_ROWS_ONLY: True}).last_hidden_state
    assert whole.shape[1] == ROW
    torch.testing.assert_close(some, whole[:, packed.loss_rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", [Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER])
def test_policies_change_what_is_kept_only(policy: Policy) -> None:
    model, batch = with_adapters(tiny_model("gemma3_text")), few_labels()
    attach(model, Plan.keep(), layers="fused")
    loss, grads = loss_and_gradients(model, batch)
    attach(model, Plan((policy,) * 3), layers="fused")
    again, same = loss_and_gradients(model, batch)
    assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads)


def test_the_loss_asks_for_these_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = with_adapters(tiny_model("llama")), few_labels()
    handle, seen = attach(model, layers="fused"), []
    plain = causal_lm.packed_lm_loss
    monkeypatch.setattr(
        causal_lm,
        "packed_lm_loss",
        lambda hidden, *args, **kw: seen.append(hidden) or plain(hidden, *args, **kw),
    )
    model(**batch)
    assert [hidden.shape[1] for hidden in seen] == [len(batch["packed"].loss_rows)]
    assert "the last layer's MLP" in {path.part: path.path for path in handle.report}["loss"]
    attach(model, layers="stock")
    model(**batch)
    assert seen[1].shape[1] == ROW


def test_all_layers_have_one_class() -> None:
    """FSDP's policies look a class up by its name, in the first layer, and wrap that class's instances."""
    model = tiny_model("llama")
    attach(model, layers="fused")
    assert len({type(layer) for layer in model.model.layers}) == 1


def test_a_copy_of_the_last_layer_elsewhere_gives_all_rows() -> None:
    """PEFT's layer_replication makes such."""
    model, losses = tiny_model("llama"), []
    for layers in ("fused", "stock"):
        attach(model, layers=layers)
        if layers == "fused":
            model.model.layers.insert(0, copy.deepcopy(model.model.layers[-1]))
            model.config.num_hidden_layers += 1
        losses.append(model(**few_labels()).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("family", ["gemma4_text", "granite"])
def test_a_head_that_is_called_has_the_loss_of_one_that_is_not(family: str) -> None:
    """With logits that are capped, or scaled: a hook keeps the head from being computed with the loss."""
    model, batch = with_adapters(tiny_model(family)), few_labels()
    attach(model, layers="stock")
    loss, grads = loss_and_gradients(model, batch)
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: None)
    called, same = loss_and_gradients(model, batch)
    assert called == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(same, grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_last_layer_that_runs_before_others_too_gives_all_rows(family: str) -> None:
    model = with_adapters(tiny_model(family))
    layers = model.get_base_model().model.layers
    layers[2] = layers[0]
    compare(model, few_labels())


def test_nothing_labelled_is_no_loss() -> None:
    model, batch = with_adapters(tiny_model("llama")), few_labels(labelled=0.0)
    attach(model, layers="fused")
    loss, grads = loss_and_gradients(model, batch)
    assert loss == 0 and not any(grad.any() for grad in grads.values())
    for none in (0, torch.tensor(0)):  # in the whole accumulated batch
        assert model(**batch, num_items_in_batch=none).loss == 0


FORWARD, BACKWARD = "register_forward_hook", "register_full_backward_hook"
HOOKS = [(where, kind) for where in ("norm", "layers.2") for kind in (FORWARD, BACKWARD, "forward")]
HOOKS += [("", FORWARD), ("", "forward"), ("norm", "register_forward_pre_hook")]
"""Not the backbone's backward: its output is not a tensor."""


@pytest.mark.parametrize("where,kind", HOOKS)
def test_whoever_looks_sees_all_rows(where: str, kind: str) -> None:
    model, batch = with_adapters(tiny_model("llama")), few_labels()
    attach(model, layers="fused")
    expected, grads = loss_and_gradients(model, batch)
    seen: list[int] = []
    module = model.get_base_model().model.get_submodule(where)

    def look(*given: Any) -> None:
        last = given[-1][0] if isinstance(given[-1], tuple) else given[-1]
        seen.append(getattr(last, "last_hidden_state", last).shape[1])

    if kind == "forward":
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = plain(*args, **kwargs)
            look(out)
            return out

        module.forward = forward
    else:
        getattr(module, kind)(look)
    loss, same = loss_and_gradients(model, batch)
    assert seen == [ROW] and loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(same, grads)


def test_hidden_states_that_were_asked_for_are_whole() -> None:
    model, batch = with_adapters(tiny_model("llama")), few_labels()
    attach(model, layers="fused")
    out = model(**batch, output_hidden_states=True)
    assert [state.shape[1] for state in out.hidden_states] == [ROW] * 4
    assert model(**batch).loss.item() == pytest.approx(out.loss.item(), rel=1e-6)  # transformers' hooks stay
