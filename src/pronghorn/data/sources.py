"""What `data.train` and `data.eval` may name: a file, a folder of files, a hub set, or a weighted mixture of these.

Weights are shares: of as many rows as the sources have together, source i gets w_i / Σw. A share larger than its source
repeats it whole, as often as it fits, and what is left over is drawn from it without replacement: no row is seen more
than once oftener than another of its source. The draw depends on the seed alone. Without weights each row is used once.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.config import Source
from pronghorn.data.files import READERS, count, objects, without_nulls
from pronghorn.data.rows import Row, RowReader, for_sft
from pronghorn.data.values import reading
from pronghorn.errors import DataError

NO_DATA = ("", ".md")


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What became of a source: `rows` read, `dropped` refused rows (data.bad_rows: drop), `used` after its weight."""

    path: str
    format: str
    rows: int
    dropped: int
    used: int


def mixture(lengths: Sequence[int], weights: Sequence[float], seed: int) -> list[list[int]]:
    """For each source the indices of its rows to train on, with repeats; they are Σ lengths in all.

    Shares are rounded by largest remainders (the earlier source first), so each is within one row of exact.
    """
    total, whole = sum(lengths), sum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    taken = []
    for number, (length, share) in enumerate(zip(lengths, shares, strict=True)):
        times, rest = divmod(share, length)
        drawn = sorted(random.Random(f"{seed} {number}").sample(range(length), rest))
        taken.append([*range(length)] * times + drawn)
    return taken


def read_source(source: Source, reader: RowReader) -> Iterator[Row]:
    """The rows of one source as they are read, one format for all its files. Raises DataError as
    `rows.read_rows`."""
    for path, values in _open(source):
        yield from for_sft(reader.stream(path, values))


def fingerprint(source: Source) -> list[tuple[str, str]]:
    """(name, hash of its content) of each file of a source; of a hub set the hash that `datasets` gives it.

    Raises DataError for a file or folder that can't be read.
    """
    if _exists(source.path):
        return [(str(file), _hash(file)) for file in _files(source.path)]
    if source.is_hub_name:
        return [(source.path.as_posix(), _hub_set(source.path.as_posix())._fingerprint)]
    return []  # which reading refuses


def count_rows(source: Source) -> int | None:
    """About how many rows a source has, for the progress bar; None where counting would be reading."""
    if _exists(source.path):
        counts = [count(file) for file in _files(source.path)]
        known = [n for n in counts if n is not None]
        return sum(known) if len(known) == len(counts) else None
    return len(_hub_set(source.path.as_posix())) if source.is_hub_name else None


def _hash(file: Path) -> str:
    with reading(file), file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _open(source: Source) -> Iterator[tuple[str, Iterator[tuple[int, Any]]]]:
    """(name, values with their lines) of each file of a source."""
    path = source.path
    if _exists(path):
        files = _files(path)
        if not files:
            raise DataError(f"{path}: no data in this folder", f"put {', '.join(READERS)} files there")
        for file in files:
            yield str(file), objects(file)
    elif source.is_hub_name:
        yield path.as_posix(), _hub(path.as_posix())
    else:
        raise DataError(f"{path}: no such file", "mend data.train or data.eval; paths start at the current directory")


def _exists(path: Path) -> bool:
    with reading(path):
        return path.exists()


def _files(path: Path) -> list[Path]:
    """The file, or a folder's files at any depth, sorted; hidden ones, read-mes and licences aside. An unknown kind is
    an error when it is read; DataError for links that lead nowhere, pipes and names that aren't UTF-8."""
    with reading(path):
        inside = sorted(path.rglob("*")) if path.is_dir() else []
    found = [] if path.is_dir() else [path]
    for file in inside:
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        aside = hidden or file.suffix in NO_DATA or file.stem.upper() in ("LICENSE", "README")
        if not aside and not file.is_dir():
            found.append(file)
    for file in found:
        name = str(file).encode("utf-8", "backslashreplace").decode()
        if name != str(file):
            raise DataError(f"{name}: a file name that is not UTF-8", "rename it")
        if not file.is_file():
            raise DataError(f"{file}: no file that can be read: a pipe, or a link that leads nowhere", "take it away")
    return found


def _hub(name: str) -> Iterator[tuple[int, Any]]:
    """The rows of a hub set's split `train`, null fields of nested records left out as in Parquet."""
    for row, value in enumerate(_hub_set(name), 1):
        yield row, {key: without_nulls(each) for key, each in value.items()}


def _hub_set(name: str) -> Any:
    """A hub set's split `train`, downloaded once by `datasets` and memory-mapped."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(name, split="train")
    # not found or reached, several configurations, a script, files that differ in their columns
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"{name}: no such file or folder here, and the hub gives no split `train` of it ({error})",
            "mend the path or the name, or download the set and give its folder",
        ) from error
