"""Tokenised documents on disk: Arrow files of so many rows each, written by worker processes, read memory-mapped.

A part appears whole or not at all, and rows keep their parts, so a killed run goes on with the first part that isn't
there. Beside each part lies a JSON file with what it holds and its digest, written after it. Workers tokenise a part
each, single-threaded; a set of one part is tokenised in this process, whose tokenizer uses every core by itself.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.data.chat import VERIFIED_ROWS, LossOn, label_rows
from pronghorn.data.control_tokens import Rule
from pronghorn.data.packing import Document
from pronghorn.data.rows import Row
from pronghorn.errors import DataError, PronghornError, TrainingError
from pronghorn.state import check_file, digest, new_file, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = "pronghorn-tokens-v2"
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
    xxh3_128: str
    control_rows: int
    """Rows that hold control tokens in what the assistant doesn't say."""
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
    control_tokens: Rule
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
            control_tokens=self.control_tokens,
        )
        _write(path, labelled.documents)
        info = PartInfo(
            name=path.name,
            rows=len(rows) - len(bad),
            documents=len(labelled.documents),
            unlabelled=labelled.dropped_unlabelled,
            conversations=labelled.conversations,
            control_rows=labelled.control_rows,
            bytes=path.stat().st_size,
            xxh3_128=digest(path),
            dropped=len(bad),
            errors=tuple(str(error) for error in bad[:ERRORS]),
        )
        write_json(info_file(path), SCHEMA, asdict(info))
        return info


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
    """Read what the part holds, and compare its contents with that.

    Raises:
        DataError: a part that isn't as it was written.
    """
    remedy = f"delete {path.parent}"
    known = read_json(info_file(path), SCHEMA, remedy)
    try:
        info = PartInfo(**{name: value for name, value in known.items() if name != "schema"})
    except TypeError as error:
        raise DataError(f"{info_file(path)}: not whole ({error})", remedy) from error
    check_file(path, known, remedy)
    check_documents(path, info.documents)
    return info


def check_documents(path: Path, documents: int) -> None:
    """Check every offset and text of a part, so that no reader can leave its memory, and how many documents it has.

    Raises:
        DataError: a file that isn't a whole part.
    """
    import pyarrow

    remedy, found = f"delete {path.parent}", 0
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            if not stream.schema.equals(_schema()):
                raise DataError(f"{path}: other columns than a token cache has", remedy)
            for batch in stream:
                batch.validate(full=True)
                found += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole part of a token cache ({error})", remedy) from error
    if found != documents:
        raise DataError(f"{path}: {found} documents instead of {documents}", remedy)


def _schema() -> Any:
    import pyarrow

    lists = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema({"input_ids": lists, "labels": lists, "source": pyarrow.string()})


def _write(path: Path, documents: Sequence[Document]) -> None:
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

    columns = [
        lists(document.input_ids for document in documents),
        lists(document.labels for document in documents),
        pyarrow.array([document.source for document in documents], pyarrow.string()),
    ]
    table = pyarrow.table(columns, schema=_schema())
    with new_file(path) as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)


def info_file(part: Path) -> Path:
    """The file that tells what a part holds."""
    return part.with_suffix(".json")


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
