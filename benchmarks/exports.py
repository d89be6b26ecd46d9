"""Compare GGUF files, in llama.cpp and read back here, with the model that they were written of.

    python -m benchmarks.exports --model SMOLLM2_FOLDER --data FOLDER_OF_GSM8K --out exports.json

Compared are token ids of conversations, log-probabilities at every position of held-out rows, answers and stops, by the
formats' own limits. Needs the package `xllamacpp`; no GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.program import names, parser_of, run, show
from benchmarks.record import Facts
from pronghorn.export.compare import compare
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.models.gguf import load_gguf


def held_out_rows(data: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Return questions with their answers as the template renders them."""
    with (data / "test.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    roles = [[("user", row["question"]), ("assistant", row["answer"])] for row in rows]
    chats = [[{"role": role, "content": content} for role, content in row] for row in roles]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the folder of GSM8K")
    parser.add_argument("--rows", type=int, default=8, help="held-out rows; every position is asked for")
    parser.add_argument("--quantisations", type=names, default=("f16", "q8_0"))
    return parser


def main(given: argparse.Namespace) -> bool:
    """Write, load and compare a file of each quantisation; tell whether all keep to their limits."""
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    reference = TransformersEngine(model, tokenizer, given.model.name)
    rows = held_out_rows(given.data, tokenizer, given.rows)
    table = []
    with Facts(given, "gguf", "xllamacpp") as facts:
        facts |= {"model": given.model.name, "rows": len(rows), "files": {}}
        for quantisation in given.quantisations:
            with tempfile.TemporaryDirectory() as scratch:
                start = time.perf_counter()
                file = write_gguf(given.model, Path(scratch) / "model.gguf", quantisation)
                entry: dict[str, Any] = {"seconds to write": round(time.perf_counter() - start, 1)}
                with serve_gguf(file, threads=2) as engine:
                    engine.steps, engine.name = None, "llama.cpp"
                    entry["llama.cpp"] = compare(
                        reference, engine, format=quantisation, rows=rows, exact=True
                    ).to_dict()
                again = TransformersEngine(*load_gguf(file, torch.float32), "read back")
                entry["read back"] = compare(reference, again, format=quantisation, rows=rows, exact=True).to_dict()
            facts["files"][quantisation] = entry
            facts.keep()
            for reader in ("llama.cpp", "read back"):
                shown = ("ok", "positions", "mean", "tail", "same", "causes")
                table.append({"file": quantisation, "in": reader} | {key: entry[reader][key] for key in shown})
    show(table, given.model.name)
    return all(row["ok"] for row in table)


if __name__ == "__main__":
    run(arguments, main)
