"""What PEFT puts on a model and what somebody changes on an attached one: fused layers compute what stock ones do."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from pronghorn.errors import UnsupportedError
from pronghorn.models.attach import attach
from support.changes import (
    ALL,
    CHANGES,
    adapted,
    spread,
    train_biases,
)
from support.documents import LENGTHS, ROW, one_document_at_a_time
from support.fused import BIASED, WIDE, loss_and_gradients, path_of_layers, with_adapters
from support.tiny import packed_row, tiny_model

BATCH = packed_row(LENGTHS, ROW)


def assert_same(mine: tuple[float, dict[str, torch.Tensor]], stock: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert mine[0] == pytest.approx(stock[0], rel=1e-6)
    torch.testing.assert_close(mine[1], stock[1], rtol=1e-4, atol=2e-6)


METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    "IA3": ("not LoRA", lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=[])),
    "LoHa": ("not LoRA", lambda: peft.LoHaConfig(r=2, target_modules=ALL)),
    "LoKr": ("not LoRA", lambda: peft.LoKrConfig(r=2, target_modules=ALL)),
    "OFT": ("not LoRA", lambda: peft.OFTConfig(oft_block_size=4, target_modules=ALL)),
    "VeRA": ("not LoRA", lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"])),
    "AdaLoRA": (
        "not plain LoRA",
        lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=ALL),
    ),
    "adaption prompt": (
        "AdaptedAttention has another forward",
        lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
    ),
    "norms": ("no kernel", lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "LoRA with bias": ("not plain LoRA", lambda: peft.LoraConfig(r=4, target_modules=ALL, lora_bias=True)),
    "biases": ("only biases are trained", lambda: peft.LoraConfig(r=4, target_modules=ALL, bias="lora_only")),
    "other alphas": ("scales differ", lambda: peft.LoraConfig(target_modules=ALL, alpha_pattern={"q_proj": 16})),
    "a whole MLP": (
        "ModulesToSaveWrapper has another forward",
        lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]),
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_else_peft_puts_on_a_model(method: str) -> None:
    why, config = METHODS[method]
    model = spread(peft.get_peft_model(tiny_model("llama", **BIASED), config()))
    attach(model, layers="stock")
    stock = loss_and_gradients(model, BATCH)
    handle = attach(model, layers="fused")
    assert_same(loss_and_gradients(model, BATCH), stock)
    assert why in path_of_layers(handle)[1]


@pytest.mark.parametrize("copied", [{"layer_replication": [(0, 2), (1, 3)]}, {"modules_to_save": ["self_attn"]}])
def test_layers_that_peft_copied_with_their_configuration(copied: dict[str, Any]) -> None:
    """Layers whose base weights are one, or that are trained whole: packed, and one document at a time without us."""
    model = adapted(tiny_model("llama", **WIDE), r=8, **{"target_modules": ["up_proj", "down_proj"], **copied})
    with torch.no_grad():
        _, expected = one_document_at_a_time(model, BATCH)
    found = []
    for layers in ("stock", "fused"):
        attach(model, layers=layers)
        found.append(loss_and_gradients(model, BATCH))
    assert found[0][0] == pytest.approx(expected.item(), rel=1e-6)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("name", ["velora_config", "kasa_config"])
def test_variants_of_lora(name: str) -> None:
    """They train the same lora_A and lora_B, to other gradients or another sum."""
    made = getattr(importlib.import_module("peft"), f"{name.removesuffix('_config').capitalize()}Config", None)
    if made is None:
        pytest.skip(f"this PEFT has no {name}")
    model = adapted(tiny_model("llama"), **{name: made()})
    attach(model, layers="stock")
    stock = loss_and_gradients(model, BATCH)
    handle = attach(model, layers="fused")
    assert_same(loss_and_gradients(model, BATCH), stock)
    assert path_of_layers(handle)[1] == "an adapter that is not plain LoRA"


def test_llama_has_no_window_whatever_its_configuration_says() -> None:
    model = with_adapters(tiny_model("llama", sliding_window=5))
    with torch.no_grad():
        _, expected = one_document_at_a_time(model, BATCH)
        handle = attach(model, layers="fused")
        assert model(**BATCH).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert path_of_layers(handle)[0] == "fused"


@pytest.mark.matrix(16)
@pytest.mark.parametrize("first", [True, False], ids=["after a step", "before any"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_an_attached_model_is_noticed(change: str, first: bool) -> None:
    found = []
    for layers in ("stock", "fused"):
        model = with_adapters(tiny_model("qwen3", **(WIDE if "given" in change else BIASED)))
        handle = attach(model, layers=layers)
        before = loss_and_gradients(model, BATCH) if first else None
        torch.manual_seed(0)
        CHANGES[change](model)
        found.append(loss_and_gradients(model, BATCH))
        handle.detach()
        assert before is None or before[0] != found[-1][0] or before[1].keys() != found[-1][1].keys()
    assert_same(found[1], found[0])


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_another_window_is_noticed(family: str) -> None:
    """Whether modules or their configuration hold it."""
    found = []
    for layers in ("stock", "fused"):
        model = tiny_model(family)
        attach(model, layers=layers)
        before = loss_and_gradients(model, BATCH)
        for held in [model.config, *(layer.self_attn for layer in model.model.layers)]:
            if getattr(held, "sliding_window", None) is not None:
                held.sliding_window = 2
        found.append(loss_and_gradients(model, BATCH))
        assert found[-1][0] != before[0]
    assert_same(found[1], found[0])


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_windows_of_configuration_and_modules_that_disagree(family: str, layers: Any) -> None:
    """Before attach, and later: transformers' flash follows the modules, its masks the configuration."""
    model = tiny_model(family)
    held = model.model.layers[0].self_attn.sliding_window
    said = model.config.sliding_window
    handle = attach(model, layers=layers)
    told = f"sliding_window is {held}, and the configuration's 2"
    for _ in range(2):
        model.config.sliding_window = said
        model(**BATCH)
        model.config.sliding_window = 2
        for _ in range(2):  # it is looked at once a build, and has to be refused each time
            with pytest.raises(UnsupportedError, match=told):
                model(**BATCH)
    handle.detach()
    with pytest.raises(UnsupportedError, match=told):
        attach(model, layers=layers)


def _queries_grow(model: Any) -> None:
    model.config.rope_parameters |= {"llama_4_scaling_beta": 2.0, "original_max_position_embeddings": 5}


def _switch(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            setattr(layer.self_attn, name, False)

    return change


@pytest.mark.parametrize("name", ["resid_attn_dropout", "resid_mlp_dropout"])
@pytest.mark.parametrize("when", ["before attach", "later"])
def test_dropout_of_what_blocks_add(name: str, when: str) -> None:
    """Phi-3's layers have it beside their parts."""
    found = []
    for layers in ("stock", "fused"):
        model = tiny_model("phi3").train()
        if when == "later":
            attach(model, layers=layers)
            before = loss_and_gradients(model, BATCH)
        for layer in model.model.layers:
            getattr(layer, name).p = 0.5
        attach(model, layers=layers)
        torch.manual_seed(0)
        found.append(loss_and_gradients(model, BATCH))
        assert when != "later" or found[-1][0] != before[0]
    assert_same(found[1], found[0])


CHOICES = [("ministral3", _queries_grow), ("smollm3", _switch("use_rope")), ("glm4_moe", _switch("use_qk_norm"))]


@pytest.mark.parametrize(("family", "change"), CHOICES)
def test_what_attention_reads_in_every_forward_is_noticed(family: str, change: Callable[[Any], None]) -> None:
    found = []
    for layers in ("stock", "fused"):
        model = with_adapters(tiny_model(family))
        attach(model, layers=layers)
        before = loss_and_gradients(model, BATCH)
        change(model.get_base_model())
        found.append(loss_and_gradients(model, BATCH))
        assert found[-1][0] != before[0]
    assert_same(found[1], found[0])


def test_layers_that_were_taken_out_are_fused_when_they_are_back() -> None:
    """As `measured_times` does: a build of one layer serves no other ones."""
    model = with_adapters(tiny_model("llama"))
    handle, backbone = attach(model, layers="fused"), model.get_base_model().model
    layers = backbone.layers
    for count in (1, 2, 3):
        backbone.layers = torch.nn.ModuleList(list(layers)[:count])
        model(**BATCH)
        assert handle.layers is not None and set(handle.layers._builds[0].runs) == set(backbone.layers)


def test_biases_frozen_while_weights_are_trained() -> None:
    found = []
    for layers in ("stock", "fused"):
        model = tiny_model("llama", **BIASED)
        attach(model, layers=layers)
        loss_and_gradients(model, BATCH)
        train_biases(False)(model)
        found.append(loss_and_gradients(model, BATCH))
    assert_same(found[1], found[0])


def test_an_mlp_that_was_cut_without_a_word_in_its_linears() -> None:
    """Their out_features stay; torch multiplies by the weights as they are."""
    found = []
    for layers in ("stock", "fused"):
        model = tiny_model("llama", **BIASED)
        attach(model, layers=layers)
        loss_and_gradients(model, BATCH)
        for layer in model.model.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight, linear.bias = (
                    torch.nn.Parameter(part.detach()[:40].clone()) for part in (linear.weight, linear.bias)
                )
            down = layer.mlp.down_proj
            down.weight = torch.nn.Parameter(down.weight.detach()[:, :40].clone())
        found.append(loss_and_gradients(model, BATCH))
    assert_same(found[1], found[0])


def values_are_keys(layers: Any) -> None:
    layers[1].self_attn.v_proj.weight = layers[1].self_attn.k_proj.weight


def a_weight_of_two_layers(layers: Any) -> None:
    layers[2].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight


def a_bias_of_two_layers(layers: Any) -> None:
    layers[2].mlp.up_proj.bias = layers[0].mlp.up_proj.bias


def a_linear_of_two_layers(layers: Any) -> None:
    layers[2].mlp.gate_proj = layers[0].mlp.gate_proj


def an_mlp_of_two_layers(layers: Any) -> None:
    layers[2].mlp = layers[0].mlp


TIES = [values_are_keys, a_weight_of_two_layers, a_bias_of_two_layers, a_linear_of_two_layers, an_mlp_of_two_layers]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("tie", TIES)
def test_what_is_written_to_a_weight_that_two_products_have(tie: Callable[[Any], None], full: bool) -> None:
    found = []
    for layers in ("stock", "fused"):
        model = tiny_model("llama", **BIASED)
        tie(model.model.layers)
        model = model if full else with_adapters(model)
        handle = attach(model, layers=layers)
        first = loss_and_gradients(model, BATCH)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_proj" in name and "lora" not in name:
                    parameter.mul_(-0.7)
        found.append(loss_and_gradients(model, BATCH))
        assert found[-1][0] != pytest.approx(first[0], rel=1e-4)
    path, why = path_of_layers(handle)
    assert (path == "fused") is (tie is an_mlp_of_two_layers), why
    assert_same(found[1], found[0])
    handle.detach()
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())


def test_a_layer_that_peft_repeats_has_the_weights_that_are_loaded() -> None:
    """Its adapters have no room below weights that another layer has, too."""
    found = []
    for layers in ("stock", "fused"):
        torch.manual_seed(0)
        model = adapted(tiny_model("llama", **WIDE), r=8, layer_replication=[(0, 2), (1, 3)])
        attach(model, layers=layers)
        loss_and_gradients(model, BATCH)
        state = {name: value * 1.5 for name, value in model.state_dict().items() if "down_proj.base" in name}
        model.load_state_dict(state, strict=False)
        found.append(loss_and_gradients(model, BATCH))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("all_at", ["forward", "backward"])
def test_what_is_trained_changes_between_a_forward_and_its_backward(all_at: str) -> None:
    """Adapters at the one, all at the other: gradients are those of what both train."""
    found = []
    for layers in ("stock", "fused"):
        model = with_adapters(tiny_model("llama", **BIASED))
        adapters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        attach(model, layers=layers)
        for at in ("forward", "backward"):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(at == all_at or name in adapters)
            if at == "forward":
                loss = model(**BATCH).loss
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        assert sorted(found[-1][1]) == sorted(adapters)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("full", [False, True])
def test_training_after_an_evaluation_in_inference_mode(full: bool) -> None:
    """What the first forward keeps for those after it are ordinary tensors."""
    model = tiny_model("llama", **BIASED)
    model = model if full else with_adapters(model)
    copied = copy.deepcopy(model)
    attach(model, layers="fused")
    with torch.inference_mode():
        evaluated = model(**BATCH).loss.item()
    attach(copied, layers="stock")
    stock = loss_and_gradients(copied, BATCH)
    assert evaluated == pytest.approx(stock[0], rel=1e-6)
    assert_same(loss_and_gradients(model, BATCH), stock)
