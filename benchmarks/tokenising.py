"""What a core tokenises: our whole path against the tokenizer alone, on the very same texts.

Ours renders chat templates (each conversation once whole and once up to each trained turn), encodes, labels, checks and
writes the part of the cache. The tokenizer gets the texts rendered already, as `tokenizer(texts)`, the call that
`datasets.map` pipelines make, and as the Rust library's bare `encode_batch`. One thread, alternating, each timed run
behind one of its own, medians.

    python -m benchmarks.tokenising --tokenizer SMOLLM2_FOLDER --data DIR --out DIR
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for everybody

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.record import Result, Workload, check_out, command_line, write_results
from pronghorn.data.labels import Labeller
from pronghorn.data.parts import Tokenising
from pronghorn.data.sources import read_rows

SETS: dict[str, tuple[str, dict[str, str]]] = {
    "gsm8k": ("gsm8k/train.jsonl", {"prompt": "question", "completion": "answer"}),
    "dolly": ("dolly/dolly_3k.json", {"instruction": "instruction", "input": "input", "output": "output"}),
    "several turns": ("llamafactory/v1_sft_demo.jsonl", {}),
}
REPEATS = 5


def measure(rows: list[Any], tokenizer: Any) -> tuple[dict[str, list[float]], int, bool]:
    """Milliseconds of each candidate, the tokens of the texts, and whether all of them gave the same tokens."""
    how = Tokenising(tokenizer, "completion", None, "escape")
    labeller = Labeller(tokenizer, "completion", None, "escape")
    texts = [labeller.render(row).text for row in rows]
    encode = tokenizer.backend_tokenizer.encode_batch
    with tempfile.TemporaryDirectory() as folder:
        candidates: dict[str, Callable[[], Any]] = {
            "pronghorn": lambda: how.write(Path(folder) / "part-00000.arrow", rows),
            "tokenizer(texts)": lambda: tokenizer(texts, add_special_tokens=False, verbose=False),
            "encode_batch": lambda: encode(texts, add_special_tokens=False),
        }
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for repeat in range(REPEATS + 1):
            for name, work in candidates.items():
                gc.collect()
                gc.disable()  # for everybody, as the cache's worker processes do
                work()  # or it would begin with the memory that another one has just given back to the system
                started = time.perf_counter()
                work()
                if repeat:
                    times[name].append((time.perf_counter() - started) * 1e3)
                gc.enable()
        from datasets import Dataset

        ours = Dataset.from_file(str(Path(folder) / "part-00000.arrow"))["input_ids"]
    theirs = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    bare = [each.ids for each in encode(texts, add_special_tokens=False)]
    return times, sum(map(len, theirs)), list(ours) == theirs == bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a fast tokenizer with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--rows", type=int, default=3000, help="at most so many of each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    out = arguments.out / "tokenising.json"
    check_out(out)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    table = Table(title=f"Tokens a second and core, {arguments.tokenizer.name}")
    for column in ("data", "tokens a row", "pronghorn", "tokenizer(texts)", "ratio", "encode_batch", "ratio"):
        table.add_column(column)
    results = []
    for name, (file, columns) in SETS.items():
        rows = read_rows(arguments.data / file, columns)[: arguments.rows]
        times, tokens, same = measure(rows, tokenizer)
        rates = {candidate: tokens / statistics.median(each) * 1e3 for candidate, each in times.items()}
        results += [
            Result(
                command=command_line(),
                candidate=candidate,
                workload=Workload(arguments.tokenizer.name, "tokenise", tokens, name, -1.0, 0),
                gate={"same_tokens": same, "green": same},
                timings_ms={"all": each},
                extra={"rows": len(rows), "tokens_per_s_and_core": rates[candidate]},
                commit=arguments.commit,
                device="CPU, one thread",
            )
            for candidate, each in times.items()
        ]
        ours = rates["pronghorn"] if same else math.nan
        ratios = [ours / rates[candidate] for candidate in ("tokenizer(texts)", "encode_batch")]
        table.add_row(
            name,
            f"{tokens / len(rows):.0f}",
            f"{rates['pronghorn']:,.0f}" if same else "withheld: other tokens",
            f"{rates['tokenizer(texts)']:,.0f}",
            f"{ratios[0]:.2f}",
            f"{rates['encode_batch']:,.0f}",
            f"{ratios[1]:.2f}",
        )
    write_results(results, out)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
