"""Training on responses only, for scripts that know it from Unsloth: labels from the token ids of two markers.

Recipes don't need it: data.labels finds the assistant's turns through the chat template. This is for a trainer whose
data set is tokenised already, where the text is gone and the ids of the markers are what is left to go by.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from datasets import Dataset

from pronghorn.data.packed_rows import PackedRows
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.text import counted, does
from pronghorn.train.ranks import data_seed
from pronghorn.train.response_markers import Markers, response_labels
from pronghorn.train.template_parts import markers_of, template_parts, unclear_results
from pronghorn.unsloth_names import refuse_arguments

Trainer = TypeVar("Trainer")


def train_on_responses_only(
    trainer: Trainer, instruction_part: str | None = None, response_part: str | None = None, **unsupported: Any
) -> Trainer:
    """Train only what follows a `response_part` up to the next `instruction_part` (or the document's end).

    Tool results and turns of other roles within are not trained; answers that the chat template writes right behind a
    tool's result are.

    Args:
        trainer: a `pronghorn.SFTTrainer` or `trl.SFTTrainer`; its train and evaluation sets get new labels.
        instruction_part: what begins a user's turn, e.g. "<|im_start|>user\\n".
        response_part: what begins an assistant's turn, e.g. "<|im_start|>assistant\\n". Without both, they are those of
            the tokenizer's chat template.
    Returns:
        The same trainer. No token becomes supervised that wasn't before. Documents with no label left are dropped,
        and a warning counts them.
    Raises:
        ConfigError: a part that is missing (and the chat template doesn't tell it) or empty, two that are the same, or
            an instruction part that begins with the EOS token, which ends the answer before.
        DataError: no document holds the response part, the data set has no `input_ids`, or documents hold tool results
            that can't be told from answers.
        UnsupportedError: a streamed data set; rows that TRL wrapped without keeping where documents begin; another
            argument than Unsloth's `force_match`, `tokenizer` and `num_proc`, which decide nothing here.
    """
    asked = {name: value for name, value in unsupported.items() if name not in ("force_match", "tokenizer", "num_proc")}
    refuse_arguments(asked, "train_on_responses_only", ("instruction_part", "response_part"))
    owner: Any = trainer
    if not hasattr(owner, "processing_class"):
        raise ConfigError(f"train_on_responses_only got a {type(trainer).__name__}", "give the SFTTrainer")
    given = not (instruction_part is response_part is None)
    if not given:
        instruction_part, response_part = template_parts(owner.processing_class)
    if instruction_part is None or response_part is None:
        parts = {"instruction_part": instruction_part, "response_part": response_part}
        missing = " and no ".join(name for name, part in parts.items() if part is None)
        why = "" if given else ", and the chat template doesn't tell them"
        raise ConfigError(
            f"train_on_responses_only got no {missing}{why}",
            "give what begins a user's turn and what begins an assistant's, as the chat template writes them: of "
            "ChatML instruction_part='<|im_start|>user\\n', response_part='<|im_start|>assistant\\n'",
        )
    markers = markers_of(instruction_part, response_part, given, owner.processing_class)
    unclear = unclear_results(markers, owner.processing_class)
    done: dict[str, Any] = {}
    for name in ("train_dataset", "eval_dataset"):
        dataset = getattr(owner, name, None)
        if isinstance(dataset, dict):
            done[name] = {
                key: _relabelled(part, f"{name} {key}", markers, unclear, owner) for key, part in dataset.items()
            }
        elif dataset is not None:
            done[name] = _relabelled(dataset, name, markers, unclear, owner)
    for name, dataset in done.items():  # all or none: an error leaves the trainer as it was
        setattr(owner, name, dataset)
    return trainer


def _relabelled(dataset: Any, name: str, markers: Markers, unclear: list[int], trainer: Any) -> Any:
    """Return the data set with the new labels, without the documents that have none left."""
    documents: Any = dataset.documents if isinstance(dataset, PackedRows) else dataset
    if not hasattr(documents, "__len__"):
        raise UnsupportedError(f"{name} is streamed", "load it whole (streaming=False)")
    if not isinstance(documents, Dataset):
        documents = Dataset.from_list(list(documents))
    documents = documents.with_format(None)  # its lists are read, whatever format it has
    columns = documents.column_names
    if "input_ids" not in columns:
        raise DataError(f"{name} has no input_ids but {', '.join(columns)}", "let the trainer tokenise it first")
    packs = trainer.args.packing
    if name != "train_dataset" and trainer.args.eval_packing is not None:
        packs = trainer.args.eval_packing
    if packs and not isinstance(dataset, PackedRows) and "seq_lengths" not in columns:
        raise UnsupportedError(
            f"{name} is packed without its documents' lengths", "set packing_strategy='bfd' or packing=False"
        )

    if unclear and any(_holds(list(document["input_ids"]), unclear) for document in documents):
        raise DataError(
            f"{name}: tool results, which the chat template writes so that by instruction_part and response_part they "
            "can't be told from answers",
            "leave rows with tool results out, or train by a recipe (pronghorn train), which finds answers by the "
            "chat template",
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
    if markers.control and all(markers.control.isdisjoint(row) for row in labels):
        warnings.warn(
            f"{name}: no answer ends with a special token, and the model is not trained to stop: end answers with "
            f"{trainer.processing_class.eos_token}",
            stacklevel=3,
        )
    chosen = documents.select(kept)
    if "labels" in columns:
        chosen = chosen.remove_columns("labels")
    chosen = chosen.add_column("labels", labels)
    packed = isinstance(dataset, PackedRows)
    return PackedRows(chosen, dataset.stats.row_tokens, data_seed(trainer.args)) if packed else chosen


def _holds(ids: list[int], tokens: list[int]) -> bool:
    return any(ids[at : at + len(tokens)] == tokens for at, token in enumerate(ids) if token == tokens[0])


def _labels_of(row: Any, markers: Markers, tokenizer: Any) -> list[int]:
    """Return the labels of a row of one document, or of as many as its `seq_lengths` says."""
    ids, before = list(row["input_ids"]), row.get("labels") or row["input_ids"]
    labels: list[int] = []
    for length in row.get("seq_lengths") or [len(ids)]:
        labels += response_labels(ids[len(labels) : len(labels) + length], markers, tokenizer)
    return [IGNORE_INDEX if old == IGNORE_INDEX else new for old, new in zip(before, labels, strict=True)]
