"""Hold out a share or a count of the conversations of training data, the same ones whatever else is asked.

Which ones depends on the seed and on the tokens alone: equal conversations go to one side, those of a row that became
several documents too, and rows that are added later don't move the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

from pronghorn.errors import DataError
from pronghorn.text import counted

_PIECE = re.compile(r" up to message \d+$")


def held_out(sets: list[Any], share: str, seed: int, eval: bool) -> list[Any]:
    """Return of each `datasets.Dataset` of documents those that are held out, or (not `eval`) the others.

    Args:
        share: "5%" or "200" of all conversations together; equal ones go with each other, so it may be a few more.
    Raises:
        DataError: nothing would be left on one side.
    """
    ranked = [(rank, number, rows) for number, documents in enumerate(sets) for rank, rows in _ranked(documents, seed)]
    total = len(ranked)
    count = round(total * float(share[:-1]) / 100) if share.endswith("%") else int(share)
    ranks = sorted(rank for rank, _, _ in ranked)
    if not 0 < count < total or ranks[count - 1] == ranks[-1]:
        different = len(set(ranks))
        equal = f" ({different:,} different ones)" if different < total else ""
        raise DataError(
            f"data.eval: {share} of {counted(total, 'conversation')}{equal} leaves nothing to "
            + ("train" if count else "evaluate"),
            "give more data, another share, or a file of held-out data",
        )
    chosen: list[list[int]] = [[] for _ in sets]
    for rank, number, rows in ranked:
        if (rank <= ranks[count - 1]) == eval:
            chosen[number] += rows
    return [documents.select(rows) for documents, rows in zip(sets, chosen, strict=True)]


def also_in(documents: Any, others: Any) -> int:
    """Return how many documents have the very tokens of one of the `others`."""
    own = [rank for rank, _ in hashed(documents, 0)]
    wanted = set(own)
    found = {rank for rank, _ in hashed(others, 0) if rank in wanted}
    return sum(rank in found for rank in own)


def _ranked(documents: Any, seed: int) -> list[tuple[int, list[int]]]:
    """Return the place that each conversation's tokens give it in the order of this seed, and its documents."""
    hashes, sources = zip(*hashed(documents, seed), strict=True) if len(documents) else ((), ())
    conversations = groupby(range(len(sources)), lambda row: _PIECE.sub("", sources[row]))
    groups = [list(rows) for _, rows in conversations]
    return [(hashes[rows[0]], rows) for rows in groups]


def hashed(documents: Any, seed: int) -> Iterator[tuple[int, str]]:
    """Yield the hash of each document's tokens, and where it was read."""
    import xxhash

    for table in documents.select_columns(["input_ids", "source"]).with_format("arrow").iter(batch_size=10_000):
        hashes = list[int]()
        for lists in table["input_ids"].chunks:
            tokens, bounds = memoryview(lists.values.to_numpy()), lists.offsets.to_pylist()
            hashes += [xxhash.xxh3_64_intdigest(tokens[begin:end], seed) for begin, end in pairwise(bounds)]
        yield from zip(hashes, table["source"].to_pylist(), strict=True)
