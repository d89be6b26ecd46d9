"""The routers' auxiliary loss in training: switched off where there are no routers, and weighted as TRL weights it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pronghorn.data.batch import PackedBatch
from pronghorn.models.families import balances_experts, base_causal_lm
from pronghorn.models.generic import PACKING


def settle(trainer: Any) -> None:
    """Switch the auxiliary loss off of a model without routers, which TRL asks for it."""
    config = base_causal_lm(trainer.model).config
    if trainer.aux_loss_enabled and not balances_experts(config, asked=True):
        trainer.aux_loss_enabled = config.output_router_logits = False


def alone(outputs: Any, model: Any, packed: PackedBatch | None, num_items: Tensor | int | None) -> Tensor | None:
    """Return a micro-batch's auxiliary loss for the log, as TRL tells it: without coefficient, and without the share
    of the labels that rows of families with a file count by. None: it has none."""
    aux = getattr(outputs, "aux_loss", None)
    if aux is None or packed is None or num_items is None or PACKING in base_causal_lm(model).__dict__:
        return aux
    return aux * (num_items / packed.n_labels) if packed.n_labels else None


def separate(
    outputs: Any, model: Any, packed: PackedBatch | None, packs: bool, num_items: Tensor | int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the loss without the auxiliary loss, and that one, times the coefficient that TRL set in the config.

    None stands for a loss that is whole already: packed rows of families with a file count by their share of the
    labels. Of rows that aren't packed each micro-batch counts as much as the others, as TRL's do. transformers' own
    forwards add a whole one for each micro-batch, by the coefficient with which the model was made.

    Args:
        packed: of the micro-batch, None where it is padded.
        packs: rows are packed; else `packed` is of documents that the micro-batch has anyway.
        num_items: labels of the step, of all processes.
    """
    base, aux = base_causal_lm(model), getattr(outputs, "aux_loss", None)
    coefficient = getattr(base, "router_aux_loss_coef", None)
    if aux is None or coefficient is None:
        return outputs.loss, None
    if packed is None or PACKING in base.__dict__:
        return outputs.loss - coefficient * aux, base.config.router_aux_loss_coef * aux
    if packs or num_items is None or not packed.n_labels:
        return outputs.loss, None
    own = base.config.router_aux_loss_coef * aux
    return outputs.loss - own, own * (num_items / packed.n_labels)
