"""What the three changes are worth, each alone and together, through Pronghorn's trainer on layers that are otherwise
equal.

    python -m benchmarks.ablation --out ablation.json
    python -m benchmarks.ablation --only qwen3-0.6b gpt-oss-20b --steps 100 --out ablation.json

`none` is, switch by switch, what a stock stack does:
    metadata   bounds of documents made again in every layer from `position_ids`, with a wait for the device: what
               transformers' `modeling_flash_attention_utils._prepare_from_posids` does
    buffers    an offloaded input comes back when its own layer is next, through one buffer: what TRL's
               `models.activation_offloading.OffloadActivations` does at unpack
    grouping   a loop over experts, each picking its tokens by `torch.where`: transformers' eager experts
               (`integrations.moe`)
Attention, layers (transformers' and PEFT's), loss, rows, adapters and optimiser are the same in all variants; `fused`,
below the line, is Pronghorn as it comes, with layers of its own. A model's variants run in one process, on one model,
from the same adapters, each for `--steps` steps, one row a step: their losses must coincide. `none, again` comes last
of them: what it saves is the machine's drift. A part that its limit ends goes on with the variants it lacks when the
same command runs again, on the same machine: 8B's six take 18 minutes of an H200.

Beside what was measured stand the formulas: (L − 1) · s, s being what one layer's metadata take in a loop of its own,
and (L − 1) · min(c, g), with a layer's copy c and backward g by events on the streams. Where a change saves nothing,
the table shows that: what is left to save depends on how much else a step waits for.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import parts
from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    shape: str
    method: str = "lora"
    """lora, qlora, or mxfp4, as in `benchmarks.records`."""
    offloads: bool = False
    recomputes: bool = False
    """Layers are, since transformers' keep too much."""


CASES = {
    "qwen3-0.6b": Case("Qwen3-0.6B"),
    "llama-3.2-1b": Case("Llama-3.2-1B"),
    "llama-3.1-8b": Case("Llama-3.1-8B", offloads=True),
    "qwen3-14b-nf4": Case("Qwen3-14B", "qlora", offloads=True),
    "gpt-oss-20b": Case("gpt-oss-20b", recomputes=True),
    "tiny": Case("tiny", offloads=True),
    "tiny-moe": Case("tiny-moe"),
    "tiny-gpt-oss": Case("tiny-gpt-oss", recomputes=True),
}
"""The last ones try the program."""
SWITCHES = ("metadata", "buffers", "grouping")
WARM = 0.4
"""Share of the steps, at the start, whose times don't count."""
SHORTEST = 64
"""Tokens of the shortest document: without shorter ones packing finds the same number of rows, all nearly full."""
COINCIDE = 0.005
"""The most that a loss may be off, as a share: rounding in 16 bits, after as many updates."""


def variants_of(case: Case, has_experts: bool) -> dict[str, frozenset[str]]:
    """Return the changes that each variant has, of those that the case can have."""
    can = [name for name in SWITCHES if {"buffers": case.offloads, "grouping": has_experts}.get(name, True)]
    alone = {name: frozenset([name]) for name in can} if len(can) > 1 else {}
    ends = {"none, again": frozenset[str](), "fused": frozenset(can)}
    return {"none": frozenset(), **alone, "all": frozenset(can), **ends}


def part(name: str, given: Any) -> dict[str, Any]:
    """Measure one case: every variant, then the formulas' terms."""
    import torch

    from benchmarks.candidates.base import has_experts
    from benchmarks.records import build
    from pronghorn.memory.plan import Plan
    from pronghorn.models.attach import attach, attached
    from pronghorn.parity.parameters import trainable

    case = CASES[name]
    model = build(case.shape, case.method)
    start = {key: p.detach().clone() for key, p in trainable(model).items()}
    routed, layers = has_experts(model.config.to_dict()), model.config.num_hidden_layers
    found: dict[str, Any] = {"shape": case.shape, "method": case.method, "layers": layers}
    found |= {"steps": given.steps, "tokens": given.tokens, "variants": {}}
    found |= measured_before(given.before, found)
    for variant, changes in variants_of(case, routed).items():
        if variant in found["variants"]:
            continue
        plan = Plan.offload(2 if "buffers" in changes else 1) if case.offloads else Plan.asked(case.recomputes)
        experimental = {"packing_metadata": "once" if "metadata" in changes else "per_layer"}
        if routed:
            experimental["moe_routing"] = "once" if "grouping" in changes else "loop"
        way = {"layers": "stock", "graph": "off"} if variant != "fused" else {"layers": "fused"}
        handle = attach(model, plan, **way, experimental=experimental)
        with torch.no_grad():
            for key, parameter in trainable(model).items():
                parameter.copy_(start[key])
        try:
            found["variants"][variant] = {"changes": sorted(changes), **train(model, given)}
            if variant == "all":
                found["predicted"] = predicted(model, handle, case, given)
        except torch.OutOfMemoryError as error:
            found["variants"][variant] = {"changes": sorted(changes), "error": str(error).split(". ")[0]}
        given.keep(found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    current = attached(model)
    if current is not None:
        current.detach()
    found["gate"] = judge(found["variants"])
    return found


def measured_before(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what a part that was ended had of the same steps: its variants, but those that failed, and its terms."""
    if any(before.get(name) != found[name] for name in ("shape", "steps", "tokens")):
        return {}
    whole = {name: one for name, one in before["variants"].items() if "error" not in one}
    terms = {"predicted": before["predicted"]} if "predicted" in before else {}
    return {"variants": whole, **terms}


def documents_of(model: Any, tokens: int) -> list[tuple[int, ...]]:
    """Return the ids of log-normal documents, to be packed into rows of `tokens`."""
    from benchmarks.workload import make_rows

    rows = make_rows(tokens, "lognormal", 1.0, model.config.vocab_size, seed=0)
    return [row.input_ids[a:b] for row in rows for a, b in row.bounds if b - a >= SHORTEST]


def train(model: Any, given: Any) -> dict[str, Any]:
    """Train so many steps through the trainer; return losses, the median step and the peak."""
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig

    from benchmarks.timing import CudaClock, HostClock
    from pronghorn.diagnose.shapes import byte_tokenizer
    from pronghorn.train.trainer import SFTTrainer

    cuda = torch.cuda.is_available()
    clock: Any = CudaClock() if cuda else HostClock()
    documents = documents_of(model, given.tokens)
    marks: list[Any] = []

    class Marks(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(clock.mark())

    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, packing=True, max_length=given.tokens, per_device_train_batch_size=1,
            max_steps=given.steps, learning_rate=1e-4, logging_steps=1, gradient_checkpointing=False, bf16=False,
            save_strategy="no", report_to="none", disable_tqdm=True, seed=0, use_cpu=not cuda,
        )  # fmt: skip
        trainer = SFTTrainer(
            model,
            config,
            train_dataset=Dataset.from_list([{"input_ids": list(ids), "labels": list(ids)} for ids in documents]),
            tokenizer=byte_tokenizer(given.tokens),
            callbacks=[Marks()],
        )
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        marks.append(clock.mark())
    times = clock.milliseconds(marks)[int(WARM * given.steps) :]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"step_ms": statistics.median(times), "steps_ms": times, "losses": losses, "peak_bytes": peak}


def predicted(model: Any, handle: Any, case: Case, given: Any) -> dict[str, float]:
    """Return the terms of the formulas and what they predict, in milliseconds."""
    import torch

    from benchmarks.program import packed_batches
    from pronghorn.models.metadata import stock_batch

    [batch, *_] = packed_batches(model, given.tokens, seed=0)
    between = model.config.num_hidden_layers - 1
    given_ids = {"position_ids": batch["position_ids"]}
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        stock_batch(given_ids)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    s = statistics.median(seconds) * 1e3
    found = {"s_ms": s, "metadata_ms": between * s}
    engine = handle.offload_engine
    if case.offloads and engine is not None:
        engine.timed = True
        model(**batch).loss.backward()
        model.zero_grad()
        timings = [timing for timing in engine.timings() if timing.copy_ms]
        engine.timed = False
        if timings:
            c, g = (statistics.median(getattr(t, name) for t in timings) for name in ("copy_ms", "compute_ms"))
            found |= {"c_ms": c, "g_ms": g, "buffers_ms": between * min(c, g)}
    return found


def judge(variants: dict[str, Any]) -> dict[str, Any]:
    """Judge whether all variants lose the same, step by step."""
    ran = {name: one["losses"] for name, one in variants.items() if "losses" in one}
    first = ran.get("none", [])
    off = {
        name: max((abs(a - b) / abs(b) for a, b in zip(one, first, strict=False)), default=1.0)
        for name, one in ran.items()
    }
    return {
        "losses off by": off,
        "most": COINCIDE,
        "green": bool(off) and all(each <= COINCIDE for each in off.values()),
    }


def rows_of(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a case's rows of the table: each variant's saving against none, and what the formulas say."""
    none = found["variants"]["none"].get("step_ms", 0.0)
    rows: list[dict[str, Any]] = []
    for variant, one in found["variants"].items():
        if "error" in one:
            rows.append({"model": name, "variant": variant, "step, ms": one["error"]})
            continue
        saved = none - one["step_ms"]
        terms = {change: found.get("predicted", {}).get(f"{change}_ms") for change in one["changes"]}
        known = [term for term in terms.values() if term is not None]
        without = "".join(f" + {change}, not predicted" for change, term in terms.items() if term is None)
        told = f"{sum(known):,.1f}{without}" if known else None
        green = found["gate"]["green"]
        rows.append(
            {
                "model": name,
                "variant": variant,
                "step, ms": f"{one['step_ms']:,.1f}" if green else "withheld: losses differ",
                "saved, ms": f"{saved:,.1f} ({saved / none:.1%})" if green and none else None,
                "predicted, ms": told if variant != "fused" else None,
                "peak, GiB": f"{one['peak_bytes'] / 2**30:.2f}",
                "last loss": f"{one['losses'][-1]:.4f}",
            }
        )
    return rows


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of a packed row, one row a step")
    parser.add_argument("--steps", type=int, default=40, help="of each variant; the issue's figure is of 100")
    parts.add_arguments(parser, list(CASES), limit_s=400)
    parser.set_defaults(only=[name for name in CASES if not name.startswith("tiny")])
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure the cases; tell whether all ran and their losses coincide."""
    with Facts(given, "trl") as facts:
        done = parts.run_parts(facts, given, "benchmarks.ablation")
        done = {name: done[name] for name in given.only}
    whole = {name: found for name, found in done.items() if "error" not in found}
    show([row for name, found in whole.items() for row in rows_of(name, found)], str(facts["device"]))
    return len(whole) == len(done) and all(found["gate"]["green"] for found in whole.values())


if __name__ == "__main__":
    run(arguments, main)
