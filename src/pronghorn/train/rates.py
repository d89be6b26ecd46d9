"""Learning rates and weight decay of a run that goes on from a checkpoint: a recipe's are those of now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


@contextmanager
def kept_rates(optimizer: Any, schedule: Any) -> Iterator[None]:
    """Keep the highest learning rate and the weight decay of an optimiser's groups while states are loaded into it, and
    set the rates that a schedule by steps has of them then. Other schedules go on with those that they loaded."""
    kept = ("initial_lr", "weight_decay")
    asked: list[dict[str, Any]] = [{key: group[key] for key in kept if key in group} for group in _groups(optimizer)]
    yield
    for group, own in zip(_groups(optimizer), asked, strict=True):
        group.update(own)
    if not isinstance(schedule, LambdaLR):
        return
    groups = schedule.optimizer.param_groups
    schedule.base_lrs = [group["initial_lr"] for group in groups]
    scales = [scale(schedule.last_epoch) for scale in schedule.lr_lambdas]
    schedule._last_lr = [float(highest * scale) for highest, scale in zip(schedule.base_lrs, scales, strict=True)]
    for group, rate in zip(groups, schedule._last_lr, strict=True):
        if isinstance(group["lr"], Tensor):  # of torchao's optimisers, which keep it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the groups as they are now: loading makes others."""
    found: list[dict[str, Any]] = getattr(optimizer, "optimizer", optimizer).param_groups
    return found
