"""Recording steps of a trainer: ranges around its parts, hooks around the model's, and torch's profiler around both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function
from transformers import TrainerCallback

from pronghorn.attention import explicit
from pronghorn.device import has_triton
from pronghorn.diagnose.profile_causes import ADAPTERS, PREFIX, PRODUCTS, SCORES
from pronghorn.diagnose.profile_syncs import noticed
from pronghorn.families.registry import family_of
from pronghorn.kernels import adapter_gradients
from pronghorn.layers.decoder import is_fused
from pronghorn.layers.linears import adapter_of
from pronghorn.models.attach import Handle
from pronghorn.models.experts import wrappers
from pronghorn.train.trainer import SFTTrainer

Trace = list[dict[str, Any]]
"""The events of a Chrome trace."""


class Recorder(TrainerCallback):
    """Times and records steps while a trainer trains, and stops it when it has enough."""

    def __init__(self, folder: Path, steps: int, warmup: int) -> None:
        self.folder, self.steps, self.warmup = folder, steps, warmup
        self.plain_ms = 0.0
        """Milliseconds a step takes without the profiler."""
        self.trace: Trace = []
        """Of `steps` steps."""
        self.stacks: Trace = []
        """Of one step with Python's stack (CUDA only)."""
        self.places: list[FrameSummary] = []
        """Synchronisations noticed in that step."""
        self._script: Generator[None] | None = None

    def watch(self, trainer: SFTTrainer, handle: Handle) -> None:
        """Record the steps of this trainer, whose model `handle` is of; call it before `train`."""
        self._script = self._stages(trainer, handle)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._go_on(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._go_on(control)

    def close(self) -> None:
        """Take ranges, hooks and profiler away, wherever the training ended."""
        if self._script is not None:
            self._script.close()

    def _go_on(self, control: Any) -> None:
        assert self._script is not None
        try:
            next(self._script)
        except StopIteration:
            control.should_training_stop = True

    def _stages(self, trainer: SFTTrainer, handle: Handle) -> Generator[None]:
        """At each `yield` the trainer does a step: from the end of one to the end of the next."""
        device = handle.model.device
        for _ in range(self.warmup):
            yield
        _wait(device)
        started = time.perf_counter()
        for _ in range(self.steps):
            yield
        _wait(device)
        self.plain_ms = (time.perf_counter() - started) * 1e3 / self.steps
        with marked(trainer, handle):
            if device.type == "cuda":
                with (
                    noticed() as self.places,
                    self._recorded(device, self.stacks, with_stack=True),
                    record_function(f"{PREFIX}step"),
                ):
                    yield
                    _wait(device)
            with self._recorded(device, self.trace):
                for left in reversed(range(self.steps)):
                    with record_function(f"{PREFIX}step"):
                        yield
                        if not left:
                            _wait(device)

    @contextmanager
    def _recorded(self, device: torch.device, trace: Trace, with_stack: bool = False) -> Iterator[None]:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=with_stack) as profiler:
            yield
        path = self.folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace += json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        path.unlink()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        with record_function(f"{PREFIX}wait"):
            torch.cuda.synchronize(device)


@contextmanager
def marked(trainer: SFTTrainer, handle: Handle) -> Iterator[None]:
    """Ranges around the parts of the trainer's step and of the model's forward pass."""
    parts: list[tuple[Any, str, str]] = [
        (trainer, "get_batch_samples", "data"),
        (trainer, "_maybe_log_save_evaluate", "logging"),
        (trainer, "_clip_grad_norm", "optimiser"),
        (trainer.optimizer, "step", "optimiser"),
        (trainer.lr_scheduler, "step", "optimiser"),
        (trainer.accelerator, "backward", "backward"),
        (trainer._watch, "observe", "optimiser"),
        (trainer._watch, "on_pre_optimizer_step", "optimiser"),
        (explicit, "forward", SCORES),
        (explicit, "backward", SCORES),
        (adapter_gradients, "products", ADAPTERS),
    ]
    opened: list[Any] = []
    with ExitStack() as stack:
        for owner, name, kind in parts:
            stack.enter_context(patch.object(owner, name, _within(getattr(owner, name), kind)))
        if has_triton():
            from pronghorn.kernels import grouped_gemm_triton

            for name in ("multiply", "outer"):
                by_experts = _of_experts(getattr(grouped_gemm_triton, name), inner_dimensions(handle))
                stack.enter_context(patch.object(grouped_gemm_triton, name, by_experts))
        modules = list(handle.model.modules())
        fused = {id(part) for each in modules if is_fused(each) for part in each.modules() if part is not each}
        for name, module in handle.model.named_modules():
            if id(module) in fused:
                continue  # not called; with a hook it would be
            kind_or_none = part_of(name, module, handle.model)
            if kind_or_none is not None:
                enter, leave = _hooks(kind_or_none, opened)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                # recomputation leaves a layer by an exception once it has what it needs
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def part_of(name: str, module: nn.Module, model: Any) -> str | None:
    """What a module of a causal LM is for `cause`, or None where the module around it says enough."""
    own, last = type(module).__name__, name.rpartition(".")[2]
    if module is model:
        return "model"
    if module is model.base_model:
        return "backbone"
    if hasattr(module, "parameter_name"):  # PEFT's wrapper of experts: what they do is more than products
        return None
    if hasattr(module, "lora_A"):
        return "lora"
    if last == "base_layer" and isinstance(module, nn.Linear):
        return "dense"
    if own.endswith(("Norm", "RotaryEmbedding")):
        return "norm"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if own.endswith("DecoderLayer"):
        return "layer"
    return {"self_attn": "attention", "mlp": "mlp"}.get(last)


def inner_dimensions(handle: Handle) -> frozenset[int]:
    """The ranks of a model's adapters, and their sums where adapters are computed as one product."""
    found = {rank for wrapper in wrappers(handle.model) for rank in wrapper.r.values()}
    for layer in handle.model.base_model.layers:
        for block in family_of(handle.model.config).blocks(layer):
            for group in block.kind.linears:
                adapters = [adapter_of(layer.get_submodule(f"{block.module}.{path}")) for path in group]
                ranks = [adapter.a.shape[0] for adapter in adapters if adapter is not None]
                found |= {*ranks, sum(ranks)} - {0}
    return frozenset(found)


def _within(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + kind):
            return function(*args, **kwargs)

    return call


def _of_experts(function: Callable[..., Any], ranks: frozenset[int]) -> Callable[..., Any]:
    """Around a kernel that no operation of torch's tells of: x [T, K] by a weight [E, K, N], or by y [T, N]."""

    def call(x: Tensor, y: Tensor, *args: Any) -> Any:
        thin = not ranks.isdisjoint((*x.shape[1:], *y.shape[1:]))
        with record_function(PREFIX + (ADAPTERS if thin else PRODUCTS)):
            return function(x, y, *args)

    return call


def _hooks(kind: str, opened: list[Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(*_: Any) -> None:
        opened.append(record_function(PREFIX + kind))
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return enter, leave
