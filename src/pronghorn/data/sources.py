"""What `data.train` and `data.eval` may name: a file, a folder of files, a hub set, or a weighted mixture of these.

Weights are shares: of as many rows as the sources have together, source i gets w_i / Σw. A share larger than its source
repeats it whole, as often as it fits, and what is left over is drawn from it without replacement: no row is seen more
than once oftener than another of its source. The draw depends on the seed alone. Without weights each row is used once.
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pronghorn.config.recipe import Source
from pronghorn.data.downloads import room_for
from pronghorn.data.files import READERS, estimate_rows, read_file, reading, without_nulls
from pronghorn.data.formats import RowReader
from pronghorn.data.rows import Row
from pronghorn.errors import DataError
from pronghorn.state import digest


def read_source(source: Source, reader: RowReader) -> Iterator[Row]:
    """Yield the rows of one source as they are read, one format for all its files.

    Raises:
        DataError: a source that isn't there or can't be read, and what `RowReader.read` refuses.
    """
    rows = (row for path, values in _values(source) for row in reader.read(path, values))
    yield from islice(rows, source.max_samples)


def fingerprint(source: Source) -> list[tuple[str, str]]:
    """Return (name, digest) of each file of a source; of a hub set the hash that `datasets` gives it, and of one that
    is saved here the digests of its files, too: that hash is of how a set was made, not of what it holds.

    Raises:
        DataError: a file or folder that isn't there or can't be read.
    """
    content = _open(source)
    digests = []
    if not isinstance(content, list):
        digests = [(source.path.as_posix(), str(content._fingerprint))]
        content = [Path(file["filename"]) for file in content.cache_files] if source.path.exists() else []
    for file in content:
        with reading(file):
            digests.append((str(file), digest(file)))
    return digests


def count_rows(source: Source) -> int | None:
    """Estimate how many rows a source has, for the progress bar; None where counting would be reading."""
    content = _open(source)
    counts = [len(content)] if not isinstance(content, list) else [estimate_rows(file) for file in content]
    known = [count for count in counts if count is not None]
    total = sum(known) if len(known) == len(counts) else source.max_samples
    return total if total is None or source.max_samples is None else min(total, source.max_samples)


def mixture(lengths: Sequence[int], weights: Sequence[float], seed: int) -> list[list[int]]:
    """Return for each source the indices of its rows to train on, with repeats; they are Σ lengths in all.

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


def _values(source: Source) -> Iterator[tuple[str, Iterator[tuple[int, Any]]]]:
    """Yield (name, values with their lines) of each file of a source, or of its hub set."""
    content = _open(source)
    if isinstance(content, list):
        for file in content:
            yield str(file), read_file(file)
    else:  # null fields of nested records are left out as in Parquet
        rows = ({name: without_nulls(child) for name, child in row.items()} for row in _decoded(content, source.path))
        yield source.path.as_posix(), enumerate(rows, 1)


def _decoded(content: Any, path: Path) -> Iterator[dict[str, Any]]:
    try:
        with reading(path):  # images and sounds in other columns are decoded, too
            yield from content
    except (ImportError, RuntimeError) as error:
        raise DataError(
            f"{path.as_posix()}: a column that is no text can't be read ({error})",
            "give a set without it, as remove_columns and save_to_disk write it",
        ) from error


def _open(source: Source) -> Any:
    """Return the list of a source's files, or the hub set that it names."""
    path = source.path
    with reading(path):
        exists = path.exists()
    if exists:
        _check_local(source)
        if (saved := _saved(path, source.split)) is not None:
            return saved
        files = _files(path)
        if not files:
            raise DataError(f"{path}: no data in this folder", f"put {', '.join(READERS)} files there")
        _check_one_split(path, files)
        return files
    if source.is_hub_name:
        with room_for(source.path.as_posix()):
            return _hub_set(source)
    raise DataError(f"{path}: no such file", "fix data.train or data.eval; paths start at the current directory")


def _check_local(source: Source) -> None:
    """Refuse what only a hub set has, of a file or folder that is here: its rows would be read whole all the same."""
    of_hub = (
        {"config", "revision"} if (source.path / "dataset_dict.json").is_file() else {"split", "config", "revision"}
    )
    defaults = type(source).model_fields
    if asked := sorted(name for name in of_hub if getattr(source, name) != defaults[name].default):
        remedy = "max_samples reads the first rows, data.eval: 5% holds some out"
        raise DataError(
            f"{source.path} is here, and {' and '.join(asked)} {'is' if len(asked) == 1 else 'are'} of hub sets",
            f"leave {'it' if len(asked) == 1 else 'them'} out; {remedy}",
        )


def _saved(path: Path, split: str) -> Any:
    """Return what `Dataset.save_to_disk` wrote into a folder, or `DatasetDict.save_to_disk` for a split; else None."""
    if (path / "dataset_dict.json").is_file():
        if not (path / split).is_dir():
            splits = ", ".join(sorted(part.name for part in path.iterdir() if part.is_dir()))
            raise DataError(f"{path}: no split `{split}` in it", f"name one: {{path: {path}, split: …}} of {splits}")
        path /= split
    if not (path / "state.json").is_file() or not (path / "dataset_info.json").is_file():
        return None
    from datasets import load_from_disk

    try:
        saved = load_from_disk(path)
        return saved.with_format(None, columns=saved.format["columns"])  # it may have been saved as NumPy's or Arrow's
    except IndexError as error:  # what an empty one makes of `datasets`
        raise DataError(f"{path}: no rows in it", "save one that has rows") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a whole saved data set ({error})", "save it again by save_to_disk") from error


def _check_one_split(path: Path, files: Sequence[Path]) -> None:
    """Refuse a folder that holds training rows and, by their names, rows to evaluate on: all would be trained."""
    named: dict[str, Path] = {}
    for file in files:
        for part in file.relative_to(path).parts:
            if word := re.match(r"(train|test|validation|valid|val|eval|dev)(?![a-z])", part.lower()):
                named.setdefault(word[1], file)
    if len(named) > 1 and "train" in named:
        raise DataError(
            f"{path}: files of several splits ({', '.join(named)}), which would all be trained",
            f"name the files to train on, e.g. data.train: [{named['train']}]",
        )


def _files(path: Path) -> list[Path]:
    """Return the file, or a folder's files at any depth, sorted; hidden ones, read-mes and licences aside.

    Raises:
        DataError: links that lead nowhere, pipes and names that aren't UTF-8. (Reading refuses an unknown kind.)
    """
    files = [path]
    with reading(path):
        if path.is_dir():
            files = [
                file
                for file in sorted(path.rglob("*"))
                if not any(part.startswith(".") for part in file.relative_to(path).parts)
                and file.suffix.lower() not in ("", ".md")
                and file.stem.upper() not in ("LICENSE", "README")
                and not file.is_dir()
            ]
    for file in files:
        name = str(file).encode("utf-8", "backslashreplace").decode()
        if name != str(file):
            raise DataError(f"{name}: a file name that is not UTF-8", "rename it")
        if not file.is_file():
            raise DataError(f"{file}: no file that can be read: a pipe, or a link that leads nowhere", "take it away")
    return files


def _hub_set(source: Source) -> Any:
    """Return the split of a hub set that the source names, downloaded once by `datasets` and memory-mapped."""
    import datasets
    from datasets.exceptions import DatasetsError

    name = source.path.as_posix()
    try:
        return datasets.load_dataset(name, source.config, split=source.split, revision=source.revision)
    # not found or reached, several configurations, a script, files that differ in their columns
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"{name}: no such file or folder here, and the hub gives no split `{source.split}` of it ({error})",
            "fix the path or the name, give a list of {path, config, split, revision}, or download the set and give "
            "its folder",
        ) from error
