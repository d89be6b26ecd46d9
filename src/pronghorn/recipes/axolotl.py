"""Read Axolotl's keys, as its configuration reference documents them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.recipes.draft import Draft, batch_size, refuse_preferences, warm_up

_SAME = {
    "base_model": "model.name",
    "sequence_len": "model.max_seq_length",
    "trust_remote_code": "model.trust_remote_code",
    "lora_r": "adapter.r",
    "lora_alpha": "adapter.lora_alpha",
    "lora_dropout": "adapter.lora_dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_target_parameters": "adapter.target_parameters",
    "peft_use_rslora": "adapter.use_rslora",
    "peft_use_dora": "adapter.use_dora",
    "tokens": "adapter.new_tokens",
    "default_system_message": "data.system_prompt",
    "dataset_num_proc": "data.workers",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "num_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "optimizer": "train.optimizer",
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "neftune_noise_alpha": "train.neftune_noise_alpha",
    "logging_steps": "train.logging_steps",
    "save_steps": "train.save_steps",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "train.eval_steps",
    "early_stopping_patience": "train.patience",
    "seed": "train.seed",
    "output_dir": "train.output",
    "tf32": "precision.tf32",
}
_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3", "qwen_25": "qwen-2.5", "gemma": "gemma", "mistral_v1": "mistral"}
_KERNELS = "Pronghorn's own attention and kernels"
_PACKED = "rows are always packed and full"
_NEEDLESS = {
    "auto_resume_from_checkpoints": "the same command goes on",
    "bf16": "precision.dtype: auto is bf16 on a GPU that has it",
    "chat_template": "the tokenizer's own template is the default",
    "dataset_prepared_path": "tokenised data are cached by themselves",
    "eval_sample_packing": _PACKED,
    "flash_attention": _KERNELS,
    "gradient_checkpointing": "memory.gradient_checkpointing: auto keeps what fits and recomputes the rest",
    "gradient_checkpointing_kwargs": "memory.gradient_checkpointing: auto",
    "is_llama_derived_model": "read from the model",
    "liger_glu_activation": _KERNELS,
    "liger_fused_linear_cross_entropy": _KERNELS,
    "liger_layer_norm": _KERNELS,
    "liger_rms_norm": _KERNELS,
    "liger_rope": _KERNELS,
    "lora_mlp_kernel": _KERNELS,
    "lora_o_kernel": _KERNELS,
    "lora_qkv_kernel": _KERNELS,
    "lora_target_linear": "adapter.target_modules: all-linear is the default",
    "model_type": "read from the model",
    "pad_to_sequence_len": _PACKED,
    "plugins": _KERNELS,
    "sample_packing": _PACKED,
    "sdp_attention": _KERNELS,
    "shuffle_merged_datasets": "documents are always shuffled",
    "tokenizer_type": "read from the model",
    "torch_compile": _KERNELS,
    "train_on_inputs": "data.loss_on: completion is the default",
    "xformers_attention": _KERNELS,
}
_LOST = {
    "cosine_min_lr_ratio": "schedules end at zero",
    "deepspeed": "pronghorn train uses all GPUs of the machine; each holds the whole model",
    "evals_per_epoch": "train.eval_steps counts steps, with data.eval",
    "fsdp": "pronghorn train uses all GPUs of the machine; each holds the whole model",
    "fsdp_config": "as fsdp",
    "group_by_length": "packing fills rows instead",
    "hub_model_id": "upload after training: docs/after-training.md",
    "load_in_8bit": "model.load_in_4bit: true, or 16-bit weights (the default)",
    "saves_per_epoch": "train.save_steps counts steps; a checkpoint is saved every ten minutes anyway",
    "special_tokens": "tokens that the tokenizer has stay; new ones go into adapter.new_tokens",
    "unfrozen_parameters": "adapter.method: full trains every weight, adapter.modules_to_save whole modules",
    "val_set_size": "hold rows out in a file of their own, and name it in data.eval",
}


def convert(draft: Draft, folder: Path) -> None:
    """Turn Axolotl's keys into a recipe's."""
    for key in ("rl", "reward_model", "process_reward_model"):
        if task := draft.take(key):
            refuse_preferences(f"{key}: {task}")
    adapter = draft.take("adapter")
    draft.put("adapter.method", "lora" if adapter else "full", f"adapter: {adapter or '(none)'}")
    if adapter == "qlora" or draft.given.get("load_in_4bit"):
        draft.put("model.load_in_4bit", True, "adapter: qlora" if adapter == "qlora" else "load_in_4bit")
    draft.take("load_in_4bit")
    if adapter not in (None, "lora", "qlora"):
        draft.lost["adapter"] = f"{adapter!r} is not here; lora is written instead"
    if adapter is None:  # an example's left-over LoRA keys say nothing of full fine-tuning
        for key in [key for key in draft.given if key.startswith(("lora_", "peft_"))]:
            draft.needless[key] = "full fine-tuning has no adapter"
            del draft.given[key]
    if "sequence_len" not in draft.given:
        draft.put("model.max_seq_length", 512, "sequence_len's default")
    draft.copy(_SAME)
    if resumed := draft.take("lora_model_dir"):
        draft.put("model.name", str(resumed), "lora_model_dir; its base is named in its adapter_config.json")
    batch_size(draft, "micro_batch_size", 1, bool(draft.given.get("sample_packing")))
    _targets(draft)
    _data(draft)
    draft.put("train.lr_scheduler", draft.take("lr_scheduler", "cosine"), "lr_scheduler")
    warm_up(draft)
    if draft.given.get("gradient_checkpointing") is False:
        draft.put("memory.gradient_checkpointing", draft.take("gradient_checkpointing"), "gradient_checkpointing")
    if draft.take("fp16") is True:
        draft.put("precision.dtype", "float16", "fp16")
    if draft.given.get("train_on_inputs"):
        draft.put("data.loss_on", "all" if draft.take("train_on_inputs") else "completion", "train_on_inputs")
    for tool, key in (("wandb", "wandb_project"), ("tensorboard", "use_tensorboard")):
        if draft.given.get(key):
            draft.take(key)
            draft.lost[key] = f"train.report_to: [{tool}], once {tool} is installed"
    for key in [key for key in draft.given if key.startswith("wandb_")]:
        draft.lost[key] = "wandb reads it from its environment variables"
        del draft.given[key]
    special = draft.given.get("special_tokens")
    if isinstance(special, dict) and set(special) <= {"pad_token", "eos_token", "bos_token", "unk_token"}:
        draft.take("special_tokens")
        draft.needless["special_tokens"] = "packed rows have no padding; the tokenizer's own tokens stay"
    draft.explain(_LOST, _NEEDLESS)


def _targets(draft: Draft) -> None:
    """Take over which linears get adapters."""
    targets = draft.take("lora_target_modules")
    if targets and draft.given.get("lora_target_linear") is True:
        draft.needless["lora_target_modules"] = "among all linears"
    elif targets:
        draft.put("adapter.target_modules", targets, "lora_target_modules")


def _data(draft: Draft) -> None:
    """Take over the data sets, and the template that they go through."""
    for key in ("datasets", "pretraining_dataset"):
        sets = draft.take(key) or []
        sets = [{"path": sets, "type": "completion"}] if isinstance(sets, str) else sets
        if sets:
            draft.put("data.train", [_source(draft, table, key) for table in sets], key)
    if held_out := draft.take("test_datasets"):
        draft.put("data.eval", [_source(draft, table, "test_datasets") for table in held_out], "test_datasets")
    template = draft.given.get("chat_template")
    if template in _TEMPLATES:
        draft.put("data.chat_template", _TEMPLATES[draft.take("chat_template")], f"chat_template: {template}")
    elif file := draft.take("chat_template_jinja"):
        draft.take("chat_template")
        draft.lost["chat_template_jinja"] = (
            f"save it as a .jinja file and name that in data.chat_template ({file!r:.20})"
        )
    elif template not in (None, "tokenizer_default"):
        draft.lost["chat_template"] = (
            f"{draft.take('chat_template')}: the tokenizer's own is used, or give a .jinja file"
        )


def _source(draft: Draft, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return one data set as a source of a recipe."""
    table = {key: value for key, value in table.items() if value is not None}
    files, path, kind = table.pop("data_files", None), table.pop("path"), table.pop("type", None)
    files = [files] if isinstance(files, str) else files
    source: dict[str, Any] = {"path": files[0] if files and len(files) == 1 else path}
    if files and len(files) > 1:
        draft.lost[f"{where}.data_files"] = "name table file as a source of its own"
    columns: dict[str, str] = {}
    if isinstance(kind, dict):  # a format of one's own: columns of Alpaca's
        names = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
        columns = {ours: kind[name] for name, ours in (names | {"field_system": "system"}).items() if kind.get(name)}
        source["format"] = "alpaca"
    elif kind == "completion":
        source["format"], columns = "text", {"text": table.pop("field", "text")}
    elif kind == "input_output":
        draft.lost[f"{where}.type"] = "input_output: write rows of prompt and completion"
    elif str(kind).startswith(("chat_template", "sharegpt")):
        _turns(table, source, columns, str(kind))
    elif str(kind).startswith("alpaca"):
        source["format"] = "alpaca"
        draft.needless[f"{where}.type"] = f"{kind}: rows become conversations of the chat template"
    elif kind is not None:
        draft.lost[f"{where}.type"] = (
            f"{kind}: the format is recognised by its keys, or set data.format and data.columns"
        )
    if renamed := {ours: name for ours, name in columns.items() if ours != name}:
        source["columns"] = renamed
    for key, served in (("split", "train"), ("ds_type", None), ("roles", None), ("shards", None), ("name", None)):
        value = table.pop(key, None)
        if key == "ds_type" or value in (None, served):
            continue
        hint = {"split": "the split `train` is read", "name": "save that configuration to a file"}.get(key, "left out")
        draft.lost[f"{where}.{key}"] = f"{value!r}: {hint}"
    for key, value in table.items():
        if key in ("roles_to_train", "train_on_eos", "message_property_mappings", "message_field_training"):
            draft.needless[f"{where}.{key}"] = "every assistant turn is supervised, with the token that ends it"
        else:
            draft.lost[f"{where}.{key}"] = f"{value!r}: no equivalent: leave it out"
    return source


def _turns(table: dict[str, Any], source: dict[str, Any], columns: dict[str, str], kind: str) -> None:
    """Take over how the turns of a conversation are called."""
    roles = table.pop("message_property_mappings", None) or {}
    role = roles.get("role") or table.pop("message_field_role", None)
    table.pop("message_field_content", None)
    field = table.pop("field_messages", "conversations" if kind.startswith("sharegpt") else "messages")
    table.pop("chat_template", None)
    form = "sharegpt" if role == "from" or kind.startswith("sharegpt") else "messages"
    source["format"] = form
    columns["conversations" if form == "sharegpt" else "messages"] = field
