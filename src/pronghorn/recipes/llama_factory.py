"""Read LLaMA-Factory's keys, as its documentation lists them, and the data sets that its dataset_info.json names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pronghorn.recipes.draft import Draft, batch_size, refuse_preferences, warm_up

_SAME = {
    "model_name_or_path": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "lora_dropout": "adapter.lora_dropout",
    "use_rslora": "adapter.use_rslora",
    "use_dora": "adapter.use_dora",
    "max_samples": "data.max_samples",
    "default_system": "data.system_prompt",
    "preprocessing_num_workers": "data.workers",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "max_steps": "train.max_steps",
    "optim": "train.optimizer",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "neftune_noise_alpha": "train.neftune_noise_alpha",
    "logging_steps": "train.logging_steps",
    "save_steps": "train.save_steps",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "train.eval_steps",
    "seed": "train.seed",
    "output_dir": "train.output",
    "tf32": "precision.tf32",
}
_DEFAULTS = {
    "cutoff_len": ("model.max_seq_length", 2048),
    "num_train_epochs": ("train.epochs", 3.0),
    "learning_rate": ("train.learning_rate", 5e-5),
    "lr_scheduler_type": ("train.lr_scheduler", "linear"),
}
"""Keys whose default there is another than here: ours, and that default."""
_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3", "qwen": "qwen-2.5", "gemma": "gemma", "mistral": "mistral"}
_KERNELS = "Pronghorn's own attention and kernels"
_PACKED = "rows are always packed and full"
_NEEDLESS = {
    "bf16": "precision.dtype: auto is bf16 on a GPU that has it",
    "dataloader_num_workers": "data are tokenised beforehand",
    "ddp_timeout": "leave it out",
    "do_eval": "data.eval is measured before and after training",
    "do_train": "pronghorn train trains",
    "enable_liger_kernel": _KERNELS,
    "eval_strategy": "train.eval_steps, with data.eval",
    "flash_attn": _KERNELS,
    "neat_packing": _PACKED,
    "overwrite_cache": "the cache knows when data change",
    "overwrite_output_dir": "a run never writes over another: choose a new train.output",
    "packing": _PACKED,
    "per_device_eval_batch_size": _PACKED,
    "plot_loss": "report.html draws it",
    "resume_from_checkpoint": "the same command goes on",
    "save_only_model": "checkpoints hold what resuming needs",
    "shift_attn": _KERNELS,
    "upcast_layernorm": _KERNELS,
    "use_unsloth": _KERNELS,
    "use_unsloth_gc": "memory.gradient_checkpointing: offload",
}
_LOST = {
    "deepspeed": "pronghorn train uses all GPUs of the machine; each holds the whole model",
    "fsdp": "pronghorn train uses all GPUs of the machine; each holds the whole model",
    "galore_rank": "no GaLore: adapter.method: lora takes less memory",
    "interleave_probs": "weights of the sources: data.train: [{path: …, weight: …}]",
    "loraplus_lr_ratio": "one learning rate for all adapters",
    "mix_strategy": "weights of the sources: data.train: [{path: …, weight: …}]",
    "pissa_init": "adapters begin at zero",
    "report_to": "name the tools in train.report_to, once they are installed",
    "push_to_hub": "upload after training: docs/after-training.md",
    "quantization_bit": "model.load_in_4bit: true is 4 bits; others are not here",
    "use_galore": "no GaLore: adapter.method: lora takes less memory",
    "val_size": "hold rows out in a file of their own, and name it in data.eval",
}


def convert(draft: Draft, folder: Path) -> None:
    """Turn LLaMA-Factory's keys into a recipe's; `folder` is the file's."""
    stage = draft.take("stage", "sft")
    if stage not in ("sft", "pt"):
        refuse_preferences(f"stage: {stage}")
    if adapter := draft.take("adapter_name_or_path"):
        draft.take("model_name_or_path")
        draft.put("model.name", str(adapter), "adapter_name_or_path; its base is named in its adapter_config.json")
    draft.copy(_SAME)
    for name, (ours, default) in _DEFAULTS.items():
        set_there = name in draft.given
        draft.put(ours, draft.take(name, default), name if set_there else f"{name}'s default")
    method = draft.take("finetuning_type", "lora")
    draft.put("adapter.method", "full" if method == "full" else "lora", f"finetuning_type: {method}")
    if method not in ("full", "lora"):
        draft.lost["finetuning_type"] = f"{method} is not here; lora is written instead"
    if method == "lora":
        _adapter(draft)
    if draft.given.get("quantization_bit") == 4:
        draft.take("quantization_bit")
        draft.take("quantization_method")
        draft.put("model.load_in_4bit", True, "quantization_bit: 4")
    _data(draft, folder)
    warm_up(draft)
    if draft.take("fp16") is True:
        draft.put("precision.dtype", "float16", "fp16")
    if draft.take("disable_gradient_checkpointing") is True:
        draft.put("memory.gradient_checkpointing", False, "disable_gradient_checkpointing")
    batch_size(draft, "per_device_train_batch_size", 8, stage == "pt" or bool(draft.given.get("packing")))
    draft.explain(_LOST, _NEEDLESS)


def _adapter(draft: Draft) -> None:
    """Take over LoRA's settings, with the defaults there."""
    rank = draft.take("lora_rank", 8)
    draft.put("adapter.r", rank, "lora_rank")
    draft.put("adapter.lora_alpha", draft.take("lora_alpha", 2 * rank), "lora_alpha (twice the rank by default)")
    target = draft.take("lora_target", "all")
    if target == "all":
        draft.needless["lora_target"] = "adapter.target_modules: all-linear is the default"
    else:
        draft.put("adapter.target_modules", _names(target), "lora_target")
    if whole := draft.take("additional_target"):
        draft.put("adapter.modules_to_save", _names(whole), "additional_target")
    if tokens := draft.take("new_special_tokens"):
        draft.put("adapter.new_tokens", _names(tokens), "new_special_tokens")


def _names(value: Any) -> list[str]:
    """Return names given as a list or between commas."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


def _data(draft: Draft, folder: Path) -> None:
    """Take over the data sets by their entries in dataset_info.json, the template, and what is supervised."""
    place = Path(str(draft.take("dataset_dir", "data")))
    bases = [place] if place.is_absolute() else [folder / place, place]
    base = next((folder for folder in bases if (folder / "dataset_info.json").is_file()), None)
    entries: dict[str, Any] = {}
    if base is not None:
        entries = json.loads((base / "dataset_info.json").read_text(encoding="utf-8"))
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        names = _names(draft.take(key) or [])
        sources = [_source(draft, name, entries.get(name), base or place) for name in names]
        if sources:
            draft.put(ours, sources, key)
    template = draft.take("template")
    if template in _TEMPLATES:
        comment = f"the tokenizer's own; or {_TEMPLATES[template]} (template: {template})"
        draft.put("data.chat_template", None, comment)
    elif template is not None:
        draft.needless["template"] = f"{template}: the tokenizer's own is used; data.chat_template takes a .jinja file"
    if draft.take("train_on_prompt"):
        draft.put("data.loss_on", "all", "train_on_prompt")
    elif draft.take("mask_history"):
        draft.put("data.loss_on", "last", "mask_history")


def _source(draft: Draft, name: str, entry: dict[str, Any] | None, base: Path) -> dict[str, Any]:
    """Return one data set as a source of a recipe."""
    if entry is None:
        draft.lost[f"dataset {name}"] = f"no entry in {base / 'dataset_info.json'}: write its path into data.train"
        return {"path": str(base / f"{name}.json")}
    if entry.get("ranking"):
        refuse_preferences(f"{name} (ranking: true)")
    path = entry.get("hf_hub_url") or entry.get("ms_hub_url") or str(base / entry.get("file_name", f"{name}.json"))
    columns, tags = dict(entry.get("columns") or {}), entry.get("tags") or {}
    if entry.get("formatting") == "sharegpt":
        turns = columns.pop("messages", "conversations")
        form = "messages" if tags.get("role_tag", "from") == "role" else "sharegpt"
        renamed = {"conversations" if form == "sharegpt" else "messages": turns}
    elif set(columns) == {"prompt"}:
        form, renamed = "text", {"text": columns.pop("prompt")}
    else:
        form, names = "alpaca", {"prompt": "instruction", "query": "input", "response": "output"}
        renamed = {ours: columns.pop(name) for name, ours in names.items() if name in columns}
    renamed |= {key: value for key, value in columns.items() if key in ("system", "history", "tools")}
    source: dict[str, Any] = {"path": path, "format": form}
    if renamed := {ours: name for ours, name in renamed.items() if ours != name}:
        source["columns"] = renamed
    for key in ("split", "subset", "num_samples"):
        if entry.get(key) not in (None, "train"):
            draft.lost[f"dataset {name}.{key}"] = f"{entry[key]!r}: save that part to a file"
    return source
