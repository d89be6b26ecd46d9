"""Make the packed rows of a measurement once, from a seed; every candidate's process gets the same ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.diagnose.shapes import FIRST_ORDINARY_TOKEN, lognormal_length, random_documents
from pronghorn.errors import ConfigError, DataError

ROWS = 4
"""Different rows: repeating one would let caches and autotuning fit themselves to it."""


@dataclass(frozen=True)
class Row:
    """A packed row of T tokens: documents end to end, no padding."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    """Unshifted; -100 at tokens that are not supervised, each document's first token among them."""
    lengths: tuple[int, ...]
    """Tokens of each document; they sum to T."""

    @property
    def n_labels(self) -> int:
        """Count the supervised tokens."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """List [start, end) of each document."""
        ends = list(accumulate(self.lengths))
        return [(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def supervised_where(self, keep: Callable[[int], bool]) -> Row:
        """Return the row with labels only in those documents (by number) that `keep` says."""
        labels = list(self.labels)
        for document, (start, end) in enumerate(self.bounds):
            if not keep(document):
                labels[start:end] = [IGNORE_INDEX] * (end - start)
        return replace(self, labels=tuple(labels))

    def with_other_tokens(self, document: int) -> Row:
        """Return the row with one document's tokens in reverse order and each id one lower; its labels stay."""
        start, end = self.bounds[document]
        ids = list(self.input_ids)
        ids[start:end] = [max(FIRST_ORDINARY_TOKEN, token - 1) for token in reversed(ids[start:end])]
        return replace(self, input_ids=tuple(ids))


def document_lengths(lengths: str, tokens: int) -> Callable[[random.Random], int]:
    """Return what draws a document's length: `one` (a row is one document), `lognormal`, or from a JSON list in a file.

    Raises:
        ConfigError: neither a known distribution nor a file.
        DataError: the file holds no list of positive integers, or none from 2 to `tokens`.
    """
    if lengths == "one":
        return lambda rng: tokens
    if lengths == "lognormal":
        return lognormal_length
    path = Path(lengths)
    if not path.is_file():
        remedy = "use one, lognormal, or a JSON file with a list of lengths"
        raise ConfigError(f"lengths {lengths!r} is not a file", remedy)
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})", "give a JSON list of document lengths") from error
    if not isinstance(known, list) or not known or not all(type(n) is int and n > 0 for n in known):
        raise DataError(f"{path} is not a list of positive integers", "give a JSON list of document lengths in tokens")
    fitting = [n for n in known if 1 < n <= tokens]  # a document of one token has no label
    if not fitting:
        raise DataError(f"{path}: none of {len(known)} documents has 2 to {tokens} tokens", "raise --tokens")
    return lambda rng: rng.choice(fitting)


def check_rows(tokens: int, lengths: str, supervised: float) -> None:
    """Refuse what no rows can be made of (ConfigError; DataError for a bad file of lengths)."""
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens} is below 2", "give the tokens of a packed row, 8192 is common")
    if not 0 < supervised <= 1:
        raise ConfigError(f"--supervised {supervised} is not in (0, 1]", "give the share of tokens with labels")
    document_lengths(lengths, tokens)


def make_rows(tokens: int, lengths: str, supervised: float, vocab: int, seed: int) -> list[Row]:
    """Make `ROWS` full rows of random tokens (`diagnose.shapes.random_documents`).

    Args:
        tokens: T of each row.
        lengths: as `document_lengths`.
        supervised: share of each document that has labels, at its end.
        vocab: ids are below this.
    Raises:
        ConfigError, DataError: as `check_rows`.
    """
    check_rows(tokens, lengths, supervised)
    draw, rng, rows = document_lengths(lengths, tokens), random.Random(seed), []
    for _ in range(ROWS):
        documents = random_documents(tokens, vocab, supervised, rng, draw)
        ids = tuple(token for document in documents for token in document.input_ids)
        labels = tuple(label for document in documents for label in document.labels)
        rows.append(Row(ids, labels, tuple(len(document.input_ids) for document in documents)))
    return rows
