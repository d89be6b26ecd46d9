"""Write an adapter's folder as vLLM and SGLang read it: experts' adapters by the names of their checkpoint.

PEFT saves the adapters of all experts of a layer together, as `experts.lora_A` and `experts.base_layer.lora_A`; which
of the two is gate and up, only the order of wrapping tells. vLLM (0.32: `lora/model_manager.py`)
reads `…experts.3.gate_proj.lora_A` and so on, of every expert and all its three linears, or for families whose
checkpoints hold experts together PEFT's names in one order. So what wasn't trained is written as zeros, which change
nothing. What these servers refuse, or leave out without a word, is refused here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.folder import refuse_filled, whole_folder
from pronghorn.families.spec import Experts
from pronghorn.layers.linears import variant_of
from pronghorn.models.adapter_files import WEIGHTS, changes_base
from pronghorn.models.attach import plain_class
from pronghorn.models.experts import low_rank_factors, wrappers
from pronghorn.models.families import base_causal_lm, check_config

MERGE = "merge instead (save_pretrained_merged), and serve that folder"
_PREFIX = "base_model.model."


def write_served_adapter(model: Any, tokenizer: Any, folder: str | Path) -> Path:
    """Write the active adapter of a PEFT model for vLLM and SGLang.

    Args:
        model: left untouched.
        tokenizer: saved beside the weights, with the template; None saves none.
        folder: where to; must be empty, or not be there.
    Returns:
        The folder.
    Raises:
        ConfigError: something is there, or the model has no adapter.
        UnsupportedError: an adapter with something that these servers don't read; names it, and says to merge.
    """
    target = Path(folder)
    refuse_filled(target)
    name = active_adapter(model)
    check_served(model)
    with whole_folder(target) as writing:
        model.save_pretrained(writing, selected_adapters=[name])
        for file in list((writing / name).glob("*")) if name != "default" else ():  # where PEFT puts others
            file.rename(writing / file.name)
        if name != "default":
            (writing / name).rmdir()
        if (experts := _expert_adapters(model)) and _kind(model).served is not None:
            _rewrite(model, experts, writing)
        if tokenizer is not None:
            tokenizer.save_pretrained(writing)
    return target


def active_adapter(model: Any) -> str:
    """Return the name of the one active adapter.

    Raises:
        ConfigError: the model has no adapter.
        UnsupportedError: several are active at once, or none.
    """
    if not hasattr(model, "active_peft_config"):
        raise ConfigError("the model has no adapter", "export it merged")
    active = list(model.active_adapters)
    if len(active) != 1:
        named = ", ".join(active) or "none"
        raise UnsupportedError(
            f"one adapter is written, and active are: {named}", "choose one: model.set_adapter(NAME)"
        )
    return active[0]


def check_served(model: Any) -> None:
    """Refuse an adapter with something that vLLM and SGLang refuse or leave out.

    Raises:
        UnsupportedError: names it, and says to merge.
    """
    config = model.peft_config[active_adapter(model)]
    for field, served, why in (
        ("peft_type", "LORA", "they read LoRA alone"),
        ("modules_to_save", None, "they refuse modules that were trained whole"),
        ("trainable_token_indices", None, "they don't read rows of new tokens"),
        ("bias", "none", "they leave trained biases out without a word"),
        ("use_dora", False, "they don't compute DoRA"),
        ("lora_bias", False, "they refuse biases of adapters"),
        ("layer_replication", None, "they don't repeat layers"),
        ("rank_pattern", {}, "they give all adapters one rank"),
        ("alpha_pattern", {}, "they give all adapters one scale"),
    ):
        value = getattr(config, field, served)
        if value and value != served:
            raise UnsupportedError(f"vLLM and SGLang can't serve the adapter's {field} ({value}): {why}", MERGE)
    if changes_base(config):
        what = f"init_lora_weights ({config.init_lora_weights})"
        raise UnsupportedError(
            f"vLLM and SGLang can't serve the adapter's {what}: its beginning isn't taken out of their base", MERGE
        )
    expected, adapter = {*wrappers(model)}, active_adapter(model)
    for name, module in model.named_modules():
        if (variant := variant_of(module, adapter)) is not None:
            raise UnsupportedError(f"vLLM and SGLang apply W + s·B·A alone, and {name} has a {variant} adapter", MERGE)
        if hasattr(module, "parameter_name") and hasattr(module, "lora_A") and module not in expected:
            raise UnsupportedError(f"vLLM and SGLang can't serve the adapter of {name}, no weight of experts", MERGE)
    names = (name for name, _ in model.named_modules() if name.endswith(".token_adapter"))
    if (name := next(names, None)) is not None:
        raise UnsupportedError(f"vLLM and SGLang don't read rows of new tokens ({name})", MERGE)
    if expected and _kind(model).served is None:
        kind = base_causal_lm(model).config.model_type
        raise UnsupportedError(f"how servers name adapters of {kind}'s experts isn't known here", MERGE)


def _kind(model: Any) -> Experts:
    """Return what the model's family says of its experts."""
    return check_config(base_causal_lm(model).config).experts


def _expert_adapters(model: Any) -> dict[str, dict[str, Any]]:
    """Return PEFT's wrappers around experts by the experts' path and the parameter's name."""
    wanted = {*wrappers(model)}
    modules: dict[str, dict[str, Any]] = {}
    for name, module in base_causal_lm(model).named_modules():
        if module in wanted:
            wrapper: Any = module
            path = name.removesuffix(".base_layer")
            modules.setdefault(path, {})[wrapper.parameter_name] = wrapper
    return modules


def _rewrite(model: Any, experts: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write the experts' adapters anew, and say so in the adapter's configuration."""
    from safetensors.torch import load_file, save_file
    from transformers.core_model_loading import revert_weight_conversion

    kind = _kind(model)
    prefixes = tuple(f"{_PREFIX}{path}." for path in experts)
    tensors = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if not name.startswith(prefixes)}
    plain = _bare_model(base_causal_lm(model)) if kind.served == "each" else None
    targets: dict[str, None] = {}
    for path, by_parameter in experts.items():
        gate_up, down = (_factors(by_parameter, name, active_adapter(model)) for name in (kind.gate_up, kind.down))
        for side, pair in enumerate(zip(gate_up, down, strict=True)):
            part = ("lora_A", "lora_B")[side]
            if plain is None:
                for tensor, inner in zip(pair, (".base_layer", ""), strict=True):
                    tensors[f"{_PREFIX}{path}{inner}.{part}.weight"] = _flat(tensor, side)
                continue
            first = pair[0] if side else torch.cat([pair[0]] * 2, dim=1)  # gate and up have one A
            named = {f"{path}.{kind.gate_up}": first, f"{path}.{kind.down}": pair[1]}
            # split and renamed as transformers does when it saves the weight of that name
            for name, tensor in revert_weight_conversion(plain, named).items():
                module = name.removesuffix(".weight")
                targets.setdefault(module.rpartition(".")[2])
                tensors[f"{_PREFIX}{module}.{part}.weight"] = tensor.clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    config = copy.deepcopy(model.peft_config[active_adapter(model)])
    config.inference_mode = True
    if plain is not None:
        config.target_parameters = None
        config.target_modules = sorted({*(config.target_modules or ()), *targets})
    config.save_pretrained(str(folder))


def _factors(by_parameter: dict[str, Any], name: str, adapter: str) -> tuple[Tensor, Tensor]:
    """Return A [E, r, in] and B [E, out, r] of a parameter, zeros for one that has no adapter."""
    wrapper = by_parameter.get(name)
    if wrapper is not None:
        a, b = low_rank_factors(wrapper, adapter)
        return a.detach().cpu(), b.detach().cpu()
    other = next(iter(by_parameter.values()))
    a, _ = low_rank_factors(other, adapter)
    module = other.get_base_layer()
    shape = list(getattr(module, name).shape[1:])
    rows, columns = reversed(shape) if getattr(module, "is_transposed", False) else shape
    return a.new_zeros(len(a), a.shape[1], columns).cpu(), a.new_zeros(len(a), rows, a.shape[1]).cpu()


def _flat(tensor: Tensor, side: int) -> Tensor:
    """Return A [E, r, in] or B [E, out, r] as PEFT saves it: [E·r, in], [out, r·E]."""
    return tensor.permute(1, 2, 0).flatten(1) if side else tensor.flatten(0, 1)


def _bare_model(base: Any) -> Any:
    """Return a model of the base's own class on the meta device."""
    config = type(base.config).from_dict(base.config.to_dict())
    with torch.device("meta"):
        return plain_class(base)(config)
