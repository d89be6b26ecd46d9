"""Reading training rows, as written, nothing tokenised: files of one format, recognised by its keys or named.

`files` knows the kinds of files, `formats` the formats of rows, `row_types` what comes out; `sources` adds folders, hub
sets and mixtures.

A key that its format doesn't know is an error: columns like "label" or "rejected" change what the others mean. Where
`format` or `columns` names what to read, every other key is ignored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pronghorn.config import Format
from pronghorn.data.files import objects
from pronghorn.data.formats import ACCEPTED, Shape, read_row, recognise
from pronghorn.data.row_types import Conversation, Message, Preference, PromptCompletion, Row, TextDocument, where
from pronghorn.data.values import keys, reading
from pronghorn.errors import DataError

__all__ = ["Conversation", "Message", "Preference", "PromptCompletion", "Row", "TextDocument"]
__all__ += ["OnBad", "RowReader", "for_sft", "in_chunks", "read_rows", "unless_bad"]

OnBad = Callable[[DataError], None]
T = TypeVar("T")


def unless_bad(make: Callable[[], T], on_bad: OnBad | None) -> list[T]:
    """[what `make` gives]; where that is a DataError [], after `on_bad` was called with it (None: it is raised)."""
    try:
        return [make()]
    except DataError as error:
        if on_bad is None:
            raise
        on_bad(error)
        return []


class RowReader:
    """Turns values into rows, all of one format: the one that is named, or the first row's.

    `on_bad` is called with the error of each row that its format refuses, which is then left out; None raises it. Rows
    of another format, and lines that aren't JSON, are raised always.
    """

    def __init__(self, format: Format = "auto", columns: Mapping[str, str] | None = None, on_bad: OnBad | None = None):
        self.shape = Shape.named(format, dict(columns or {}))
        self._on_bad = on_bad
        self._first = ""

    def stream(self, path: str, values: Iterable[tuple[int, Any]]) -> Iterator[Row | Preference]:
        """The rows of one file (or hub set), in its order; DataError where there is none."""
        found_any = kept_any = False
        for line, value in values:
            found_any = True
            if isinstance(value, DataError):
                if self._on_bad is None:
                    raise value
                self._on_bad(value)
                continue
            shape = self._shape_of(value, path, line)
            for row in unless_bad(partial(read_row, shape, value, path, line), self._on_bad):
                kept_any = True
                yield row
        if not kept_any:
            what = "each of its rows was dropped" if found_any else "no rows in it"
            raise DataError(f"{path}: {what}", f"give a file with at least one row: {ACCEPTED}")

    def _shape_of(self, value: Any, path: str, line: int) -> Shape:
        at = where(path, line)
        if not isinstance(value, dict):
            raise DataError(f"{at}: {type(value).__name__} instead of an object", f"write each row as {ACCEPTED}")
        if self.shape is not None and self.shape.given:
            self.shape.check(value, at)
            return self.shape
        found = recognise(value, at)
        if self.shape is None:
            self.shape, self._first = found, at
        elif found != self.shape:
            raise DataError(
                f"{at}: a row with {keys(found.needed)}, but {self._first} has {keys(self.shape.needed)}",
                "keep one format a file or folder; others are sources of their own (data.train: [{path: ...}, ...])",
            )
        return found


def read_rows(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    format: Format = "auto",
    on_bad: OnBad | None = None,
) -> list[Row]:
    """Reads every row of a file (see `files`), in the file's order, for supervised fine-tuning.

    `columns` maps this library's keys to the file's: {"prompt": "question", "completion": "answer"}; `format` names one
    of `formats.FORMATS`; `on_bad`: see RowReader.

    Raises DataError, naming file and line, for a missing or empty file, bytes that aren't UTF-8, malformed JSON, keys
    that are no known format, two formats in one file, preference pairs, a wrong role or order of roles, a value that
    isn't a string, and nothing to learn (an empty completion, assistant message or text).
    """
    path = Path(path)
    with reading(path):
        found = path.is_file()
    if not found:
        raise DataError(f"{path}: no such file", "mend data.train or data.eval; paths start at the current directory")
    return list(for_sft(RowReader(format, columns, on_bad).stream(str(path), objects(path))))


def for_sft(rows: Iterable[Row | Preference]) -> Iterator[Row]:
    """The rows as they come; DataError at a preference pair."""
    for row in rows:
        if isinstance(row, Preference):
            raise DataError(
                f"{row.source}: a preference pair, and supervised fine-tuning would not know its rejected side",
                "name what to train on, e.g. data.format: alpaca with data.columns: {output: chosen}, or write the "
                "chosen answers as conversations; pairs are for DPO, which is not built yet",
            )
        yield row


def in_chunks(rows: Iterable[Row], most: int, characters: int) -> Iterator[list[Row]]:
    """Consecutive rows in lists of at most `most`; a list ends with the row that brings it to so many `characters`."""
    chunk: list[Row] = []
    length = 0
    for row in rows:
        chunk.append(row)
        length += row.characters
        if len(chunk) == most or length >= characters:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk
