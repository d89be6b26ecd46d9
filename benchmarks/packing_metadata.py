"""What building packing metadata in every layer costs: `once` against `per_layer` and `per_layer_mask`.

One model with random weights of a named shape, LoRA on all linears, the same packed rows for each, interleaved in one
process (once, per_layer, per_layer_mask, once, ...). The gate comes first: loss and global gradient norm of each must
agree with transformers' own SDPA path in float32.

    python benchmarks/packing_metadata.py --shapes model_shapes.json --lengths lengths/alpaca_demo.json --out DIR
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pronghorn.bench.record import Result, Workload, command_line, measure_ceilings, write_results
from pronghorn.data.batch import Collator
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora

MODES = ("once", "per_layer", "per_layer_mask")
CONFIG_KEYS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "max_position_embeddings",
)


def build_model(shape: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{key: shape[key] for key in CONFIG_KEYS if shape.get(key) is not None})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = add_lora(model)
    with torch.no_grad():  # B starts at zero, which would leave every gradient of A at zero
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    return model.train()


def build_batches(lengths: list[int], tokens: int, vocab: int, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    batches = []
    for _ in range(count):
        row: list[int] = []
        while (room := tokens - sum(row)) > 0:
            row.append(min(rng.choice(lengths), room))
        ids = torch.randint(10, vocab, (tokens,), generator=torch.Generator().manual_seed(rng.randrange(2**30)))
        batch = Collator(tokens, 0)([{"input_ids": ids.tolist(), "labels": ids.tolist(), "lengths": row}])
        batches.append({name: value.to("cuda") for name, value in batch.items()})
    return batches


def loss_and_norm(model: Any, batch: dict[str, Any]) -> tuple[float, float]:
    loss = model(**batch).loss
    loss.backward()
    norm = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    return loss.item(), norm.item()


def gate(model: Any, shape: dict[str, Any], batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Loss and gradient norm of each mode against transformers' SDPA path in float32 on the same weights."""
    exact = build_model(shape, torch.float32)
    exact.load_state_dict(model.state_dict())
    stock = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    loss, norm = loss_and_norm(exact, {**stock, "use_cache": False})
    del exact
    gc.collect()
    torch.cuda.empty_cache()
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        attach(model, packing_metadata=mode)
        ours, ours_norm = loss_and_norm(model, batch)
        found[mode] = {
            "loss": ours,
            "loss_fp32": loss,
            "grad_norm": ours_norm,
            "grad_norm_fp32": norm,
            "green": abs(ours / loss - 1) < 2e-3 and abs(ours_norm / norm - 1) < 2e-2,
        }
    return found


def timed_step(model: Any, batch: dict[str, Any], optimizer: Any) -> tuple[float, float, float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    events[0].record()
    loss = model(**batch).loss
    events[1].record()
    loss.backward()
    events[2].record()
    optimizer.step()
    optimizer.zero_grad()
    events[3].record()
    events[3].synchronize()
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]), events[0].elapsed_time(events[3])


def count_synchronisations(model: Any, batch: dict[str, Any]) -> int:
    """Host waits in one forward and backward, as torch's own debug mode reports them."""
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        model(**batch).loss.backward()
        torch.cuda.set_sync_debug_mode("default")
    torch.set_warn_always(False)
    model.zero_grad()
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def count_launches(model: Any, batch: dict[str, Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(**batch).loss.backward()
        torch.cuda.synchronize()
    model.zero_grad()
    return sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="JSON with models by name, fields as in config.json")
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--lengths", type=Path, required=True, help="JSON list of document lengths to draw from")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    shape = json.loads(arguments.shapes.read_text())["models"][arguments.model]
    lengths = [n for n in json.loads(arguments.lengths.read_text()) if n <= arguments.tokens]

    ceilings = measure_ceilings()
    model = build_model(shape, torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    batches = build_batches(lengths, arguments.tokens, shape["vocab_size"], 4, seed=0)
    gates = gate(model, shape, batches[0])
    times: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    resting = torch.cuda.memory_allocated()
    peaks: dict[str, int] = dict.fromkeys(MODES, 0)
    for i in range(arguments.warmup + arguments.repeats):
        for mode in MODES:
            attach(model, packing_metadata=mode)
            batch = {name: value.to("cuda") for name, value in batches[i % 4].items()}  # nothing derived is kept on it
            torch.cuda.reset_peak_memory_stats()
            measured = timed_step(model, batch, optimizer)
            peaks[mode] = max(peaks[mode], torch.cuda.max_memory_allocated())
            if i >= arguments.warmup:
                times[mode].append(measured)

    results = []
    for mode in MODES:
        attach(model, packing_metadata=mode)
        parts = list(zip(*times[mode], strict=True))
        results.append(
            Result(
                command=command_line(),
                contender=f"pronghorn, packing_metadata={mode}",
                workload=Workload(
                    arguments.model, "lora r16, no recompute", arguments.tokens, arguments.lengths.name, 1.0, 0
                ),
                gate=gates[mode],
                timings_ms=dict(zip(("forward", "backward", "step"), map(list, parts), strict=True)),
                memory_bytes={"resting": resting, "peak": peaks[mode]},
                counts={
                    "launches": count_launches(model, batches[0]),
                    "syncs": count_synchronisations(model, batches[0]),
                },
                ceilings=ceilings,
                extra={"documents": [len(batch["packed"].lengths) for batch in batches]},
                commit=arguments.commit,
            )
        )
    write_results(results, arguments.out / f"packing-metadata-{arguments.model.lower()}.json")
    show(results)


def show(results: list[Result]) -> None:
    table = Table(title=f"{results[0].workload.shape}, {results[0].workload.tokens} tokens, {results[0].device}")
    for column in ("packing_metadata", "gate", "forward ms", "backward ms", "step ms (min to max)", "step", "syncs"):
        table.add_column(column)
    base = results[0].median("step")
    for result in results:
        steps = result.timings_ms["step"]
        green = result.gate["green"]
        table.add_row(
            result.contender.split("=")[1],
            "green" if green else "RED",
            f"{result.median('forward'):.1f}",
            f"{result.median('backward'):.1f}",
            f"{statistics.median(steps):.1f} ({min(steps):.1f} to {max(steps):.1f})",
            f"{result.median('step') / base:.3f} x" if green and results[0].gate["green"] else "withheld",
            str(result.counts["syncs"]),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
