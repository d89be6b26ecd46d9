"""Share a loaded model's layers with the other processes: `memory.sharded`, by the family's description."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from pronghorn.layers.linears import base_of
from pronghorn.memory.sharded import IN_BUFFER, shard, weight_groups
from pronghorn.models.families import base_causal_lm, check_config, decoder_layers


def share_layers(model: Any, device: torch.device) -> None:
    """Leave a part of each decoder layer's weights in this process, on `device`, and move all else there.

    Before `attach`. Every process calls it with the same model. Of a model with adapters frozen weights are shared, of
    one without all weights of its layers, which are trained; the rest stays whole in each.

    Args:
        model: a causal LM, on the CPU or on `device`. A 4-bit one must be on `device`.
    """
    base = base_causal_lm(model)
    family, layers = check_config(base.config), list(decoder_layers(base))
    owners = Counter(id(p) for layer in layers for p in {id(p): p for p in layer.parameters()}.values())
    owners.update(id(p) for p in base.get_input_embeddings().parameters())
    elsewhere = {identity for identity, count in owners.items() if count > 1}
    full = not hasattr(model, "peft_config")
    shared, groups = [], []
    for layer in layers:
        merged = (
            []
            if family.generic
            else [
                [base_of(layer.get_submodule(block.path(path))) for path in group]
                for block in family.blocks(layer)
                for group in block.kind.linears
            ]
        )
        if of_layer := weight_groups(layer, merged, elsewhere, trained=full):
            shared.append(layer)
            groups.append(of_layer)
    shard(base, shared, groups, device)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.device != device and not hasattr(tensor, IN_BUFFER):
                    tensor.data = tensor.data.to(device)
    if hasattr(base, "hf_device_map"):
        base.hf_device_map = {"": device}
