"""Trained parameters under names that don't depend on who wrapped the model. Imports nothing heavy."""

from __future__ import annotations

from typing import Any


def canonical(name: str) -> str:
    """Return a parameter's name without what PEFT and compilation wrap around it: the same for all."""
    return name.removeprefix("base_model.model.").replace("_orig_mod.", "").replace(".default.", ".")


def trainable(model: Any) -> dict[str, Any]:
    """Return the trained parameters by canonical name."""
    return {canonical(name): p for name, p in model.named_parameters() if p.requires_grad}
