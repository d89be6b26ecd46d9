"""LoRA adapters, by PEFT, on a loaded model.

y = W x + (alpha / r) · B A x        A ~ Kaiming uniform, B = 0        (Hu et al. 2021, arXiv:2106.09685)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch

from pronghorn.config.sections import CHANGES_BASE
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.families.spec import GatedMLP
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.linears import is_4bit
from pronghorn.models.adapter_files import check_pattern
from pronghorn.models.experts import weight_names
from pronghorn.models.families import base_causal_lm, check_config, check_subject, decoder_layers, has_experts
from pronghorn.models.reach import all_linears, end_names, reached_linears
from pronghorn.models.tied_copies import tie_copies

DENSE_MLP = tuple(name for group in GatedMLP().linears for name in group)
"""A gated MLP's linears by their usual names, which lists of targets hold even for models with experts."""
HIGHEST_RANK = 256
"""That makes sense for every model; for wide ones the width is the limit."""


def add_lora(
    model: Any,
    *,
    r: int = 16,
    lora_alpha: int = 16,
    lora_dropout: float = 0.0,
    target_modules: Sequence[str] | str | None = None,
    target_parameters: Sequence[str] | None = None,
    bias: str = "none",
    use_rslora: bool = False,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, int] | None = None,
    use_dora: bool = False,
    init_lora_weights: bool | str = True,
    modules_to_save: Sequence[str] | None = None,
    trainable_token_indices: dict[str, list[int]] | None = None,
    random_state: int = 3407,
    revision: str | None = None,
    adapter_dtype: torch.dtype | str | None = None,
) -> Any:
    """Wrap a causal LM in a PEFT model with fresh LoRA adapters (float32, whatever the base's dtype).

    Args:
        r, lora_alpha, lora_dropout, target_modules, target_parameters, bias, use_rslora, rank_pattern, alpha_pattern,
            use_dora, init_lora_weights, modules_to_save, trainable_token_indices: as in `peft.LoraConfig`. Embeddings
            that are tied to the head stay tied when they are trained. The default targets are the family's
            (`family_targets`).
        random_state: seeds the adapters' initialisation, and nothing else: the global generators are left as they were.
        revision: of the base on the hub, saved with the adapter so that it is loaded with the same weights.
        adapter_dtype: float32 (None, "auto") or bfloat16, whatever the base's.
    Raises:
        ConfigError: the model has an adapter already, or rank or targets make no sense.
        UnsupportedError: no causal LM, adapters on the head or the embeddings (`modules_to_save` trains them whole), or
            rows of a head with a bias.
    """
    from peft import LoraConfig, get_peft_model

    dtype = resolve_adapter_dtype(adapter_dtype)
    numbers = (("r", r, 16), ("lora_alpha", lora_alpha, 16), ("lora_dropout", lora_dropout, 0.05))
    for name, value, example in (*numbers, ("random_state", random_state, 3407)):
        whole = name in ("r", "random_state")
        if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
            shown = (
                repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
            )
            what = "whole number" if isinstance(value, float) else "number"
            raise ConfigError(f"{name} = {shown} is not a {what}", f"write it as one, e.g. {name}={example}")
    for name, given in (("target_modules", target_modules), ("modules_to_save", modules_to_save)):
        names_only = isinstance(given, Collection) and all(isinstance(each, str) for each in given)
        if given is not None and not names_only:
            raise ConfigError(f"{name} = {given!r} is not a list of names", f"write a list, e.g. {name}=[NAME, …]")
    for name, pattern in (("rank_pattern", rank_pattern), ("alpha_pattern", alpha_pattern)):
        if pattern is not None and not isinstance(pattern, dict):
            raise ConfigError(f"{name} = {pattern!r} is not a table", f"write e.g. {name}={{NAME: 32}}")
        what = "whole number" if name == "rank_pattern" else "number"
        for key, value in (pattern or {}).items():
            number = isinstance(value, int if name == "rank_pattern" else (int, float)) and not isinstance(value, bool)
            if not (isinstance(key, str) and number):
                raise ConfigError(
                    f"{name} {key!r}: {value!r} is not a module's name with a {what}", f"write e.g. {name}={{NAME: 32}}"
                )
    if not 0 < lora_alpha < float("inf"):
        raise ConfigError(
            f"lora_alpha = {lora_alpha} is not a number above 0",
            "write e.g. lora_alpha=16: the scale is lora_alpha / r",
        )
    modules_to_save = [modules_to_save] if isinstance(modules_to_save, str) else modules_to_save
    target_parameters = [target_parameters] if isinstance(target_parameters, str) else target_parameters
    if not 0 <= lora_dropout < 1:
        raise ConfigError(f"lora_dropout = {lora_dropout} is not a share below 1", "write 0, the fastest, or e.g. 0.05")
    if bias not in ("none", "all", "lora_only"):
        raise ConfigError(f"bias = {bias!r} is unknown", "use 'none', 'all' or 'lora_only'")
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "the model already has an adapter",
            "leave this call out (a notebook's cell that runs twice) and train that adapter on, or load the base anew",
        )
    check_subject(model)
    if r < 1:
        raise ConfigError(f"LoRA rank r = {r} is below 1", f"use a rank from 1 to {HIGHEST_RANK}, 16 is common")
    width = base_causal_lm(model).get_input_embeddings().weight.shape[-1]
    most = max(width, HIGHEST_RANK)
    if r > most:
        raise ConfigError(f"LoRA rank r = {r} is above {most}, the most for this model", f"use a rank from 1 to {most}")
    own = family_targets(model)
    targets = (
        target_modules if isinstance(target_modules, str) else list(own if target_modules is None else target_modules)
    )
    names = [name for name, _ in model.named_modules()]
    if has_experts(base_causal_lm(model).config) and {*targets} == {*own, *DENSE_MLP}:
        targets = [target for target in targets if _named(target, names)]  # a dense model's list, as scripts have it
    found = _targeted(model, targets, bool(target_parameters), own)
    if module := next((target for target, name in found if not _adaptable(model, name)), None):
        raise ConfigError(f"target module {module!r} is not a linear", f"use some of {', '.join(own)}")
    _check_target_parameters(model, target_parameters or (), lora_dropout, use_dora)
    leaves = [name for name, module in model.named_modules() if not [*module.children()]]
    for pattern in (rank_pattern, alpha_pattern):
        _check_patterns(pattern or {}, [*leaves, *weight_names(model)])
    if high := next(((name, rank) for name, rank in (rank_pattern or {}).items() if rank > most), None):
        raise ConfigError(
            f"rank_pattern {high[0]!r} gives {high[1]}, above {most}, the most for this model",
            f"use a rank from 1 to {most}",
        )
    check_whole_modules(model, modules_to_save or ())
    _check_adapted_or_whole(model, [name for _, name in found], target_parameters or (), modules_to_save or ())
    copied = {name.rsplit(".", 1)[-1] for name in whole_modules(model, modules_to_save or ())}
    ends = not copied.isdisjoint(end_names(base_causal_lm(model)))
    tied = bool(getattr(base_causal_lm(model).config, "tie_word_embeddings", False))
    if trainable_token_indices:
        _check_head_of_rows(base_causal_lm(model), trainable_token_indices, tied)
    config = LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=targets,
        target_parameters=list(target_parameters) if target_parameters else None,
        bias=bias,  # type: ignore[arg-type]  # PEFT checks the value itself
        use_rslora=use_rslora,
        rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {},
        use_dora=use_dora,
        init_lora_weights=init_lora_weights,  # type: ignore[arg-type]  # PEFT checks the value itself
        modules_to_save=list(modules_to_save) if modules_to_save else None,
        trainable_token_indices=trainable_token_indices,
        ensure_weight_tying=tied and ends,
        task_type="CAUSAL_LM",
        revision=revision,
    )
    device = base_causal_lm(model).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(random_state)
        # adapters of a model without weights have none either
        adapted = get_peft_model(model, config, low_cpu_mem_usage=device.type == "meta")
    tie_copies(adapted, config)
    if str(init_lora_weights).startswith(CHANGES_BASE):
        _check_ranks(adapted, init_lora_weights)
    if dtype is not None:
        cast_adapters(adapted, dtype)
    return adapted


def resolve_adapter_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that adapters are to be trained in; None for None and "auto": as PEFT makes them, float32.

    Raises:
        ConfigError: another one than float32 and bfloat16.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name == "auto":
        return None
    if name in ("float32", "fp32"):
        return torch.float32
    if name in ("bfloat16", "bf16"):
        return torch.bfloat16
    why = ": its gradients need loss scaling, and torch can't unscale float16" if name in ("float16", "fp16") else ""
    raise ConfigError(f"adapter_dtype {dtype!r} is not served{why}", "use float32, or bfloat16")


def cast_adapters(model: Any, dtype: torch.dtype) -> None:
    """Put LoRA's trained matrices into `dtype`, in place."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = parameter.data.to(dtype)


def family_targets(model: Any) -> tuple[str, ...]:
    """Return the linears that LoRA adapts unless told otherwise: the family's choice, or all that its blocks name."""
    base = base_causal_lm(model)
    family = check_config(base.config)
    if family.generic:
        return reached_linears(base)
    every = dict.fromkeys(name for layer in base.base_model.layers for name in family.linear_names(layer))
    # a model of few layers may have one kind of them only
    return tuple(name for name in family.lora_targets or every if name in every)


def _named(wanted: str, names: Sequence[str]) -> list[str]:
    """List the modules that PEFT takes a name in a list for: their own names, or the ends of these after a dot."""
    return [name for name in names if wanted and f".{name}".endswith(f".{wanted}")]


def whole_modules(model: Any, wanted: Sequence[str]) -> list[str]:
    """List the modules that PEFT trains whole for these names: all that end in one, at a dot or not ("norm" is the end
    of "input_layernorm", too)."""
    return [name for name, _ in model.named_modules() if any(each and name.endswith(each) for each in wanted)]


def _adaptable(model: Any, name: str) -> bool:
    """Tell whether PEFT can put an adapter on a module: on a linear, a convolution or an embedding."""
    module, own = model.get_submodule(name), (torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    return isinstance(module, own) or module in all_linears(module)


def check_model(model: Any, where: str) -> None:
    """Refuse what is not a model, the pair that `from_pretrained` returns among it.

    Raises:
        ConfigError: says what it is.
    """
    if not hasattr(model, "get_input_embeddings"):
        pair = isinstance(model, tuple)
        remedy = (
            "model, tokenizer = FastLanguageModel.from_pretrained(...) are two" if pair else "give the loaded model"
        )
        raise ConfigError(f"{where} got a {type(model).__name__}, no model", remedy)


def check_whole_modules(model: Any, wanted: Sequence[str]) -> None:
    """Refuse names in `modules_to_save` that the model lacks, that hold its decoder layers (PEFT would copy them), or
    whose weights are in few bits.

    Raises:
        ConfigError: names the module.
    """
    names = [name for name, _ in model.named_modules()]
    stack = decoder_layers(model)
    layers = {name for name, module in model.named_modules() if module is stack}
    embeddings, head = end_names(base_causal_lm(model))
    for module in wanted:
        found = whole_modules(model, [module])
        if not _named(module, names):  # the end of a word alone is a slip
            raise ConfigError(f"modules_to_save {module!r} is not in the model", f"name e.g. {embeddings} or {head}")
        if any(f"{inner}.".startswith(f"{name}.") for name in found for inner in layers):
            raise ConfigError(
                f"modules_to_save {module!r} holds the model's layers",
                f"name modules beside or inside layers, e.g. {head}; full_finetuning=True trains every weight",
            )
        for inner in (inner for name in found for inner in model.get_submodule(name).modules()):
            packed = any(isinstance(each, PackedTensor) for each in inner.parameters(recurse=False))
            if packed or is_4bit(inner):
                raise ConfigError(
                    f"modules_to_save {module!r} is in {'few' if packed else '4'} bits, which can't be trained",
                    "name it in target_modules instead, or load the model in 16 bits (load_in_4bit=False)",
                )


def _targeted(model: Any, targets: str | list[str], or_parameters: bool, own: Sequence[str]) -> list[tuple[str, str]]:
    """List (target, module) of all that PEFT would adapt; a string is a regular expression, and each module its target.

    Raises:
        ConfigError: a target matches nothing, which PEFT passes over if another does.
        UnsupportedError: the head or the embeddings are among them.
    """
    some, ends = f"use some of {', '.join(own)}", end_names(base_causal_lm(model))
    if targets == "all-linear":
        linears = set(all_linears(model))
        named = [name for name, module in model.named_modules() if module in linears]
        return [(targets, name) for name in named if name.rsplit(".", 1)[-1] not in ends]
    if not targets and not or_parameters:
        raise ConfigError("target_modules names no module", some)
    names, pairs = [name for name, _ in model.named_modules()], list[tuple[str, str]]()
    for target in [targets] if isinstance(targets, str) else targets:
        if target.rsplit(".", 1)[-1] in ends:
            found = [target]
        elif isinstance(targets, str):
            check_pattern(target)
            found = [name for name in names if re.fullmatch(target, name)]
        else:
            found = _named(target, names)
        for name in found:
            if (end := name.rsplit(".", 1)[-1]) in ends:
                raise UnsupportedError(f"an adapter on {end} is not supported", "name it in modules_to_save instead")
        if not found and isinstance(targets, str):
            raise ConfigError(
                f"target_modules {target!r} matches no module: a string is a regular expression for whole names",
                f"give a list, e.g. [{target!r}]" if _named(target, names) else some,
            )
        if not found:
            raise ConfigError(f"target module {target!r} is not in the model", some)
        pairs += [(name if isinstance(targets, str) else target, name) for name in found]
    return pairs


def _check_adapted_or_whole(model: Any, found: list[str], parameters: Sequence[str], whole: Sequence[str]) -> None:
    """Refuse adapters of experts that are trained whole, and targets, `found` by their names, that all are.

    PEFT saves such experts' adapters so that it can't load them again. It passes over linears that are trained whole,
    and fails where no other is left.
    """
    if not whole:
        return
    roots = {f"{name}.": module for module in whole for name in whole_modules(model, [module])}
    for parameter in parameters:
        for name in _named(parameter, weight_names(model)):
            module = next((module for root, module in roots.items() if name.startswith(root)), None)
            if module is not None:
                raise ConfigError(
                    f"target parameter {parameter!r} lies in modules_to_save {module!r}, which trains it whole",
                    "name it in one of the two",
                )
    if found and not parameters and all(f"{name}.".startswith(tuple(roots)) for name in found):
        raise ConfigError(
            f"modules_to_save {', '.join(sorted(set(roots.values())))} trains all of target_modules whole: "
            "no linear is left for an adapter",
            "name other target_modules, or fewer modules_to_save",
        )


def _check_head_of_rows(base: Any, rows: dict[str, list[int]], tied: bool) -> None:
    """Refuse to train rows of a head with a bias (Phi-2, ModernBERT's decoder): PEFT computes it without the bias."""
    embeddings, head = end_names(base)
    trained = {path.rsplit(".", 1)[-1] for path in rows} if isinstance(rows, dict) else {embeddings}
    if (tied or head in trained) and getattr(base.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedError(
            f"rows of new tokens in {head}, which has a bias: PEFT leaves the bias out where rows are trained",
            f"train it whole: modules_to_save {[embeddings] if tied else [embeddings, head]}",
        )


def _check_patterns(patterns: dict[str, int], names: Sequence[str]) -> None:
    """Refuse a pattern that matches nothing, which PEFT passes over, and two of which the order decides: PEFT takes the
    first, and saves them sorted. They are compared with the ends of names."""
    compiled = dict[str, re.Pattern[str]]()
    for pattern, value in patterns.items():
        check_pattern(pattern)
        compiled[pattern] = re.compile(rf"(.*\.)?({pattern})$")
        if not 0 < value < float("inf") or not any(map(compiled[pattern].match, names)):
            what = "matches no module" if 0 < value < float("inf") else f"gives {value}, no number above 0"
            raise ConfigError(
                f"rank_pattern or alpha_pattern {pattern!r} {what}",
                "name a module of the model, with a number above 0",
            )
    for name in names if len(patterns) > 1 else ():
        found = [pattern for pattern, matcher in compiled.items() if matcher.match(name)]
        if found and patterns[found[0]] != patterns[min(found)]:
            raise ConfigError(
                f"rank_pattern or alpha_pattern {found[0]!r} and {min(found)!r} both match {name}, and the saved "
                "adapter would have the second's number",
                "write patterns of which a module matches one",
            )


def _check_ranks(adapted: Any, init: bool | str) -> None:
    """Refuse ranks above a weight's smaller size for adapters that are taken out of the weights: PEFT makes these
    smaller than its configuration says, and can't load what it saves."""
    for name, module in adapted.named_modules():
        for adapter, a in getattr(module, "lora_A", {}).items():
            if a.weight.shape[0] != module.r[adapter]:
                own, rank = name.rsplit(".", 1)[-1], module.r[adapter]
                raise ConfigError(
                    f"init_lora_weights = {init!r} with rank {rank} of {own}, whose weight has {a.weight.shape[0]}",
                    f"use a rank of {a.weight.shape[0]} or less there (rank_pattern), or another init_lora_weights",
                )


def _check_target_parameters(model: Any, targets: Sequence[str], dropout: float, dora: bool) -> None:
    """Refuse a name that matches nothing, which PEFT passes over if another does."""
    names = weight_names(model)
    for target in targets:
        if not _named(target, names):
            ends = (name.split(".")[-3:] for name in names)
            known = sorted({".".join(part for part in end if not part.isdecimal()) for end in ends})
            raise ConfigError(
                f"target parameter {target!r} is not a weight of experts of this model",
                f"use {' or '.join(known)}" if known else "leave target_parameters out: it has no experts",
            )
    if targets and dora:
        raise ConfigError("use_dora with target_parameters: PEFT has no DoRA for experts", "leave one of them out")
    if targets and dropout:
        raise ConfigError(
            f"lora_dropout {dropout} with target_parameters: PEFT has no dropout before adapters of parameters",
            "set lora_dropout to 0",
        )
