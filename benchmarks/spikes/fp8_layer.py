"""Spike: one Llama-3.1-8B layer whose frozen products run in FP8, through `WeightSource`, timed against bf16.

    python benchmarks/spikes/fp8_layer.py --out result.json

Forward and dX are `torch._scaled_mm` with a scale a row; weights are quantised once, in the two layouts that the
products need; activations in a pass of their own (a kernel that makes them anyway would save it). LoRA stays in bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.data.batch import Collator
from pronghorn.device import device_name, versions
from pronghorn.layers.block import Block
from pronghorn.layers.decoder import RUN
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from pronghorn.precision.source import Activation, Lifetime, LowRankGrad, WeightSource

LIMIT = torch.finfo(torch.float8_e4m3fn).max


@triton.jit
def _quantise(x_ptr, codes_ptr, scales_ptr, K, stride, BLOCK: tl.constexpr):
    """x [T, K] -> e4m3 codes [T, K] and float32 scales [T]: a program a row, read twice (the second time from L2)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * stride + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
    scale = tl.maximum(tl.max(most, 0), 1e-12) / 448.0
    tl.store(scales_ptr + row, scale)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * stride + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
        tl.store(codes_ptr + row * K + start + cols, (x / scale).to(tl.float8e4nv), mask=start + cols < K)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [T, K] in e4m3, scales [T, 1]) of x [T, K]."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    _quantise[(len(x),)](x, codes, scales, x.shape[1], x.stride(0), BLOCK=2048, num_warps=8)
    return codes, scales


class FP8Source(WeightSource):
    """W [N, K] as e4m3 with a scale a row, for x Wᵀ, and again transposed, for dy W."""

    lifetime = Lifetime.RESIDENT

    def __init__(self, weight: Tensor) -> None:
        self._codes, self._scales = quantise(weight)  # [N, K]: a scale for each output
        self._back, self._back_scales = quantise(weight.t().contiguous())  # [K, N]: a scale for each input

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        codes, scales = quantise(x.dense) if x.codes is None or x.scales is None else (x.codes, x.scales)
        return torch._scaled_mm(
            codes, self._codes.t(), scales, self._scales.t(), bias=bias, out_dtype=x.dense.dtype, use_fast_accum=True
        )

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        codes, scales = quantise(dy.dense) if dy.codes is None or dy.scales is None else (dy.codes, dy.scales)
        dx = torch._scaled_mm(
            codes, self._back.t(), scales, self._back_scales.t(), out_dtype=dy.dense.dtype, use_fast_accum=True
        )
        return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)


def main() -> None:
    """Time the layer with both sources, and compare outputs and gradients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    tokens, layers = 8192, 4
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=layers, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=4096, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model = add_lora(model.to(torch.bfloat16), r=16, lora_alpha=16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    attach(model.train(), Plan.keep(), graph="off")
    base = model.get_base_model().model
    lengths = [178] * (tokens // 178) + [tokens % 178]
    ids = torch.randint(10, 1000, (tokens,)).tolist()
    row = Collator(tokens, 0)([{"input_ids": ids, "labels": list(ids), "lengths": lengths}])
    row = {key: row[key].to("cuda") for key in ("input_ids", "position_ids", "packed")}
    trained = [p for p in model.parameters() if p.requires_grad]
    base(**row, use_cache=False)  # builds the blocks
    linears = [
        linear
        for layer in base.layers
        for block in layer.__dict__[RUN].blocks
        if isinstance(block, Block)
        for linear in block.linears
    ]
    dense = [linear.source for linear in linears]
    fp8 = [FP8Source(linear.source.weight) for linear in linears]  # type: ignore[attr-defined]
    seed = torch.randn(1, tokens, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, list[Tensor]]:
        out = base(**row, use_cache=False).last_hidden_state
        return out, list(torch.autograd.grad(out, trained, seed))

    def timed() -> tuple[float, float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(12)]
        for start, middle, end in marks:
            start.record()
            out = base(**row, use_cache=False).last_hidden_state
            middle.record()
            torch.autograd.grad(out, trained, seed)
            end.record()
        torch.cuda.synchronize()
        forward = statistics.median(a.elapsed_time(b) for a, b, _ in marks[3:])
        return forward / layers, statistics.median(b.elapsed_time(c) for _, b, c in marks[3:]) / layers

    found: dict[str, Any] = {"schema": "pronghorn-spike-v1", "spike": "one 8B layer, FP8 by rows"}
    results, times = {}, {}
    for turn in range(3):
        for name, sources in (("bf16", dense), ("fp8", fp8)):
            for linear, source in zip(linears, sources, strict=True):
                linear.source = source
            if turn == 0:
                results[name] = step()
            times.setdefault(name, []).append(timed())
    for name, every in times.items():
        found[name] = {"forward_ms": [round(f, 3) for f, _ in every], "backward_ms": [round(b, 3) for _, b in every]}
    totals = {name: statistics.median(f + b for f, b in every) for name, every in times.items()}
    found["layer_ms"], found["ratio"] = totals, totals["bf16"] / totals["fp8"]

    def distance(a: Tensor, b: Tensor) -> float:
        return ((a.float() - b.float()).norm() / b.float().norm()).item()

    found["relative error of the output"] = distance(results["fp8"][0], results["bf16"][0])
    pairs = list(zip(results["fp8"][1], results["bf16"][1], strict=True))
    found["relative error of adapters' gradients, median"] = statistics.median(distance(a, b) for a, b in pairs)
    found |= {"device": device_name(), "versions": versions(), "commit": given.commit}
    found |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
