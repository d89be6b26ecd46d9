"""Apply `data.overflow` to documents of more tokens than a row has: refuse, leave out, cut the end, or split."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pronghorn.data.packed_rows import lengths_of
from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.errors import ConfigError, DataError
from pronghorn.text import counted

Overflow = Literal["error", "drop", "truncate", "split"]
_RAISE = "raise model.max_seq_length"  # recipes alone come here: TRL cuts the documents of scripts


@dataclass(frozen=True, slots=True)
class Fitted:
    """Documents of at most `max_seq_length` tokens; of those given, how many were dropped, cut at the end (truncated)
    and cut into pieces (split), and how many pieces were dropped for having no supervised token."""

    documents: list[Document]
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    dropped_pieces: int = 0


def fit(documents: Iterable[Document], max_seq_length: int, overflow: Overflow = "error", others: int = 0) -> Fitted:
    """Apply the overflow rule; "split" makes documents of at most `max_seq_length` tokens that have all the labels.

    A document that loses its last label by the cut is dropped, and so is a piece without one.

    Args:
        others: documents of the set that are known to fit and aren't among `documents`.
    Raises:
        DataError: an overlong document with "error"; nothing is left. ConfigError: rows too short to split.
    """
    if overflow == "split" and max_seq_length < 2:
        raise ConfigError(f"max_seq_length {max_seq_length} < 2 with data.overflow: split", _RAISE)
    fitting: list[Document] = []
    dropped = truncated = split = dropped_pieces = number = 0
    for number, document in enumerate(documents, 1):
        if len(document) <= max_seq_length:
            fitting.append(document)
        elif overflow == "error":
            raise DataError(
                f"{document.source or f'document {number}'} has {len(document)} tokens > max_seq_length "
                f"{max_seq_length}",
                f"{_RAISE} or set data.overflow to drop, truncate or split",
            )
        elif overflow == "split":
            pieces = _pieces(document, max_seq_length)
            supervised = [piece for piece in pieces if piece.supervised]
            fitting += supervised
            split += 1
            dropped_pieces += len(pieces) - len(supervised)
        else:
            cut = Document(document.input_ids[:max_seq_length], document.labels[:max_seq_length], document.source)
            if overflow == "truncate" and cut.supervised:
                fitting.append(cut)
                truncated += 1
            else:
                dropped += 1
    if not fitting and not others:
        raise DataError(
            f"of {counted(number, 'document')} none is left at max_seq_length {max_seq_length} with "
            f"data.overflow: {overflow}",
            _RAISE,
        )
    return Fitted(fitting, dropped, truncated, split, dropped_pieces)


def fit_dataset(whole: Any, max_seq_length: int, overflow: Overflow) -> tuple[Fitted, Any]:
    """Apply the rule to a `datasets.Dataset`: (what was done, the documents that fit and, after them, the cut ones).

    Only documents that are too long are read into memory. Raises as `fit`.
    """
    from datasets import Dataset, concatenate_datasets

    lengths = lengths_of(whole)
    long = [i for i, n in enumerate(lengths) if n > max_seq_length]
    if not long:
        return Fitted([]), whole
    short = whole.select([i for i, n in enumerate(lengths) if n <= max_seq_length])
    fitted = fit((Document(**row) for row in whole.select(long)), max_seq_length, overflow, others=len(short))
    if not fitted.documents:
        return fitted, short
    columns = {name: [getattr(d, name) for d in fitted.documents] for name in ("input_ids", "labels", "source")}
    cut = Dataset.from_dict(columns, features=whole.features)
    return fitted, concatenate_datasets([short, cut]) if len(short) else cut


def outcomes(whole: Any, max_seq_length: int) -> dict[Overflow, Fitted]:
    """Return what each rule would do with a `datasets.Dataset` that has documents over `max_seq_length`, else {}."""
    long = [index for index, tokens in enumerate(lengths_of(whole)) if tokens > max_seq_length]
    documents = [Document(**row) for row in whole.select(long)]
    rules: tuple[Overflow, ...] = ("drop", "truncate", "split") if long and max_seq_length > 1 else ()
    return {rule: fit(documents, max_seq_length, rule, others=1) for rule in rules}


def _pieces(document: Document, length: int) -> list[Document]:
    """Cut a document into consecutive pieces of at most `length` tokens. A first token can't be supervised, so each
    piece begins with the last token of the one before, where it has its label."""
    pieces: list[Document] = []
    for start in range(0, len(document) - 1, length - 1):
        ids, labels = document.input_ids[start : start + length], document.labels[start : start + length]
        source = f"{document.source} piece {len(pieces) + 1}".lstrip()
        pieces.append(Document(ids, [IGNORE_INDEX, *labels[1:]], source))
    return pieces


MUCH = 0.01
"""The share of documents from which on it is a warning that they are dropped or cut."""


def lost_documents(dropped: int, dropped_share: float, truncated: int, cut_share: float) -> str:
    """Say how many documents were dropped and cut, and which share that is."""
    return f"{counted(dropped, 'document')} dropped ({dropped_share:.1%}), {truncated:,} truncated ({cut_share:.1%})"
