"""Watch over gradients: an adapter that never trains or a gradient that isn't finite stops the run, by name.

The flags are computed on the device and read one optimiser step later, so that the watch never makes the host wait.
Until then a non-finite gradient can do no harm: fused optimisers take `found_inf` and skip the update on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from pronghorn.device import processes
from pronghorn.errors import TrainingError
from pronghorn.kernels.norms import norms
from pronghorn.parallel.sharded import IN_BUFFER
from pronghorn.parallel.training import TrainedParts
from pronghorn.text import counted

MOST_SKIPPED = 25
"""Steps in a row that loss scaling may skip. Scales begin at 2**16 and halve each time: by then they are below one."""
_MAY_BE_ZERO = ("trainable_tokens_delta", "shadow_update_")
"""What PEFT calls the trained rows of an embedding, which have no gradient of data without their tokens, and what
updates ShadowPEFT's state after each layer, after the last one for nobody."""


@dataclass(frozen=True)
class _Pending:
    """One step's flags on their way to the host."""

    names: list[str]
    flags: Tensor
    event: torch.cuda.Event | None
    scaled: bool
    """Loss scaling is on: non-finite gradients are the scaler's business."""
    moves: bool
    """The learning rate is above zero."""
    step: int

    def named(self, chosen: Tensor) -> list[str]:
        return [name for name, flag in zip(self.names, chosen.tolist(), strict=True) if flag]


class GradientWatch(TrainerCallback):
    """Stops the run when a trainable tensor's gradient was exactly zero, or not finite, over a whole optimiser step.

    Zero is judged from the first step after the weights have moved once: before that every `lora_A` has a zero
    gradient, since `lora_B` starts at zero (and a warm-up's first step has learning rate 0 and moves nothing). With
    float16 loss scaling a non-finite gradient is expected now and then, and left to the scaler. Rows of new tokens may
    have no gradient.
    """

    def __init__(self, shared: TrainedParts | None = None) -> None:
        self.shared = shared
        """Parts of layers that processes share, which are watched layer by layer."""
        self._moved = False
        self._model: nn.Module | None = None
        self._trained: list[tuple[str, nn.Parameter]] | None = None
        self._observed: tuple[list[str], Tensor] | None = None
        self._norms: tuple[list[Tensor], dict[int, int], Tensor] | None = None
        """The gradients as last observed, how often each was written to by then, and their norms [N]."""
        self._pending: _Pending | None = None
        self.skipped = 0
        """Steps that the loss scaler skipped, as far as they are judged."""
        self._skipped_in_a_row = 0

    def observe(self, model: nn.Module) -> None:
        """Flag the gradients as the last backward left them: clipping would spread one NaN over all of them."""
        self._model = model
        if self._trained is None:  # once: walking through a large model's modules takes the host milliseconds
            self._trained = [(n.removeprefix("module."), p) for n, p in model.named_parameters() if p.requires_grad]
            if self.shared is not None:
                self._trained = [(n, p) for n, p in self._trained if not hasattr(p, IN_BUFFER)]
                self._trained += list(zip(self.shared.names, self.shared.parts, strict=True))
        named: list[tuple[str, nn.Parameter]] = self._trained
        gradients: list[Any] = [p.grad for _, p in named]
        plain = set(map(type, gradients)) == {Tensor}  # none missing, nearly always: the host is in a hurry
        if plain:
            found = norms(gradients).float()
        else:
            named = [(name, parameter) for name, parameter in named if parameter.requires_grad]  # or frozen since
            gradients = [p.grad for _, p in named]
            found = gradient_norms(gradients, named[0][1].device)
        if self.shared is not None:  # each process has the norm of its part
            squared = found[-len(self.shared.parts) :].square_()
            dist.all_reduce(squared)
            squared.sqrt_()
        self._observed = [name for name, _ in named], gradient_flags(found)
        self._norms = (gradients, _written(gradients), found) if plain else None

    def clip(self, most: float, parameters: Iterable[Tensor]) -> Tensor | None:
        """Do what `torch.nn.utils.clip_grad_norm_` does, by the norms that `observe` has anyway.

        Launching torch's again takes the host milliseconds. With `most` infinite it only returns the norm of all. None
        where these aren't the gradients that `observe` saw, or they lie on several devices.
        """
        gradients: list[Any] = [gradient for p in parameters if (gradient := p.grad) is not None]
        if self._norms is None or _written(gradients) != self._norms[1]:
            return None
        if len({gradient.device for gradient in gradients}) > 1:
            return None
        (*_, found), self._norms = self._norms, None
        total = torch.linalg.vector_norm(found)
        if most < math.inf:
            torch._foreach_mul_(gradients, (most / (total + 1e-6)).clamp(max=1.0))
        return total

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew: other parameters may be trained now, and what a training before left unjudged was its own.

        One that is resumed goes on counting skipped steps.
        """
        self._trained = self._observed = self._norms = self._pending = None
        self._moved, self._skipped_in_a_row = False, 0
        told = [entry["skipped_steps"] for entry in state.log_history if "skipped_steps" in entry]
        self.skipped = told[-1] if told else 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the last step, and keep the optimiser from applying gradients that aren't finite."""
        self.judge()
        if self._observed is None:  # a trainer that doesn't call `observe`
            self.observe(kwargs["model"])
        self._norms = None  # which keeps the gradients
        assert self._observed is not None
        (names, flags), self._observed = self._observed, None
        optimizer: Any = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        scaled = getattr(kwargs["optimizer"], "scaler", None) is not None
        host, event = to_host(flags)
        moves = any(float(group["lr"]) > 0 for group in optimizer.param_groups)
        self._pending = _Pending(names, host, event, scaled, moves, state.global_step + 1)
        if event is None:
            self.judge()  # reading costs nothing here, so a bad gradient never reaches the weights
        elif not scaled:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.grad_scale, optimizer.found_inf = None, flags[1].amax()
            else:
                self.judge()  # this optimiser can't skip on the device: wait for the flags instead

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell accelerate of a step that loss scaling skipped, so that the learning rate's schedule doesn't advance.

        Fused optimisers skip on the device, where accelerate doesn't see it: the flags are waited for.
        """
        if getattr(kwargs["optimizer"], "scaler", None) is not None:
            self.judge()
            kwargs["optimizer"]._is_overflow = self._skipped_in_a_row > 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the last step."""
        self.judge()

    def judge(self) -> None:
        """Raise TrainingError if the pending step had a dead or non-finite gradient."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.event is not None:
            pending.event.synchronize()
        nonzero, nonfinite = pending.flags.bool()
        if nonfinite.any():
            if pending.scaled:
                self.skipped += 1
                self._skipped_in_a_row += 1
                if self._skipped_in_a_row >= MOST_SKIPPED:
                    raise TrainingError(
                        f"step {pending.step}: gradients overflowed float16 in {MOST_SKIPPED} steps in a row, each of "
                        "which was skipped and halved the loss scale",
                        "use bfloat16 (precision.dtype: bfloat16, bf16=True), or float32; or lower the learning rate",
                    )
                return  # the scaler skips this step: it says nothing about the other tensors
            bad = pending.named(nonfinite)
            problem = f"step {pending.step}: {len(bad)} gradients are not finite, first {bad[0]}"
            if (weight := _broken_weight(self._model, self._moved)) is not None:
                raise TrainingError(
                    f"{problem}, and neither is the model's weight {weight}",
                    "download or copy the model again: no training has made it so",
                )
            raise TrainingError(
                problem,
                "the update was skipped: lower the learning rate, look at the data of this step, or use bfloat16",
            )
        self._skipped_in_a_row = 0
        dead = [name for name in pending.named(~nonzero) if not any(part in name for part in _MAY_BE_ZERO)]
        if self._moved and dead:
            listed = ", ".join(dead[:5]) + (" …" if len(dead) > 5 else "")
            problem = f"step {pending.step}: the gradient of {counted(len(dead), 'trainable tensor')} was exactly zero"
            if (weight := _empty_weight(self._model)) is not None:
                raise TrainingError(
                    f"{problem}, and so is all of the model's weight {weight}: {listed}",
                    "if it isn't meant to be, download or copy the model again",
                )
            raise TrainingError(
                f"{problem}: {listed}",
                "a part of the model doesn't train: check target_modules, frozen weights and that the data has labels",
            )
        self._moved = self._moved or pending.moves


def _broken_weight(model: nn.Module | None, moved: bool) -> str | None:
    """Return the name of a weight that was loaded with NaN or infinity; None where there is none. Trained ones that
    have moved may owe it to the training."""
    for name, weight in _readable(model):
        if not (moved and weight.requires_grad) and not weight.isfinite().all():
            return name
    return None


def _empty_weight(model: nn.Module | None) -> str | None:
    """Return the name of a weight that was loaded as nothing but zeros, of those that are whole here. Biases may be so,
    norms' weights that one is added to, and adapters."""
    empty = (name for name, weight in _readable(model) if not (weight.requires_grad or weight.any()))
    return next((n for n in empty if not n.endswith(("bias", "norm.weight")) and ".lora_" not in n), None)


def _readable(model: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights in 16 or 32 bits that are whole here."""
    for name, weight in () if model is None else model.named_parameters():
        plain = type(weight.data) is Tensor and not weight.is_meta and weight.is_floating_point()
        if plain and weight.element_size() > 1:
            yield name, weight


def gradient_norms(gradients: list[Any], device: torch.device) -> Tensor:
    """Return each gradient's L2 norm, float32 [N] on the device; 0 for a missing one and for one without elements."""
    present = {i: g for i, g in enumerate(gradients) if g is not None and g.numel() > 0}
    every = torch.zeros(len(gradients), device=device)
    if not present:
        return every
    found = norms(list(present.values())).float().to(device)
    return every.index_copy(0, torch.tensor(list(present)).to(device, non_blocking=True), found)


def gradient_flags(found: Tensor) -> Tensor:
    """Return flags, float32 [2, N]: whether each gradient has a non-zero entry, and a non-finite one.

    `kernels.norms` says how small and how large entries may be. All ranks agree.
    """
    flags = (torch.stack([found, found - found]) != 0).float()  # inf - inf and nan - nan are nan
    if processes() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return flags


def _written(gradients: list[Any]) -> dict[int, int]:
    """Return how often each was written to, by its identity, which is its own as long as somebody has it."""
    return {id(gradient): gradient._version for gradient in gradients}


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start copying to the host; the event says when it is there (None: it is)."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
