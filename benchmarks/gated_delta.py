"""The gated delta rule's kernels: judged, then timed, beside fla-core's chunk_gated_delta_rule where it is installed.

8,192 tokens, 16 key and 32 value heads of 128, bfloat16, as 46 documents and as one. The gate comes first, on the first
1,024 tokens with float64 as the truth and the chunked reference in bfloat16 (autocast) as the plain path.

    python -m benchmarks.gated_delta --out result.json            [--sweep]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from pronghorn.chunks import Chunks, chunks_of
from pronghorn.device import device_name, versions
from pronghorn.kernels import gated_delta, gated_delta_backward, gated_delta_forward
from pronghorn.kernels.gated_delta_forward import Tile
from pronghorn.parity.distance import distance

TOKENS, KEY_HEADS, HEADS, DIM = 8192, 16, 32, 128
SCALE = DIM**-0.5
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
SWEPT = {
    "prepare": [Tile(c, w, 1) for c in (64, 128) for w in (4, 8)],
    "states": [Tile(c, w, s) for c in (16, 32, 64) for w in (4, 8) for s in (1, 2, 3)],
    "output": [Tile(c, w, 1) for c in (32, 64, 128) for w in (4, 8)],
    "direct": [Tile(c, w, 1) for c in (32, 64, 128) for w in (4, 8)],
    "state gradients": [Tile(c, w, s) for c in (16, 32, 64) for w in (4, 8) for s in (1, 2)],
    "inner": [Tile(c, w, 1) for c in (32, 64, 128) for w in (4, 8)],
    "query gradients": [Tile(c, w, 1) for c in (32, 64, 128) for w in (4, 8)],
    "key gradients": [Tile(c, w, 1) for c in (32, 64, 128) for w in (4, 8)],
}
KERNELS = {name: "_" + name.replace(" ", "_") for name in SWEPT}


def inputs(lengths: Sequence[int]) -> tuple[list[Tensor], Tensor, Chunks]:
    """Make (q, k, v, g, beta), do and the chunks on the device; q, k, v are views of one tensor."""
    torch.manual_seed(0)
    tokens, keys = sum(lengths), KEY_HEADS * DIM
    qkv = torch.randn(tokens, 2 * keys + HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.unflatten(1, (-1, DIM)) for x in qkv.split([keys, keys, HEADS * DIM], 1))
    g = -torch.rand(tokens, HEADS, device="cuda") * torch.rand(tokens, HEADS, device="cuda")
    beta = torch.randn(tokens, HEADS, device="cuda").sigmoid().bfloat16()
    do = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    bucket = -(-len(lengths) // 16) * 16
    return [q, k, v, g, beta], do, Chunks(*(x.cuda() for x in chunks_of(lengths, bucket, tokens)))


def both(given: Sequence[Tensor], do: Tensor, chunks: Chunks) -> list[Tensor]:
    """Return o and the gradients by the kernels."""
    o, saved = gated_delta.forward(*given, chunks, SCALE)
    return [o, *gated_delta.backward(do, *given, saved, chunks, SCALE)]


def judge(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Compare o and the gradients with float64's, of the chunked form, which the tests compare with the recurrence."""
    given, do, chunks = inputs(lengths)
    ours, results = both(given, do, chunks), []
    for dtype in (torch.bfloat16, torch.float64):
        wide = dtype is torch.float64
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in given]
        with torch.autocast("cuda", torch.bfloat16, enabled=not wide):
            o = gated_delta.chunked_reference(*leaves, chunks, SCALE)
        results.append([o, *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    return [asdict(x) | {"excess": x.excess} for x in map(distance, NAMES, ours, *results)]


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median time on the device."""
    times = []
    for repeat in range(repeats + 3):
        torch.cuda._sleep(2_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end)] if repeat >= 3 else []
    return statistics.median(times)


def by_kernel(work: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Return the milliseconds of each kernel, from torch's profiler."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / 1e3 / repeats for event in profile.key_averages()}
    return {name: times.get(symbol, float("nan")) for name, symbol in KERNELS.items()}


def of_fla(given: Sequence[Tensor], do: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Time fla-core's rule, whose heads of q and k are repeated first; say so where it isn't installed.

    Its guard against wrong results on Hopper with an older Triton is off: it is timed, not judged.
    """
    try:
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        return {"absent": str(error)}
    chunk_o.TRITON_ABOVE_3_7_1 = True
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    q, k, v, g, beta = given
    shared = [x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k)]
    leaves = [x.contiguous()[None].detach().requires_grad_() for x in (*shared, v, g, beta)]

    def forward() -> Tensor:
        options = {"scale": SCALE, "cu_seqlens": bounds, "use_qk_l2norm_in_kernel": True}
        return chunk_gated_delta_rule(*leaves, **options)[0]

    o = forward()
    backward = milliseconds(lambda: torch.autograd.grad(o, leaves, do[None], retain_graph=True))
    return {"forward": milliseconds(forward), "backward": backward}


def sweep(work: Callable[[], Any]) -> dict[str, dict[str, float | str]]:
    """Time each kernel with every tile of its list, the others as they are."""
    times: dict[str, dict[str, float | str]] = {}
    for name, tiles in SWEPT.items():
        module = gated_delta_forward if name in gated_delta_forward.TILES else gated_delta_backward
        table, many = module.TILES, module.MANY.pop(name, None)
        before, times[name] = table[name], {}
        for tile in tiles:
            table[name] = tile
            try:
                times[name][str(tuple(tile))] = round(by_kernel(work, 2)[name], 4)
            except Exception as error:  # too much shared memory, say: of this tile only
                times[name][str(tuple(tile))] = repr(error)[:120]
        table[name] = before
        if many is not None:
            module.MANY[name] = many
    return times


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time every kernel with other tiles, too")
    return parser


def main(given: argparse.Namespace) -> None:
    """Print one JSON object, and write it; fail unless all is within the rule."""
    check_out(given.out)
    sweeping, out = given.sweep, given.out
    report: dict[str, Any] = {"device": device_name(), "versions": versions(), "commit": given.commit}
    green = True
    mixed = [1, 63, 64, 65, 129, 1024 - 322]
    for name, lengths, few in (
        ("46 documents", [178] * 45 + [TOKENS - 178 * 45], mixed),
        ("one document", [TOKENS], [1024]),
    ):
        checks = judge(few)
        green &= all(check["excess"] <= 1 for check in checks)
        tensors, do, chunks = inputs(lengths)
        _, saved = gated_delta.forward(*tensors, chunks, SCALE)
        report[name] = {
            "checks": checks,
            "forward": milliseconds(lambda: gated_delta.forward(*tensors, chunks, SCALE)),  # noqa: B023
            "backward": milliseconds(lambda: gated_delta.backward(do, *tensors, saved, chunks, SCALE)),  # noqa: B023
            "kernels": by_kernel(lambda: both(tensors, do, chunks)),  # noqa: B023
            "fla": of_fla(tensors, do, lengths),
        }
        if sweeping:
            report[name]["sweep"] = sweep(lambda: both(tensors, do, chunks))  # noqa: B023
    text = json.dumps({"green": green} | report, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")
    if not green:
        raise SystemExit(1)


if __name__ == "__main__":
    run(arguments, main)
