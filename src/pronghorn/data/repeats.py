"""What of documents says the same again: whole ones, and what is to be learnt from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pronghorn.data.held_out import hashed
from pronghorn.data.packing import IGNORE_INDEX

MANY = 0.1
"""A share of documents that were there before, above which somebody joined a file twice rather than weigh its rows."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many of so many documents have the very tokens of one before them, and whether all have one answer."""

    documents: int
    repeated: int
    one_answer: bool

    @classmethod
    def of(cls, documents: Any) -> Repeats:
        """Look through a `datasets.Dataset` of documents."""
        hashes = [number for number, _ in hashed(documents, 0)]
        labels = documents.select_columns("labels")
        answers = ([label for label in row["labels"] if label != IGNORE_INDEX] for row in labels)
        first = next(answers, None)  # most data differ in the second
        return cls(
            documents=len(hashes),
            repeated=len(hashes) - len(set(hashes)),
            one_answer=len(hashes) > 1 and all(answer == first for answer in answers),
        )

    @property
    def warnings(self) -> list[str]:
        """List what looks wrong, with what to do about it."""
        found = []
        if self.repeated > MANY * self.documents:
            share = self.repeated / self.documents
            found.append(
                f"{share:.1%} of the documents repeat earlier ones, token by token: delete them, if that isn't meant."
            )
        if self.one_answer:
            found.append(
                "The supervised tokens of all documents are the same: see in the examples whether they should."
            )
        return found
