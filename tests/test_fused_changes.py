"""What PEFT puts on a model and what somebody changes on an attached one: fused layers compute what stock ones do."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from pronghorn.models.attach import attach
from pronghorn.models.families import base_causal_lm
from test_fused import BIASED, WIDE, loss_and_gradients, path_of_layers, with_adapters
from test_parity import LENGTHS, ROW, one_document_at_a_time
from tiny import packed_row, tiny_model

BATCH = packed_row(LENGTHS, ROW)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def spread(model: Any) -> Any:
    """Trained parameters away from where PEFT puts them, so that they matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def adapted(model: Any, **options: Any) -> Any:
    return spread(peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ALL, **options})))


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


def again(**options: Any) -> Callable[[Any], None]:
    """The adapter deleted, another put in its place by the same name."""

    def change(model: Any) -> None:
        model.delete_adapter("default")
        model.add_adapter("default", peft.LoraConfig(r=8, lora_alpha=8, target_modules=ALL, **options))
        model.set_adapter("default")
        spread(model)

    return change


def train_biases(on: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.requires_grad_(on)

    return change


def merge_and_disable(model: Any) -> None:
    """What is merged and disabled, PEFT takes out of the weights; no adapter is left to train."""
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    model.requires_grad_(False)
    base_causal_lm(model).lm_head.requires_grad_(True)


class Twice(nn.Module):
    """Something around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def twice(original: Any) -> type[nn.Module]:
    """A subclass that computes something else."""
    return type(original.__name__, (original,), {"forward": lambda self, x: original.forward(self, x) * 2})


def each_layer(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(model: Any) -> None:
        for layer in base_causal_lm(model).model.layers:
            change(layer)

    return changed


def biases_of_two(layer: Any) -> None:
    for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
        linear.base_layer.bias = nn.Parameter(torch.ones(32), requires_grad=False)


def dropout(layer: Any) -> None:
    layer.mlp.up_proj.lora_dropout["default"] = nn.Dropout(0.5)


def scale(layer: Any) -> None:
    layer.mlp.down_proj.set_scale("default", 3.0)


def subclass_of_a_linear(layer: Any) -> None:
    layer.mlp.down_proj.base_layer.__class__ = twice(nn.Linear)


def subclass_of_the_mlp(layer: Any) -> None:
    layer.mlp.__class__ = twice(type(layer.mlp))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "adapter with dropout": again(lora_dropout=0.5),
    "adapter with DoRA": again(use_dora=True),
    "adapter of another scale": again(use_rslora=True),
    "biases trained": train_biases(True),
    "merged and disabled": merge_and_disable,
    "dropout": each_layer(dropout),
    "scale": each_layer(scale),
    "another activation": each_layer(lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU())),
    "another window": each_layer(lambda layer: setattr(layer.self_attn, "sliding_window", 3)),
    "another scale of scores": each_layer(lambda layer: setattr(layer.self_attn, "scaling", 0.5)),
    "another eps": each_layer(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5)),
    "biases given to two of three": each_layer(biases_of_two),
    "subclass of a linear": each_layer(subclass_of_a_linear),
    "subclass of the MLP": each_layer(subclass_of_the_mlp),
    "something around the MLP": each_layer(lambda layer: setattr(layer, "mlp", Twice(layer.mlp))),
    "something around attention": each_layer(lambda layer: setattr(layer, "self_attn", Twice(layer.self_attn))),
}


@pytest.mark.parametrize("first", [True, False], ids=["after a step", "before any"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_an_attached_model_is_noticed(change: str, first: bool) -> None:
    found = []
    for layers in ("stock", "fused"):
        model = with_adapters(tiny_model("qwen3", **(WIDE if "given" in change else BIASED)))
        attach(model, layers=layers)
        before = loss_and_gradients(model, BATCH) if first else None
        torch.manual_seed(0)
        CHANGES[change](model)
        found.append(loss_and_gradients(model, BATCH))
        assert before is None or before[0] != found[-1][0] or before[1].keys() != found[-1][1].keys()
    assert_same(found[1], found[0])


def test_biases_frozen_while_weights_are_trained() -> None:
    found = []
    for layers in ("stock", "fused"):
        model = tiny_model("llama", **BIASED)
        attach(model, layers=layers)
        loss_and_gradients(model, BATCH)
        train_biases(False)(model)
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
