"""Layers of Llama-3.1-8B's shape by base and compute: milliseconds a layer, gradients, and the kernels below.

    python -m benchmarks.precision --out result.json

A base is bf16 or NF4, a compute the model's dtype or FP8. Each pair is timed by turns with the others; gradients are
compared with the same layers in float32. "bf16 written out" has no codes beside its weights: they are written out for
each product, as a plan may have it and as of layers that processes share.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from pronghorn.data.batch import Collator
from pronghorn.device import device_name, versions
from pronghorn.kernels import nf4, quantise
from pronghorn.memory.plan import Codes, Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from pronghorn.precision.fp8 import row_scales

SCHEMA = "pronghorn-precision-v1"
TOKENS, WRITTEN_OUT = 8192, "bf16 written out"
PAIRS = [
    *(("bf16", compute) for compute in ("dtype", "fp8", "fp8_both", "fp8_exact", "int8")),
    (WRITTEN_OUT, "fp8"),
    *(("nf4", compute) for compute in ("dtype", "fp8", "fp8_both", "int8")),
]


def median_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median milliseconds of a call, by events."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def kernels() -> dict[str, Any]:
    """Check and time what quantises and writes out, against the bytes they move."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    results: dict[str, Any] = {}

    whole = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    copied = 2 * whole.nbytes / median_ms(whole.clone)
    del whole

    def entry(name: str, call: Callable[[], Any], moved: float, right: bool) -> None:
        ms = median_ms(call)
        results[name] = {"ms": round(ms, 4), "of_copy": round(moved / copied / ms, 3), "right": right}

    torch.manual_seed(0)
    for columns in (4096, 14336, 28672):
        x = torch.randn(TOKENS, columns, device="cuda", dtype=torch.bfloat16)
        x[0], x[1, 3], x[2, 5], x[3, :2] = 0.0, float("inf"), float("nan"), 1e30
        factors = torch.rand(columns, device="cuda").bfloat16() + 0.5
        for c in (None, factors):
            codes, scales = quantise.quantise_rows(x, c)
            want, want_scales = quantise.quantise_rows_reference(x, c)
            same = torch.equal(codes.float().nan_to_num(-1.0), want.float().nan_to_num(-1.0))
            same &= torch.equal(scales.nan_to_num(-1.0), want_scales.nan_to_num(-1.0))
            name = f"quantise [{TOKENS}, {columns}]" + (" by columns" if c is not None else "")
            entry(name, lambda x=x, c=c: quantise.quantise_rows(x, c), 3 * x.numel(), same)
    for rows, columns in ((4096, 4096), (14336, 4096), (4096, 14336)):
        base = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02
        weight = Params4bit(base, quant_type="nf4").to("cuda")
        source = nf4.NF4Weight.of(weight)
        size, shape = base.numel(), f"[{rows}, {columns}]"
        out, want = torch.empty_like(base), torch.empty_like(base)
        nf4.write_out(source, out)
        dequantize_4bit(weight.data, weight.quant_state, out=want)
        same = torch.equal(out, want)
        entry(f"write out {shape}", lambda s=source, o=out: nf4.write_out(s, o), size * 2.516, same)
        other = f"bitsandbytes writes out {shape}"
        entry(other, lambda w=weight, o=want: dequantize_4bit(w.data, w.quant_state, out=o), size * 2.516, True)
        inverse = 1 / source.row_scales()
        for across in (False, True):
            made = torch.empty((columns, rows) if across else (rows, columns), dtype=quantise.DTYPE, device="cuda")
            nf4.write_codes(source, inverse, made, across)
            again = torch.empty_like(made)
            nf4.write_codes_reference(source, inverse, again, across)
            same = torch.equal(made.float(), again.float())
            name = f"write codes {shape}" + (" across" if across else "")
            call = lambda s=source, c=inverse, m=made, a=across: nf4.write_codes(s, c, m, a)  # noqa: E731
            entry(name, call, size * 1.516, same)
        inverse = 1 / row_scales(base)
        made, again = (torch.empty(columns, rows, dtype=quantise.DTYPE, device="cuda") for _ in range(2))
        quantise.write_codes_across(base, inverse, made)
        quantise.write_codes_across_reference(base, inverse, again)
        same = torch.equal(made.float(), again.float())
        call = lambda b=base, c=inverse, m=made: quantise.write_codes_across(b, c, m)  # noqa: E731
        entry(f"write codes of bf16 {shape} across", call, size * 3, same)
        eight = quantise.quantise_rows(base)[0]
        same = torch.equal(quantise.transposed(eight).float(), eight.float().t())
        entry(f"transpose {shape}", lambda e=eight: quantise.transposed(e), 2 * size, same)
    return results


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the model that is timed")
    return parser


def main(given: argparse.Namespace) -> None:
    """Print and write one JSON object."""
    check_out(given.out, SCHEMA)
    result: dict[str, Any] = {"schema": SCHEMA, "tokens": TOKENS, "layers": given.layers}
    result["kernels"] = kernels()
    result["by base and compute"] = layers(given.layers)
    result |= {"device": device_name(), "versions": versions(), "commit": given.commit}
    result |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


def layers(count: int) -> dict[str, Any]:
    """Time a model of so many layers for each pair, and compare its gradients with float32's."""
    lengths = [178] * (TOKENS // 178) + [TOKENS % 178]
    ids = torch.randint(10, 1000, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    row = Collator(TOKENS, 0)([{"input_ids": ids, "labels": list(ids), "lengths": lengths}])
    row = {key: row[key].to("cuda") for key in ("input_ids", "position_ids", "packed")}
    seed = torch.randn(1, TOKENS, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    results: dict[str, Any] = {}
    exact = one(count, "bf16", "dtype", row, seed, torch.float32)[1]
    for base, compute in PAIRS:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times, gradients = one(count, base, compute, row, seed, torch.bfloat16)
        cosines = [
            torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()
            for a, b in zip(gradients, exact, strict=True)
        ]
        results[f"{base}, {compute}"] = {
            "forward_ms": round(times[0] / count, 3),
            "backward_ms": round(times[1] / count, 3),
            "layer_ms": round(sum(times) / count, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "cosine of gradients, least": round(min(cosines), 5),
            "cosine of gradients, median": round(statistics.median(cosines), 5),
        }
    return results


def one(
    count: int, base: str, compute: str, row: dict[str, Any], seed: Tensor, dtype: torch.dtype
) -> tuple[tuple[float, float], list[Tensor]]:
    """Return ((forward, backward) in ms, the adapters' gradients) of one model; its weights are the same each time."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=count, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=4096, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model = model.to(dtype)
    if base == "nf4":
        to_nf4(model)
    model = add_lora(model, r=16, lora_alpha=16)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_" in name:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.01
                parameter.copy_(drawn)
    codes: Codes = "written" if base == WRITTEN_OUT else "auto"
    attach(model.train(), Plan.keep(), graph="off", compute=compute, codes=codes)
    backbone = model.get_base_model().model
    trained = [p for p in model.parameters() if p.requires_grad]
    seed = seed.to(dtype)

    def forward() -> Tensor:
        return backbone(**row, use_cache=False).last_hidden_state

    gradients = [g.cpu() for g in torch.autograd.grad(forward(), trained, seed)]
    if dtype is torch.float32:
        return (0.0, 0.0), gradients
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(12)]
    for start, middle, end in marks:
        start.record()
        out = forward()
        middle.record()
        torch.autograd.grad(out, trained, seed)
        end.record()
    torch.cuda.synchronize()
    ahead = statistics.median(a.elapsed_time(b) for a, b, _ in marks[3:])
    return (ahead, statistics.median(b.elapsed_time(c) for _, b, c in marks[3:])), gradients


def to_nf4(model: Any) -> None:
    """Put bitsandbytes' 4-bit linears into the layers."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is torch.nn.Linear:
                new = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
                new.weight = Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                setattr(module, name, new.to(linear.weight.device))
    model.is_loaded_in_4bit = True


if __name__ == "__main__":
    run(arguments, main)
