"""Merge a LoRA adapter into its base model and save the whole as a plain 16-bit checkpoint.

    W' = W + (alpha / r) · B A        computed in float32, rounded once to the checkpoint's dtype

The training model is only read. What was saved is loaded again and its logits compared with the adapted model's: a
merge that forgot the adapter, or put it in the wrong place, is an error and leaves no folder behind.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import ConfigError, TrainingError, UnsupportedError
from pronghorn.export.folder import whole_folder
from pronghorn.models.experts import low_rank_factors
from pronghorn.models.families import base_causal_lm, has_experts
from pronghorn.parity.distance import MERGED_LOGITS, relative_error

_ROOM = 2**30
"""Bytes beside the weights that a forward of a few tokens takes, with room."""


def save_merged(
    model: Any, tokenizer: Any, folder: str | Path, *, dtype: torch.dtype | None = None, max_shard_size: str = "5GB"
) -> Path:
    """Save `model`, a PEFT model with LoRA adapters (or a plain model), as one merged checkpoint.

    Args:
        model: left untouched.
        tokenizer: saved beside the weights; None saves none.
        folder: where to; must be empty, or not be there.
        dtype: of the checkpoint; None means the base's own 16-bit dtype, bfloat16 if that is float32 or 4-bit.
        max_shard_size: as in `save_pretrained`.
    Returns:
        The folder.
    Raises:
        ConfigError: something is there, it is the current folder or a disk's, or PEFT's `merge_adapter` was called.
        UnsupportedError: an adapter that is not plain LoRA on linears and experts.
        TrainingError: the reloaded checkpoint's logits differ from the adapted model's, or the disk is full.
    """
    target = Path(folder)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already", "choose another folder or delete it")
    here, disk = target.resolve() == Path.cwd(), os.path.ismount(target.resolve())
    if here or disk:  # no other folder can take its place
        what = "the current folder" if here else "where a disk is mounted"
        raise ConfigError(f"{target} is {what}", "give the merged model a folder of its own, in it")
    base = base_causal_lm(model)
    if any(getattr(module, "merged", False) for module in base.modules()):
        # it would be added once more, and comparing with the base model would take it out of the training model
        raise ConfigError(
            "the adapter is merged into the model's weights already", "call model.unmerge_adapter() first"
        )
    own = base.get_input_embeddings().weight.dtype
    dtype = dtype or (own if own in (torch.float16, torch.bfloat16) else torch.bfloat16)
    with whole_folder(target) as writing:
        merged = _merged_copy(base, dtype)
        merged.save_pretrained(writing, max_shard_size=max_shard_size)
        del merged
        if tokenizer is not None:
            tokenizer.save_pretrained(writing)
        _check(model, writing, dtype)
    return target


def _merged_copy(base: Any, dtype: torch.dtype) -> Any:
    """A plain model of the base's class on the CPU that owns the merged weights."""
    original = type(base)
    handle = getattr(base, "_pronghorn_handle", None)
    if handle is not None:
        original = handle.original_class
    config = type(base.config).from_dict(base.config.to_dict())
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config.dtype = dtype
    state = merged_state(base, dtype)
    # `modules_to_save` trains a copy of a tied head or embedding: tying them again would drop one of the two
    embedding, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    config.tie_word_embeddings = config.tie_word_embeddings and torch.equal(embedding, head)
    with torch.device("meta"):
        plain = original(config)
    plain.load_state_dict(state, strict=True, assign=True)
    plain.tie_weights()
    # buffers that are no part of the state (RoPE's frequencies) come from the model itself
    for name, buffer in base.named_buffers():
        clean = name.replace(".base_layer", "")
        if clean in dict(plain.named_buffers()):
            module, _, leaf = clean.rpartition(".")
            setattr(plain.get_submodule(module), leaf, buffer.detach().cpu())
    plain.generation_config = base.generation_config
    return plain


@torch.no_grad()
def merged_state(base: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The base's state dict under its plain names, adapters merged, on the CPU in `dtype`."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    state: dict[str, Tensor] = {}

    def put(name: str, tensor: Tensor) -> None:
        state[name] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)

    def visit(module: nn.Module, prefix: str) -> None:
        if isinstance(module, ModulesToSaveWrapper):
            active = [] if module.disable_adapters else module.active_adapters  # those that have a copy
            visit(module.modules_to_save[active[0]] if active else module.original_module, prefix)
        elif hasattr(module, "token_adapter"):  # some rows of an embedding or head were trained
            rows: Any = module.token_adapter
            active = [] if rows.disable_adapters else rows.active_adapters
            put(f"{prefix}weight", rows.get_merged_weights(active))
        elif hasattr(module, "parameter_name"):  # an adapter of experts or router, around them or another adapter
            experts: Any = module
            visit(experts.base_layer, prefix)
            weight = experts.get_param().float()
            for adapter in [] if experts.disable_adapters else experts.active_adapters:
                if adapter in experts.lora_A:
                    a, b = low_rank_factors(experts, adapter)
                    delta = experts.scaling[adapter] * (b.float() @ a.float())
                    transposed = getattr(experts.get_base_layer(), "is_transposed", False)
                    weight = weight + (delta.mT if transposed else delta).reshape(weight.shape)
            put(f"{prefix}{experts.parameter_name}", weight)
        elif isinstance(module, BaseTunerLayer):
            layer: Any = module
            weight = dense_weight(layer.get_base_layer())
            for adapter in [] if layer.disable_adapters else layer.active_adapters:
                _refuse_other_than_lora(layer, prefix, adapter)
                if adapter in layer.lora_A:
                    weight = weight + layer.get_delta_weight(adapter).float()
            put(f"{prefix}weight", weight)
            if layer.get_base_layer().bias is not None:
                put(f"{prefix}bias", layer.get_base_layer().bias)
        elif type(module).__name__ == "Linear4bit":
            linear: Any = module
            put(f"{prefix}weight", dense_weight(linear))
            if linear.bias is not None:
                put(f"{prefix}bias", linear.bias)
        else:
            persistent = {n: b for n, b in module.named_buffers(recurse=False) if n in module.state_dict()}
            for name, tensor in [*module.named_parameters(recurse=False), *persistent.items()]:
                put(f"{prefix}{name}", tensor)
            for name, child in module.named_children():
                visit(child, f"{prefix}{name}.")

    visit(base, "")
    return state


def _refuse_other_than_lora(layer: Any, prefix: str, adapter: str) -> None:
    """Raise UnsupportedError for an adapter that is more than W + s·B·A of a linear (loaded from another library)."""
    for kind, there in (
        ("is not LoRA on a linear", not (hasattr(layer, "lora_A") and isinstance(layer.get_base_layer(), nn.Linear))),
        ("is DoRA", bool(getattr(layer, "use_dora", {}).get(adapter))),
        ("has a bias of its own", bool(getattr(layer, "lora_bias", {}).get(adapter))),
    ):
        if there:
            raise UnsupportedError(
                f"the adapter of {prefix.removesuffix('.')} {kind}, which save_pretrained_merged can't merge",
                "save the adapter with save_pretrained, or merge it with PEFT's merge_and_unload",
            )


def dense_weight(linear: Any) -> Tensor:
    """A linear's weight as float32 [out, in], dequantised if bitsandbytes holds it in 4 bits."""
    if not linear.weight.is_floating_point() and getattr(linear.weight, "quant_state", None) is None:
        raise UnsupportedError(
            f"{type(linear).__name__} holds {linear.weight.dtype} weights, which can't be merged",
            "save the adapter with save_pretrained, or load the model in 16 or 4 bits",
        )
    if getattr(linear.weight, "quant_state", None) is None:
        return linear.weight.float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state).float()


def _place_beside(device: torch.device, folder: Path) -> torch.device:
    """Where a checkpoint is loaded beside the adapted model: on its device, or on the CPU if that has no room."""
    if device.type != "cuda":
        return device
    torch.cuda.empty_cache()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return device if size + _ROOM <= torch.cuda.mem_get_info(device)[0] else torch.device("cpu")


@torch.no_grad()
def _check(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Load what was saved and compare its logits with the adapted model's on a fixed batch of tokens."""
    from transformers import AutoModelForCausalLM

    base = base_causal_lm(model)
    tokens = torch.arange(32, device=base.device)[None] * 7 % base.config.vocab_size
    tokens[0, -4:] = base.config.vocab_size - 1 - torch.arange(4, device=base.device)  # where new tokens are
    was_training = model.training
    model.eval()
    try:
        adapted = model(input_ids=tokens).logits.float()
        plain = None
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                plain = model(input_ids=tokens).logits.float()
    finally:
        model.train(was_training)
    place = _place_beside(base.device, folder)
    reloaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": place}, trust_remote_code=False
    ).eval()
    merged = reloaded(input_ids=tokens.to(place)).logits.to(adapted)
    if has_experts(base.config):  # rounding sends a token or two to other experts, so only the median token counts
        error = ((merged - adapted).norm(dim=-1) / adapted.norm(dim=-1)).median().item()
    else:
        error = relative_error(merged, adapted)
    limit = MERGED_LOGITS[dtype].limit(0.0)  # a forgotten adapter that was trained at all is far beyond it
    if not error <= limit:
        raise TrainingError(
            f"the merged checkpoint's logits differ from the adapted model's by {error:.2e} (limit {limit:.0e})",
            "keep the adapter (save_pretrained) and report this: the merge is wrong",
        )
    if plain is not None:
        # How far the merge went from the base model (0) to the adapted one (1). Rounding hardly lies along that
        # direction, so this sees adapters whose whole effect is well below `limit`.
        direction = adapted - plain
        learned = (direction.norm() / adapted.norm()).item()
        share = ((merged - plain) * direction).sum().item() / max(direction.square().sum().item(), 1e-30)
        if learned > limit / 10 and not 0.5 < share < 1.5:
            raise TrainingError(
                f"the merged checkpoint holds {share:.0%} of what the adapter changes in the logits",
                "keep the adapter (save_pretrained) and report this: the merge is wrong",
            )
