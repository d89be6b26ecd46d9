"""Training on responses only, for scripts that know it from Unsloth: labels from the token ids of two markers.

Recipes don't need it: data.labels finds the assistant's turns through the chat template. This is for a trainer whose
data set is tokenised already, where the text is gone and the ids of the markers are what is left to go by.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from pronghorn.data.packed_rows import PackedRows
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.text import counted, does
from pronghorn.unsloth_names import refuse_arguments

Trainer = TypeVar("Trainer")
Ids = tuple[int, ...]


def train_on_responses_only(
    trainer: Trainer, instruction_part: str | None = None, response_part: str | None = None, **unsupported: Any
) -> Trainer:
    """Train only what follows a `response_part` up to the next `instruction_part` (or the document's end).

    Args:
        trainer: a `pronghorn.SFTTrainer` or `trl.SFTTrainer`; its train and evaluation sets get new labels.
        instruction_part: what begins a user's turn, e.g. "<|im_start|>user\\n".
        response_part: what begins an assistant's turn, e.g. "<|im_start|>assistant\\n". Without both, they are those of
            the tokenizer's chat template.
    Returns:
        The same trainer. No token becomes supervised that wasn't before. Documents with no label left are dropped,
        and a warning counts them.
    Raises:
        ConfigError: a part that is missing (and the chat template doesn't tell it) or empty, or two that are the same.
        DataError: no document holds the response part, or the data set has no `input_ids`.
        UnsupportedError: a streamed data set; rows that TRL wrapped without keeping where documents begin; another
            argument than Unsloth's `force_match`, `tokenizer` and `num_proc`, which decide nothing here.
    """
    asked = {name: value for name, value in unsupported.items() if name not in ("force_match", "tokenizer", "num_proc")}
    refuse_arguments(asked, "train_on_responses_only", ("instruction_part", "response_part"))
    owner: Any = trainer
    if not hasattr(owner, "processing_class"):
        raise ConfigError(f"train_on_responses_only got a {type(trainer).__name__}", "give the SFTTrainer")
    if instruction_part is response_part is None:
        instruction_part, response_part = template_parts(owner.processing_class)
    if instruction_part is None or response_part is None:
        parts = {"instruction_part": instruction_part, "response_part": response_part}
        missing = " and no ".join(name for name, part in parts.items() if part is None)
        raise ConfigError(
            f"train_on_responses_only got no {missing}",
            "give what begins a user's turn and what begins an assistant's, as the chat template writes them: of "
            "ChatML instruction_part='<|im_start|>user\\n', response_part='<|im_start|>assistant\\n'",
        )
    instruction = _spellings(instruction_part, owner.processing_class, "instruction")
    response = _spellings(response_part, owner.processing_class, "response")
    if instruction.keys() & response.keys():
        raise ConfigError(
            f"instruction_part {instruction_part!r} and response_part {response_part!r} have the same tokens",
            "give what begins a user's turn and what begins an assistant's",
        )
    markers = _markers(instruction, response)
    done: dict[str, Any] = {}
    for name in ("train_dataset", "eval_dataset"):
        dataset = getattr(owner, name, None)
        if isinstance(dataset, dict):
            done[name] = {key: _relabelled(part, f"{name} {key}", markers, owner) for key, part in dataset.items()}
        elif dataset is not None:
            done[name] = _relabelled(dataset, name, markers, owner)
    for name, dataset in done.items():  # all or none: an error leaves the trainer as it was
        setattr(owner, name, dataset)
    return trainer


@dataclass(frozen=True, slots=True)
class Marker:
    """One spelling of a part: `ids` between the white space `lead`, which may be in the token before, and `tail`, which
    may be in one token with what comes after. `begins` a response, or ends one."""

    ids: Ids
    lead: str
    tail: str
    begins: bool


def _markers(instruction: dict[Ids, tuple[str, str]], response: dict[Ids, tuple[str, str]]) -> list[Marker]:
    """Return the markers of both parts' spellings."""
    markers = [Marker(ids, *around, begins=False) for ids, around in instruction.items()]
    return markers + [Marker(ids, *around, begins=True) for ids, around in response.items()]


def template_parts(tokenizer: Any) -> tuple[str, str] | tuple[None, None]:
    """Return what begins a user's turn and what begins an assistant's, as the chat template writes them between turns;
    None for both where labels by them wouldn't train two answers with the tokens that end them, and nothing else."""
    words, end = ("Alpha", "Bravo", "Charlie", "Delta", "Echo"), str(getattr(tokenizer, "eos_token", None))
    turns = [{"role": ("user", "assistant")[at % 2], "content": word} for at, word in enumerate(words)]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        between = [text.partition(before)[2].partition(after)[0] for before, after in pairwise(words)]
        response, instruction = (part.rpartition(end)[2].lstrip("\n") for part in between[:2])
        markers = _markers(*(_spellings(part, tokenizer, "template's") for part in (instruction, response)))
    except Exception:  # a template is a program
        return None, None
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    trained = [label for label in response_labels(ids, markers, tokenizer) if label != IGNORE_INDEX]
    said = str(tokenizer.decode(trained)).replace(end, " ").split()
    exact = said == [words[1], words[3]] and trained.count(tokenizer.eos_token_id) == 2
    return (instruction, response) if exact else (None, None)


def response_labels(ids: Sequence[int], markers: Iterable[Marker], tokenizer: Any) -> list[int]:
    """Return one document's labels: `ids` after a response marker up to the next instruction marker, -100 elsewhere.

    Where several markers match, the one of most tokens counts. Neither the first token nor one that a marker shares
    with the text after it is supervised.
    """
    ordered = sorted(markers, key=lambda marker: -len(marker.ids))
    labels = [IGNORE_INDEX] * len(ids)
    at, answering = 0, False
    while at < len(ids):
        for marker in ordered:
            if tuple(ids[at : at + len(marker.ids)]) == marker.ids and _after(marker.lead, ids[:at], tokenizer):
                end = _past(marker.tail, ids, at + len(marker.ids), tokenizer)
                if end is not None:
                    at, answering = end, marker.begins
                    break
        else:
            if answering:
                labels[at] = ids[at]
            at += 1
    return labels


def _after(lead: str, before: Sequence[int], tokenizer: Any) -> bool:
    """Tell whether the text before ends with `lead`; nothing before but special tokens will do too."""
    if not lead or all(token in tokenizer.all_special_ids for token in before):
        return True
    return str(tokenizer.decode(list(before[-1 - len(lead) :]))).endswith(lead)


def _past(tail: str, ids: Sequence[int], at: int, tokenizer: Any) -> int | None:
    """Return the position where the tokens from `at` on have spelled `tail`, or None if they spell something else."""
    for end in range(at, min(at + len(tail), len(ids)) + 1):
        text = str(tokenizer.decode(list(ids[at:end]))) if end > at else ""
        if text.startswith(tail):
            return end
        if not tail.startswith(text):
            return None
    return None


def _spellings(part: str, tokenizer: Any, name: str) -> dict[Ids, tuple[str, str]]:
    """Return the token ids of a marker, each with the white space that must come before and after it.

    Many tokenizers spell a marker otherwise at a text's beginning than after other text: SentencePiece has "▁###" after
    a space and "###" after a newline. A newline that begins the part may be one token with what stands before it, and
    one that ends it with the newline that a turn begins with.

    A space that ends the part may be one token with the word that follows, so a spelling without it counts too.
    """
    if not isinstance(part, str) or not part.strip():
        raise ConfigError(f"{name}_part is {part!r}", f"give the text that begins each {name}")

    def ids(text: str) -> Ids:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    lead = part[: len(part) - len(part.lstrip())]
    tail = part[len(part.rstrip()) :]
    bodies = [(part, ("", "")), (part.rstrip(" "), ("", ""))]
    bodies += [(part.lstrip(), (lead, "")), (part.strip(" ").lstrip(), (lead, ""))]
    if tail.strip(" "):
        bodies += [(part.rstrip(), ("", tail)), (part.strip(), (lead, tail))]
    spellings: dict[Ids, tuple[str, str]] = {}
    for body, around in bodies:
        spellings.setdefault(ids(body), around)
        for before in ("\n", " ", "a", "."):
            whole, alone = ids(before + body), ids(before)
            if whole[: len(alone)] == alone:
                spellings.setdefault(whole[len(alone) :], around)
    spellings.pop((), None)
    return spellings


def _relabelled(dataset: Any, name: str, markers: list[Marker], trainer: Any) -> Any:
    """Return the data set with the new labels, without the documents that have none left."""
    documents: Any = dataset.documents if isinstance(dataset, PackedRows) else dataset
    if not hasattr(documents, "__len__"):
        raise UnsupportedError(f"{name} is streamed", "load it whole (streaming=False)")
    columns = getattr(documents, "column_names", None) or (list(documents[0]) if len(documents) else [])
    if "input_ids" not in columns:
        raise DataError(f"{name} has no input_ids but {', '.join(columns)}", "let the trainer tokenise it first")
    packs = trainer.args.packing
    if name != "train_dataset" and trainer.args.eval_packing is not None:
        packs = trainer.args.eval_packing
    if packs and not isinstance(dataset, PackedRows) and "seq_lengths" not in columns:
        raise UnsupportedError(
            f"{name} is packed without its documents' lengths", "set packing_strategy='bfd' or packing=False"
        )

    labels = [_labels_of(document, markers, trainer.processing_class) for document in documents]
    kept = [index for index, row in enumerate(labels) if any(label != IGNORE_INDEX for label in row)]
    if not kept:
        raise DataError(
            f"{name}: no response_part with something to train after it in any of {counted(len(labels), 'document')}",
            "give it as the documents have it (print one: tokenizer.decode(input_ids)), newlines included",
        )
    if lost := len(labels) - len(kept):
        warnings.warn(
            f"{name}: {lost} of {len(labels)} documents {does(lost, 'have')} no response to train and "
            f"{does(lost, 'are')} left out",
            stacklevel=3,
        )
    labels = [labels[index] for index in kept]
    if isinstance(dataset, PackedRows):
        ids = [list(documents[index]["input_ids"]) for index in kept]
        rows = [{"input_ids": i, "labels": row} for i, row in zip(ids, labels, strict=True)]
        args = trainer.args
        return PackedRows(rows, dataset.stats.row_tokens, args.seed if args.data_seed is None else args.data_seed)
    chosen = documents.select(kept)
    if "labels" in columns:
        chosen = chosen.remove_columns("labels")
    return chosen.add_column("labels", labels)


def _labels_of(row: Any, markers: list[Marker], tokenizer: Any) -> list[int]:
    """Return the labels of a row of one document, or of as many as its `seq_lengths` says."""
    ids, before = list(row["input_ids"]), row.get("labels") or row["input_ids"]
    labels: list[int] = []
    for length in row.get("seq_lengths") or [len(ids)]:
        labels += response_labels(ids[len(labels) : len(labels) + length], markers, tokenizer)
    return [IGNORE_INDEX if old == IGNORE_INDEX else new for old, new in zip(before, labels, strict=True)]
