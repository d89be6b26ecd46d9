"""From a recipe to tokenised documents, with what happened to the rows told on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.config.sections import CHANGES_BASE
from pronghorn.data.cache import Prepared, documents
from pronghorn.data.held_out import also_in
from pronghorn.data.overflow import MUCH, lost_documents
from pronghorn.data.template import find_template
from pronghorn.errors import ConfigError, DataError
from pronghorn.families.registry import import_plugins
from pronghorn.loading.load import FoundModel, find_model
from pronghorn.loading.new_tokens import add_tokens
from pronghorn.text import counted
from pronghorn.train.progress import RowsProgress


def find(recipe: Recipe, name: str | Path | None = None, weights: bool = True) -> FoundModel:
    """Find the recipe's model, or the one called `name` with the recipe's options; nothing is loaded.

    Without `weights` the files of the weights needn't exist.

    Raises:
        ConfigError: the recipe trains or changes weights that the checkpoint has in few bits; others as `find_model`.
    """
    import_plugins(recipe.model.plugins)
    found = find_model(
        name or recipe.model.name,
        max_seq_length=recipe.model.max_seq_length,
        load_in_4bit=recipe.model.load_in_4bit,
        experts_in_16bit=recipe.model.experts_in_16bit,
        dropout=recipe.model.dropout,
        trust_remote_code=recipe.model.trust_remote_code,
        weights=weights,
    )
    adapter = recipe.adapter
    if found.is_quantised and not found.is_adapter:
        if adapter.method == "full":
            raise ConfigError(
                f"adapter.method: full, but {found.name} has its weights in few bits, which can't be trained",
                "set adapter.method: lora, or use the 16-bit checkpoint",
            )
        if str(adapter.init_lora_weights).startswith(CHANGES_BASE):
            raise ConfigError(
                f"adapter.init_lora_weights: {adapter.init_lora_weights} changes the base's weights, and {found.name} "
                "has them in few bits",
                "leave init_lora_weights out, or use the 16-bit checkpoint",
            )
    return found


def tokenizer_for(recipe: Recipe, found: FoundModel) -> Any:
    """Load the model's tokenizer with the recipe's new tokens and chat template.

    Raises:
        ConfigError: a template whose tokens it lacks; DataError: no token to fill rows up with, which is EOS without a
            padding token.
    """
    template = find_template(recipe.data.chat_template)
    tokenizer = found.tokenizer()
    if recipe.adapter.new_tokens:
        add_tokens(tokenizer, recipe.adapter.new_tokens, special=() if template is None else template.needs)
    if template is not None:
        template.apply(tokenizer)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise DataError(
            f"{found.name}: its tokenizer has neither an EOS nor a padding token",
            "set eos_token in its tokenizer_config.json, or data.chat_template to a built-in one, which sets it",
        )
    return tokenizer


def prepare(
    recipe: Recipe,
    split: Literal["train", "eval"],
    tokenizer: Any,
    console: Console,
    trained: Prepared | None = None,
) -> Prepared:
    """Tokenise `data.train` or `data.eval`, and print what happened to the rows, and how many to evaluate on are among
    the `trained`; raises as `data.cache.documents`."""
    with RowsProgress(console) as progress:
        prepared = documents(recipe.data, split, tokenizer, recipe.model.max_seq_length, recipe.data_seed, progress)
    if split == "eval" and (again := _trained_too(recipe)) is not None:
        told = f"data.eval: {again} is trained, too: its loss says nothing of new data (data.eval: 5% holds some out)"
        console.print(told, style="yellow", markup=False)
    elif trained is not None and recipe.data.held_out is None:
        seen, all_ = also_in(prepared.whole, trained.whole), len(prepared.whole)
        if seen > MUCH * all_:
            told = f"{seen:,} of {counted(all_, 'document')} are trained, too: their loss says nothing of new data"
            console.print(f"data.eval: {told}", style="yellow", markup=False)
    for count in prepared.counts:
        left_out = f", {count.dropped:,} dropped" if count.dropped else ""
        console.print(
            f"{count.path}: {counted(count.rows + count.dropped, 'row')} ({count.format}){left_out}; "
            f"{counted(count.used, 'document')} used",
            markup=False,
        )
    if prepared.errors:
        console.print(f"The first dropped row: {prepared.errors[0]}", markup=False)
    if prepared.control_rows:
        done = {"escape": "tokenised as ordinary text", "allow": "they end or begin turns there"}
        console.print(
            f"data.{split}: {counted(prepared.control_rows, 'row', 'hold')} control tokens in what "
            f"the assistant doesn't say: "
            f"{done[recipe.data.control_tokens]} (data.control_tokens: {recipe.data.control_tokens})"
        )
    if (fitted := prepared.fitted).split:
        pieces = f"{counted(fitted.dropped_pieces, 'piece')} without a label dropped"
        console.print(f"{counted(fitted.split, 'document')} split; {pieces}")
    if prepared.dropped or fitted.truncated:
        loud = max(prepared.dropped_share, prepared.cut_share) > MUCH
        shares = prepared.dropped_share, prepared.cut_share
        lost = f"data.{split}: {lost_documents(prepared.dropped, shares[0], fitted.truncated, shares[1])}"
        hint = ": see why with `pronghorn data inspect`" if loud else ""
        console.print(f"{lost}{hint}", style="yellow" if loud else None)
    return prepared


def _trained_too(recipe: Recipe) -> str | None:
    """Return a source of `data.eval` that `data.train` names, too, or has in one of its folders."""
    if recipe.data.eval is None or recipe.data.held_out is not None:
        return None
    trained = {(source.path, source.config, source.split) for source in recipe.data.sources("train")}
    evaluated = recipe.data.sources("eval")
    again = (e for e in evaluated for path in (e.path, *e.path.parents) if (path, e.config, e.split) in trained)
    return next((str(source.path) for source in again), None)
