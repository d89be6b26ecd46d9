"""Time a recipe's training step against plain transformers and PEFT: the same model, rows and optimiser.

    attached: loss, steps  ->  detached: loss must agree, steps  ->  attached: steps again

Pronghorn's steps come before and after the plain ones, so that a slow change of the machine falls on both.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import peak_bytes
from pronghorn.errors import ConfigError, TrainingError
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import resolve
from pronghorn.models.families import recompute_layers
from pronghorn.text import counted
from pronghorn.train.build import attach_options, autocast_dtype, load
from pronghorn.train.documents import find, prepare, tokenizer_for
from pronghorn.train.validate import check_ids, padding_token

BATCHES = 4
"""Different micro-batches: repeating one would let caches fit themselves to it."""
LOSS_LIMIT, LOSS_LIMIT_16_BITS, LOSS_LIMIT_IN_8_BITS = 1e-4, 2e-3, 2e-2
"""How far the losses may be apart: sums in another order; 8 bits of mantissa, averaged over the labels of a row;
products of e4m3 (4 bits of mantissa) or of 8-bit integers, where plain transformers has 8 bits of mantissa."""


@dataclass
class Side:
    """Hold what one of the two took."""

    loss: float
    """On the first rows, before any step."""
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """None on the CPU."""

    @property
    def median_ms(self) -> float:
        """Return the median time of a step in milliseconds."""
        return statistics.median(self.step_ms)


@dataclass(frozen=True)
class Comparison:
    """Hold a recipe's step by Pronghorn and by plain transformers."""

    pronghorn: Side
    plain: Side
    tokens: int
    """Tokens of a step's rows, padding included."""
    recomputes: bool
    """Whether plain transformers recomputed its layers, as the recipe lets Pronghorn do."""


def compare(recipe: Recipe, console: Console, steps: int, warmup: int) -> Comparison:
    """Time `steps` training steps of both, after untimed ones, if their losses agree. Nothing is saved.

    Args:
        warmup: untimed steps before timed ones; CUDA graphs are chosen in the first twenty.

    Raises:
        ConfigError: the recipe doesn't pack; and with DataError, UnsupportedError as training does.
        TrainingError: the losses differ.
    """
    if not recipe.packing.enabled:
        raise ConfigError("bench times packed rows, and packing.enabled is false", "set packing.enabled=true for it")
    found_model, row_tokens, rows = find(recipe), recipe.model.max_seq_length, recipe.packing.rows_per_step
    tokenizer = tokenizer_for(recipe, found_model)
    packed = PackedRows(prepare(recipe, "train", tokenizer, console).dataset, row_tokens, recipe.data_seed)
    model, handle = load(recipe, found_model, tokenizer, console)
    check_ids("data.train", packed, tokenizer, model)
    autocast = autocast_dtype(recipe)
    plan = resolve(handle, rows, row_tokens, packs=True, autocast=autocast, accumulates=False)
    collate = Collator(row_tokens, padding_token(tokenizer.pad_token_id, model))
    indices = cycle(range(len(packed)))
    batches = [collate([packed[index] for index in islice(indices, rows)]) for _ in range(BATCHES)]
    batches = [{name: value.to(model.device) for name, value in batch.items()} for batch in batches]
    plain = [{name: x for name, x in batch.items() if name != "packed"} | {"use_cache": False} for batch in batches]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)  # costs what any other does, and the weights stay
    recomputes = recipe.memory.gradient_checkpointing is not False

    limit = LOSS_LIMIT if next(model.parameters()).dtype is torch.float32 and autocast is None else LOSS_LIMIT_16_BITS
    if handle.options.compute.forward_in_8_bits:
        limit = LOSS_LIMIT_IN_8_BITS

    def turn(name: str, batches: list[dict[str, Any]], count: int, side: Side) -> None:
        console.print(f"{name}: {counted(warmup, 'step')} to warm up, {count} timed")
        times, peak = _time(model, batches, optimizer, autocast, count, warmup)
        side.step_ms += times
        side.peak_bytes = max(filter(None, (side.peak_bytes, peak)), default=None)

    pronghorn = Side(_loss(model, batches[0], autocast))
    turn("Pronghorn", batches, -(-steps // 2), pronghorn)
    handle.detach()
    recompute_layers(handle.model, recomputes)
    stock = Side(_loss(model, plain[0], autocast))
    if not abs(pronghorn.loss / stock.loss - 1) <= limit:
        losses = f"{pronghorn.loss:.6g}, and {stock.loss:.6g} of plain transformers"
        problem = f"the losses differ: {losses} (limit {limit:.0e})"
        raise TrainingError(problem, "pronghorn verify RECIPE says where; times of unequal work say nothing")
    turn("plain transformers", plain, steps, stock)
    recompute_layers(handle.model, False)
    attach(model, plan, **attach_options(recipe))
    turn("Pronghorn again", batches, steps // 2, pronghorn)
    return Comparison(pronghorn, stock, rows * row_tokens, recomputes)


def _autocast(model: Any, dtype: torch.dtype | None) -> Any:
    return torch.autocast(model.device.type, dtype, enabled=dtype is not None)


def _loss(model: Any, batch: dict[str, Any], dtype: torch.dtype | None) -> float:
    """Return the loss of a batch without dropout, by the forward that training runs."""
    model.eval()
    with _autocast(model, dtype):
        loss = model(**batch).loss.item()
    model.train()
    return loss


def _time(
    model: Any,
    batches: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype | None,
    steps: int,
    warmup: int,
) -> tuple[list[float], int | None]:
    """Return the milliseconds of each step after the warm ones, and the peak of the GPU's memory."""
    cuda, times = model.device.type == "cuda", []
    for number, batch in zip(range(-warmup, steps), cycle(batches), strict=False):
        if number == 0 and cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with _autocast(model, dtype):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        if number >= 0:
            times.append((time.perf_counter() - began) * 1e3)
    return times, peak_bytes(model.device) if cuda else None
