"""Whole trainings, from the start of the process to the saved adapter: TRL, TRL with Liger's kernels, Unsloth and
Pronghorn, each by its own trainer.

    python -m benchmarks.end_to_end --model SMOLLM2_FOLDER --train gsm8k/train.jsonl --held-out gsm8k/test.jsonl \\
        --out end-to-end.json
    python -m benchmarks.end_to_end --model Llama-3.1-8B --train gsm8k/train.jsonl --steps 30 --only unsloth pronghorn
    python -m benchmarks.end_to_end --model BLOOM-1B7 --lengths alpaca.json --tokens 1600 --micro-batches 4 --steps 12
    python -m benchmarks.end_to_end --model Qwen3-0.6B --pairs preferences.json --steps 60

`trl` and `unsloth` are their defaults, `-best` what a user who reads on would set: no recomputation, and packing where
that keeps documents apart without another attention library; `pronghorn-unpacked` is a script of TRL's with Pronghorn's
names. One epoch of the same rows unless `--steps` ends it; an
update has as many tokens for everybody (`candidates.trainers`). The adapter that was saved is then loaded by
transformers and PEFT in float32 and judged on held-out rows, outside the clock; a shape's random weights learn nothing
and aren't. Who isn't installed is skipped by name; `--python unsloth=PATH` gives a candidate an interpreter.

    startup     until the library is imported      first step   until the first update is done
    wall        until the adapter is saved         tokens/s     real tokens, of the updates after the first
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.candidates import trainers
from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts
from pronghorn.diagnose.shapes import checkpoint_of, shape_of
from pronghorn.errors import ConfigError

NAMES = [name for name in trainers.CANDIDATES if name != "evaluate"]
DPO = "dpo-"
"""What names of candidates begin with that train on pairs."""
SCRIPT = Path(trainers.__file__)


def rows_of(lengths: Path, folder: Path) -> Path:
    """Write rows of random letters, of as many bytes as a JSON file of lengths says: a shape's tokens are bytes."""
    draw, rows = random.Random(0), []
    for length in json.loads(lengths.read_text(encoding="utf-8")):
        text = "".join(draw.choices("abcdefgh", k=length))
        rows.append(json.dumps({"question": text[: length // 3], "answer": text[length // 3 :]}))
    (folder / lengths.name).with_suffix(".jsonl").write_text("\n".join(rows), encoding="utf-8")
    return (folder / lengths.name).with_suffix(".jsonl")


def tokens_of(model: Path, file: Path, pairs: bool = False) -> list[int]:
    """Count each row's tokens by the model's tokenizer, a pair's in both its sequences."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = (trainers.read_pairs if pairs else trainers.read_rows)(str(file))
    ends = ("chosen", "rejected") if pairs else ("completion",)
    counts = [[len(ids) for ids in tokenizer([row["prompt"] + row[end] for row in rows])["input_ids"]] for end in ends]
    return [sum(each) for each in zip(*counts, strict=True)]


def missing(name: str, python: str) -> str | None:
    """Return a module that a candidate needs and its interpreter doesn't find, without importing any."""
    for module in ["trl", *(module for part, module in trainers.MODULES.items() if part in name)]:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", code], check=False).returncode:
            return module
    return None


def candidate(name: str, given: argparse.Namespace, python: str) -> dict[str, Any]:
    """Train by one candidate in a process of its own, and judge what it saved in another."""

    def command(part: str, arguments: Path, result: Path) -> list[str]:
        return [python if part == name else sys.executable, "-P", str(SCRIPT), part, str(arguments), str(result)]

    with tempfile.TemporaryDirectory(prefix="pronghorn-end-to-end-") as folder:
        own = {"folder": folder, "model": given.own.get(name, given.model)}
        given = argparse.Namespace(**{**vars(given), **own})
        found = parts.one(name, given, command)
        if "error" in found:
            return found
        if given.held_out is not None:
            found |= {"evaluated": parts.one("evaluate", given, command)}
            found |= {key: value for key, value in found["evaluated"].items() if key == "held_out_loss"}
        marks, updates = found["marks_s"], found["steps"]
        trained = min(given.real_tokens, updates * given.micro_batches * given.documents * given.mean)
        after = marks["trained"] - marks["first step"]
        rate = trained * (updates - 1) / updates / after if updates > 1 and after > 0 else None
        return found | {"wall_s": marks["saved"], "tokens_per_s": rate}


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="a model's folder, or a shape (random weights, not judged)")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--train", type=Path, help="JSON or JSON lines: GSM8K's, or instructions")
    data.add_argument("--lengths", type=Path, help="JSON list of lengths: random text of a shape")
    data.add_argument("--pairs", type=Path, help="JSON of instructions, each with `chosen` and `rejected`: DPO")
    parser.add_argument("--held-out", type=Path, help="the same, to judge by")
    parser.add_argument("--held-out-rows", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4096, help="of a packed row, and about those of a padded batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="of an update, each of about --tokens")
    parser.add_argument("--targets", nargs="+", help="linears that get adapters; otherwise Llama's names")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=-1, help="end after so many updates")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--checkpoints", type=Path, help="where a shape's random weights are kept")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="a candidate's interpreter")
    parser.add_argument(
        "--own", action="append", default=[], metavar="NAME=PATH", help="a candidate's own folder of the model"
    )
    parts.add_arguments(parser, NAMES, limit_s=400)
    return parser


def main(given: argparse.Namespace) -> bool:
    """Train by every candidate that is installed; tell whether all of these came through."""
    given.only = [name for name in given.only if name.startswith(DPO) == (given.pairs is not None)]
    if not given.only:
        raise ConfigError("none of --only trains on such rows", f"{DPO}… train on --pairs, the others on --train")
    for file in (given.train, given.lengths, given.pairs, given.held_out):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} is not there", "give a file of JSON or JSON lines")
    pythons = dict(part.split("=", 1) for part in given.python)
    given.own = {name: str(Path(path).resolve()) for name, path in (part.split("=", 1) for part in given.own)}
    with tempfile.TemporaryDirectory() as scratch, Facts(given, "trl") as facts:
        shape = shape_of(given.model)
        given.train = given.train or given.pairs or rows_of(given.lengths, Path(scratch))
        model = checkpoint_of(given.model, given.checkpoints or Path(scratch), seed=0).resolve()
        lengths = tokens_of(model, given.train, pairs=given.pairs is not None)
        mean = sum(lengths) / len(lengths)
        given.documents, given.mean = max(1, round(given.tokens / mean)), mean
        given.real_tokens = sum(lengths) * given.epochs
        name, given.model = given.model, str(model)
        given.train = given.train.resolve()
        given.pairs = given.train if given.pairs is not None else None
        given.held_out = None if shape is not None or given.held_out is None else given.held_out.resolve()
        facts |= {"model": Path(name).name, "train": given.train.name, "rows": len(lengths), "mean_tokens": mean}
        facts |= {name: getattr(given, name) for name in ("tokens", "micro_batches", "targets", "epochs")}
        facts["documents_a_batch"] = given.documents
        facts["skipped"] = []
        for one in list(given.only):
            if (module := missing(one, pythons.get(one, sys.executable))) is not None:
                facts["skipped"].append(f"{one}: {module} isn't installed")
                given.only.remove(one)

        def measure(one: str) -> dict[str, Any]:
            return candidate(one, given, pythons.get(one, sys.executable))

        done = parts.run_parts(facts, given, "", measure)
        done = {one: done[one] for one in given.only}
    print(json.dumps(facts["skipped"]))
    show([row(one, found) for one, found in done.items()], f"{facts['model']}, {facts['device']}")
    return bool(done) and all("error" not in found for found in done.values())


def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a candidate's row of the table."""
    if "error" in found:
        return {"candidate": name, "wall, s": found["error"]}
    marks, rate = found["marks_s"], found["tokens_per_s"]
    return {
        "candidate": name,
        "wall, s": f"{found['wall_s']:.1f}",
        "startup, s": f"{marks['imported']:.1f}",
        "first step, s": f"{marks['first step']:.1f}",
        "updates": found["steps"],
        "tokens/s": None if rate is None else f"{rate:,.0f}",
        "first loss": f"{found['losses'][0]:.4f}",
        "peak, GiB": f"{found['peak_bytes'] / 2**30:.1f}",
        "held-out loss": f"{found['held_out_loss']:.4f}" if "held_out_loss" in found else None,
    }


if __name__ == "__main__":
    run(arguments, main)
