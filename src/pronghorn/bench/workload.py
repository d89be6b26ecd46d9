"""The packed rows of a measurement: made once from a seed, written to a file, read by every contender's process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pronghorn.bench.shapes import FIRST_ORDINARY_TOKEN
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import ConfigError, DataError

ROWS = 4
"""Different rows: repeating one would let caches and autotuning fit themselves to it."""


@dataclass(frozen=True)
class Row:
    """A packed row of T tokens: documents end to end, no padding."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    """Unshifted; -100 where nothing is learned, each document's first token among them."""
    lengths: tuple[int, ...]
    """Tokens of each document; they sum to T."""

    @property
    def n_labels(self) -> int:
        """Supervised tokens."""
        return sum(label != IGNORE_INDEX for label in self.labels)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """[start, end) of each document."""
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return [(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def labelled_where(self, keep: Callable[[int], bool]) -> Row:
        """The same row with the labels only of those documents (by number) that `keep` says."""
        labels = list(self.labels)
        for document, (start, end) in enumerate(self.bounds):
            if not keep(document):
                labels[start:end] = [IGNORE_INDEX] * (end - start)
        return replace(self, labels=tuple(labels))

    def with_other_tokens(self, document: int) -> Row:
        """The same row and labels with one document's tokens in reverse order, each one id further."""
        start, end = self.bounds[document]
        ids = list(self.input_ids)
        ids[start:end] = [max(FIRST_ORDINARY_TOKEN, token - 1) for token in reversed(ids[start:end])]
        return replace(self, input_ids=tuple(ids))


def document_lengths(lengths: str, tokens: int) -> Callable[[random.Random], int]:
    """What draws a document's length: `one` (the row is one document), `lognormal` (median 134, mean about 180, from
    16 to 2,048), or a JSON file with a list of lengths to draw from.

    Raises:
        ConfigError: neither a known distribution nor a file.
        DataError: the file holds no list of positive integers, or none from 2 to `tokens`.
    """
    if lengths == "one":
        return lambda rng: tokens
    if lengths == "lognormal":
        return lambda rng: max(16, min(2048, int(rng.lognormvariate(4.9, 0.75))))
    path = Path(lengths)
    if not path.is_file():
        raise ConfigError(
            f"lengths {lengths!r} is no file", "use one, lognormal, or a JSON file with a list of lengths"
        )
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})", "give a JSON list of document lengths") from error
    if not isinstance(known, list) or not known or not all(type(n) is int and n > 0 for n in known):
        raise DataError(f"{path} is no list of positive integers", "give a JSON list of document lengths in tokens")
    fitting = [n for n in known if 1 < n <= tokens]  # of a single token nothing is learned, of a row of them neither
    if not fitting:
        raise DataError(f"{path}: none of {len(known)} documents has 2 to {tokens} tokens", "raise --tokens")
    return lambda rng: rng.choice(fitting)


def check_rows(tokens: int, lengths: str, labelled: float) -> None:
    """Refuse what no rows can be made of (ConfigError; DataError for a file of lengths that is none)."""
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens} is below 2", "give the tokens of a packed row, 8192 is common")
    if not 0 < labelled <= 1:
        raise ConfigError(f"--labelled {labelled} is not in (0, 1]", "give the share of tokens to learn from")
    document_lengths(lengths, tokens)


def make_rows(tokens: int, lengths: str, labelled: float, vocab: int, seed: int) -> list[Row]:
    """`ROWS` full rows of random tokens.

    Args:
        tokens: T of each row.
        lengths: as `document_lengths`; the last document is cut so that the row is full.
        labelled: share of each document that is supervised: its end, as an answer after a prompt is.
        vocab: ids are below this.
    Raises:
        ConfigError, DataError: as `check_rows`.
    """
    check_rows(tokens, lengths, labelled)
    draw, rng = document_lengths(lengths, tokens), random.Random(seed)
    return [_row(tokens, draw, labelled, vocab, rng) for _ in range(ROWS)]


def _row(tokens: int, draw: Callable[[random.Random], int], labelled: float, vocab: int, rng: random.Random) -> Row:
    lengths: list[int] = []
    while (room := tokens - sum(lengths)) > 0:
        lengths.append(min(draw(rng), room))
    ids = [rng.randrange(FIRST_ORDINARY_TOKEN, vocab) for _ in range(tokens)]
    labels: list[int] = []
    for length in lengths:
        supervised = min(max(1, round(labelled * length)), length - 1)  # a first token is never a label
        labels += [IGNORE_INDEX] * (length - supervised) + ids[len(labels) + length - supervised : len(labels) + length]
    return Row(tuple(ids), tuple(labels), tuple(lengths))


def write_rows(rows: list[Row], path: Path) -> None:
    """Write rows as JSON."""
    path.write_text(json.dumps([row.__dict__ for row in rows]))


def read_rows(path: Path) -> list[Row]:
    """Rows from `write_rows`' file."""
    stored: list[dict[str, Any]] = json.loads(path.read_text())
    return [Row(**{name: tuple(values) for name, values in row.items()}) for row in stored]
