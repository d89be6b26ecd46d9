"""Tokenising once: what data, tokenizer, template and options make is kept on disk under a hash of all of them.

    cache / <hash of one source and everything that decides its tokens> / part-00000.arrow … and, last, manifest.json

A source that was tokenised before is opened memory-mapped: only lengths are ever in memory, so a set may be larger than
it. Its contents are compared with their digests each time. A folder without manifest.json is one that was being filled:
it is filled on, from the first part that isn't there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.config.recipe import Data, Source
from pronghorn.data.formats import RowReader
from pronghorn.data.held_out import held_out
from pronghorn.data.overflow import Fitted, Overflow, fit_dataset
from pronghorn.data.parts import ERRORS, SCHEMA, Part, Tokenising, info_file, part_name, read_part, write_parts
from pronghorn.data.rows import Row, in_chunks
from pronghorn.data.sources import count_rows, fingerprint, mixture, read_source
from pronghorn.device import cores
from pronghorn.errors import ConfigError, DataError
from pronghorn.state import MANIFEST, clear_leftovers, lock, read_json, write_json
from pronghorn.text import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABELLING = 10
"""Raised when the same data would get other tokens or labels than an earlier version gave them."""
PART_ROWS = 20_000
PART_CHARACTERS = 16_000_000
"""A part of long rows ends earlier: its documents are in memory until it is written, about 100 bytes a character."""

COUNTS = ("rows", "unsupervised", "documents", "conversations", "control_rows")

Progress = Callable[[str, int, int | None], None]
"""Called with a source's name, its rows done, and how many it has (None: not known)."""


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What became of a source: `rows` read, `dropped` refused rows (data.bad_rows: drop), `used` after its weight."""

    path: str
    format: str
    rows: int
    dropped: int
    used: int


@dataclass(frozen=True)
class Prepared:
    """Documents ready to pack, and what became of the rows."""

    dataset: Any
    """`datasets.Dataset` of input_ids, labels (int32 lists) and source (text), memory-mapped."""
    whole: Any
    """The documents before the overflow rule."""
    counts: list[SourceCount]
    errors: list[str]
    """Of the first dropped rows."""
    dropped: int
    """Rows and documents left out: refused, without a supervised token, too long."""
    fitted: Fitted
    """What data.overflow did; what it dropped is in `dropped`, too."""
    control_rows: int
    """Rows that hold control tokens in what the assistant doesn't say (data.control_tokens)."""
    rows: int
    """Of the sources, those that were refused among them."""
    key: str
    """Hash of the data and all that decided the documents."""

    @property
    def dropped_share(self) -> float:
        """Return the share of rows and documents that are left out."""
        return self.dropped / max(self.rows, len(self.whole) + self.dropped - self.fitted.dropped, 1)

    @property
    def cut_share(self) -> float:
        """Return the share of documents that lose tokens to data.overflow: truncate."""
        return self.fitted.truncated / max(len(self.whole), 1)


def documents(
    data: Data,
    split: Literal["train", "eval"],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    seed: int,
    progress: Progress | None = None,
    part_rows: int = PART_ROWS,
    overflow: Overflow | None = None,
) -> Prepared:
    """Return the tokenised documents of `data.train` or `data.eval`, from the cache or made now.

    Weights of a mixture are shares of documents, of those that a held-out share leaves. The overflow rule comes last;
    documents that it cuts stand at the end.

    Args:
        overflow: another rule than `data.overflow`.
    Raises:
        DataError: data that can't be read or trained on, nothing left to train, a cache that is damaged or of another
            version; ConfigError: a split that isn't set, weights for some sources, a system prompt that no row takes.
    """
    from datasets import concatenate_datasets

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
    weights = [source.weight for source in sources if source.weight is not None]
    for source, entry in zip(sources, entries, strict=True):
        if not entry.rows:
            raise DataError(
                f"{source.path}: of {counted(entry.dropped, 'row')} each was dropped, the first for: {entry.errors[0]}",
                f"fix that, or take it out of data.{split}",
            )
    if not any(entry.documents for entry in entries):
        raise DataError(
            f"of {counted(sum(entry.rows for entry in entries), 'row')} none has a token to train",
            "give rows with an assistant message, not train: false (data.loss_on: completion trains nothing else)",
        )
    for source, entry in zip(sources, entries, strict=True):
        if weights and not entry.documents:
            raise DataError(
                f"{source.path}: none of its rows has a token to train, and it has a share of data.{split}",
                "take it out of the mixture, or set data.loss_on to all",
            )
    sets = [entry.dataset() for entry in entries]
    if data.held_out is not None:
        # weights are training's: of what is held out of each source all is used
        sets = held_out(sets, data.held_out, seed, split == "eval")
        weights = [] if split == "eval" else weights
    lengths = [len(documents) for documents in sets]
    if weights and 0 in lengths:
        raise DataError(
            f"{sources[lengths.index(0)].path}: data.eval: {data.held_out} holds all of it out, and it has a share of "
            "data.train",
            "give it more rows, hold less out, or take it out of the mixture",
        )
    if weights:
        taken = mixture(lengths, weights, seed)
        sets = [documents.select(indices) for documents, indices in zip(sets, taken, strict=True)]
    whole = concatenate_datasets([documents for documents in sets if len(documents)])
    fitted, dataset = fit_dataset(whole, max_seq_length, overflow or data.overflow, cache.root)
    used = [len(documents) for documents in sets]
    held = [] if data.held_out is None else [data.held_out, split]
    return Prepared(
        dataset=dataset,
        whole=whole,
        counts=[
            SourceCount(str(source.path), entry.format, entry.rows, entry.dropped, count)
            for source, entry, count in zip(sources, entries, used, strict=True)
        ],
        errors=[error for entry in entries for error in entry.errors][:ERRORS],
        dropped=sum(entry.dropped + entry.unsupervised for entry in entries) + fitted.dropped,
        fitted=fitted,
        control_rows=sum(entry.control_rows for entry in entries),
        rows=sum(entry.rows + entry.dropped for entry in entries),
        key=_hash([[entry.key for entry in entries], weights, seed, max_seq_length, data.overflow, *held]),
    )


@dataclass(frozen=True)
class _Entry:
    """One source in the cache; what became of its rows is as in `Part`, of all parts together."""

    key: str
    format: str
    errors: list[str]
    files: list[Path]
    """Of the parts that have documents."""
    rows: int
    dropped: int
    unsupervised: int
    documents: int
    conversations: int
    control_rows: int

    def dataset(self) -> Any:
        """Return the documents, memory-mapped."""
        from datasets import Dataset, concatenate_datasets

        empty = [] if self.files else [Dataset.from_dict({name: [] for name in ("input_ids", "labels", "source")})]
        return concatenate_datasets([*empty, *(Dataset.from_file(str(file)) for file in self.files)])


class _Cache:
    """Opens or makes the entries of a run's sources."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, part_rows: int, progress: Progress) -> None:
        from huggingface_hub.constants import HF_HOME

        self._data, self._part_rows, self._progress = data, part_rows, progress
        self._drop = data.bad_rows == "drop"
        self._how = Tokenising(tokenizer, data.loss_on, data.system_prompt, data.control_tokens, self._drop)
        self._identity = _tokenizer_identity(tokenizer)
        self.root = data.cache or Path(HF_HOME) / "pronghorn"

    def entry(self, source: Source) -> _Entry:
        """Return the source's entry, made if need be; other processes that want the same one wait for it."""
        made_of = {
            "schema": SCHEMA,
            "labelling": LABELLING,
            "part_rows": self._part_rows,
            "part_characters": PART_CHARACTERS,
            "files": fingerprint(source),
            "format": source.format,
            "columns": source.columns,
            "max_samples": source.max_samples,
            "bad_rows": self._data.bad_rows,
            "loss_on": self._data.loss_on,
            "system_prompt": self._data.system_prompt,
            "control_tokens": self._data.control_tokens,
            "tokenizer": self._identity,
        }
        key = _hash(made_of)
        folder = self.root / key
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
        """Write the parts that aren't there yet and, last, the manifest."""
        clear_leftovers(folder)
        bad: list[DataError] = []
        unreadable: list[DataError] = []
        reader = RowReader(source.format, source.columns, bad.append if self._drop else None)
        total, name, done, parts = count_rows(source), str(source.path), 0, 0

        def missing_parts() -> Iterator[tuple[Path, list[Row]]]:
            nonlocal done, parts
            try:
                for rows in in_chunks(read_source(source, reader), self._part_rows, PART_CHARACTERS):
                    path = folder / part_name(parts)
                    parts += 1
                    if path.exists() and info_file(path).exists():
                        read_part(path)
                        done += len(rows)
                        self._progress(name, done, total)
                    else:
                        yield path, rows
            except DataError as error:
                unreadable.append(error)  # an error of the parts before it comes first

        self._progress(name, 0, total)
        problem = None
        try:
            for part in write_parts(missing_parts(), self._how, self._data.workers or cores()):
                done += part.rows + part.dropped
                self._progress(name, done, total)
        except DataError as error:
            problem = error
        finally:
            clear_leftovers(folder)
        problem = problem or next(iter(unreadable), None)
        if _changed(source, made_of["files"]):  # what can't be read may be a row half written
            for info in folder.glob("part-*.json"):
                info.unlink()  # a part without it is made anew
            raise DataError(
                f"{name} changed while it was tokenised", "run again once nothing writes to it"
            ) from problem
        if problem is not None:
            raise problem
        manifest = {
            "made_of": made_of,
            "format": reader.shape.name if reader.shape is not None else "",
            "dropped": len(bad),
            "errors": [str(error) for error in bad[:ERRORS]],
            "parts": parts,
        }
        write_json(folder / MANIFEST, SCHEMA, manifest)


def _changed(source: Source, digests: Any) -> bool:
    """Tell whether a source has other contents by now than these digests say, or none."""
    try:
        return fingerprint(source) != digests
    except DataError:
        return True


def _open(folder: Path, key: str) -> _Entry:
    """Read what a filled folder holds, and check all of it."""
    remedy = f"delete {folder}"
    manifest = read_json(folder / MANIFEST, SCHEMA, remedy)
    try:
        files = [folder / part_name(number) for number in range(manifest["parts"])]
        parts: list[Part] = [read_part(file) for file in files]
        return _Entry(
            key=key,
            format=manifest["format"],
            errors=sorted([*manifest["errors"], *(error for part in parts for error in part.errors)], key=_place),
            files=[file for file, part in zip(files, parts, strict=True) if part.documents],
            dropped=manifest["dropped"] + sum(part.dropped for part in parts),
            **{name: sum(getattr(part, name) for part in parts) for name in COUNTS},
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST}: not whole ({error})", remedy) from error


def _place(error: str) -> tuple[str, int]:
    """Return where an error says it is: (file, line or row)."""
    found = re.match(r"(.*?) (?:line|row) (\d+)", error)
    return (found[1], int(found[2])) if found else ("", 0)


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything in a tokenizer, its chat template included, that decides tokens and labels."""
    backend: Any = tokenizer.backend_tokenizer
    tokenizer("")  # as transformers leaves it after a call: no truncation, no padding
    options = [tokenizer.special_tokens_map, tokenizer.split_special_tokens]
    return _hash([backend.to_str(), str(tokenizer.chat_template), options])


def _hash(value: Any) -> str:
    import xxhash

    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
