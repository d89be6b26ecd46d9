"""Which modules of a model of a generic family the forward of a text reaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.families.generic import expert_counts
from pronghorn.families.spec import HEAD
from pronghorn.models.families import check_config, decoder_layers
from pronghorn.models.passes import after_forward, short


def end_names(base: Any) -> tuple[str, str]:
    """Return the last names of a causal LM's embeddings and head, as its family or its module tree has them."""
    family = check_config(base.config)
    if not family.generic:
        return family.embeddings, family.head
    names = {module: name.rpartition(".")[2] for name, module in base.named_modules()}
    return names[base.get_input_embeddings()], names.get(base.get_output_embeddings(), HEAD)


def reached_linears(base: Any) -> tuple[str, ...]:
    """List the linears of the decoder layers that a short text is multiplied with, routers aside: by their last names,
    or by their whole ones where modules that are not to be adapted have these last names, too.

    A linear whose weight a kernel reads without calling it is not among them: an adapter there would do nothing.

    Raises:
        UnsupportedError: the model's forward fails.
    """
    names = {module: name for name, module in base.named_modules()}
    layers = decoder_layers(base)
    routers = {module for layer in layers for module in _routers(layer)}
    inside = [module for module in all_linears(layers) if module not in routers]
    experts = tuple(f"{names[layer]}.{path}." for layer in layers for path, _ in expert_counts(layer))
    reached = _called(base)
    ends = dict.fromkeys(names[module].rpartition(".")[2] for module in inside if module in reached)
    refused = _refused_by_peft(base)
    # a text of four tokens doesn't reach all experts
    wanted = [m for m in inside if m in reached or (experts and names[m].startswith(experts))]
    wanted = [m for m in wanted if names[m].rpartition(".")[2] in ends.keys() - refused]
    others = {name.rpartition(".")[2] for module, name in names.items() if module not in set(wanted)}
    # PEFT takes experts' usual names for those of merged parameters
    whole = others & (ends.keys() - refused) or experts
    found = tuple(names[module] for module in wanted) if whole else tuple(end for end in ends if end not in refused)
    if not found:
        raise ConfigError("the model's layers call no linears that adapters could go on", "name target_modules")
    return found


def _called(base: Any) -> list[nn.Module]:
    """Return the linears that a forward of a few tokens calls, in training as in training; nothing is changed."""
    called: dict[nn.Module, None] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # a subclass may multiply groups of columns with blocks of the weight, which an adapter doesn't
        widths = [value.shape[-1] for value in (*args[:1], output) if isinstance(value, torch.Tensor)]
        if not isinstance(module, nn.Linear) or widths == [module.in_features, module.out_features]:
            called.setdefault(module)

    ids = torch.arange(4, device=base.device)[None]
    devices = [base.device] if base.device.type == "cuda" else []
    try:
        with after_forward(all_linears(base), note), torch.no_grad(), torch.random.fork_rng(devices=devices):
            base(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever a stranger's forward raises
        raise UnsupportedError(
            f"the forward of {type(base).__name__} fails ({type(error).__name__}: {short(error)})",
            "name target_modules, or train it with transformers alone",
        ) from error
    return list(called)


def all_linears(base: nn.Module) -> list[nn.Module]:
    """List a model's linears, transformers' own with a transposed weight among them."""
    from transformers.pytorch_utils import Conv1D

    return [module for module in base.modules() if isinstance(module, nn.Linear | Conv1D)]


def _routers(layer: nn.Module) -> list[nn.Module]:
    """Return the linears that give one number for each expert of a list beside them."""
    found = []
    for path, count in expert_counts(layer):
        beside: Any = layer.get_submodule(path.rpartition(".")[0]) if path else layer
        holders = [module for module in beside.modules() if getattr(module, "out_features", None) == count]
        found += [module for module in holders if isinstance(module, nn.Linear)]
    return [*found, *(module for module in all_linears(layer) if getattr(module, "out_features", None) == 1)]


def _refused_by_peft(base: Any) -> set[str]:
    """Return the last names that PEFT refuses to adapt in this model: kernels read their weights."""
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    refused: set[str] = set()
    if check is None:
        return refused
    for name in {name.rpartition(".")[2] for name, _ in base.named_modules()}:
        try:
            check(SimpleNamespace(peft_type="LORA"), base, name)
        except ValueError:
            refused.add(name)
    return refused
