"""Read files of rows as values with the line (or row) that each stands at; `formats` says what the values mean.

| file | a row is | counted in |
|---|---|---|
| .jsonl | an object a line (lines end at \\n only) | lines |
| .json | an item of the file's list, which is often one line | rows |
| .csv | a record under a header line, every value a string | rows after the header |
| .parquet | a record; null fields of nested records are left out, since Parquet fills in what a record lacks | rows |
| .txt | {"text": what stands between lines of `<|endoftext|>`}, without those the whole file | the line it starts on |

All but JSON lists are streamed, so they may be larger than memory; a list takes about three times its size.
"""

import json
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from pronghorn.data.rows import where
from pronghorn.errors import DataError

LINE_LIMIT = 2**26
"""Bytes of a line (of a record, in CSV): a longer one is a file with its line ends lost, not a row to train on."""
DEPTH = 100
"""The most brackets of JSON that may be open at a time: deeper values end in RecursionErrors, here or in a template."""
SEPARATOR = "<|endoftext|>"

LFS = "version https://git-lfs"
"""How a pointer of Git LFS begins, which a clone without it has in a file's place."""
_OTHER_KINDS = {
    **dict.fromkeys(
        (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz", ".7z"), "unpack it, and give what was in it"
    ),
    ".tsv": "save it as .csv, with commas between the values",
    ".ndjson": "name it .jsonl",
    ".jsonlines": "name it .jsonl",
    ".arrow": "give the whole folder that save_to_disk wrote, or write it by Dataset.to_parquet",
}
"""What to do about files that hold rows in another way, by their suffix."""
_NOT_JSON = {
    (".json", "{"): "name the file .jsonl: it has an object a line, not a list",
    (".jsonl", "["): "name the file .json: it is a list of rows",
    (".jsonl", "<"): "that is a web page: download the file itself",
    (".json", "<"): "that is a web page: download the file itself",
}
"""What to do about a file that is not JSON, by its suffix and first character."""
_ONE_A_LINE = "write each object in a line of its own"
_UNPACK = "unpack it, and name what was in it by what it is"
_BEGINNINGS = {
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"PK\x03\x04": ("a zip archive, or a spreadsheet", "unpack it, or save the table as .csv"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"BZh": ("compressed by bzip2", _UNPACK),
    b"\xfd7zXZ": ("compressed by xz", _UNPACK),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"ARROW1": ("an Arrow file", "give the whole folder that save_to_disk wrote, or write it by Dataset.to_parquet"),
    b"SQLite format": ("a database", "write its rows as .csv"),
    b"%PDF": ("a PDF", "write its text as .txt"),
    b"\x89PNG": ("an image", "training is text only"),
    b"\x00\x00": ("zero bytes, as of a copy that was cut off", "copy or download it again"),
}
"""What files that can't be text begin with, what they are, and what to do."""

Values = Iterator[tuple[int, Any]]


def read_file(path: Path) -> Values:
    """Yield (line or row from 1, value) for each row of the file; blank lines and blank texts are skipped.

    A row whose JSON is refused (`RefusedJSON`) comes as the DataError to raise, since other rows can be read.

    Raises:
        DataError: bytes that aren't UTF-8, text that isn't JSON (or CSV, or Parquet), a line over LINE_LIMIT, another
            kind of file, or one that the system can't read. Names file and line.
    """
    kind = path.suffix.lower()
    if kind not in READERS:
        remedy = _OTHER_KINDS.get(kind, f"give a {', '.join(READERS)} file")
        raise DataError(f"{path}: unknown file type {path.suffix or '(no suffix)'}", remedy)
    with reading(path):
        if kind != ".parquet":
            _check_beginning(path)
        yield from READERS[kind](path)


def _check_beginning(path: Path) -> None:
    """Refuse a file whose first bytes tell that it is another kind than its name says."""
    with path.open("rb") as file:
        first = file.read(16)
    for beginning, (what, remedy) in _BEGINNINGS.items():
        if first.startswith(beginning):
            raise DataError(f"{path}: not what its name says, but {what}", remedy)


def estimate_rows(path: Path) -> int | None:
    """Estimate how many rows a file has without parsing JSON lines or CSV; None for texts and what can't be read."""
    import pyarrow
    from pyarrow import parquet

    try:
        kind = path.suffix.lower()
        if kind in (".jsonl", ".csv"):
            with path.open("rb") as file:
                return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
        if kind == ".json":
            return len(json.loads(path.read_bytes()))
        return parquet.read_metadata(path).num_rows if kind == ".parquet" else None
    except (OSError, TypeError, ValueError, RecursionError, pyarrow.ArrowException):
        return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says about a path that can't be read into a DataError."""
    try:
        yield
    except OSError as error:
        name = str(path) if len(str(path)) <= 300 else f"{str(path)[:300]}…"
        raise DataError(
            f"{name} can't be read ({error.strerror or error})", "fix the path, its rights or the disk"
        ) from error


class RefusedJSON(ValueError):
    """JSON that a row may not hold: a key twice in one object, brackets deeper than DEPTH, too long a number."""


def load_json(text: str) -> Any:
    """Parse one value of JSON.

    Raises:
        JSONDecodeError: the text isn't JSON. RefusedJSON: it holds what a row may not.
    """
    try:
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") > DEPTH and _is_deeper(value, DEPTH):
            raise RecursionError
    except RecursionError:
        raise RefusedJSON(f"more than {DEPTH} brackets open at a time") from None
    except (json.JSONDecodeError, RefusedJSON):
        raise
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise RefusedJSON(f"a number that is too long to read ({error})") from None
    return value


def without_nulls(value: Any) -> Any:
    """Return the value less the null fields of its nested objects, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(child) for name, child in value.items() if child is not None}
    return [without_nulls(child) for child in value] if isinstance(value, list) else value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RefusedJSON(f"the key {twice[:40]!r} twice in one object")
    return table


_DECODER = json.JSONDecoder(object_pairs_hook=_no_key_twice)


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(child, depth - 1) for child in children)


def _json_lines(path: Path) -> Values:
    with path.open("rb") as file:
        for line in count(1):
            raw = file.readline(LINE_LIMIT + 1)
            if not raw:
                return
            if len(raw) > LINE_LIMIT:
                raise DataError(
                    f"{path} line {line}: a line of more than {LINE_LIMIT:,} bytes (tokenising takes 100 times that)",
                    "end each row's line with \\n, and split rows that are this long",
                )
            if text := _decode(raw, path, line).rstrip():  # with its end, an error would name the next line
                yield line, _parse(text, path, line)


def _json_list(path: Path) -> Values:
    """Yield the items of a JSON list, each parsed as a row of its own."""
    text = _decode(path.read_bytes(), path, 1)
    if not text.strip():
        return
    try:
        values = json.loads(text)  # first: a malformed tail is noticed before any row is used
    except (ValueError, RecursionError) as error:
        raise _json_error(error, path, 1) from error
    if not isinstance(values, list):
        raise DataError(f"{path}: {type(values).__name__} instead of a list", _listed(values))
    end = text.index("[") + 1
    for number in range(1, len(values) + 1):
        start = end
        while text[start] in " \t\r\n,":
            start += 1
        end = json.JSONDecoder().raw_decode(text, start)[1]
        yield number, _parse(text[start:end], path, number)


def _listed(value: Any) -> str:
    """Return how the rows of a JSON value that is no list become one."""
    inner = list(value.values()) if isinstance(value, dict) else []
    if inner and all(
        isinstance(each, dict) and {"file_name", "hf_hub_url", "script_url"} & each.keys() for each in inner
    ):
        return "that is LLaMA-Factory's list of data sets: give the files that it names, one by one"
    if inner and all(isinstance(each, list) for each in inner) and not any(isinstance(row, dict) for row in inner[0]):
        return "it holds columns, and a list of rows is read: pandas' to_json(FILE, orient='records') writes them"
    name = (
        next((name for name, rows in zip(value, inner, strict=True) if isinstance(rows, list)), None) if inner else None
    )
    return "write a list of rows" + (f": what stands under {name!r}, alone" if name else "")


def _parse(text: str, path: Path, line: int) -> Any:
    """Parse a row of JSON; return the DataError of one that is refused."""
    try:
        return load_json(text)
    except RefusedJSON as error:
        return _json_error(error, path, line)
    except json.JSONDecodeError as error:
        raise _json_error(error, path, line) from error


def _json_error(error: Exception, path: Path, line: int) -> DataError:
    if not isinstance(error, json.JSONDecodeError):
        return DataError(f"{where(path, line)}: JSON that can't be read: {error}", "fix or delete that row")
    start = (path.suffix.lower(), error.doc.lstrip()[:1])
    remedy = _NOT_JSON.get(start, "fix or delete that line")
    if error.doc.startswith(LFS):
        remedy = "that is a pointer of Git LFS: git lfs pull gets the file"
    elif start[0] == ".jsonl" and error.doc.strip() in ("{", "[{"):
        remedy = "write each row's object in one line; a list of objects over several lines is a .json file"
    elif error.doc.lstrip().startswith("{'"):
        remedy = "JSON's quotes are double: write rows by json.dumps"
    elif start not in _NOT_JSON and (not error.doc[error.pos :].strip() or error.msg.startswith("Unterminated string")):
        remedy = "the file breaks off there: write or download it anew"
        if start[0] == ".jsonl":
            remedy = "the row breaks off there: write it whole in one line, or delete it"
    elif error.msg == "Extra data":
        comma = error.doc[error.pos :].strip() == ","
        remedy = "leave the comma at the line's end out" if comma else _NOT_JSON.get(start, _ONE_A_LINE)
    at = "" if error.msg.endswith(" at") else ","
    return DataError(
        f"{path} line {line + error.lineno - 1}: not valid JSON ({error.msg}{at} column {error.colno})", remedy
    )


def _texts(path: Path) -> Values:
    start, size, piece = 1, 0, list[str]()

    def text(whole: str) -> Values:
        if whole.strip():
            if all(_is_object(line) for line in piece if line.strip()):
                raise DataError(f"{path} line {start}: a JSON object, not text", "rename the file: .jsonl")
            yield start, {"text": whole}

    with path.open("rb") as file:
        for number in count(1):
            raw = file.readline(LINE_LIMIT + 1)
            if not raw:
                break
            size += len(raw)
            if size > LINE_LIMIT:
                raise DataError(
                    f"{path} line {start}: a text of more than {LINE_LIMIT:,} bytes (tokenising takes 100 times that)",
                    f"write a line of {SEPARATOR} between two documents",
                )
            line = _decode(raw, path, number)
            if line.endswith("\r\n"):  # Windows' line ends would be trained, and answered with
                line = f"{line[:-2]}\n"
            if line.strip() != SEPARATOR:
                piece.append(line)
                continue
            yield from text("".join(piece).removesuffix("\n"))
            start, size, piece = number + 1, 0, []
    yield from text("".join(piece))


def _is_object(line: str) -> bool:
    """Tell whether a line is a JSON object."""
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


_CSV = re.compile(rb'(?:(?:"(?:[^"]++|"")*+"[ \t]*+|[^",\r\n][^,\r\n]*+|)(?:,|\r\n|\n|\r|\Z))*+')
"""Values as CSV has them; the possessive repeats neither go back nor take memory."""


def _check_quotes(path: Path) -> None:
    """Refuse quotes that Arrow leaves out or takes for the rest of the file: of a value that is never closed, or goes
    on behind its closing quote (Spark and MySQL write quotes inside values as \\")."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
        begin = 3 if text[:3] == b"\xef\xbb\xbf" else 0
        found = _CSV.match(text, begin)
        end = found.end() if found else begin
        if end < len(text):
            line = text[:end].count(b"\n") + 1
            raise DataError(
                f"{path} line {line}: a quoted value that goes on behind its closing quote, or is never closed",
                'write quotes inside values twice (""), as pandas\' to_csv does',
            )


def _csv(path: Path) -> Values:
    import pyarrow
    from pyarrow import csv

    with path.open("rb") as file:
        lines = (_decode(line, path, number) for number, line in enumerate(iter(file.readline, b""), 1))
        header = next(filter(None, map(str.strip, lines)), "")
    if not header:
        return
    delimiter = next((mark for mark in (";", "\t", "|") if "," not in header and mark in header), None)
    if delimiter is not None:
        raise DataError(
            f"{path}: a header without a comma, whose names seem to be delimited by "
            + ("tabs" if delimiter == "\t" else repr(delimiter)),
            "save it with commas between the values",
        )
    _check_quotes(path)
    read = csv.ReadOptions(block_size=LINE_LIMIT)  # a record must fit into a block
    parse = csv.ParseOptions(newlines_in_values=True)
    try:
        # A file of Arrow's: the reader's own thread may wait for Python's lock while the reader is let go. Nothing
        # closes it but the reader's end, since that thread reads ahead: from a closed file's number, which the next
        # file that is opened gets, it would take that one's bytes away.
        with csv.open_csv(pyarrow.OSFile(str(path)), read, parse) as inferred:
            names = inferred.schema.names
        _check_names(names, path)
        as_text = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
        with csv.open_csv(pyarrow.OSFile(str(path)), read, parse, as_text) as batches:
            yield from enumerate((value for batch in batches for value in batch.to_pylist()), 1)
    except pyarrow.ArrowException as error:
        _decode(path.read_bytes(), path, 1)  # which names the line of bytes that aren't UTF-8
        raise DataError(f"{path}: not valid CSV ({error})", "fix that row; rows count from the header, 1") from error


def _parquet(path: Path) -> Values:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=1000):
                for index in range(batch.num_rows):  # row by row: those before one that isn't UTF-8 are read
                    (value,) = batch.slice(index, 1).to_pylist()
                    row += 1
                    yield row, {name: without_nulls(child) for name, child in value.items()}
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where(path, row + 1)}: bytes that are not UTF-8 ({error})", "write strings as UTF-8"
        ) from error
    except OverflowError as error:
        raise DataError(
            f"{where(path, row + 1)}: a date or time span out of Python's range ({error})", "fix or delete that row"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a whole Parquet file ({error})",
            "download or write it anew; git lfs pull, if Git LFS left a pointer",
        ) from error


READERS = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv, ".parquet": _parquet, ".txt": _texts}


def _check_names(names: list[str], path: Path) -> None:
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:  # only names: spreadsheets write columns without one at the end
        raise DataError(f"{path}: the column {twice!r} twice", "rename or delete one of the two")


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)  # of what follows a byte order mark
        raise DataError(
            f"{path} line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})",
            "save the file as UTF-8",
        ) from error
