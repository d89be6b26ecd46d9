"""What a recipe may not say: settings that contradict each other, and files that don't exist."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pronghorn.config.sections import CHANGES_BASE, DATA_FILES, ON_LOSS
from pronghorn.config.values import ALL_LINEAR
from pronghorn.errors import ConfigError
from pronghorn.optimizers import ON_PARTS
from pronghorn.text import counted


class _Rule(NamedTuple):
    """Settings of a `config.Recipe` that are refused together: when, the problem ({…} names one), and the remedy."""

    broken: Callable[[Any], object]
    problem: str
    remedy: str


def _in_8_bits(recipe: Any) -> bool:
    return recipe.precision.compute != "dtype"


def _full(recipe: Any) -> bool:
    return recipe.adapter.method == "full"


def _changes_base(recipe: Any) -> bool:
    return str(recipe.adapter.init_lora_weights).startswith(CHANGES_BASE)


_RULES = (
    _Rule(
        lambda r: os.path.realpath(r.train.output) == os.getcwd(),  # `resolve` raises at a loop of links
        "train.output is the current folder",
        "give the run a folder of its own",
    ),
    _Rule(
        lambda r: r.train.warmup_ratio is not None and "warmup_steps" in r.train.model_fields_set,
        "train.warmup_steps and train.warmup_ratio: each says how long the warm-up is",
        "leave one of them out",
    ),
    _Rule(
        lambda r: r.train.min_improvement is not None and r.data.eval is None,
        "train.min_improvement needs held-out data",
        "give data.eval, or leave it out",
    ),
    _Rule(
        lambda r: _full(r) and (r.adapter.modules_to_save or r.adapter.new_tokens or r.adapter.target_parameters),
        "adapter.method: full trains everything: modules_to_save, new_tokens and target_parameters are LoRA's",
        "leave them out; for full fine-tuning add tokens to the model's folder beforehand",
    ),
    _Rule(
        lambda r: r.train.eval_steps is not None and r.data.eval is None,
        "train.eval_steps needs held-out data",
        "give data.eval (5% of data.train, say), or leave it out",
    ),
    _Rule(
        lambda r: r.train.patience is not None and r.train.eval_steps is None,
        "train.patience counts evaluations, and there are none",
        "set train.eval_steps",
    ),
    _Rule(
        lambda r: r.train.lr_scheduler in ON_LOSS and r.train.eval_steps is None,
        "train.lr_scheduler: {train.lr_scheduler} goes by the held-out loss, and there are no evaluations",
        "set train.eval_steps and data.eval, or choose cosine",
    ),
    _Rule(
        lambda r: _in_8_bits(r) and _full(r),
        "precision.compute: {precision.compute} with adapter.method: full: 8-bit products are for frozen weights",
        "leave precision.compute out, or set adapter.method: lora",
    ),
    _Rule(
        lambda r: r.precision.compute == "int8" and r.launch.strategy == "sharded",
        "precision.compute: int8 with launch.strategy: sharded: it quantises weights that one process holds whole",
        "set precision.compute: fp8, or leave it out",
    ),
    _Rule(
        lambda r: _in_8_bits(r) and r.precision.dtype == "float32",
        "precision.compute: {precision.compute} with precision.dtype: float32",
        "leave precision.compute out, or set precision.dtype: bfloat16",
    ),
    _Rule(
        lambda r: (
            r.launch.strategy == "sharded"
            and _full(r)
            and (r.precision.dtype == "float16" or r.train.optimizer not in ON_PARTS)
        ),
        "launch.strategy: sharded with adapter.method: full, train.optimizer: {train.optimizer} and precision.dtype: "
        "{precision.dtype}: weights are trained in parts by AdamW or SGD, without loss scaling",
        "use launch.strategy: copies; or adamw_torch_fused and bfloat16 or float32",
    ),
    _Rule(
        lambda r: r.precision.adapter_dtype == "float16",
        "precision.adapter_dtype: float16: its gradients need loss scaling, and torch can't unscale float16",
        "use float32, or bfloat16",
    ),
    _Rule(
        lambda r: r.precision.adapter_dtype != "auto" and _full(r),
        "precision.adapter_dtype: {precision.adapter_dtype} with adapter.method: full, which has no adapters",
        "leave precision.adapter_dtype out: trained weights are kept in float32",
    ),
    _Rule(
        lambda r: _full(r) and r.model.load_in_4bit,
        "adapter.method: full with model.load_in_4bit: 4-bit weights can't be trained",
        "set adapter.method: lora or load_in_4bit: false",
    ),
    _Rule(
        lambda r: _full(r) and (r.adapter.use_dora or r.adapter.init_lora_weights is not True),
        "adapter.method: full with use_dora or init_lora_weights, which are LoRA's",
        "leave them out, or set adapter.method: lora",
    ),
    _Rule(
        lambda r: (
            _full(r)
            and (
                r.adapter.target_modules != [ALL_LINEAR]
                or r.adapter.bias != "none"
                or r.adapter.rank_pattern
                or r.adapter.alpha_pattern
            )
        ),
        "adapter.method: full trains every weight: target_modules, bias, rank_pattern and alpha_pattern, which choose "
        "some, are LoRA's",
        "leave them out, or set adapter.method: lora",
    ),
    _Rule(
        lambda r: _changes_base(r) and r.model.load_in_4bit,
        "adapter.init_lora_weights: {adapter.init_lora_weights} with model.load_in_4bit: it changes the base's weights",
        "set model.load_in_4bit: false, or leave init_lora_weights out",
    ),
    _Rule(
        lambda r: (
            _changes_base(r)
            and (
                r.adapter.use_dora
                or r.adapter.bias != "none"
                or (r.adapter.use_rslora and (r.adapter.rank_pattern or r.adapter.alpha_pattern))
            )
        ),
        "adapter.init_lora_weights: {adapter.init_lora_weights} with use_dora, with bias, or with use_rslora and "
        "patterns: it can't be saved as plain LoRA",
        "leave one of them out",
    ),
    _Rule(
        lambda r: r.adapter.target_parameters and r.adapter.init_lora_weights not in (True, False, "gaussian"),
        "adapter.init_lora_weights: {adapter.init_lora_weights} with target_parameters: PEFT has it for linears only",
        "leave one of them out",
    ),
    _Rule(
        lambda r: (
            r.adapter.init_lora_weights == "orthogonal"
            and any(rank % 2 for rank in (r.adapter.r, *r.adapter.rank_pattern.values()))
        ),
        "adapter.init_lora_weights: orthogonal with an odd rank (adapter.r {adapter.r}, or of rank_pattern)",
        "use even ranks, or another init_lora_weights",
    ),
    _Rule(
        lambda r: r.adapter.use_dora and r.adapter.target_parameters,
        "adapter.use_dora with target_parameters: PEFT has no DoRA for experts",
        "leave one of them out",
    ),
)


_LEAST = ("min_lr_rate", "min_lr", "num_cycles")
_ON_LOSS = ("factor", "patience", "threshold", "cooldown", "min_lr", "eps")
SCHEDULES: dict[str, tuple[tuple[str, ...], int]] = {
    "cosine": (("num_cycles",), 0),
    "cosine_with_restarts": (("num_cycles",), 0),
    "polynomial": (("power", "lr_end"), 0),
    "inverse_sqrt": (("timescale",), 0),
    "cosine_with_min_lr": (_LEAST, 2),
    "cosine_warmup_with_min_lr": ((*_LEAST, "warmup_lr_rate"), 2),
    "warmup_stable_decay": (("num_decay_steps", "num_stable_steps", "min_lr_ratio", "num_cycles"), 1),
    "reduce_lr_on_plateau": (_ON_LOSS, 0),
    "greedy": ((*_ON_LOSS, "warmup", "max_lr", "reset_start"), 0),
}
"""What each schedule takes as numbers, and of how many of these, from the first, it needs one."""
_DEFAULTS = {"polynomial": {"lr_end": 1e-7}, "greedy": {"min_lr": 1e-3, "max_lr": 1.0}}
"""transformers' own values of numbers that have to fit the learning rate."""


class _Limit(NamedTuple):
    """What a schedule's number must be."""

    holds: Callable[[float, float], bool]
    """Of the number and the learning rate."""
    words: str


_SHARE = _Limit(lambda value, rate: 0 <= value <= 1, "from 0 to 1")
_ABOVE_0 = _Limit(lambda value, rate: value > 0, "above 0")
_FROM_0 = _Limit(lambda value, rate: value >= 0, "0 or more")
_LIMITS = {
    **dict.fromkeys(("min_lr_rate", "min_lr_ratio", "warmup_lr_rate"), _SHARE),
    **dict.fromkeys(("num_cycles", "power", "timescale"), _ABOVE_0),
    "min_lr": _Limit(lambda value, rate: 0 <= value <= rate, "from 0 to train.learning_rate {rate:g}"),
    "max_lr": _Limit(lambda value, rate: value >= rate, "train.learning_rate {rate:g} or more"),
    "lr_end": _Limit(lambda value, rate: 0 <= value < rate, "from 0 to less than train.learning_rate {rate:g}"),
    "factor": _Limit(lambda value, rate: 0 < value < 1, "above 0 and below 1"),
    "num_decay_steps": _Limit(lambda value, rate: value >= 1, "1 or more"),
}
"""Limits of schedules' numbers; the others are `_FROM_0`."""


def check(recipe: Any) -> None:
    """Refuse settings that contradict each other, data that don't exist, and tools that aren't installed.

    Raises:
        ConfigError: of the first.
    """
    for split in ("train", "eval"):
        for source in recipe.data.sources(split):
            if not os.path.exists(source.path) and not source.is_hub_name:  # of an unreadable one Path's raises
                raise ConfigError(f"data.{split}: {source.path} does not exist", _instead(source.path, split))
    for rule in _RULES:
        if rule.broken(recipe):
            raise ConfigError(rule.problem.format(**dict(recipe)), rule.remedy)
    _check_schedule(recipe.train.lr_scheduler, recipe.train.lr_scheduler_kwargs, recipe.train.learning_rate)
    for tool in recipe.train.report_to:
        if importlib.util.find_spec(tool) is None:
            raise ConfigError(f"train.report_to: {tool} is not installed", f"pip install {tool}")


def _instead(path: Path, split: str) -> str:
    """Return what to do about data that don't exist."""
    text = str(path)
    if any(mark in text for mark in "*,"):
        return "give a folder, or a list: [a.jsonl, b.jsonl]"
    if text in ("validation", "valid", "val", "test", "dev"):
        return f"of a hub set: data.{split}: [{{path: OWNER/NAME, split: {text}}}]; or a share: data.eval: 5%"
    if re.match(r"[A-Za-z]:[\\/]", text):
        return "give a path of this Linux; WSL has Windows' C: as /mnt/c"
    if name := re.fullmatch(r"([\w.-]+/[\w.-]+)([:/])([\w.-]+)", text):
        key = "split" if name[2] == ":" else "config"
        return f"of a hub set: data.{split}: [{{path: {name[1]}, {key}: {name[3]}}}]; else a path as seen from here"
    here = path.parent if path.parent.is_dir() else Path()
    listed = sorted(here.iterdir()) if os.access(here, os.R_OK) else []
    files = {file.name.lower(): file for file in listed if file.suffix.lower() in DATA_FILES}
    near = difflib.get_close_matches(path.name.lower(), files, n=1, cutoff=0.6)
    meant = f"did you mean {files[near[0]]}? Else " if near else ""
    kinds = ", ".join(DATA_FILES)
    return f"{meant}give the path of a {kinds} file or folder as seen from here, or a hub name (owner/name)"


def _check_schedule(name: str, given: dict[str, float], rate: float) -> None:
    """Refuse keys that a schedule does not take, one that lacks what it needs, and numbers out of range, with which
    transformers would fail once all is loaded, or let the learning rate rise."""
    takes, needs = SCHEDULES.get(name, ((), 0))
    written = f"train.lr_scheduler_kwargs of {name}"
    if unknown := sorted(given.keys() - set(takes)):
        known = f"it takes {', '.join(takes)}" if takes else "leave it out: this schedule takes none"
        raise ConfigError(f"{written}: unknown key {unknown[0]}", known)
    if needs and not given.keys() & set(takes[:needs]):
        example = {"num_decay_steps": 100}.get(takes[0], 0.1)
        raise ConfigError(
            f"{written}: {' or '.join(takes[:needs])} is missing",
            f"write train.lr_scheduler_kwargs: {{{takes[0]}: {example}}}",
        )
    if {"min_lr", "min_lr_rate"} <= given.keys():
        raise ConfigError(f"{written}: min_lr and min_lr_rate: each says where it ends", "leave one of them out")
    for key, value in {**_DEFAULTS.get(name, {}), **given}.items():
        limit = _LIMITS.get(key, _FROM_0)
        if not limit.holds(value, rate):
            default = "" if key in given else " (its default)"
            must = limit.words.format(rate=rate)
            raise ConfigError(f"{written}: {key} {value:g}{default} is not {must}", f"set {key} there: {must}")


_LORA_S = ("r", "lora_alpha", "lora_dropout", "use_rslora", "random_state")


def unused(recipe: Any) -> Iterator[str]:
    """Say of what a recipe sets where other settings leave it without an effect; such recipes run all the same, as
    `adapter.method=full` may come from the command line."""
    if _full(recipe) and (named := [key for key in _LORA_S if key in recipe.adapter.model_fields_set]):
        yield _not_used([f"adapter.{key}" for key in named], "adapter.method: full trains every weight")
    if not recipe.packing.enabled and recipe.packing.look_ahead != "auto":
        yield _not_used(
            ["packing.look_ahead"], "packing.enabled: false leaves documents in the order they are drawn in"
        )
    kept = recipe.memory.gradient_checkpointing
    if recipe.memory.budget is not None and kept != "auto":
        why = f"memory.gradient_checkpointing: {str(kept).lower()} says what is kept, and auto goes by the budget"
        yield _not_used([f"memory.budget {recipe.memory.budget}"], why)
    if recipe.data.eval_rows is not None and recipe.data.eval is None:
        yield _not_used(["data.eval_rows"], "there are no held-out data (data.eval)")
    if recipe.train.load_best and "load_best" in recipe.train.model_fields_set and recipe.train.eval_steps is None:
        yield _not_used(["train.load_best"], "nothing is evaluated while it trains (train.eval_steps)")
    if "sample_tokens" in recipe.report.model_fields_set and not recipe.report.sample_prompts:
        yield _not_used(["report.sample_tokens"], "there are no report.sample_prompts")


def _not_used(keys: list[str], why: str) -> str:
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not used: {why}"


NO_WARMUP = ("constant", *ON_LOSS)
"""Schedules that begin at the learning rate: transformers warms none of them up."""


def missed(train: Any, steps: int) -> Iterator[str]:
    """Say what a run of so many steps never comes to although its `train` section asks for it.

    Raises:
        ConfigError: `polynomial` with a warm-up exactly as long as the run: transformers divides by what is left.
    """
    if train.lr_scheduler == "polynomial" and (warmup := _warmup(train, steps)) == steps:
        key = "warmup_steps" if train.warmup_ratio is None else "warmup_ratio"
        raise ConfigError(
            f"train.lr_scheduler: polynomial with {counted(warmup, 'step')} of warm-up in a run of {steps:,}",
            f"lower train.{key} (0: none), or train for more steps",
        )
    if (rate := _missed_rate(train, steps)) is not None:
        yield rate
    if train.eval_steps is not None and train.eval_steps > steps:
        only = "the held-out loss is measured before and after it alone"
        yield f"train.eval_steps {train.eval_steps:,} is more than the run's {steps:,}: {only}"


HIGH = 0.02
"""A learning rate above which Adam and its like move every number too far: recipes use up to 1e-3."""


def high_rate(train: Any, full: bool) -> Iterator[str]:
    """Say that a `train` section's learning rate is high, if it is; `full`: of all weights."""
    if train.learning_rate > HIGH and "sgd" not in train.optimizer:
        usual = "full fine-tuning takes about 1e-5" if full else "LoRA takes about 2e-4"
        yield f"train.learning_rate {train.learning_rate:g} is high: {usual}"


def _missed_rate(train: Any, steps: int) -> str | None:
    """Say why a run of so many steps has no warm-up although its `train` section asks for one, or never has the
    learning rate that it names; None where it has both."""
    asked = next((key for key in ("warmup_ratio", "warmup_steps") if key in train.model_fields_set), None)
    warmup = 0 if asked is None else getattr(train, asked) or 0
    if train.lr_scheduler in NO_WARMUP:
        instead = "constant_with_warmup has one" if train.lr_scheduler == "constant" else "leave it out"
        unused = f"train.{asked} {warmup:g} is not used: {train.lr_scheduler} has no warm-up ({instead})"
        return unused if warmup else None
    never = f"the run's {steps:,}: the learning rate never reaches {train.learning_rate:g}"
    if asked == "warmup_steps" and warmup >= steps:
        return f"train.warmup_steps {warmup:,} is not less than {never}"
    numbers = train.lr_scheduler_kwargs
    if "num_decay_steps" in numbers and "num_stable_steps" not in numbers:
        first = _warmup(train, steps)
        if first + numbers["num_decay_steps"] > steps:
            decay = f"num_decay_steps {numbers['num_decay_steps']:g} of train.lr_scheduler_kwargs"
            return f"{decay}, with {first:,} steps of warm-up, is more than {never}"
    return None


def _warmup(train: Any, steps: int) -> int:
    """Return the steps of warm-up of a run of so many."""
    return int(train.warmup_steps if train.warmup_ratio is None else math.ceil(train.warmup_ratio * steps))


def share_of_step(recipe: Any, processes: int) -> tuple[int, int]:
    """Return the rows of a micro-batch and the micro-batches of a step that each of so many processes computes.

    A step has the same rows whatever the number of processes, so they must be divisible.

    Raises:
        ConfigError: they aren't, with numbers that are.
    """
    rows, rest = divmod(recipe.step_rows, processes)
    if rest:
        micro_batch = recipe.packing.rows_per_step
        more = processes // math.gcd(processes, micro_batch)
        accumulated = -(-recipe.train.gradient_accumulation_steps // more) * more
        able = max(n for n in range(1, processes) if recipe.step_rows % n == 0)
        raise ConfigError(
            f"a step of {counted(recipe.step_rows, 'row')} (packing.rows_per_step {micro_batch} × "
            f"train.gradient_accumulation_steps {recipe.train.gradient_accumulation_steps}) can't be shared by "
            f"{processes} processes",
            f"set train.gradient_accumulation_steps: {accumulated}; or use {counted(able, 'GPU')}, as a "
            "run that was begun keeps its steps",
        )
    each = max(n for n in range(1, recipe.packing.rows_per_step + 1) if rows % n == 0)
    return each, rows // each
