"""What the trainer does to a model before it trains: attach it where it will be, and decide what its layers keep."""

from __future__ import annotations

from typing import Any

import torch

from pronghorn.memory.plan import Plan
from pronghorn.models.attach import Handle, attach, attached
from pronghorn.models.auto_plan import resolve


def attached_on_its_device(model: Any, args: Any) -> Handle:
    """Return the model's handle, made after the trainer's device has it: attach looks where it is."""
    stays = args.place_model_on_device is False or getattr(args, "deepspeed", None)
    stays = stays or getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    moves = not stays and args.device.type == "cuda" and model.device.type == "cpu"
    if moves:
        model.to(args.device)
    handle = attached(model)
    if handle is None or not moves:
        return handle or attach(model)
    return attach(model, **vars(handle.options))  # on the CPU it had no fused layers


def resolve_plan(handle: Handle, args: Any) -> Plan | None:
    """Return the attached model's plan, made now where `auto` waited for these arguments.

    Raises:
        PlanDoesNotFit: with what would.
    """
    return resolve(
        handle,
        args.per_device_train_batch_size,
        args.max_length or 0,
        packs=args.packing,
        autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        accumulates=args.gradient_accumulation_steps > 1,
        optimizer=str(getattr(args.optim, "value", args.optim)),
    )
