"""What two ways to load a model came to."""

from __future__ import annotations

from typing import Any

import torch


def facts(model: Any) -> dict[str, Any]:
    """Everything that training or saving finds: weights, statistics, buffers, what the model says of itself."""
    made: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    made |= {f"buffer {name}": value for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        made[f"kind of {name}"] = type(parameter), parameter.dtype, parameter.requires_grad
        state = getattr(parameter, "quant_state", None)
        made |= {} if state is None else {f"{name}: {key}": value for key, value in state.as_dict().items()}
        for number, part in enumerate(getattr(parameter, "parts", ())):
            made[f"{name}, {number}"] = part
    made["kinds"] = {name: type(module) for name, module in model.named_modules()}
    made["config"] = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    made["generation"] = model.generation_config.to_dict()
    made["implementations"] = model.config._attn_implementation, model.config._experts_implementation
    own = "is_quantized", "is_loaded_in_4bit", "quantization_method", "training", "name_or_path"
    return made | {name: getattr(model, name, None) for name in own}


def differences(model: Any, other: Any) -> list[str]:
    """Name what two models differ in, to the bit."""
    made, right = facts(model), facts(other)

    def same(value: Any, expected: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return bool(value == expected)
        return value.dtype == expected.dtype and torch.equal(value.cpu(), expected.cpu())

    missing = [name for name in made.keys() | right.keys() if name not in made or name not in right]
    return missing + [name for name in made.keys() & right.keys() if not same(made[name], right[name])]
