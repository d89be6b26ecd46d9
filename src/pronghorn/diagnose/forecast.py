"""What a run will take, before it runs: memory by kind, time, and the plan, from the model's configuration alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pronghorn.config import Recipe
from pronghorn.data.packed_rows import PackedRows
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.memory.devices import Card, card, parse_bytes
from pronghorn.memory.estimate import GIB, Shape, Work
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import plan
from pronghorn.memory.step_time import StepTimes, step_times
from pronghorn.models import fast
from pronghorn.models.auto_plan import available, device_card, measured_times, shape_of, skeleton, work_of
from pronghorn.models.load import FoundModel, default_device
from pronghorn.train.documents import find, prepare, tokenizer_for

SMALL_DATA = 32 * 2**20
"""Local data up to this many bytes is tokenised (or read from its cache) to be counted."""


@dataclass(frozen=True)
class Forecast:
    """A plan with all it was made from."""

    model: str
    work: Work
    device: Card
    times_ms: StepTimes
    measured: bool
    """Whether the times were; else they come from the card's table."""
    plan: Plan
    data: dict[str, int] | None
    """The data set's `tokens` and `documents`, and the run's `micro_batches`; None where it wasn't counted."""

    @property
    def step_ms(self) -> float:
        """Of a micro-batch, with its share of the optimiser."""
        return self.plan.predicted["step_ms"]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of rows, padding included."""
        return self.work.tokens / self.step_ms * 1e3

    @property
    def seconds(self) -> float | None:
        """Of the whole run, without evaluations and checkpoints."""
        return None if self.data is None else self.data["micro_batches"] * self.step_ms / 1e3

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema": 1, **asdict(self), "tokens_per_s": self.tokens_per_s, "seconds": self.seconds}


def forecast(recipe: Recipe, device: str | None, calibrate: bool, console: Console) -> Forecast:
    """What `recipe` will take on a device.

    Args:
        device: as for `memory.devices.card`; None for this machine's GPU.
        calibrate: load the model and measure a layer there.
    Raises:
        PlanDoesNotFit: with what would fit; ConfigError: no such device; DataError, UnsupportedError: no such model.
    """
    here = device is None
    if here and not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU to plan for", "name one, e.g. --device rtx4090 or --device 24GiB")
    where = device_card(default_device()) if device is None else card(device)
    if calibrate and not (here and recipe.packing.enabled):
        raise ConfigError("--calibrate times packed rows on this machine's GPU", "leave it out, or --device")
    found = _configuration(recipe)
    empty = skeleton(found.config)
    shape, data = shape_of(empty), _count(recipe, found)
    work, times = _work(recipe, empty, shape), None
    if data is not None:
        work = replace(work, documents=max(1, data["tokens"] // max(1, data["documents"])))
    if calibrate:
        from pronghorn.train.run import autocast_dtype, load  # TRL's import takes seconds

        whole, autocast = find(recipe), autocast_dtype(recipe)
        model, _ = load(recipe, whole, tokenizer_for(recipe, whole), console)
        loaded = work_of(model, work.tokens, autocast, accumulates=work.accumulates)
        work = replace(loaded, documents=work.documents)
        times = measured_times(model, shape, work, where, autocast)
    limit = available(default_device()) if here else where.memory_bytes
    if recipe.memory.budget is not None:
        asked = parse_bytes(recipe.memory.budget, "memory.budget")
        if asked > where.memory_bytes:
            has = f"{where.name} has ({where.memory_bytes / GIB:.1f} GiB)"
            raise ConfigError(f"memory.budget {recipe.memory.budget} is more than {has}", "lower it, or leave it out")
        limit = min(limit, asked)
    told = times or step_times(shape, work, where)
    made = plan(shape, work, where, limit, told)
    return Forecast(recipe.model.name, work, where, told, times is not None, made, data)


def _work(recipe: Recipe, empty: Any, shape: Shape) -> Work:
    """How the recipe trains a model, by its word: `models.auto_plan.work_of` without weights."""
    adapter, packing, quantisation = recipe.adapter, recipe.packing, getattr(empty.config, "quantization_config", None)
    plain = not adapter.lora_dropout and adapter.bias == "none" and packing.enabled
    stock = not plain or packing.attention == "masked" or packing.metadata != "once" or packing.moe_routing == "loop"
    full, quantised = adapter.method == "full", recipe.model.load_in_4bit or quantisation is not None
    return Work(
        tokens=recipe.model.max_seq_length * packing.rows_per_step,
        method="full" if full else "qlora" if quantised else "lora",
        ranks=dict.fromkeys(adapter.target_modules, adapter.r),
        expert_rank=adapter.r if adapter.target_parameters else 0,
        itemsize=4 if recipe.precision.dtype == "float32" else 2,
        fused=not stock and fast.refusal(empty, None) is None,
        trained_whole=0 if full else shape.vocab * shape.hidden * len(adapter.modules_to_save),
        graph=packing.graph != "off",
        padded=0 if packing.enabled else packing.rows_per_step,
        accumulates=recipe.train.gradient_accumulation_steps > 1,
    )


def policy_map(policies: Sequence[Policy]) -> str:
    """Which layers do what, as people say it: "layers 0–11 recompute the MLP, 12–31 keep"."""
    parts, first = [], 0
    for policy, run in groupby(policies):
        last = first + len(list(run)) - 1
        parts.append(f"{first}–{last} {policy.value}" if last > first else f"{first} {policy.value}")
        first = last + 1
    return "layers " + ", ".join(parts)


def _configuration(recipe: Recipe) -> FoundModel:
    """The model's configuration and tokenizer; its weights needn't be there."""
    from transformers import AutoConfig

    name = recipe.model.name
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        raise UnsupportedError(f"{name}: a GGUF file is read whole only", "plan for the folder it was made from")
    if (path / "adapter_config.json").is_file():
        name = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    hub = {"trust_remote_code": recipe.model.trust_remote_code, "token": None, "revision": None}
    try:
        config = AutoConfig.from_pretrained(name, **hub)
    except (OSError, ValueError) as error:
        raise DataError(f"model {name} has no configuration that can be read ({error})", "check the name") from error
    return FoundModel(path, config, None, recipe.model.max_seq_length, False, hub)


def _count(recipe: Recipe, found: FoundModel) -> dict[str, int] | None:
    """The data set's tokens and steps, if it is local and small."""
    sizes: list[int] = []
    for source in recipe.data.sources("train"):
        files = [source.path, *source.path.rglob("*")] if source.path.exists() else []
        sizes += [file.stat().st_size for file in files if file.is_file()] or [SMALL_DATA + 1]
    if sum(sizes) > SMALL_DATA:
        return None
    documents = prepare(recipe, "train", tokenizer_for(recipe, found), Console(quiet=True)).dataset
    stats = PackedRows(documents, recipe.model.max_seq_length, seed=recipe.train.seed).stats
    rows = stats.rows if recipe.packing.enabled else stats.documents
    batches = math.ceil(rows / recipe.packing.rows_per_step * recipe.train.epochs)
    if recipe.train.max_steps is not None:
        batches = recipe.train.max_steps * recipe.train.gradient_accumulation_steps
    return {"tokens": stats.tokens, "documents": stats.documents, "micro_batches": batches}
