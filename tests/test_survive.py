"""A step that runs out of memory is repeated with less kept, and the run ends with the very weights of one that
didn't: every sample counted once, the same dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.memory.plan import Plan, Policy
from pronghorn.models import attach as attach_module
from pronghorn.models.attach import attach, attached
from pronghorn.train.survive import MemoryGuard, OutOfMemory
from tiny import packed_row, tiny_model

STEPS, WINDOW = 3, 3
POINTS = ["forward 0", "forward 2", "loss", "backward 2", "backward 0"]
WHEN = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 3)]


def build(method: str) -> Any:
    model = tiny_model("llama")
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"]))
    attach(model, Plan.keep())
    return model


class Failing:
    """Raises an error at one point of one forward or backward, counted from 1, `times` times in a row."""

    def __init__(self, model: Any, point: str, forward: int, times: int = 1, error: Exception | None = None) -> None:
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.left, self._at, self._forwards = times, forward, 0
        where, _, layer = point.partition(" ")
        base = attached(model).model  # type: ignore[union-attr]
        base.register_forward_pre_hook(self._count)
        if where == "loss":
            plain = attach_module.labelled_cross_entropy
            self._patch = pytest.MonkeyPatch()
            self._patch.setattr(attach_module, "labelled_cross_entropy", lambda *a, **k: self.fire() or plain(*a, **k))
        elif where == "forward":
            base.model.layers[int(layer)].register_forward_hook(lambda *_: self.fire())
        else:
            base.model.layers[int(layer)].register_forward_hook(self._watch_backward)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def fire(self, *_: Any) -> None:
        if self._forwards >= self._at and self.left:
            self.left -= 1
            raise self.error

    def _watch_backward(self, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(self.fire)


def train(
    method: str, prepare: Callable[[Any], Any] = lambda model: None
) -> tuple[list[float], Any, list[OutOfMemory]]:
    """A plain loop of STEPS steps of WINDOW rows: losses of the rows, the model, what was survived."""
    model = build(method)
    failing = prepare(model)
    events: list[OutOfMemory] = []
    guard = MemoryGuard(events.append, alone=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []

    def micro_batch(batch: dict[str, Any]) -> Tensor:
        loss = model(**batch, num_items_in_batch=60).loss
        loss.backward()
        return loss.detach()

    torch.manual_seed(7)
    for step in range(STEPS):
        for i in range(WINDOW):
            batch = packed_row([1, 9 + i, 8], 24, seed=10 * step + i)
            losses.append(guard.run(model, step + 1, i == WINDOW - 1, batch, micro_batch).item())
        optimizer.step()
        model.zero_grad()
    assert failing is None or failing.left == 0
    if hasattr(failing, "_patch"):
        failing._patch.undo()
    return losses, model, events


@cache
def undisturbed(method: str) -> tuple[list[float], dict[str, Tensor]]:
    losses, model, _ = train(method)
    return losses, model.state_dict()


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("when", WHEN, ids=str)
@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_lost_or_counted_twice(method: str, when: tuple[int, int], point: str) -> None:
    step, micro_batch = when
    losses, weights = undisturbed(method)
    forward = WINDOW * (step - 1) + micro_batch
    found, model, events = train(method, lambda model: Failing(model, point, forward))
    assert found == losses
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [(event.step, event.micro_batch) for event in events] == [when]
    plan = attached(model).plan  # type: ignore[union-attr]
    assert plan is not None and plan.policies == (Policy.RECOMPUTE_LAYER,)
