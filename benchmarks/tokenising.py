"""What a core tokenises: our whole path against the tokenizer alone, on the very same texts.

Ours renders chat templates (each conversation once whole and once up to each trained turn), encodes, labels, checks and
writes the part of the cache. The tokenizer gets the texts rendered already, as `tokenizer(texts)`, the call that
`datasets.map` pipelines make, and as the Rust library's bare `encode_batch`. One thread, alternating, each timed run
behind one of its own, medians.

    python -m benchmarks.tokenising --tokenizer SMOLLM2_FOLDER --data DIR --out tokenising.json
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for everybody

from transformers import AutoTokenizer

from benchmarks.program import parser_of, run, show
from benchmarks.record import Result, Workload, check_out, command_line, write_results
from pronghorn.config.recipe import Source
from pronghorn.data.formats import RowReader
from pronghorn.data.labels import Labeller
from pronghorn.data.parts import Tokenising
from pronghorn.data.sources import read_source

SETS: dict[str, tuple[str, dict[str, str]]] = {
    "gsm8k": ("gsm8k/train.jsonl", {"prompt": "question", "completion": "answer"}),
    "dolly": ("dolly/dolly_3k.json", {"instruction": "instruction", "input": "input", "output": "output"}),
    "several turns": ("llamafactory/v1_sft_demo.jsonl", {}),
}
REPEATS = 5


def measure(rows: list[Any], tokenizer: Any) -> tuple[dict[str, list[float]], int, bool]:
    """Return the milliseconds of each candidate, the tokens of the texts, and whether all gave the same."""
    how = Tokenising(tokenizer, "completion", None, "escape")
    labeller = Labeller(tokenizer, "completion", None, "escape")
    texts = [rendered.text for row in rows for rendered in labeller.render(row)]
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
    plain = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    bare = [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
    return times, sum(map(len, plain)), list(ours) == plain == bare


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a fast tokenizer with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--rows", type=int, default=3000, help="at most so many of each")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Time every set; tell whether all gave the same tokens."""
    check_out(given.out)
    tokenizer, results, shown = AutoTokenizer.from_pretrained(given.tokenizer), [], []
    for name, (file, columns) in SETS.items():
        rows = list(read_source(Source(path=given.data / file, max_samples=given.rows), RowReader(columns=columns)))
        times, tokens, same = measure(rows, tokenizer)
        rates = {candidate: tokens / statistics.median(series) * 1e3 for candidate, series in times.items()}
        results += [
            Result(
                command=command_line(),
                candidate=candidate,
                workload=Workload(given.tokenizer.name, "tokenise", tokens, name, -1.0, 0),
                gate={"same_tokens": same, "green": same},
                timings_ms={"all": series},
                extra={"rows": len(rows), "tokens_per_s_and_core": rates[candidate]},
                commit=given.commit,
                device="CPU, one thread",
            )
            for candidate, series in times.items()
        ]
        row = {"data": name, "tokens a row": f"{tokens / len(rows):.0f}"}
        for candidate, rate in rates.items() if same else ():
            row |= {candidate: f"{rate:,.0f}, ours {rates['pronghorn'] / rate:.2f} ×"}
        shown.append(row if same else row | {"pronghorn": "withheld: other tokens"})
    write_results(results, given.out)
    show(shown, f"Tokens a second and core, {given.tokenizer.name}")
    return all(result.gate["green"] for result in results)


if __name__ == "__main__":
    run(arguments, main)
