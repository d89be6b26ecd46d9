"""The routers' auxiliary loss in training: switched off where there are no routers, and weighted as TRL weights it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pronghorn.models.families import balances_experts, base_causal_lm
from pronghorn.models.generic import PACKING


def settle(trainer: Any) -> None:
    """Switch the auxiliary loss off of a model without routers, which TRL asks for it."""
    config = base_causal_lm(trainer.model).config
    if getattr(trainer, "aux_loss_enabled", False) and not balances_experts(config, asked=True):
        trainer.aux_loss_enabled = config.output_router_logits = False


def separate(outputs: Any, model: Any, packed: bool) -> tuple[Tensor, Tensor | None]:
    """Return the loss without the auxiliary loss, and that one, times the coefficient that TRL set in the config.

    None stands for a loss that is whole already: packed batches of fused layers count by their share of the labels.
    transformers' own forwards add a whole one for each micro-batch, by the coefficient with which the model was made.
    """
    base, aux = base_causal_lm(model), getattr(outputs, "aux_loss", None)
    coefficient = getattr(base, "router_aux_loss_coef", None)
    if aux is None or coefficient is None or (packed and PACKING not in base.__dict__):
        return outputs.loss, None
    return outputs.loss - coefficient * aux, base.config.router_aux_loss_coef * aux
