"""Estimate the milliseconds of a training step by kinds of layers: products at a sustained rate, all else by bytes.

    layer forward    2·T·N operations + attention + elementwise bytes        N: a layer's weights that a token meets
    layer backward   the same products for dX (and again for dW where weights are trained), twice the bytes
    head             logits and their gradient, chunk by chunk, in the forward pass

Fitted to four models on one H200, within 10 % of them (tests/memory/test_plan.py); elsewhere an estimate, which a
calibration scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pronghorn.families.layer_spec import GatedMLPSpec, LayerSpec, Linear, PerLayerInputSpec
from pronghorn.memory.devices import DeviceSpec
from pronghorn.memory.estimate import ModelDims, TrainSetup, buffer_bytes, in_integers, width_of
from pronghorn.memory.plan import Policy, followed

SUSTAINED = 0.87
"""Large products of a layer against the largest product."""
ELEMENTWISE = 0.75
"""Bandwidth of elementwise kernels against a plain copy."""
FP8 = 0.5
"""Time of products by 8-bit rows against bf16's: 5.29 and 10.60 ms for those of a layer of 8B."""
INT8 = 0.5
"""The same of 8-bit integers: 167.9 ms of 8B's step, where bf16 takes 314, and by TMA some 7 % less."""
PACKED = 1.3
"""Time of experts' products by Triton, from weights that are written out, against torch's of dense ones."""
FP8_EXPERTS = 0.5
"""Time of experts' products in 8 bits against torch's in bf16. By whole steps on one H200, of 12 layers of
Qwen3-30B-A3B and 16 of gpt-oss-20b: it says that `fp8_both` saves 14.0 and 44.0 ms, `fp8` 7.0 and 22.0, and they saved
16.8, 41.4, 9.9 and 23.3."""
INT8_EXPERTS = 0.53
"""The same of 8-bit integers: it says that they save 11.1 and 37.0 ms of those steps, and they saved 11.8 and 38.2."""
ATTENTION = 0.35
"""Attention's products against the largest product."""
DELTA_RULE = 0.082
"""The gated delta rule's products against the largest product. With it steps of Qwen3.5-4B, 9B and 12 layers of 35B-A3B
are predicted within 4 % of what one H200 took (343.6, 537.2, 127.1 ms); the rule's kernels alone have .146."""
GAPS = 0.27
"""Milliseconds of starting and ending kernels in a fused layer's forward, and as many in its backward."""
ROUTED_GAPS = 0.4
"""Milliseconds more of that where a layer has experts."""
HIDDEN = 0.9
"""The most of a copy to or from the host that other work hides."""
STOCK, STOCK_GAPS = 6.0, 3.5
"""Elementwise time of transformers' and PEFT's layers against the fused ones, and the least that a forward takes."""


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one layer."""

    forward: float
    backward: float
    """If it kept everything."""
    norms: float
    """Recomputing its norms."""
    gate_up: float
    """Recomputing gate and up."""
    recompute_layer: float
    """Its forward again, which in fused layers needs no product of down."""

    def extra(self, copy: float, buffers: int) -> dict[Policy, float]:
        """Return what the layer costs besides its forward and backward, by policy.

        An offloaded input goes out while its layer's forward runs and, with two buffers, comes back during the backward
        of the layer after it, which counts as alike; with one it comes back when its own layer is next.

        Args:
            copy: milliseconds of its input to the host, or back.
        """
        exposed = (1 - HIDDEN) * copy
        out = max(exposed, copy - self.forward)
        back = max(exposed, copy - self.recompute_layer - self.backward) if buffers > 1 else copy
        return {
            Policy.KEEP: 0.0,
            Policy.RECOMPUTE_NORMS: self.norms,
            Policy.RECOMPUTE_MLP: self.norms + self.gate_up,
            Policy.RECOMPUTE_LAYER: self.recompute_layer,
            Policy.OFFLOAD: self.recompute_layer + out + back,
        }


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step."""

    layers: tuple[LayerTimes, ...]
    """In order."""
    copy: float
    """One layer's input to the host, or back; 0 where memory is shared."""
    outside_layers: float
    """Embeddings, head, loss and optimiser."""

    def scaled(self, forward: float, backward: float, copy: float) -> StepTimes:
        """Scale all times to those measured on the second layer (of a single one: on that)."""
        known = self.layers[:2][-1]
        by = (forward + backward) / (known.forward + known.backward)
        kinds = {
            each: LayerTimes(
                forward / known.forward * each.forward, backward / known.backward * each.backward,
                by * each.norms, by * each.gate_up, forward / known.forward * each.recompute_layer,
            )
            for each in dict.fromkeys(self.layers)
        }  # fmt: skip
        return StepTimes(tuple(kinds[each] for each in self.layers), copy, by * self.outside_layers)

    def step(self, policies: Sequence[Policy], buffers: int = 2) -> float:
        """Return a whole step's time with one policy a layer."""
        kinds = {layer: layer.extra(self.copy, buffers) for layer in dict.fromkeys(self.layers)}
        pairs = zip(self.layers, followed(policies), strict=True)
        return self.outside_layers + sum(each.forward + each.backward + kinds[each][policy] for each, policy in pairs)


def step_times(dims: ModelDims, setup: TrainSetup, device: DeviceSpec) -> StepTimes:
    """Estimate the times of a step on a device."""
    t, h, b = setup.tokens, dims.hidden, setup.itemsize
    kinds = {layer: _layer_times(layer, setup, device) for layer in dims.kinds}
    rate, ms_per_byte = _rates(setup, device)
    head = (6 if setup.method == "full" else 4) * t * h * dims.vocab * rate + 4 * t * dims.vocab * b * ms_per_byte
    updated = dims.parameters if setup.method == "full" else 0
    outside = head + 30 * updated / device.bandwidth * 1e3 + 12 * t * h * b * ms_per_byte
    copy = buffer_bytes(dims, setup) / device.pcie * 1e3 if device.pcie else 0.0
    return StepTimes(tuple(kinds[layer] for layer in dims.layers), copy, outside)


def times_written(
    times: StepTimes, dims: ModelDims, setup: TrainSetup, other: TrainSetup, device: DeviceSpec
) -> StepTimes:
    """Return the times, of `setup`, with weights or codes kept or written out as `other` has them: as much faster or
    slower as the device's estimate."""
    before, after = (step_times(dims, each, device).layers for each in (setup, other))
    layers = (
        replace(layer, forward=layer.forward * b.forward / a.forward, backward=layer.backward * b.backward / a.backward)
        for layer, a, b in zip(times.layers, before, after, strict=True)
    )
    return replace(times, layers=tuple(layers))


def attention_share(dims: ModelDims, full: bool = False) -> float:
    """Return what attention takes of a document of one token against the products of one token: of n tokens it takes
    n² as much. Layers with a window, whose attention grows with the tokens, count as products only."""
    products = (6 if full else 4) * sum(layer.linear_weights for layer in dims.layers) / SUSTAINED
    widths = [
        layer.attention.query for layer in dims.layers if layer.attention is not None and layer.attention.window is None
    ]
    return 3.5 * 2 * sum(widths) / ATTENTION / max(products, 1)


def _rates(setup: TrainSetup, device: DeviceSpec) -> tuple[float, float]:
    """Return milliseconds of an operation of large products, and of a byte that elementwise kernels move."""
    rate = 1e3 / (device.matmul * SUSTAINED * (1 if setup.itemsize == 2 else 0.1))  # float32: no tensor cores
    return rate, 1e3 / (device.bandwidth * ELEMENTWISE) * (1 if setup.fused else STOCK)


def _layer_times(layer: LayerSpec, setup: TrainSetup, device: DeviceSpec) -> LayerTimes:
    t, h, i, b = setup.tokens, layer.hidden, width_of(layer), setup.itemsize
    experts = layer.experts
    rate, ms_per_byte = _rates(setup, device)
    ahead, back = (
        2 * t * rate * (linears + (slower * 3 * h * i if experts else 0))
        for linears, slower in (
            (_of_linears(layer, setup, True), _of_experts(setup, True)),
            (_of_linears(layer, setup, False), _of_experts(setup, False)),
        )
    )
    attention, moved = _mixer(layer, setup, device)
    norms = layer.norms * 2 * t * h * setup.stream_bytes * ms_per_byte
    around = t * (6 * h * setup.stream_bytes + (moved + 3 * i) * b) * ms_per_byte
    beside = setup.fused and not experts  # the activation reads and writes what gate and up add
    gated = () if experts else layer.feed_forward.groups[0]
    adapters = sum(t * _adapted(setup, group, beside and group == gated) * b for group in layer.groups) * ms_per_byte
    if experts:  # rows are gathered and combined, and read for each thin product beside
        rows = 2 * (experts.chosen + 1) * h
        thin = 3 * experts.chosen * h + 5 * i if setup.expert_rank else 0
        around, adapters = around + t * rows * b * ms_per_byte, adapters + 1.5 * t * thin * b * ms_per_byte
    gaps = GAPS + (ROUTED_GAPS if experts else 0.0) if setup.fused else 0.0
    # Weights in few bits are read as stored (NF4: half a byte) for each product, and two bytes, or a code, are written.
    # As timed, an integer of NF4 takes as long as four bytes; one of packed checkpoints is made of two.
    codes = (4 if setup.method == "qlora" else 5) if setup.int8 else 1
    in_8_bits = setup.forward_in_fp8 or setup.int8
    a_weight = setup.writes_forward * (setup.stored_bytes + (codes if in_8_bits else 2)) * ms_per_byte
    a_weight_back = setup.writes_backward * (setup.stored_bytes + (codes if setup.fp8 else 2)) * ms_per_byte
    packed = 0.0 if setup.expert_bytes is None else (b + setup.expert_bytes) * layer.expert_weights * ms_per_byte
    written, written_back = (each * layer.linear_weights + packed for each in (a_weight, a_weight_back))
    of_x, of_dy = (t * moved * ms_per_byte for moved in _quantised(layer, setup))
    forward = ahead + attention + norms + around + adapters + written + of_x + gaps
    trained = 2 if setup.method == "full" else 1
    backward = trained * back + 2.5 * attention + 1.5 * (norms + around) + adapters + written_back + of_dy + gaps
    if not setup.fused:
        forward, backward = max(forward, STOCK_GAPS), max(backward, STOCK_GAPS)
    of_down = 1.0 if experts else INT8 if setup.int8 else FP8 if setup.forward_in_fp8 else 1.0
    matrix = 2 * t * h * i * rate * of_down + a_weight * h * i
    # a Gemma layer's backward reads the product's norm
    spares = setup.fused and not layer.norms_after and not experts
    spared = matrix + 3 * t * h * setup.stream_bytes * ms_per_byte if spares else 0
    return LayerTimes(forward, backward, norms / layer.norms * layer.norms_before, 2 * matrix, forward - spared)


def _of_linears(layer: LayerSpec, setup: TrainSetup, forward: bool) -> float:
    """Return how many weights in 16 bits take as long as those of a layer's linears, forward or back."""
    if not setup.int8:
        return (FP8 if (setup.forward_in_fp8 if forward else setup.fp8) else 1.0) * layer.linear_weights
    return sum(
        (INT8 if in_integers(block, group)[0 if forward else 1] else 1.0) * linear.weights
        for block in layer.blocks
        for group in block.groups
        for linear in group
    )


def _quantised(layer: LayerSpec, setup: TrainSetup) -> tuple[int, int]:
    """Return the bytes a token that are moved to quantise what frozen weights are given, and their gradients: 1 where
    the kernel that makes a row writes its codes, 3 where a pass of its own reads 16 bits."""
    ahead = back = 0
    for block in layer.blocks if setup.fp8 else ():
        mlp, inside = isinstance(block, GatedMLPSpec), isinstance(block, PerLayerInputSpec)
        for group in block.groups:
            out, last = sum(each.out for each in group), group == block.groups[-1]
            on_the_way = len(block.groups[0]) > 1 and any(setup.rank(each.path) for each in block.groups[0])
            by_maker = (mlp and not on_the_way) or inside if last else layer.norms_before > 0 and not inside
            of_x = 1 if by_maker else 3
            of_dy = 1 if (layer.norms_after > 0 if last else mlp) else 3
            if setup.int8:
                of_x, of_dy = (3 * each for each in in_integers(block, group))
            ahead, back = ahead + of_x * group[0].inputs, back + of_dy * out
    if setup.fp8_experts and layer.experts:  # tokens and the activation; their gradients
        of_dh = 3 if setup.int8 else 1
        ahead += 3 * (layer.hidden + width_of(layer))
        back += 3 * layer.hidden + of_dh * 2 * width_of(layer)
    return ahead if setup.fp8_forward or setup.int8 else 0, back


def _of_experts(setup: TrainSetup, forward: bool) -> float:
    """Return how long experts' products take against those of linears in 16 bits, of the forward or of dx."""
    if setup.expert_forward_in_8_bits or (setup.fp8_experts and not forward):
        return INT8_EXPERTS if setup.int8 else FP8_EXPERTS
    return 1.0 if setup.expert_bytes is None else PACKED


def _mixer(layer: LayerSpec, setup: TrainSetup, device: DeviceSpec) -> tuple[float, int]:
    """Return the milliseconds of attention's scores or of the gated delta rule, and the elements a token that is moved
    around them."""
    t, attention, delta = setup.tokens, layer.attention, layer.delta
    if attention is not None:
        scores = 2 * t * min(setup.documents, t) * attention.query * 1e3 / (device.matmul * ATTENTION)
        return scores, (4 + 5 * attention.gated) * attention.query + 4 * attention.key_value
    if delta is None:
        return 0.0, 0
    chunk = 64 * (3 * delta.key_dim + 2 * delta.value_dim) + 3 * delta.key_dim * delta.value_dim
    rule = 2 * t * delta.value_heads * chunk * 1e3 / (device.matmul * DELTA_RULE)
    return rule, 4 * delta.convolved + 3 * delta.values


def _adapted(setup: TrainSetup, group: Sequence[Linear], beside: bool) -> int:
    """Count elements a token that LoRA on a merged product moves: x read, y read and written, unless done `beside`."""
    adapted = [linear for linear in group if setup.rank(linear.path)]
    return (adapted[0].inputs if adapted else 0) + (0 if beside else 2 * sum(linear.out for linear in adapted))
