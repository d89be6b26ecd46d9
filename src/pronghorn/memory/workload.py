"""Say what is trained and how, as far as memory and time depend on it: a model's sizes and its training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from pronghorn.families.layer_spec import LayerSpec
from pronghorn.memory.plan import Codes, WrittenOut

NF4_BYTES = 1 / 2 + 1 / 64 + 1 / 4096
"""Of a number in NF4: 4 bits, 8 of absmax for 64 of them, and 32 for 256 of those."""

Method = Literal["lora", "qlora", "full"]


@dataclass(frozen=True)
class ModelDims:
    """What memory and time depend on in a decoder model."""

    layers: tuple[LayerSpec, ...]
    """In order; equal ones are of one kind."""
    vocab: int
    outside: int
    """Parameters outside the layers."""
    tied: bool
    """Whether the embedding is the head."""

    @cached_property
    def kinds(self) -> Counter[LayerSpec]:
        """How many layers are of each kind."""
        return Counter(self.layers)

    @property
    def hidden(self) -> int:
        return self.layers[0].hidden

    @cached_property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return any(layer.experts for layer in self.kinds)

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return self.outside + sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True)
class TrainSetup:
    """How a model is trained, as far as memory and time depend on it."""

    tokens: int
    """T of a micro-batch: rows a step times max_seq_length. A packed row is always full, so every step is the worst."""
    method: Method = "lora"
    ranks: Mapping[str, int] | None = None
    """LoRA rank by a linear's path below its layer; None for 16 on all."""
    expert_rank: int = 0
    """LoRA rank on the experts' weights."""
    itemsize: int = 2
    """Bytes of an element of the products: 2 in bf16 and fp16, 4 in float32."""
    fp8: bool = False
    """Input gradients of frozen linears are products in 8 bits (`precision.compute`); and so is the forward, if
    `fp8_forward`."""
    fp8_forward: bool = True
    int8: bool = False
    """With `fp8`: linears multiply in 8-bit integers, with codes of their own for either product, but for the forward
    of what mixes tokens takes first (`in_integers`)."""
    fp8_experts: bool = False
    """Frozen experts multiply as frozen linears do with `fp8`; with `int8` in integers both ways."""
    expert_bytes: float | None = None
    """Bytes of a number of experts' frozen weights where these are packed."""
    linear_bytes: float | None = None
    """Bytes of a number of the linears' frozen weights where these are packed."""
    own_codes: bool = False
    """The packed linears multiply in 8 bits as they are."""
    codes: Codes = "kept"
    """Whether 8-bit codes of weights in 16 bits are kept or written out; `auto`: as a plan chooses, kept until then."""
    written_out: WrittenOut = "each"
    """Whether linears' weights of few bits are written out for each product, or once and kept so, in `itemsize` bytes;
    `auto`: as a plan chooses, for each until then."""
    fused: bool = True
    """Layers are Pronghorn's fused ones; else transformers' and PEFT's."""
    master_bytes: int = 4
    """Of an element of the weights in full fine-tuning: float32, which autocast multiplies in 16 bits, or as it is."""
    trained_share: float = 1.0
    """Adapters' elements against what `ranks` say of all layers: some may have none, or another rank, and the head some
    besides. In full fine-tuning the share of weights that aren't frozen."""
    dropout: bool = False
    """Adapters have dropout before them, which isn't fused."""
    dora: bool = False
    """Adapters are DoRA's, which aren't fused."""
    trained_whole: int = 0
    """Parameters of modules_to_save."""
    logits_bytes: int = 0
    """Of the logits at their most where the loss isn't fused with the head (it has adapters, say); 0: it is."""
    graph: bool = False
    """The layers run as CUDA graphs, which hold what comes and goes in their backward for themselves."""
    padded: int = 0
    """Rows of a micro-batch that is padded and goes transformers' way, through layers and loss; 0: it is packed."""
    mlp_rows: int = 0
    """Rows of the tiles that gated MLPs are computed in (`Plan.mlp_rows`); 0: as a whole."""
    distributed: bool = False
    """Under DDP, whose buckets hold all gradients once more."""
    processes: int = 1
    """How many share the weights of each layer (`parallel.sharded`)."""
    copy_trained: bool = False
    """Trained layers that they share are copied out of the other GPUs' memory (`parallel.copies`)."""
    unshared: str = ""
    """Why they can't, if something else than the model forbids it: an optimiser that needs whole weights."""
    accumulates: bool = True
    """A step has several micro-batches, so that gradients are there all the time; else they come layer by layer."""
    adapter_itemsize: int = 4
    """Bytes of an adapter's element, and of its gradient's."""
    optimizer_bytes: int | None = None
    """The optimiser's states on the device; None for AdamW's, in float32."""
    paged_bytes: int = 0
    """The optimiser's states in memory that moves to the host when the device is full: not counted on the device."""
    documents: int = 512
    """Mean tokens of a document, which attention's time depends on (memory doesn't)."""

    def rank(self, linear: str) -> int:
        """Return the rank of a linear's adapter, 0 where it has none."""
        if self.method == "full":
            return 0
        return 16 if self.ranks is None else self.ranks.get(linear, 0)

    @property
    def forward_in_fp8(self) -> bool:
        """Whether the forward's products of all frozen linears are in 8 bits."""
        return self.fp8 and self.fp8_forward

    @property
    def expert_forward_in_8_bits(self) -> bool:
        """Whether the forward's products of frozen experts are in 8 bits."""
        return self.fp8_experts and (self.fp8_forward or self.int8)

    @property
    def can_graph(self) -> bool:
        """Whether the layers run as CUDA graphs where there is memory for them."""
        return self.graph and self.fused and self.method != "full"

    @property
    def in_few_bits(self) -> bool:
        """Whether linears' weights are stored in few bits, those of a packed checkpoint too."""
        return self.method == "qlora" or self.linear_bytes is not None

    @property
    def written_once(self) -> bool:
        """Whether linears' weights of few bits are kept as the forward's products have them."""
        return self.written_out == "once" and self.fused

    @property
    def chooses_written_once(self) -> bool:
        """Whether a plan chooses that: the forward multiplies weights of few bits, and they are this process's own."""
        chosen = self.written_out == "auto" and self.in_few_bits and self.fused
        return chosen and self.processes == 1 and not self.forward_in_fp8

    @property
    def writes_forward(self) -> bool:
        """Whether the weights of linears are written out of few bits for each product of the forward."""
        if self.written_once:
            return False
        return self.method == "qlora" or (self.linear_bytes is not None and not self.forward_in_fp8)

    @property
    def writes_backward(self) -> bool:
        """The same for each input gradient; or whether 8-bit codes, which processes share, are turned for it."""
        coded = self.processes > 1 or self.writes_codes
        if self.written_once and (self.int8 or not self.fp8):
            return False
        if self.int8:
            return self.in_few_bits
        return self.method == "qlora" or (coded if self.fp8 else self.linear_bytes is not None)

    @property
    def writes_codes(self) -> bool:
        """Whether 8-bit codes are written out for each product: of 4 bits, or of more that processes share or that have
        none beside them."""
        of_more = (self.processes > 1 or self.codes == "written") and not self.fp8_forward and not self.own_codes
        return self.fp8 and not self.int8 and (self.method == "qlora" or of_more)

    @property
    def chooses_codes(self) -> bool:
        """Whether a plan chooses if codes are kept or written out: of 4 bits and of shared weights they are written."""
        return self.codes == "auto" and self.method == "lora" and self.processes == 1

    @property
    def leanest(self) -> TrainSetup:
        """The same with the codes that take least, if a plan chooses."""
        return replace(self, codes="written") if self.chooses_codes else self

    @property
    def in_fp8(self) -> TrainSetup:
        """The same with input gradients alone in e4m3, by the codes that take least."""
        codes: Codes = "kept" if self.linear_bytes is not None else "written"
        return replace(self, int8=False, codes=codes, unshared="")

    @property
    def stored_bytes(self) -> float:
        """Of a number of a linear's weight, as products that write it out read it."""
        if self.method == "qlora" and self.linear_bytes is None:
            return 0.5
        return self.itemsize if self.linear_bytes is None else self.linear_bytes

    @property
    def stream_bytes(self) -> int:
        """Of an element between layers: float32 where float32 masters are trained under autocast."""
        return self.master_bytes if self.method == "full" else self.itemsize

    @property
    def narrows(self) -> bool:
        """Whether autocast makes copies of trained weights for their products."""
        return self.method == "full" and self.itemsize < self.master_bytes

    def adapters(self, layer: LayerSpec) -> int:
        """Count the elements of a layer's adapters."""
        adapted = [linear for linear in layer.linears if self.rank(linear.path)]
        found = sum(self.rank(linear.path) * (linear.out + linear.inputs) for linear in adapted)
        found += sum(linear.out for linear in adapted) if self.dora else 0
        if layer.experts:
            found += layer.experts.count * self.expert_rank * (2 * layer.hidden + 3 * layer.experts.width)
        return found if self.trained_share == 1 else round(self.trained_share * found)

    def trained(self, layer: LayerSpec) -> int:
        """Count the elements of a layer that are trained."""
        return layer.parameters if self.method == "full" else self.adapters(layer)
