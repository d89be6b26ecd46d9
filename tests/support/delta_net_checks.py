"""The Triton kernels around the gated delta rule against plain torch in float64, into poisoned memory.

tests/kernels/test_gated_delta_kernels.py calls these with a CUDA device, and runs this file under Triton's interpreter:

    TRITON_INTERPRET=1 python tests/support/delta_net_checks.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pronghorn.kernels import causal_conv, delta_gates, gated_norm
from support.interpreted import begin
from support.tolerance import ThreeWay

Run = Callable[..., Sequence[Tensor]]
LENGTHS = (1, 2, 3, 1, 40, 1, 65)
"""Documents of one token, shorter than the convolution, and over several tiles."""


def wide(*shape: int, dtype: torch.dtype, more: int = 5) -> Tensor:
    """Draw columns of a wider tensor, whose others are NaN."""
    whole = torch.full((shape[0], shape[1] + more), float("nan"), dtype=dtype)
    whole[:, : shape[1]] = torch.randn(shape[0], shape[1])
    return whole[:, : shape[1]]


def judge(name: str, dtype: torch.dtype, device: str, given: Sequence[Tensor], triton: Run, reference: Run) -> None:
    """Assert that the kernels' results are within the rule. Both ways are given tensors and the device's row of ids."""
    plain = reference(*given)
    exact = reference(*(x.double() if x.is_floating_point() else x for x in given))
    ours = triton(*(_on(x, device) for x in given))  # last: it may overwrite what it is given
    judged = ThreeWay()
    for i, (mine, theirs, right) in enumerate(zip(ours, plain, exact, strict=True)):
        assert mine.dtype is theirs.dtype and mine.shape == theirs.shape, (name, i, mine.dtype, theirs.dtype)
        judged.add(f"{name} {i}, {dtype}", mine.cpu(), theirs, right)
    judged.check()


def _on(x: Tensor, device: str) -> Tensor:
    """Move a tensor with the storage that it is a part of, so that strides stay."""
    if x.is_contiguous():
        return x.to(device)
    whole = x._base
    assert whole is not None
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def convolution(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), torch.tensor(LENGTHS))
    for channels, size in ((130, 4), (24, 3)):
        x, dy = (wide(len(ids), channels, dtype=dtype) for _ in range(2))
        weight = torch.randn(channels, size).to(dtype)

        def triton(x: Tensor, dy: Tensor, weight: Tensor, ids: Tensor) -> list[Tensor]:
            out = torch.full((len(ids), x.shape[1] + 3), float("nan"), dtype=x.dtype, device=x.device)
            again = dy.clone()
            dx, dw = causal_conv.backward_triton(dy, x, weight, ids, True, out[:, 3:])
            assert out[:, :3].isnan().all(), "written beside"
            alone, none = causal_conv.backward_triton(again, x, weight, ids, False)
            assert none is None and torch.equal(alone, dx)
            assert dw is not None
            return [causal_conv.forward_triton(x, weight, ids), dx, dw]

        def reference(x: Tensor, dy: Tensor, weight: Tensor, ids: Tensor) -> list[Tensor]:
            dx, dw = causal_conv.backward_reference(dy, x, weight, ids)
            assert dw is not None
            return [causal_conv.forward_reference(x, weight, ids), dx, dw]

        judge(f"convolution {channels}x{size}", dtype, device, [x, dy, weight, ids], triton, reference)


def norm(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    for tokens, heads, size in ((37, 3, 16), (9, 4, 128)):
        x, dy = (torch.randn(tokens, heads, size).to(dtype) for _ in range(2))
        z = wide(tokens, heads * size, dtype=dtype)
        weight = torch.randn(size).to(dtype)

        def triton(
            x: Tensor, dy: Tensor, z: Tensor, weight: Tensor, shape: tuple[int, int] = (heads, size)
        ) -> list[Tensor]:
            z = z.unflatten(1, shape)
            out = torch.full((len(x), heads_of(z) + 2), float("nan"), dtype=x.dtype, device=x.device)
            dx, dz, dw = gated_norm.backward_triton(dy, x, z, weight, 1e-6, True, out[:, 2:].unflatten(1, shape))
            assert out[:, :2].isnan().all(), "written beside"
            alone = gated_norm.backward_triton(dy, x, z, weight, 1e-6, False)
            assert alone[2] is None and torch.equal(alone[0], dx) and torch.equal(alone[1], dz)
            assert dw is not None
            return [gated_norm.forward_triton(x, z, weight, 1e-6), dx, dz, dw]

        def reference(
            x: Tensor, dy: Tensor, z: Tensor, weight: Tensor, shape: tuple[int, int] = (heads, size)
        ) -> list[Tensor]:
            z = z.unflatten(1, shape)
            dx, dz, dw = gated_norm.backward_reference(dy, x, z, weight, 1e-6)
            assert dw is not None
            return [gated_norm.forward_reference(x, z, weight, 1e-6), dx, dz, dw]

        judge(f"gated norm {heads}x{size}", dtype, device, [x, dy, z, weight], triton, reference)


def heads_of(z: Tensor) -> int:
    """Return the width of all heads."""
    return z.shape[1] * z.shape[2]


def both_ways(forward: Run, backward: Run) -> Run:
    """Join two functions into one that returns the results of both."""

    def run(dg: Tensor, d_beta: Tensor, b: Tensor, a: Tensor, decay: Tensor, step: Tensor) -> list[Tensor]:
        return [*forward(b, a, decay, step), *backward(dg, d_beta, b, a, decay, step)]

    return run


def gates(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    for tokens, heads in ((700, 3), (5, 32)):
        b, a = (wide(tokens, heads, dtype=dtype) * 4 for _ in range(2))
        b, a = torch.cat([b, a], 1).chunk(2, 1)
        dg, d_beta = torch.randn(tokens, heads), torch.randn(tokens, heads).to(dtype)
        decay, step = torch.tensor([-9.0, 0.0, 4.0])[torch.arange(heads) % 3], torch.randn(heads) * 20
        ours = both_ways(delta_gates.forward_triton, delta_gates.backward_triton)
        theirs = both_ways(delta_gates.forward_reference, delta_gates.backward_reference)
        judge(f"gates {heads}", dtype, device, [dg, d_beta, b, a, decay, step], ours, theirs)


CHECKS = {"convolution": convolution, "norm": norm, "gates": gates}

if __name__ == "__main__":
    begin()
    for name, check in CHECKS.items():
        for dtype in (torch.float32, torch.float16):  # the interpreter multiplies bfloat16's bits
            check(dtype, "cpu")
        print(name, "ok", flush=True)
