"""What a run will take, before it runs: memory by kind, time, and the plan, from the model's configuration alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pronghorn.config import Recipe
from pronghorn.data.packed_rows import PackedRows
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.memory.devices import Card, card, parse_bytes
from pronghorn.memory.estimate import CONTEXT_BYTES, GIB, Method, Shape, Work
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import Choice, choices_of, plan
from pronghorn.memory.step_time import StepTimes, step_times
from pronghorn.models.auto_plan import device_card, measured_times, shape_of, shape_of_config, work_of
from pronghorn.models.load import FoundModel, default_device, find_model

SMALL_DATA = 32 * 2**20
"""Local data up to this many bytes is tokenised (or read from its cache) to be counted."""
BUDGETS = 8


@dataclass(frozen=True)
class Forecast:
    """A plan with all it was made from."""

    name: str
    shape: Shape
    work: Work
    card: Card
    times: StepTimes
    measured: bool
    """Whether the times were; else they come from the card's table."""
    plan: Plan
    curve: list[Choice]
    """The best choices of a few budgets, the largest first."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": 1,
            "model": self.name,
            "device": dataclasses.asdict(self.card),
            "method": self.work.method,
            "tokens": self.work.tokens,
            "measured": self.measured,
            "policies": [policy.value for policy in self.plan.policies],
            "buffers": self.plan.buffers,
            "budget_bytes": self.plan.budget_bytes,
            "predicted": dict(self.plan.predicted),
            "tokens_per_s": self.tokens_per_s,
            "times_ms": dataclasses.asdict(self.times),
            "data": self.data,
            "seconds": self.seconds,
            "curve": [
                {"process_bytes": one.process_bytes, "step_ms": one.milliseconds, "policies": policy_map(one.policies)}
                for one in self.curve
            ],
        }

    @property
    def seconds(self) -> float | None:
        """Of the whole run, without evaluations and checkpoints."""
        return None if self.data is None else self.data["micro_batches"] * self.step_ms / 1e3


def forecast_recipe(
    recipe: Recipe, device: str | None, budget: str | None, calibrate: bool, console: Console
) -> Forecast:
    """What `recipe` will take on a device.

    Args:
        device: a name in `memory.devices` or an amount of memory; None for this machine's GPU.
        budget: what the process may take; None for the recipe's, or all that is there.
        calibrate: load the model and measure a layer on this machine's GPU.
    Raises:
        PlanDoesNotFit: with what would fit; ConfigError: no such device; DataError, UnsupportedError: no such model.
    """
    found = _configuration(recipe.model.name, recipe.model.trust_remote_code, recipe.model.max_seq_length)
    shape, data = shape_of_config(found.config), _count(recipe, found)
    full = recipe.adapter.method == "full"
    quantised = recipe.model.load_in_4bit or getattr(found.config, "quantization_config", None) is not None
    work = Work(
        tokens=recipe.model.max_seq_length * recipe.packing.rows_per_step,
        method="full" if full else "qlora" if quantised else "lora",
        ranks={name: recipe.adapter.r for name in recipe.adapter.target_modules},
        itemsize=4 if recipe.precision.dtype == "float32" else 2,
        fused=not recipe.adapter.lora_dropout and recipe.packing.attention != "masked" and recipe.packing.enabled,
        trained_whole=shape.vocab * shape.hidden * len(recipe.adapter.modules_to_save),
        graph=recipe.packing.graph != "off",
        documents=max(1, data["tokens"] // data["documents"]) if data else Work.documents,
    )
    budget = budget or recipe.memory.budget
    if not calibrate:
        return forecast(recipe.model.name, shape, work, device, budget, data)
    if device is not None or not torch.cuda.is_available():
        raise ConfigError("--calibrate measures on this machine's GPU", "leave --device out, and run where the GPU is")
    from pronghorn.train.documents import tokenizer_for
    from pronghorn.train.run import autocast_dtype, load

    whole = find_model(
        recipe.model.name,
        max_seq_length=recipe.model.max_seq_length,
        load_in_4bit=recipe.model.load_in_4bit,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    model, _ = load(recipe, whole, tokenizer_for(recipe, whole), console)
    autocast = autocast_dtype(recipe)
    shape, own = shape_of(model), work_of(model, work.tokens, autocast)
    own = replace(own, documents=work.documents, graph=work.graph)
    times = measured_times(model, shape, own, device_card(model.device), autocast)
    return forecast(recipe.model.name, shape, own, None, budget, data, times)


def forecast_model(
    name: str,
    fields: dict[str, Any] | None,
    tokens: int,
    method: Method,
    rank: int,
    device: str | None,
    budget: str | None,
) -> Forecast:
    """As `forecast_recipe`, for a folder, a hub name or the `fields` of a config.json, and LoRA on all linears."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**fields) if fields else _configuration(name, False, tokens).config
    shape = shape_of_config(config)
    ranks = dict.fromkeys(shape.linears, rank)
    return forecast(name, shape, Work(tokens, method, ranks, graph=True), device, budget)


def forecast(
    name: str,
    shape: Shape,
    work: Work,
    device: str | None,
    budget: str | None,
    data: dict[str, int] | None = None,
    times: StepTimes | None = None,
) -> Forecast:
    """The forecast of one model on one device; arguments and errors as for `forecast_recipe`."""
    limit = None if budget is None else parse_bytes(budget, "budget")
    if device is not None:
        where = card(device)
    elif torch.cuda.is_available():
        where = device_card(default_device())
        if limit is None:
            limit = torch.cuda.mem_get_info(default_device())[0] + torch.cuda.memory_reserved() + CONTEXT_BYTES
    else:
        raise ConfigError("this machine has no GPU to plan for", "name one, e.g. --device rtx4090 or --device 24GiB")
    if limit is not None and limit > where.memory_bytes:
        raise ConfigError(
            f"budget {budget} is more than {where.name} has ({where.memory_bytes / GIB:.1f} GiB)",
            "lower it, or leave it out",
        )
    measured = times is not None
    times = times or step_times(shape, work, where)
    made = plan(shape, work, where, limit, times)
    return Forecast(name, shape, work, where, times, measured, made, _curve(choices_of(shape, work, times)), data)


def policy_map(policies: Sequence[Policy]) -> str:
    """Which layers do what, as people say it: "layers 0–11 recompute the MLP, 12–31 keep"."""
    parts, first = [], 0
    for policy, run in groupby(policies):
        last = first + len(list(run)) - 1
        parts.append(f"{first}–{last} {policy.value}" if last > first else f"{first} {policy.value}")
        first = last + 1
    return "layers " + ", ".join(parts)


def _curve(choices: list[Choice]) -> list[Choice]:
    """The best choices for evenly spaced budgets from the least to the most memory."""
    most, least = choices[0].process_bytes, choices[-1].process_bytes
    budgets = [most - (most - least) * n / (BUDGETS - 1) for n in range(BUDGETS)]
    found = [next(c for c in choices if c.process_bytes <= max(budget, least)) for budget in budgets]
    return [choice for n, choice in enumerate(found) if choice not in found[:n]]


def _configuration(name: str, trust_remote_code: bool, max_seq_length: int) -> FoundModel:
    """A model's configuration and tokenizer; its weights needn't be there."""
    from transformers import AutoConfig

    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        raise UnsupportedError(f"{name}: a GGUF file is read whole only", "plan for the folder it was made from")
    if (path / "adapter_config.json").is_file():
        name = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    hub = {"trust_remote_code": trust_remote_code, "token": None, "revision": None}
    try:
        config = AutoConfig.from_pretrained(name, **hub)
    except (OSError, ValueError) as error:
        raise DataError(f"model {name} has no configuration that can be read ({error})", "check the name") from error
    return FoundModel(path, config, None, max_seq_length, False, hub)


def _count(recipe: Recipe, found: FoundModel) -> dict[str, int] | None:
    """The data set's tokens and steps, if it is local and small."""
    from pronghorn.train.documents import prepare, tokenizer_for

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
