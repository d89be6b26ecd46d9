"""Share a model's layers with the other processes (`parallel.sharded`), by the family's description: when it is loaded,
or layer by layer while it loads, so that no process ever holds it whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pronghorn.errors import UnsupportedError
from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.quantise import ROW_SCALES
from pronghorn.layers.linears import base_of, is_4bit
from pronghorn.models.families import base_causal_lm, check_config, decoder_layers
from pronghorn.parallel.sharded import FIRST, IN_BUFFER, ShardedLayers, first_values, shard, sharded
from pronghorn.parallel.unit import WeightGroups, weight_groups
from pronghorn.precision.compute import Compute
from pronghorn.precision.fp8 import as_codes, is_nf4, row_scales


def share_layers(model: Any, device: torch.device, compute: Compute = Compute.DTYPE, copy_trained: bool = True) -> None:
    """Leave a part of each decoder layer's weights in this process, on `device`, and move all else there.

    Before `attach`. Every process calls it with the same model. Of a model with adapters frozen weights are shared, of
    one without all weights of its layers, which are trained; the rest stays whole in each. Layers that were shared
    while the model loaded stay as they are.

    Args:
        model: a causal LM, on the CPU or on `device`. A 4-bit one must be on `device`.
        compute: in what frozen weights will multiply: of those in 8 bits only what these products read is kept.
        copy_trained: copy weights that are trained, and their gradients, out of the other GPUs' memory, as frozen ones
            are, where that can be; it takes 2 bytes a weight more, of which each process has its part. NCCL gathers and
            sums otherwise.
    """
    if compute is Compute.INT8:
        raise UnsupportedError(
            "compute = 'int8' for layers that processes share: its codes are of whole weights",
            "use compute = 'fp8', or leave compute out",
        )
    modules = list(model.modules())
    if device.type == "cpu" and any(getattr(m, "lora_variant", None) and is_4bit(base_of(m)) for m in modules):
        raise UnsupportedError(
            "DoRA over 4 bits in layers that processes share, on the CPU: PEFT replaces these weights in each forward",
            "use launch.strategy: copies, or leave use_dora or load_in_4bit out",
        )
    base = base_causal_lm(model)
    full = not hasattr(model, "peft_config")
    shared = sharded(base)
    if shared is None:
        shared, elsewhere = shard(base, decoder_layers(base), device), _elsewhere(base)
        found = ((layer, _groups(base, layer, elsewhere, full, device, compute)) for layer in decoder_layers(base))
        for index, (layer, groups) in enumerate(pair for pair in found if any(pair[1])):
            shared.add(index, layer, groups)
    if full:
        head, embeddings = base.get_output_embeddings().weight, base.get_input_embeddings().weight
        shared.train(first=[] if head is embeddings else [head])  # a tied one has its gradient at the very end only
        base.save_pretrained = _refuse_to_save
    if shared and (copy_trained or not full):
        shared.open()
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.device != device and not hasattr(tensor, IN_BUFFER):
                    tensor.data = tensor.data.to(device)
    if hasattr(base, "hf_device_map"):
        base.hf_device_map = {"": device}


def _refuse_to_save(folder: Any, **options: Any) -> None:
    """Stand for `save_pretrained` of a model whose layers are trained in parts.

    Raises:
        UnsupportedError: its files would hold what happens to lie in the buffers.
    """
    raise UnsupportedError(
        "save_pretrained needs all of the model's weights, and each process has a part of them",
        "save the model by its trainer: trainer.save_model(FOLDER)",
    )


class SharedLoading:
    """Shares each layer of a model as soon as the last of its weights was loaded.

    Args:
        device: where a layer's weights come together, and its part stays.
        trained: whether all weights will be trained; otherwise layers are frozen.
        compute: as in `share_layers`.
    """

    def __init__(self, device: torch.device, trained: bool = False, compute: Compute = Compute.DTYPE) -> None:
        self.device, self._trained, self._compute = device, trained, compute
        self._model: Any = None
        self._shared: ShardedLayers | None = None
        self._layers: list[nn.Module] = []
        self._layer_of: dict[str, int] = {}
        self._missing: Counter[int] = Counter()

    def begin(self, model: Any, names: Iterable[str]) -> None:
        """Begin with a model without weights.

        Args:
            names: of all that will arrive. A layer none of whose weights is among them stays whole, and so do all where
                layers have weights in common.
        """
        self._model, self._layers = model, list(decoder_layers(model))
        if _elsewhere(model):
            return
        numbers = {id(layer): number for number, layer in enumerate(self._layers)}
        paths = {f"{path}.": numbers[id(module)] for path, module in model.named_modules() if id(module) in numbers}
        self._layer_of = {name: number for name in names for path, number in paths.items() if name.startswith(path)}
        self._missing = Counter(self._layer_of.values())
        if len(self._missing) == len(self._layers):
            self._shared = shard(model, decoder_layers(model), self.device)

    def arrived(self, name: str) -> None:
        """Tell that the model has a weight now."""
        number = self._layer_of.get(name)
        if number is None or self._shared is None:
            return
        self._missing[number] -= 1
        if not self._missing[number]:
            layer = self._layers[number].requires_grad_(self._trained)
            groups = _groups(self._model, layer, set(), self._trained, self.device, self._compute)
            self._shared.add(number, layer, groups)


def _elsewhere(base: Any) -> set[int]:
    """Return the identities of parameters that several layers have, or the embeddings: these stay whole."""
    layers = decoder_layers(base)
    owners = Counter(id(p) for layer in layers for p in {id(p): p for p in layer.parameters()}.values())
    embeddings = {id(p) for p in base.get_input_embeddings().parameters()}
    return {identity for identity, count in owners.items() if count > 1 or identity in embeddings}


def _groups(
    base: Any, layer: nn.Module, elsewhere: set[int], trained: bool, device: torch.device, compute: Compute
) -> WeightGroups:
    """List a layer's frozen, or trained, weights, those of one product together."""
    family = check_config(base.config)
    if family.generic:
        return weight_groups(layer, [], elsewhere, trained)
    merged = []
    for block in family.blocks(layer):
        groups = [[base_of(layer.get_submodule(block.path(p))) for p in group] for group in block.kind.linears]
        merged += groups
        if compute.in_8_bits:
            for linear in (linear for group in groups for linear in group if id(linear.weight) not in elsewhere):
                _prepare_codes(linear, device, compute)
    return weight_groups(layer, merged, elsewhere, trained)


def _prepare_codes(linear: Any, device: torch.device, compute: Compute) -> None:
    """Keep of a linear's frozen weight what its 8-bit products multiply: its codes, if both products read them and it
    isn't in 4 bits. Otherwise codes are written out for each product, and the scales of rows, which a part doesn't
    tell, are kept. Sizes that don't fit 8 bits are refused by `attach`.
    """
    weight = linear.weight
    if has_own_codes(weight):
        return
    if is_nf4(weight) or not compute.forward_in_fp8:
        if not is_nf4(weight) or linear.in_features % weight.blocksize == 0:
            setattr(weight, ROW_SCALES, row_scales(weight).to(device))
        return
    made = nn.Parameter(as_codes(weight, device), requires_grad=False)
    setattr(made, FIRST, first_values(weight).to(device))
    linear.weight = made
