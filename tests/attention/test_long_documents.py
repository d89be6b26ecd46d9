"""Long documents of a packed row by cuDNN: lengths, tiles of the others, padded buffers; on Hopper the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.attention import explicit, long_documents
from pronghorn.attention.long_documents import LEAST_TOKENS, least_tokens, padded_length
from pronghorn.attention.masked import per_document_attention
from pronghorn.data.batch import PackedBatch
from pronghorn.device import has_cudnn_attention
from pronghorn.layers.attention import AttentionBlock
from pronghorn.models import report
from pronghorn.models.attach import attach
from pronghorn.models.graph import BackboneGraphs
from support.documents import gradients, one_document_at_a_time
from support.fused import with_adapters
from support.tiny import packed_row, tiny_model
from support.tolerance import ThreeWay

LEAST = 128
LENGTHS = [300, 5, 128, 260, 64, 1, 127]
"""Two to be padded, one of a whole length, the last one just too short."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(lengths: list[int], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """(q, k and v side by side, d_out)."""
    tokens = sum(lengths)
    return random(tokens, heads + 2 * kv_heads, dim), random(tokens, heads, dim, seed=1)


def test_few_lengths_and_little_padding() -> None:
    for exponent in range(7, 17):
        octave = range(2**exponent, 2 ** (exponent + 1))
        padded = [padded_length(length) for length in octave]
        assert len({length for length in padded if length < 2 * octave[0]}) <= 16
        assert padded == sorted(padded) and all(length % 128 == 0 for length in padded)
        for length, longer in zip(octave, padded, strict=True):
            assert length <= longer < length + max(128, length / 16) and padded_length(longer) == longer
    assert [padded_length(n) for n in (2048, 2049, 8192, 8193, 33000)] == [2048, 2176, 8192, 8704, 34816]


@pytest.mark.parametrize("least", [1, 64, 65, 128, 300, 301])
def test_tiles_of_the_others(least: int) -> None:
    packed = PackedBatch.build(LENGTHS, tokens=sum(LENGTHS))
    documents, rest = packed.split(least)
    assert documents == [(start, end) for start, end in packed.segments if end - start >= least]
    expected = [tile for tile in packed.tiles.tolist() if tile[0] == tile[2] or tile[2] - tile[1] < least]
    assert rest.tolist() == expected
    assert packed.split(least)[1] is rest and packed.clone().split(least)[1] is not rest


class StandIn:
    """cuDNN's two operators in plain torch; notes the lengths, and whether it was given what isn't finite."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.finite: list[bool] = []

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, ...]:
        self.lengths.append(q.shape[2])
        self.finite.append(all(bool(x.isfinite().all()) for x in (q, k, v)))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = self._scores(q, k, scale)
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True), torch.zeros(()), torch.zeros(())

    def gradients(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *unused: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
        p = torch.exp(self._scores(q, wide_k, scale) - lse)
        ds = p * (d_out @ wide_v.mT - (d_out * out).sum(-1, keepdim=True)) * scale
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ q, p.mT @ d_out))
        return ds @ wide_k, dk, dv

    @staticmethod
    def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT * scale).masked_fill(later, float("-inf"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(long_documents, "_attention", found.attention)
    monkeypatch.setattr(long_documents, "_gradients", found.gradients)
    return found


def exact(qkv: Tensor, heads: int, packed: PackedBatch, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """(out, the gradients side by side), one document at a time in the tensors' dtype."""
    leaf = qkv.clone().requires_grad_()
    kv_heads = (qkv.shape[1] - heads) // 2
    out = per_document_attention(*leaf.split([heads, kv_heads, kv_heads], 1), packed, qkv.shape[2] ** -0.5, None)
    return out.detach(), torch.autograd.grad(out, leaf, d_out)[0]


@pytest.mark.parametrize("poisoned", [None, 0, 1, 3])
def test_padded_buffers(poisoned: int | None, stand_in: StandIn, nan_memory: None) -> None:
    """To 1e-12 in float64; a document of NaN, short or long, poisons itself only."""
    packed = PackedBatch.build(LENGTHS, tokens=sum(LENGTHS))
    qkv, d_out = drawn(LENGTHS, 4, 2, 16)
    out, grads = exact(qkv, 4, packed, d_out)
    healthy = torch.ones(len(qkv), dtype=torch.bool)
    if poisoned is not None:
        start, end = packed.segments[poisoned]
        qkv[start:end], healthy[start:end] = float("nan"), False
    options = explicit.Options(packed, 0.25, None, "tiled", LEAST)
    leaf = qkv.requires_grad_()
    ours = explicit.attention(*leaf.split([4, 2, 2], 1), options)
    ours.backward(d_out)
    assert stand_in.lengths == [384, 128, 384] and stand_in.finite == [poisoned != n for n in (0, 2, 3)]
    torch.testing.assert_close(ours[healthy], out[healthy], atol=1e-12, rtol=0)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[healthy], grads[healthy], atol=1e-12, rtol=0)


def test_windows_and_sinks_keep_to_tiles(stand_in: StandIn) -> None:
    packed = PackedBatch.build([300, 84], tokens=384)
    (q, k, v), sinks = drawn([300, 84], 4, 2, 16)[0].split([4, 2, 2], 1), random(4)
    for window, given, calls in ((100, None, 0), (None, sinks, 0), (384, None, 1)):
        options = explicit.Options(packed, 0.25, window, "tiled", LEAST)
        explicit.forward(q, k, v, options, given)
        assert len(stand_in.lengths) == calls


def test_a_model_with_long_documents(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen in the forward; in the backward nobody asks again."""
    asked: list[int] = []

    def options(parts: Any, query: Tensor, packed: PackedBatch) -> explicit.Options:
        asked.append(1)
        return explicit.Options(packed, parts.scale, parts.window, "tiled", LEAST)

    monkeypatch.setattr(AttentionBlock, "options", options)
    model = with_adapters(tiny_model("qwen3")).double()
    batch = packed_row([150, 20, 130], 320, seed=2)
    _, loss = one_document_at_a_time(model, batch)
    loss.backward()
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    attach(model, layers="fused")
    ours = model(**batch).loss
    ours.backward()
    assert stand_in.lengths == [256, 256] * 3 and len(asked) == 1  # a forward, as all layers are alike
    torch.testing.assert_close(ours, loss.to(ours.dtype), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_chosen_on_hopper_only_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: device.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert has_cudnn_attention.__wrapped__()  # by the operator's arguments, which every build of torch knows
    monkeypatch.setattr(long_documents, "has_cudnn_attention", lambda: True)

    def least(dim: int, capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16) -> int | None:
        device = SimpleNamespace(type="cuda", capability=capability)
        return least_tokens(SimpleNamespace(device=device, dtype=dtype, shape=(0, dim)))  # type: ignore[arg-type]

    assert [least(dim) for dim in (16, 64, 128, 256)] == [None, 4096, 4096, None]
    assert least(128, (8, 0)) is least(128, (10, 0)) is least(128, dtype=torch.float32) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert least(128) is None
    assert least(128) == 4096
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert least(128) is None

    monkeypatch.setattr(report, "choose", lambda *_: ("tiled", "why"))
    monkeypatch.setattr(report, "long_from", lambda backend, _: 2048 if backend == "auto" else None)
    for family, path in (
        ("llama", "tiled; documents of 2,048 tokens and more by cuDNN"),
        ("mistral", "tiled; documents of 2,048 tokens and more by cuDNN where no window cuts them"),
        ("gpt_oss", "tiled"),
    ):
        assert attach(tiny_model(family)).report[0].path == path


def test_graphs_leave_long_documents_out() -> None:
    backbone: Any = torch.nn.Linear(1, 1)
    backbone.layers, backbone.config = [], None
    backbone.__dict__["_pronghorn_layers"] = SimpleNamespace(generation=1)
    graphs = BackboneGraphs(backbone, lambda: None, True, lambda: None, lambda: 100, lambda: None)
    captured: list[Any] = []
    graphs._capture = lambda *given: captured.append(given)  # type: ignore[method-assign]
    embeds = torch.zeros(1, 128, 4)
    for lengths in ([100, 28], [128]):
        assert graphs.forward(embeds, embeds, PackedBatch.build(lengths, tokens=128)) is None and not captured
    graphs.forward(embeds, embeds, PackedBatch.build([99, 29], tokens=128))
    assert len(captured) == 1
    assert graphs.state == ("on", "asked for; not for rows with a document of 100 tokens or more")


# --- on Hopper


@pytest.fixture
def hopper() -> Iterator[None]:
    """A GPU that cuDNN's attention is chosen on, its free memory full of NaN."""
    query = torch.empty(0, 128, dtype=torch.bfloat16, device="cuda")
    if least_tokens(query) is None:
        pytest.skip(f"cuDNN's attention is not chosen on {torch.cuda.get_device_name()}")
    poison = [torch.full((2**size,), float("nan"), device="cuda") for size in range(8, 28)]
    del poison
    yield


CASES = [
    ([4097, 100, 5001, 7, 4096, 987], 32, 8, 128),
    ([4097, 100, 5001, 7, 4096, 987], 16, 8, 128),
    ([4097, 100, 4096, 1], 32, 8, 64),
    ([4200] * 2, 16, 8, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim"), CASES)
def test_against_one_document_at_a_time(
    lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, hopper: None
) -> None:
    packed = PackedBatch.build(lengths, tokens=sum(lengths), device="cuda")
    qkv, d_out = (x.cuda().to(dtype) for x in drawn(lengths, heads, kv_heads, dim))
    parts, scale = [heads, kv_heads, kv_heads], dim**-0.5
    chosen = explicit.Options.choose("auto", qkv, packed, scale, None)
    assert chosen.long == LEAST_TOKENS
    plain = exact(qkv, heads, packed, d_out)
    reference = exact(qkv.float(), heads, packed, d_out.float())
    leaf = qkv.clone().requires_grad_()
    out = explicit.attention(*leaf.split(parts, 1), chosen)
    out.backward(d_out)
    assert leaf.grad is not None
    errors = ThreeWay()
    errors.add("out", out, plain[0], reference[0])
    for name, *found in zip(
        ("dq", "dk", "dv"), *(x.split(parts, 1) for x in (leaf.grad, plain[1], reference[1])), strict=True
    ):
        errors.add(name, *found)
    errors.check()


@pytest.mark.gpu
def test_deterministic_mode_is_by_tiles(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_documents, "_attention", None)  # not to be called
    packed = PackedBatch.build([4500, 60], tokens=4560, device="cuda")
    qkv, d_out = (x.cuda().bfloat16() for x in drawn([4500, 60], 16, 8, 128))
    torch.use_deterministic_algorithms(True)
    try:
        options, found = explicit.Options.choose("auto", qkv, packed, 0.1, None), []
        for _ in range(2):
            leaf = qkv.clone().requires_grad_()
            out = explicit.attention(*leaf.split([16, 8, 8], 1), options)
            out.backward(d_out)
            found.append((out, leaf.grad))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_a_model_on_hopper(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a long document: as without one in the tolerance of 16 bits, and without a graph."""
    batch = packed_row([4200, 9, 120], 4352, seed=3)
    tiny = tiny_model("qwen3", head_dim=128, max_position_embeddings=8192, num_hidden_layers=2)
    model = with_adapters(tiny)
    _, loss = one_document_at_a_time(model.double(), batch)
    loss.backward()
    expected, found = {name: grad.clone() for name, grad in gradients(model).items()}, {}
    model.zero_grad()
    model.float()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model.cuda()
    on_device, calls, whole = {name: x.to("cuda") for name, x in batch.items()}, [], long_documents._attention
    monkeypatch.setattr(
        long_documents, "_attention", lambda *given, scale: calls.append(1) or whole(*given, scale=scale)
    )
    for backend in ("per_document", "auto"):
        handle = attach(model, attention=backend, layers="fused", graph="on")  # type: ignore[arg-type]
        model.zero_grad()
        ours = model(**on_device).loss
        ours.backward()
        found[backend] = ours, {name: grad.clone() for name, grad in gradients(model).items()}
    assert len(calls) == 2 and not handle.graphs._captured  # type: ignore[union-attr]
    assert "4,096 tokens" in handle.report[0].path
    errors = ThreeWay()
    for name, grad in expected.items():
        errors.add("gradients", found["auto"][1][name], found["per_document"][1][name], grad)
    errors.check()
    assert found["auto"][0].item() == pytest.approx(loss.item(), rel=0.01)
