"""What the trainer fixes in rows before and after TRL tokenises them, and how it collates them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute
from datasets import Dataset, IterableDataset
from trl.chat_template_utils import get_training_chat_template

from pronghorn.data.batch import Collator
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import ConfigError, DataError
from pronghorn.text import does

_TURNS = ("prompt", "completion", "chosen", "rejected", "messages")
"""Columns of which TRL asks whichever comes first in a set, another in each process, whether rows are conversations."""


@dataclass(frozen=True)
class Collators:
    """Packed rows carry their documents' lengths; others, which may have a number there, are padded to the longest. Not
    the trainer's own method: loaders' workers that aren't forked (Python 3.14's) are sent it, and no trainer can be."""

    packed: Collator
    padded: Any

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return self.packed(rows) if np.ndim(rows[0].get("lengths", 0)) else self.padded(rows)


def readable(name: str, given: Any, formatting: Callable[[Any], str] | None, args: Any) -> Any:
    """Return rows with the columns of one format alone: TRL may take the others for conversations, or for the prompts
    of completions, and then leaves out the end of texts, or trains what was not meant.

    Args:
        name: of the data set, for the warning about rows of several formats.
        given: rows; those that are tokenised, or not to be prepared, come back as they are.
        formatting: the trainer's `formatting_func`, whose texts alone are read, or None.
        args: the trainer's arguments.
    Raises:
        ConfigError: tokenised rows have a mask that nothing would read.
    """
    if not isinstance(given, Dataset | IterableDataset) or (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return given
    columns, text = set(given.column_names or next(iter(given))), args.dataset_text_field
    if "input_ids" in columns:
        if formatting is not None:
            warnings.warn(f"{name} is tokenised already: formatting_func is not used", stacklevel=3)
        if "completion_mask" in columns and "labels" not in columns and args.completion_only_loss is None:
            raise ConfigError(
                f"{name} has a completion_mask, which TRL reads only with completion_only_loss: all would be trained",
                "set completion_only_loss=True in SFTConfig, or False to train all tokens",
            )
        return given
    if formatting is not None:
        workers = {"num_proc": args.dataset_num_proc} if isinstance(given, Dataset) else {}
        unread = sorted(columns & {*_TURNS, "conversations"} - {text})
        how = {"function": formatting, "to": text, "name": name}
        return given.map(_formatted, with_indices=True, fn_kwargs=how, remove_columns=unread, **workers)
    formats = [names for names in (("prompt", "completion"), ("messages",), (text,)) if columns.issuperset(names)]
    if not formats:
        return given
    read, *others = formats
    turns = next(iter(given))["conversations"] if "conversations" in columns - {text} else None
    if "from" in next(iter(turns or ()), ()):
        others.append(("conversations",))  # which TRL takes before all others
    for other in [each for names in others[:1] for each in names if each not in read]:
        told, verb = " and ".join(read), "is" if read == (text,) else "are"
        instead = f"for {other}: dataset.remove_columns({list(read)})"
        warnings.warn(f"{name} has {told} beside {other}: {told} {verb} trained; {instead}", stacklevel=3)
    unread = sorted(columns & {*_TURNS, "conversations", text} - set(read))
    return given.remove_columns(unread) if unread else given


def _formatted(row: dict[str, Any], index: int, function: Callable[[Any], Any], to: str, name: str) -> dict[str, str]:
    if not isinstance(text := function(row), str):
        raise DataError(
            f"{name} row {index + 1}: formatting_func returns a {type(text).__name__}, and TRL reads a text",
            "return the row's text, or leave such rows out by dataset.filter",
        )
    return {to: text}


def has_turns(row: dict[str, Any]) -> bool:
    """Tell whether a row is a conversation to TRL."""
    return bool({"messages", "conversations"} & row.keys() or isinstance(row.get("prompt"), list))


def check_unpacked(name: str, row: dict[str, Any], packing: bool) -> None:
    """Refuse packed rows that would be taken for documents; those with our `lengths` are trained as they are unless
    they are to be packed again."""
    packed = ("seq_lengths", "lengths") if packing else ("seq_lengths",)
    column = next((column for column in packed if "input_ids" in row and isinstance(row.get(column), list)), None)
    if column is not None:
        raise DataError(
            f"{name} is packed already (it has {column}): the documents of a row would see each other",
            "give the documents as they were before they were packed: the trainer packs them",
        )


def check_assistant_only(row: dict[str, Any], formats: bool, tokenizer: Any, args: Any) -> None:
    """Refuse `assistant_only_loss` where nobody knows the assistant's turns: TRL looks for marks in the chat template.

    Args:
        row: the first one.
        formats: whether a `formatting_func` makes texts of the rows.
        tokenizer: the trainer's, or None for the model's own.
        args: the trainer's arguments.
    """
    if formats or not has_turns(row):
        raise ConfigError(
            f"assistant_only_loss, and {'formatting_func makes texts' if formats else 'rows are no conversations'}",
            "give rows of messages; of rows of prompt and completion the completions alone are trained anyway",
        )
    if tokenizer is None or args.chat_template_path or not getattr(tokenizer, "chat_template", None):
        return
    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ConfigError(
            "assistant_only_loss, and the chat template doesn't mark the assistant's turns by {% generation %}",
            "leave assistant_only_loss out and call pronghorn.train_on_responses_only(trainer, instruction_part=..., "
            "response_part=...) before training",
        ) from error


def rows_of_tokens(lists: Any) -> np.ndarray:
    """Return the row of each number that `list_flatten` gives of a column of lists. Arrow's own `list_parent_indices`
    counts numbers that lie hidden under a null, too."""
    lengths = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(lists), 0)
    return np.repeat(np.arange(len(lists)), lengths.to_numpy())


def supervised(name: str, documents: Dataset) -> Dataset:
    """Return the tokenised documents less those of which no token is trained; a document's first one never is."""
    kept: list[bool] = []
    for table in documents.select_columns("labels").with_format("arrow").iter(batch_size=10_000):
        rows = rows_of_tokens(table["labels"])
        trained = pyarrow.compute.list_flatten(table["labels"]).to_numpy() != IGNORE_INDEX
        trained &= np.diff(rows, prepend=-1) == 0  # but for first ones
        stays = table["labels"].is_null().to_numpy()  # those without a list of labels stay, to be refused
        stays[rows[trained]] = True
        kept += stays.tolist()
    if all(kept):
        return documents
    count = len(kept) - sum(kept)
    what = f"documents {does(count, 'have')} no token to train and {does(count, 'are')} left out"
    warnings.warn(f"{name}: {count} of {len(kept)} {what}", stacklevel=4)
    return documents.select(np.flatnonzero(kept))


def check_lengths(name: str, documents: Any, most: int | None, model: Any) -> None:
    """Warn of documents whose length isn't what the model was loaded for: TRL cuts them at `most` (by default 1024),
    whatever the model's `max_seq_length`, which is where Unsloth cuts them."""
    limit = getattr(model, "max_seq_length", None)
    if limit is None or most == limit or not isinstance(documents, Dataset):
        return
    bound, count = limit + 1 if most is None or most > limit else most, 0
    for table in documents.select_columns("input_ids").with_format("arrow").iter(batch_size=10_000):
        lengths = pyarrow.compute.list_value_length(table["input_ids"])
        count += pyarrow.compute.sum(pyarrow.compute.greater_equal(lengths, bound)).as_py() or 0
    if count:
        cut = f", where TRL cuts them (max_length = {most})" if bound == most else ""
        warnings.warn(
            f"{name}: {count} of {len(documents)} documents {does(count, 'have')} {bound} tokens or more{cut}; the "
            f"model's max_seq_length is {limit}: to cut them there, set max_length={limit} in SFTConfig",
            stacklevel=4,
        )


def tidied(documents: Any, given: Any, tokenizer: Any) -> Any:
    """Return the documents that TRL made of the rows `given`, those that were tokenised before as they are.

    Of texts a second BOS is left out, which a text written by a chat template has (the tokenizer adds another), and so
    is a column `lengths` of the data set's own, which means the documents of packed rows here.
    """
    if "input_ids" in next(iter(given)):
        return documents
    if "lengths" in (documents.column_names or ()):
        documents = documents.remove_columns("lengths")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return documents
    if isinstance(documents, Dataset):
        if not _begin_twice(documents, bos):
            return documents
        warnings.warn(
            f"texts begin with {tokenizer.bos_token}, and the tokenizer adds one: documents begin with one of them",
            stacklevel=4,
        )
    return documents.map(_without_second, fn_kwargs={"bos": bos})


def _begin_twice(documents: Dataset, bos: int) -> bool:
    """Tell whether a document begins with two of them."""
    for table in documents.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        if [bos, bos] in pyarrow.compute.list_slice(table["input_ids"], 0, 2).to_pylist():
            return True
    return False


def _without_second(row: dict[str, Any], bos: int) -> dict[str, Any]:
    """Return a row's values a token (tokens, labels, masks) less the first token, where two of `bos` begin it."""
    ids = row["input_ids"]
    start = int(list(ids[:2]) == [bos, bos])
    return {
        name: values[start:] for name, values in row.items() if isinstance(values, list) and len(values) == len(ids)
    }
