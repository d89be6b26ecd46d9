"""Tokenising once: what data, tokenizer, template and options make is kept on disk under a hash of all of them.

    cache / <hash of one source and everything that decides its tokens> / part-00000.arrow … and, last, manifest.json

A source that was tokenised before is opened memory-mapped: only lengths are ever in memory, so a set may be larger than
it. Its contents are compared with their digests each time. A folder without manifest.json is one that was being filled:
it is filled on, from the first part that isn't there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.config import Data, Source
from pronghorn.data.chat import Fitted, fit
from pronghorn.data.packing import Document
from pronghorn.data.parts import (
    ERRORS,
    SCHEMA,
    PartInfo,
    Tokenising,
    check_documents,
    info_file,
    part_name,
    read_info,
    write_parts,
)
from pronghorn.data.rows import Row, RowReader, in_chunks
from pronghorn.data.sources import SourceCount, count_rows, fingerprint, mixture, read_source
from pronghorn.errors import ConfigError, DataError
from pronghorn.state import MANIFEST, check_manifest, clear_leftovers, lock, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABELLING = 3
"""Raised when the same data would get other tokens or labels than an earlier version gave them."""
PART_ROWS = 20_000
PART_CHARACTERS = 16_000_000
"""A part of long rows ends earlier: its documents are in memory until it is written, about 100 bytes a character."""

Progress = Callable[[str, int, int | None], None]
"""Called with a source's name, its rows done, and how many it has (None: not known)."""


@dataclass(frozen=True)
class Prepared:
    """Documents ready to pack, and what became of the rows."""

    dataset: Any
    """`datasets.Dataset` of input_ids, labels (int32 lists) and source (text); memory-mapped but for cut documents."""
    counts: list[SourceCount]
    errors: list[str]
    """Of the first dropped rows."""
    dropped: int
    """Rows and documents left out: refused, without a label, too long."""
    truncated: int
    split: int
    dropped_pieces: int
    control_rows: int
    """Rows that hold control tokens in what the assistant doesn't say (data.control_tokens)."""
    key: str
    """Hash of the data and all that decided the documents."""


def documents(
    data: Data,
    split: Literal["train", "eval"],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    seed: int,
    progress: Progress | None = None,
    part_rows: int = PART_ROWS,
) -> Prepared:
    """The tokenised documents of `data.train` or `data.eval`, from the cache or made now.

    Weights of a mixture are shares of documents. The overflow rule comes last; documents that it cuts stand at the end.

    Raises:
        DataError: data that can't be read or trained on, nothing left to train, a cache that is damaged or of another
            version; ConfigError: a split that isn't set, weights for some sources, a system prompt that no row takes.
    """
    sources = data.sources(split)
    if not sources:
        raise ConfigError(f"data.{split} is not set", "give a file, a folder, a hub name or a list of them")
    cache = _Cache(data, tokenizer, part_rows, progress or (lambda *_: None))
    entries = [cache.entry(source) for source in sources]
    if data.system_prompt is not None and not any(entry.conversations for entry in entries):
        raise ConfigError(
            "data.system_prompt is set, but no row is rendered by a chat template",
            "leave it out, or give conversations and a chat template (data.chat_template)",
        )
    for source, entry in zip(sources, entries, strict=True):
        if not entry.rows:
            raise DataError(
                f"{source.path}: each of its {entry.dropped:,} rows was dropped, the first for: {entry.errors[0]}",
                f"mend that, or take it out of data.{split}",
            )
    if not any(entry.documents for entry in entries):
        raise DataError(
            f"none of {sum(entry.rows for entry in entries)} rows has a token to train",
            "give rows with an assistant message (data.loss_on: completion trains nothing else)",
        )
    weights = [source.weight for source in sources if source.weight is not None]
    empty = next((source for source, entry in zip(sources, entries, strict=True) if not entry.documents), None)
    if weights and empty is not None:
        raise DataError(
            f"{empty.path}: none of its rows has a token to train, and it has a share of data.{split}",
            "take it out of the mixture, or set data.loss_on to all",
        )
    taken = mixture([entry.documents for entry in entries], weights, seed) if weights else None
    whole = _concatenated(entries, taken)
    fitted, dataset = _fitted(whole, max_seq_length, data.overflow)
    used = [entry.documents if taken is None else len(taken[i]) for i, entry in enumerate(entries)]
    return Prepared(
        dataset=dataset,
        counts=[
            SourceCount(str(source.path), entry.format, entry.rows, entry.dropped, n)
            for source, entry, n in zip(sources, entries, used, strict=True)
        ],
        errors=[error for entry in entries for error in entry.errors][:ERRORS],
        dropped=sum(entry.dropped + entry.unlabelled for entry in entries) + fitted.dropped,
        truncated=fitted.truncated,
        split=fitted.split,
        dropped_pieces=fitted.dropped_pieces,
        control_rows=sum(entry.control_rows for entry in entries),
        key=_hash([[entry.key for entry in entries], weights, seed, max_seq_length, data.overflow]),
    )


@dataclass(frozen=True)
class _Entry:
    """One source in the cache; what became of its rows is as in `PartInfo`, of all parts together."""

    key: str
    folder: Path
    format: str
    errors: list[str]
    parts: list[PartInfo]
    rows: int
    dropped: int
    unlabelled: int
    documents: int
    conversations: int
    control_rows: int


class _Cache:
    """Finds or makes the entries of a run's sources."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, part_rows: int, progress: Progress) -> None:
        from huggingface_hub.constants import HF_HOME

        self._data, self._part_rows, self._progress = data, part_rows, progress
        self._how = Tokenising(
            tokenizer, data.loss_on, data.system_prompt, data.control_tokens, data.bad_rows == "drop"
        )
        self._identity = tokenizer_identity(tokenizer)
        self._root = data.cache or Path(HF_HOME) / "pronghorn"

    def entry(self, source: Source) -> _Entry:
        """The source's entry, made if need be; other processes that want the same one wait for it."""
        made_of = {
            "schema": SCHEMA,
            "labelling": LABELLING,
            "part_rows": self._part_rows,
            "part_characters": PART_CHARACTERS,
            "files": fingerprint(source),
            "format": source.format,
            "columns": source.columns,
            "bad_rows": self._data.bad_rows,
            "loss_on": self._data.loss_on,
            "system_prompt": self._data.system_prompt,
            "control_tokens": self._data.control_tokens,
            "tokenizer": self._identity,
        }
        key = _hash(made_of)
        folder = self._root / key
        try:
            if not (folder / MANIFEST).exists():
                with lock(folder / ".lock", -1, f"{folder} is locked", "wait for the process that holds it"):
                    if not (folder / MANIFEST).exists():
                        self._fill(source, folder, made_of)
        except OSError as error:  # of writing: what reading raises is a DataError
            raise ConfigError(
                f"{folder} can't be written ({error.strerror or error})",
                "make room there, or set data.cache to a folder of your own; what is whole there is used again",
            ) from error
        return _open(folder, key)

    def _fill(self, source: Source, folder: Path, made_of: dict[str, Any]) -> None:
        clear_leftovers(folder)
        errors: list[DataError] = []
        reader = RowReader(source.format, source.columns, errors.append if self._data.bad_rows == "drop" else None)
        there: dict[int, PartInfo] = {}
        total, name, done = count_rows(source), str(source.path), 0

        def missing() -> Iterator[tuple[Path, list[Row]]]:
            nonlocal done
            rows = read_source(source, reader)
            for number, chunk in enumerate(in_chunks(rows, self._part_rows, PART_CHARACTERS)):
                path = folder / part_name(number)
                if path.exists() and info_file(path).exists():
                    there[number] = read_info(path)
                    done += len(chunk)
                    self._progress(name, done, total)
                else:
                    yield path, chunk

        self._progress(name, 0, total)
        for part in write_parts(missing(), self._how, self._data.workers or _cores()):
            there[int(part.name[5:10])] = part
            done += part.rows + part.dropped
            self._progress(name, done, total)
        if fingerprint(source) != made_of["files"]:
            for number in there:
                info_file(folder / part_name(number)).unlink()  # a part without it is made anew
            raise DataError(f"{name} changed while it was tokenised", "run again once nothing writes to it")
        manifest = {
            "made_of": made_of,
            "format": reader.shape.name if reader.shape is not None else "",
            "dropped": len(errors),
            "errors": [str(error) for error in errors[:ERRORS]],
            "files": {there[number].name: asdict(there[number]) for number in sorted(there)},
        }
        write_json(folder / MANIFEST, SCHEMA, manifest)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything in a tokenizer, its chat template included, that decides tokens and labels."""
    backend: Any = tokenizer.backend_tokenizer
    tokenizer("")  # as transformers leaves it after a call: no truncation, no padding
    options = [tokenizer.special_tokens_map, tokenizer.split_special_tokens]
    return _hash([backend.to_str(), str(tokenizer.chat_template), options])


def _open(folder: Path, key: str) -> _Entry:
    remedy = f"delete {folder}"
    manifest = check_manifest(folder, SCHEMA, remedy)
    try:
        parts = [PartInfo(**part) for part in manifest["files"].values()]
        errors = sorted([*manifest["errors"], *(error for part in parts for error in part.errors)], key=_place)
        counted = ("rows", "dropped", "unlabelled", "documents", "conversations", "control_rows")
        totals = {name: sum(getattr(part, name) for part in parts) for name in counted}
        totals["dropped"] += manifest["dropped"]
        entry = _Entry(key, folder, manifest["format"], errors, parts, **totals)
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST}: not whole ({error})", remedy) from error
    for part in parts:
        check_documents(folder / part.name, part.documents)
    return entry


def _place(error: str) -> tuple[str, int]:
    """Where an error says it is: (file, line or row)."""
    found = re.match(r"(.*?) (?:line|row) (\d+)", error)
    return (found[1], int(found[2])) if found else ("", 0)


def _concatenated(entries: list[_Entry], taken: list[list[int]] | None) -> Any:
    from datasets import Dataset, concatenate_datasets

    sets = []
    for number, entry in enumerate(entries):
        files = [entry.folder / part.name for part in entry.parts if part.documents]
        if files:
            one = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
            sets.append(one if taken is None else one.select(taken[number]))
    return concatenate_datasets(sets)


def _fitted(whole: Any, max_seq_length: int, overflow: Any) -> tuple[Fitted, Any]:
    """(what the overflow rule did, the documents that fit and, after them, what it made of those that didn't)."""
    from datasets import Dataset, concatenate_datasets

    from pronghorn.data.packed_rows import lengths_of

    lengths = lengths_of(whole)
    long = [i for i, n in enumerate(lengths) if n > max_seq_length]
    if not long:
        return Fitted([], 0, 0), whole
    short = whole.select([i for i, n in enumerate(lengths) if n <= max_seq_length])
    fitted = fit(
        (Document(row["input_ids"], row["labels"], row["source"]) for row in whole.select(long)),
        max_seq_length,
        overflow,
        others=len(short),
    )
    if not fitted.documents:
        return fitted, short
    columns = {name: [getattr(d, name) for d in fitted.documents] for name in ("input_ids", "labels", "source")}
    cut = Dataset.from_dict(columns, features=whole.features)
    return fitted, concatenate_datasets([short, cut]) if len(short) else cut


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
