"""What GGUF files, which llama.cpp reads, say of a family's models beyond their shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Callable[[Any], Any]
"""Takes of some of a checkpoint's rows (slices of the first dimension) those of another tensor."""


_BIASES = {"attention_bias": "attention", "attention_out_bias": "attention's output", "mlp_bias": "MLPs"}


def all_rows(rows: Any) -> Any:
    """Take a tensor as it is."""
    return rows


@dataclass(frozen=True)
class Part:
    """A tensor of the file that is made of one of the checkpoint's."""

    name: str = ""
    """Its name in the file; empty for the one that the package gguf has for the checkpoint's."""
    rows: Sequence[int] | None = None
    """Which of the checkpoint's rows it has, in its order; None for all of them."""
    columns: Sequence[int] | None = None
    """In which order it has the checkpoint's columns."""
    shape: tuple[int, ...] | None = None
    """Its shape, where that isn't the checkpoint's."""
    change: Callable[[Any], Any] | None = None
    """What is done to its numbers."""


def as_named(name: str, config: Any) -> Sequence[Part] | None:
    """Leave every weight as it is named."""
    return None


@dataclass(frozen=True)
class Gguf:
    """How a family's models are written as GGUF."""

    architecture: str
    """`general.architecture`."""
    interleaved: bool = False
    """Whether rows of queries and keys are interleaved: llama.cpp rotates neighbouring rows of a head where
    transformers rotates its halves."""
    values: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Reads from the configuration what the file must say, by the names of gguf.GGUFWriter's methods without `add_`."""
    unlike: Callable[[Any], str | None] = lambda config: None
    """Says what else a configuration has that llama.cpp's model hasn't, or None."""
    rope: Callable[[Any], Mapping[str, Any]] = lambda config: config.rope_parameters
    """Reads the RoPE parameters of layers without a window."""
    split: Callable[[str, Any], Mapping[str, Rows]] = lambda name, config: {name: all_rows}
    """Returns, of the name of a checkpoint's tensor and the configuration, which tensors modules of their own would
    have, by these names; nothing of what transformers doesn't load. They are taken some rows at a time."""
    parts: Callable[[str, Any], Sequence[Part] | None] = as_named
    """Says, by its name in the causal LM and the configuration, what a weight becomes in the file that isn't merely
    named, interleaved or offset as all of the family's are; None for those."""
    merged_pieces: str | None = None
    """The name of its kind of SentencePiece tokenizer, where llama.cpp joins pieces by merges instead of scores."""
    shown: tuple[str, ...] = ()
    """Special tokens that llama.cpp must show in an answer, as it reads thoughts and calls of tools by them."""
    goes_on: tuple[str, ...] = ()
    """Tokens that end a part of an answer, and not the answer, where other families' end it."""
    activation: str = "silu"
    """Of MLPs and experts; no file says it."""
    biases: tuple[str, ...] = ()
    """The configuration's fields of biases that it reads."""
    head_sizes: bool = True
    """Whether heads may be of another size than hidden_size / num_attention_heads."""
    llama3_rope: bool = False
    """Whether it reads the tensor of RoPE's factors."""

    def lacks(self, config: Any) -> str | None:
        """Say what a configuration has that llama.cpp's model of the architecture hasn't, or None."""
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", self.activation)
        if activation != self.activation and (activation, self.activation) != ("swish", "silu"):
            return f"the activation {activation}"
        for field, where in _BIASES.items():
            if getattr(config, field, False) and field not in self.biases:
                return f"biases in {where}"
        if not self.head_sizes:
            narrow = config.hidden_size // config.num_attention_heads
            size = getattr(config, "head_dim", None) or narrow
            if size != narrow:
                return f"heads of {size} and not hidden_size / num_attention_heads,"
        if self.rope(config).get("rope_type") == "llama3" and not self.llama3_rope:
            return "RoPE scaling 'llama3'"
        return self.unlike(config)


def of_experts(config: Any, count: str = "num_experts", width: str | None = "moe_intermediate_size") -> dict[str, int]:
    """Read what a file says of routed experts: how many there are and a token has and, unless None, how wide one is."""
    values = {"expert_count": count, "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": width}
    return {name: getattr(config, field) for name, field in values.items() if field is not None}
