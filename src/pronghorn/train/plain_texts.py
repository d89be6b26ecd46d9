"""Plain texts, tokenised in batches to what TRL makes of them row by row.

TRL decides what rows become. The first ones go through its code, too, and if it makes anything else of them, all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trl
from datasets import Dataset, Features, Sequence, Value

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.device import processes

FIRST = 16
"""Rows that TRL tokenises, too."""
UNKNOWN = frozenset({"input_ids", "labels", "completion_mask", "assistant_masks", "messages", "conversations", "tools"})
"""Columns of which TRL makes something else."""


class _OnlyByTrl(Exception):
    """Says that of a batch of rows TRL alone knows what they become."""


def documents_of(trainer: Any, rows: Any, tokenizer: Any, args: Any, name: str) -> Any:
    """Return the documents that TRL's `SFTTrainer` makes of rows, all with `input_ids` and `labels`.

    Args:
        trainer: TRL's, which knows by now whether completions alone are trained.
        name: of the data set, for progress bars.
    """

    def by_trl(some: Any) -> Any:
        return trl.SFTTrainer._prepare_dataset(trainer, some, tokenizer, args, False, None, name)

    documents = None
    if processes() == 1:  # of several, which may be given unlike rows, TRL lets one go first
        documents = _in_batches(rows, by_trl, tokenizer, args, getattr(trainer, "completion_only_loss", None), name)
    return by_trl(rows) if documents is None else documents


def _in_batches(
    rows: Any, by_trl: Callable[[Any], Any], tokenizer: Any, args: Any, completion_only: bool | None, name: str
) -> Dataset | None:
    """Return the documents of plain texts, or of prompts and completions if completions alone are trained; None where
    TRL has to make them."""
    text = args.dataset_text_field
    if not isinstance(rows, Dataset) or not len(rows) or rows.format["type"] is not None:
        return None
    if not getattr(tokenizer, "is_fast", False) or tokenizer.eos_token is None or args.assistant_only_loss:
        return None
    columns, pairs = set(rows.column_names), {"prompt", "completion"} <= set(rows.column_names)
    read = ["prompt", "completion"] if pairs else [text]
    if (pairs and (not completion_only or text in columns)) or not columns.issuperset(read) or columns & UNKNOWN:
        return None
    if any(getattr(rows.features[column], "dtype", None) not in ("string", "large_string") for column in read):
        return None
    how = {"tokenizer": tokenizer, "read": read, "most": args.max_length, "cut": args.truncation_mode}
    few = rows.select(range(min(FIRST, len(rows))))
    try:
        ours, theirs = _documents(few[:], **how), list(by_trl(few.to_iterable_dataset()))
        if [dict(zip(ours, row, strict=True)) for row in zip(*ours.values(), strict=True)] != theirs:
            return None
        made = {"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int64"))}  # as datasets makes them
        features = Features(rows.features | made)
        workers, told = args.dataset_num_proc, f"Tokenizing {name} dataset"
        return rows.map(_documents, batched=True, fn_kwargs=how, features=features, num_proc=workers, desc=told)
    except _OnlyByTrl:
        return None


def _documents(
    batch: dict[str, list[Any]], tokenizer: Any, read: list[str], most: int | None, cut: str
) -> dict[str, list[Any]]:
    """Return a batch's columns, the last one read ended by EOS, and tokens and labels, at most `most` of each; then
    documents without a label are left out."""
    *prompts, last = read
    eos = tokenizer.eos_token
    ended = [value if value.endswith(eos) else value + eos for value in batch[last]]
    begun: list[list[int]] = [[]] * len(ended)
    whole = ended
    if prompts:
        begun = tokenizer(text=batch[prompts[0]])["input_ids"]
        whole = [prompt + completion for prompt, completion in zip(batch[prompts[0]], ended, strict=True)]
    tokens = tokenizer(text=whole)["input_ids"]
    if any(ids[: len(prompt)] != prompt for ids, prompt in zip(tokens, begun, strict=True)):
        raise _OnlyByTrl  # which says where the completion begins
    labels = [[IGNORE_INDEX] * len(prompt) + ids[len(prompt) :] for ids, prompt in zip(tokens, begun, strict=True)]
    if most is not None:
        part = slice(most) if cut == "keep_start" else slice(-most, None)
        tokens, labels = [ids[part] for ids in tokens], [each[part] for each in labels]
    documents = batch | {last: ended, "input_ids": tokens, "labels": labels}
    if most is None:
        return documents
    kept = [i for i, each in enumerate(labels) if max(each, default=IGNORE_INDEX) != IGNORE_INDEX]
    return {column: [values[i] for i in kept] for column, values in documents.items()}
