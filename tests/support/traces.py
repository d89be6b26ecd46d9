"""A trace of a model's instance attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

from pronghorn.models.families import recomputes_layers


def trace(model: nn.Module) -> dict[str, Any]:
    """Everything attach could leave on a model, apart from its parameters."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "forwards": {name: module.__dict__.get("forward") for name, module in model.named_modules()},
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "hooks": {
            name: [
                list(getattr(module, kind))
                for kind in (
                    "_forward_pre_hooks",
                    "_forward_pre_hooks_with_kwargs",
                    "_forward_hooks",
                    "_backward_hooks",
                    "_backward_pre_hooks",
                    "_state_dict_hooks",
                    "_state_dict_pre_hooks",
                    "_load_state_dict_pre_hooks",
                )
            ]
            for name, module in model.named_modules()
        },
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "recompute": recomputes_layers(model),
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
    }
