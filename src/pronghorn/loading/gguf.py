"""Load a GGUF file as a dense transformers model with its own tokenizer.

The loader unpacks the weights; the rest is read from the file's metadata, because what transformers makes of it trains
wrong: SmolLM2 gets `<|im_start|>` as its stop token and digits glued together, Qwen2.5 stops at
`<|endoftext|>`, Gemma's tokenizer splits differently, Llama 3.1's RoPE scaling is lost, and a dense model stays flagged
as quantised. What the metadata doesn't settle is refused, never guessed.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import DataError, UnsupportedError
from pronghorn.loading.gguf_tokenizer import load_tokenizer
from pronghorn.loading.limits import check_layers, check_range, check_sizes, check_values
from pronghorn.loading.skeleton import without_weights
from pronghorn.loading.weights import NOT_LOADED
from pronghorn.models.families import check_config
from pronghorn.precision.loader import StoredTensor, checkpoint, load, open_gguf
from pronghorn.text import clip

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
"""`general.architecture` of dense families; Mistral's files call themselves llama."""

_REMEDY = "use the model's safetensors checkpoint"
_BLOCK = re.compile(r"^blk\.(\d+)\.")
_ROPE = re.compile(r"^rope_freqs|\.attn_rot_embd\.")
"""Tensors that are RoPE's and no weights."""
_AT_ONCE = 2**22
"""About how many numbers are unpacked to float32 at once."""
_ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself."""

    path: Path
    metadata: dict[str, Any]
    """Every key with its value as Python objects; arrays other than the tokenizer's and short ones are left out."""
    tensors: dict[str, list[int]]
    """Every tensor's shape, the fastest dimension first."""
    rope_factors: list[float] | None
    """By what each RoPE frequency is divided ([head_dim / 2], Llama 3.1 and later), or None."""

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata.get("general.architecture", "")

    def of_model(self, key: str) -> Any:
        """Return the value of `<architecture>.<key>`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def load_gguf(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    config: Any = None,
    tokenizer: Any = None,
) -> tuple[Any, Any]:
    """Load `path` as a dense model and its tokenizer. Weights are unpacked one by one, to where they belong.

    A `tokenizer.json` beside the file is used instead of the file's own vocabulary. The ids of the special tokens are
    the metadata's in any case: on the tokenizer, the model's config and its generation config.

    Args:
        path: the `.gguf` file.
        dtype: of all weights.
        device: of the model.
        config: the model's, where it is known: the file need not be of `ARCHITECTURES`, and what it says of the model's
            shape isn't read.
        tokenizer: the model's, for files whose own can't be rebuilt.
    Raises:
        DataError: the file is damaged, or weights are missing from it, or some have no place in the model.
        UnsupportedError: an architecture, RoPE scaling or tokenizer that is not served, or `gguf` is not installed.
    """
    path = Path(path)
    header = read_header(path)
    if config is None:
        _check(header)
    try:
        tokenizer = load_tokenizer(path, header.metadata)
    except UnsupportedError:
        if tokenizer is None:
            raise
    model = _load_weights(header, config or _config(header), dtype, torch.device(device))
    _set_token_ids(model, tokenizer, header.metadata)
    return model, tokenizer


def tokenizer_of(path: Path) -> Any:
    """Load the tokenizer that `load_gguf` gives, without the weights. Raises as that does."""
    header = read_header(path)
    _check(header)
    return load_tokenizer(path, header.metadata)


def read_header(path: Path) -> GgufHeader:
    """Read the metadata of a GGUF file. Raises as `open_gguf` does."""
    with open_gguf(path) as reader:
        metadata = {
            key: field.contents() for key, field in reader.fields.items() if key in _ARRAYS or len(field.data) < 100
        }
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.get("rope_freqs.weight")
    shapes = {name: [int(size) for size in tensor.shape] for name, tensor in tensors.items()}
    return GgufHeader(path, metadata, shapes, None if factors is None else [float(factor) for factor in factors.data])


def _check(header: GgufHeader) -> None:
    if header.metadata.get("general.type") == "adapter":
        raise UnsupportedError(
            f"{header.path.name} is a LoRA adapter, not a model",
            "give llama.cpp both: llama-server -m BASE.gguf --lora FILE; here, the folder of PEFT's adapter",
        )
    if header.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{header.path.name}: GGUF architecture {header.architecture!r} is not served",
            f"use one of {', '.join(ARCHITECTURES)}, or the model's safetensors checkpoint",
        )
    count, width = header.of_model("block_count"), header.of_model("embedding_length")
    if not isinstance(count, int) or not isinstance(width, int):
        raise DataError(f"{header.path.name} doesn't say how many layers it has, or how wide", "download it again")
    check_layers(header.path.name, "block_count", count, header.tensors, _BLOCK)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding[0] != width:
        raise DataError(
            f"{header.path.name}: embedding_length {width:,}, but its embeddings are {embedding[0]:,} wide",
            "download it again",
        )
    if header.of_model("expert_count"):
        raise UnsupportedError(f"{header.path.name}: a mixture of {header.of_model('expert_count')} experts", _REMEDY)
    scaling = header.of_model("rope.scaling.type")
    factor = header.of_model("rope.scaling.factor") or header.of_model("rope.scale_linear")  # the older name
    if scaling is None and factor not in (None, 0, 1):
        scaling = "linear"  # as llama.cpp takes it
    if scaling not in (None, "none"):
        raise UnsupportedError(f"{header.path.name}: RoPE scaling {scaling!r}, which is lost in loading", _REMEDY)
    if header.of_model("attention.causal") is False:
        raise UnsupportedError(f"{header.path.name}: attention in both directions, no causal language model", _REMEDY)


def reads(path: Path) -> bool:
    """Tell whether `load_gguf` reads such a file without being told of the model."""
    try:
        tokenizer_of(path)
    except UnsupportedError:
        return False
    return True


def _config(header: GgufHeader) -> Any:
    """Read the model's configuration from the file's metadata."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    path = header.path
    head_dim = header.of_model("attention.key_length")
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        if head_dim is not None:
            config.head_dim = int(head_dim)
    except (*NOT_LOADED, StrictDataclassError) as error:
        reason = clip(" ".join(str(error).split()), 300)
        raise DataError(f"{path.name}: its metadata make no configuration ({reason})", "download it again") from error
    check_sizes(path, config.to_dict())
    check_values(path, config)
    turned = header.of_model("rope.dimension_count")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if turned not in (None, width):
        raise UnsupportedError(
            f"{path.name}: RoPE of {turned} of a head's {width} numbers, which is lost in loading", _REMEDY
        )
    for field, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if hasattr(config, field) and tensor in header.tensors:  # the metadata doesn't say it
            setattr(config, field, True)
    if header.architecture == "gemma3":  # the scale isn't in the file: llama.cpp knows the 27B model by its layers
        wide = header.of_model("block_count") == 62
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if wide else config.head_dim
    if header.rope_factors is not None:
        config.rope_parameters = _llama3_rope(header, dict(config.rope_parameters), config.head_dim)
    return config


def _load_weights(header: GgufHeader, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the dense model, every weight of it from the file."""
    path, family = header.path, check_config(config)
    check_range(config, dtype)
    model = without_weights(config, dtype, "sdpa").eval()  # what the file has not are buffers, which are computed
    expected = dict(model.named_parameters())
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    names = _names(header.architecture, expected, config.num_hidden_layers)

    offset = family.norm_offset  # llama.cpp stores norms with it
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    interleaved = (
        {name: count for stored, name in names.items() for part, count in heads.items() if part in stored}
        if family.gguf is not None and family.gguf.interleaved
        else {}
    )

    def place(name: str, stored: StoredTensor) -> Tensor:
        """Unpack a weight some rows at a time, so that little of it is float32 at once."""
        weight = torch.empty(stored.shape, dtype=dtype, device=device)
        rows = max(1, _AT_ONCE // math.prod(stored.shape[1:]))
        for start in range(0, len(weight), rows):
            block = stored.rows(start, min(start + rows, len(weight)))
            weight[start : start + rows] = block - offset if offset and name.endswith("norm.weight") else block
        return weight

    def reorder(name: str, weight: Tensor) -> Tensor:
        """Put query and key rows, which llama.cpp interleaves, in transformers' order."""
        if name not in interleaved:
            return weight
        return weight.view(interleaved[name], -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    def rename(stored: str) -> str | None:
        return names.get(stored, None if _ROPE.search(stored) else stored)  # others have no place: an error

    weights = load(checkpoint(path), rename=rename, place=place, transform=reorder, expected=expected)
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    model.config._name_or_path = model.name_or_path = str(path)
    return model.to(device)


def name_table(architecture: str, layers: int) -> Any:
    """Return the `gguf` package's names of tensors in the files of an architecture, by the modules' paths."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    return get_tensor_name_map(next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), layers)


def _names(architecture: str, parameters: Iterable[str], layers: int) -> dict[str, str]:
    """Map the file's names of tensors to the model's."""
    table = name_table(architecture, layers)
    parts = {name: name.rpartition(".") for name in parameters}
    return {f"{table.get_name(module)}.{leaf}": name for name, (module, _, leaf) in parts.items()}


def _llama3_rope(header: GgufHeader, rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return RoPE parameters that give the file's frequency factors: Llama 3.1's and 3.2's differ in `factor` alone."""
    actual = header.rope_factors or []
    found = {
        "rope_theta": rope["rope_theta"],
        "rope_type": "llama3",
        "factor": max(actual, default=1.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = scaled_rope(found, head_dim)[0].tolist()
    if len(actual) != len(expected) or any(abs(a - e) > 1e-3 * e for a, e in zip(actual, expected, strict=True)):
        raise UnsupportedError(
            f"{header.path.name}: RoPE frequency factors other than Llama 3's",
            "use the model's safetensors checkpoint",
        )
    return found


def scaled_rope(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return by what transformers divides each frequency of a scaled RoPE, float32 [head_dim / 2] or fewer where it
    rotates a part of each head, and what it multiplies cosines and sines by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = SimpleNamespace(rope_parameters=rope, standardize_rope_params=lambda: None, head_dim=head_dim)
    config.hidden_size, config.num_attention_heads = head_dim, 1
    scaled, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    turned = 2 * len(scaled)
    return 1 / (rope["rope_theta"] ** (torch.arange(0, turned, 2).float() / turned)) / scaled, factor


def _set_token_ids(model: Any, tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Put the tokenizer's special ids on the configs; generation also stops at the end of a turn or message."""
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eot", "eom")]
    if ends[0] is None and "<|im_end|>" in (tokenizer.chat_template or ""):
        ends[0] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = list(dict.fromkeys([tokenizer.eos_token_id, *(int(end) for end in ends if end is not None)]))
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = stops[0] if len(stops) == 1 or config is model.config else stops
