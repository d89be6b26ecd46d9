"""Count what a process holds of a model whose layers' weights are shared by several (`parallel.sharded`).

A part of each layer rests with it, and two layers are whole in buffers: the one that computes and the next. What lies
outside the layers is whole in every process, adapters too. Of layers that are trained masters, gradients and the
optimiser's states are parts; one layer's gradients are whole, and in a buffer, while they are summed, besides those
that the next one's backward makes. Where GPUs copy them out of each other's memory, parts of products rest in 16 bits
as well, and one more part of a layer's gradients is there while it is added.
"""

from __future__ import annotations

from collections.abc import Mapping

from pronghorn.families.layer_spec import LayerSpec
from pronghorn.memory.workload import NF4_BYTES, ModelDims, TrainSetup
from pronghorn.parallel.sharded import BUFFERS
from pronghorn.parallel.unit import MASTER_BYTES, NARROW


def gathered_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count the bytes of a layer's weights as they are gathered: as they are stored, but for the float32 masters of
    fused products, which travel in 16 bits."""
    if setup.method != "full":
        return kept_bytes(layer, setup)
    narrow = layer.linear_weights if setup.fused and setup.itemsize < MASTER_BYTES else 0
    return MASTER_BYTES * layer.parameters - (MASTER_BYTES - setup.itemsize) * narrow


def kept_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count the bytes of a layer's weights as processes keep them, all parts together."""
    if setup.method == "full":
        return MASTER_BYTES * layer.parameters
    b, linear = setup.itemsize, layer.linear_weights
    of_a_number = NF4_BYTES if setup.method == "qlora" else b if setup.linear_bytes is None else setup.linear_bytes
    size = (layer.parameters - linear - layer.expert_weights) * b + linear * of_a_number
    return int(size + layer.expert_weights * (b if setup.expert_bytes is None else setup.expert_bytes))


def holds_parts_of_gradients(setup: TrainSetup) -> bool:
    """Tell whether a process has room for its parts of the layers' gradients all the time."""
    return setup.processes > 1 and setup.method == "full"


def shared(resting: Mapping[str, int], dims: ModelDims, setup: TrainSetup) -> dict[str, int]:
    """Return what rests with a process, given what would rest on a device that held the whole model."""
    layers = [kept_bytes(layer, setup) for layer in dims.layers]
    outside = max(resting["weights"] - sum(layers), 0)
    parts = -(-sum(layers) // setup.processes)
    gathered = BUFFERS * max(gathered_bytes(layer, setup) for layer in dims.kinds)
    found = {**resting, "weights": outside + parts, "gathered": gathered}
    if holds_parts_of_gradients(setup):
        part = -(-max(layers) // setup.processes)
        one = 2 * max(layers) + part
        if setup.copy_trained:
            products = sum(layer.linear_weights for layer in dims.layers)
            found["gathered"] += -(-products * NARROW.itemsize // setup.processes)
            one += part
        found["gradients"] = (outside if setup.accumulates else 0) + parts + one
        found["optimizer"] = resting["optimizer"] * (outside + parts) // resting["weights"]
    return found
