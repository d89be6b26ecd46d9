"""Count the bytes of a training step, a kind of layer at a time: what rests on the device, and where the step peaks.

Going backward, layer i has in memory what the layers before it stored, what its own backward reads (K, stored or made
again), and one layer's working memory, W. Before that stands the head. So

    peak = resting + max( Σ_j s_j + head,  max_i ( Σ_{j<i} s_j + K_i + W_i ) )      s_j: what layer j's policy stores

Tensors of the fused layers: `layers.attention` and `layers.mlp`; of the stock ones (`memory.stock_bytes`): counted with
`saved_tensors_hooks` (tests/memory/test_plan.py).
The allocator's peaks that this was checked against: benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pronghorn.errors import UnsupportedError
from pronghorn.families.layer_spec import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    GatedDeltaSpec,
    GatedMLPSpec,
    LayerSpec,
    Linear,
)
from pronghorn.memory.plan import Policy, followed
from pronghorn.memory.sharded_bytes import holds_parts_of_gradients, shared
from pronghorn.memory.stock_bytes import dora_bytes, stock_bytes
from pronghorn.memory.tiles import products_bytes, tiled_bytes
from pronghorn.memory.workload import NF4_BYTES as NF4_BYTES
from pronghorn.memory.workload import Method as Method
from pronghorn.memory.workload import ModelDims as ModelDims
from pronghorn.memory.workload import TrainSetup as TrainSetup

GIB = 2**30
CONTEXT_BYTES = int(0.6 * GIB)
"""Of the process, outside torch's allocator: CUDA's context, loaded kernels."""
LIBRARY_BYTES = 64 * 2**20
"""cuBLAS workspaces in torch's allocator: 32 MiB for the forward's thread and 32 for the backward's."""
POOL = 0.05
"""Share of the activations that CUDA graphs' own memory holds besides, which nothing else can use, at most: 0.6B's and
1B's hold less."""
FRAGMENTATION = 20 * 2**20
"""Bytes a layer that the allocator holds in pieces too small for what comes. Growing segments come and go by pages of
so much, and of a free block those at its ends stay. 8B needed 7 MiB or less where not all is recomputed."""


def width_of(layer: LayerSpec) -> int:
    """Return the width of a token's activation in the MLP: of all its experts together."""
    block = layer.feed_forward
    return block.width if isinstance(block, GatedMLPSpec) else block.chosen * block.width


def resting_bytes(dims: ModelDims, setup: TrainSetup) -> dict[str, int]:
    """Count what is on the device all the time, by kind; gradients too, as from the second micro-batch on."""
    p, b, full = dims.parameters, setup.itemsize, setup.method == "full"
    linear = sum(layer.linear_weights for layer in dims.layers)
    weights = p * (setup.master_bytes if full else b)
    if setup.method == "qlora":
        weights = (p - linear) * b + int(linear * NF4_BYTES)
    if setup.expert_bytes is not None:
        weights -= int(sum(layer.expert_weights for layer in dims.layers) * (b - setup.expert_bytes))
    if setup.linear_bytes is not None:
        weights -= int(linear * (b - setup.linear_bytes))
    here = [pair for layer in dims.layers for pair in _groups(layer)]
    if setup.written_once and setup.in_few_bits:
        weights += b * sum(
            _weights(group) for block, group in here if not (setup.int8 and in_integers(block, group)[0])
        )
    if setup.int8:
        weights += sum(_integers(*pair, setup.in_few_bits and not setup.written_once) for pair in here)
    elif setup.fp8:  # codes in a layout a product, unless they are written out, and scales of rows
        rows = sum(linear.out for _, group in here for linear in group)
        layouts = 2 if setup.fp8_forward and not setup.own_codes else 1
        layouts -= setup.processes > 1  # shared ones are turned for each product
        weights += 10 * rows if setup.writes_codes else layouts * sum(_weights(group) for _, group in here) + 6 * rows
    if setup.fp8_experts:  # in a layout a product, with a scale a column of what it gives
        both = setup.expert_forward_in_8_bits
        for layer in dims.layers:
            if experts := layer.experts:
                columns = layer.hidden + experts.width
                columns += both * (layer.hidden + 2 * experts.width)
                weights += (1 + both) * layer.expert_weights + 4 * experts.count * columns
                weights += setup.int8 * b * (2 * layer.hidden + 3 * experts.width)  # factors of what goes in
    adapters = sum(count * setup.adapters(layer) for layer, count in dims.kinds.items())
    copies = 0  # of A and B in the products' dtype, B of a merged product with zeros beside each block
    for layer, count in dims.kinds.items() if setup.fused else ():
        for _, group in _groups(layer):
            widths = group[0].inputs + sum(linear.out for linear in group)
            copies += count * b * widths * sum(setup.rank(linear.path) for linear in group)
    copies = int(copies * min(setup.trained_share, 1.0))
    elements = round(p * setup.trained_share) if full else adapters
    trained = (setup.master_bytes if full else setup.adapter_itemsize) * elements + b * setup.trained_whole
    states = setup.optimizer_bytes
    if states is None:
        states = 8 * (elements + setup.trained_whole)
    rotary = sum({layer.attention.head_dim for layer in dims.kinds if layer.attention})
    # layers' inputs; where their norms are trained, those are float32 and kept with what they were made from
    own = [layer.per_layer_input.width for layer in dims.layers if layer.per_layer_input]
    inputs = 12 * sum(own) + 8 * len(own) if full else b * sum(own)
    resting = {
        "weights": weights,
        "adapters": 0 if full else trained + copies,
        "gradients": trained * (2 if setup.distributed else 1),
        "optimizer": states,
        "libraries": LIBRARY_BYTES,
        "batch": setup.tokens * (2 * rotary * b + inputs + 40),  # with RoPE's cosines and sines
    }
    return resting if setup.processes == 1 else shared(resting, dims, setup)


def in_integers(block: BlockSpec, group: tuple[Linear, ...]) -> tuple[bool, bool]:
    """Tell whether the forward and the input gradient of linears that share an input multiply in 8-bit integers.

    The forward of queries, keys and values does not, and neither does that of gates or of what experts share.
    """
    if isinstance(block, ExpertsSpec):
        return False, False
    if group == block.groups[-1] or not isinstance(block, AttentionSpec | GatedDeltaSpec):
        return True, True
    return False, group == block.groups[0]


def _groups(layer: LayerSpec) -> list[tuple[BlockSpec, tuple[Linear, ...]]]:
    """List linears that share an input, with their block, but for shared experts', which transformers computes."""
    return [(block, group) for block in layer.blocks if not isinstance(block, ExpertsSpec) for group in block.groups]


def _weights(group: tuple[Linear, ...]) -> int:
    return sum(linear.weights for linear in group)


def _integers(block: BlockSpec, group: tuple[Linear, ...], written: bool) -> int:
    """Count the bytes that a group's products in 8-bit integers hold: codes in a layout a product, unless these are
    written out, scales of rows and factors of columns."""
    out, inputs = sum(each.out for each in group), group[0].inputs
    codes = 4 * (out + inputs) if written else _weights(group)  # or both inverses, beside scales and factors
    forward, backward = in_integers(block, group)
    return forward * (codes + 4 * out + 2 * inputs) + backward * (codes + 4 * inputs + 2 * out)


@dataclass(frozen=True)
class LayerBytes:
    """The sizes of one layer in the formula above, by policy."""

    stored: Mapping[Policy, int]
    read: Mapping[Policy, int]
    """K of the formula."""
    working: int
    """W of the formula."""

    @classmethod
    def of(cls, layer: LayerSpec, setup: TrainSetup, parts: bool = True) -> LayerBytes:
        """Count a layer's bytes; without `parts` it is kept or recomputed as a whole."""
        stored = stored_bytes(layer, setup, parts)
        if setup.mlp_rows:
            return cls(*tiled_bytes(layer, setup, stored, setup.tokens * _normed_bytes(layer, setup)), 0)
        return cls(stored, read_bytes(layer, setup, stored), working_bytes(layer, setup))


def stored_bytes(layer: LayerSpec, setup: TrainSetup, parts: bool = True) -> dict[Policy, int]:
    """Count what a layer leaves on the device between forward and backward, by policy.

    Raises:
        UnsupportedError: a layer with experts or a gated delta net that isn't Pronghorn's: what transformers' keeps
            isn't counted.
    """
    if (layer.experts or layer.delta) and not setup.fused:
        what = "experts without packed rows and fused attention" if layer.experts else "gated delta nets unfused"
        problem = f"no plan is made: what {what} keep isn't counted"
        raise UnsupportedError(problem, "choose memory.gradient_checkpointing yourself")
    t, h, b = setup.tokens, layer.hidden, setup.itemsize
    keep = _fused_bytes(layer, setup) if setup.fused else stock_bytes(layer, setup, width_of(layer))
    served = {Policy.KEEP: keep}
    if parts and setup.fused and not layer.experts:
        without_norms = keep - 2 * t * _normed_bytes(layer, setup)
        without_mlp = without_norms - 2 * t * width_of(layer) * b
        served |= {Policy.RECOMPUTE_NORMS: without_norms, Policy.RECOMPUTE_MLP: without_mlp}
    given = _given_bytes(layer, setup)
    return served | {Policy.RECOMPUTE_LAYER: t * h * setup.stream_bytes + given, Policy.OFFLOAD: given}


def read_bytes(layer: LayerSpec, setup: TrainSetup, stored: Mapping[Policy, int]) -> dict[Policy, int]:
    """Count K, what a layer's backward has of its forward at its peak, by policy. Norms' results that weren't stored
    are made again after it, but for the one that gate·up is made again from."""
    one = setup.tokens * _normed_bytes(layer, setup) * (setup.fused and not layer.experts)
    results = {Policy.KEEP: 0, Policy.RECOMPUTE_NORMS: 2}
    return {policy: stored[Policy.KEEP] - results.get(policy, 1) * one for policy in stored}


def _normed_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count a token's input of a block's products, where that isn't the residual stream itself."""
    is_stream = layer.norms_before == 0 and setup.stream_bytes == setup.itemsize
    return 0 if is_stream else layer.hidden * setup.itemsize


def _given_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count the keys and values that a layer gives to later ones, which are there until its own backward."""
    attention = layer.attention
    return 2 * setup.tokens * attention.key_value * setup.itemsize if attention and attention.gives_kv else 0


def _fused_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count norms' inputs and outputs, what the mixer keeps, gate·up, x·Aᵀ of every product; of a router the
    probabilities, the chosen ones with their sum, and the order of the rows."""
    b, experts = setup.itemsize, layer.experts
    ranks = sum(setup.rank(linear.path) for linear in layer.linears)
    token = layer.hidden * (max(layer.norms_before, 2) * setup.stream_bytes + b * layer.norms_after)
    token += 4 * layer.norms
    token += 2 * _normed_bytes(layer, setup)
    token += b * (2 * width_of(layer) + ranks)
    if layer.per_layer_input:  # the norm's input is counted, the block's is not yet
        token += layer.hidden * setup.stream_bytes + b * layer.per_layer_input.width
    if experts and experts.beside:  # one more norm's result; the router norms float32 and scales what it chose
        token += b * (layer.hidden + 2 * layer.mlp_width + experts.chosen) + 4 * experts.chosen + 4
        token += 4 * layer.hidden if b == 2 else 0
        token += (8 if b == 4 else b) * layer.hidden + 8 if setup.method == "full" else 0  # of the router's scale
    if experts:
        token += 2 * b * experts.chosen * setup.expert_rank + 4 * experts.count + 32 * experts.chosen + 4
        token += _shared_bytes(experts, layer.hidden, setup) if experts.shared else 0
    # of float32 masters, until the backward; of experts they are made for each product, of shared ones gathered
    copies = b * layer.linear_weights if setup.narrows and setup.processes == 1 else 0
    if experts and setup.narrows:  # and of the router's, with what it is given
        token, copies = token + b * layer.hidden, copies + b * layer.hidden * experts.count
    elif experts and experts.float32_router and b < 4:  # what its copies are of is trained, or the weight is frozen
        token += 4 * layer.hidden * (setup.method == "full")
        copies += 4 * layer.hidden * experts.count
    mixers = sum(_mixer_bytes(block, setup) for block in layer.blocks)
    return setup.tokens * token + mixers + copies + _given_bytes(layer, setup)


def _mixer_bytes(block: BlockSpec, setup: TrainSetup) -> int:
    """Count q·k·v with gates, attention's output and log-sum-exp; or what the products of a gated delta net left, the
    rule's output, and its states."""
    t, b = setup.tokens, setup.itemsize
    if isinstance(block, AttentionSpec):
        return t * (b * (block.query + block.projected) + 4 * block.heads)
    if isinstance(block, GatedDeltaSpec):
        return t * b * (block.convolved + 2 * block.values + 2 * block.value_heads) + rule_bytes(block, setup)
    return 0


def rule_bytes(block: GatedDeltaSpec, setup: TrainSetup) -> int:
    """Count what the gated delta rule's kernels keep: w, N, the inverse and decays' sums of each value head, one over
    the lengths of q and k, and the states at chunks' starts."""
    t, b, chunk = setup.tokens, setup.itemsize, 64
    token = block.value_heads * (b * (block.key_dim + block.value_dim + chunk) + 4) + 8 * block.key_heads
    return t * token + t // chunk * block.value_heads * block.key_dim * block.value_dim * b


def _shared_bytes(experts: ExpertsSpec, hidden: int, setup: TrainSetup) -> int:
    """Count what transformers and PEFT keep of a token in the expert that all go through: gate, its activation, up, the
    result and its gate; and what adapters are given, in 16 bits a float32 copy each."""
    b, (gate_up, (down,)) = setup.itemsize, experts.groups
    ranks = sum(setup.rank(linear.path) for linear in (*gate_up, down))
    token = b * (3 * experts.shared + (hidden + 1) * experts.gated_shared) + (4 - b) * ranks
    if setup.method == "full":  # in 16 bits each product has a copy of what it is given
        return token + b * experts.shared + b * hidden * (2 + experts.gated_shared) * setup.narrows
    inputs = sum(linear.inputs for linear in gate_up if setup.rank(linear.path)) if b < 4 else 0
    return token + 4 * (inputs + (down.inputs if setup.rank(down.path) else 0))


def working_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count W, the most that comes and goes inside one layer's backward, which is in its MLP.

    The stream's gradient, down's operand and the activation, or its gradient; d(gate·up) takes gate·up's place. Of
    experts d(gate·up), in 8 bits its codes, either the activation or the rows' gradients, and the packed ones that are
    written out.
    """
    from pronghorn.kernels.mxfp4 import SCRATCH

    t, h, i, b = setup.tokens, layer.hidden, width_of(layer), setup.itemsize
    # the gradients of another layer's keys and values, summed so far
    attention = layer.attention
    summed = 2 * t * attention.key_value * b if attention and attention.reads_kv else 0
    if layer.experts:
        scratch = 0 if setup.expert_bytes is None else min(SCRATCH, 2 * b * layer.expert_weights // 3)
        quantised = 2 * i + 4 * layer.experts.chosen if setup.fp8_experts else 0  # d(gate·up)
        # integers are made when the activation is gone
        rows = max(quantised + b * layer.experts.chosen * h, b * i + (0 if setup.int8 else quantised))
        return summed + t * (h * (setup.stream_bytes + b) + b * 2 * i + rows) + scratch
    # in 8 bits down's operand may be the stream's gradient itself
    operand = 0 if setup.fp8 and not layer.norms_after and setup.stream_bytes == b else t * h * b
    found = summed + t * h * setup.stream_bytes + products_bytes(i, layer, setup, t, operand)
    return max(found, dora_bytes(layer, setup))


def head_bytes(dims: ModelDims, setup: TrainSetup) -> int:
    """Count the last hidden states, before and after the norm, the supervised ones, their gradients, and a chunk of
    logits; padded batches have all logits by transformers' loss: float32, their log-softmax and its gradient."""
    import torch

    from pronghorn.kernels.linear_cross_entropy import rows_of_a_chunk

    dtype = torch.bfloat16 if setup.itemsize == 2 else torch.float32
    table = dims.vocab * dims.hidden
    rows = min(rows_of_a_chunk(torch.empty(dims.vocab, dims.hidden, dtype=dtype, device="meta")), setup.tokens)
    logits = dims.vocab * (setup.tokens * 12 if setup.padded else rows * setup.itemsize)
    if setup.logits_bytes and not setup.padded:
        logits = setup.logits_bytes
    states = setup.tokens * dims.hidden * (2 * setup.stream_bytes + 2 * setup.itemsize)
    # dW in float32, and either its chunk's and W's copy or, in 16 bits, its scaled ones
    scaled = 10 if setup.stream_bytes == setup.itemsize == 2 else 8
    trained = scaled if setup.method == "full" else 10 if setup.trained_whole >= table else 0
    return states + logits + trained * table


def buffer_bytes(dims: ModelDims, setup: TrainSetup) -> int:
    """Count one device buffer for an offloaded layer's input; pinned host memory takes as much a layer."""
    return setup.tokens * dims.hidden * setup.stream_bytes


@dataclass(frozen=True)
class MemoryModel:
    """What a choice of policies is made from: the sizes of the formula above, in bytes."""

    resting: Mapping[str, int]
    layers: Sequence[LayerBytes]
    """In order."""
    head: int
    buffer: int
    graph: int = 0
    """What CUDA graphs take more than layers without, or less, where every layer keeps everything."""
    fragmentation: int = 0
    """What the allocator holds and can't use."""
    layer_grads: Sequence[int] = ()
    """The layers' gradients that are there when each layer's backward peaks, its own among them; () for none, where
    they rest."""
    embedding_grads: tuple[int, int] = (0, 0)
    """Gradients of a trained head and embedding, besides: from the head's backward on, and when the embedding's has
    run. If they are one, autograd holds the head's until then."""

    @classmethod
    def of(cls, dims: ModelDims, setup: TrainSetup) -> MemoryModel:
        """Count the sizes for a model that is trained in this way."""
        resting, head = resting_bytes(dims, setup), head_bytes(dims, setup)
        by_kind = {layer: LayerBytes.of(layer, setup, not dims.has_experts) for layer in dims.kinds}
        layers = [by_kind[layer] for layer in dims.layers]
        kept = sum(layer.stored[Policy.KEEP] for layer in layers)
        graphed = sum(layer.stored.get(Policy.RECOMPUTE_NORMS, layer.stored[Policy.KEEP]) for layer in layers)
        more = int((1 + POOL) * graphed) - kept + max(layer.working for layer in layers)
        graph = more + resting["gradients"] + LIBRARY_BYTES if setup.graph else 0
        table, tables = dims.vocab * dims.hidden * setup.master_bytes, 1 if dims.tied else 2
        table *= setup.method == "full"
        layer_grads: list[int] = []
        if holds_parts_of_gradients(setup):  # what a layer's backward makes goes into parts, then
            layer_grads = [4 * layer.parameters for layer in dims.layers]
        elif not setup.accumulates:  # each layer's share, from the last on
            grads = max(resting.pop("gradients") - tables * table, 0)
            upto = list(accumulate(setup.trained(layer) for layer in reversed(dims.layers)))
            layer_grads = [grads * elements // max(upto[-1], 1) for elements in reversed(upto)]
        ends = table, (3 - tables) * table if setup.accumulates else 2 * table
        gate_up = (2 * setup.tokens * width_of(layer) * setup.itemsize for layer in dims.layers)
        fragmentation = sum(min(FRAGMENTATION, size) for size in gate_up)
        return cls(resting, layers, head, buffer_bytes(dims, setup), graph, fragmentation, layer_grads, ends)

    def peak(self, policies: Sequence[Policy], buffers: int = 2) -> dict[str, int]:
        """Count bytes by kind at the moment of the peak, as torch's allocator does; their sum is the peak.

        With two buffers one input more is on its way, or there, between the backwards of two layers that offload.

        Args:
            policies: one a layer, from the first.
            buffers: inputs that come back at a time (`Plan.buffers`).
        """
        stored = [layer.stored[policy] for layer, policy in zip(self.layers, followed(policies), strict=True)]
        moments, before, gone = [(sum(stored), self.head, 0, 0)], 0, 0
        for i, (layer, policy, bytes_) in enumerate(zip(self.layers, policies, stored, strict=True)):
            ahead = self.buffer if buffers == 2 and 0 < gone < policies.count(Policy.OFFLOAD) else 0
            working = layer.read[policy] - bytes_ + layer.working
            moments.append((before + bytes_, working, ahead, self.grads(i)))
            before, gone = before + bytes_, gone + (policy is Policy.OFFLOAD)
        moments.append((0, 0, 0, self.last_grads))
        activations, working, ahead, made = max(moments, key=sum)
        found = {**self.resting, "activations": activations, "working": working, "buffers": ahead}
        found["gradients"] = found.get("gradients", 0) + made
        if set(policies) == {Policy.KEEP}:
            found["CUDA graph"] = max(0, self.graph)  # the first steps run without
        return {kind: size for kind, size in found.items() if size}

    def grads(self, layer: int) -> int:
        """Return the gradients that don't rest, when a layer's backward peaks."""
        return self.embedding_grads[0] + (self.layer_grads[layer] if self.layer_grads else 0)

    @property
    def last_grads(self) -> int:
        """Those when the embedding's backward has run."""
        return self.embedding_grads[1] + (self.layer_grads[0] if self.layer_grads else 0)

    def process(self, kinds: Mapping[str, int]) -> int:
        """Return what the process takes when torch counts `kinds`: what the allocator can't use and CUDA's context
        besides."""
        return sum(kinds.values()) + self.fragmentation + CONTEXT_BYTES
