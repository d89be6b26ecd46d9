"""Tokenised documents on disk: Arrow files of so many rows each, written by worker processes, read memory-mapped.

A part appears whole or not at all, and rows keep their parts, so a killed run goes on with the first part that isn't
there. Workers tokenise a part each, single-threaded; a set of one part is tokenised in this process, whose tokenizer
uses every core by itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.data.chat import VERIFIED_ROWS, LossOn, label_rows
from pronghorn.data.packing import Document
from pronghorn.data.rows import Row
from pronghorn.errors import DataError, PronghornError, TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INFO = b"pronghorn"
ERRORS = 3
"""So many errors of dropped rows are kept."""


@dataclass(frozen=True)
class PartInfo:
    """What a part holds."""

    name: str
    rows: int
    documents: int
    unlabelled: int
    """Rows left out for having nothing to train."""
    conversations: int
    """Rows that went through the chat template."""
    bytes: int
    dropped: int = 0
    """Rows beside `rows` that can't be labelled."""
    errors: tuple[str, ...] = ()
    """Of the first of these."""


@dataclass(frozen=True)
class Tokenising:
    """How rows become documents; goes to each worker once."""

    tokenizer: PreTrainedTokenizerBase
    loss_on: LossOn
    system_prompt: str | None
    drop: bool = False
    """Whether rows that can't be labelled are left out and counted; else they are errors."""

    def write(self, path: Path, rows: Sequence[Row], verify: bool) -> PartInfo:
        """Tokenise `rows` into the part `path`; the prefixes of the first rows are tokenised again where `verify`."""
        bad: list[DataError] = []
        labelled = label_rows(
            rows,
            self.tokenizer,
            self.loss_on,
            self.system_prompt,
            verify_rows=VERIFIED_ROWS if verify else 0,
            on_bad=bad.append if self.drop else None,
        )
        counts = {
            "rows": len(rows) - len(bad),
            "documents": len(labelled.documents),
            "unlabelled": labelled.dropped_unlabelled,
            "conversations": labelled.conversations,
            "dropped": len(bad),
            "errors": [str(error) for error in bad[:ERRORS]],
        }
        _write(path, labelled.documents, counts)
        return read_info(path)


def write_parts(jobs: Iterable[tuple[Path, Sequence[Row]]], how: Tokenising, workers: int) -> Iterator[PartInfo]:
    """Write each part that `jobs` names, in order; the rows of at most 2 · workers parts are in memory at a time.

    Raises the error of the first part that has one, or of `jobs`, once the parts before it are written; TrainingError
    where a worker dies.
    """
    unreadable: list[PronghornError] = []

    def readable() -> Iterator[tuple[Path, Sequence[Row]]]:
        try:
            yield from jobs
        except PronghornError as error:
            unreadable.append(error)

    queue = readable()
    first = list(islice(queue, 2))
    if len(first) < 2 or workers < 2:
        yield from (how.write(path, rows, _is_first(path)) for path, rows in chain(first, queue))
    else:
        yield from _in_processes(chain(first, queue), how, workers)
    if unreadable:
        raise unreadable[0]


def _in_processes(jobs: Iterable[tuple[Path, Sequence[Row]]], how: Tokenising, workers: int) -> Iterator[PartInfo]:
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(how,))
    pending: deque[Future[PartInfo]] = deque()
    try:
        for path, rows in jobs:
            pending.append(pool.submit(_work, path, rows))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TrainingError(
            f"one of {workers} tokenising processes died (out of memory?)",
            "lower data.workers (1 tokenises in this process), or, in a script, begin it under "
            'if __name__ == "__main__": the processes import it',
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_info(path: Path) -> PartInfo:
    """What the part says of itself. Raises DataError for a file that isn't a whole part."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            counts = json.loads((stream.schema.metadata or {})[_INFO])
            read = sum(batch.num_rows for batch in stream)
    except (pyarrow.ArrowInvalid, OSError, KeyError, ValueError) as error:
        raise DataError(f"{path}: not a whole part of a token cache ({error})", f"delete {path.parent}") from error
    if read != counts["documents"]:
        raise DataError(f"{path}: {read} documents instead of {counts['documents']}", f"delete {path.parent}")
    return PartInfo(name=path.name, bytes=path.stat().st_size, **counts)


def _write(path: Path, documents: Sequence[Document], counts: dict[str, Any]) -> None:
    import pyarrow

    def lists(values: Iterable[list[int]]) -> Any:
        offsets, flat = array("i", [0]), array("i")  # C ints: Arrow takes them as they lie
        for each in values:
            flat.fromlist(each)
            offsets.append(len(flat))
        parts = [
            pyarrow.Array.from_buffers(pyarrow.int32(), len(a), [None, pyarrow.py_buffer(a)]) for a in (offsets, flat)
        ]
        return pyarrow.ListArray.from_arrays(*parts)

    table = pyarrow.table(
        {
            "input_ids": lists(document.input_ids for document in documents),
            "labels": lists(document.labels for document in documents),
            "source": pyarrow.array([document.source for document in documents], pyarrow.string()),
        }
    ).replace_schema_metadata({_INFO: json.dumps(counts)})
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        with pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=1000)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed process had begun to write."""
    for unfinished in folder.glob(".part-*"):
        unfinished.unlink()


def _is_first(path: Path) -> bool:
    return path.name == part_name(0)


def part_name(number: int) -> str:
    """The file name of a part."""
    return f"part-{number:05}.arrow"


_worker: list[Tokenising] = []
"""In a worker process, what `_begin` was given; empty everywhere else."""


def _begin(how: Tokenising) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this worker: one of as many as there are cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the run's own one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(how)


def _end_with_parent() -> None:
    """A killed run can't tell its workers, which would wait for rows for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(path: Path, rows: Sequence[Row]) -> PartInfo:
    gc.disable()  # looking for cycles among a part's million integers costs a fifth of the time and finds none
    try:
        return _worker[0].write(path, rows, _is_first(path))
    finally:
        gc.enable()
