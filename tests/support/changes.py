"""What PEFT puts on a model and what somebody changes on an attached one, each case a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

from pronghorn.models.families import base_causal_lm

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


def transposed(layer: Any) -> None:
    """A square weight, where it lies."""
    weight = layer.self_attn.o_proj.base_layer.weight
    weight.data = weight.data.t()


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
    "dropout of attention": each_layer(lambda layer: setattr(layer.self_attn, "attention_dropout", 0.5)),
    "another scale of scores": each_layer(lambda layer: setattr(layer.self_attn, "scaling", 0.5)),
    "another eps": each_layer(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5)),
    "biases given to two of three": each_layer(biases_of_two),
    "a weight transposed": each_layer(transposed),
    "subclass of a linear": each_layer(subclass_of_a_linear),
    "subclass of the MLP": each_layer(subclass_of_the_mlp),
    "something around the MLP": each_layer(lambda layer: setattr(layer, "mlp", Twice(layer.mlp))),
    "something around a linear": each_layer(lambda layer: setattr(layer.mlp, "up_proj", Twice(layer.mlp.up_proj))),
    "something around attention": each_layer(lambda layer: setattr(layer, "self_attn", Twice(layer.self_attn))),
}
