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
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain, islice
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.data.control_tokens import Rule
from pronghorn.data.labels import VERIFIED_ROWS, LossOn, label_rows
from pronghorn.data.packing import Document
from pronghorn.data.rows import Row
from pronghorn.environment import tokenize_in_one_thread
from pronghorn.errors import DataError, TrainingError
from pronghorn.state import check_file, digest, new_file, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = "pronghorn-tokens-v3"
ERRORS = 3
"""So many errors of dropped rows are kept."""


@dataclass(frozen=True)
class Part:
    """What a part holds."""

    rows: int
    dropped: int
    """Rows beside `rows` that can't be labelled."""
    unsupervised: int
    """Rows left out for having no supervised token."""
    documents: int
    conversations: int
    """Rows that went through the chat template."""
    control_rows: int
    """Rows that hold control tokens in what the assistant doesn't say."""
    errors: list[str]
    """Of the first dropped rows."""
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Tokenising:
    """How rows become documents; goes to each worker once."""

    tokenizer: PreTrainedTokenizerBase
    loss_on: LossOn
    system_prompt: str | None
    control_tokens: Rule
    drop: bool = False
    """Whether rows that can't be labelled are left out and counted; else they are errors."""

    def write(self, path: Path, rows: Sequence[Row]) -> Part:
        """Tokenise `rows` into the part `path`; in the first part, the prefixes of the first rows once more."""
        bad: list[DataError] = []
        labelled = label_rows(
            rows,
            self.tokenizer,
            self.loss_on,
            self.system_prompt,
            verify_rows=VERIFIED_ROWS if path.name == part_name(0) else 0,
            on_bad=bad.append if self.drop else None,
            control_tokens=self.control_tokens,
        )
        _write_documents(path, labelled.documents)
        part = Part(
            rows=len(rows) - len(bad),
            dropped=len(bad),
            unsupervised=labelled.unsupervised,
            documents=len(labelled.documents),
            conversations=labelled.conversations,
            control_rows=labelled.control_rows,
            errors=[str(error) for error in bad[:ERRORS]],
            bytes=path.stat().st_size,
            xxh3_128=digest(path),
        )
        write_json(info_file(path), SCHEMA, asdict(part))
        return part


def write_parts(jobs: Iterable[tuple[Path, Sequence[Row]]], how: Tokenising, workers: int) -> Iterator[Part]:
    """Write each part that `jobs` names, in order; the rows of at most 2 · workers parts are in memory at a time. When
    interrupted, workers are killed, and may leave temporary files.

    Raises:
        DataError: of the first part that has one, once the parts before it are written. TrainingError: a worker dies.
    """
    jobs = iter(jobs)
    first = list(islice(jobs, 2))
    if len(first) < 2 or workers < 2:
        for path, rows in chain(first, jobs):
            yield how.write(path, rows)
        return
    before = active_children()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(how,))
    pending: deque[Future[Part]] = deque()
    try:
        for path, rows in chain(first, jobs):
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
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        # a second Ctrl-C, while they end their parts, would leave Python waiting for them for ever
        for process in set(active_children()) - set(before):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_part(path: Path) -> Part:
    """Read what a part holds, and check its contents: its digest, and every offset and text, so that no reader can
    leave its memory.

    Raises:
        DataError: a part that isn't as it was written.
    """
    import pyarrow

    remedy, documents = f"delete {path.parent}", 0
    table = read_json(info_file(path), SCHEMA, remedy)
    try:
        part = Part(**{name: value for name, value in table.items() if name != "schema"})
    except TypeError as error:
        raise DataError(f"{info_file(path)}: not whole ({error})", remedy) from error
    check_file(path, table, remedy)
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            if not stream.schema.equals(_schema()):
                raise DataError(f"{path}: other columns than a token cache has", remedy)
            for batch in stream:
                batch.validate(full=True)
                documents += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole part of a token cache ({error})", remedy) from error
    if documents != part.documents:
        raise DataError(f"{path}: {documents} documents instead of {part.documents}", remedy)
    return part


def part_name(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:05}.arrow"


def info_file(part: Path) -> Path:
    """Return the path of the file that says what a part holds."""
    return part.with_suffix(".json")


def _schema() -> Any:
    import pyarrow

    lists = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema({"input_ids": lists, "labels": lists, "source": pyarrow.string()})


def _write_documents(path: Path, documents: Sequence[Document]) -> None:
    import pyarrow

    schema = _schema()
    table = pyarrow.table({name: [getattr(d, name) for d in documents] for name in schema.names}, schema=schema)
    with new_file(path) as file, pyarrow.ipc.new_stream(file, schema) as stream:
        stream.write_table(table, max_chunksize=1000)


_worker: list[Tokenising] = []
"""In a worker process, what `_begin` was given; empty everywhere else."""


def _begin(how: Tokenising) -> None:
    tokenize_in_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the run's own one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()
    gc.disable()  # looking for cycles among a part's million integers costs a fifth of the time and finds none
    _worker.append(how)


def _end_with_parent() -> None:
    """End this worker when the run is killed: it can't tell its workers, which would wait for rows for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(path: Path, rows: Sequence[Row]) -> Part:
    gc.collect()  # of what the part before left: little, since imports are frozen
    return _worker[0].write(path, rows)
