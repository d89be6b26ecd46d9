"""Tiny random models with towers, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.families.registry import FAMILIES

VOCAB = 300
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 290,
        "boi_token_index": 291,
        "eoi_token_index": 292,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 290,
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **_DELTA},
        "vision_config": {**_PATCHES, "patch_size": 4, "num_position_embeddings": 16},
        "image_token_id": 290,
        "video_token_id": 291,
        "vision_start_token_id": 292,
        "vision_end_token_id": 293,
    },
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **_DELTA, **_ROUTED},
        "vision_config": {**_PATCHES, "patch_size": 4, "num_position_embeddings": 16},
        "image_token_id": 290,
        "video_token_id": 291,
        "vision_start_token_id": 292,
        "vision_end_token_id": 293,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": 8,
        },
        "vision_config": {
            **{key: value for key, value in _VISION.items() if key != "image_size"},
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "image_token_id": 290,
        "boi_token_id": 291,
        "eoi_token_id": 292,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        "vision_config": {
            **_PATCHES,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": 290,
        "video_token_id": 291,
    },
    "qwen2_5_vl": {
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision_config": {**_PATCHES, "patch_size": 4, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        "image_token_id": 290,
        "video_token_id": 291,
    },
    "gemma4_unified": {
        "text_config": {**_TEXT, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "audio_config": {"audio_embed_dim": 16},
        "image_token_id": 290,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "pad_token_id": 0,
        },
        "vision_config": {**_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "image_token_index": 290,
    },
}
"""Configurations by model type."""


SERVED = [
    kind
    for kind, fields in COMPOSITES.items()
    if any(
        fields["text_config"].get("model_type", f"{kind}_text") in (family.model_type, *family.as_text_of)
        for family in FAMILIES.values()
    )
]
"""Those whose language model's family is served."""


def composite_config(kind: str) -> Any:
    """Return the configuration of a tiny composite."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **json.loads(json.dumps(COMPOSITES[kind])))


def class_of(config: Any) -> Any:
    """Return a composite's ForConditionalGeneration class."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText._model_mapping[type(config)]


def write_composite(
    folder: Path, kind: str, dtype: torch.dtype = torch.float32, shards: str = "1GB", **text: Any
) -> Any:
    """Save a random model with towers and a tokenizer and processor beside it, and return the model.

    Args:
        text: of the language model's configuration.
    """
    config = composite_config(kind)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = class_of(config)._from_config(config).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, max_shard_size=shards)
    byte_tokenizer(VOCAB).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Any", "size": {"height": 28}}')
    return model


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put more tensors into a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def logits_of_whole(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return what transformers' own model with its towers answers to text. A test whose model can't is skipped:
    Llama 4's of transformers 5.24 asks its language model for images' outputs."""
    try:
        with torch.no_grad():
            result: torch.Tensor = model.eval()(input_ids=tokens).logits
    except AttributeError as error:
        if "image_outputs" not in str(error):
            raise
        pytest.skip(f"transformers' own model fails: {error}")
    return result
