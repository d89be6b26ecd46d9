"""Tiny models with adapters over frozen bases of several kinds."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn

from support.fused import with_adapters
from support.tiny import tiny_model

SIZES = {"intermediate_size": 128}
"""4-bit blocks end with the rows."""


def based(family: str, base: str) -> Any:
    """Return a tiny model with adapters over a base in bf16 or NF4."""
    model = tiny_model(family, **SIZES).to(torch.bfloat16)
    for module in list(model.model.layers.modules()) if base == "nf4" else ():
        for name, linear in list(module.named_children()):
            if type(linear) is nn.Linear and not isinstance(linear, Linear4bit):
                new = Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None)
                new.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
                new.bias = linear.bias
                setattr(module, name, new)
    return with_adapters(model)
