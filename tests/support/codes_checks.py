"""Kernels that write codes beside what they make, against a pass over what they made, bit by bit, in poisoned memory.

tests/kernels/test_codes.py calls it with a CUDA device, and runs this file for the CPU under Triton's interpreter. That
rounds to 8 bits in a way of its own, so both sides are interpreted there.

    TRITON_INTERPRET=1 python tests/support/codes_checks.py float16
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels import glu, rms_norm
from pronghorn.kernels.quantise import (
    DTYPE,
    RowCodes,
    quantise_rows_reference,
    quantise_rows_triton,
    weight_scales,
    write_codes_across_reference,
    write_codes_across_triton,
)
from support.interpreted import begin
from support.kernel_checks import compare, random, written


def assert_codes(what: str, made: RowCodes, x: Tensor, columns: Tensor | None = None) -> None:
    """Codes and scales are those of x · columns as it was stored; what isn't a number is none in both."""
    want = quantise_rows_triton(x, columns), quantise_rows_reference(x, columns)
    for codes, scales in want if x.is_cuda else want[:1]:
        assert same(made.codes, codes), f"{what}: codes"
        assert same(made.scales, scales), f"{what}: scales"
    assert same(made.scales, want[1].scales), f"{what}: scales by the reference"


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, what isn't a number included."""
    return torch.equal(*(x.float().nan_to_num(-7.0, 8.0, 9.0) for x in (a, b)))


def spoilt(x: Tensor) -> Tensor:
    """x with rows of zeros, of what isn't finite, of the smallest numbers, and one with a large number."""
    for index, values in enumerate(((0.0,), (torch.nan,), (torch.inf,), (-torch.inf, 1.0), (1e-7,), (6e4,))):
        if index < len(x) - 1:
            x[index, : len(values)] = torch.tensor(values)[: x.shape[1]]
            x[index] *= 0 if values == (0.0,) else 1e-6 if values == (1e-7,) else 1
    return x


def shapes(device: str, *wide: int) -> list[tuple[int, int]]:
    """One token and several, odd widths, and on a GPU as many rows as run at a time, of these widths."""
    small = [(1, 1), (9, 63), (7, 1100)]
    return [*small, *((300, width) for width in wide)] if device == "cuda" else small


def check_norm(device: str, dtype: torch.dtype) -> None:
    for tokens, width in shapes(device, 4096, 8192):
        weight = random(width, device=device, dtype=dtype, seed=3)
        for stream in {dtype, torch.float32}:  # the norm of a wider stream rounds to the products' dtype
            x = random(tokens, width, device=device, dtype=stream, seed=1)
            for offset, given in ((0.0, x), (1.0, spoilt(x.clone()))):
                arguments = given, weight.to(stream), 1e-5, offset, dtype
                made = RowCodes.like(x)
                y, rstd = rms_norm.forward_triton(*arguments, codes=made)
                assert all(map(same, (y, rstd), rms_norm.forward_triton(*arguments)))
                assert_codes(f"norm {tokens} x {width}", made, y)
                wide = y.new_full((tokens, width + 9), torch.nan)
                made = RowCodes.like(x)
                rms_norm.forward_triton(*arguments, out=wide[:, 4:-5], codes=made)
                assert same(wide[:, 4:-5], y) and wide[:, :4].isnan().all() and wide[:, -5:].isnan().all()
                assert_codes("norm, to columns", made, y)
        x = random(tokens, width, device=device, dtype=dtype, seed=1)

        def with_codes(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            return rms_norm.forward_triton(x, weight, *rest, codes=RowCodes.like(x))

        compare("norm with codes", with_codes, rms_norm.forward, x, weight, 1e-5, 0.0)


def check_norm_backward(device: str, dtype: torch.dtype) -> None:
    """Of the norm after a product, whose rows' scales are the columns' factors."""
    for tokens, width in shapes(device, 4096, 8192):
        x, dy = (random(tokens, width, device=device, dtype=dtype, seed=s) for s in (1, 2))
        weight = random(width, device=device, dtype=dtype, seed=3)
        _, rstd = rms_norm.forward_triton(x, weight, 1e-5, 0.0)
        more = random(tokens, width, device=device, dtype=torch.float32, seed=5)
        for factors, trained, rest in ((torch.bfloat16, False, None), (torch.float32, True, more)):
            columns = (random(width, device=device, dtype=torch.float32, seed=4).abs() + 0.5).to(factors)
            for grad in (dy, spoilt(dy.clone())):
                arguments = grad, x, weight, rstd, 0.0, trained, rest
                made = RowCodes.like(x)
                dx, dw = rms_norm.backward_triton(*arguments, codes=made, columns=columns)
                plain, dw_plain = rms_norm.backward_triton(*arguments)
                assert same(dx, plain) and (dw is None or same(dw, dw_plain))
                assert_codes(f"norm backward {tokens} x {width}", made, dx, columns)

        def with_codes(dy: Tensor, *rest: Any) -> Any:
            ones = torch.ones(dy.shape[1], device=device)
            return rms_norm.backward_triton(dy, *rest, codes=RowCodes.like(dy), columns=ones)

        compare("norm backward with codes", with_codes, rms_norm.backward, dy, x, weight, rstd, 0.0, True)


PARTS = (3, 5000), (2, 8193)
"""Rows that are gone over in several parts, the last of one column perhaps."""


def parts(device: str, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Return `PARTS`; for the interpreter, which takes seconds a row of them, one for each dtype."""
    return PARTS if device == "cuda" else PARTS[:1] if dtype is torch.float16 else PARTS[1:]


def check_glu(device: str, dtype: torch.dtype) -> None:
    for tokens, width in (*shapes(device, 14336, 40000), *parts(device, dtype)):
        gate_up = random(tokens, 2 * width, device=device, dtype=dtype, seed=1) * 2
        for activation in ("silu", "gelu_tanh"):
            for given in (gate_up, spoilt(gate_up.clone()), spoilt(gate_up.roll(width, 1)).roll(-width, 1)):
                made = RowCodes.like(gate_up[:, :width])
                a = glu.forward_triton(given, activation, made)
                assert same(a, glu.forward_triton(given, activation))
                assert_codes(f"{activation} {tokens} x {width}", made, a)

            def with_codes(gate_up: Tensor, activation: Any) -> Tensor:
                return glu.forward_triton(gate_up, activation, RowCodes.like(gate_up.chunk(2, 1)[0]))

            compare(f"{activation} with codes", with_codes, glu.forward, gate_up, activation)


def check_glu_backward(device: str, dtype: torch.dtype) -> None:
    for tokens, width in (*shapes(device, 14336, 40000), *parts(device, dtype)):
        gate_up = random(tokens, 2 * width, device=device, dtype=dtype, seed=1) * 2
        da = random(tokens, width, device=device, dtype=dtype, seed=2)
        for factors, activation in ((torch.bfloat16, "silu"), (torch.float32, "gelu_tanh")):
            columns = (random(2 * width, device=device, dtype=torch.float32, seed=4).abs() + 0.5).to(factors)
            for grad, given in ((da, gate_up), (spoilt(da.clone()), gate_up), (da, spoilt(gate_up.clone()))):
                mine, others, place, made = grad.clone(), grad.clone(), given.clone(), RowCodes.like(given)
                donated = factors is torch.float32
                d_gate_up = glu.backward_triton_(mine, place, activation, donated, made, columns)
                assert (d_gate_up.data_ptr() == place.data_ptr()) is donated
                assert same(d_gate_up, glu.backward_triton_(others, given, activation)) and same(mine, others)
                assert_codes(f"{activation} backward {tokens} x {width}", made, d_gate_up, columns)

            def with_codes(da: Tensor, gate_up: Tensor, activation: Any, columns: Tensor = columns) -> Tensor:
                return glu.backward_triton_(da, gate_up, activation, False, RowCodes.like(gate_up), columns)

            compare(f"{activation} backward", written(with_codes), written(glu.backward_), da, gate_up, activation)


def check_parts_are_stored_before_they_are_read(device: str, dtype: torch.dtype) -> None:
    """Again and again: which thread is first is chance."""
    tokens, width, times = (3000, 14336, 5) if device == "cuda" else (2, 5000, 1)
    gate_up, da = (random(tokens, size, device=device, dtype=dtype, seed=1) for size in (2 * width, width))
    columns = random(2 * width, device=device, dtype=torch.float32, seed=4).abs().bfloat16() + 0.5
    for _ in range(times):
        made, made_back = RowCodes.like(da), RowCodes.like(gate_up)
        assert_codes("again", made, glu.forward_triton(gate_up, "silu", made))
        assert_codes(
            "again", made_back, glu.backward_triton_(da.clone(), gate_up, "silu", False, made_back, columns), columns
        )


def check_across(device: str, dtype: torch.dtype) -> None:
    """A weight's codes, turned, into columns of a wider tensor. The interpreter gives half of what rounds up to a power
    of two."""
    sizes = [(1, 1), (9, 63), (70, 130), *([(4096, 14336)] if device == "cuda" else [])]
    for rows, width in sizes:
        weight = random(rows, width, device=device, dtype=dtype, seed=1)
        weight[0] = 0
        weight = spoilt(weight) if device == "cuda" else weight  # what isn't finite is interpreted otherwise
        inverse = 1 / weight_scales(weight.abs().amax(1))  # as its users make it: 0 or NaN of a row that isn't finite
        whole = [torch.zeros(width, rows + 32, device=device).to(DTYPE) for _ in range(2)]
        write_codes_across_triton(weight, inverse, whole[0][:, 16:-16])
        write_codes_across_reference(weight, inverse, whole[1][:, 16:-16])
        found, expected = (each.float() for each in whole)
        if device == "cuda":
            assert same(found, expected), f"across {rows} x {width}"
        else:
            near = (found - expected).abs() <= expected.abs() * 2**-3 + 2**-9
            half = (2 * found == expected) & (expected.abs().frexp().mantissa == 0.5)
            assert (near | half).all(), f"across {rows} x {width}"


CHECKS = {
    "norm": check_norm,
    "norm backward": check_norm_backward,
    "glu": check_glu,
    "glu backward": check_glu_backward,
    "across": check_across,
    "order": check_parts_are_stored_before_they_are_read,
}

if __name__ == "__main__":
    begin()
    for name, check in CHECKS.items():
        check("cpu", getattr(torch, sys.argv[1]))
        print(name, "ok", flush=True)
