"""Each Triton kernel of MoE layers against its plain torch reference in float64, as kernel_checks.py does it.

TRITON_INTERPRET=1 python tests/support/moe_checks.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.kernels import (
    grouped_codes,
    grouped_gemm,
    moe_glu,
    moe_route,
    moe_rows,
    mxfp4,
)
from pronghorn.kernels.int8 import quantise_rotated_reference
from pronghorn.kernels.quantise import RowCodes, quantise_rows_reference
from pronghorn.parity.quantised import fast_sums
from pronghorn.precision.int8 import column_factors
from support.codes_checks import assert_codes, same, spoilt
from support.interpreted import begin
from support.kernel_checks import Kernels, References, compare, random, written
from support.tolerance import assert_three_way

# (tokens, top-k, experts, how tokens choose)
ROUTINGS = ((1, 1, 1, "even"), (63, 2, 5, "even"), (257, 4, 8, "skewed"), (33, 8, 12, "one takes all"))
FEW = ((1, 1, 1, "even"), (67, 2, 5, "skewed"), (3, 4, 6, "one takes all"))


def routings(device: str) -> tuple[tuple[int, int, int, str], ...]:
    """Fewer for the interpreter, which is slow by the program."""
    return FEW if device == "cpu" else ROUTINGS


def indices(tokens: int, k: int, experts: int, how: str) -> Tensor:
    """Top-k indices int64 [T, K], distinct in a token: balanced, skewed with experts that nobody chooses, or one
    expert that is everybody's first choice."""
    generator = torch.Generator().manual_seed(tokens)
    score = torch.rand(tokens, experts, generator=generator)
    if how == "skewed":
        score = score / (1 + torch.arange(experts) ** 2)
    if how == "one takes all":
        score[:, experts // 2] = 2.0
        score[:, 0] = -1.0  # and one gets nothing
    return score.topk(k, dim=1).indices


def check_route(device: str, dtype: torch.dtype) -> None:
    for tokens, k, experts, how in ((0, 2, 5, "even"), *routings(device)):
        index = indices(tokens, k, experts, how).to(device).mT.contiguous().mT  # of any strides
        pairs = zip(moe_route.route_triton(index, experts), moe_route.route_reference(index, experts), strict=True)
        for number, (mine, wanted) in enumerate(pairs):
            assert mine.dtype == wanted.dtype == torch.int32
            assert torch.equal(mine, wanted), (number, tokens, how)


def check_rows(device: str, dtype: torch.dtype) -> None:
    for tokens, k, experts, how in routings(device):
        index = indices(tokens, k, experts, how)
        _, _, tokens_of, _, inverse = (part.to(device) for part in moe_route.route_reference(index, experts))
        for width in (5, 4100) if tokens < 5 or device == "cuda" else ():
            x = random(tokens, width, device=device, dtype=dtype, seed=1)
            assert torch.equal(moe_rows.gather_triton(x, inverse), x[tokens_of.long()])
            y = random(tokens * k, width, device=device, dtype=dtype, seed=2)
            w = random(k, tokens, device=device, dtype=torch.float32, seed=3).mT  # these three of any strides
            bias = random(width, experts, device=device, dtype=dtype, seed=4).mT
            index = index.mT.contiguous().mT
            for weights, biases in ((None, None), (w, None), (w.to(dtype), bias)):
                arguments = y, inverse, weights, biases, None if biases is None else index.to(device)
                compare("combine", moe_rows.combine_triton, moe_rows.combine, *arguments)


def check_glu(device: str, dtype: torch.dtype) -> None:
    for tokens, k, experts, how in routings(device)[1:]:
        index = indices(tokens, k, experts, how)
        _, slots, _, owners, _ = (part.to(device) for part in moe_route.route_reference(index, experts))
        for width in (3, 1030) if tokens < 5 or device == "cuda" else ():
            h = random(tokens * k, 2 * width, device=device, dtype=dtype, seed=1) * 2
            d = random(tokens * k, width, device=device, dtype=dtype, seed=2)
            w = random(k, tokens, device=device, dtype=torch.float32, seed=3).mT  # these two of any strides
            bias = random(2 * width, experts, device=device, dtype=dtype, seed=4).mT
            for gate in (moe_glu.Gate("silu"), moe_glu.Gate("gelu_tanh"), moe_glu.Gate("clamped", limit=1.5)):
                more = gate, bias if gate.kind != "silu" else None, owners
                compare(f"{gate.kind}", moe_glu.forward_triton, moe_glu.forward, h, *more)
                launch, reference = (backward(module) for module in (Kernels(moe_glu), References(moe_glu)))
                compare(f"{gate.kind} backward", launch, reference, d, h, w, slots, *more)
                if dtype is not torch.float64:
                    check_glu_codes(spoilt(d.clone()), h, w, slots, *more)


def backward(module: Any) -> Any:
    """(dh, dw, w·a) from one of the modules."""

    def run(d: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        (dh, dw), wa = written(module.backward_)(d, *rest)
        return dh, dw, wa

    return run


def check_glu_codes(d: Tensor, *given: Any) -> None:
    """The codes are those of the dh beside them; d is written if it is wanted. A row may be spoilt."""
    (dh, dw), wa = written(moe_glu.backward_triton_)(d, *given)
    for activated in (True, False):
        codes = RowCodes.like(dh)
        (dh_again, dw_again), left = written(moe_glu.backward_triton_)(d, *given, activated, codes)
        for again, before in ((dh_again, dh), (dw_again, dw), (left, wa if activated else d)):
            rtol, atol = (1e-2, 1e-3) if again.itemsize == 2 else (1e-5, 1e-5)  # compiled anew
            torch.testing.assert_close(again, before, rtol=rtol, atol=atol, equal_nan=True)
        assert activated or same(left, d)
        assert_codes(f"dh, {activated}", codes, dh_again)


def check_grouped_gemm(device: str, dtype: torch.dtype) -> None:
    for tokens, k, experts, how in routings(device):
        index = indices(tokens, k, experts, how)
        offsets, _, *both = (part.to(device) for part in moe_route.route_reference(index, experts))
        offsets = torch.cat([offsets.new_full((1,), 10**6), offsets])[1:]  # what lies before isn't read
        rows = moe_rows.Rows(both[0], both[2])
        if dtype is not torch.float32 and (device == "cpu" or grouped_gemm.uses_tma(torch.device(device))):
            x, weight = (random(*n, device=device, dtype=dtype, seed=1) for n in ((tokens, 128), (experts, 128, 72)))
            for transposed in (weight, weight.mT.contiguous().mT):
                compare("tma", some_at_a_time(True), multiply("loop"), x, transposed, offsets, rows, None)
        for depth, columns in ((70, 130), (33, 3)) if device == "cpu" else ((6, 70), (100, 130), (33, 3)):
            x = random(tokens, depth, device=device, dtype=dtype, seed=1)
            picked = x[rows.tokens.long()].contiguous()
            for weight in (
                random(experts, depth, columns, device=device, dtype=dtype, seed=2),
                random(experts, columns, depth, device=device, dtype=dtype, seed=3).transpose(1, 2),
            ):
                for given, order in ((x, rows), (picked, None)):
                    compare("multiply", multiply("triton"), multiply("loop"), given, weight, offsets, order, None)
                start = random(len(rows.tokens), columns, device=device, dtype=dtype, seed=4)
                compare("multiply, added", multiply("triton"), multiply("loop"), x, weight, offsets, rows, start)
            compare("multiply, some", some_at_a_time(False), multiply("loop"), x, weight, offsets, rows, None)
            y = random(len(rows.tokens), columns, device=device, dtype=dtype, seed=5)
            compare("outer", outer("triton"), outer("loop"), x, y, offsets, rows, None)
            compare("outer, other side", outer("triton"), outer("loop"), y, x, offsets, None, rows)


def check_mxfp4(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 256, 2, 16), dtype=torch.uint8, generator=generator).to(device)
    scales = torch.arange(256, dtype=torch.uint8).expand(3, 2, 256).transpose(1, 2).contiguous().to(device)
    found, right = (write(blocks, scales, dtype) for write in (mxfp4.write_out_triton, mxfp4.write_out_reference))
    assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0)) and found.dtype is dtype
    for tokens, k, experts, how in routings(device):
        offsets, _, *both = (
            part.to(device) for part in moe_route.route_reference(indices(tokens, k, experts, how), experts)
        )
        rows = moe_rows.Rows(both[0], both[2])
        for depth, columns in ((32, 3), (96, 130), (320, 136)):
            shape = experts, columns, depth // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator).to(device)
            scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator).to(device)
            weight = mxfp4.MXFP4Tensor([blocks, scales], (experts, depth, columns), dtype)
            x = random(tokens, depth, device=device, dtype=dtype, seed=1)
            dy = random(len(rows.tokens), columns, device=device, dtype=dtype, seed=2)
            for changes in (
                {"SCRATCH": 1},  # an expert at a time
                {"SCRATCH": 3 * depth * columns * x.itemsize, "GATHERED": 1},  # three, tokens' rows gathered
            ):
                run = with_changes(device, changes)
                for given, order in ((x, rows), (x[rows.tokens.long()].contiguous(), None)):
                    compare("4-bit multiply", run, mxfp4.multiply_packed, given, weight, offsets, order, False)
                compare("4-bit multiply, transposed", run, mxfp4.multiply_packed, dy, weight, offsets, None, True)


def check_grouped_fp8(device: str, dtype: torch.dtype) -> None:
    """Products of the same codes: exact ones are float64's, plain ones as tensor cores sum, rounded to the dtype."""
    sizes = ((144, 130), (33, 3)) if device == "cpu" else ((64, 16), (256, 272), (160, 144), (33, 3))
    check_grouped_codes(device, dtype, sizes, integers=False)


def check_grouped_integers(device: str, dtype: torch.dtype) -> None:
    """The same of integers of rotated rows, whose sums are exact."""
    sizes = ((64, 3), (192, 130)) if device == "cpu" else ((64, 16), (256, 272), (192, 144), (2880, 33))
    check_grouped_codes(device, dtype, sizes, integers=True)


def check_grouped_codes(device: str, dtype: torch.dtype, sizes: tuple[tuple[int, int], ...], integers: bool) -> None:
    if dtype is torch.float32 and device == "cuda":
        return  # results have 16 bits
    copies = device == "cpu" or grouped_gemm.uses_tma(torch.device(device))
    for tokens, k, experts, how in routings(device):
        index = indices(tokens, k, experts, how)
        offsets, _, *both = (part.to(device) for part in moe_route.route_reference(index, experts))
        offsets = torch.cat([offsets.new_full((1,), 10**6), offsets])[1:]  # what lies before isn't read
        rows = moe_rows.Rows(both[0], both[2])
        for depth, columns in sizes:
            x = random(tokens, depth, device=device, dtype=dtype, seed=1)
            weight = random(experts, columns, depth, device=device, dtype=dtype, seed=2)
            of_columns = column_factors(weight) if integers else None
            side = grouped_codes.Codes.of(weight if columns % 2 else weight.mT.contiguous().mT, of_columns)
            codes, scales = quantise_rotated_reference(x, of_columns) if integers else quantise_rows_reference(x)
            picked = codes.view(torch.uint8)[rows.tokens.long()].view(codes.dtype), scales[rows.tokens.long()]
            sums, fast, factors = [], [], []
            for e, start, end in grouped_gemm.groups_of(offsets):
                operands = picked[0][start:end], side.codes[e].t()
                sums.append(operands[0].double() @ operands[1].double())
                fast.append(fast_sums(operands[0].float(), operands[1].float()))
                factors.append(picked[1][start:end] * side.scales[e])
            factor = torch.cat(factors)
            exact = torch.cat(sums) * factor.double()
            summed = (True, exact), *([] if integers else [(False, torch.cat(fast) * factor)])
            for exactly, plain in summed:
                for given, order, tma in (
                    ((codes, scales), rows.tokens, False),
                    (picked, None, False),
                    *([(picked, None, True)] if copies and depth % grouped_codes.MULTIPLE == 0 else []),
                ):
                    options = order, dtype, exactly, tma
                    ours = grouped_codes.multiply_codes_triton(*given, side, offsets, *options)
                    assert ours.dtype is dtype
                    name = f"8 bits, {depth} to {columns}, integers {integers}, exact {exactly}, tma {tma}"
                    assert_three_way(name, ours, plain.to(dtype), exact)
                again = grouped_codes.multiply_codes_reference(*picked, side, offsets, None, dtype)
                assert_three_way("8 bits, plain torch", again, plain.to(dtype), exact)


def with_changes(device: str, changes: dict[str, int]) -> Any:
    """`multiply_packed` by kernels, with other limits than the module's; on the CPU with descriptors, too."""

    def run(*arguments: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(mxfp4, name, value)
            if device == "cpu":
                patch.setattr(grouped_gemm, "uses_tma", lambda device: True)
            return mxfp4.multiply_packed_triton(*arguments)

    return run


def multiply(way: Any) -> Any:
    def run(x: Tensor, weight: Tensor, offsets: Tensor, rows: moe_rows.Rows | None, out: Tensor | None) -> Tensor:
        added = {} if out is None else {"out": out.clone(), "scale": 0.5}
        return grouped_gemm.multiply(x, weight, offsets, way, rows=rows, **added)

    return run


def some_at_a_time(tma: bool) -> Any:
    """All experts by a launch for two of them."""

    def run(x: Tensor, weight: Tensor, offsets: Tensor, rows: moe_rows.Rows, out: None) -> Tensor:
        y, tile = x.new_empty(len(rows.tokens), weight.shape[2]), grouped_gemm.multiply_tile(x.dtype, weight.shape[2])
        given = moe_rows.gather(x, rows) if tma else x
        for first in range(0, len(weight), 2):
            part = weight[first : first + 2]
            order = None if tma else rows.tokens
            grouped_gemm.multiply_some(given, part, offsets, order, y, first, tile, tma=tma)
        return y

    return run


def outer(way: Any) -> Any:
    def run(
        x: Tensor, y: Tensor, offsets: Tensor, x_rows: moe_rows.Rows | None, y_rows: moe_rows.Rows | None
    ) -> Tensor:
        return grouped_gemm.outer(x, y, offsets, way, dtype=x.dtype, x_rows=x_rows, y_rows=y_rows, scale=0.5)

    return run


CHECKS = {
    "moe_route": check_route,
    "moe_rows": check_rows,
    "moe_glu": check_glu,
    "grouped_gemm": check_grouped_gemm,
    "mxfp4": check_mxfp4,
    "grouped_fp8": check_grouped_fp8,
    "grouped_integers": check_grouped_integers,
}

if __name__ == "__main__":
    begin()
    for name, check in CHECKS.items():
        products = ("grouped_gemm", "mxfp4", "grouped_fp8", "grouped_integers")
        check("cpu", torch.float16 if name in products else torch.float32)
        print(name, "ok", flush=True)
