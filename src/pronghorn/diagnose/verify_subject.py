"""What `verify` judges, made from a recipe: its model, its adapter, its documents, its packed path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pronghorn.config import Recipe
from pronghorn.data.batch import Collator
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.diagnose.verify_passes import Subject
from pronghorn.diagnose.verify_probe import NEIGHBOUR, probe_tokens
from pronghorn.errors import ConfigError
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import resolve
from pronghorn.models.load import default_device, resolve_dtype
from pronghorn.train.build import attach_options, autocast_dtype, load
from pronghorn.train.documents import find, prepare, tokenizer_for

DOCUMENTS_A_ROW = 3
"""At least: longer documents are cut to their last tokens, where the answer is."""


def subject_of(
    recipe: Recipe, tokens: int, documents: Iterable[Mapping[str, Any]] | None = None, console: Console | None = None
) -> Subject:
    """What the recipe trains and how, on its own first documents.

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
    row_tokens = max(tokens, probe_tokens(config) + 2 * NEIGHBOUR)
    if limit := getattr(config, "max_position_embeddings", None):
        row_tokens = min(row_tokens, limit)
    full = recipe.adapter.method == "full"
    row, longer = (Collator(length, tokenizer.pad_token_id or 0) for length in (tokens, row_tokens))
    plan: Plan | None = None

    def build() -> Any:
        """Its plan is made here, as training's: when nothing else is on the card, and for training's rows."""
        nonlocal plan
        model, handle = load(recipe, found, tokenizer, quiet)
        plan = resolve(
            handle,
            recipe.packing.rows_per_step,
            recipe.model.max_seq_length,
            packs=True,
            autocast=autocast_dtype(recipe),
            accumulates=recipe.train.gradient_accumulation_steps > 1,
        )
        handle.detach()
        return model

    def attach_as_trained(model: Any) -> object:
        return attach(model, plan, **attach_options(recipe))

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Rows that are trained on get no longer than the plan has room for; only what looks at windows is."""
        return (row if sum(len(each["input_ids"]) for each in rows) <= tokens else longer)(rows)

    def reload(folder: Path) -> Any:
        if not full:
            tokenizer.save_pretrained(folder)  # tells how many tokens were added
        return find(recipe, folder).model(torch.float32 if full else dtype, device)

    return Subject(
        name=recipe.model.name,
        build=build,
        attach=attach_as_trained,
        collate=collate,
        reload=reload,
        rows=rows,
        row_tokens=row_tokens,
        autocast=autocast_dtype(recipe),
    )


def rows_of(documents: Iterable[Mapping[str, Any]], tokens: int) -> list[list[Document]]:
    """Two rows of whole or cut documents: up to `tokens`, and up to half as many.

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
    return rows
