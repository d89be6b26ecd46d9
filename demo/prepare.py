"""Fetch what the demo trains: `python demo/prepare.py [--cache .cache]`. What is there already is left as it is.

CACHE/SmolLM2-135M-Instruct   the model
CACHE/docs/train.jsonl        questions about Python's standard library, with answers
CACHE/docs/eval.jsonl         the same about other modules
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from model import fetch_smollm2, is_complete
from pronghorn.errors import PronghornError


def prepare(cache: Path, console: Console) -> None:
    """Make model and data in `cache` and say what was done."""
    docs = cache / "docs"
    if (docs / "train.jsonl").is_file() and (docs / "eval.jsonl").is_file():
        console.print(f"data     {docs} (was there)")
    else:
        script = Path(__file__).with_name("docs_dataset.py")
        subprocess.run([sys.executable, "-I", "-S", script, docs], check=True)
        training, held_out = (
            (docs / name).read_text(encoding="utf-8").count("\n") for name in ("train.jsonl", "eval.jsonl")
        )
        console.print(f"data     {docs}: {training} rows to train on, {held_out} held out")
    here = is_complete(cache / "SmolLM2-135M-Instruct")
    folder = fetch_smollm2(cache, console)
    console.print(f"model    {folder}" + (" (was there)" if here else ""))


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where to (default: .cache)")
    console = Console(highlight=False)
    try:
        prepare(parser.parse_args().cache, console)
    except PronghornError as error:
        Console(stderr=True, highlight=False).print(f"[red]error[/red] {error}", soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
