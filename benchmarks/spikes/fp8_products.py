"""Spike: which scaled FP8 product is fast on this card, by rows or by blocks, for the shapes of an 8B layer.

    python benchmarks/spikes/fp8_products.py --out result.json

Each shape is timed hot: all shapes one after the other, forward and dX, as a layer's step has them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from pronghorn.device import device_name, versions

TOKENS = 8192
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""N and K of the merged products of Llama-3.1-8B."""
LIMIT = 448.0
E4M3 = torch.float8_e4m3fn


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [M, K], scales [M, 1])."""
    scales = (x.float().abs().amax(1, keepdim=True) / LIMIT).clamp(min=1e-12)
    return (x.float() / scales).to(E4M3), scales


def by_strips(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [M, K], scales [M, K/128] with the rows innermost, as the product wants them)."""
    parts = x.float().unflatten(1, (-1, 128))
    scales = (parts.abs().amax(2) / LIMIT).clamp(min=1e-12)
    codes = (parts / scales[:, :, None]).to(E4M3).flatten(1)
    return codes, scales.t().contiguous().t()


def by_squares(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [N, K], scales [N/128, K/128])."""
    parts = w.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = (parts.abs().amax((1, 3)) / LIMIT).clamp(min=1e-12)
    codes = (parts / scales[:, None, :, None]).to(E4M3).flatten(2, 3).flatten(0, 1)
    return codes, scales


def product(a: Tensor, b: Tensor, rule: str) -> Callable[[], Tensor]:
    """Return the call of a [M, K] times b [N, K] transposed by one rule."""
    if rule == "bf16":
        right = b.t()
        return lambda: a @ right
    if rule.startswith("rows"):
        (a8, sa), (b8, sb) = by_rows(a), by_rows(b)
        right, right_scale, fast = b8.t(), sb.t(), rule == "rows, fast"
        return lambda: torch._scaled_mm(a8, right, sa, right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    (a8, sa), (b8, sb) = by_strips(a), (by_squares(b) if "squares" in rule else by_strips(b))
    kind = ScalingType.BlockWise128x128 if "squares" in rule else ScalingType.BlockWise1x128
    right = b8.t()
    right_scale = sb.t()
    return lambda: scaled_mm(
        a8, right, sa, ScalingType.BlockWise1x128, right_scale, kind, output_dtype=torch.bfloat16, use_fast_accum=False
    )


def main() -> None:
    """Time every rule and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {"schema": "pronghorn-spike-v1", "spike": "scaled FP8 products by rule", "tokens": TOKENS}
    operands = []
    for name, (n, k) in SHAPES.items():
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        x = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(TOKENS, n, device="cuda", dtype=torch.bfloat16)
        operands += [(f"{name} forward", x, weight), (f"{name} dx", dy, weight.t().contiguous())]
    exact = {name: (a[:256].double() @ b.double().t()) for name, a, b in operands}
    rules = ["bf16", "rows, fast", "rows, exact", "strips by squares", "strips by strips"]
    calls: dict[str, list[tuple[str, Callable[[], Tensor]]]] = {}
    for rule in rules:
        try:
            made = [(name, product(a, b, rule)) for name, a, b in operands]
            errors = {
                name: ((call()[:256].double() - exact[name]).norm() / exact[name].norm()).item() for name, call in made
            }
            calls[rule], found[rule] = made, {"error": {k: round(v, 5) for k, v in errors.items()}}
        except Exception as error:
            found[rule] = {"failed": f"{type(error).__name__}: {error}"[:400]}
    del exact
    times: dict[str, list[list[float]]] = {rule: [] for rule in calls}
    for turn in range(12):
        for rule, made in calls.items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(made) + 1)]
            marks[0].record()
            for (_, call), mark in zip(made, marks[1:], strict=True):
                call()
                mark.record()
            torch.cuda.synchronize()
            if turn > 2:
                times[rule].append([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])
    operations = sum(2 * TOKENS * n * k for n, k in SHAPES.values()) * 2
    for rule, every in times.items():
        each = [statistics.median(column) for column in zip(*every, strict=True)]
        found[rule] |= {"ms": {name: round(ms, 4) for (name, _), ms in zip(calls[rule], each, strict=True)}}
        found[rule] |= {"layer_ms": round(sum(each), 3), "tflops": round(operations / sum(each) / 1e9, 1)}
    found |= {"device": device_name(), "versions": versions(), "commit": given.commit}
    found |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
