"""Packing: documents into rows of `capacity` tokens, as whole documents and in pure integers.

A row should be full, and a fair sample of the documents, as a padded batch is: updates that see long documents alone,
or short ones, are another training. So `pack` draws documents at random until the next one doesn't fit, and fills what
is left of the row with the longest that do.

That takes as many rows as best-fit decreasing where documents are short, as in chat data. Where it takes over 1 % more,
best-fit decreasing packs them (D. S. Johnson, A. Demers, J. D. Ullman, M. R. Garey and R. L. Graham, "Worst-case
performance bounds for simple one-dimensional packing algorithms", SIAM J. Comput. 3(4), 1974): the documents from the
longest to the shortest, each into the fullest row that still has room for it. It needs at most 11/9 · optimum + 4 rows,
but a row's documents are of about one length.

`packing_ceiling` bounds the optimum from below, so that an efficiency can be read against what the data allow.
"""

import random
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pronghorn.errors import DataError

IGNORE_INDEX = -100
"""The label of a token that is not supervised (torch's `ignore_index`)."""
MORE_ROWS = 0.01
"""So many rows more than best-fit decreasing's, as a share, may be a fair sample each."""


@dataclass(frozen=True, slots=True)
class Document:
    """One tokenised document, the unit that packing moves and attention isolates.

    `input_ids` and `labels` have the same length. Labels are not shifted: `labels[i]` is `input_ids[i]` or, where token
    i is not supervised, -100. The first label is always -100: nothing comes before the first token to predict it.
    `source` says where the document came from ("train.jsonl line 3"), for error messages.
    """

    input_ids: list[int]
    labels: list[int]
    source: str = ""

    def __post_init__(self) -> None:
        assert len(self.input_ids) == len(self.labels), (len(self.input_ids), len(self.labels))
        assert not self.labels or self.labels[0] == IGNORE_INDEX, self.labels[0]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def supervised(self) -> int:
        """How many tokens are supervised."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Pack documents of `lengths` tokens into rows of at most `capacity` tokens.

    Returns the rows as lists of document indices; every index occurs exactly once. The same arguments give the same
    rows. `seed` decides which documents share a row, their order inside it and the order of the rows.

    Raises DataError for a length that is not positive or above `capacity` (overflow is handled before packing).
    """
    _check(lengths, capacity)
    shuffle = random.Random(seed).shuffle
    order = list(range(len(lengths)))
    shuffle(order)
    least = -(-sum(lengths) // capacity)
    rows = at_random(lengths, capacity, order, least)
    if len(rows) > least:
        fewest = longest_first(lengths, capacity, order)
        if len(rows) > (1 + MORE_ROWS) * len(fewest):
            rows = fewest
        else:  # the last one holds what is left: once more, with the same share for each
            alike = at_random(lengths, capacity, order, len(rows))
            rows = alike if len(alike) <= len(rows) else rows
    for row in rows:
        shuffle(row)
    shuffle(rows)
    return rows


def at_random(lengths: Sequence[int], capacity: int, order: Sequence[int], count: int) -> list[list[int]]:
    """Pack checked lengths row by row: documents in `order` until one doesn't fit, then the longest that fit.

    A row takes no document more when it has its share of the tokens that are left, as one of `count` rows: where not
    all can be full, all are alike. `there` is an integer whose bit n says that documents of n tokens are left.
    """
    by_length = _by_length(lengths, reversed(order))
    there = sum(1 << length for length in by_length)
    left, placed, next_ = sum(lengths), bytearray(len(lengths)), 0
    rows: list[list[int]] = []
    while left:
        row, tokens, share = list[int](), 0, -(-left // max(1, count - len(rows)))
        while tokens < share and next_ < len(order):
            if not placed[order[next_]]:
                if tokens + lengths[order[next_]] > capacity:
                    break
                row.append(order[next_])
                tokens, placed[order[next_]] = tokens + lengths[order[next_]], True
            next_ += 1
        while tokens < share and (fitting := there & ((2 << (capacity - tokens)) - 1)):
            length = fitting.bit_length() - 1
            documents = by_length[length]
            while documents and placed[documents[-1]]:
                documents.pop()
            if documents:
                row.append(documents.pop())
                tokens, placed[row[-1]] = tokens + length, True
            else:
                there ^= 1 << length
        rows.append(row)
        left -= tokens
    return rows


def longest_first(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack checked lengths by best-fit decreasing; documents of one length in the reverse of `order`.

    Rows are kept on stacks by the number of tokens they have left, and `free` is an integer whose bit r says that
    stack r is not empty: the fullest row with room for `length` is the lowest set bit of `free >> length`. That costs
    O(capacity / 64) machine words a placement.
    """
    by_length = _by_length(lengths, order)
    rows: list[list[int]] = []
    with_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    free = 0
    for length in sorted(by_length, reverse=True):
        documents = by_length[length]
        while documents:
            fitting = free >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = with_room[room].pop()
                if not with_room[room]:
                    free ^= 1 << room
            else:
                room, row = capacity, []
                rows.append(row)
            # No row was fuller, so this one stays the best fit for this length until it is full: fill it at once.
            count = min(room // length, len(documents))
            row += documents[-count:]
            del documents[-count:]
            room -= count * length
            with_room[room].append(row)
            free |= 1 << room
    return rows


def _by_length(lengths: Sequence[int], order: Iterable[int]) -> dict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index in order:
        found[lengths[index]].append(index)
    return found


def packing_efficiency(lengths: Sequence[int], bins: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the share of real tokens in rows of exactly `capacity` tokens, in (0, 1]; 1 where there is no row."""
    return sum(lengths[index] for row in bins for index in row) / (len(bins) * capacity) if bins else 1.0


def packing_ceiling(lengths: Sequence[int], capacity: int) -> float:
    """Return the best share of real tokens that any packing of whole documents could reach, in (0, 1]; 1 for none.

    Total tokens over `capacity` times a lower bound on the number of rows: L2 of S. Martello and P. Toth ("Lower bounds
    and reduction procedures for the bin packing problem", Discrete Applied Mathematics 28, 1990). For any threshold
    t <= capacity / 2, documents longer than capacity - t share a row with none of t tokens or more; those up to there
    but longer than half a row have a row each, and what they leave free is all that they save the documents of t tokens
    up to half a row. t = 0 alone gives both the bound by volume and the number of documents longer than half a row.
    """
    _check(lengths, capacity)
    if not lengths:
        return 1.0
    ordered = sorted(lengths)
    total = [0, *accumulate(ordered)]  # total[i]: tokens of the i shortest
    half = bisect_right(ordered, capacity // 2)  # documents before this one are at most half a row long
    rows = 0
    for threshold in {0, *ordered[:half]}:
        small, alone = bisect_left(ordered, threshold), bisect_right(ordered, capacity - threshold)
        left_free = (alone - half) * capacity - (total[alone] - total[half])
        unplaced = max(0, total[half] - total[small] - left_free)
        rows = max(rows, len(ordered) - half + -(-unplaced // capacity))
    return total[-1] / (rows * capacity)


def _check(lengths: Sequence[int], capacity: int) -> None:
    if capacity <= 0:
        raise DataError(f"row length {capacity} <= 0", "give row_tokens, the tokens of a row, of 1 or more")
    for index, length in enumerate(lengths):
        if length <= 0:
            raise DataError(f"document {index} has {length} tokens, fewer than 1", "drop it before packing")
        if length > capacity:
            raise DataError(
                f"document {index} has {length} tokens > row length {capacity}",
                "raise max_length in SFTConfig (row_tokens of PackedRows), or shorten the document",
            )
