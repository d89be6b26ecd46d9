"""The parts of a mixture-of-experts layer, each against other ways of doing it, and the whole against transformers'.

Random weights of Qwen3-30B-A3B's and gpt-oss-20b's shapes, bfloat16. The gate comes first: ours must be as near to
float32 as transformers' eager experts are, forward and backward, or nothing is timed.

    python benchmarks/moe_ops.py --out moe_ops.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from pronghorn.bench.record import measure_ceilings
from pronghorn.bench.timing import CudaClock, HostClock
from pronghorn.bench.tolerance import three_way
from pronghorn.device import device_name, versions
from pronghorn.kernels import moe_glu, moe_rows
from pronghorn.kernels.grouped_gemm import choose, multiply, outer
from pronghorn.models import experts as ours
from pronghorn.moe.route import route, route_by_sort

SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
TILES = ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 8, 4))
RANK = 16


def make(name: str, sizes: tuple[int, int, int, int], tokens: int, device: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(experts module, x, top-k indices, top-k weights)."""
    count, k, hidden, width = sizes
    torch.manual_seed(0)
    if name.startswith("qwen3"):
        config: Any = Qwen3MoeConfig(num_experts=count, hidden_size=hidden, moe_intermediate_size=width)
        module: Any = Qwen3MoeExperts(config)
    else:
        config = GptOssConfig(num_local_experts=count, hidden_size=hidden, intermediate_size=width)
        module = GptOssExperts(config)
    module = module.to(device, torch.bfloat16).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.02)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    top = torch.randn(tokens, count, device=device).softmax(-1).topk(k)
    return module, x, top.indices, (top.values / top.values.sum(-1, keepdim=True)).requires_grad_()


def run(module: Any, way: str, x: Tensor, index: Tensor, w: Tensor, dy: Tensor | None) -> list[Tensor]:
    """The layer by one of the registered ways; with dy, its gradients too."""
    module.config._experts_implementation = way
    out = module(x, index, w)
    return [out] if dy is None else [out, *torch.autograd.grad(out, (x, w), dy)]


def gate(module: Any, x: Tensor, index: Tensor, w: Tensor) -> dict[str, Any]:
    """Errors and limits on the first tokens, with float32 eager experts as the truth."""
    x, index, w = (part[:512].detach() for part in (x, index, w))
    dy = torch.randn_like(x)
    results = []
    for way, dtype in ((ours.NAME, x.dtype), ("eager", x.dtype), ("eager", torch.float32)):
        given = [part.to(dtype).requires_grad_() for part in (x, w)]
        results.append(run(module.to(dtype), way, given[0], index, given[1], dy.to(dtype)))
    module.to(x.dtype)
    checks = [three_way(*parts) for parts in zip(*results, strict=True)]
    green = all(error <= limit for check in checks for error, limit in check.values())
    return {"green": green, "output, dx, dw": checks}


def loop_routing(index: Tensor, count: int) -> None:
    for e in range(count):
        torch.where(index == e)


def cases(module: Any, x: Tensor, index: Tensor, w: Tensor) -> dict[str, tuple[Callable[[], Any], float]]:
    """What is timed, and its bytes (below 0: its operations)."""
    count, routing, plain = module.num_experts, route(index, module.num_experts), x.detach()
    offsets, tokens, cuda = routing.offsets, routing.tokens, x.is_cuda
    w1, w2 = (getattr(module, name).detach() for name in ("gate_up_proj", "down_proj"))
    if not module.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    (hidden, width), rows = w2.shape[:0:-1], len(tokens)
    gathered, h, d = moe_rows.gather(plain, tokens), x.new_empty(rows, 2 * width).normal_(), x.new_empty(rows, width)
    y, d, form = torch.randn_like(gathered), d.normal_(), ours._gate(module)
    b1, b2 = (getattr(module, f"{name}_proj_bias", None) for name in ("gate_up", "down"))
    found: dict[str, tuple[Callable[[], Any], float]] = {
        "route": (lambda: route(index, count), 0),
        "route by sort": (lambda: route_by_sort(index, count), 0),
        "route: stable sort and bincount": (lambda: (index.flatten().sort(stable=True), index.flatten().bincount()), 0),
        "route: loop of where": (lambda: loop_routing(index, count), 0),
        "gather": (lambda: moe_rows.gather(plain, tokens), 2 * (rows + len(x)) * hidden),
        "gather: x[rows]": (lambda: plain[tokens], 2 * (rows + len(x)) * hidden),
        "combine": (
            lambda: moe_rows.combine(y, routing.inverse, w.detach(), b2, index),
            2 * (rows + len(x)) * hidden,
        ),
        "gate": (lambda: moe_glu.forward(h, form, b1, routing.experts), 6 * rows * width),
        "gate backward": (
            lambda: moe_glu.backward_(d, h, w.detach(), routing.slots, form, b1, routing.experts),
            12 * rows * width,
        ),
    }
    products = {"gate_up": (plain, gathered, w1), "down": (d, d, w2)}
    products |= {"d down": (plain, gathered, w2.transpose(1, 2)), "d gate_up": (h, h, w1.transpose(1, 2))}
    best, _ = choose(x.device, x.dtype, (hidden, width))
    for name, (few, many, weight) in products.items():
        operations = -2.0 * rows * weight.shape[1] * weight.shape[2]
        order = tokens if few is plain else None
        found[f"{name}: {best}"] = (lambda m=many, v=weight: multiply(m, v, offsets, best)), operations
        if cuda:
            from pronghorn.kernels import grouped_gemm_triton as triton

            for tile in TILES:
                one = triton.Tile(*tile)
                found[f"{name}: triton {tile}"] = (
                    (lambda f=few, v=weight, o=order, t=one: triton.multiply(f, v, offsets, o, None, 1.0, t)),
                    operations,
                )
    a1, l1 = x.new_empty(count, RANK, hidden).normal_(), x.new_empty(count, 2 * width, RANK).normal_()
    thin, way = x.new_empty(rows, RANK).normal_(), "triton" if cuda else "loop"
    both = {"dtype": torch.float32}
    pair = 2 * rows * hidden
    found["lora x Aᵀ"] = (lambda: multiply(plain, a1.transpose(1, 2), offsets, way, rows=tokens)), pair
    found["lora + xa Bᵀ"] = (lambda: multiply(thin, l1.transpose(1, 2), offsets, way, out=h)), 8 * rows * width
    found["lora dA"] = (lambda: outer(thin, plain, offsets, way, y_rows=tokens, **both)), pair
    found["lora dB"] = (lambda: outer(h, thin, offsets, way, **both)), 4 * rows * width
    dy = torch.randn_like(plain)
    for name in (ours.NAME, "eager", *(["grouped_mm"] if cuda else [])):
        found[f"layer forward: {name}"] = (lambda n=name: run(module, n, x, index, w, None)), 0
        found[f"layer forward and backward: {name}"] = (lambda n=name: run(module, n, x, index, w, dy)), 0
    return found


def milliseconds(work: Callable[[], Any], clock: Any, repeats: int) -> float:
    """The median of some calls, each behind enough waiting work that the host has launched it by then."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        if isinstance(clock, CudaClock):
            torch.cuda._sleep(2_000_000)
        start = clock.mark()
        work()
        times += clock.milliseconds([start, clock.mark()])
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--divide", type=int, default=1, help="every size by this, to try the script on a CPU")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    clock, ceilings = (CudaClock(), measure_ceilings()) if cuda else (HostClock(), {})
    if ours.NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(ours.NAME, ours._forward)
    result: dict[str, Any] = {"device": device_name(), "versions": versions(), "ceilings": ceilings, "shapes": {}}
    for name, sizes in SHAPES.items():
        e, k, h, i = sizes
        d = arguments.divide
        made = make(name, (max(e // d, k), k, h // d, i // d), arguments.tokens, "cuda" if cuda else "cpu")
        checked = gate(*made)
        result["shapes"][name] = {"gate": checked, "tokens": arguments.tokens, "ms": {}, "per_s": {}}
        print(name, "gate", "green" if checked["green"] else f"RED {checked}", flush=True)
        for case, (work, amount) in (cases(*made) if checked["green"] else {}).items():
            time = milliseconds(work, clock, arguments.repeats)
            rate = abs(amount) / time * 1e3
            result["shapes"][name]["ms"][case], result["shapes"][name]["per_s"][case] = time, rate
            shown = "" if not amount else f"{rate / 1e12:8.2f} {'TB/s' if amount > 0 else 'TFLOP/s'}"
            print(f"  {case:55} {time:9.3f} ms {shown}", flush=True)
        del made
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
