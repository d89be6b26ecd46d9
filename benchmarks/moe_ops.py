"""A layer of experts against transformers' ways of computing it.

Random weights of Qwen3-30B-A3B's and gpt-oss-20b's shapes, bfloat16. The gate comes first: the frozen layer must be as
near to float32 as transformers' eager experts are, forward and backward, or nothing is timed and the status is 1;
adapters are judged by the tests. `benchmarks.ops` times the parts of the layer.

    python -m benchmarks.moe_ops --out moe_ops.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from benchmarks.counts import measure_ceilings
from benchmarks.program import parser_of, run
from benchmarks.record import Result, Workload, check_out, command_line, keeper, write_results
from benchmarks.timing import CudaClock, HostClock
from pronghorn.models import experts as ours
from pronghorn.parity.distance import distance

SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
RANK = 16


def make(name: str, sizes: tuple[int, int, int, int], tokens: int, device: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return (experts module, x, top-k indices, top-k weights)."""
    count, k, hidden, width = sizes
    torch.manual_seed(0)
    if name.startswith("qwen3"):
        config: Any = Qwen3MoeConfig(num_experts=count, hidden_size=hidden, moe_intermediate_size=width)
    else:
        config = GptOssConfig(num_local_experts=count, hidden_size=hidden, intermediate_size=width)
    module: Any = (Qwen3MoeExperts if name.startswith("qwen3") else GptOssExperts)(config)
    module = module.to(device, torch.bfloat16).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.02)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    top = torch.randn(tokens, count, device=device).softmax(-1).topk(k)
    return module, x, top.indices, (top.values / top.values.sum(-1, keepdim=True)).requires_grad_()


def outputs(call: Any, module: Any, way: str, x: Tensor, index: Tensor, w: Tensor, dy: Tensor | None) -> list[Tensor]:
    """Return the layer by one of the registered ways; with dy, its gradients too (an adapter's as well)."""
    module.config._experts_implementation = way
    out = call(x, index, w)
    trained = [parameter for parameter in call.parameters() if parameter.requires_grad]
    return [out] if dy is None else [out, *torch.autograd.grad(out, [x, w, *trained], dy)]


def gate(module: Any, x: Tensor, index: Tensor, w: Tensor) -> tuple[bool, list[Any]]:
    """Return errors and limits of output, dx and dw on the first tokens, with float32 eager experts as the truth."""
    x, index, w = (part[:512].detach() for part in (x, index, w))
    dy, results = torch.randn_like(x), []
    for way, dtype in ((ours.NAME, x.dtype), ("eager", x.dtype), ("eager", torch.float32)):
        given = [part.to(dtype).requires_grad_() for part in (x, w)]
        results.append(outputs(module.to(dtype), module, way, given[0], index, given[1], dy.to(dtype)))
    module.to(x.dtype)
    names = ("out", "dx", "dw")
    checks = [distance(name, *parts) for name, *parts in zip(names, *results, strict=True)]
    return all(check.excess <= 1 for check in checks), [asdict(check) for check in checks]


def layers(module: Any, x: Tensor, index: Tensor, w: Tensor) -> dict[str, Callable[[], Any]]:
    """List the whole layer, frozen and with PEFT's adapter, by each way."""
    cases: dict[str, Callable[[], Any]] = {}
    dy, others = torch.randn_like(x), ["eager", *(["grouped_mm"] if x.is_cuda else [])]
    for way in (ours.NAME, *others):
        for name, grad in (("forward", None), ("forward and backward", dy)):
            cases[f"layer {name}: {way}"] = partial(outputs, module, module, way, x, index, w, grad)
    holder = nn.ModuleDict({"experts": module})
    targets = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    adapted = get_peft_model(holder, LoraConfig(r=RANK, target_modules=[], target_parameters=targets))  # type: ignore
    wrapper: Any = adapted.base_model.model["experts"]
    for adapter in ours.wrappers(adapted):  # hands A and B over to our way only: others fold, as PEFT does
        adapter.__class__ = ours.wrapper_class(type(adapter))
    for way in (ours.NAME, *others):
        cases[f"layer with LoRA: {way}"] = partial(outputs, wrapper, module, way, x, index, w, dy)
    return cases


def milliseconds(work: Callable[[], Any], clock: Any, repeats: int) -> list[float]:
    """Time some calls, each behind enough waiting that the host has launched it by then."""
    times: list[float] = []
    for repeat in range(repeats + 3):
        if isinstance(clock, CudaClock):
            torch.cuda._sleep(2_000_000)
        start = clock.mark()
        work()
        times += clock.milliseconds([start, clock.mark()]) if repeat >= 3 else []
    return times


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--divide", type=int, default=1, help="all sizes by this, to try the script on a CPU")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Judge and time the layer of every shape; tell whether all gates were green."""
    check_out(given.out)
    cuda = torch.cuda.is_available()
    clock, ceilings = (CudaClock(), measure_ceilings()) if cuda else (HostClock(), {})
    ours.register(ALL_EXPERTS_FUNCTIONS)
    results = []
    for name, (e, k, h, i) in SHAPES.items():
        sizes = max(e // given.divide, k), k, h // given.divide, i // given.divide
        made = make(name, sizes, given.tokens, "cuda" if cuda else "cpu")
        green, checks = gate(*made)
        times: dict[str, list[float]] = {}
        print(name, "gate", "green" if green else f"RED {checks}", flush=True)
        for case, call in layers(*made).items() if green else ():
            times[case] = milliseconds(call, clock, given.repeats)
            print(f"  {case:45} {statistics.median(times[case]):9.3f} ms", flush=True)
        work = Workload(f"{name}, experts of one layer", "experts", given.tokens, "a random router", -1.0, 0)
        gated = {"green": green, "checks": checks}
        results.append(Result(command_line(), "pronghorn", work, gated, times, ceilings=ceilings, commit=given.commit))
        keeper(given.out)(results)
    write_results(results, given.out)
    return all(result.gate["green"] for result in results)


if __name__ == "__main__":
    run(arguments, main)
