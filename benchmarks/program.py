"""Share what every program that measures needs: its arguments, its end, its table, packed rows on the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from pronghorn.cli.errors import plain_errors


def parser_of(document: str | None, measures: bool = True) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring and knows --debug and, if it measures, --out and --commit."""
    parser = argparse.ArgumentParser(
        description=document and document.replace("%", "%%"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    if measures:
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON, too")
        parser.add_argument("--commit", default="unknown", help="of this source, for the results")
    return parser


def run(
    arguments: Callable[[], argparse.ArgumentParser],
    main: Callable[[argparse.Namespace], bool | None],
    given: Sequence[str] | None = None,
) -> None:
    """Run a program; end with code 1 where `main` returns False, and after a user's mistake, which is told plainly."""
    parsed = arguments().parse_args(given)
    try:
        with plain_errors(parsed.debug):
            green = main(parsed)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
    if green is False:
        raise SystemExit(1)


def names(text: str) -> tuple[str, ...]:
    """Split names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def show(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print rows as a table, a column a key."""
    import pandas as pd

    print(f"\n{title}" if title else "")
    print(pd.DataFrame(rows).astype(object).fillna("–").to_string(index=False, justify="left"), flush=True)


def gsm8k(file: Path, tokenizer: Any, longest: int, most: int | None = None) -> list[dict[str, list[int]]]:
    """Tokenise the first rows of a file of GSM8K, the answers supervised, cut after `longest` tokens."""
    from pronghorn.config.recipe import Source
    from pronghorn.data.formats import RowReader
    from pronghorn.data.labels import label_rows
    from pronghorn.data.packing import Document
    from pronghorn.data.sources import read_source

    reader = RowReader(columns={"prompt": "question", "completion": "answer"})
    rows = list(read_source(Source(path=file, max_samples=most), reader))
    labelled = label_rows(rows, tokenizer).documents
    cut = [Document(document.input_ids[:longest], document.labels[:longest], document.source) for document in labelled]
    return [{"input_ids": document.input_ids, "labels": document.labels} for document in cut if document.supervised]


def packed_batches(model: Any, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Make the rows of `workload.make_rows` (log-normal documents, all supervised) as Pronghorn's batches, on the
    model's device."""
    from benchmarks.workload import make_rows
    from pronghorn.data.batch import Collator

    collator = Collator(tokens, pad_token_id=0)
    rows = make_rows(tokens, "lognormal", 1.0, model.config.vocab_size, seed)
    return [{name: value.to(model.device) for name, value in collator([vars(row)]).items()} for row in rows]
