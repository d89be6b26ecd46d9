"""Whole models on one GPU: tokens a second of a training step, planned, against what each is asked for.

    python -m benchmarks.records --out records.json
    python -m benchmarks.records --only qwen3-30b-a3b --out records.json

Weights are random and made on the GPU, layer by layer where they are in 4 bits, so that neither disk nor host holds
them. LoRA r16, AdamW, packed rows of log-normal documents, the plan that `auto` makes. Before the clock counts the
first step's loss is near ln(vocabulary), and every trained tensor has a finite gradient that isn't zero: that a model
trains, and not that its gradients are right, which `benchmarks.step` shows on fewer layers.
"""

from __future__ import annotations

import argparse
import gc
import math
from dataclasses import asdict, dataclass
from traceback import clear_frames
from typing import Any

from benchmarks import parts
from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts


@dataclass(frozen=True)
class Record:
    """What is measured, and the least that is asked for."""

    shape: str
    method: str
    """lora, lora+experts, qlora, or the format of a published checkpoint: mxfp4, fp8 or nvfp4."""
    least: int
    """Tokens a second on one H200; 0: no rate is asked for."""
    compute: str = "dtype"
    """In what frozen weights multiply, as `attach` takes it."""


RECORDS = {
    "qwen3-30b-a3b": Record("Qwen3-30B-A3B", "lora", 26_000),
    "qwen3-30b-a3b-experts": Record("Qwen3-30B-A3B", "lora+experts", 22_000),
    "gpt-oss-20b": Record("gpt-oss-20b", "lora", 30_000),
    "gpt-oss-20b-mxfp4": Record("gpt-oss-20b", "mxfp4", 20_000),
    "llama-3.3-70b-nf4": Record("Llama-3.3-70B", "qlora", 1_850),
    "llama-3.3-70b-nf4-fp8": Record("Llama-3.3-70B", "qlora", 0, "fp8"),
    "llama-3.3-70b-nf4-fp8-both": Record("Llama-3.3-70B", "qlora", 3_000, "fp8_both"),
    "llama-3.3-70b-nf4-int8": Record("Llama-3.3-70B", "qlora", 3_000, "int8"),
    "qwen3.5-27b": Record("Qwen3.5-27B", "lora", 0),
    "llama-3.1-8b-published-fp8": Record("Llama-3.1-8B", "fp8", 0),
    "llama-3.1-8b-published-fp8-in-fp8": Record("Llama-3.1-8B", "fp8", 0, "fp8"),
    "qwen3-32b-published-nvfp4": Record("Qwen3-32B", "nvfp4", 0),
    "tiny": Record("tiny", "lora", 0),
    "tiny-moe": Record("tiny-moe", "lora+experts", 0),
    "tiny-nf4": Record("tiny", "qlora", 0),
    "tiny-fp8": Record("tiny", "lora", 0, "fp8_both"),
    "tiny-published-fp8": Record("tiny", "fp8", 0),
    "tiny-published-nvfp4": Record("tiny", "nvfp4", 0),
}
"""The last ones try the program."""


def build(shape: str, method: str) -> Any:
    """Make a model with random weights on the device, ready to train: with adapters, or in float32 for `full`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.candidates.base import TARGETS, device, has_experts, set_adapters
    from pronghorn.diagnose.shapes import shape_of
    from pronghorn.models.lora import add_lora

    if method in ("mxfp4", "fp8", "nvfp4"):
        from benchmarks.plan import load

        return load(shape, method, None)
    fields: Any = shape_of(shape)
    torch.manual_seed(0)
    if method == "full":
        with torch.device(device()):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).train()
    if method == "qlora":
        model = in_4_bits(fields)
    else:
        with torch.device(device()):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if method.endswith("+experts") else None
    targets = TARGETS[:4] if has_experts(fields) else TARGETS
    model = add_lora(model, target_modules=list(targets), target_parameters=experts)
    set_adapters(model, seed=0)
    return model.train()


def in_4_bits(fields: dict[str, Any]) -> Any:
    """Make a model whose linears in layers are NF4 by bitsandbytes, each quantised as soon as it was made."""
    import bitsandbytes as bnb
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    from benchmarks.candidates.base import device

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": device()}
    for path, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, name = path.rpartition(".")
            quantised = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                device="meta",
            )  # fmt: skip
            numbers = torch.empty(linear.weight.shape, **made).normal_(0, 0.02)
            weight = bnb.nn.Params4bit(numbers, requires_grad=False, compress_statistics=True, quant_type="nf4")
            quantised.weight = weight.to(device())
            setattr(model.model.layers.get_submodule(parent), name, quantised)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                value = torch.empty(parameter.shape, **made)
                value = value.fill_(1) if parameter.dim() == 1 else value.normal_(0, 0.02)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
    with torch.device(device()):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.tie_weights()
    model.is_loaded_in_4bit = model.is_quantized = True
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model.hf_quantizer = AutoHfQuantizer.from_config(model.config.quantization_config)  # trainers ask for it
    return model


def judge(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Judge a first step."""
    loss = model(**batch).loss
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dead = [name for name, p in trained.items() if p.grad is None or not (p.grad.isfinite().all() and p.grad.any())]
    model.zero_grad()
    wanted, value = math.log(model.config.vocab_size), float(loss)
    dead = [name for name in dead if ".experts." not in name]  # one that no token chose has none
    green = abs(value - wanted) < 0.25 * wanted and not dead
    return {"loss": value, "ln(vocabulary)": wanted, "dead": dead, "trained": len(trained), "green": green}


def part(name: str, given: Any) -> dict[str, Any]:
    """Measure one record."""
    import torch

    from benchmarks.plan import measure
    from benchmarks.program import packed_batches
    from pronghorn.device import graph_bytes
    from pronghorn.memory.plan import Plan
    from pronghorn.models.attach import attach
    from pronghorn.models.auto_plan import plan_for, smaller_plan

    record, cuda = RECORDS[name], torch.cuda.is_available()
    model = build(record.shape, record.method)
    handle = attach(model, Plan.keep(), layers="auto" if cuda else "fused", compute=record.compute)
    made = plan_for(model, given.tokens, accumulates=False) if cuda else Plan.keep()
    batches = packed_batches(model, given.tokens, seed=0)
    found: dict[str, Any] = {**asdict(record), "ran_out_under": []}
    while True:
        handle.replan(made)  # planned once attached, since products in 8 bits take their memory by then
        try:
            found["gate"] = judge(model, batches[0])
            peak, milliseconds = measure(model, batches, autocast=False) if cuda else (0, 0.0)
            break
        except torch.OutOfMemoryError as error:  # as the trainer goes on; its frames hold a step's tensors
            clear_frames(error.__traceback__)
        found["ran_out_under"].append(dict(made.predicted))
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        less = smaller_plan(model, given.tokens, made, accumulates=False)
        assert less is not None, "nothing fits"
        made = less
    found |= {"policies": sorted({str(policy) for policy in made.policies}), "mlp_rows": made.mlp_rows}
    if cuda:
        found |= {"peak_bytes": peak + graph_bytes(), "predicted": dict(made.predicted), "step_ms": milliseconds}
        found |= {"tokens_per_s": given.tokens / milliseconds * 1e3}
    found["paths"] = [f"{path.part}: {path.path} ({path.why})" for path in handle.report]
    return found


def is_met(found: dict[str, Any]) -> bool:
    """Tell whether a record's gate is green and it is as fast as is asked; without a GPU, the gate alone."""
    return "error" not in found and found["gate"]["green"] and found.get("tokens_per_s", math.inf) >= found["least"]


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of a packed row, one row a step")
    parts.add_arguments(parser, list(RECORDS), limit_s=420)
    parser.set_defaults(only=[name for name in RECORDS if not name.startswith("tiny")])
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure the records; tell whether all are met."""
    with Facts(given) as facts:
        found = parts.run_parts(facts, given, "benchmarks.records")
        found = {name: found[name] for name in given.only}
    rows = [
        {
            "record": name,
            "tokens/s": f"{one['tokens_per_s']:,.0f}" if "tokens_per_s" in one else None,
            "asked": f"{RECORDS[name].least:,}",
            "step, ms": f"{one['step_ms']:,.1f}" if "step_ms" in one else None,
            "peak, GiB": f"{one['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in one else None,
            "met": is_met(one),
            "error": one.get("error"),
        }
        for name, one in found.items()
    ]
    show(rows, str(facts["device"]))
    return all(map(is_met, found.values()))


if __name__ == "__main__":
    run(arguments, main)
