"""Data sets that TRL would refuse without a reason, or train as something else: refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from pronghorn.data.formats import beside, likely_columns
from pronghorn.data.media import parts_of, refuse_media
from pronghorn.data.packed_rows import PackedRows
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.train import prepared_rows
from pronghorn.train.check_turns import check_parts, check_rendered, check_roles, check_turns
from pronghorn.train.given_tokens import check_given


def check_dataset(name: str, given: Any, packing: bool, args: Any, kwargs: dict[str, Any], model: Any) -> None:
    """Refuse what isn't a data set, is empty, streamed where documents are packed, has columns that TRL doesn't read,
    holds images, videos or sounds, or came tokenised for another model. Of a streamed one the first row is looked at.

    Args:
        packing: whether its documents are to be packed.
        args: the trainer's arguments.
        kwargs: what else the trainer was given.
    """
    several = isinstance(given, dict) and name == "eval_dataset"
    for dataset in given.values() if several else [given]:
        if dataset is None and name == "eval_dataset":
            continue
        if not isinstance(dataset, Dataset | IterableDataset | PackedRows):
            raise ConfigError(
                f"{name} is {'missing' if dataset is None else f'a {type(dataset).__name__}'}",
                'give a datasets.Dataset: load_dataset("json", data_files=FILE, split="train")',
            )
        refuse_media(name, getattr(dataset, "column_names", None) or ())
        if not hasattr(dataset, "__len__") and packing:
            raise UnsupportedError(
                f"{name} is streamed, and packing needs every length first",
                "load it whole (streaming=False), or "
                + ("set eval_packing=False" if name == "eval_dataset" else "set packing=False"),
            )
        streamed = isinstance(dataset, IterableDataset)
        row = next(iter(dataset), None) if streamed else dataset[0] if len(dataset) else None
        if row is None:
            raise DataError(f"{name} is empty", "check the file and the filters it went through")
        if not isinstance(row, dict):  # but a table, by the data set's format
            continue
        refuse_media(f"{name}, in its first row's messages,", parts_of(row))
        prepared = (args.dataset_kwargs or {}).get("skip_prepare_dataset")
        if isinstance(dataset, Dataset) and dataset.format["type"] == "custom" and not prepared:
            raise DataError(
                f"{name} has a transform (with_transform), which what is made of its rows would leave out",
                "dataset.with_format(None).map(FUNCTION, batched=True)",
            )
        if "labels" in row and "input_ids" not in row:
            raise DataError(
                f"{name} has a column labels, which TRL takes for the labels of tokens, and no input_ids",
                'dataset.remove_columns("labels")',
            )
        if not isinstance(dataset, PackedRows):
            prepared_rows.check_unpacked(name, row, packing)
        formats, tokenizer = kwargs.get("formatting_func"), kwargs.get("processing_class")
        text = args.dataset_text_field
        plain = isinstance(row.get(text), str) and "completion" not in row
        if text in ("prompt", "messages") and (plain or formats is not None):
            raise ConfigError(
                f"dataset_text_field = {text!r}, a name that TRL takes for something else",
                f'dataset.rename_column({text!r}, "text"), and leave dataset_text_field out',
            )
        if args.assistant_only_loss and name == "train_dataset" and not prepared:
            prepared_rows.check_assistant_only(row, formats is not None, tokenizer, args)
        if "input_ids" in row:
            check_given(name, dataset, tokenizer, model)
        elif not prepared:
            _check_eos(name, row, formats is not None, tokenizer, args)
        if formats is not None:
            _check_formatting(formats, row)
        elif not prepared and not isinstance(dataset, PackedRows):
            tokenizer = None if args.chat_template_path else tokenizer
            _check_columns(name, row, text, tokenizer)
            check_parts(name, row, tokenizer)
            check_roles(name, row, tokenizer)
            _check_nulls(name, dataset, row, {text, "prompt", "completion", "messages"} & row.keys())
            if isinstance(dataset, Dataset):
                _check_labels(name, dataset, row)
                check_rendered(name, dataset, tokenizer, args.assistant_only_loss)


def _check_eos(name: str, row: dict[str, Any], formats: bool, tokenizer: Any, args: Any) -> None:
    """Refuse texts, and prompts with completions, that nothing would end."""
    named = getattr(getattr(tokenizer, "tokenizer", tokenizer), "eos_token", args.eos_token) or args.eos_token
    has_texts = formats or not prepared_rows.has_turns(row) or args.dataset_text_field in row
    if tokenizer is not None and named is None and has_texts:
        raise ConfigError(
            f"{name} has texts, and the tokenizer no EOS token to end them with",
            "set tokenizer.eos_token, or eos_token in SFTConfig, to the token that ends the model's answers",
        )


def _check_formatting(formats: Callable[[Any], Any], row: dict[str, Any]) -> None:
    """Refuse a function that formats batches, as Unsloth's notebooks have them, or returns no text."""
    if not callable(formats):
        raise ConfigError(
            f"formatting_func is a {type(formats).__name__}",
            "give a function of a row that returns its text; of a column alone: SFTConfig(dataset_text_field=...)",
        )
    if not isinstance(made := formats(row), str):
        raise ConfigError(
            f"formatting_func returns a {type(made).__name__} for a row, and TRL reads a text",
            'return the text of one row; of a function for batches make a column: dataset.map(lambda rows: {"text": '
            "FUNCTION(rows)}, batched=True), and leave formatting_func out",
        )


def _check_labels(name: str, dataset: Dataset, row: dict[str, Any]) -> None:
    """Refuse answers that KTO's label calls bad: TRL leaves the label out, and trains them like the good ones."""
    if (
        {"prompt", "completion"} <= row.keys()
        and isinstance(row.get("label"), bool)
        and False in list(dataset["label"])
    ):
        raise DataError(
            f"{name} has KTO's rows, and those whose label is false would be trained, too",
            'keep the good ones, dataset.filter(lambda row: row["label"]), or train all by TRL\'s KTOTrainer: '
            "pronghorn docs preference-training",
        )


def _check_nulls(name: str, dataset: Any, row: dict[str, Any], columns: set[str]) -> None:
    """Refuse a null where a text or messages are read, and what is neither; of a streamed set in its first `row`."""
    for column in sorted(columns):
        if not isinstance(value := row[column], str | list) and value is not None:
            raise DataError(
                f"{name} row 1: {column} is {value!r:.40}, not a text",
                f"dataset.map(lambda row: {{{column!r}: str(row[{column!r}])}})",
            )
        if value == []:
            raise DataError(f"{name} row 1: {column} is empty", f"dataset.filter(lambda row: row[{column!r}])")
        if isinstance(value, list) and not isinstance(value[0], dict):
            raise DataError(
                f"{name} row 1: {column} is a list of {type(value[0]).__name__}, neither a text nor messages",
                "join it, or make messages of it, by dataset.map",
            )
        whole = isinstance(dataset, Dataset)
        values = list(dataset[column]) if whole and dataset.data.column(column).null_count else [value]
        if None in values:
            raise DataError(
                f"{name} row {values.index(None) + 1}: {column} is null",
                f"dataset.filter(lambda row: row[{column!r}] is not None)",
            )
        if isinstance(value, list) and whole:
            check_turns(name, dataset, column)


def _check_columns(name: str, row: dict[str, Any], text: str, tokenizer: Any) -> None:
    """Refuse rows that TRL makes no documents of, and conversations without a chat template."""
    of_turns = ("messages", "conversations", "prompt", "completion")
    if array := next((column for column in of_turns if isinstance(row.get(column), np.ndarray)), None):
        raise DataError(f"{name}: by its format {array} is an array, and TRL reads lists", "dataset.with_format(None)")
    turns = prepared_rows.has_turns(row)
    if turns and text not in row and tokenizer is not None and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{name} has conversations, and the tokenizer no chat template",
            "use the model's instruct version, or pronghorn.chat_templates.get_chat_template(tokenizer, NAME)",
        )
    if text not in row and isinstance(row.get("text"), str) and not {"messages", "prompt"} & row.keys():
        raise DataError(f"{name}: columns {', '.join(row)}, and no {text!r}", "SFTConfig(dataset_text_field='text')")
    if "conversations" in row and text not in row:
        turn = next(iter(row["conversations"] or [{}]))
        if turn.get("from") not in ("user", "assistant", "system"):  # what TRL takes as it is
            standard = "dataset" if "role" in turn else "pronghorn.chat_templates.standardize_sharegpt(dataset)"
            raise DataError(
                f"{name}: `conversations` of keys {', '.join(turn)}, and TRL reads `messages` of role and content",
                f'{standard}.rename_column("conversations", "messages")',
            )
    if not turns and not {text, "input_ids"} & row.keys() and not {"prompt", "completion"} <= row.keys():
        if {"chosen", "rejected"} <= row.keys():
            raise DataError(
                f"{name} has preference pairs", "train them by TRL's DPOTrainer: pronghorn docs preference-training"
            )
        columns = likely_columns(row)
        if columns and (more := beside(row, columns)):
            parts = [key for key in (more.get("system"), columns["prompt"], more.get("input")) if key]
            prompt = " + '\\n' + ".join(f"row[{key!r}]" for key in parts)
            made = f"{{'prompt': {prompt}, 'completion': row[{columns['completion']!r}]}}"
            raise DataError(f"{name}: columns {', '.join(row)} are no known format", f"dataset.map(lambda row: {made})")
        if columns and columns.keys() == {"text"}:
            raise DataError(
                f"{name}: columns {', '.join(row)}, and no {text!r}",
                f"SFTConfig(dataset_text_field={columns['text']!r})",
            )
        renamed = columns and {column: ours for ours, column in columns.items()}
        raise DataError(
            f"{name}: columns {', '.join(row)} are no known format",
            f"dataset.rename_columns({renamed})" if renamed else "name them messages, prompt and completion, or text",
        )
