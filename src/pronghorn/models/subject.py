"""Which models can be attached at all."""

from __future__ import annotations

from typing import Any

from torch import nn

from pronghorn.errors import UnsupportedError
from pronghorn.models.families import base_causal_lm


def check_subject(model: nn.Module) -> None:
    """Refuse what is no transformers causal LM: packed rows would give a classifier one answer for all documents.

    Raises:
        UnsupportedError: another head, a model without one, or PEFT's mixed adapters.
    """
    if any(kind.__name__ == "PeftMixedModel" for kind in type(model).__mro__):
        raise UnsupportedError("PeftMixedModel is not supported", "use get_peft_model without mixed=True")
    base: Any = base_causal_lm(model)
    names = {kind.__name__ for kind in type(base).__mro__}
    if not any(name.endswith("ForCausalLM") for name in names) and not names & _causal_lm_names(base):
        raise UnsupportedError(
            f"{type(base).__name__} is no causal language model, and packed rows are made for these",
            "load it with AutoModelForCausalLM, or train it with transformers alone",
        )


def _causal_lm_names(base: Any) -> set[str]:
    """Return the names of transformers' causal LMs of the model's type: older ones are called e.g. GPT2LMHeadModel."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(
        str(getattr(getattr(base, "config", None), "model_type", None)), ()
    )
    return {name} if isinstance(name, str) else set(name)
