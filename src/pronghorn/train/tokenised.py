"""Rows, tokenised in batches to the documents that TRL makes of them one by one.

TRL decides what rows become. The first ones go through its code, too, and if it makes anything else of them, all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trl
from datasets import Dataset, Features, Sequence, Value

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.train.group import agreed

FIRST = 16
"""Rows that TRL tokenises, too."""
UNKNOWN = frozenset(
    {"input_ids", "labels", "completion_mask", "assistant_masks", "conversations", "tools", "chat_template_kwargs"}
)
"""Columns of which TRL makes something else."""


class _OnlyByTrl(Exception):
    """Says that of a batch of rows TRL alone knows what they become."""


def documents_of(trainer: Any, rows: Any, tokenizer: Any, args: Any, name: str) -> Any:
    """Return the documents that TRL's `SFTTrainer` makes of rows, all with `input_ids` and `labels`. All processes call
    it.

    Args:
        trainer: TRL's, which knows by now whether completions alone are trained.
        name: of the data set, for progress bars.
    """

    def by_trl(some: Any) -> Any:
        return trl.SFTTrainer._prepare_dataset(trainer, some, tokenizer, args, False, None, name)

    how, documents = _settings(trainer, rows, tokenizer, args), None
    if agreed(f"way of {name} rows", how is not None):  # TRL's code, once it is called, waits for all processes
        documents = _in_batches(rows, by_trl, how, args.dataset_num_proc, name)
        documents = documents if agreed(f"documents of {name} rows", documents is not None) else None
    return by_trl(rows) if documents is None else documents


def _settings(trainer: Any, rows: Any, tokenizer: Any, args: Any) -> dict[str, Any] | None:
    """Return the arguments of `_documents` for texts or conversations, or for prompts and completions if completions
    alone are trained; None for other rows, which only TRL makes documents of."""
    if not isinstance(rows, Dataset) or not len(rows) or rows.format["type"] is not None:
        return None
    if not getattr(tokenizer, "is_fast", False) or tokenizer.eos_token is None or args.assistant_only_loss:
        return None
    if args.shuffle_dataset:  # the order of which the first rows can't tell
        return None
    formats = (["prompt", "completion"], ["messages"], [args.dataset_text_field])
    read, *others = [names for names in formats if set(rows.column_names).issuperset(names)] or [[]]
    if not read or others or UNKNOWN & set(rows.column_names):
        return None
    if len(read) == 2 and not trainer.completion_only_loss:
        return None
    return {
        "tokenizer": tokenizer, "template": trainer.chat_template, "read": read,
        "most": args.max_length, "cut": args.truncation_mode,
    }  # fmt: skip


def _in_batches(
    rows: Dataset, by_trl: Callable[[Any], Any], how: Any, workers: int | None, name: str
) -> Dataset | None:
    """Return the documents of rows; None where TRL makes other ones of the first, or where some turn out to be left
    to it."""
    few = rows.select(range(min(FIRST, len(rows))))
    theirs = list(by_trl(few.to_iterable_dataset()))
    try:
        ours = _documents(few[:], **how)
        if [dict(zip(ours, row, strict=True)) for row in zip(*ours.values(), strict=True)] != theirs:
            return None
        made = {"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int64"))}  # as datasets makes them
        features, told = Features(rows.features | made), f"Tokenizing {name} dataset"
        return rows.map(_documents, batched=True, fn_kwargs=how, features=features, num_proc=workers, desc=told)
    except _OnlyByTrl:
        return None


def _documents(
    batch: dict[str, list[Any]], tokenizer: Any, template: str | None, read: list[str], most: int | None, cut: str
) -> dict[str, list[Any]]:
    """Return a batch's columns, texts ended by EOS, and tokens and labels, at most `most` of each; then documents
    without a label are left out."""
    *prompts, last = (batch[column] for column in read)
    if isinstance(last[0], str):
        eos = tokenizer.eos_token
        last = [text if text.endswith(eos) else text + eos for text in last]
    begun: list[list[int]] = [[]] * len(last)
    whole = last
    if prompts:
        begun = _tokens(prompts[0], tokenizer, template, add_generation_prompt=True)
        whole = [prompt + completion for prompt, completion in zip(prompts[0], last, strict=True)]
    tokens = _tokens(whole, tokenizer, template)
    if any(ids[: len(prompt)] != prompt for ids, prompt in zip(tokens, begun, strict=True)):
        raise _OnlyByTrl  # which says where the completion begins
    labels = [[IGNORE_INDEX] * len(prompt) + ids[len(prompt) :] for ids, prompt in zip(tokens, begun, strict=True)]
    if most is not None:
        part = slice(most) if cut == "keep_start" else slice(-most, None)
        tokens, labels = [ids[part] for ids in tokens], [each[part] for each in labels]
    documents = batch | {read[-1]: last, "input_ids": tokens, "labels": labels}
    if most is None:
        return documents
    kept = [i for i, each in enumerate(labels) if max(each, default=IGNORE_INDEX) != IGNORE_INDEX]
    return {column: [values[i] for i in kept] for column, values in documents.items()}


def _tokens(rows: list[Any], tokenizer: Any, template: str | None, **more: Any) -> list[list[int]]:
    """Return the token ids of texts, or of conversations by a chat template."""
    if isinstance(rows[0], str):
        return tokenizer(text=rows)["input_ids"]
    if not all(rows):
        raise _OnlyByTrl  # which says what is wrong with a conversation without turns
    return tokenizer.apply_chat_template(rows, tokenize=True, return_dict=True, chat_template=template, **more)[
        "input_ids"
    ]
