"""Does it matter which documents share an update? Held-out loss after an epoch, by how documents are put into batches.

    python -m benchmarks.fair_rows --model FOLDER --train dolly_3k.json --held-out instruction-data.json --out FILE

`fair` are rows as `pack` makes them, `longest first` rows of best-fit decreasing, both of `--tokens` tokens, and
`padded` about as many batches of equally many documents, drawn at random. An update is one of them. All else is equal:
every weight is trained, or LoRA's with `--rank`, by plain transformers in float32, each document by itself, from the
same weights, by AdamW with a rate that falls to 0, the loss averaged over an update's supervised tokens. One seed
decides the documents' order for all three. Held out are `--held-out`'s first rows, and some of `--train`'s own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.candidates.trainers import read_rows
from benchmarks.program import parser_of, run, show
from benchmarks.record import check_out
from pronghorn.data import packing
from pronghorn.device import device_name, versions

SCHEMA = "pronghorn-fair-rows-v1"
MICRO_BATCH = 8192
"""Tokens, padding too, that go through the model at a time."""
Tokens = tuple[list[int], int]
"""A document's tokens, and how many of them are its prompt's."""
Way = Callable[[list[int], int, int], list[list[int]]]


def longest_first(lengths: list[int], tokens: int, seed: int) -> list[list[int]]:
    """Pack rows by best-fit decreasing, and bring them into any order."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows = packing.longest_first(lengths, tokens, order)
    random.Random(seed).shuffle(rows)
    return rows


def padded(lengths: list[int], tokens: int, seed: int) -> list[list[int]]:
    """Draw batches of equally many documents, and no more of them than rows; the last may be smaller."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    each = math.ceil(len(order) / len(packing.pack(lengths, tokens, seed)))
    return [order[at : at + each] for at in range(0, len(order), each)]


WAYS: dict[str, Way] = {"fair": packing.pack, "longest first": longest_first, "padded": padded}


def documents(file: Path, tokenizer: Any, longest: int) -> list[Tokens]:
    """Read a file's rows; prompts that leave no room for an answer are left out."""
    found = []
    for row in read_rows(str(file)):
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        found.append(((prompt + answer + [tokenizer.eos_token_id])[:longest], len(prompt)))
    return [each for each in found if each[1] < len(each[0])]


def micro_batches(chosen: list[Tokens], device: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Pad documents of about one length together; give what the model takes, and labels."""
    chosen = sorted(chosen, key=lambda document: len(document[0]))
    while chosen:
        count = next(n for n in range(len(chosen), 0, -1) if n == 1 or n * len(chosen[n - 1][0]) <= MICRO_BATCH)
        part, chosen = chosen[:count], chosen[count:]
        width = len(part[-1][0])
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in part], device=device)
        places = torch.arange(width, device=device)
        lengths, prompts = (
            torch.tensor(each, device=device)[:, None] for each in ([len(t) for t, _ in part], [p for _, p in part])
        )
        real = places < lengths
        yield {"input_ids": ids, "attention_mask": real.long()}, ids.masked_fill(~real | (places < prompts), -100)


def loss_of(model: Any, chosen: list[Tokens], device: str, backward: bool = False) -> float:
    """Return the mean loss of the supervised tokens, and add its gradients if asked for."""
    supervised = sum(len(tokens) - prompt for tokens, prompt in chosen)
    total = 0.0
    for batch, labels in micro_batches(chosen, device):
        logits, target = model(**batch).logits[:, :-1], labels[:, 1:]
        loss = functional.cross_entropy(logits[target >= 0], target[target >= 0], reduction="sum") / supervised
        if backward:
            loss.backward()
        total += loss.item()
    return total


def train(given: argparse.Namespace, way: str, seed: int, tokenizer: Any, device: str) -> dict[str, Any]:
    """Train one epoch."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    begin, data = time.perf_counter(), documents(given.train, tokenizer, given.tokens)
    random.Random(0).shuffle(data)
    own, data = data[: given.held_rows], data[given.held_rows : given.rows]
    others = documents(given.held_out, tokenizer, given.tokens)[: given.held_rows]
    rows = WAYS[way]([len(tokens) for tokens, _ in data], given.tokens, seed)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device)
    if given.rank:
        model = get_peft_model(model, LoraConfig(r=given.rank, lora_alpha=given.rank, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.learning_rate, weight_decay=0.0)
    for step, row in enumerate(rows):
        optimizer.param_groups[0]["lr"] = given.learning_rate * (1 - step / len(rows))
        loss_of(model, [data[index] for index in row], device, backward=True)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = {"held_out": loss_of(model, others, device), "own": loss_of(model, own, device)}
    means = [statistics.mean(len(data[index][0]) for index in row) for row in rows]
    seconds = time.perf_counter() - begin
    return {"way": way, "seed": seed, "updates": len(rows), "spread": statistics.pstdev(means), **losses, "s": seconds}


def table(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say a way's means over the seeds, and by how much it differs from `padded` with the same seed."""
    rows = []
    for way in dict.fromkeys(part["way"] for part in parts):
        own = {part["seed"]: part for part in parts if part["way"] == way}
        other = {part["seed"]: part for part in parts if part["way"] == "padded"}
        row = {"way": way, "seeds": len(own), "updates": statistics.mean(part["updates"] for part in own.values())}
        row["spread of mean lengths"] = round(statistics.mean(part["spread"] for part in own.values()), 1)
        for name in ("held_out", "own"):
            row[name] = round(statistics.mean(part[name] for part in own.values()), 4)
            pairs = [own[seed][name] - other[seed][name] for seed in own if seed in other]
            row[f"{name} - padded"] = ", ".join(f"{pair:+.4f}" for pair in pairs)
        rows.append(row)
    return rows


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="with real weights")
    parser.add_argument("--train", type=Path, required=True, metavar="FILE")
    parser.add_argument("--held-out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rows", type=int, help="of --train to use; by default all")
    parser.add_argument("--held-rows", type=int, default=150, help="of both files to hold out")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row; longer documents are cut")
    parser.add_argument("--rank", type=int, default=0, help="of LoRA; by default every weight is trained")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    return parser


def main(given: argparse.Namespace) -> None:
    """Train in every way with every seed; the file is written after each."""
    from transformers import AutoTokenizer

    if given.out:
        check_out(given.out, SCHEMA)
    device, parts = "cuda" if torch.cuda.is_available() else "cpu", list[dict[str, Any]]()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    facts = {
        "schema": SCHEMA, "model": given.model.name, "train": given.train.name,
        "held out": given.held_out.name, "tokens": given.tokens, "rank": given.rank, "rate": given.learning_rate,
        "device": device_name(), "versions": versions(), "commit": given.commit,
    }  # fmt: skip
    for seed in range(given.seeds):
        for way in given.ways:
            parts.append(train(given, way, seed, tokenizer, device))
            print(f"{way}, seed {seed}: {parts[-1]}", flush=True)
            if given.out:
                given.out.write_text(json.dumps({**facts, "parts": parts}, indent=1), encoding="utf-8")
    show(table(parts), given.model.name)


if __name__ == "__main__":
    run(arguments, main)
