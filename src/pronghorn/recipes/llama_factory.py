"""Read LLaMA-Factory's keys, as its documentation lists them, and the data sets that its dataset_info.json names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pronghorn.data.formats import FORMATS
from pronghorn.errors import ConfigError
from pronghorn.recipes import common
from pronghorn.recipes.common import KERNELS, PACKED
from pronghorn.recipes.draft import Draft

_SAME = {
    "model_name_or_path": "model.name",
    "use_rslora": "adapter.use_rslora",
    "use_dora": "adapter.use_dora",
    "max_samples": "data.max_samples",
    "default_system": "data.system_prompt",
    "preprocessing_num_workers": "data.workers",
    "optim": "train.optimizer",
    "early_stopping_steps": "train.patience",
}
_LORA_S = ("lora", "use_rslora", "use_dora", "pissa", "additional_target")
"""What keys of adapters begin with."""
_DEFAULTS = {
    "cutoff_len": ("model.max_seq_length", 2048),
    "num_train_epochs": ("train.epochs", 3.0),
    "learning_rate": ("train.learning_rate", 5e-5),
    "lr_scheduler_type": ("train.lr_scheduler", "linear"),
}
"""Keys whose default there is another than here: ours, and that default."""
_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3", "qwen": "qwen-2.5", "gemma": "gemma", "mistral": "mistral"}
_OWN = ("alpaca", "default", "empty", "fewshot", "vicuna", "zephyr")
"""Templates there that models' tokenizers hardly have."""
_READ = {
    *("file_name", "file_sha1", "hf_hub_url", "ms_hub_url", "om_hub_url"),
    *("formatting", "columns", "tags", "ranking", "split", "subset", "num_samples"),
}
"""What an entry of dataset_info.json says that is read, or asks for nothing."""
_NEEDLESS = {
    **dict.fromkeys(("enable_liger_kernel", "flash_attn", "shift_attn", "upcast_layernorm", "use_unsloth"), KERNELS),
    **dict.fromkeys(("neat_packing", "packing", "per_device_eval_batch_size"), PACKED),
    "ddp_timeout": "leave it out",
    "do_eval": "data.eval is measured before and after training",
    "do_train": "pronghorn train trains",
    "overwrite_cache": "the cache knows when data change",
    "overwrite_output_dir": "pronghorn train --overwrite",
    "plot_loss": "report.html draws it",
    "pissa_convert": "adapters that begin so are saved as plain LoRA",
}
_LOST = {
    "double_quantization": "NF4's scales are always quantised, too",
    "enable_thinking": "the chat template decides how an answer without thoughts begins",
    **dict.fromkeys(("galore_rank", "use_galore"), "no GaLore: adapter.method: lora takes less memory"),
    **dict.fromkeys(("interleave_probs", "mix_strategy"), "weights of the sources: data.train: [{path: …, weight: …}]"),
    "loraplus_lr_ratio": "one learning rate for all adapters",
    "pure_bf16": "weights that are trained whole are kept in float32",
    "quantization_bit": "model.load_in_4bit: true is 4 bits; others are not here",
}


def convert(draft: Draft) -> None:
    """Turn LLaMA-Factory's keys into a recipe's."""
    if "dataset" not in draft.given:
        raise ConfigError(
            f"LLaMA-Factory's configuration {'exports' if 'export_dir' in draft.given else 'names no dataset'}",
            "give the one that trains; pronghorn export and pronghorn chat do the rest without a recipe",
        )
    stage = draft.take("stage", "sft")
    if stage not in ("sft", "pt"):
        common.refuse_preferences(f"stage: {stage}")
    if adapter := draft.take("adapter_name_or_path"):
        if len(_names(adapter)) > 1 or draft.asked("create_new_adapter"):
            raise ConfigError(
                f"adapter_name_or_path {adapter!r} is merged there before training; a recipe goes on with one adapter",
                "pronghorn export ADAPTER --to merged, and name what it writes in model_name_or_path",
            )
        draft.take("model_name_or_path")
        draft.put("model.name", str(adapter), "adapter_name_or_path; its base is named in its adapter_config.json")
    method = draft.take("finetuning_type", "lora")
    if method == "full":
        common.without_adapter(draft, _LORA_S)
    common.max_steps(draft)
    common.resumed(draft)
    draft.copy(common.SAME | _SAME)
    common.load_best(draft, False)
    for name, (ours, default) in _DEFAULTS.items():
        set_there = name in draft.given
        draft.put(ours, draft.take(name, default), name if set_there else f"{name}'s default")
    draft.put("adapter.method", "full" if method == "full" else "lora", f"finetuning_type: {method}")
    if method not in ("full", "lora"):
        draft.lost["finetuning_type"] = f"{method} is not here; lora is written instead"
    if method == "lora":
        _adapter(draft)
    if draft.given.get("quantization_bit") == 4:
        draft.take("quantization_bit")
        if (way := draft.take("quantization_method", "bnb")) not in ("bnb", "bitsandbytes"):
            draft.lost["quantization_method"] = f"{way} is not here; bitsandbytes' NF4 is written instead"
        draft.put("model.load_in_4bit", True, "quantization_bit: 4")
    _data(draft)
    packed = bool(draft.given.get("packing", stage == "pt") or draft.given.get("neat_packing"))
    how = (
        "as cutoff_len there" if stage == "pt" else "the end is cut; there each turn in proportion, or the first turns"
    )
    draft.put("data.overflow", "split" if stage == "pt" and packed else "truncate", how)
    common.hold_out(draft, "val_size")
    common.warm_up(draft, 0, 0)
    common.half_precision(draft)
    for key, recompute in (("use_unsloth_gc", "offload"), ("disable_gradient_checkpointing", False)):
        if draft.asked(key):
            draft.put("memory.gradient_checkpointing", recompute, key)
    common.batch_size(draft, "per_device_train_batch_size", 8, packed)
    draft.explain(common.LOST | _LOST, common.NEEDLESS | _NEEDLESS, unless=("double_quantization", "enable_thinking"))


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
    if draft.asked("pissa_init"):
        steps = draft.take("pissa_iter", 16)
        draft.put("adapter.init_lora_weights", f"pissa_niter_{steps}" if steps > 0 else "pissa", "pissa_init")
    if tokens := draft.take("new_special_tokens"):
        draft.put("adapter.new_tokens", _names(tokens), "new_special_tokens")


def _names(value: Any) -> list[str]:
    """Return names given as a list or between commas."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


def _data(draft: Draft) -> None:
    """Take over the data sets by their entries in dataset_info.json, the template, and what is supervised."""
    place = Path(str(draft.take("dataset_dir", "data")))
    of_hub = str(place) == "ONLINE"
    bases = [place] if place.is_absolute() else [draft.folder / place, place]
    base = next((folder for folder in bases if (folder / "dataset_info.json").is_file()), None)
    entries: dict[str, Any] = {}
    if base is not None:
        info = base / "dataset_info.json"
        try:
            entries = json.loads(info.read_text(encoding="utf-8"))
            if not isinstance(entries, dict):
                raise ValueError("no table of data sets")
        except ValueError as error:
            raise ConfigError(
                f"{info} can't be used: not valid JSON ({error})", "fix it, or name your data in data.train"
            ) from None
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        names = _names(draft.take(key) or [])
        known = {name: {"hf_hub_url": name} for name in names} if of_hub else entries
        sources = [_source(draft, name, known.get(name), base or place) for name in names]
        if sources:
            draft.put(ours, sources, key)
    template = draft.take("template")
    if template in _TEMPLATES:
        comment = f"the tokenizer's own; or {_TEMPLATES[template]} (template: {template})"
        draft.put("data.chat_template", None, comment)
    elif template in _OWN:
        draft.lost["template"] = f"{template}: the tokenizer's own is used, or give a .jinja file in data.chat_template"
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
        common.refuse_preferences(f"{name} (ranking: true)")
    path = entry.get("hf_hub_url") or entry.get("ms_hub_url") or str(base / entry.get("file_name", f"{name}.json"))
    columns, tags = dict(entry.get("columns") or {}), entry.get("tags") or {}
    if entry.get("formatting") in ("sharegpt", "openai"):
        turns = columns.pop("messages", "conversations")
        keys = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        form = "messages" if keys[0] == "role" else "sharegpt"
        common.tell_keys(draft, f"dataset {name}.tags", keys, form)
        roles = [value for tag, value in tags.items() if tag not in ("role_tag", "content_tag")]
        common.tell_roles(draft, f"dataset {name}.tags.roles", roles, form)
        renamed = {"conversations" if form == "sharegpt" else "messages": turns}
    elif set(columns) == {"prompt"}:
        form, renamed = "text", {"text": columns.pop("prompt")}
    else:
        form, names = "alpaca", {"prompt": "instruction", "query": "input", "response": "output"}
        renamed = {ours: columns.pop(name) for name, ours in names.items() if name in columns}
    renamed |= {
        key: columns.pop(key) for key in ("system", "history", "tools") if key in columns and key in FORMATS[form][1]
    }
    for key, value in {**columns, **{key: value for key, value in entry.items() if key not in _READ}}.items():
        instead = "put it first among the messages" if key == "system" else "no equivalent"
        draft.lost[f"dataset {name}.{key}"] = f"{value!r:.40}: {instead}"
    source: dict[str, Any] = {"path": path, "format": form}
    common.tell_lines(draft, f"dataset {name}", path)
    if entry.get("num_samples"):
        draft.lost[f"dataset {name}.num_samples"] = "rows are drawn there; max_samples reads the first ones"
    if renamed := {ours: name for ours, name in renamed.items() if ours != name}:
        source["columns"] = renamed
    common.of_hub(source, dict(entry), {"split": "split", "subset": "config", "num_samples": "max_samples"})
    most = draft.recipe.get("data", {}).get("max_samples")
    if most is not None and source.get("max_samples", most) > most:
        del source["max_samples"]  # there both hold; here a source's own goes before data.max_samples
    return source
