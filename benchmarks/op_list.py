"""List what `benchmarks.ops` measures: every op with its shapes.

An op's formula in the dtype measured is the candidate `torch`, compiled it is `compile`, and in float64 it is what is
right. A way to compute an op says what it must move or multiply at the least, which its speed is reckoned by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import op_cases as dense
from benchmarks import op_cases_codes as codes
from benchmarks import op_cases_delta as delta
from benchmarks import op_cases_moe as moe
from benchmarks.op_case import Case, Draw

QWEN3, GPT_OSS, ODD = (128, 8), (32, 4), (7, 3)
"""(experts, of them a token's) of Qwen3-30B-A3B and gpt-oss-20b; the odd one has experts without tokens."""
FP8_PRODUCTS = [
    [(*sizes, way, of_tokens) for way in (None, "torch", "bf16")]
    for *sizes, of_tokens in (
        (*QWEN3, 2048, 1536, True),
        (*QWEN3, 768, 2048, False),
        (*GPT_OSS, 2880, 5760, True),
        (*GPT_OSS, 2880, 2880, False),
    )
]
"""Each product of their experts, in 8 bits both ways and in bf16."""


def both_ways(*widths: int) -> tuple[tuple[Any, ...], ...]:
    """Codes by the kernel that makes the rows, and in a pass of its own; of the last width, an odd one, the former."""
    return *(shape for width in widths[:-1] for shape in ((width,), (width, "apart"))), (widths[-1],)


# fmt: off
# Shapes of Llama-3.2-1B, Llama-3.1-8B, Qwen3-0.6B and -14B, Gemma 3 1B, then an odd one; tiny ones for a CPU
OPS: dict[str, tuple[Callable[..., Case], tuple[tuple[Any, ...], ...], tuple[tuple[Any, ...], ...]]] = {
    "rms_norm": (dense.norm_case, ((2048,), (4096,), (4096, True), (1100,)), ((64,), (63, True))),
    "rope": (partial(dense.rope_case, norm=False), ((32, 8, 64), (32, 8, 128), (9, 3, 64)), ((4, 2, 16), (9, 3, 16))),
    "rope_qk_norm": (partial(dense.rope_case, norm=True), ((16, 8, 128), (40, 8, 128)), ((4, 2, 16),)),
    "swiglu": (
        partial(dense.glu_case, activation="silu"), ((2048,), (4096,), (8192,), (14336,), (1025,)), ((64,), (63,)),
    ),
    "geglu": (partial(dense.glu_case, activation="gelu_tanh"), ((6912,), (1025,)), ((64,),)),
    "swiglu_lora": (dense.glu_lora_case, ((8192, 32), (14336, 32), (14336, 16), (1025, 20)), ((64, 8), (63, 5))),
    "residual_lora": (
        dense.residual_case, ((2048, 16), (4096, 16), (4096, 8), (4096, 64), (1100, 5)), ((64, 8), (63, 5))),
    "residual_wide": (dense.wide_residual_case, ((2048,), (4096,), (1100,)), ((64,), (63,))),
    "adapter_gradients": (
        dense.adapters_case,
        ((16, 4096, 1024, 1024), (16, 4096), (16, 14336, 14336), (32, 14336, 14336), (24, 14336, 14336),
         (8, 14336, 14336), (8, 4096), (16, 2048, 512, 512), (16, 2048), (16, 8192, 8192), (5, 1100, 333)),
        ((8, 64, 32, 32), (5, 63))),
    "attention": (
        dense.attention_case,
        ((32, 8, 64, 180), (32, 8, 128, 180), (16, 8, 128, 180), (32, 8, 128, 2048), (32, 8, 128, 8192),
         (8, 2, 256, 180), (16, 8, 256, 180), (8, 2, 512, 180), (16, 1, 512, 180), (16, 1, 512, 180, "per_document"),
         (16, 1, 512, 2048), (16, 1, 512, 2048, "per_document"), (9, 3, 64, 511)),
        ((4, 2, 16, 20), (3, 1, 32, 31))),
    "cross_entropy": (dense.loss_case, ((128256,), (151936,), (50257,)), ((256,), (131,))),
    "linear_cross_entropy": (
        dense.linear_loss_case,
        ((2048, 128256), (4096, 128256), (1024, 151936), (2048, 128256, True), (576, 50257)),
        ((32, 256), (32, 131, True))),
    "rms_norm_codes": (codes.norm_case, both_ways(4096, 5120, 1100), both_ways(64, 63)),
    "rms_norm_back_codes": (codes.norm_backward_case, both_ways(2560, 3840, 1100), both_ways(64, 63)),
    "swiglu_codes": (codes.glu_case, both_ways(8192, 14336, 17408, 1025), both_ways(64, 63)),
    "swiglu_back_codes": (codes.glu_backward_case, both_ways(8192, 14336, 17408, 1025), both_ways(64, 63)),
    "causal_conv": (delta.convolution_case, ((8192,), (10240,)), ((48,),)),
    "gated_norm": (delta.gated_norm_case, ((32, 128), (48, 128)), ((3, 16),)),
    "delta_gates": (delta.gates_case, ((32,), (48,)), ((3,),)),
    "moe_route": (moe.route_case, (QWEN3, GPT_OSS, ODD), ((8, 2), ODD)),
    "moe_gather": (moe.gather_case, ((*QWEN3, 2048), (*GPT_OSS, 2880), (*ODD, 1100)), ((8, 2, 64), (*ODD, 63))),
    "moe_combine": (
        moe.combine_case, ((*QWEN3, 2048), (*GPT_OSS, 2880, True), (*ODD, 1100)), ((8, 2, 64), (*ODD, 63, True))),
    "moe_glu": (moe.glu_case, ((*QWEN3, 768), (*GPT_OSS, 2880, True), (*ODD, 1025)), ((8, 2, 64), (*ODD, 63, True))),
    "grouped_gemm": (
        moe.gemm_case,
        ((*QWEN3, 2048, 1536), (*QWEN3, 2048, 1536, "triton"), (*GPT_OSS, 2880, 5760, None, True),
         (*GPT_OSS, 2880, 5760, "triton", True), (*ODD, 1025, 513)),
        ((8, 2, 32, 64), (8, 2, 32, 64, None, True), (*ODD, 31, 17))),
    "grouped_fp8": (
        moe.fp8_case,
        (*(sizes for product in FP8_PRODUCTS for sizes in product), (*ODD, 1025, 513)),
        ((8, 2, 32, 64), (8, 2, 32, 64, "bf16", False), (*ODD, 31, 17))),
    "grouped_lora": (
        moe.lora_case, ((*QWEN3, 2048, 1536, 16), (*GPT_OSS, 2880, 5760, 16), (*ODD, 1025, 513, 5)),
        ((8, 2, 32, 64, 4), (*ODD, 31, 17, 3))),
}
# fmt: on


def cases(op: str, tokens: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Case]]:
    """Return what makes each of an op's cases, by its sizes; the last has an odd number of tokens."""
    make, large, tiny = OPS[op]
    shapes = large if device == "cuda" else tiny
    makers: dict[str, Callable[[], Case]] = {}
    for number, shape in enumerate(shapes, 1):
        sizes = max(1, tokens - (number == len(shapes) > 1)), *shape
        makers[", ".join(str(size) for size in sizes if size is not None)] = partial(make, Draw(device, dtype), *sizes)
    return makers
