"""Bytes of a training step by kind, from the model's shape: what rests on the device, and where the step peaks.

Going backward, layer i has in memory what the layers before it stored, what its own backward reads (K, stored or made
again), and one layer's working memory, W. Before that stands the head. So

    peak = resting + max( Σ_j s_j + head,  max_i ( Σ_{j<i} s_j + K_i + W ) )      s_j: what layer j's policy stores

Tensors of the fused layers: `layers.attention` and `layers.mlp`; of the stock ones: counted with `saved_tensors_hooks`
(tests/test_plan.py).
The allocator's peaks that this was checked against: benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pronghorn.errors import UnsupportedError
from pronghorn.memory.plan import Policy, followed

GIB = 2**30
CONTEXT_BYTES = int(0.6 * GIB)
"""Of the process, outside torch's allocator: CUDA's context, loaded kernels."""
LIBRARY_BYTES = 64 * 2**20
"""cuBLAS workspaces in torch's allocator: 32 MiB for the forward's thread and 32 for the backward's."""
POOL = 0.05
"""Share of the activations that CUDA graphs' own memory holds besides, which nothing else can use, at most: 0.6B's and
1B's hold less."""
PIECES = 20 * 2**20
"""Bytes a layer that the allocator holds in pieces too small for what comes. Growing segments come and go by pages of
so much, and of a free block those at its ends stay. 8B needed 7 MiB or less where not all is recomputed."""

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linears with the same input, computed as one product."""

Method = Literal["lora", "qlora", "full"]


@dataclass(frozen=True)
class Experts:
    """A layer's experts, instead of gate, up and down."""

    count: int
    chosen: int
    """K: the experts of a token."""
    width: int
    """I of each."""


@dataclass(frozen=True)
class Shape:
    """What memory and time depend on in a decoder model."""

    layers: int
    linears: Mapping[str, tuple[int, int]]
    """(out, in) of a layer's linears."""
    heads: int
    kv_heads: int
    vocab: int
    norms: int
    """RMSNorms of `hidden` in a layer: 2, or 4 in Gemma."""
    qk_norm: bool
    parameters: int
    """All of them."""
    experts: Experts | None = None

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head."""
        return self.parameters - self.layers * self.layer_weights < 2 * self.vocab * self.hidden

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Linears with the same input."""
        return [names for names in GROUPS if names[0] in self.linears]

    @property
    def hidden(self) -> int:
        return self.linears["q_proj"][1]

    @property
    def intermediate(self) -> int:
        """Width of a token's activation: of all its experts together."""
        return self.experts.chosen * self.experts.width if self.experts else self.linears["gate_proj"][0]

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.linears["q_proj"][0]

    @property
    def key_value(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.linears["k_proj"][0]

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's linears, and of all experts."""
        return self.linear_weights + (3 * self.hidden * self.experts.width * self.experts.count if self.experts else 0)

    @property
    def active_weights(self) -> int:
        """Elements of a layer that a token meets."""
        return self.linear_weights + (3 * self.hidden * self.intermediate if self.experts else 0)

    @property
    def linear_weights(self) -> int:
        """Elements of a layer's linears."""
        return sum(rows * columns for rows, columns in self.linears.values())


@dataclass(frozen=True)
class Work:
    """How a model is trained, as far as memory and time depend on it."""

    tokens: int
    """T of a micro-batch: rows a step times max_seq_length. A packed row is always full, so every step is the worst."""
    method: Method = "lora"
    ranks: Mapping[str, int] | None = None
    """LoRA rank by linear; None for 16 on all."""
    expert_rank: int = 0
    """LoRA rank on the experts' weights."""
    itemsize: int = 2
    """Bytes of an element of the products: 2 in bf16 and fp16, 4 in float32."""
    fused: bool = True
    """Layers are Pronghorn's fused ones; else transformers' and PEFT's."""
    trained_whole: int = 0
    """Parameters of modules_to_save."""
    graph: bool = False
    """The layers run as CUDA graphs, which hold what comes and goes in their backward for themselves."""
    padded: int = 0
    """Rows of a micro-batch that is padded and goes transformers' way, through layers and loss; 0: it is packed."""
    distributed: bool = False
    """Under DDP, whose buckets hold all gradients once more."""
    accumulates: bool = True
    """A step has several micro-batches, so that gradients are there all the time; else they come layer by layer."""
    documents: int = 512
    """Mean tokens of a document, which attention's time depends on (memory doesn't)."""

    def rank(self, linear: str) -> int:
        """0 where nothing adapts the linear."""
        if self.method == "full":
            return 0
        return 16 if self.ranks is None else self.ranks.get(linear, 0)

    @property
    def stream_bytes(self) -> int:
        """Of an element between layers: float32 where float32 masters are trained under autocast."""
        return 4 if self.method == "full" else self.itemsize


def resting_bytes(shape: Shape, work: Work) -> dict[str, int]:
    """What is on the device all the time, by kind; gradients too, as from the second micro-batch on."""
    p, b, full = shape.parameters, work.itemsize, work.method == "full"
    linear = shape.layers * shape.linear_weights
    weights = p * (4 if full else b)
    if work.method == "qlora":  # 4 bits each, 8 of absmax for 64 elements, and 32 for 256 of those
        weights = (p - linear) * b + linear // 2 + linear // 64 + linear // 4096
    adapters = shape.layers * sum(work.rank(name) * sum(sizes) for name, sizes in shape.linears.items())
    if shape.experts:
        adapters += shape.layers * shape.experts.count * work.expert_rank * (2 * shape.hidden + 3 * shape.experts.width)
    copies = 0  # of A and B in the products' dtype, B of a merged product with zeros beside each block
    for names in shape.groups if work.fused else ():
        widths = shape.linears[names[0]][1] + sum(shape.linears[name][0] for name in names)
        copies += shape.layers * b * widths * sum(work.rank(name) for name in names)
    trained = 4 * (p if full else adapters) + b * work.trained_whole
    return {
        "weights": weights,
        "adapters": 0 if full else trained + copies,
        "gradients": trained * (2 if work.distributed else 1),
        "optimizer": 8 * ((p if full else adapters) + work.trained_whole),  # AdamW's, in float32
        "libraries": LIBRARY_BYTES,
        "batch": work.tokens * (2 * shape.query // shape.heads * b + 40),  # with RoPE's cosines and sines
    }


def stored_bytes(shape: Shape, work: Work) -> dict[Policy, int]:
    """What a layer leaves on the device between forward and backward, by policy.

    Raises:
        UnsupportedError: a layer with experts that isn't Pronghorn's: what transformers' keeps isn't counted.
    """
    if shape.experts and not work.fused:
        raise UnsupportedError(
            "layers with experts are counted packed and with fused attention only",
            "choose memory.gradient_checkpointing yourself",
        )
    t, h, b = work.tokens, shape.hidden, work.itemsize
    keep = _fused_bytes(shape, work) if work.fused else _stock_bytes(shape, work)
    without_norms = keep - 2 * t * h * b
    served = {Policy.KEEP: keep}
    if work.fused and not shape.experts:
        without_mlp = without_norms - 2 * t * shape.intermediate * b
        served |= {Policy.RECOMPUTE_CHEAP: without_norms, Policy.RECOMPUTE_MLP: without_mlp}
    return served | {Policy.RECOMPUTE_LAYER: t * h * work.stream_bytes, Policy.OFFLOAD: 0}


def read_bytes(shape: Shape, work: Work) -> dict[Policy, int]:
    """K: what a layer's backward has of its forward at its peak, by policy. Norms' results that weren't stored are made
    again after it, but for the one that gate·up is made again from."""
    stored = stored_bytes(shape, work)
    one = work.tokens * shape.hidden * work.itemsize * (Policy.RECOMPUTE_CHEAP in stored)
    results = {Policy.KEEP: 0, Policy.RECOMPUTE_CHEAP: 2}
    return {policy: stored[Policy.KEEP] - results.get(policy, 1) * one for policy in stored}


def _fused_bytes(shape: Shape, work: Work) -> int:
    """Norms' inputs and outputs, q·k·v, attention's output and log-sum-exp, gate·up, x·Aᵀ of every product; of a router
    the probabilities, the chosen ones with their sum, and the order of the rows."""
    b, q, kv = work.itemsize, shape.query, shape.key_value
    ranks = sum(work.rank(name) for name in shape.linears)
    token = shape.norms * (shape.hidden * work.stream_bytes + 4) + 4 * shape.heads
    token += b * (2 * shape.hidden + 2 * q + 2 * kv + 2 * shape.intermediate + ranks)
    if shape.experts:
        chosen = shape.experts.chosen
        token += 2 * b * chosen * work.expert_rank + 4 * shape.experts.count + 32 * chosen + 4
    # of float32 masters, until the backward; of experts they are made for each product
    copies = b * shape.linear_weights if work.method == "full" else 0
    return work.tokens * token + copies


def _stock_bytes(shape: Shape, work: Work) -> int:
    """transformers and PEFT: float32 in norms, and in 16 bits a float32 copy of x for every adapted linear."""
    b, q, kv, heads = work.itemsize, shape.query, shape.key_value, shape.heads + shape.kv_heads
    # with a mask, keys and values are repeated for all heads, and its row is kept
    masked = 2 * (q - kv) + work.tokens // work.padded if work.padded else 0
    token = shape.norms * 4 * (shape.hidden + 1) + (4 * (q + kv + heads) if shape.qk_norm else 0)
    token += b * (2 * q + 2 * kv + masked) + 4 * shape.heads + 3 * b * shape.intermediate
    for names in shape.groups:
        adapted = [name for name in names if work.rank(name)]
        width = shape.linears[names[0]][1]
        if b == 4:  # one x for all, and o_proj's is attention's output
            token += 4 * width * (bool(adapted) and names != ("o_proj",))
        else:
            token += 4 * width * len(adapted)
    return work.tokens * (token + 4 * sum(work.rank(name) for name in shape.linears))


def working_bytes(shape: Shape, work: Work) -> int:
    """W: the most that comes and goes inside one layer's backward, which is in its MLP.

    The stream's gradient, down's operand and the activation, or its gradient; d(gate·up) takes gate·up's place. Of
    experts d(gate·up) and either the activation or the rows' gradients.
    """
    t, h, i, b = work.tokens, shape.hidden, shape.intermediate, work.itemsize
    if shape.experts:
        return t * (h * (work.stream_bytes + b) + b * (2 * i + max(shape.experts.chosen * h, i)))
    states, activation = t * h * (work.stream_bytes + b), t * i * b * (1 if work.fused else 3)
    if work.method != "qlora":
        return states + activation
    # Weights are written out for a product: down's, or gate's and up's.
    return states + max(activation + h * i * b, 2 * h * i * b)


def head_bytes(shape: Shape, work: Work) -> int:
    """Last hidden states, before and after the norm, the labelled ones, their gradients, and a chunk of logits; padded
    batches have all logits by transformers' loss: float32, their log-softmax and its gradient."""
    import torch

    from pronghorn.kernels.linear_cross_entropy import rows_of_a_chunk

    dtype = torch.bfloat16 if work.itemsize == 2 else torch.float32
    weight = torch.empty(shape.vocab, shape.hidden, dtype=dtype, device="meta")
    rows = min(rows_of_a_chunk(weight), work.tokens)
    logits = rows * work.itemsize if not work.padded else work.tokens * 12
    states = work.tokens * shape.hidden * (2 * work.stream_bytes + 2 * work.itemsize)
    # dW in float32, and either its chunk's and W's copy or, in 16 bits, its scaled ones
    trained = 8 if work.method == "full" else 10 if work.trained_whole >= shape.vocab * shape.hidden else 0
    return states + logits * shape.vocab + trained * shape.vocab * shape.hidden


def buffer_bytes(shape: Shape, work: Work) -> int:
    """One device buffer for an offloaded layer's input; pinned host memory takes as much a layer."""
    return work.tokens * shape.hidden * work.stream_bytes


@dataclass(frozen=True)
class Step:
    """What a choice of policies is made from: the sizes of the formula above, in bytes."""

    resting: Mapping[str, int]
    stored: Mapping[Policy, int]
    read: Mapping[Policy, int]
    """K of the formula."""
    working: int
    head: int
    buffer: int
    graph: int
    """What CUDA graphs take more than layers without, or less, where every layer keeps everything."""
    pieces: int = 0
    """What the allocator holds and can't use."""
    coming: int = 0
    """The layers' gradients, if they aren't there before the backward makes them, a share in each."""
    ends: tuple[int, int] = (0, 0)
    """Gradients of a trained head and embedding, besides: from the head's backward on, and when the embedding's has
    run. If they are one, autograd holds the head's until then."""

    @classmethod
    def of(cls, shape: Shape, work: Work) -> Step:
        """The sizes for a model trained in this way."""
        resting, working = resting_bytes(shape, work), working_bytes(shape, work)
        stored, head = stored_bytes(shape, work), head_bytes(shape, work)
        kept = shape.layers * stored[Policy.KEEP]
        graphed = shape.layers * stored.get(Policy.RECOMPUTE_CHEAP, stored[Policy.KEEP])  # no norms' results
        more = int((1 + POOL) * graphed) - kept + working + resting["gradients"] + LIBRARY_BYTES
        graph = more if work.graph else 0
        table, tables = 4 * shape.vocab * shape.hidden * (work.method == "full"), 1 if shape.tied else 2
        coming = 0 if work.accumulates else resting.pop("gradients") - tables * table
        ends = table, (3 - tables) * table if work.accumulates else 2 * table
        gate_up = 2 * work.tokens * shape.intermediate * work.itemsize
        pieces = shape.layers * min(PIECES, gate_up)
        read, buffer = read_bytes(shape, work), buffer_bytes(shape, work)
        return cls(resting, stored, read, working, head, buffer, graph, pieces, coming, ends)

    def peak(self, policies: Sequence[Policy], buffers: int = 2) -> dict[str, int]:
        """Bytes by kind at the moment of the peak, as torch's allocator counts them; their sum is the peak.

        With two buffers one input more is on its way, or there, between the backwards of two layers that offload.

        Args:
            policies: one a layer, from the first.
            buffers: inputs that come back at a time (`Plan.buffers`).
        """
        stored = [self.stored[policy] for policy in followed(policies)]
        moments, before, gone = [(sum(stored), self.head, 0, 0)], 0, 0
        for layer, (policy, bytes_) in enumerate(zip(policies, stored, strict=True)):
            ahead = self.buffer if buffers == 2 and 0 < gone < policies.count(Policy.OFFLOAD) else 0
            made = self.ends[0] + self.coming * (len(policies) - layer) // len(policies)
            moments.append((before + bytes_, self.read[policy] - bytes_ + self.working, ahead, made))
            before, gone = before + bytes_, gone + (policy is Policy.OFFLOAD)
        moments.append((0, 0, 0, self.ends[1] + self.coming))
        activations, working, ahead, made = max(moments, key=sum)
        found = {**self.resting, "activations": activations, "working": working, "buffers": ahead}
        found["gradients"] = found.get("gradients", 0) + made
        if set(policies) == {Policy.KEEP}:
            found["CUDA graph"] = max(0, self.graph)  # the first steps run without
        return {kind: size for kind, size in found.items() if size}

    def process(self, kinds: Mapping[str, int]) -> int:
        """What the process takes when torch counts `kinds`: the allocator's pieces and CUDA's context besides."""
        return sum(kinds.values()) + self.pieces + CONTEXT_BYTES
