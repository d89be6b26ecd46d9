"""Each Triton kernel against its plain torch reference in float64, at odd sizes, into poisoned memory.

tests/kernels/test_kernels.py calls it with a CUDA device, and runs this file for the CPU under Triton's interpreter:

    TRITON_INTERPRET=1 python tests/support/kernel_checks.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.data.batch import TILE_ROWS, PackedBatch
from pronghorn.device import HOPPER
from pronghorn.kernels import (
    adapter_gradients,
    attention,
    cast_copies,
    cross_entropy,
    glu,
    moe_rows,
    norms,
    residual,
    rms_norm,
    rope,
)
from support.interpreted import begin
from support.tolerance import assert_three_way


class Kernels:
    """The functions of an operation's file that launch its Triton kernels, by their public names."""

    suffix = "triton"

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        plain = name.rstrip("_")
        return getattr(self.module, f"{plain}_{self.suffix}{name[len(plain) :]}")


class References(Kernels):
    """Its functions in plain torch, by their public names."""

    suffix = "reference"


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def written(function: Callable[..., Tensor], apart: int = 0) -> Callable[..., tuple[Tensor, Tensor]]:
    """What a function returns and what it makes of its first argument, a copy, with `apart` columns between rows."""

    def run(given: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        rows, columns = given.shape
        whole = given.new_full((rows, columns + apart), float("nan"))
        overwritten = whole[:, :columns].copy_(given)
        result = function(overwritten, *rest)
        assert whole[:, columns:].isnan().all()
        return result, overwritten

    return run


def on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function returns that overwrites its first argument."""
    return lambda given, *rest: function(given.clone(), *rest)


def compare(name: str, launch: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> None:
    """The kernel's results within twice the error of the reference in the same dtype, on the CPU."""

    def on_cpu(value: Any, dtype: torch.dtype | None = None) -> Any:
        if isinstance(value, rope.Heads):
            norms = [on_cpu(norm, dtype) for norm in (value.query_norm, value.key_norm)]
            return rope.Heads(value.query, value.key_value, value.dim, *norms, value.eps, value.offset, value.value)
        if isinstance(value, moe_rows.Rows):
            return moe_rows.Rows(*(on_cpu(each) for each in value))
        if not isinstance(value, Tensor):
            return value
        value = value.cpu().clone()
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value

    plain = reference(*(on_cpu(value) for value in arguments))
    exact = reference(*(on_cpu(value, torch.float64) for value in arguments))
    ours = launch(*arguments)
    results = [x if isinstance(x, tuple) else (x,) for x in (ours, plain, exact)]
    for index, (mine, theirs, wanted) in enumerate(zip(*results, strict=True)):
        if wanted is not None:
            assert mine.dtype is theirs.dtype, (name, index, mine.dtype)
            if wanted.numel():  # there may be queries alone
                assert_three_way(f"{name} result {index}", mine, theirs, wanted)


def check_rms_norm(device: str, dtype: torch.dtype) -> None:
    sizes = (1, 8), (5, 63), (33, 576), (3, 1100)
    if device == "cuda":
        return of_rms_norm(device, dtype, (*sizes, (600, 24)))  # the last: several rows a program
    with pytest.MonkeyPatch.context() as patch:  # fewer programs, which the interpreter runs one by one
        patch.setattr(rms_norm, "_PROGRAMS", rms_norm.SUM_ROWS + 6)
        of_rms_norm(device, dtype, (*sizes, (150, 24)))


def of_rms_norm(device: str, dtype: torch.dtype, sizes: Sequence[tuple[int, int]]) -> None:
    for index, (tokens, width) in enumerate(sizes):
        x, dy = (random(tokens, width, device=device, dtype=dtype, seed=s) for s in (1, 2))
        weight = random(width, device=device, dtype=dtype, seed=3)
        for offset in (0.0, 1.0) if device == "cuda" else (float(index % 2),):  # in turns for the interpreter
            compare("rms_norm", rms_norm.forward_triton, rms_norm.forward, x, weight, 1e-5, offset)
            _, rstd = rms_norm.forward(x.cpu(), weight.cpu(), 1e-5, offset)
            for weight_grad in (False, True):
                arguments = dy, x, weight, rstd.to(device), offset, weight_grad
                compare("rms_norm backward", rms_norm.backward_triton, rms_norm.backward, *arguments)
            more = random(tokens, width, device=device, dtype=torch.float32, seed=4)
            arguments = dy, x, weight, rstd.to(device), offset, False, more
            compare("rms_norm backward, sum", rms_norm.backward_triton, rms_norm.backward, *arguments)
            columns = of_columns(Kernels(rms_norm)), of_columns(References(rms_norm))
            compare("rms_norm of columns", *columns, dy, x, weight, offset)
            wide = x.float(), weight.float(), 1e-5, offset
            other = dtype if device == "cuda" else torch.float16
            narrowed = narrow(Kernels(rms_norm), other), narrow(References(rms_norm), other)
            compare("rms_norm, to another type", *narrowed, *wide)


def of_columns(module: Any) -> Callable[..., Any]:
    """The norm of some columns of a wider tensor, written to columns, and its backward in the place of dy."""

    def run(dy: Tensor, x: Tensor, weight: Tensor, offset: float) -> tuple[Tensor, ...]:
        wide = [each.new_full((len(each), each.shape[1] + 9), float("nan")) for each in (x, x, x)]
        of_x, of_y, of_dy = (each[:, 4:-5] for each in wide)
        of_x.copy_(x)
        of_dy.copy_(dy)
        y, rstd = module.forward(of_x, weight, 1e-5, offset, out=of_y)
        dx, dw = module.backward(of_dy, of_x, weight, rstd, offset, True, out=of_dy)
        assert all(each[:, :4].isnan().all() and each[:, -5:].isnan().all() for each in wide)
        return y.clone(), rstd, dx.clone(), dw

    return run


def narrow(module: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """The norm's forward into `dtype`; of float64 arguments, the exact result."""
    return lambda x, *rest: module.forward(x, *rest, x.dtype if x.dtype is torch.float64 else dtype)


def check_residual(device: str, dtype: torch.dtype) -> None:
    for tokens, width, rank in ((2, 5, 1), (17, 131, 6), (33, 64, 128), (70, 65, 20)):
        y, xa, b = (
            random(*shape, device=device, dtype=dtype, seed=seed)
            for seed, shape in enumerate([(tokens, width), (tokens, rank), (width, rank)])
        )
        for x_dtype in {dtype, torch.float32}:
            x = random(tokens, width, device=device, dtype=x_dtype, seed=5)
            for low_rank, times in itertools.product(((xa, b, 0.5), ()), (1.0, 0.22)):
                reference = on_a_copy(lambda y, x, m, *rest: residual.add_(y, x, rest or None, m))
                launch = on_a_copy(lambda y, x, m, *rest: residual.add_triton_(y, x, rest or None, m))
                compare(f"residual {width}, {len(low_rank)}, {times}", launch, reference, y, x, times, *low_rank)
                mine = y.clone()
                out = residual.add_triton_(mine, x, low_rank or None)
                assert (out.data_ptr() == mine.data_ptr()) is (x_dtype is dtype)


def check_adapter_gradients(device: str, dtype: torch.dtype) -> None:
    """One to three adapters, and one of three linears without; rows of dy that lie apart; dB in either dtype."""
    if device == "cuda" and (dtype is torch.float32 or torch.cuda.get_device_capability() != HOPPER):
        pytest.skip("not served there: `adapter_gradients.suits`")
    cases = (1, (3,), 1), (70, (40, 16, 24), 5), (33, (40, -16, 24), 16), (130, (512, 33), 20), (130, (4100, 33), 9)
    for tokens, widths, rank in cases:  # negative: a linear without an adapter
        columns, end = [], 0
        for width in widths:
            columns += [slice(end, end + width)] if width > 0 else []
            end += abs(width)
        if tokens == 70:  # programs of the interpreter follow each other: what one spoils the next would write over
            columns.reverse()
        ranks = [rank] * len(columns)
        dy = random(tokens, end + 3, device=device, dtype=dtype, seed=1)
        dy[:, end:] = float("nan")
        xa, b = random(tokens, sum(ranks), device=device, dtype=dtype, seed=2), dy.new_zeros(end, sum(ranks))
        for index, mine in enumerate(columns):
            part = random(mine.stop - mine.start, rank, device=device, dtype=dtype, seed=3 + index)
            b[mine, index * rank : (index + 1) * rank] = part
        for wanted in {dtype, torch.float32}:
            arguments = dy[:, :end], b, xa, columns, ranks, 0.5, wanted
            launch, reference = flat(Kernels(adapter_gradients)), flat(References(adapter_gradients))
            compare(f"adapters' gradients {tokens}", launch, reference, *arguments, False)
            if end == sum(mine.stop - mine.start for mine in columns):
                compare(f"adapters' gradients {tokens}, side by side", launch, reference, *arguments, True)


def flat(module: Any) -> Callable[..., tuple[Tensor, ...]]:
    """dya and every dB, and what is side by side if it is asked for; of float64 arguments, the exact results."""

    def run(dy: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *others, wanted, beside = rest
        both = dy.new_empty(len(dy), sum(b.shape)) if beside else None
        dya, dbs = module.products(dy, b, *others, dy.dtype if dy.dtype is torch.float64 else wanted, both)
        return (dya, *dbs) if both is None else (dya, *dbs, both)

    return run


def check_glu(device: str, dtype: torch.dtype) -> None:
    for tokens, width in ((1, 3), (7, 88), (2, 1025), (70, 65)):
        gate_up = random(tokens, 2 * width, device=device, dtype=dtype, seed=1) * 2
        da = random(tokens, width, device=device, dtype=dtype, seed=2)
        for activation in ("silu", "gelu_tanh"):
            compare(activation, glu.forward_triton, glu.forward, gate_up, activation)
            compare(
                f"{activation} backward", written(glu.backward_triton_), written(glu.backward_), da, gate_up, activation
            )

            launch = written(lambda da, gu, *rest: glu.backward_triton_(da, gu.clone(), *rest))
            compare(f"{activation} in place", launch, written(glu.backward_), da, gate_up, activation, True)
            for donated in (False, True):
                mine = gate_up.clone()
                grad = glu.backward_triton_(da.clone(), mine, activation, donated)
                assert (grad.data_ptr() == mine.data_ptr()) is donated and torch.equal(mine, gate_up) is not donated

            # in three numbers luck decides whose error is larger; one of two without an adapter; unequal ranks
            pairs = ((1, 1), (0, 40), (6, 0), (5, 20)) if tokens > 1 else ()
            if device == "cpu":  # half of them for each activation, which the interpreter takes long enough for
                pairs = pairs[::2] if activation == "silu" else pairs[1::2]
            for ranks in pairs:
                xa = random(tokens + 1, sum(ranks), device=device, dtype=dtype, seed=3)
                xa[tokens] = float("nan")  # nor is what lies behind xa
                xa = xa[:tokens]
                b = xa.new_full((2 * width, sum(ranks)), float("nan"))  # what is beside the two blocks isn't read
                b[:width, : ranks[0]] = random(width, ranks[0], device=device, dtype=dtype, seed=4)
                b[width:, ranks[0] :] = random(width, ranks[1], device=device, dtype=dtype, seed=5)
                launch, reference = written(glu.forward_with_low_rank_triton_), written(glu.forward_with_low_rank_)
                compare(f"{activation}, ranks {ranks}", launch, reference, gate_up, xa, b, 0.5, activation, ranks)


def check_rope(device: str, dtype: torch.dtype) -> None:
    cases = [(1, 1, 1, 16), (5, 4, 2, 64), (3, 9, 3, 32), (2, 3, 3, 128), (3, 17, 1, 256)]
    cases += [(4, 8, 8, 64), (3, 8, 8, 64), (4, 8, 2, 64)]  # programs full of tokens and heads, but for one of these
    whole = [(*case, case[-1], None) for case in cases]
    # columns that are turned; wide heads; queries alone, with keys, and with values
    some = [(5, 4, 2, 64, 32, None), (3, 9, 3, 128, 96, None), (4, 8, 8, 64, 2, None), (1, 17, 1, 256, 64, None)]
    some += [(3, 4, 2, 16, 0, None)]
    layouts = [(3, 2, 1, 512, 512, None), (3, 2, 1, 512, 512, 0), (3, 9, 0, 32, 32, 0)]
    for tokens, query, key_value, dim, turned, values in whole + some + layouts:
        angles = random(tokens, turned // 2, device="cpu", dtype=torch.float64, seed=1)
        cos, sin = (f(torch.cat([angles, angles], -1)).to(device, dtype) for f in (torch.cos, torch.sin))
        every = query + key_value + (key_value if values is None else values)
        qkv = random(tokens, every * dim, device=device, dtype=dtype, seed=2)
        norms = [random(dim, device=device, dtype=dtype, seed=s) for s in (3, 4)]
        grads = random(tokens, every, dim, device=device, dtype=dtype, seed=5)
        plain = rope.Heads(query, key_value, dim, value=values)
        for heads in (plain, rope.Heads(query, key_value, dim, *norms, 1e-6, 1.0, values)):
            raw = None if heads.query_norm is None else qkv.clone()
            more = torch.cat([qkv, qkv[:1]] * 2)  # behind it rows of nobody's
            compare("rope", rope.forward_triton, rope.forward, more[:tokens], cos, sin, heads)
            assert torch.equal(more[tokens:], torch.cat([qkv[:1], qkv, qkv[:1]]))
            for weight_grad in (False, True) if device == "cuda" or raw is not None else (False,):
                arguments = cos, sin, heads, raw, weight_grad
                compare("rope backward", on_a_copy(rope.backward_triton_), on_a_copy(rope.backward_), grads, *arguments)


def check_cross_entropy(device: str, dtype: torch.dtype) -> None:
    cases = (1, 5), (4, 131), (4, 136), (3, 16_383), (3, 16_385), (3, 40_003), (3, 40_008)
    for rows, vocab in cases:  # the last three: several programs a row
        logits = random(rows, vocab, device=device, dtype=dtype, seed=1) * (8 if vocab != 136 else 0.01)
        targets = torch.arange(rows, device=device) * 7 % vocab
        targets[-1] = min(16_384, vocab - 1)  # the first column of a program, or the last one
        targets[rows // 2] = -100
        for softcap in (None, 30.0):
            arguments = logits, targets, -100, softcap
            # the next row begins anywhere, or after 16 bytes or a multiple
            apart = 6 if vocab in (131, 136, 16_383, 40_003) else -vocab % 8
            launch = written(cross_entropy.cross_entropy_triton_, apart)
            reference = written(cross_entropy.cross_entropy_)
            compare("cross-entropy", launch, reference, *arguments)
    beyond = random(2, 77, device=device, dtype=dtype, seed=4) * 100, torch.tensor([76, 3], device=device), -100, 2.0
    compare("cross-entropy, beyond the cap", written(cross_entropy.cross_entropy_triton_), reference, *beyond)
    lowest = torch.full((2, 20_003), torch.finfo(dtype).min, device=device, dtype=dtype)
    arguments = lowest, torch.tensor([76, 3], device=device), -100, None
    launch, reference = written(cross_entropy.cross_entropy_triton_), written(cross_entropy.cross_entropy_)
    compare("cross-entropy, lowest logits", launch, reference, *arguments)
    # whole parts of a row of several may be excluded
    excluded = random(2, 40_008, device=device, dtype=dtype, seed=2)
    excluded[0, :20_000], excluded[1, 100:] = -torch.inf, -torch.inf
    arguments = excluded, torch.tensor([20_003, 7], device=device), -100, None
    compare("cross-entropy, excluded", launch, reference, *arguments)
    # an ignored row is 0 whatever its logits are; so is one of a label that could be one
    unknown = torch.full((2, 8200), float("nan"), device=device, dtype=dtype)
    losses, grads = launch(unknown, torch.tensor([5, 5], device=device), 5, None)
    assert losses.eq(0).all() and grads.eq(0).all()
    if device == "cuda":  # the order of a row's sums is always the same
        many = random(600, 40_008, device=device, dtype=dtype, seed=3)
        targets = torch.arange(600, device=device) * 66
        first, *others = (launch(many, targets, -100, None) for _ in range(5))
        assert all(torch.equal(*both) for other in others for both in zip(first, other, strict=True))
        static, graph = many.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = cross_entropy.cross_entropy_triton_(static, targets, -100, None)
        for _ in range(3):
            static.copy_(many)
            graph.replay()
            assert torch.equal(losses, first[0]) and torch.equal(static, first[1])
    # labels beyond the vocabulary tell on themselves, and leave the rows beside theirs alone
    for width in (8, 11):
        rows = torch.zeros(4, width, device=device, dtype=dtype)
        losses = cross_entropy.cross_entropy_triton_(rows[1:3, :8], torch.tensor([8, -1], device=device), -100, None)
        assert losses.isnan().all() and rows[:, 8:].eq(0).all()
        assert rows[:, :8].eq(torch.tensor([[0], [1 / 8], [1 / 8], [0]], device=device)).all()


def check_attention(device: str, dtype: torch.dtype) -> None:
    """Documents of one token, of whole tiles and of parts of them; keys and values shared by heads; windows."""
    if dtype is torch.float32 and device == "cuda":
        pytest.skip("not served there: `attention.backends.tiles_refusal`")
    cases = (
        ([1], 1, 1, 16, None, (False, True)),
        ([1, 64, 5, 63], 4, 2, 32, None, (False, True)),
        ([200, 1, 65], 3, 1, 64, 17, (True,)),
        ([130, 70], 2, 2, 128, 66, (False,)),  # the last query that sees a tile of keys has a step of its own
    )
    for lengths, query, key_value, dim, window, ways in cases:
        tokens = sum(lengths)
        tiles = PackedBatch.build(lengths, tokens=tokens).tiles.to(device)
        qkv, d_out = (
            random(tokens, heads, dim, device=device, dtype=dtype, seed=heads)
            for heads in (query + 2 * key_value, query)
        )
        q, k, v = rope.Heads(query, key_value, dim).split(qkv)
        for with_sinks in (False, True) if device == "cuda" else ways:  # the interpreter takes seconds for a long one
            sinks = random(query, device=device, dtype=dtype, seed=6) * 2 if with_sinks else None
            options = tiles, TILE_ROWS, dim**-0.5, window, sinks
            compare(f"attention {lengths}", attention.forward_triton, attention.forward, q, k, v, *options)
            backward, reference = both_ways(Kernels(attention)), both_ways(References(attention))
            compare(f"attention {lengths} backward", backward, reference, d_out, q, k, v, *options)


def both_ways(module: Any) -> Callable[..., Tensor]:
    """The backward after the same module's forward (which alone is told of sinks)."""

    def run(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        return module.backward(d_out, q, k, v, *module.forward(q, k, v, *options), *options[:-1])

    return run


def check_cast_copies(device: str, dtype: torch.dtype) -> None:
    """Whole targets and columns of wider ones, whose other columns stay as they are; every entry is exact."""
    shapes = (1, 1), (8, 63), (16, 1000), (3000, 16), (5, 4097)
    sources = [random(*shape, device=device, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    wide = [torch.full((rows, columns + 7), float("nan"), device=device, dtype=dtype) for rows, columns in shapes]
    targets = [each[:, 3 : 3 + columns] for each, (_, columns) in zip(wide, shapes, strict=True)]
    largest = max(each.numel() for each in sources)
    table = cast_copies.table(targets, sources).to(device)
    cast_copies.copy(table, len(sources), largest, torch.float32, dtype)
    for whole, target, source in zip(wide, targets, sources, strict=True):
        assert torch.equal(target, source.to(dtype))
        assert whole[:, :3].isnan().all() and whole[:, 3 + source.shape[1] :].isnan().all()


def check_norms(device: str, dtype: torch.dtype) -> None:
    sizes = (1, 5, 63, 0, 4097, norms.PART + 1, 2 * norms.PART + 3)
    some = [random(size, device=device, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]
    some += [some[4][1:], some[4][:4096].view(64, 64) * 100]  # not where 16 bytes begin; beyond float16's squares
    for each in (some, some[:5]):
        compare("norms", lambda *x: norms.norms_triton(list(x)), lambda *x: norms.norms_reference(list(x)), *each)
    told = [
        torch.zeros(9, device=device, dtype=dtype),
        *(torch.full((5000,), x, device=device, dtype=dtype) for x in BAD),
    ]
    assert norms.norms_triton(told).isfinite().tolist() == [True, False, False] and norms.norms_triton(told)[0] == 0
    if device == "cuda":
        other = torch.ones(2, 3, device=device, dtype=dtype)
        for mixed in ([other, other.double()], [other.t(), other], [other.double()]):
            assert torch.equal(norms.norms(mixed), norms.norms_reference(mixed))


BAD = float("inf"), float("nan")

CHECKS = {
    "rms_norm": check_rms_norm,
    "residual": check_residual,
    "adapter_gradients": check_adapter_gradients,
    "glu": check_glu,
    "rope": check_rope,
    "cross_entropy": check_cross_entropy,
    "attention": check_attention,
    "norms": check_norms,
    "cast_copies": check_cast_copies,
}

if __name__ == "__main__":
    begin()
    for name, check in CHECKS.items():
        check("cpu", torch.float16 if name == "residual" else torch.float32)  # it adds two dtypes
        print(name, "ok", flush=True)
