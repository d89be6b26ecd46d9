"""Files of rows, as values with the line (or row) that each stands at; what the values mean is `formats`' business.

| file | a row is | counted in |
|---|---|---|
| .jsonl | an object a line (lines end at \\n only) | lines |
| .json | an item of the file's list | the line that it starts on |
| .csv | a record under a header line, every value a string | rows after the header |
| .parquet | a record; null fields of nested records are left out, since Parquet fills in what a record lacks | rows |
| .txt | {"text": what stands between lines of `<|endoftext|>`}, without those the whole file | the line it starts on |

JSON lines and Parquet are streamed, so they may be larger than memory; the others are read whole.
"""

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pronghorn.data.row_types import where
from pronghorn.data.values import RefusedJSON, load_json, reading, scan_json
from pronghorn.errors import DataError

LINE_LIMIT = 2**26
"""Bytes of a line (of a record, in CSV): a longer one is a file with its line ends lost, not a row to train on."""

SEPARATOR = "<|endoftext|>"


def objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line or row from 1, value) for each row of the file; blank lines and blank texts are skipped.

    A row of JSON that is refused (RefusedJSON) comes as the DataError to raise, since other rows can be read.

    Raises DataError, naming file and line, for bytes that aren't UTF-8, text that isn't JSON (or CSV, or Parquet), a
    line over LINE_LIMIT, another kind of file, and one that the system can't read.
    """
    if path.suffix not in READERS:
        raise DataError(
            f"{path}: unknown file type {path.suffix or '(no suffix)'}", f"give a {', '.join(READERS)} file"
        )
    with reading(path):
        yield from READERS[path.suffix](path)


def count(path: Path) -> int | None:
    """About how many rows a file has, found without parsing JSON lines or CSV; None for another kind of file, and for
    one that `objects` will refuse."""
    if path.suffix in (".jsonl", ".csv"):
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
    if path.suffix == ".json":
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return None
        return len(values) if isinstance(values, list) else None
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        try:
            return parquet.read_metadata(path).num_rows
        except (pyarrow.ArrowException, OSError):
            return None
    return None


def without_nulls(value: Any) -> Any:
    """The value less the null fields of its nested objects, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    line = 0
    with path.open("rb") as file:
        while raw := file.readline(LINE_LIMIT + 1):
            line += 1
            if len(raw) > LINE_LIMIT:
                raise DataError(
                    f"{path} line {line}: a line of more than {LINE_LIMIT:,} bytes (tokenising takes 100 times that)",
                    "end each row's line with \\n, and split rows that are this long",
                )
            if text := _decode(raw, path, line).rstrip():  # with its end, an error would name the next line
                yield line, _parsed(partial(load_json, text), path, line)


def _json_list(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of a JSON list with the lines that they start on, which `json.loads` would not tell."""
    text = _decode(path.read_bytes(), path, 1)
    if not text.strip():
        return
    values = _parsed(partial(json.loads, text), path, 1)  # first: a malformed tail is found before any row is used
    if isinstance(values, DataError):
        raise values
    if not isinstance(values, list):
        raise DataError(f"{path}: {type(values).__name__} instead of a list", "write a list of rows")
    position, counted, line = text.index("[") + 1, 0, 1
    skip = json.JSONDecoder().raw_decode
    for _ in values:
        while text[position] in " \t\r\n,":
            position += 1
        line += text.count("\n", counted, position)
        counted = position
        start, position = position, skip(text, position)[1]
        yield line, _parsed(partial(_item, text, start), path, line)


def _item(text: str, start: int) -> Any:
    return scan_json(text, start)[0]


def _texts(path: Path) -> Iterator[tuple[int, Any]]:
    text = _decode(path.read_bytes(), path, 1)
    line, start, piece = 1, 1, list[str]()
    for line, each in enumerate(text.split("\n"), 1):
        if each.rstrip("\r") != SEPARATOR:
            piece.append(each)
            continue
        if "".join(piece).strip():
            yield start, {"text": "\n".join(piece)}
        start, piece = line + 1, []
    if "".join(piece).strip():
        yield start, {"text": "\n".join(piece)}


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import csv

    raw = path.read_bytes()
    header = _decode(raw, path, 1).lstrip().partition("\n")[0]
    if not header:
        return
    delimiter = next((each for each in (";", "\t", "|") if "," not in header and each in header), None)
    if delimiter is not None:
        raise DataError(
            f"{path}: a header without a comma, whose names seem to be delimited by {delimiter!r}",
            "save it with commas between the values",
        )
    parse = csv.ParseOptions(newlines_in_values=True)
    read = csv.ReadOptions(block_size=LINE_LIMIT)  # a record must fit into a block
    try:
        names = csv.open_csv(io.BytesIO(raw), read, parse).schema.names
        _check_names(names, path)
        as_text = csv.ConvertOptions(column_types={name: pyarrow.string() for name in names}, strings_can_be_null=False)
        with csv.open_csv(io.BytesIO(raw), read, parse, as_text) as batches:
            row = 0
            for batch in batches:
                for value in batch.to_pylist():
                    row += 1
                    yield row, value
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not valid CSV ({error})", "mend that row; rows count from the header, 1") from error


def _check_names(names: list[str], path: Path) -> None:
    for at, name in enumerate(names):
        if name and name in names[:at]:  # spreadsheets write columns without a name at the end
            raise DataError(f"{path}: the column {name!r} twice", "rename or delete one of the two")


def _records(batch: Any) -> Iterator[dict[str, Any]]:
    """The batch's rows; where one isn't UTF-8, those before it and then the error."""
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:
        values = (value for index in range(batch.num_rows) for value in batch.slice(index, 1).to_pylist())
    yield from values


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=1000):
                for value in _records(batch):
                    row += 1
                    yield row, {key: without_nulls(each) for key, each in value.items()}
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where(path, row + 1)}: bytes that are not UTF-8 ({error})", "write strings as UTF-8"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({error})", "write the file anew") from error


READERS = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv, ".parquet": _parquet, ".txt": _texts}


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)  # of what follows a byte order mark
        raise DataError(
            f"{path} line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})",
            "save the file as UTF-8",
        ) from error


def _parsed(parse: Callable[[], Any], path: Path, line: int) -> Any:
    """What `parse` gives; the DataError of JSON that a row may not hold, and any other raised."""
    try:
        return parse()
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} line {line + error.lineno - 1}: not valid JSON ({error.msg}, column {error.colno})",
            "name the file .jsonl: it has an object a line, not a list"
            if path.suffix == ".json" and error.doc.lstrip().startswith("{")
            else "mend or delete that line",
        ) from error
    except (ValueError, RecursionError) as error:
        refused = DataError(f"{path} line {line}: JSON that can't be read: {error}", "mend or delete that row")
        if not isinstance(error, RefusedJSON):
            raise refused from error
        return refused
