"""Count the bytes of a layer whose MLP is computed in tiles of rows (`layers.tiles`), and what its time is made of.

The MLP keeps its input alone and its working memory is a tile's, so that the layer's backward peaks in the MLP where
rows are few, and in attention where they are many:

    in the MLP        what attention kept, x, dy, dx, and of one tile the norm's result, gate·up and the activation
    in attention      what attention kept, its norm's result and that's gradient, whose place dx takes, dy, d(q·k·v);
                      in the last layer dy of the supervised rows and of all

Experts and gated delta nets have no tiles: experts' rows are grouped by expert, a net's states go from row to row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pronghorn.families.layer_spec import AttentionSpec, GatedMLPSpec, LayerSpec
from pronghorn.families.spec import Attention, GatedMLP, ResidualBlock
from pronghorn.memory.plan import Policy
from pronghorn.memory.workload import TrainSetup

if TYPE_CHECKING:
    from pronghorn.memory.step_time import StepTimes


def is_tiled_kind(blocks: Iterable[ResidualBlock]) -> bool:
    """Tell whether a layer of these blocks can have its MLP in tiles: attention of its own keys, and one gated MLP."""
    kinds = [block.kind for block in blocks]
    if not (len(kinds) == 2 and isinstance(kinds[0], Attention) and isinstance(kinds[1], GatedMLP)):
        return False
    return not (kinds[0].gated or kinds[0].gives or kinds[0].reads)


def can_tile(layers: Iterable[LayerSpec], setup: TrainSetup) -> bool:
    """Tell whether all layers are of that kind, and fused."""
    return setup.fused and not setup.padded and all(map(_is_tiled, layers))


def _is_tiled(layer: LayerSpec) -> bool:
    attention = layer.attention
    if attention is None or [type(block) for block in layer.blocks] != [AttentionSpec, GatedMLPSpec]:
        return False
    return not (attention.gated or attention.gives_kv or attention.reads_kv)


def tiled_bytes(
    layer: LayerSpec, setup: TrainSetup, stored: Mapping[Policy, int], normed: int
) -> tuple[dict[Policy, int], dict[Policy, int]]:
    """Count, by policy, what a layer leaves between forward and backward, and the most that its backward has.

    Args:
        stored: by policy, with the MLP as a whole.
        normed: bytes of one norm's result.
    """
    t, h, b, stream = setup.tokens, layer.hidden, setup.itemsize, setup.stream_bytes
    mlp, attention, has_after = layer.feed_forward, layer.attention, layer.norms_after > 0
    assert isinstance(mlp, GatedMLPSpec) and attention is not None
    ranks = sum(setup.rank(linear.path) for group in mlp.groups for linear in group)
    keep = stored[Policy.KEEP] - normed - t * (b * (2 * mlp.width + ranks + h * has_after) + 4 * layer.norms // 2)
    parts = {Policy.KEEP: keep, Policy.RECOMPUTE_NORMS: keep - normed, Policy.RECOMPUTE_MLP: keep - normed}
    left = {policy: parts.get(policy, size) for policy, size in stored.items()}
    states = 2 * t * h * stream  # the gradients of a block's result and of its input
    in_mlp = {policy: parts.get(policy, keep - normed) + states + _tile(layer, setup) for policy in left}

    apart = t * h * b if has_after or stream != b else 0  # the former as products read it
    rotated = t * attention.query * b if attention.head_norms else 0  # q is made again from what its product left
    d_qkv = t * b * (attention.query + 2 * attention.key_value)
    d_qkv += t * b * sum(setup.rank(linear.path) for linear in attention.groups[0])  # and what adapters need of it
    # the product's weight, or its gradient's codes, are gone when the last layer's dy of all rows is made
    projected = attention.projected
    product = (1 if setup.fp8 else b) * h * projected * setup.writes_backward + t * projected * setup.fp8
    last = max(t * h * stream * (1 if stream == b else 2), product)
    in_attention = keep + apart + rotated + d_qkv + t * h * b + last  # the MLP's input has made room for dy
    return left, {policy: max(size, in_attention) for policy, size in in_mlp.items()}


def _tile(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count what comes and goes in the backward of a tile, and its gradients beside their sums."""
    h, b, rows = layer.hidden, setup.itemsize, min(setup.mlp_rows, setup.tokens)
    mlp = layer.feed_forward
    assert isinstance(mlp, GatedMLPSpec)
    products = products_bytes(mlp.width, layer, setup, rows, 0 if setup.fp8 else rows * h * b)
    linears = [linear for group in mlp.groups for linear in group]
    full = setup.method == "full"
    trained = sum(x.weights if full else setup.rank(x.path) * (x.out + x.inputs) for x in linears)
    norms = 1 + (2 if layer.norms_after else 0)
    return rows * b * (2 * mlp.width + norms * h) + products + 4 * trained


def products_bytes(width: int, layer: LayerSpec, setup: TrainSetup, rows: int, operand: int) -> int:
    """Count what the products of an MLP's backward need at most beside gate·up: of down's input gradient, then of
    gate's and up's.

    Args:
        operand: bytes of what down's input gradient is made from, where that isn't there anyway.
    """
    h, b = layer.hidden, setup.itemsize
    # gradients' codes, those of d(gate·up) made with it, beside the activation, but for integers', which its product
    # makes; and weights that are written out
    codes = (rows * h, 2 * rows * width) if setup.fp8 else (0, 0)
    # integers of a packed checkpoint are made of its 16 bits, transposed
    of_16_bits = setup.int8 and setup.method != "qlora"
    a_weight = (2 * b + 1 if of_16_bits else 1) if setup.fp8 else b
    written = a_weight * h * width if setup.writes_backward else 0
    activations = rows * width * b * (1 if setup.fused else 3)
    of_down = operand + activations + max(codes[0] + written, 0 if setup.int8 else codes[1])
    return max(of_down, rows * h * b + codes[1] + 2 * written)


def tiled_times(times: StepTimes) -> StepTimes:
    """Return the times with gate and up computed again in every backward, and in no recomputation."""
    layers = {
        layer: replace(
            layer,
            backward=layer.backward + layer.gate_up + layer.norms / 2,
            norms=layer.norms / 2,
            gate_up=0.0,
            recompute_layer=max(layer.recompute_layer - layer.gate_up - layer.norms / 2, 0.0),
        )
        for layer in dict.fromkeys(times.layers)
    }
    return replace(times, layers=tuple(layers[layer] for layer in times.layers))
