"""Models of known shapes with random weights, and random documents for them: to verify and measure without a download.

Random weights cost what trained ones cost. The shapes' facts come from the models' published configurations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.errors import ConfigError
from pronghorn.state import clear_leftovers, lock, new_folder

BOS, EOS, PAD, UNKNOWN = range(4)
FIRST_ORDINARY_TOKEN = 10
"""Random documents hold no token below this."""

_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "max_position_embeddings",
)


def _llama3_rope(factor: float) -> dict[str, Any]:
    frequencies = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    return {"rope_parameters": rope | frequencies}


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, **more}


def _gemma3(window: int, **rope: Any) -> dict[str, Any]:
    return {"sliding_window": window, "query_pre_attn_scalar": 256, **rope}


def _gpt_oss(experts: int, chosen: int, window: int) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"truncate": False, "original_max_position_embeddings": 4096}
    routed = {"num_local_experts": experts, "num_experts_per_tok": chosen}
    return {"rope_parameters": rope, "sliding_window": window, **routed}


def _qwen3_moe(experts: int, chosen: int, width: int) -> dict[str, Any]:
    routed = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    return _rope(1e6, **routed, norm_topk_prob=True)


_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _gemma4(pattern: int, window: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a Gemma 4: every so many layers one has no window, wider heads and part of them rotated."""
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    layers = more.pop("layers")
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    more = {"global_head_dim": 512, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, **more}
    return {"layer_types": types, "sliding_window": window, "rope_parameters": rope, **more}


def _gemma4_e(pattern: int, layers: int, shared: int, **more: Any) -> dict[str, Any]:
    own = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "attention_k_eq_v": False}
    return _gemma4(pattern, 512, layers=layers, num_kv_shared_layers=shared, **own, **more)


_GEMMA3_4B = _gemma3(1024, rope_parameters=_GEMMA3_ROPE)
_CAP: dict[str, Any] = {"final_logit_softcapping": 30.0}
_GEMMA4_E2B = _gemma4_e(5, 35, 20, use_double_wide_mlp=True, **_CAP)
_GEMMA4_E4B = _gemma4_e(6, 42, 18, **_CAP)
_GEMMA4_12B = _gemma4(6, 1024, layers=48, num_global_key_value_heads=1, **_CAP)
_GEMMA4_31B = _gemma4(6, 1024, layers=60, num_global_key_value_heads=4, **_CAP)
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_GEMMA4_26B_A4B = _gemma4(6, 1024, layers=30, num_global_key_value_heads=2, **_GEMMA4_MOE, **_CAP)


def _qwen35(layers: int, value_heads: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a Qwen3.5: of four layers three have gated delta nets."""
    linear = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": value_heads}
    types = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    return {"layer_types": types, "rope_parameters": {**rope, "mrope_interleaved": True}, **linear, **heads, **more}


_QWEN35_MOE = {"num_experts": 256, "num_experts_per_tok": 8}
_QWEN35_MOE |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN35_A3B = _qwen35(40, 32, **_QWEN35_MOE)
_ATTENTION_OF_LFM2 = (2, 5, 8, 10, 12, 14)
_LFM2: dict[str, Any] = {
    **_rope(1e6),
    "layer_types": ["full_attention" if number in _ATTENTION_OF_LFM2 else "conv" for number in range(16)],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_STARCODER2 = _rope(999999.4420358813, norm_epsilon=1e-5, sliding_window=4096, use_bias=True)
_DEEPSEEK_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0}
_DEEPSEEK_ROPE |= {"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    "rope_parameters": _DEEPSEEK_ROPE,
    **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    **{"first_k_dense_replace": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
}
_FALCON_MAMBA = {"state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 256, "use_conv_bias": True}
_MIXTRAL = _rope(1e6, num_local_experts=8, num_experts_per_tok=2)
_OLMOE = _rope(1e4, num_experts=64, num_experts_per_tok=8)
_TABLE: dict[str, tuple[Any, ...]] = {
    "tiny": ("llama", 2, 64, 192, 4, 2, 16, 512, True, 1e-5, 8192, _rope(1e4)),
    "SmolLM2-135M": ("llama", 30, 576, 1536, 9, 3, 64, 49152, True, 1e-5, 8192, _rope(1e5)),
    "Llama-3.2-1B": ("llama", 16, 2048, 8192, 32, 8, 64, 128256, True, 1e-5, 131072, _llama3_rope(32.0)),
    "Llama-3.2-3B": ("llama", 28, 3072, 8192, 24, 8, 128, 128256, True, 1e-5, 131072, _llama3_rope(32.0)),
    "Llama-3.1-8B": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 1e-5, 131072, _llama3_rope(8.0)),
    "Llama-3.3-70B": ("llama", 80, 8192, 28672, 64, 8, 128, 128256, False, 1e-5, 131072, _llama3_rope(8.0)),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, 1e-6, 40960, _rope(1e6)),
    "Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False, 1e-6, 40960, _rope(1e6)),
    "Qwen3-14B": ("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, False, 1e-6, 40960, _rope(1e6)),
    "Qwen3-32B": ("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, False, 1e-6, 40960, _rope(1e6)),
    "Qwen3.5-4B": ("qwen3_5_text", 32, 2560, 9216, 16, 4, 256, 248320, True, 1e-6, 262144, _qwen35(32, 32)),
    "Qwen3.5-9B": ("qwen3_5_text", 32, 4096, 12288, 16, 4, 256, 248320, False, 1e-6, 262144, _qwen35(32, 32)),
    "Qwen3.5-27B": ("qwen3_5_text", 64, 5120, 17408, 24, 4, 256, 248320, False, 1e-6, 262144, _qwen35(64, 48)),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", 40, 2048, 512, 16, 2, 256, 248320, False, 1e-6, 262144, _QWEN35_A3B),
    "Mistral-7B": ("mistral", 32, 4096, 14336, 32, 8, 128, 32768, False, 1e-5, 32768, _rope(1e6, sliding_window=None)),
    "Gemma-3-1B": ("gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, True, 1e-6, 32768, _gemma3(512)),
    "Gemma-3-4B": ("gemma3_text", 34, 2560, 10240, 8, 4, 256, 262144, True, 1e-6, 131072, _GEMMA3_4B),
    "Gemma-4-E2B": ("gemma4_text", 35, 1536, 6144, 8, 1, 256, 262144, True, 1e-6, 131072, _GEMMA4_E2B),
    "Gemma-4-E4B": ("gemma4_text", 42, 2560, 10240, 8, 2, 256, 262144, True, 1e-6, 131072, _GEMMA4_E4B),
    "Gemma-4-12B": ("gemma4_unified_text", 48, 3840, 15360, 16, 8, 256, 262144, True, 1e-6, 262144, _GEMMA4_12B),
    "Gemma-4-31B": ("gemma4_text", 60, 5376, 21504, 32, 16, 256, 262144, True, 1e-6, 262144, _GEMMA4_31B),
    "Gemma-4-26B-A4B": ("gemma4_text", 30, 2816, 2112, 16, 8, 256, 262144, True, 1e-6, 262144, _GEMMA4_26B_A4B),
    "LFM2-1.2B": ("lfm2", 16, 2048, 12288, 32, 8, 64, 65536, True, 1e-5, 128000, _LFM2),
    "StarCoder2-3B": ("starcoder2", 30, 3072, 12288, 24, 2, 128, 49152, True, 1e-5, 16384, _STARCODER2),
    "DeepSeek-V2-Lite": ("deepseek_v2", 27, 2048, 10944, 16, 16, 64, 102400, False, 1e-6, 163840, _DEEPSEEK_V2_LITE),
    "BLOOM-1B7": ("bloom", 24, 2048, 8192, 16, 16, 128, 250880, True, 1e-5, 2048, {}),
    "Falcon-Mamba-7B": ("falcon_mamba", 64, 4096, 8192, 1, 1, 1, 65024, False, 1e-5, 8192, _FALCON_MAMBA),
    "tiny-moe": ("qwen3_moe", 3, 64, 96, 4, 2, 16, 512, False, 1e-6, 8192, _qwen3_moe(8, 2, 32)),
    "tiny-gpt-oss": ("gpt_oss", 4, 64, 32, 4, 2, 16, 512, False, 1e-5, 8192, _gpt_oss(8, 2, 16)),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, False, 1e-6, 40960, _qwen3_moe(128, 8, 768)),
    "Mixtral-8x7B": ("mixtral", 32, 4096, 14336, 32, 8, 128, 32000, False, 1e-5, 32768, _MIXTRAL),
    "OLMoE-1B-7B": ("olmoe", 16, 2048, 1024, 16, 16, 128, 50304, False, 1e-5, 4096, _OLMOE),
    "gpt-oss-20b": ("gpt_oss", 24, 2880, 2880, 64, 8, 64, 201088, False, 1e-5, 131072, _gpt_oss(32, 4, 128)),
    "gpt-oss-120b": ("gpt_oss", 36, 2880, 2880, 64, 8, 64, 201088, False, 1e-5, 131072, _gpt_oss(128, 4, 128)),
}
"""Values of `_FIELDS`, and the other fields."""
SHAPES = {name: dict(zip(_FIELDS, row[:-1], strict=True)) | row[-1] for name, row in _TABLE.items()}
"""Fields of config.json by the shape's name."""


def shape_of(model: str) -> dict[str, Any] | None:
    """Return a shape's fields, or None for what is not a shape. NAME@12 is the shape NAME with its first 12 layers.

    Raises:
        ConfigError: a number of layers that the shape hasn't.
    """
    name, at, layers = model.partition("@")
    if name not in SHAPES:
        return None
    shape = SHAPES[name]
    if not at:
        return shape
    most = shape["num_hidden_layers"]
    if not layers.isdecimal() or not 1 <= int(layers) <= most:
        raise ConfigError(f"{model!r}: {layers!r} is not a number of layers of {name}", f"use 1 to {most}")
    count = int(layers)
    cut: dict[str, Any] = {"num_hidden_layers": count}
    if "layer_types" in shape:
        cut["layer_types"] = shape["layer_types"][:count]
    if shape.get("num_kv_shared_layers"):  # those that share are the last ones
        cut["num_kv_shared_layers"] = max(0, count - most + shape["num_kv_shared_layers"])
    return shape | cut


def check_model(model: str) -> None:
    """Refuse what is neither a shape nor a folder with a model (ConfigError; the known shapes are listed)."""
    if shape_of(model) is None and not (Path(model) / "config.json").is_file():
        raise ConfigError(
            f"model {model!r} is neither a known shape nor a folder with config.json",
            f"use one of {', '.join(SHAPES)}, with @LAYERS for fewer layers, or a model's folder",
        )


def checkpoint_of(model: str, folder: Path, seed: int) -> Path:
    """Return the folder to load a shape or a real model from, and write a shape's below `folder` if it isn't there yet.

    A checkpoint appears whole or not at all. Processes that write into one folder wait for each other.
    """
    shape = shape_of(model)
    if shape is None:
        return Path(model)
    target = folder / f"{model}-seed{seed}"
    if target.is_dir():  # whole, and perhaps on a disk where no lock can be made
        return target
    with lock(folder / "checkpoints.lock", -1, "another process writes checkpoints", "wait for it"):
        clear_leftovers(folder)
        if not target.is_dir():
            with new_folder(target) as unfinished:
                write_checkpoint(shape, unfinished, seed)
    return target


def write_checkpoint(shape: dict[str, Any], folder: Path, seed: int) -> None:
    """Write bf16 weights, config and byte-level tokenizer.

    Matrices are N(0, 0.02²), sinks N(0, 1), biases 0, norms 1. Where a family doesn't scale its attention's scores, its
    queries' norms do, as trained ones do: else softmax chooses one token each, and rounding decides which.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pronghorn.families.registry import family_of
    from pronghorn.families.spec import Attention
    from pronghorn.models.families import decoder_layers

    config = AutoConfig.for_model(**shape, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.02, generator=generator)
            elif name.endswith("sinks"):
                parameter.normal_(0, 1, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        family = family_of(config)
        for layer in decoder_layers(model):
            for block in family.blocks(layer):
                attention: Any = layer.get_submodule(block.module)
                if isinstance(block.kind, Attention) and block.kind.query_norm and attention.scaling == 1.0:
                    norm: Any = attention.get_submodule(block.kind.query_norm)
                    norm.weight.fill_(attention.head_dim**-0.5 - family.norm_offset)
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    byte_tokenizer(config.max_position_embeddings).save_pretrained(folder)


def byte_tokenizer(max_length: int) -> Any:
    """Build a tokenizer of one token a byte: what is trained here is random, but libraries ask for a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    words = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **special)


def lognormal_length(rng: random.Random) -> int:
    """Draw a document's length: log-normal with median 134 and mean about 180, from 16 to 2,048 tokens."""
    return max(16, min(2048, int(rng.lognormvariate(4.9, 0.75))))


def random_documents(
    tokens: int,
    vocab: int,
    supervised: float,
    rng: random.Random,
    length: Callable[[random.Random], int] = lognormal_length,
) -> list[Document]:
    """Draw documents of random tokens that fill a packed row exactly; the last one is cut.

    Args:
        tokens: T of the row.
        vocab: token ids are below this.
        supervised: share of each document that has labels: its end, as an answer after a prompt. A document's first
            token is never a label.
        length: draws the length of a document.
    """
    lengths: list[int] = []
    while (room := tokens - sum(lengths)) > 0:
        lengths.append(min(length(rng), room))
    ids = [rng.randrange(FIRST_ORDINARY_TOKEN, vocab) for _ in range(tokens)]
    documents = []
    for size in lengths:
        own, ids = ids[:size], ids[size:]
        first = size - min(max(1, round(supervised * size)), size - 1)
        documents.append(Document(own, [IGNORE_INDEX] * first + own[first:]))
    return documents
