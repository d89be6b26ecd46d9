"""Gated delta nets and gated attention: documents stay apart, fused or called, whatever the decays and lengths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from pronghorn.errors import UnsupportedError
from pronghorn.layers.decoder import is_fused
from pronghorn.models.attach import attach, attached
from support.documents import LENGTHS, ROW, float64_throughout, gradients, one_document_at_a_time
from support.fused import loss_and_gradients, path_of_layers, with_adapters
from support.tiny import DELTA_FAMILIES, packed_row, tiny_model
from support.tolerance import assert_three_way

DECAYS = {"near 1": (-9.0, -4.0), "as transformers draws them": None, "near 0": (4.0, 4.0)}
"""A_log and dt_bias: g = −exp(A_log) · softplus(a + dt_bias)."""
ROWS = {
    "short": [1, 2, 3, 1, 1, 4, 7, 1],
    "chunks": [63, 64, 65, 1, 2, 130],
    "long": [300, 1, 3],
}
"""Documents shorter than the convolution, of one token, and of one chunk or many."""


def delta_nets(model: Any) -> list[Any]:
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


def set_decays(model: Any, values: tuple[float, float] | None) -> None:
    for net in delta_nets(model) if values else ():
        with torch.no_grad():
            net.A_log.fill_(values[0])
            net.dt_bias.fill_(values[1])


@pytest.mark.matrix(9)
@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("decays", DECAYS.values(), ids=DECAYS)
def test_packed_equals_alone(layers: Any, lengths: list[int], decays: Any, nan_memory: None) -> None:
    """Loss and every gradient in float64, those of decays and convolutions too, against transformers one document at a
    time. RoPE's tables differ, being in float32 in one of them."""
    model = tiny_model("qwen3_5_text").double()
    set_decays(model, decays)
    batch, ours = packed_row(lengths, sum(lengths) + 3), copy.deepcopy(model)
    _, exact_loss = one_document_at_a_time(model, batch)
    exact_loss.backward()
    attach(ours, layers=layers)
    with float64_throughout(ours):
        loss = ours(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, exact_loss, rtol=1e-7, atol=0)
    exact = gradients(model)
    for name, grad in gradients(ours).items():
        assert (grad - exact[name]).norm() <= 1e-6 * exact[name].norm(), name


def test_transformers_mixes_packed_documents() -> None:
    """Why these are compared with documents alone, and why an attached model doesn't call transformers' convolution."""
    batch, stock = packed_row(LENGTHS, ROW), tiny_model("qwen3_5_text")
    alone, _ = one_document_at_a_time(stock, batch)
    packed = stock(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    with pytest.raises(AssertionError, match="logits"):
        assert_three_way("logits", packed, alone, alone)


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_a_document_among_nan_computes_the_same_bits(family: str, layers: Any) -> None:
    model = tiny_model(family).eval()
    attach(model, layers=layers)
    batch = packed_row(LENGTHS, ROW)
    inputs = {name: batch[name] for name in ("position_ids", "packed")}
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    poisoned, (start, end) = embeddings.clone(), (1, 41)  # the second document
    poisoned[:, :start], poisoned[:, end:] = float("nan"), float("nan")
    with torch.no_grad():
        clean = model(inputs_embeds=embeddings, **inputs).logits[0, start:end]
        among_nans = model(inputs_embeds=poisoned, **inputs).logits[0, start:end]
    torch.testing.assert_close(among_nans, clean, rtol=0, atol=0 if family == "qwen3_5_text" else 1e-5)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.0}, {"lora_dropout": 0.1}], ids=["fused", "called"])
def test_adapters_on_every_linear_of_the_mixers(options: dict[str, Any]) -> None:
    """With dropout PEFT's linears are called, and the documents stay apart nevertheless."""
    model, batch = with_adapters(tiny_model("qwen3_next"), **options), packed_row(LENGTHS, ROW)
    handle = attach(model, layers="fused")
    names = {name.rsplit(".lora_")[0].rpartition(".")[2] for name in gradients_of(model, batch)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"}
    called = options["lora_dropout"] > 0
    assert (path_of_layers(handle)[1] == "LoRA dropout") is called
    model.eval()
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in ("input_ids", "position_ids", "packed")}).logits[0]
        handle.detach()
        alone, _ = one_document_at_a_time(model, batch)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def gradients_of(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return loss_and_gradients(model, batch)[1]


@pytest.mark.parametrize("part", ["norm", "conv1d", "in_proj_z"])
def test_a_hooked_part_is_called_and_its_layer_still_isolates(part: str) -> None:
    model, batch = tiny_model("qwen3_5_text"), packed_row(LENGTHS, ROW)
    attach(model, layers="fused")
    expected, grads = loss_and_gradients(model, batch)
    called: list[int] = []
    getattr(delta_nets(model)[0], part).register_forward_hook(lambda *_: called.append(1))
    loss, same = loss_and_gradients(model, batch)
    assert bool(called) is (part != "conv1d")  # which nobody calls in transformers either
    assert [is_fused(layer) for layer in model.model.layers] == [False, True, True]
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(same, grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_mixer_with_another_forward_is_refused(family: str) -> None:
    """Nobody knows whether it keeps documents apart. The model stays as it was, with what was attached before."""
    model = tiny_model(family)
    net = delta_nets(model)[1]
    plain, before = net.forward, (type(model), model.config._attn_implementation, type(net))
    net.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    with pytest.raises(UnsupportedError, match="GatedDeltaNet has another forward than transformers'"):
        attach(model)
    assert (type(model), model.config._attn_implementation, type(net)) == before and attached(model) is None
    del net.forward
    handle = attach(model)
    net.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    with pytest.raises(UnsupportedError, match="has another forward"):
        attach(model, layers="fused")
    assert attached(model) is handle


def test_packed_rows_are_refused_where_accelerate_brings_weights_for_a_call() -> None:
    """The convolution is computed without calling its module. Padded batches have transformers' forward."""
    model = tiny_model("qwen3_5_text").eval()
    attach(model)
    ids = torch.arange(3, 40)[None]
    expected = model(ids, use_cache=False).logits
    cpu_offload(model, execution_device="cpu")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        with pytest.raises(UnsupportedError, match=r"of whose weights some are on meta .*: keep the whole model"):
            model(**packed_row(LENGTHS, ROW))


def test_an_adapter_loads_in_plain_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    model, batch = with_adapters(tiny_model("qwen3_5_text")), packed_row(LENGTHS, ROW)
    attach(model, layers="fused")
    loss_and_gradients(model, batch)
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(tiny_model("qwen3_5_text"), tmp_path)
    alone, _ = one_document_at_a_time(plain, batch)
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in ("input_ids", "position_ids", "packed")}).logits[0]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_saving_gives_the_same_bytes(family: str, tmp_path: Path) -> None:
    plain = tiny_model(family)
    ours = copy.deepcopy(plain)
    handle = attach(ours, layers="fused")
    ours(**packed_row(LENGTHS, ROW)).loss.backward()
    plain.save_pretrained(tmp_path / "plain")
    ours.save_pretrained(tmp_path / "ours")
    handle.detach()
    ours.save_pretrained(tmp_path / "detached")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "ours", "detached")]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_a_model_cut_before_its_first_attention_has_a_report(family: str) -> None:
    """The first three layers of a Qwen3.5 are delta nets, with no heads of attention to choose a kernel for."""
    model = tiny_model(family, num_hidden_layers=3, layer_types=["linear_attention"] * 3)
    handle = attach(model, layers="fused")
    parts = [line.part for line in handle.report]
    assert "decoder layers" in parts and "packed attention" not in parts
