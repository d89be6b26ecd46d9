"""The offload engine: exact bits come back and memory is given back, whatever forwards and backwards do."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pronghorn.errors import TrainingError
from pronghorn.memory.offload import OffloadEngine
from pronghorn.memory.pinned import PinnedPool

LAYERS = 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Stack(nn.Module):
    """Residual layers with dropout, run through an engine, or as they are."""

    def __init__(self, width: int = 8, layers: int = LAYERS, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = dropout
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor, engine: OffloadEngine | None = None) -> Tensor:
        if self.dropout:
            torch.manual_seed(1)
        for index, layer in enumerate(self.layers):

            def residual(h: Tensor, layer: nn.Module = layer) -> Tensor:
                return h + layer(h)

            x = residual(x) if engine is None else engine.checkpoint(index, {}, residual, x)
        return x

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        assert len(found) == len(list(self.parameters()))
        self.zero_grad()
        return found


def inputs(seed: int = 0, rows: int = 6, width: int = 8, device: str = "cpu", **options: Any) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device, **options)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def all_free(engine: OffloadEngine, device: str = "cpu") -> bool:
    """On a GPU the backward ran in autograd's own thread, which may let go a moment after its caller goes on."""
    pool = engine.pool(torch.device(device))
    slots = sum(len(slots) for slots in pool._blocks.values())
    for _ in range(1 if device == "cpu" else 100):
        if pool.free_slots == slots:
            break
        time.sleep(0.01)
    return pool.free_slots == slots > 0


@pytest.fixture(autouse=True)
def nothing_waits_for_the_collector() -> Iterator[None]:
    """What is given back is given back by reference counts; but a process's first checkpoint imports, which keeps
    frames."""
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffers", [1, 2])
def test_gradients_are_those_of_kept_activations(device: str, dtype: torch.dtype, buffers: int) -> None:
    stack, engine = Stack().to(device, dtype), OffloadEngine(LAYERS - 1, buffers)
    x = inputs(device=device, dtype=dtype).requires_grad_()
    stack(x).sum().backward()
    wanted = [*stack.gradients(), x.grad]
    x.grad = None
    stack(x, engine).sum().backward()
    assert same([*stack.gradients(), x.grad], wanted)  # type: ignore[list-item]
    assert all_free(engine, device) and engine.host_bytes > 0


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_that_are_not_contiguous(device: str) -> None:
    stack, engine = Stack().to(device), OffloadEngine(LAYERS - 1)
    for x in (inputs(rows=8, device=device).t(), inputs(rows=12, device=device)[::2]):  # dense, and with gaps
        seen: list[Tensor] = []
        hook = stack.layers[0].register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0]))
        stack(x).sum().backward()
        wanted = stack.gradients()
        stack(x, engine).sum().backward()
        hook.remove()
        plain, forward, again = seen
        assert torch.equal(again, x) and plain is x is forward
        assert again.stride() == (x.stride() if x.stride() == (1, 8) else (8, 1))
        for found, exact in zip(stack.gradients(), wanted, strict=True):
            torch.testing.assert_close(found, exact)


def test_after_a_forward_only_the_last_input_is_on_the_device() -> None:
    stack, engine, seen = Stack(), OffloadEngine(LAYERS - 1), []
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(weakref.ref(arguments[0])))
    out = stack(inputs(), engine)
    assert [each() for each in seen] == [None] * LAYERS
    kept, on_device = engine._latest, []
    while kept is not None:
        on_device.append(kept().hidden is not None)  # type: ignore[union-attr]
        kept = kept().before  # type: ignore[union-attr]
    assert on_device == [True] + [False] * (LAYERS - 1)
    again = stack(inputs(), engine)
    assert engine._latest().before().before().before().before().before is None  # type: ignore[union-attr]
    del out, again


def fetches(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine fetches from now on: the layers' numbers, in order."""
    found: list[Any] = []
    plain = engine._fetch
    monkeypatch.setattr(engine, "_fetch", lambda kept: (found.append(kept.layer), plain(kept)))
    return found


@pytest.mark.parametrize(
    ("buffers", "order"), [(2, [3, 4, 2, 3, 1, 2, 0, 1, 0]), (1, [4, 3, 3, 2, 2, 1, 1, 0, 0])], ids=["two", "one"]
)
def test_the_layer_before_is_fetched_before_a_layer_computes(
    monkeypatch: pytest.MonkeyPatch, buffers: int, order: list[int]
) -> None:
    """With two buffers k − 1 comes before layer k runs again; the last layer's input never left."""
    stack, engine = Stack(), OffloadEngine(LAYERS - 1, buffers)
    out = stack(inputs(), engine)
    found = fetches(engine, monkeypatch)
    for index, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: found.append(index))
    out.sum().backward()
    assert found == order


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_several_forwards_before_their_backwards(device: str, order: list[int]) -> None:
    stack, engine = Stack().to(device), OffloadEngine(LAYERS - 1)
    wanted = []
    for seed in range(3):
        stack(inputs(seed, device=device)).square().sum().backward()
        wanted.append(stack.gradients())
    for _ in range(2):  # the second time through slots that were used
        losses = [stack(inputs(seed, device=device), engine).square().sum() for seed in range(3)]
        for seed in order:
            losses[seed].backward()
            assert same(stack.gradients(), wanted[seed])
    assert all_free(engine, device)


def test_a_second_backward_through_a_graph_is_refused() -> None:
    stack, engine = Stack(), OffloadEngine(LAYERS - 1)
    loss = stack(inputs(), engine).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="leave retain_graph out"):
        loss.backward()
    stack(inputs(), engine).sum().backward()
    del loss
    assert all_free(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_some_layers_only(device: str) -> None:
    """The input that was asked for and never used goes back, too."""
    stack, engine = Stack().to(device), OffloadEngine(LAYERS - 1)
    last = stack.layers[-1][0].weight
    [wanted] = torch.autograd.grad(stack(inputs(device=device)).sum(), [last])
    [found] = torch.autograd.grad(stack(inputs(device=device), engine).sum(), [last])
    assert torch.equal(found, wanted) and all_free(engine, device)


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_that_die_without_a_backward_give_their_slots_back(device: str) -> None:
    stack, engine = Stack().to(device), OffloadEngine(LAYERS - 1)
    out = stack(inputs(device=device), engine)
    assert not all_free(engine, device)
    del out
    assert all_free(engine, device)


def failing(times: list[int], at: int) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        times.append(0)
        if len(times) == at:
            raise RuntimeError("planted")

    return hook


@pytest.mark.parametrize("at", [1, 2], ids=["in forward", "in backward"])
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_an_exception_gives_everything_back(layer: int, at: int) -> None:
    stack, engine = Stack(), OffloadEngine(LAYERS - 1)
    stack(inputs()).sum().backward()
    wanted = stack.gradients()
    stack(inputs(), engine).sum().backward()
    stack.zero_grad()
    hook = stack.layers[layer].register_forward_pre_hook(failing([], at))
    with pytest.raises(RuntimeError, match="planted"):
        stack(inputs(), engine).sum().backward()
    hook.remove()
    assert all_free(engine)
    stack.zero_grad()
    held = engine.host_bytes
    stack(inputs(), engine).sum().backward()
    assert same(stack.gradients(), wanted) and engine.host_bytes == held


def test_layers_that_take_gradients_inside() -> None:
    class Nested(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x if x.requires_grad else x.detach().requires_grad_()
                out = self.layer(y)
                (inner,) = torch.autograd.grad(out.square().sum(), [y], create_graph=True)
            return out + inner

    stack, engine = Stack(dropout=0.0), OffloadEngine(LAYERS - 1)
    stack.layers = nn.ModuleList(Nested(layer) for layer in stack.layers)
    x = inputs().requires_grad_()
    stack(x).sum().backward()
    wanted = stack.gradients()
    stack(x, engine).sum().backward()
    for found, exact in zip(stack.gradients(), wanted, strict=True):
        torch.testing.assert_close(found, exact)
    assert all_free(engine)


def test_no_grad_takes_the_plain_way() -> None:
    stack, engine = Stack(), OffloadEngine(LAYERS - 1)
    with torch.no_grad():
        assert torch.equal(stack(inputs(), engine), stack(inputs()))
    assert engine.host_bytes == 0


def test_two_models_have_nothing_in_common() -> None:
    stacks = [Stack(), Stack(width=12)]
    engines = [OffloadEngine(LAYERS - 1) for _ in stacks]
    given = [inputs(), inputs(width=12)]
    wanted = []
    for stack, x in zip(stacks, given, strict=True):
        stack(x).sum().backward()
        wanted.append(stack.gradients())
    losses = [stack(x, engine).sum() for stack, x, engine in zip(stacks, given, engines, strict=True)]
    for loss in losses:
        loss.backward()
    assert all(same(stack.gradients(), exact) for stack, exact in zip(stacks, wanted, strict=True))
    engines[0].release()
    assert engines[0].host_bytes == 0 < engines[1].host_bytes


def test_a_thousand_steps_without_growth() -> None:
    stack, engine = Stack(layers=2, dropout=0.0), OffloadEngine(1)
    held = set()
    for step in range(1000):
        stack(inputs(rows=1 + step % 7), engine).sum().backward()
        held.add(engine.host_bytes)
        assert all_free(engine)
    assert len(held) <= 4  # some longest rows on the way


def test_released_in_mid_step() -> None:
    stack, engine = Stack(), OffloadEngine(LAYERS - 1)
    stack(inputs()).sum().backward()
    wanted = stack.gradients()
    loss = stack(inputs(), engine).sum()
    engine.release()
    assert engine.host_bytes == 0
    loss.backward()
    assert same(stack.gradients(), wanted) and engine.host_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_no_room_for_the_second_buffer(device: str) -> None:
    rooms = []

    def allocate(*shape: Any, **options: Any) -> Tensor:
        rooms.append(0)
        if len(rooms) == 2:
            raise torch.OutOfMemoryError("planted")
        return torch.empty_strided(*shape, **options)

    stack, engine = Stack().to(device), OffloadEngine(LAYERS - 1, allocate_device=allocate)
    stack(inputs(device=device)).sum().backward()
    wanted = stack.gradients()
    for _ in range(2):
        stack(inputs(device=device), engine).sum().backward()
        assert same(stack.gradients(), wanted)
    assert engine.buffers == 1 and engine.state.startswith("one buffer, no room for the second")


def test_no_room_for_the_only_buffer_is_an_error_that_gives_everything_back() -> None:
    def allocate(*shape: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    stack, engine = Stack(), OffloadEngine(LAYERS - 1, allocate_device=allocate)
    with pytest.raises(torch.OutOfMemoryError):
        stack(inputs(), engine).sum().backward()
    assert all_free(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_pinning_refused_is_said_and_pageable_memory_serves(device: str) -> None:
    def refuse(size: int) -> Tensor:
        raise RuntimeError("CUDA error: planted\nand more")

    pool = PinnedPool(True, refuse)
    assert pool.take(100).memory.numel() >= 100
    assert pool.kind == "pageable host memory, whose copies block (pinning was refused: CUDA error: planted)"
    stack, engine = Stack().to(device), OffloadEngine(LAYERS - 1, allocate_host=refuse)
    stack(inputs(device=device)).sum().backward()
    wanted = stack.gradients()
    stack(inputs(device=device), engine).sum().backward()
    assert same(stack.gradients(), wanted)
    assert ("refused" in engine.state) == (device == "cuda")


# ---- the pool ----


def test_slots_are_exact_where_lengths_are_round() -> None:
    pool = PinnedPool(False)
    for size in (8192 * 4096 * 2, 8192 * 5120 * 2):  # an 8B's and a 14B's input at 8,192 tokens
        assert pool.take(size).memory.numel() == size


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 4097, 10**6 + 1])
def test_slots_hold_what_they_are_asked_for(size: int) -> None:
    pool = PinnedPool(False)
    slots = [pool.take(size) for _ in range(9)]
    assert all(size <= slot.memory.numel() <= size * 9 / 8 + 64 for slot in slots)
    starts = sorted(slot.memory.data_ptr() for slot in slots)
    assert all(b - a >= size for a, b in pairwise(starts))
    assert pool.bytes & (pool.bytes - 1) == 0 or len(pool._blocks) > 1


def test_blocks_that_became_too_small_are_given_back() -> None:
    pool = PinnedPool(False)
    pool.give(pool.take(1000), None)
    kept = pool.take(1000)
    small = pool.bytes
    big = pool.take(10**6)
    assert pool.bytes > small and len(pool._blocks) == 2  # one slot of the small block is held
    pool.give(kept, None)
    pool.give(big, None)
    pool.take(10**7)
    assert len(pool._blocks) == 1
    pool.release()
    assert pool.bytes == 0 == pool.free_slots


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("way", [0, 1, None], ids=["slow download", "slow upload", "slow compute"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_copies_slow_or_fast_never_corrupt(way: int | None, buffers: int) -> None:
    """Whatever is late, what it would overwrite or be read from waits."""
    stack, engine = Stack(width=256, dropout=0.0).to("cuda"), OffloadEngine(LAYERS - 1, buffers)
    given = [inputs(seed, 512, 256, "cuda") for seed in range(4)]
    wanted = []
    for x in given:
        stack(x).square().mean().backward()
        wanted.append(stack.gradients())
    if way is None:
        for layer in stack.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(5_000_000))
    else:
        stream, copying = engine.streams(torch.device("cuda", torch.cuda.current_device()))[way], engine._copying

        def slowly(*arguments: Any) -> Any:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5_000_000)
            return copying(*arguments)

        engine._copying = slowly  # type: ignore[method-assign]
    for _ in range(3):
        for x, exact in zip(given, wanted, strict=True):
            loss = stack(x, engine).square().mean()
            junk = [torch.full_like(x, float("nan")) for _ in range(8)]  # takes memory that was let go of
            loss.backward()
            del junk
            assert same(stack.gradients(), exact)


@pytest.mark.gpu
def test_a_step_never_synchronises_and_memory_stays() -> None:
    stack, engine = Stack(width=64, dropout=0.0).to("cuda"), OffloadEngine(LAYERS - 1)
    x = inputs(0, 256, 64, "cuda")
    for _ in range(3):
        stack(x, engine).sum().backward()
        stack.zero_grad()
    torch.cuda.synchronize()
    device, host = torch.cuda.memory_allocated(), engine.host_bytes
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(1000):
            stack(x, engine).sum().backward()
            stack.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == device and engine.host_bytes == host


@pytest.mark.gpu
def test_inputs_leave_the_device_and_come_back_two_at_a_time() -> None:
    """Peak memory, whose count knows nothing of streams: no input is held longer than it is needed."""
    layers, rows, width = 12, 8192, 256
    size = rows * width * 4

    class Light(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width, device="cuda"))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def peak(engine: OffloadEngine | None) -> float:
        stack = Stack(layers=0)
        stack.layers = nn.ModuleList(Light() for _ in range(layers))
        x = torch.randn(rows, width, device="cuda", requires_grad=True)
        stack(x, engine).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        stack(x, engine).sum().backward()
        return (torch.cuda.max_memory_allocated() - start) / size

    assert peak(OffloadEngine(layers - 1)) <= 9
    assert peak(OffloadEngine(layers)) <= 9  # the last one leaves, too


@pytest.mark.gpu
def test_timings_tell_copy_compute_and_what_was_waited_for() -> None:
    exposed = {}
    for buffers in (1, 2):
        stack, engine = Stack(width=2048, dropout=0.0).to("cuda"), OffloadEngine(LAYERS - 1, buffers)
        x = inputs(0, 8192, 2048, "cuda")
        for timed in (False, True):
            engine.timed = timed
            stack(x, engine).sum().backward()
            stack.zero_grad()
        timings = engine.timings()
        assert [timing.layer for timing in timings] == [4, 3, 2, 1]
        assert timings[0].copy_ms == 0 and all(timing.copy_ms > 0.5 for timing in timings[1:])  # 67 MB
        assert all(timing.compute_ms > timing.copy_ms for timing in timings[1:])
        exposed[buffers] = sum(timing.exposed_ms for timing in timings)
        assert engine.timings() == []
    assert exposed[2] < 0.1 * exposed[1]
