"""What verify judges: a model, a recipe's or a random one, and the documents that it is judged on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.data.batch import Collator
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.errors import ConfigError
from pronghorn.loading.load import default_device, resolve_dtype
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import resolve
from pronghorn.precision.compute import Compute
from pronghorn.train.build import attach_options, autocast_dtype, load
from pronghorn.train.documents import find, prepare, tokenizer_for
from pronghorn.train.validate import check_ids, padding_token

DOCUMENTS_A_ROW = 3
"""At least: longer documents are cut to their last tokens, where the answer is."""


@dataclass(frozen=True)
class Subject:
    """What is judged. `build` makes it anew, so that nobody's model or file is touched."""

    name: str
    build: Callable[[], Any]
    """The model to train as transformers and PEFT make it, on its device, nothing attached."""
    attach: Callable[[Any], object]
    """Puts it on the path that is judged."""
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    """Rows of `input_ids`, `labels` and `lengths` as a packed batch on the host."""
    reload: Callable[[Path], Any]
    """A plain model from what its `save_pretrained` wrote."""
    rows: list[list[Document]]
    """The documents of each packed row; all rows are one accumulated batch."""
    row_tokens: int
    """The longest row that `collate` makes."""
    autocast: torch.dtype | None = None
    """Around the forward pass, if training does."""
    compute: Compute = Compute.DTYPE
    """In what `attach` lets frozen weights multiply."""

    @property
    def documents(self) -> list[Document]:
        """Of all rows."""
        return [document for row in self.rows for document in row]

    @property
    def n_labels(self) -> int:
        """Supervised tokens of all rows."""
        return sum(document.supervised for document in self.documents)


def subject_of(
    recipe: Recipe, tokens: int, documents: Iterable[Mapping[str, Any]] | None = None, console: Console | None = None
) -> Subject:
    """Make from a recipe what is judged: its model and its training path, on its own first documents.

    Args:
        tokens: of the first row, at most max_seq_length; the second has half as many, so that they count differently.
        documents: instead of the recipe's: `input_ids` and `labels` of each.
        console: shown what happens while data are read.
    Raises:
        ConfigError: the recipe doesn't pack, or has no room for a document; and with DataError, UnsupportedError as
            training would. What is made raises PlanDoesNotFit when it is built, as training does.
    """
    if not recipe.packing.enabled:
        raise ConfigError("verify judges packed rows, and packing.enabled is false", "set packing.enabled=true for it")
    tokens = min(tokens, recipe.model.max_seq_length)
    quiet = Console(quiet=True)
    found = find(recipe)
    device = default_device()
    dtype = resolve_dtype(recipe.precision.dtype, device)
    tokenizer = tokenizer_for(recipe, found)
    if documents is None:
        documents = prepare(recipe, "train", tokenizer, console or quiet).dataset
    rows = rows_of(documents, tokens)
    config = found.config if found.config is not None else found.base and found.base.config
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    full = recipe.adapter.method == "full"
    plan: Plan | None = None
    pad = 0

    def build() -> Any:
        """Build it, and make its plan as training does: when nothing else is on the card, for training's rows."""
        nonlocal plan, pad
        model, handle = load(recipe, found, tokenizer, quiet)
        check_ids("data.train", documents, tokenizer, model)
        pad = padding_token(tokenizer.pad_token_id, model)
        plan = resolve(
            handle,
            recipe.packing.rows_per_step,
            recipe.model.max_seq_length,
            packs=True,
            autocast=autocast_dtype(recipe),
            accumulates=recipe.train.gradient_accumulation_steps > 1,
            optimizer=recipe.train.optimizer,
        )
        handle.detach()
        return model

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Pad rows to what the plan has room for; only the probe of a window is longer."""
        length = max(tokens, sum(len(row["input_ids"]) for row in rows))
        return Collator(length, pad)(rows)

    def reload(folder: Path) -> Any:
        if not full:
            tokenizer.save_pretrained(folder)  # tells how many tokens were added
        return find(recipe, folder).model(torch.float32 if full else dtype, device)

    return Subject(
        name=recipe.model.name,
        build=build,
        attach=lambda model: attach(model, plan, **attach_options(recipe)),  # the plan that `build` made
        collate=collate,
        reload=reload,
        rows=rows,
        row_tokens=limit,
        autocast=autocast_dtype(recipe),
        compute=Compute.of(recipe.precision.compute),
    )


def rows_of(documents: Iterable[Mapping[str, Any]], tokens: int) -> list[list[Document]]:
    """Make two rows of whole or cut documents: up to `tokens`, and up to half as many. Where one row takes all, half of
    its documents come again in the second: a single row tells nothing of accumulated labels.

    Raises:
        ConfigError: `tokens` leave no room for a document.
    """
    if tokens < 2 * DOCUMENTS_A_ROW:
        least = f"make model.max_seq_length at least {2 * DOCUMENTS_A_ROW}, and --tokens"
        raise ConfigError(f"rows of {tokens} tokens hold no {DOCUMENTS_A_ROW} documents", least)
    rows: list[list[Document]] = []
    remaining = iter(documents)
    for room in (tokens, tokens // 2):
        row, left = [], room
        for each in remaining:
            cut = min(room // DOCUMENTS_A_ROW, left)
            ids, labels = list(each["input_ids"])[-cut:], list(each["labels"])[-cut:]
            labels[0] = IGNORE_INDEX
            if all(label == IGNORE_INDEX for label in labels):
                continue
            row.append(Document(ids, labels))
            left -= len(ids)
            if left < 2:
                break
        if row:
            rows.append(row)
    return rows if len(rows) != 1 else [*rows, rows[0][: -(-len(rows[0]) // 2)]]
