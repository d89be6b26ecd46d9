"""Read Axolotl's keys, as its configuration reference documents them."""

from __future__ import annotations

import re
from typing import Any

from pronghorn.data.messages import WEIGHTS
from pronghorn.recipes import common
from pronghorn.recipes.common import KERNELS, PACKED
from pronghorn.recipes.draft import Draft

_SAME = {
    "base_model": "model.name",
    "sequence_len": "model.max_seq_length",
    "lora_r": "adapter.r",
    "lora_alpha": "adapter.lora_alpha",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_target_parameters": "adapter.target_parameters",
    "lora_rank_pattern": "adapter.rank_pattern",
    "lora_alpha_pattern": "adapter.alpha_pattern",
    "peft_use_rslora": "adapter.use_rslora",
    "peft_use_dora": "adapter.use_dora",
    "peft_init_lora_weights": "adapter.init_lora_weights",
    "tokens": "adapter.new_tokens",
    "default_system_message": "data.system_prompt",
    "dataset_num_proc": "data.workers",
    "dataset_processes": "data.workers",
    "num_epochs": "train.epochs",
    "optimizer": "train.optimizer",
    "learning_rate": "train.learning_rate",
    "early_stopping_patience": "train.patience",
    "noisy_embedding_alpha": "train.neftune_noise_alpha",
}
_TEMPLATES = {"chatml": "chatml", "gemma": "gemma", "llama3": "llama-3", "qwen3": "qwen-3", "qwen_25": "qwen-2.5"}
"""Those that write the same text as one of ours."""
_BUILDERS = ("arrow", "csv", "json", "parquet", "text")
"""What `path` says of files that `data_files` names."""
_SUPERVISED = {"roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]), "train_on_eos": ("turn",)}
"""What a data set asks for that happens anyway."""
_SOURCES = {
    "chat_template_jinja": "save it as a .jinja file and name that in data.chat_template",
    "message_field_training": "call the turns' key `train` in the data",
    "shards": "max_samples reads the first rows of a source",
}
_TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
_NEEDLESS = {
    **dict.fromkeys(
        (
            *("attention", "attn_implementation", "flash_attention", "sdp_attention", "xformers_attention"),
            *("liger_glu_activation", "liger_layer_norm", "liger_rms_norm", "liger_rope"),
            *("liger_fused_linear_cross_entropy", "lora_mlp_kernel", "lora_o_kernel", "lora_qkv_kernel"),
            "torch_compile",
        ),
        KERNELS,
    ),
    **dict.fromkeys(("eval_batch_size", "eval_sample_packing", "pad_to_sequence_len", "sample_packing"), PACKED),
    **dict.fromkeys(("is_llama_derived_model", "model_type", "tokenizer_type"), "read from the model"),
    "auto_resume_from_checkpoints": "the same command goes on",
    "chat_template": "the tokenizer's own template is the default",
    "dataset_prepared_path": "tokenised data are cached by themselves",
    "eot_tokens": "the end of a turn, as the template writes it, is supervised",
    "lora_target_linear": "adapter.target_modules: all-linear is the default",
    "quantize_moe_experts": "model.load_in_4bit stores experts so, too",
    "save_safetensors": "weights are always saved so",
    "shuffle_merged_datasets": "documents are always shuffled",
    "train_on_inputs": "data.loss_on: completion is the default",
}
_LOST = {
    "base_model_config": "the checkpoint's own configuration and tokenizer are used",
    "cosine_min_lr_ratio": "train.lr_scheduler: cosine_with_min_lr, if a cosine will do",
    "batch_size": "train.gradient_accumulation_steps: batch_size divided by micro_batch_size",
    "evals_per_epoch": "train.eval_steps counts steps, with data.eval",
    "group_by_length": "packing fills rows instead",
    "load_in_8bit": "model.load_in_4bit: true, or 16-bit weights (the default)",
    "saves_per_epoch": "train.save_steps counts steps; a checkpoint is saved every ten minutes anyway",
    "shuffle_merged_datasets": "documents are always shuffled",
    "special_tokens": "tokens that the tokenizer has stay; new ones go into adapter.new_tokens",
    "tokenizer_config": "the checkpoint's own tokenizer is used",
    "unfrozen_parameters": "adapter.method: full trains every weight, adapter.modules_to_save whole modules",
}


def convert(draft: Draft) -> None:
    """Turn Axolotl's keys into a recipe's."""
    for key in ("rl", "reward_model", "process_reward_model"):
        if task := draft.take(key):
            common.refuse_preferences(f"{key}: {task}")
    adapter = draft.take("adapter")
    draft.put("adapter.method", "lora" if adapter else "full", f"adapter: {adapter or '(none)'}")
    if draft.asked("load_in_4bit") or adapter == "qlora":
        draft.put("model.load_in_4bit", True, "adapter: qlora" if adapter == "qlora" else "load_in_4bit")
    if adapter not in (None, "lora", "qlora"):
        draft.lost["adapter"] = f"{adapter!r} is not here; lora is written instead"
    if adapter is None:  # an example's left-over LoRA keys say nothing of full fine-tuning
        common.without_adapter(draft, ("lora_", "peft_"))
        if draft.asked("tokens"):
            draft.lost["tokens"] = "for full fine-tuning add them to the model's folder beforehand"
    if "sequence_len" not in draft.given:
        draft.put("model.max_seq_length", 512, "sequence_len's default")
    draft.given.setdefault("output_dir", "./model-out")
    common.max_steps(draft)
    common.resumed(draft)
    draft.copy(common.SAME | _SAME)
    draft.names["data"] = "datasets"
    common.load_best(draft, _loads_best(draft.recipe["train"]))
    if resumed := draft.take("lora_model_dir"):
        draft.put("model.name", str(resumed), "lora_model_dir; its base is named in its adapter_config.json")
    common.batch_size(draft, "micro_batch_size", 1, bool(draft.given.get("sample_packing")))
    plugins = draft.take("plugins", [])
    for name in [plugins] if isinstance(plugins, str) else plugins:
        is_kernel = any(word in name for word in ("cut_cross_entropy", "kernels", "liger"))  # its numbers are the same
        told = draft.needless if is_kernel else draft.lost
        told[f"plugins {name}"] = KERNELS if is_kernel else "no equivalent: leave it out"
    _targets(draft)
    _data(draft)
    common.hold_out(draft, "val_set_size")
    draft.put("train.lr_scheduler", shape := draft.take("lr_scheduler", "cosine"), "lr_scheduler")
    if shape == "cosine" and (least := draft.asked("cosine_min_lr_ratio")):
        draft.put("train.lr_scheduler", "cosine_with_min_lr", "cosine_min_lr_ratio")
        draft.put("train.lr_scheduler_kwargs", {"min_lr_rate": least}, "cosine_min_lr_ratio")
    common.warm_up(draft, 0.03, 100)
    if draft.given.get("gradient_checkpointing") is False:
        draft.put("memory.gradient_checkpointing", draft.take("gradient_checkpointing"), "gradient_checkpointing")
    _dtype(draft)
    if draft.asked("train_on_inputs"):
        draft.put("data.loss_on", "all", "train_on_inputs; headers of turns are trained, too")
    for tool, key in (("wandb", "wandb_project"), ("tensorboard", "use_tensorboard")):
        if draft.asked(key):
            draft.lost[key] = f"train.report_to: [{tool}], once {tool} is installed"
    for key in [key for key in draft.given if key.startswith("wandb_")]:
        draft.lost[key] = "wandb reads it from its environment variables"
        del draft.given[key]
    special = draft.given.get("special_tokens")
    if isinstance(special, dict) and set(special) <= {"pad_token", "eos_token", "bos_token", "unk_token"}:
        draft.take("special_tokens")
        draft.needless["special_tokens"] = "packed rows have no padding; the tokenizer's own tokens stay"
    draft.explain(common.LOST | _LOST, common.NEEDLESS | _NEEDLESS, unless=("shuffle_merged_datasets",))


def _dtype(draft: Draft) -> None:
    """Take over the dtype: bf16 goes before 16 bits of the other kind, except where it is to be found out."""
    asked = [key for key in ("bfloat16", "float16", "fp16") if draft.asked(key)]
    bf16 = draft.given.get("bf16", "auto")
    if "bfloat16" in asked or (bf16 == "auto" and "fp16" not in asked) or (bf16 and bf16 != "auto"):
        draft.needless |= dict.fromkeys(asked, "bf16 goes before it")
    else:
        draft.put("precision.dtype", "float16" if asked else "float32", " ".join(asked) or "neither bf16 nor fp16")


def _loads_best(train: dict[str, Any]) -> bool:
    """Tell whether Axolotl loads the best checkpoint by default: where each one was evaluated."""
    saved, evaluated = train.get("save_steps"), train.get("eval_steps")
    return bool(train.get("patience") or (saved and evaluated and saved % evaluated == 0))


def _targets(draft: Draft) -> None:
    """Take over which linears get adapters."""
    targets = draft.take("lora_target_modules")
    if targets and draft.given.get("lora_target_linear") is True:
        wide = [name for name in ("embed_tokens", "lm_head") if name in targets]  # no linears of a layer
        if wide:
            draft.lost["lora_target_modules"] = f"{', '.join(wide)}: adapter.modules_to_save trains such modules whole"
        else:
            draft.needless["lora_target_modules"] = "among all linears"
    elif isinstance(targets, str) and re.search(r"[^\w.,\s-]", targets):
        told = "a regular expression; adapter.target_modules names linears, e.g. [q_proj, v_proj]"
        draft.lost["lora_target_modules"] = f"{targets!r:.120}: {told}"
    elif targets:
        draft.put("adapter.target_modules", targets, "lora_target_modules")


def _data(draft: Draft) -> None:
    """Take over the data sets, and the template that they go through."""
    for key in ("datasets", "pretraining_dataset"):
        sets = draft.take(key) or []
        sets = [sets] if isinstance(sets, str | dict) else sets
        sets = [{"path": each} if isinstance(each, str) else each for each in sets]
        if key == "pretraining_dataset":
            sets = [_texts(each) for each in sets]
        if sets:
            templates = {each.get("chat_template") for each in sets}
            if len(templates) == 1 and None not in templates and "chat_template_jinja" not in draft.given:
                draft.given.setdefault("chat_template", templates.pop())
            texts = [each.get("type") == "completion" for each in sets]
            draft.put("data.train", _sources(draft, sets, key), key)
            draft.put("data.overflow", "split" if all(texts) else "drop", f"as {key} there")
            if any(texts) and not all(texts):
                more = "texts over sequence_len are split there; data.overflow holds for all sources"
                draft.lost[f"{key}.type"] = f"completion: {more}"
    too_long = str(draft.take("excess_length_strategy", ""))
    if too_long in _TOO_LONG and draft.recipe.get("data", {}).get("overflow") != "split":
        draft.put("data.overflow", _TOO_LONG[too_long], "excess_length_strategy")
    if held_out := draft.take("test_datasets"):
        draft.put("data.eval", _sources(draft, held_out, "test_datasets"), "test_datasets")
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


def _texts(table: dict[str, Any]) -> dict[str, Any]:
    """Return a data set of `pretraining_dataset`, whose rows are texts, as one of `datasets`."""
    field = table.get("text_column") or "text"
    rest = {key: value for key, value in table.items() if key not in ("text_column", "type")}
    return {**rest, "type": "completion", "field": field}


def _sources(draft: Draft, tables: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return data sets as sources of a recipe: of one whose `data_files` are local each file."""
    sources, of_all = list[dict[str, Any]](), where
    for index, table in enumerate(tables):
        where = f"{of_all}.{index}" if len(tables) > 1 else of_all  # each tells what it loses
        files = table.get("data_files")
        if files and table["path"] in _BUILDERS:
            plain = {key: value for key, value in table.items() if key != "data_files"}
            files = [files] if isinstance(files, str) else files
            sources += [_source(draft, {**plain, "path": file}, where) for file in files]
        else:
            sources.append(_source(draft, table, where))
    return sources


def _source(draft: Draft, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return one data set as a source of a recipe."""
    table = {key: value for key, value in table.items() if value is not None}
    path, kind = table.pop("path"), table.pop("type", None)
    source: dict[str, Any] = {"path": path}
    common.tell_lines(draft, where, path)
    if table.pop("data_files", None):
        draft.lost[f"{where}.data_files"] = f"download them from {path}, and name each file as a source of its own"
    columns: dict[str, str] = {}
    if isinstance(kind, dict):  # a format of one's own: columns of Alpaca's
        names = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
        columns = {ours: kind[name] for name, ours in (names | {"field_system": "system"}).items() if kind.get(name)}
        source["format"] = "alpaca"
        told = {"system_prompt": "data.system_prompt holds for all sources"}
        for key in [key for key, value in kind.items() if value and key not in ("field_system", *names)]:
            instead = told.get(key, "rows become conversations of the chat template; or write prompt and completion")
            draft.lost[f"{where}.type.{key}"] = f"{kind[key]!r:.40}: {instead}"
    elif kind == "completion":
        source["format"], columns = "text", {"text": table.pop("field", "text")}
    elif kind == "input_output":
        draft.lost[f"{where}.type"] = "input_output: write rows of prompt and completion"
    elif str(kind).startswith(("chat_template", "sharegpt")):
        _turns(draft, table, source, columns, str(kind), where)
    elif str(kind).startswith("alpaca"):
        source["format"] = "alpaca"
        wording = "its own wording is not written: rows become conversations of the chat template"
        draft.lost[f"{where}.type"] = f"{kind}: {wording}; or write prompt and completion"
    elif kind is not None:
        draft.lost[f"{where}.type"] = (
            f"{kind}: the format is recognised by its keys, or set data.format and data.columns"
        )
    if renamed := {ours: name for ours, name in columns.items() if ours != name}:
        source["columns"] = renamed
    common.of_hub(source, table, {"split": "split", "name": "config", "revision": "revision"})
    table.pop("ds_type", None)  # recognised
    roles = (table.pop("roles", None) or {}).values()
    called = [name for each in roles for name in ([each] if isinstance(each, str) else each)]
    common.tell_roles(draft, f"{where}.roles", called, source.get("format", "messages"))
    for key, value in table.items():
        if value in _SUPERVISED.get(key, ()):
            draft.needless[f"{where}.{key}"] = "every assistant turn is supervised, with the token that ends it"
        elif key == "message_field_training" and value in WEIGHTS:
            draft.needless[f"{where}.{key}"] = f"turns whose {value} is false or 0 are not supervised"
        else:
            draft.lost[f"{where}.{key}"] = f"{value!r}: {_SOURCES.get(key, 'no equivalent: leave it out')}"
    return source


def _turns(
    draft: Draft, table: dict[str, Any], source: dict[str, Any], columns: dict[str, str], kind: str, where: str
) -> None:
    """Take over how the turns of a conversation are called."""
    names = table.pop("message_property_mappings", None) or {}
    role = names.get("role") or table.pop("message_field_role", None)
    content = names.get("content") or table.pop("message_field_content", None)
    field = table.pop("field_messages", "conversations" if kind.startswith("sharegpt") else "messages")
    template = table.pop("chat_template", None)
    if template not in (None, "tokenizer_default", draft.given.get("chat_template")):
        draft.lost[f"{where}.chat_template"] = f"{template}: data.chat_template holds for all sources"
    form = "sharegpt" if role == "from" or kind.startswith("sharegpt") else "messages"
    common.tell_keys(draft, f"{where}.message_property_mappings", (role, content), form)
    source["format"] = form
    columns["conversations" if form == "sharegpt" else "messages"] = field
