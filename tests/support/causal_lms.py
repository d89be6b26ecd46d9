"""A tiny random model of each causal LM class that transformers has, and what training it here comes to."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import pronghorn
from pronghorn.data.batch import Collator
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import PronghornError
from pronghorn.families.registry import FAMILIES, family_of
from pronghorn.loading.composite import Composite
from pronghorn.models.lora import add_lora
from pronghorn.models.padded_probe import require_padded
from pronghorn.models.probe import probe
from support.tiny import FAMILIES as FUSED
from support.tiny import MOE_FAMILIES, tiny_model

VOCAB = 131
LENGTHS = (5, 30, 1, 17)
ROW = 64
TOLERANCE = 2e-4
"""Of float32, relative to the largest number: what is wrong is off by more than a hundredth."""
SECONDS = 120
"""Of a class, at most; most take one."""

# By the names of fields that a configuration has, whatever the class.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "n_words"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("attention_hidden_size", "embedding_dim"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "router_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "d_inner", "dim_ff"), 88),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp"), 88),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("dense_intermediate_size", "shared_experts_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "attention_head_dim", "attention_head_size", "d_head", "dim_head"), 16
    ),
    **dict.fromkeys(("kv_channels", "linear_head_dim", "linear_value_head_dim", "v_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "qk_rope_head_dim", "rotary_dim", "index_head_dim", "d_rel"), 8),
    **dict.fromkeys(("qk_nope_head_dim",), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "adapter_rank", "laurel_rank", "hc_lowrank"), 24),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "index_n_heads": 16,  # with fewer, scores of many tokens are 0, and a choice among equals is anybody's
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("context_length", "max_target_positions", "rel_extent", "mem_len"), 512),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), 9),
    **dict.fromkeys(("local_attention", "attention_chunk_size"), 18),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "mamba_headdim"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input",), 32),
    **dict.fromkeys(("index_topk", "gated_norm_rank"), 8),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "use_cache": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": _MIXED, "rope_parameters": dict.fromkeys(_MIXED, _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"o_groups": 2, "num_key_value_heads": 1, "head_dim": 16},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {
        "num_key_value_heads": 2,
        "audio_config": {**_TOWER, "num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
        "vision_config": {**_TOWER, "num_hidden_layers": 2, "image_size": 28, "crop_size": 28},
    },
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "layer_types": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layer_types": ["mamba", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a class needs besides, by its model type."""


@dataclass(frozen=True)
class Outcome:
    """What training a class comes to: a line of the table."""

    model_type: str
    name: str
    kind: str
    """`fused`, `proven generic`, `unpacked only` or `refused`."""
    why: str = ""


def causal_lms() -> dict[str, str]:
    """List the causal LM classes of the installed transformers, by their model types."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}


def small_config(model_type: str) -> Any:
    """Return a configuration of the class with small sizes, a decoder's, and without dropout."""
    from transformers import AutoConfig

    own = OWN.get(model_type, {})
    default = AutoConfig.for_model(model_type, **{key: own[key] for key in own if key in _FIRST})
    fields = default.to_dict()
    sizes = {key: _SIZES[key] for key in fields.keys() & _SIZES.keys() if fields[key] is not None or key in _TOKENS}
    if "qk_rope_head_dim" in fields:  # latent attention: no fewer heads of keys, and sizes of its own
        sizes = {key: size for key, size in sizes.items() if key not in ("num_key_value_heads", "head_dim")}
        sizes |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
    sizes |= {key: 0.0 for key, value in fields.items() if "drop" in key and isinstance(value, float)}
    for name in ("layer_types", "mlp_layer_types"):  # each kind of layer that there is
        kinds = list(dict.fromkeys(getattr(default, name, None) or ()))
        if len(kinds) > 1 and name in fields:
            count = sizes["num_hidden_layers"] = max(len(kinds), sizes.get("num_hidden_layers", 0))
            sizes[name] = [kinds[number % len(kinds)] for number in range(count)]
    return AutoConfig.for_model(model_type, **sizes | own)


NOT_RUN = {
    "blt": "its patches are made by a second model, which has no small shape here",
    "gemma4_assistant": "it drafts for another model, whose hidden states it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose hidden states it reads",
    "musicgen": "its configuration describes three models, none of them for text",
    "musicgen_melody": "its configuration describes three models, none of them for text",
}
SAMPLES = ("phimoe",)
"""Draw their routers' choice in training, so that documents are compared in evaluation."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FIRST = ("hidden_size_per_layer_input",)


def tiny(model_type: str) -> Any:
    """Make a float32 model in training mode, its weights spread enough that every part matters."""
    if model_type in FUSED | MOE_FAMILIES:
        return tiny_model(model_type)
    return generic(small_config(model_type))


def generic(config: Any) -> Any:
    """Do what `tiny` does, of a configuration."""
    from transformers import AutoModelForCausalLM

    family = family_of(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=family.load_attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def judge(model_type: str) -> Outcome:
    """Try a class: adapters, the probe, a packed row and its documents alone, a training step."""
    name = causal_lms()[model_type]
    if model_type in NOT_RUN:
        return Outcome(model_type, name, "not run", NOT_RUN[model_type])
    try:
        towers = _with_towers(model_type, name)
        if towers is not None:
            return towers
        adapted = with_adapters(tiny(model_type))
        decoder = "made to decode by `is_decoder: true`" if hasattr(adapted.config, "is_decoder") else ""
        family = FAMILIES.get(model_type)
        if family is not None:
            _check_packed(adapted)
            other = small_config(model_type)
            if family.serves(other):
                return Outcome(model_type, name, "fused")
            kind, why = _judge_generic(with_adapters(generic(other)))
            return Outcome(model_type, name, "fused", f"{family.members}; others {kind}: {why}")
        kind, why = _judge_generic(adapted)
        return Outcome(model_type, name, kind, "; ".join(filter(None, (why, decoder))))
    except PronghornError as error:
        return Outcome(model_type, name, "refused", error.problem)


def _judge_generic(adapted: Any) -> tuple[str, str]:
    """Say how a model whose layers nothing is known of trains, and why."""
    pronghorn.attach(adapted)
    isolation = probe(adapted)
    if isolation.clean:
        _check_packed(adapted)
        return "proven generic", isolation.way
    require_padded(adapted)
    _check_unpacked(adapted)
    return "unpacked only", str(isolation.problem)


def _with_towers(model_type: str, name: str) -> Outcome | None:
    """Say of a class with towers what its language model comes to; None of one without."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    if "text_config" not in config.sub_configs:
        return None
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    whole = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, name)  # as checkpoints say
    config.architectures = [whole]
    composite = Composite.of(whole, config)
    assert composite is not None
    text = judge(composite.text_config().model_type)
    why = f"text of {whole}: {text.name}"
    return Outcome(model_type, name, text.kind, f"{why}; {text.why}" if text.why else why)


def with_adapters(model: Any) -> Any:
    """Put LoRA on what it adapts by default, with a B that isn't zero."""
    adapted = add_lora(model, r=4, lora_dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted.train(adapted.config.model_type not in SAMPLES)


def _documents() -> list[list[int]]:
    ids = torch.randint(3, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    return [part.tolist() for part in ids.split(LENGTHS)]


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _alone(model: Any) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of each document by itself, the mean loss of all, and the adapters' gradients."""
    logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in _documents()]
    targets = [torch.tensor(ids[1:], dtype=torch.int64) for ids in _documents()]
    losses = [cross_entropy(out[:-1].float(), t, reduction="sum") for out, t in zip(logits, targets, strict=True)]
    loss = torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    return [out.detach() for out in logits], loss.detach(), _gradients(model)


def _same(value: torch.Tensor, right: torch.Tensor, what: str) -> None:
    error = (value - right).abs().max() / right.abs().max().clamp(min=1e-4)
    assert error < TOLERANCE, f"{what} is off by {error:.1e}"


def _check(model: Any, loss: torch.Tensor, right: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    """Compare loss and gradients; take a step, after which the loss is less."""
    loss.backward()
    found = _gradients(model)
    _same(loss.detach(), right, "the loss")
    scale = max(g.abs().max() for g in gradients.values())
    assert scale > 0
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() < TOLERANCE * max(gradient.abs().max(), 0.05 * scale), name
    assert all(name in gradients or not g.any() for name, g in found.items())


def _step(model: Any, batch: dict[str, Any]) -> None:
    """Take a step along the gradient; the loss falls."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0), []
    for _ in range(2):
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]


@contextmanager
def _detached(model: Any) -> Iterator[None]:
    """A copy would do, if all classes could be copied."""
    from pronghorn.models.attach import attached

    handle = attached(model.get_base_model())
    if handle is not None:
        handle.detach()
    yield


def _check_packed(model: Any) -> None:
    with _detached(model):
        logits, loss, gradients = _alone(model)
    pronghorn.attach(model)
    documents = _documents()
    rows = [{"input_ids": ids, "labels": ids, "lengths": [len(ids)]} for ids in documents]
    joined = {key: [item for row in rows for item in row[key]] for key in rows[0]}  # type: ignore[attr-defined]
    batch = Collator(ROW, pad_token_id=0)([joined])
    with torch.no_grad():
        packed = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[0]
    start = 0
    for out in logits:
        _same(packed[start : start + len(out)], out, f"the logits of the document of {len(out)} tokens")
        start += len(out)
    _check(model, model(**batch).loss, loss, gradients)
    _step(model, batch)


def _check_unpacked(model: Any) -> None:
    with _detached(model):
        _, loss, gradients = _alone(model)
    pronghorn.attach(model)
    longest, documents = max(LENGTHS), _documents()
    ids = torch.tensor([each + [0] * (longest - len(each)) for each in documents])
    labels = torch.tensor([each + [IGNORE_INDEX] * (longest - len(each)) for each in documents])
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in LENGTHS])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    _check(model, model(**batch).loss, loss, gradients)
    _step(model, batch)
