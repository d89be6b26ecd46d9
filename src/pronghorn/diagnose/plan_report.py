"""Report what a run will take, before it runs: memory by kind, time, and the plan, from the model without weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from rich.console import Console

from pronghorn.attention.backends import check_on
from pronghorn.config.recipe import Recipe
from pronghorn.data.cache import documents
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import probe
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.loading.load import FoundModel, default_device
from pronghorn.memory.devices import DeviceSpec, device_spec, parse_bytes
from pronghorn.memory.estimate import GIB, TrainSetup
from pronghorn.memory.plan import CODES_WRITTEN, WRITTEN_ONCE, Plan, Policy
from pronghorn.memory.planner import plan
from pronghorn.memory.step_time import StepTimes, step_times
from pronghorn.memory.strategies import Choice, Strategy, choose
from pronghorn.models.auto_plan import available, cuda_device_spec, dims_of, measured_times
from pronghorn.models.report import queries_of
from pronghorn.train.documents import find, tokenizer_for
from pronghorn.train.progress import RowsProgress

SCHEMA = 2
"""Of `pronghorn plan --json`. 1 had one layer's time for all; since 2 `times_ms.layers` has an entry a layer."""
SMALL_DATA = 32 * 2**20
"""Local data up to this many bytes is tokenised (or read from its cache) to be counted."""


@dataclass(frozen=True)
class PlanReport:
    """Hold a plan with all it was made from."""

    model: str
    work: TrainSetup
    device: DeviceSpec
    times_ms: StepTimes
    measured: bool
    """Whether a layer's time was measured; else times come from the card's table."""
    plan: Plan
    data: dict[str, int] | None
    """The data set's `tokens` and `documents`, and the run's `micro_batches`; None where it wasn't counted."""
    gpus: Choice | None = None
    """How several GPUs train, beside what it was chosen from; None for one."""
    unfused: str | None = None
    """Why all layers are counted as transformers' and PEFT's, in the model's dtype; None where they are fused."""

    @property
    def step_ms(self) -> float:
        """Return the milliseconds of a micro-batch, with its share of the optimiser; on several GPUs of a step."""
        return self.plan.predicted["step_ms"] if self.gpus is None else self.gpus.chosen.step_ms

    @property
    def micro_batches(self) -> int:
        """Return how many of all GPUs `step_ms` counts."""
        return 1 if self.gpus is None else self.gpus.gpus * self.gpus.micro_batches

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of rows a second, padding included."""
        return self.micro_batches * self.work.tokens / self.step_ms * 1e3

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the whole run, without evaluations and checkpoints."""
        return None if self.data is None else self.data["micro_batches"] / self.micro_batches * self.step_ms / 1e3

    @property
    def recipe_lines(self) -> str:
        """Return what a recipe says for this plan."""
        policies = set(self.plan.policies)
        whole = {Policy.KEEP: "false", Policy.RECOMPUTE_LAYER: "true", Policy.OFFLOAD: "offload"}
        # `auto` alone has codes written, or weights kept that were
        alike = len(policies) == 1 and not self.plan.codes_written and not self.plan.written_once
        asked = whole.get(policies.pop(), "auto") if alike else "auto"
        tiled = ", feed_forward: tiled" if self.plan.mlp_rows else ""
        return f"memory: {{gradient_checkpointing: {asked}{tiled}, budget: {self._budget}}}"

    @property
    def _budget(self) -> str:
        """Return the budget with as few digits as hold the plan, and never more than it."""
        budget, told = self.plan.budget_bytes or 0, 0.0
        for digits in range(1, 10):
            told = round(budget / GIB, digits)
            if int(told * GIB) > budget:
                told = math.floor(budget / GIB * 10**digits) / 10**digits
            if int(told * GIB) >= self.plan.predicted["process"]:
                break
        return f"{told}GiB"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `docs/plan.md` lists the fields."""
        return {"schema": SCHEMA, **asdict(self), "tokens_per_s": self.tokens_per_s, "seconds": self.seconds}


@dataclass(frozen=True)
class SeveralGpus:
    """Hold what is asked about several GPUs."""

    count: int
    strategy: Strategy | None
    """None for what fits."""
    link: float | None
    """Bytes a second between two of them; None for the datasheet's."""

    @classmethod
    def asked(cls, count: int, strategy: str | None, link: float | None, recipe: Recipe) -> SeveralGpus | None:
        """Read the options of `pronghorn plan`; None for one GPU.

        Args:
            strategy: None for the recipe's.
        Raises:
            ConfigError: another strategy, no rate, or either of them for one GPU.
        """
        names = ("auto", *(each.value for each in Strategy))
        if strategy is not None and strategy not in names:
            raise ConfigError(f"--strategy {strategy} is unknown", f"use one of {', '.join(names)}")
        if link is not None and not 0 < link < math.inf:
            raise ConfigError(f"--link {link} is not a rate", "give GB/s between two GPUs, each way, like 450")
        if count == 1:
            if strategy not in (None, "auto") or link is not None:
                raise ConfigError("--strategy and --link are for several GPUs", "add --gpus 2 or more")
            return None
        wanted = strategy or recipe.launch.strategy
        return cls(count, None if wanted == "auto" else Strategy(wanted), None if link is None else link * 1e9)


def report_plan(
    recipe: Recipe, device: str | None, calibrate: bool, console: Console, several: SeveralGpus | None = None
) -> PlanReport:
    """Predict what `recipe` takes on a device, by the plan that it asks for or, for `auto`, by the fastest that fits.

    Args:
        device: as for `memory.devices.device_spec`; None for this machine's GPU.
        calibrate: load the model and measure a layer there.
        several: None for one GPU.
    Raises:
        PlanDoesNotFit: with what would fit; ConfigError: no such device; and what training raises before it loads
            weights: ConfigError, DataError, UnsupportedError.
    """
    on_this_gpu = device is None
    if on_this_gpu and not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU to plan for", "name one, e.g. --device rtx4090 or --device 24GiB")
    spec = cuda_device_spec(default_device()) if device is None else device_spec(device)
    if calibrate and not (on_this_gpu and recipe.packing.enabled):
        raise ConfigError("--calibrate times packed rows on this machine's GPU", "leave it out, or --device")
    if not on_this_gpu and recipe.precision.dtype == "auto":
        precision = recipe.precision.model_copy(update={"dtype": "bfloat16" if spec.bf16 else "float16"})
        recipe = recipe.model_copy(update={"precision": precision})
    integers = recipe.precision.compute == "int8"
    if recipe.precision.compute != "dtype" and not (spec.bf16 if integers else spec.fp8):
        least = "Ampere or newer" if integers else "Ada, Hopper or Blackwell"
        raise UnsupportedError(
            f"precision.compute: {recipe.precision.compute} needs {least}; {spec.name} is older",
            "set it to int8, leave it out, or name another --device"
            if spec.bf16
            else "leave precision.compute out, or name another --device",
        )
    from pronghorn.train.build import autocast_dtype, load, of_one_process  # TRL's import takes seconds
    from pronghorn.train.weightless import weightless, work_of

    if several is not None:
        recipe = of_one_process(recipe, several.count)
    found_model, autocast = find(recipe, weights=False), autocast_dtype(recipe)
    handle = weightless(recipe, found_model)
    for query in queries_of(handle.model, autocast):
        check_on(handle.options.backend, query, spec.name, spec.bf16)  # what has bfloat16 is an Ampere or newer
    data = _count(recipe, found_model, 1 if several is None else several.count, console)
    dims, setup = dims_of(handle.model), work_of(recipe, handle, autocast)
    unfused = None if handle.layers is None else handle.layers.reason(autocast)
    if setup.padded:
        unfused = "padded batches"
    if data is not None:
        setup = replace(setup, documents=max(1, data["tokens"] // max(1, data["documents"])))
    times, measured = step_times(dims, setup, spec), False
    if calibrate:
        whole = find(recipe)
        model, _ = load(recipe, whole, tokenizer_for(recipe, whole), console)
        times, measured = measured_times(model, dims, setup, spec, autocast), True
    limit = available(default_device()) if on_this_gpu else spec.memory_bytes - spec.display_bytes
    if recipe.memory.budget is not None:
        asked = parse_bytes(recipe.memory.budget, "memory.budget")
        if asked > spec.memory_bytes:
            has = f"{spec.name} has ({spec.memory_bytes / GIB:.1f} GiB)"
            raise ConfigError(f"memory.budget {recipe.memory.budget} is more than {has}", "lower it, or leave it out")
        limit = min(limit, asked) if on_this_gpu else asked
    if several is not None:
        if several.link is not None:
            spec = replace(spec, link=several.link, link_source="--link")
        choice = choose(
            dims,
            setup,
            spec,
            several.count,
            budget_bytes=limit,
            times=times,
            asked=handle.plan,
            strategy=several.strategy,
            micro_batches=recipe.train.gradient_accumulation_steps,
            host_memory_bytes=(probe().ram_bytes or None) if on_this_gpu else None,
        )
        made = choice.chosen.plan
        assert made is not None  # `choose` raises where nothing fits
        return PlanReport(recipe.model.name, choice.chosen.work, spec, times, measured, made, data, choice, unfused)
    chosen = plan(dims, setup, spec, limit, times, handle.plan)
    return PlanReport(recipe.model.name, setup, spec, times, measured, chosen, data, unfused=unfused)


def policy_map(plan: Plan) -> str:
    """Say which layers do what: "layers 0–11 recompute the MLP, 12–31 keep"; and tiles of MLPs, codes that aren't kept,
    and weights that are."""
    parts, first = [], 0
    for policy, run in groupby(plan.policies):
        last = first + len(list(run)) - 1
        parts.append(f"{first}–{last} {policy.value}" if last > first else f"{first} {policy.value}")
        first = last + 1
    tiled = f"; MLPs in tiles of {plan.mlp_rows:,} rows" if plan.mlp_rows else ""
    codes = f"; {CODES_WRITTEN}" if plan.codes_written else ""
    return "layers " + ", ".join(parts) + tiled + codes + (f"; {WRITTEN_ONCE}" if plan.written_once else "")


def _count(recipe: Recipe, found_model: FoundModel, gpus: int, console: Console) -> dict[str, int] | None:
    """Count the data set's tokens and the run's micro-batches on all GPUs, if it is local and small. Held-out data are
    read only to be refused where training would refuse them."""
    length, seed = recipe.model.max_seq_length, recipe.data_seed
    splits: list[Literal["train", "eval"]] = ["train", "eval"] if recipe.data.eval is not None else ["train"]
    small = [split for split in splits if _is_small(recipe, split)]
    if not small:
        return None
    tokenizer, prepared = tokenizer_for(recipe, found_model), {}
    for split in small:
        with RowsProgress(console) as progress:
            prepared[split] = documents(recipe.data, split, tokenizer, length, seed, progress)
    if "train" not in prepared:
        return None
    stats = PackedRows(prepared["train"].dataset, length, seed).stats
    rows = stats.rows if recipe.packing.enabled else stats.documents
    batches = micro_batches(recipe, rows, gpus)
    return {"tokens": stats.tokens, "documents": stats.documents, "micro_batches": batches}


def _is_small(recipe: Recipe, split: Literal["train", "eval"]) -> bool:
    """Tell whether a split's data are local and no more than `SMALL_DATA`."""
    sizes: list[int] = []
    for source in recipe.data.sources(split):
        files = [source.path, *source.path.rglob("*")] if source.path.exists() else []
        sizes += [file.stat().st_size for file in files if file.is_file()] or [SMALL_DATA + 1]
    return sum(sizes) <= SMALL_DATA


def micro_batches(recipe: Recipe, rows: int, gpus: int) -> int:
    """Count a run's micro-batches on all GPUs, as the trainer makes them: an epoch's last step takes what is left.

    Args:
        recipe: of one process.
        rows: of an epoch, on all GPUs.
    """
    train, of_step = recipe.train, recipe.train.gradient_accumulation_steps
    epoch = math.ceil(rows / (recipe.packing.rows_per_step * gpus))
    steps = math.ceil(epoch / of_step)
    whole, rest = divmod(train.max_steps or math.ceil(train.epochs * steps), steps)
    return gpus * (whole * epoch + rest * of_step)
