"""Count what a rank holds of a model whose layers' weights are sharded over ranks (FSDP2).

Weights rest as shards. A layer's are gathered while it computes, and the next one's meanwhile: in their storage where
they are frozen, in the products' dtype where float32 masters are trained. Embedding and head are gathered once a step.
Gradients of trained weights are reduced layer by layer, in float32. Adapters stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from pronghorn.families.layer_spec import LayerSpec
from pronghorn.memory.workload import NF4_BYTES, ModelDims, TrainSetup


def gathered_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count the bytes of a layer's weights as they are gathered."""
    b, linear = setup.itemsize, layer.linear_weights
    of_a_number = NF4_BYTES if setup.method == "qlora" else b if setup.linear_bytes is None else setup.linear_bytes
    size = (layer.parameters - linear - layer.expert_weights) * b + linear * of_a_number
    size += layer.expert_weights * (b if setup.expert_bytes is None else setup.expert_bytes)
    if setup.fp8 and setup.method != "qlora":  # codes in two layouts, and scales of rows
        size += (1 if setup.own_codes else 2) * linear + 6 * sum(each.out for each in layer.linears)
    elif setup.fp8:
        size += 10 * sum(each.out for each in layer.linears)
    return int(size)


def outside_bytes(dims: ModelDims, setup: TrainSetup) -> int:
    """Count the bytes of embedding, head and last norm as they are gathered."""
    return dims.outside * setup.itemsize


def reduced_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count the bytes of a layer's gradients as they are reduced; 0 where its weights are frozen."""
    return 4 * layer.parameters if setup.method == "full" else 0


def sharded(resting: Mapping[str, int], dims: ModelDims, setup: TrainSetup) -> dict[str, int]:
    """Return what rests on a rank, given what would rest on a device that held the whole model."""
    full, shards = setup.method == "full", setup.shards
    split = {"weights", "gradients", "optimizer"} if full else {"weights"}
    sizes = {kind: -(-size // shards) if kind in split else size for kind, size in resting.items()}
    layers = [gathered_bytes(layer, setup) for layer in dims.layers]
    two = max((one + following for one, following in pairwise(layers)), default=layers[0])
    sizes["gathered"] = two + outside_bytes(dims, setup)
    if full:  # one layer's gradients as the backward leaves them, and as they are sent
        sizes["reduced"] = max(setup.itemsize * each.parameters + reduced_bytes(each, setup) for each in dims.kinds)
    return sizes
