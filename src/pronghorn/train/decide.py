"""What `auto` means for a model that is about to be trained: decided here for the trainer, and for `verify` alike."""

from __future__ import annotations

import torch

from pronghorn.memory.plan import Plan
from pronghorn.models.attach import Handle


def decided(
    handle: Handle, rows: int, row_tokens: int, *, packs: bool, autocast: torch.dtype | None, accumulates: bool
) -> Plan | None:
    """The attached model's plan; made now where `auto` waited for the size of a micro-batch, which is `rows` times
    `row_tokens` (0: unknown). Models on the CPU or several devices, those whose experts are not Pronghorn's, and padded
    batches of any with experts, which no plan is made for, recompute their layers.

    Args:
        packs: rows are packed, not padded.
        autocast: dtype that training will run under, if any.
        accumulates: whether a step has several micro-batches.
    Raises:
        PlanDoesNotFit: with what would.
    """
    model, tokens = handle.model, rows * row_tokens
    undecided = handle.plan is not None and handle.plan.undecided
    together = len({parameter.device for parameter in model.parameters()}) == 1
    if undecided and tokens and together and model.device.type == "cuda":
        from pronghorn.models.auto_plan import plan_for, refusal

        if refusal(model, fused=packs and handle.fuses) is not None:
            return handle.plan
        assert handle.plan is not None
        budget, padded = handle.plan.budget_bytes, 0 if packs else rows
        made = plan_for(model, tokens, budget, autocast=autocast, padded=padded, accumulates=accumulates)
        handle = handle.replan(made)
    return handle.plan
