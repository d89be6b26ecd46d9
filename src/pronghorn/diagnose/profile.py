"""Profile a few steps of a recipe's own training with torch's profiler, by cause.

    warm-up │ steps without the profiler, timed │ CUDA: one with Python's stack, for call sites │ steps under it │ stop

The trainer is `pronghorn train`'s. Ranges around its parts, and hooks around the model's, are there for the profiled
steps only; kernels' own ranges are recorded by themselves (`pronghorn.ranges`). All of it works in a temporary folder;
nothing is saved, and nobody is reported to.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import FrameSummary, extract_stack
from typing import Any
from unittest.mock import patch

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from transformers import TrainerCallback

from pronghorn.config.recipe import Recipe
from pronghorn.device import device_name, versions
from pronghorn.diagnose.profile_report import Profile, Sync, advise
from pronghorn.diagnose.profile_times import account_for, synchronisations
from pronghorn.diagnose.profile_trace import ENGINE, Span, spans
from pronghorn.families.registry import family_of
from pronghorn.families.spec import Attention, Experts, GatedDelta
from pronghorn.layers.decoder import is_fused
from pronghorn.layers.linears import adapter_of
from pronghorn.models.attach import Handle
from pronghorn.models.experts import wrappers
from pronghorn.models.families import decoder_layers
from pronghorn.models.report import Decisions, LayersPath
from pronghorn.ranges import PREFIX, in_part
from pronghorn.text import counted
from pronghorn.train.build import build
from pronghorn.train.control import RunControl
from pronghorn.train.progress import ProgressCallback
from pronghorn.train.trainer import SFTTrainer

Trace = list[dict[str, Any]]
"""The events of a Chrome trace."""
_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
_PASSING = ("/torch/", "/accelerate/utils/", "/contextlib.py")
"""Libraries whose frames only pass a call on."""
GRAPH = "CUDA graph of the layers"


def profile(recipe: Recipe, console: Console, steps: int = 3, warmup: int = 3) -> Profile:
    """Train `warmup` + 2 · `steps` (on CUDA one more) steps as `pronghorn train` would; divide the last ones by cause.

    Raises:
        ConfigError, DataError, UnsupportedError, TrainingError: as training does.
    """
    with tempfile.TemporaryDirectory(prefix="pronghorn-profile-") as folder:
        train = recipe.train.model_copy(
            update={
                "output": Path(folder) / "run",
                "max_steps": warmup + 2 * steps + 2,  # never reached: the trainer saves after its last step
                "save_steps": None,
                "eval_steps": None,
                "report_to": [],
            }
        )
        packing = recipe.packing.model_copy(update={"graph": "off"})  # a graph's kernels can't be told by cause
        callbacks = [RunControl(None, None, None), ProgressCallback(Console(quiet=True))]
        trainer, handle = build(recipe.model_copy(update={"train": train, "packing": packing}), console, callbacks)
        console.print(f"Profiling {counted(steps, 'step')} after {warmup} to warm up and {steps} without the profiler")
        recording = Recording(Path(folder) / "trace.json", steps, warmup)
        with closing(
            recording.stages(trainer, handle)
        ) as stages:  # ranges, hooks and profiler end wherever training does
            trainer.add_callback(AtEachStep(stages))
            trainer.train()
    report = account_for(recording.trace, inner_dimensions(handle))
    device = handle.model.device
    autocast = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else None
    report.recipe, report.device, report.versions = recipe.to_dict(), device_name(), versions()
    report.plain_ms, report.warmup = recording.plain_ms, warmup
    report.paths = [vars(path) for path in handle.paths(autocast) if path.part != GRAPH]
    if device.type == "cuda":
        if recipe.packing.graph != "off":
            report.paths.append({"part": GRAPH, "path": "off", "why": "while profiling; training decides by itself"})
        report.syncs = find_sites(recording.stacks, recording.places)
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        report.memory_bytes = torch.cuda.get_device_properties(device).total_memory
    report.advice = advise(report, unfused_reason(handle.decisions(autocast)))
    return report


def unfused_reason(decisions: Decisions) -> str | None:
    """Return why some decoder layers aren't fused; None where all are, but for experts."""
    unfused = decisions.layers in (LayersPath.STOCK, LayersPath.PARTLY)
    return decisions.layers_reason if unfused else None


class AtEachStep(TrainerCallback):
    """Let a generator go on when training begins and after each step, and stop training where it ends."""

    def __init__(self, stages: Generator[None]) -> None:
        self.stages = stages

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if next(self.stages, self) is self:
            control.should_training_stop = True

    on_train_begin = on_step_end


@dataclass
class Recording:
    """Record steps of a training; `path` is a temporary file."""

    path: Path
    steps: int
    warmup: int
    plain_ms: float = 0.0
    """Milliseconds a step takes without the profiler."""
    trace: Trace = field(default_factory=list)
    """Of `steps` steps."""
    stacks: Trace = field(default_factory=list)
    """Of one step with Python's stack (CUDA only)."""
    places: list[FrameSummary] = field(default_factory=list)
    """Lines that synchronised in that step."""

    def stages(self, trainer: SFTTrainer, handle: Handle) -> Generator[None]:
        """Yield for each step that the trainer does, from the end of one to the end of the next."""
        device = handle.model.device
        for _ in range(self.warmup):
            yield
        _wait(device)
        started = time.perf_counter()
        for _ in range(self.steps):
            yield
        _wait(device)
        self.plain_ms = (time.perf_counter() - started) * 1e3 / self.steps
        with named(trainer, handle):
            if device.type == "cuda":
                with (
                    watch_synchronisations() as self.places,
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
        profiler.export_chrome_trace(str(self.path))
        trace += json.loads(self.path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        with record_function(f"{PREFIX}wait"):
            torch.cuda.synchronize(device)


@contextmanager
def named(trainer: SFTTrainer, handle: Handle) -> Iterator[None]:
    """Open ranges around the parts of this trainer's step and of its model's forward pass."""
    model, opened = handle.model, []
    parts: list[tuple[Any, str, str]] = [
        (trainer, "get_batch_samples", "data"),
        (trainer, "_maybe_log_save_evaluate", "logging"),
        (trainer, "_clip_grad_norm", "optimiser"),
        (trainer.optimizer, "step", "optimiser"),
        (trainer.lr_scheduler, "step", "optimiser"),
        (trainer.accelerator, "backward", "backward"),
        (trainer._watch, "observe", "optimiser"),
        (trainer._watch, "on_pre_optimizer_step", "optimiser"),
    ]

    def enter(part: str, *_: Any) -> None:
        opened.append(record_function(PREFIX + part))
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    # not called; with a hook it would be
    fused = {inner for layer in model.modules() if is_fused(layer) for inner in layer.modules() if inner is not layer}
    with ExitStack() as stack:
        for owner, method, part in parts:
            ranged = in_part(part)(getattr(owner, method))
            stack.enter_context(patch.object(owner, method, ranged))  # of this one object
        for module, part in parts_of(model).items():
            if module not in fused:
                stack.callback(module.register_forward_pre_hook(partial(enter, part)).remove)
                # recomputation leaves a layer by an exception once it has what it needs
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def parts_of(model: Any) -> dict[nn.Module, str]:
    """Name the modules of a causal LM for `cause`, by its family's spec; any other has the part of the one around."""
    backbone, blocks, layers = model.base_model, family_of(model.config).blocks, decoder_layers(model)
    parts = {model: "model", backbone: "backbone"}
    # the last norm, RoPE
    parts |= {child: "norm" for child in backbone.children() if layers not in child.modules()}
    for layer in layers:
        parts[layer] = "layer"
        for block in blocks(layer):
            part = "attention" if isinstance(block.kind, Attention | GatedDelta) else "feed-forward"
            experts = [block.path(block.kind.experts)] if isinstance(block.kind, Experts) else []
            own = [*block.linears, *experts]  # of a block over the layer
            parts |= {layer.get_submodule(path): part for path in ([block.module] if block.module else own)}
            parts |= {layer.get_submodule(path): "norm" for path in block.norms}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            parts[module] = "embedding"
        # an expert does more than products
        elif isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper):
            parts[module] = "lora"
            if isinstance(module.base_layer, nn.Linear):
                parts[module.base_layer] = "dense"
    return parts


def inner_dimensions(handle: Handle) -> frozenset[int]:
    """Return the ranks of a model's adapters, and their sums where adapters are computed as one product."""
    dimensions = {rank for wrapper in wrappers(handle.model) for rank in wrapper.r.values()}
    for layer in decoder_layers(handle.model):
        for block in family_of(handle.model.config).blocks(layer):
            for group in block.kind.linears:
                adapters = [adapter_of(layer.get_submodule(block.path(path))) for path in group]
                ranks = [adapter.a.shape[0] for adapter in adapters if adapter is not None]
                dimensions |= {*ranks, sum(ranks)} - {0}
    return frozenset(dimensions)


def _passing(file: str) -> bool:
    return file.startswith("<") or any(part in f"/{file}" for part in _PASSING)


@contextmanager
def watch_synchronisations() -> Iterator[list[FrameSummary]]:
    """Collect the lines at which the host waits for the device, as torch's sync debug mode notices them.

    It doesn't notice all (an event's `synchronize`, what backward threads do), but knows the very line.
    """
    places: list[FrameSummary] = []

    def notice(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = reversed(extract_stack()[:-1])
            places.extend([f for f in frames if not _passing(f.filename) and f.filename != warnings.__file__][:1])

    earlier = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = notice
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(earlier)


def find_sites(trace: list[dict[str, Any]], places: list[FrameSummary]) -> list[Sync]:
    """Return the synchronisations of a step recorded with Python's stack, those that took longest first.

    Args:
        places: what `watch_synchronisations` collected in the step; the stack knows only where a function begins.
    """
    step = next(event for event in trace if event.get("name") == f"{PREFIX}step")
    # Ranges that one hook opens and another closes lie across Python's frames: without them all spans nest.
    nested = [e for e in trace if e.get("cat") != "user_annotation" or e.get("name") == f"{PREFIX}wait"]
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in synchronisations(spans(nested)):
        if step["ts"] <= span.start <= step["ts"] + step["dur"]:
            waits[_call(span), _site(span, places)].append((span.end - span.start) / 1e3)
    syncs = [Sync(call, site, len(times), sum(times)) for (call, site), times in waits.items()]
    return sorted(syncs, key=lambda sync: -sync.ms)


def _call(span: Span) -> str:
    """Name the outermost operation around a synchronisation, as users know it, or the CUDA function itself."""
    call, at = span.name, span.parent
    while at is not None and at.category == "cpu_op" and not at.name.startswith(ENGINE):
        call, at = at.name, at.parent
    return call


def _site(span: Span, places: list[FrameSummary]) -> str:
    """Return "file:line in function" of the first frame that doesn't just pass a call on."""
    at, backward = span.parent, ""
    while at is not None:
        frame = _FRAME.fullmatch(at.name) if at.category == "python_function" else None
        if frame is not None:
            file, begins, function = frame["file"], int(frame["line"]), frame["function"]
            if not _passing(file):
                lines = {p.lineno or 0 for p in places if p.filename.endswith(file) and p.name == function}
                where = ", ".join(map(str, sorted(lines))) if lines else f"{begins} ff."
                return f"{file}:{where} in {function}"
        elif at.name.startswith(ENGINE):
            backward = at.name.removeprefix(f"{ENGINE}: ")
        at = at.parent
    return f"backward pass, in {backward}" if backward else "unknown"
