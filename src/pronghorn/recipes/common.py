"""What Axolotl's and LLaMA-Factory's configurations have in common: keys of the same name and meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pronghorn.config.habits import NO_KEYS
from pronghorn.data.messages import SHAREGPT_ROLES
from pronghorn.data.rows import ROLES
from pronghorn.errors import ConfigError
from pronghorn.recipes.draft import Draft

SAME = {
    "trust_remote_code": "model.trust_remote_code",
    "lora_dropout": "adapter.lora_dropout",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "max_steps": "train.max_steps",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "neftune_noise_alpha": "train.neftune_noise_alpha",
    "lr_scheduler_kwargs": "train.lr_scheduler_kwargs",
    "logging_steps": "train.logging_steps",
    "save_steps": "train.save_steps",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "train.eval_steps",
    "load_best_model_at_end": "train.load_best",
    "seed": "train.seed",
    "output_dir": "train.output",
    "tf32": "precision.tf32",
}
"""Keys of both that mean the same as one of ours: theirs to ours."""
KERNELS = "Pronghorn's own attention and kernels"
PACKED = "packing.enabled says whether rows are packed"
NEEDLESS = {
    "bf16": "precision.dtype: auto is bf16 on a GPU that has it",
    "dataloader_num_workers": "data are tokenised beforehand",
    "eval_strategy": "train.eval_steps, with data.eval",
    "evaluation_strategy": "train.eval_steps, with data.eval",
    "gradient_checkpointing": "memory.gradient_checkpointing: auto keeps what fits and recomputes the rest",
    "gradient_checkpointing_kwargs": "memory.gradient_checkpointing: auto",
    "resume_from_checkpoint": "the same command goes on",
    "save_only_model": "checkpoints hold what resuming needs",
    "save_strategy": "train.save_steps; a checkpoint is saved every ten minutes anyway",
}
_GPUS = "pronghorn train uses all GPUs of the machine; launch.strategy: sharded shares a LoRA's base among them"
LOST = {
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), "0.9, 0.999, 1e-8 here; SFTConfig takes others"),
    "deepspeed": _GPUS,
    "fsdp": _GPUS,
    "fsdp_config": _GPUS,
    **dict.fromkeys(("hub_strategy", "hub_private_repo"), NO_KEYS["push_to_hub"]),
    "metric_for_best_model": "train.load_best and train.patience go by the held-out loss",
    **dict.fromkeys(("model_config", "overrides_of_model_config"), NO_KEYS["rope_scaling"]),
    **dict.fromkeys(("model_revision", "revision_of_model"), NO_KEYS["revision"]),
    "report_to": "name the tools in train.report_to, once they are installed",
}


def refuse_preferences(task: str) -> None:
    """Refuse a task that recipes don't have."""
    raise ConfigError(
        f"{task} is not a task of a recipe",
        "train it by TRL's trainer on a Pronghorn model: pronghorn docs preference-training",
    )


def half_precision(draft: Draft) -> None:
    """Take over `fp16`."""
    if draft.asked("fp16") is True:
        draft.put("precision.dtype", "float16", "fp16")


def resumed(draft: Draft) -> None:
    """Tell of a checkpoint to go on with, which is the other tool's."""
    if isinstance(path := draft.given.get("resume_from_checkpoint"), str):
        draft.take("resume_from_checkpoint")
        draft.lost["resume_from_checkpoint"] = (
            f"{path} is another tool's; an adapter's folder as model.name begins from it"
        )


def tell_lines(draft: Draft, where: str, path: Any) -> None:
    """Tell of a text file, whose lines are rows there."""
    if str(path).endswith(".txt"):
        here = "here the file is one, or what stands between lines of <|endoftext|>"
        draft.lost[f"{where}.path"] = f"{path}: each line is a text there; {here}"


def tell_roles(draft: Draft, where: str, roles: Iterable[Any], form: str) -> None:
    """Tell of names of roles that turns of a format can't have here."""
    known = SHAREGPT_ROLES if form == "sharegpt" else (*ROLES, "function")
    if strange := [str(role) for role in roles if role and role not in known]:
        told = f"{', '.join(strange)}: turns of these roles are refused; call them {', '.join(known)} in the data"
        draft.lost[where] = told


def tell_keys(draft: Draft, where: str, keys: tuple[str | None, str | None], form: str) -> None:
    """Tell of keys of a turn, its role's and its text's (None: as usual), that a format doesn't have here."""
    role, content = ("from", "value") if form == "sharegpt" else ("role", "content")
    if (keys[0] or role, keys[1] or content) != (role, content):
        draft.lost[where] = f"{keys[0]} and {keys[1]}: call the turns' keys {role} and {content} in the data"


def hold_out(draft: Draft, key: str) -> None:
    """Take over the share or the count of rows that are held out, unless held-out data are named."""
    amount = draft.asked(key)
    if not amount:
        if draft.take(key) is not None:
            draft.needless[key] = "nothing is held out by default"
    elif "eval" in draft.recipe.get("data", {}):
        draft.needless[key] = "held-out data are named"
    else:
        draft.put("data.eval", f"{amount * 100:g}%" if amount < 1 else str(int(amount)), key)


def max_steps(draft: Draft) -> None:
    """Pass `max_steps` over where it says that epochs count."""
    if draft.given.get("max_steps") == -1:
        draft.needless["max_steps"] = "train.epochs counts by default"
        del draft.given["max_steps"]


def without_adapter(draft: Draft, beginnings: tuple[str, ...]) -> None:
    """Pass over the keys of adapters, which begin so: full fine-tuning has none."""
    for key in [key for key in draft.given if key.startswith(beginnings)]:
        draft.needless[key] = "full fine-tuning has no adapter"
        del draft.given[key]


def warm_up(draft: Draft, usual: float, most: int) -> None:
    """Take over `warmup_steps`, or `warmup_ratio` as steps where their number is known.

    Without either so large a share is usual there, and so many steps at most; here it is another.
    """
    steps, ratio = draft.take("warmup_steps"), draft.take("warmup_ratio")
    total = draft.recipe.get("train", {}).get("max_steps")
    if steps is None and ratio is None:
        if total is not None or usual == 0:
            draft.put("train.warmup_steps", min(int(usual * (total or 0)), most), "warmup_steps' default")
        else:
            draft.put("train.warmup_ratio", usual, f"warmup_ratio's default; {most} steps at most there")
        return
    if steps == 0 and ratio and usual == 0:  # transformers passes over no steps, Axolotl doesn't
        steps = None
    if isinstance(steps, float) and 0 < steps < 1:  # transformers 5 takes a share in the same key
        steps, ratio = None, steps
    if steps is not None:
        draft.put("train.warmup_steps", int(steps), "warmup_steps")
    elif ratio is not None and total is not None:
        draft.put("train.warmup_steps", round(ratio * total), "warmup_ratio of max_steps")
    elif ratio is not None:
        draft.put("train.warmup_ratio", ratio, "warmup_ratio")


def load_best(draft: Draft, usual: bool) -> None:
    """Write out that the result is the last state, where that is usual there and nothing else was said."""
    train = draft.recipe.get("train", {})
    if train.get("eval_steps") and "load_best" not in train and not usual:
        draft.put("train.load_best", False, "load_best_model_at_end's default")


def batch_size(draft: Draft, key: str, default: int, packed: bool) -> None:
    """Take over the batch: packed rows, or documents that stay one by one as they are there."""
    draft.put("packing.rows_per_step", draft.take(key, default), key)
    name = "gradient_accumulation_steps"
    if name in draft.recipe["train"]:
        draft.comments[f"train.{name}"] = f"{name}; if it ran on N GPUs, write N times this"
    if not packed:
        draft.put("packing.enabled", False, "documents aren't packed there; true fills rows: fewer steps, and faster")


def of_hub(source: dict[str, Any], entry: dict[str, Any], names: dict[str, str]) -> None:
    """Move what says which part of a data set is read from its entry to the source; `names` are theirs to ours."""
    for name, ours in names.items():
        value = entry.pop(name, None)
        if value is not None and (ours, value) != ("split", "train"):  # the default
            source[ours] = value
