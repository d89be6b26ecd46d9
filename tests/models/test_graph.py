"""The backbone as CUDA graphs: the same bits as without, whatever the batches; and what isn't captured."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from pronghorn.data.batch import room_for
from pronghorn.device import graph_bytes
from pronghorn.errors import ConfigError, TrainingError
from pronghorn.kernels.cast_copies import CastCopies
from pronghorn.layers.block import Block
from pronghorn.layers.decoder import STEP
from pronghorn.memory.plan import POLICY, Plan, Policy
from pronghorn.models import metadata
from pronghorn.models.attach import _graph_refusal, attach, attached
from pronghorn.models.families import base_causal_lm
from pronghorn.models.graph import MOST_GRAPHS, BackboneGraphs, graphed_class, runs_of
from pronghorn.models.graph import _fingerprint as fingerprint_of_the_build
from pronghorn.models.graph_benefit import LOOKED_AT, MEASURED_FORWARDS, MEASURED_REPLAYS, GraphBenefit
from pronghorn.models.graph_replay import Captured, Replay
from support.bases import based
from support.changes import CHANGES, adapted
from support.documents import LENGTHS, ROW, gradients
from support.fused import BIASED, WIDE, with_adapters
from support.tiny import DELTA_FAMILIES, FAMILIES, packed_row, tiny_model

ROWS = [LENGTHS, [90], [3] * 30, LENGTHS[::-1], [2] * 16 + [1] * 64, [1, 95], [2] * 40]
"""Up to 32 documents, up to 64, and up to 128: three graphs."""


def on_device(lengths: list[int], seed: int) -> dict[str, Any]:
    return {name: value.to("cuda") for name, value in packed_row(lengths, ROW, seed=seed).items()}


def graph_path(handle: Any) -> tuple[str, str]:
    [path] = [path for path in handle.report if path.part == "CUDA graph of the layers"]
    return path.path, path.why


def losses_and_gradients(model: Any, graph: Any, compute: str = "dtype") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of several micro-batches, gradients summed up."""
    attach(model, layers="fused", graph=graph, compute=compute)
    model.zero_grad()
    losses = []
    for seed, lengths in enumerate(ROWS):
        loss = model(**on_device(lengths, seed)).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: grad.clone() for name, grad in gradients(model).items()}


def linears_of(backbone: Any) -> list[Any]:
    """All merged products of the layers as they were built."""
    blocks = [block for run in runs_of(backbone) for block in run.blocks if isinstance(block, Block)]
    return [linear for block in blocks for linear in block.linears]


def look(backbone: Any) -> None:
    """Look at the layers, as the backbone's pre-hook does before each forward."""
    layers = backbone.__dict__["_pronghorn_layers"]
    layers.begin(packed_row(LENGTHS, ROW)["packed"], backbone.embed_tokens.weight.dtype, narrow=False)


def _fingerprint(backbone: Any) -> list[Any]:
    """What captured graphs rely on, once the layers were looked at."""
    look(backbone)
    return fingerprint_of_the_build(backbone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_layers_without_a_graph(family: str, dtype: torch.dtype) -> None:
    wide = {"linear_key_head_dim": 16} if family in DELTA_FAMILIES else {}  # the least that Triton multiplies
    model = with_adapters(tiny_model(family, **wide))
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    model.to("cuda")
    losses, grads = losses_and_gradients(model, "off")
    for _ in range(2):  # captured, and replayed
        again, same = losses_and_gradients(model, "on")
        assert again == losses
        assert all(torch.equal(grads[name], same[name]) for name in grads)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("base", "compute"),
    [
        *(("bf16", compute) for compute in ("fp8", "fp8_both", "int8")),
        *(("nf4", compute) for compute in ("dtype", "fp8", "fp8_exact", "int8")),
    ],
)
def test_bases_in_8_and_4_bits_are_captured(base: str, compute: str) -> None:
    model = based("qwen3", base).to("cuda")
    losses, grads = losses_and_gradients(model, "off", compute)
    for _ in range(2):
        again, same = losses_and_gradients(model, "on", compute)
        assert again == losses
        assert all(torch.equal(grads[name], same[name]) for name in grads)
    [path] = [path for path in attached(model).report if path.part == "CUDA graph of the layers"]
    assert path.path == "on", path.why
    name = "model.layers.0.self_attn.q_proj.base_layer.weight"
    if base == "bf16":  # codes made of a weight that was written to are made, and captured, again
        with torch.no_grad():
            base_causal_lm(model).get_parameter(name).mul_(1.5)
        changed, _ = losses_and_gradients(model, "on", compute)
        assert changed != losses and changed == losses_and_gradients(model, "off", compute)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp8", "fp8_both"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_in_8_bits_are_captured(family: str, compute: str) -> None:
    model = with_adapters(
        tiny_model(family, moe_intermediate_size=64, intermediate_size=64).bfloat16(),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ).to("cuda")
    losses, grads = losses_and_gradients(model, "off", compute)
    for _ in range(2):
        again, same = losses_and_gradients(model, "on", compute)
        assert again == losses
        assert all(torch.equal(grads[name], same[name]) for name in grads)
    handle = attached(model)
    [path] = [path for path in handle.report if path.part == "CUDA graph of the layers"]
    assert path.path == "on" and handle.layers.lent_codes(), path.why


@pytest.fixture
def captured(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model = with_adapters(tiny_model("qwen3"))
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model.to("cuda")
    return model, attach(model, layers="fused", graph="on")


@pytest.mark.gpu
def test_adapters_that_were_updated_are_read(captured: tuple[Any, Any]) -> None:
    model, _ = captured
    batch = on_device(LENGTHS, 0)
    first = model(**batch).loss
    first.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    second = model(**batch).loss.item()
    attach(model, layers="fused", graph="off")
    assert second == model(**batch).loss.item() != first.item()


@pytest.mark.gpu
def test_weights_that_moved_and_adapters_that_were_switched_are_captured_again(captured: tuple[Any, Any]) -> None:
    model, _ = captured
    batch = on_device(LENGTHS, 0)
    loss = model(**batch).loss.item()
    model.cpu().cuda()
    assert model(**batch).loss.item() == loss
    model.base_model.disable_adapter_layers()
    without = model(**batch).loss.item()
    model.base_model.enable_adapter_layers()
    assert model(**batch).loss.item() == loss != without


@pytest.mark.gpu
def test_a_graph_keeps_what_it_writes_to() -> None:
    """A forward of other scales in between makes layers other copies of the adapters; theirs must not be freed."""
    model = with_adapters(tiny_model("qwen3"), r=4)  # whose A lies below no weight, which would be moved and noticed
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    handle = attach(model.to("cuda"), layers="fused", graph="on")
    batch = on_device(LENGTHS, 0)
    first = model(**batch).loss.item()
    [captured] = handle.graphs._captured.values()  # type: ignore[union-attr]
    linears = [module for module in model.modules() if hasattr(module, "lora_A")]
    for linear in linears:
        linear.scale_layer(2.0)
    with torch.no_grad():
        assert model(**batch).loss.item() != first
    for linear in linears:
        linear.unscale_layer()
    others = [torch.full((size,), torch.nan, device="cuda") for size in [128, 256, 512, 1024] * 200]
    assert model(**batch).loss.item() == first
    assert all(other.isnan().all() for other in others)
    assert [*handle.graphs._captured.values()] == [captured]  # type: ignore[union-attr]
    another = on_device([2] * 40, 1)  # layers make their copies for these scales again
    second = model(**another).loss.item()
    for _ in range(2):
        assert model(**batch).loss.item() == first and model(**another).loss.item() == second
    assert len(handle.graphs._captured) == 2  # type: ignore[union-attr]


@pytest.mark.gpu
def test_a_second_forward_before_a_backward_goes_without(captured: tuple[Any, Any]) -> None:
    model, handle = captured
    for others in (LENGTHS, [2] * 40):  # the same graph, and one of another bucket
        wanted = []
        for seed, lengths in enumerate((LENGTHS, others)):
            model.zero_grad()
            model(**on_device(lengths, seed)).loss.backward()
            wanted.append({name: grad.clone() for name, grad in gradients(model).items()})
        model.zero_grad()
        before = handle.graphs.replays
        first = model(**on_device(LENGTHS, 0)).loss
        model(**on_device(others, 1)).loss.backward()
        first.backward()
        assert handle.graphs.replays == before + 2, "one forward and its backward"
        for name, grad in gradients(model).items():
            right = wanted[0][name] + wanted[1][name]
            assert (grad - right).norm() <= 1e-2 * right.norm(), name


@pytest.mark.gpu
def test_evaluation_and_recompute_go_without(captured: tuple[Any, Any]) -> None:
    model, _ = captured
    batch = on_device(LENGTHS, 0)
    trained = model(**batch).loss.item()
    with torch.no_grad():
        assert model(**batch).loss.item() == trained
    assert model.eval()(**batch).loss.item() == trained
    handle = attach(model.train(), Plan.recompute(), layers="fused", graph="on")
    assert graph_path(handle) == ("off", "layers are recomputed")
    model(**batch).loss.backward()
    base = model.get_base_model()
    handle.detach()
    assert "_pronghorn_graphs" not in base.model.__dict__
    assert (
        type(base.model).__module__.startswith("transformers") and type(base.model).__mro__[1].__name__ != "Qwen3Model"
    )


@pytest.mark.gpu
def test_auto_measures_first() -> None:
    """Of many tiny layers, so that a graph pays even where the host is at work on other things."""
    model = with_adapters(tiny_model("qwen3", num_hidden_layers=12)).to("cuda", torch.bfloat16)
    handle = attach(model, layers="fused", graph="auto")
    assert graph_path(handle) == ("off", "the first steps measure whether it pays")
    for seed in range(MEASURED_FORWARDS + 1):
        model(**on_device(LENGTHS, seed)).loss.backward()
        torch.cuda.synchronize()
    path, why = graph_path(handle)  # nothing but launching
    assert path == "on" and "of a forward's time" in why and "a graph" not in why
    assert handle.report[-1].path == "keep; in the graph norms' results are made again"
    for seed in range(MEASURED_REPLAYS + 2):
        model(**on_device(LENGTHS, seed)).loss.backward()
        torch.cuda.synchronize()
    assert graph_path(handle)[0] == "on" and "a graph" in graph_path(handle)[1]
    assert len(handle.graphs._captured) == 1


@pytest.mark.gpu
def test_another_graph_takes_no_memory_beside_the_first() -> None:
    """Rows of other numbers of documents are warmed up in what the first graph holds, but for the backward, whose
    thread takes its memory elsewhere; and each has inputs, output and the output's gradient of its own."""
    own, backward = 3 * 16384 * 512 * 2, 16384 * (2 * 512 + 2048) * 2
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "max_position_embeddings": 16384}
    model = with_adapters(tiny_model("llama", **sizes)).to("cuda", torch.bfloat16)
    losses, most = [], []
    for graph in ("off", "on"):
        handle = attach(model, layers="fused", graph=graph)
        gc.collect()
        torch.cuda.empty_cache()
        rest = torch.cuda.memory_reserved()  # tests before leave pieces of pages
        for lengths in ([512] * 32, [256] * 64, [128] * 128):
            row = {name: value.to("cuda") for name, value in packed_row(lengths, 16384).items()}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                loss = model(**row).loss
                loss.backward()
            losses.append(loss.item())
            most.append(torch.cuda.max_memory_reserved() - rest)
            model.zero_grad()
            del row, loss
    assert losses[3:] == losses[:3] and len(handle.graphs._captured) == 3  # type: ignore[union-attr]
    assert graph_bytes() > 2**29
    *plain, first, second, third = most
    assert first < 1.1 * max(plain), most
    assert second < 1.05 * first + own + backward and third < 1.05 * first + 2 * own + backward, most


class CudaOnTheCPU:
    """In the place of `torch.cuda`: streams are names, a capture just runs, and `fails` breaks it off at its end."""

    fails = False

    def __init__(self) -> None:
        self.current = "main"
        self.waits: list[tuple[str, str]] = []

    def _named(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, device=torch.device("cpu"), wait_stream=lambda other: self.waits.append((name, other.name))
        )

    def Stream(self, _: Any) -> Any:
        return self._named("aside")

    def current_stream(self, _: Any) -> Any:
        return self._named(self.current)

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def graph_pool_handle(self) -> Any:
        return object()

    def empty_cache(self) -> None:
        pass

    def synchronize(self, _: Any) -> None:
        pass

    @contextmanager
    def use_mem_pool(self, *_: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _: Any, stream: Any, **__: Any) -> Iterator[None]:
        """As in torch: where the end of a capture fails its stream stays the current one."""
        before, self.current = self.current, stream.name
        yield
        if self.fails:
            raise RuntimeError("capture failed")
        self.current = before


def graphs_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> BackboneGraphs:
    with monkeypatch.context() as as_on_cuda:
        as_on_cuda.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        graphs = attach(model, layers="fused", graph="on").graphs
    assert graphs is not None
    monkeypatch.setattr(graphs, "_refusal", lambda: None)
    return graphs


def forward_with(
    cuda: Any, graphs: BackboneGraphs, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    row = packed_row(lengths, ROW)
    embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
    look(graphs._backbone)
    with monkeypatch.context() as faked:
        faked.setattr(torch, "cuda", cuda)
        hidden = graphs.forward(embeds, row["position_ids"], row["packed"])
    assert hidden is not None
    return hidden


@pytest.mark.parametrize("given_back", [False, True])
def test_a_loss_that_is_kept_keeps_no_graph_and_no_model(given_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward needs the memory once graphs are given back. A backward after that waits for its replay, as
    nobody else keeps what it writes to."""
    cuda, waited = CudaOnTheCPU(), []
    graphs = graphs_of(with_adapters(tiny_model("llama")), monkeypatch)
    loss = forward_with(cuda, graphs, LENGTHS, monkeypatch).sum()
    [captured] = map(weakref.ref, graphs._captured.values())
    layer = weakref.ref(graphs._backbone.layers[0])
    if given_back:
        graphs._captured.clear()
    stream = SimpleNamespace(synchronize=lambda: waited.append(captured() is not None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    loss.backward()
    assert waited == [True] * given_back and (captured() is None) is given_back
    monkeypatch.undo()
    graphs._captured.clear()
    del graphs
    gc.collect()
    assert captured() is None and layer() is None and loss.grad_fn is not None


def test_a_loss_that_is_kept_keeps_no_weights() -> None:
    """As with stock layers: in a notebook it outlives the model that another is to take the place of."""
    for layers in ("stock", "fused"):
        model = with_adapters(tiny_model("llama"))
        attach(model, layers=layers)  # type: ignore[arg-type]
        linear = weakref.ref(model.get_base_model().model.layers[0].mlp.down_proj.base_layer)
        loss = model(**packed_row(LENGTHS, ROW)).loss
        loss.backward()
        del model
        gc.collect()
        assert linear() is None and loss.grad_fn is not None, layers


def test_replays_on_their_way_are_waited_for_before_graphs_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory may be unmapped then."""
    cuda, model = CudaOnTheCPU(), with_adapters(tiny_model("llama"))
    graphs, every, waited = graphs_of(model, monkeypatch), [], []
    monkeypatch.setattr(cuda, "synchronize", lambda _: waited.append([*map(id, graphs._captured.values())]))
    for change in (
        lambda: None,
        lambda: None,
        lambda: graphs._backbone.layers[0].register_forward_hook(lambda *_: None),
    ):
        change()
        forward_with(cuda, graphs, LENGTHS, monkeypatch)
        every += graphs._captured.values()
    first, same, second = ([id(each)] for each in every)
    assert same == first != second and waited == [first]

    graphs._benefit = GraphBenefit()
    graphs._benefit.host_share, graphs._benefit.gain = 1.0, 2.0
    with monkeypatch.context() as faked:
        faked.setattr(torch, "cuda", cuda)
        row = packed_row(LENGTHS, ROW)
        assert graphs.forward(torch.zeros(1), row["position_ids"], row["packed"]) is None
        assert waited == [first, second] and not graphs._captured
        graphs._captured["another"] = every[0]
        attached(model).detach()  # type: ignore[union-attr]
    assert waited == [first, second, first] and not graphs._captured


def test_what_is_captured_reads_no_table_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table would be gone with the build that was captured, and replays would read whatever lies there then."""
    made: list[bool] = []

    class Noted(CastCopies):
        def __init__(self, *given: Any, by_table: bool = True) -> None:
            made.append(by_table)
            super().__init__(*given, by_table=by_table)

    monkeypatch.setattr("pronghorn.layers.decoder.CastCopies", Noted)
    forward_with(CudaOnTheCPU(), graphs_of(with_adapters(tiny_model("llama")), monkeypatch), LENGTHS, monkeypatch)
    assert made == [True, False]


def test_captured_layers_keep_no_norms_results_and_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that keep everything, as planned or because recomputation was switched off; not those that keep less."""
    graphs = graphs_of(with_adapters(tiny_model("llama", num_hidden_layers=4)), monkeypatch)
    layers, seen, backbone = graphs._backbone.layers, [], graphs._backbone_forward
    policies = [None, Policy.KEEP, Policy.RECOMPUTE_LAYER, Policy.RECOMPUTE_MLP]
    for layer, policy in zip(layers[1:], policies[1:], strict=True):
        layer.__dict__[POLICY] = policy

    def noted(*static: Any) -> torch.Tensor:
        seen[:] = [layer.__dict__[POLICY] for layer in layers]
        return backbone(*static)

    monkeypatch.setattr(graphs, "_backbone_forward", noted)
    forward_with(CudaOnTheCPU(), graphs, LENGTHS, monkeypatch)
    assert seen == [Policy.RECOMPUTE_NORMS] * 3 + [Policy.RECOMPUTE_MLP]
    assert [layer.__dict__.get(POLICY) for layer in layers] == policies and POLICY not in layers[0].__dict__


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is replayed next waits for what was warmed up in the same memory, which no forward before may read."""
    cuda, graphs = CudaOnTheCPU(), graphs_of(with_adapters(tiny_model("llama")), monkeypatch)
    cuda.fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        forward_with(cuda, graphs, LENGTHS, monkeypatch)
    assert cuda.current == "main"
    assert not any(POLICY in layer.__dict__ for layer in graphs._backbone.layers)
    cuda.fails = False
    forward_with(cuda, graphs, LENGTHS, monkeypatch)
    cuda.waits.clear()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("warming up")

    monkeypatch.setattr(graphs, "_backbone_forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        forward_with(cuda, graphs, [2] * 40, monkeypatch)
    assert cuda.waits == [("aside", "main"), ("main", "aside")]


def test_a_replay_waits_for_no_backward_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that reads would be overwritten: other forwards go without a graph until it has run, or nobody can ask."""
    cuda, graphs = CudaOnTheCPU(), graphs_of(with_adapters(tiny_model("llama")), monkeypatch)

    def replayed() -> bool:
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            row = packed_row(LENGTHS, ROW)
            embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
            return graphs.forward(embeds, row["position_ids"], row["packed"]) is not None

    hidden = forward_with(cuda, graphs, LENGTHS, monkeypatch)
    assert not replayed() and not replayed()
    hidden.sum().backward()
    assert replayed() and replayed(), "a forward that nobody keeps waits for nothing"
    hidden = forward_with(cuda, graphs, LENGTHS, monkeypatch)
    assert not replayed() and "none now: the output of a forward is kept" in graphs.state[1]
    del hidden
    gc.collect()
    assert replayed() and graphs.state == ("on", "asked for")


@pytest.mark.parametrize(("rank", "other"), [(4, 4), (8, 4), (8, 8)])
def test_what_layers_keep_does_not_lie_in_the_memory_of_graphs(
    rank: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After another adapter was on in between, layers are built anew, and the first build is found again: copies of
    adapters, and with rank 8 A below a weight, don't lie where a graph writes. Stand-ins for CUDA; a capture just runs.
    """
    model = with_adapters(tiny_model("llama", **WIDE), r=rank)
    config = copy.deepcopy(model.peft_config["default"])
    config.r = other  # whose A lies below no weight: with rank 8 the first one's does
    model.add_adapter("other", config)
    in_pool: list[torch.Tensor] = []

    def storages(found: list[Any]) -> set[int]:
        return {each.untyped_storage().data_ptr() for each in found if isinstance(each, torch.Tensor)}

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            given = storages(tree_leaves((args, kwargs)))
            in_pool.extend(each for each in tree_leaves(made) if storages([each]) - given)
            return made

    cuda = CudaOnTheCPU()
    cuda.use_mem_pool = lambda *_: Noted()  # type: ignore[method-assign,assignment,return-value]
    graphs = graphs_of(model, monkeypatch)
    backbone = model.get_base_model().model
    forward_with(cuda, graphs, LENGTHS, monkeypatch)
    assert len(graphs._captured) == 1 and not in_pool
    model.set_adapter("other")
    with torch.no_grad():
        model(**packed_row(LENGTHS, ROW))
    model.set_adapter("default")
    forward_with(cuda, graphs, [2] * 40, monkeypatch)
    assert len(graphs._captured) == 2
    kept = [*backbone.parameters()]
    for linear in linears_of(backbone):
        kept += [tensor for tensor in (linear.source.storage, linear.a, linear.b)]
    assert in_pool and not storages(kept) & storages(in_pool)


@pytest.mark.gpu
def test_a_graph_that_gains_nothing_is_given_back(captured: tuple[Any, Any]) -> None:
    model, _ = captured
    handle = attach(model, layers="fused", graph="auto")
    graphs = handle.graphs
    graphs._benefit.host_share, graphs._benefit.plain_ms = 0.8, 1e-6
    gc.collect()
    torch.cuda.empty_cache()
    others, losses, batch = graph_bytes(), [], on_device(LENGTHS, 0)  # graphs of tests before
    for number in range(MEASURED_REPLAYS + 2):
        assert (graph_bytes() > others) is (number > 0)
        losses.append(model(**batch).loss)  # kept, as in a loop that tells the last one
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * 10**8)  # type: ignore[no-untyped-call]  # the last replay is on its way when it is judged
        losses[-1].backward()
    path, why = graph_path(handle)
    assert path == "off" and "of the time with a graph" in why
    assert not graphs._captured and len({loss.item() for loss in losses}) == 1
    assert graph_bytes() == others


@pytest.mark.gpu
def test_attention_that_needs_host_integers_is_not_captured(captured: tuple[Any, Any]) -> None:
    """Flash varlen is launched with the longest document's length: another batch's may be longer."""
    model, _ = captured
    handle = attach(model, attention="flash", layers="fused", graph="on")
    assert graph_path(handle) == ("off", "attention goes flash: asked for")
    model(**on_device(LENGTHS, 0)).loss.backward()
    assert not handle.graphs._captured


@pytest.mark.gpu
def test_full_fine_tuning_is_not_captured() -> None:
    handle = attach(tiny_model("llama").to("cuda", torch.bfloat16), layers="fused", graph="on")
    assert graph_path(handle) == ("off", "weights besides adapters are trained")


class Clock:
    """Of a device that does nothing but wait; its events."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, True

    def Event(self, **_: Any) -> Any:
        event = SimpleNamespace(query=lambda: self.done)
        event.record = lambda: setattr(event, "ms", self.now)
        event.elapsed_time = lambda other: other.ms - event.ms
        return event


@pytest.mark.parametrize(("with_graph", "wanted"), [(9.0, True), (12.0, False)])
def test_a_graph_is_judged_by_forward_and_backward(
    with_graph: float, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward takes a host as long to launch, and a forward without one, as in an evaluation of one's own, tells
    nothing. Here one takes 4 ms, and with its backward 10; with a graph as long as given. Rows that go without one,
    every third here, don't keep it from being judged."""
    clock = Clock()
    model = with_adapters(tiny_model("llama"))
    with monkeypatch.context() as as_on_cuda:
        as_on_cuda.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        graphs = attach(model, layers="fused", graph="auto").graphs
    assert graphs is not None and graphs._benefit is not None
    trial = graphs._benefit
    monkeypatch.setattr(graphs, "_refusal", lambda: None)
    monkeypatch.setattr(graphs, "_longest", lambda: 90)
    cuda: Any = CudaOnTheCPU()
    cuda.Event = clock.Event
    monkeypatch.setattr("pronghorn.models.graph_benefit.time.perf_counter", lambda: clock.now / 1e3)
    leaf = torch.ones(1, requires_grad=True)

    def plain() -> list[torch.Tensor]:
        clock.now += 4
        return [leaf * 2]

    def forward(backward: bool, lengths: list[int] = LENGTHS) -> bool:
        """Whether by a graph."""
        row = packed_row(lengths, ROW)
        embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            hidden = graphs.forward(embeds, row["position_ids"], row["packed"])
            [out] = graphs.without(plain) if hidden is None else [hidden]
        if backward:
            out.sum().backward()
            clock.now += 6 if hidden is None else with_graph
        return hidden is not None

    alone = [False] * 3  # without their backwards
    went = [forward(backward) for backward in [True, *alone, *[True] * (MEASURED_FORWARDS - 1)]]
    clock.done = False  # the last one
    went.append(forward(True))
    assert not any(went) and trial.host_share is None
    clock.done = True
    assert not forward(True) and trial.host_share == pytest.approx(1) and trial.plain_ms == 10
    assert all(forward(backward) for backward in [True, *alone])
    for _ in range(MEASURED_REPLAYS - 1):  # the first one's time is known already
        assert trial.gain is None and not forward(True, [90]) and forward(True)
        assert trial.gain is None and forward(True)
    clock.done = False
    assert forward(True) and trial.gain is None
    clock.done = True
    assert forward(True) is wanted and trial.gain == with_graph / 10
    assert len(graphs._captured) == wanted


def test_a_forward_that_needs_no_gradient_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with adapters merged, which still require theirs; nor does it tell how long a backward takes to launch."""
    model = with_adapters(tiny_model("llama"))
    assert "merged" not in str(_graph_refusal(model.base_model.model, "auto"))
    cuda: Any = CudaOnTheCPU()
    cuda.Event = Clock().Event
    graphs = graphs_of(model, monkeypatch)
    graphs._benefit = trial = GraphBenefit()
    row = packed_row(LENGTHS, ROW)
    embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "position_ids": row["position_ids"], "packed": row["packed"], "use_cache": False}
    model.merge_adapter()
    assert "adapters are merged" in str(_graph_refusal(model.base_model.model, "auto"))
    for _ in range(MEASURED_FORWARDS + 2):
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            assert graphs.forward(embeds, row["position_ids"], row["packed"]) is None
            out = graphs.without(lambda: graphs._plain(graphs._backbone, **given))[0]
        assert out.isfinite().all() and not out.requires_grad
    assert trial.host_share is None


class OnCuda(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def asked_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model's forwards hand to graphs from now on, stand-ins that compute what the backbone would."""
    backbone, asked = model.get_base_model().model, []
    plain = type(backbone)
    backbone.__class__ = graphed_class(plain)

    def forward(embeds: Any, position_ids: Any, packed: Any) -> Any:
        asked.append(embeds)
        given = {"position_ids": position_ids, "packed": packed, "use_cache": False}
        mask = packed.cu_seqlens.view(1, 1, 1, -1)
        return plain.forward(backbone, inputs_embeds=embeds, attention_mask=mask, **given).last_hidden_state

    graphs = SimpleNamespace(
        forward=forward, without=lambda run: run(), clear=lambda: asked.append("cleared"), paused=False
    )
    backbone.__dict__["_pronghorn_graphs"] = graphs
    found = metadata.stock_batch
    monkeypatch.setattr(metadata, "stock_batch", lambda *given: on_cuda(found(*given)))
    return asked


def on_cuda(packed: Any) -> Any:
    return replace(packed, cu_seqlens=packed.cu_seqlens.as_subclass(OnCuda))


@pytest.mark.parametrize(
    ("how", "by_graph"), [("packed", 1), ("labels only", 1), ("router_logits", 0), ("config", 0), ("as it says", 1)]
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_forwards_of_models_with_experts_find_what_they_read(
    family: str, how: str, by_graph: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own read the routers' logits of the backbone's output, which may be None."""
    model = with_adapters(tiny_model(family), target_modules=["q_proj", "v_proj"])
    attach(model, layers="fused")
    asked, row = asked_for(model, monkeypatch), packed_row(LENGTHS, ROW)
    more = {"router_logits": {"output_router_logits": True}, "as it says": {"output_router_logits": None}}.get(how, {})
    if how == "labels only":
        del row["packed"]
    else:
        row["packed"] = on_cuda(row["packed"])
    model.get_base_model().config.output_router_logits = how == "config"
    model(**row, **more).loss.backward()
    assert len(asked) == by_graph


@pytest.mark.parametrize(
    ("how", "by_graph"), [("plain", 1), ("input_require_grads", 1), ("own hook", 1), ("offload", 0), ("checkpoint", 0)]
)
def test_who_gets_a_graph(how: str, by_graph: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who moves what is saved, or computes it again; a gradient that only reentrant checkpointing reads is none."""
    model = with_adapters(tiny_model("llama"))
    attach(model, layers="fused")
    asked, row = asked_for(model, monkeypatch), packed_row(LENGTHS, ROW)
    row["packed"] = on_cuda(row["packed"])
    if how == "input_require_grads":
        model.enable_input_require_grads()
    if how == "own hook":
        model.get_input_embeddings().register_forward_hook(lambda module, given, out: out.requires_grad_())
    if how == "checkpoint":
        checkpoint(lambda: model(**row).loss, use_reentrant=False).backward()
    else:
        with torch.autograd.graph.save_on_cpu() if how == "offload" else nullcontext():
            model(**row).loss.backward()
    assert [embeds.requires_grad for embeds in asked] == [how == "own hook"] * by_graph
    graphs = model.get_base_model().model.__dict__["_pronghorn_graphs"]
    assert graphs.hooked == (how in ("offload", "checkpoint"))


def test_a_model_that_is_moved_lets_go_of_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(tiny_model("llama", **WIDE), r=8)
    attach(model, layers="fused")
    asked, kept = asked_for(model, monkeypatch), 0
    model(**packed_row(LENGTHS, ROW))
    backbone = model.get_base_model().model
    kept = len(runs_of(backbone))
    model.to(torch.float32)
    assert len(runs_of(backbone)) == kept > 0 and not asked
    weights = [weakref.ref(linear.source.storage) for linear in linears_of(backbone)]
    model.to(torch.float64)
    assert asked == ["cleared"] and not runs_of(backbone) and all(weight() is None for weight in weights)


def benefit_of(model: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[BackboneGraphs, GraphBenefit, Any]:
    """Graphs that are measured, by stand-ins for CUDA."""
    with monkeypatch.context() as as_on_cuda:
        as_on_cuda.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        graphs = attach(model, layers="fused", graph="auto").graphs
    assert graphs is not None and graphs._benefit is not None
    monkeypatch.setattr(graphs, "_refusal", lambda: None)
    monkeypatch.setattr(graphs, "_longest", lambda: None)
    cuda: Any = CudaOnTheCPU()
    cuda.Event = clock.Event
    monkeypatch.setattr("pronghorn.models.graph_benefit.time.perf_counter", lambda: clock.now / 1e3)
    return graphs, graphs._benefit, cuda


def test_forwards_with_several_backwards_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one they may; a script would break once the first steps were measured."""
    clock, leaf = Clock(), torch.ones(1, requires_grad=True)
    graphs, trial, cuda = benefit_of(with_adapters(tiny_model("llama")), clock, monkeypatch)

    def plain() -> list[torch.Tensor]:
        clock.now += 4
        return [leaf * 2]

    for number in range(MEASURED_FORWARDS + 1):
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            [out] = graphs.without(plain)
        for again in ([True] if number == 4 else []) + [False]:
            out.sum().backward(retain_graph=again)
    assert trial.host_share == pytest.approx(1) and not graphs.replayed
    assert graphs.state == ("off", "a forward had several backwards, and a graph's runs once")


def test_graphs_that_serve_no_forward_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows would be filled up for nothing where layers read other embeddings."""
    found = [graphs_of(with_adapters(tiny_model(name)), monkeypatch).replayed for name in ("llama", "gemma4_text")]
    assert found == [True, False]


def test_graphs_that_are_given_back_each_time_are_captured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two adapters are trained by turns: a capture takes as long as some ten forwards."""
    model, row, found = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW), []
    model.add_adapter("other", model.peft_config["default"])
    graphs, trial, cuda = benefit_of(model, Clock(), monkeypatch)
    trial.host_share, trial.gain = 1.0, 0.5
    embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
    for name in ("default", "default", "other", "other", *["default", "other"] * 4):
        model.set_adapter(name)
        look(graphs._backbone)
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            hidden = graphs.forward(embeds, row["position_ids"], row["packed"])
        found.append(hidden is not None)
        if hidden is not None:
            hidden.sum().backward()
        del hidden
    assert found == [True] * 7 + [False] * 5 and trial.rare and not graphs._captured


@pytest.mark.matrix(5)
@pytest.mark.parametrize(("accumulated", "phase"), [(n, phase) for n in (1, 2, 3, 4) for phase in range(n)])
def test_graphs_are_judged_alike_whenever_the_optimiser_steps(
    accumulated: int, phase: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every n-th time from a forward to the next has an optimiser step of 6 ms in it."""
    clock, row = Clock(), packed_row(LENGTHS, ROW)
    graphs, trial, cuda = benefit_of(with_adapters(tiny_model("llama")), clock, monkeypatch)
    embeds, leaf = graphs._backbone.embed_tokens(row["input_ids"]).detach(), torch.ones(1, requires_grad=True)

    def plain() -> list[torch.Tensor]:
        clock.now += 8
        return [leaf * 2]

    for number in range(phase, 40):
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            hidden = graphs.forward(embeds, row["position_ids"], row["packed"])
            [out] = graphs.without(plain) if hidden is None else [hidden]
        out.sum().backward()
        clock.now += (12 if hidden is None else 17) + 6 * (number % accumulated == 0)
    share = 1.0 if accumulated == 1 else 0.5 if accumulated == 2 else 0.0
    assert trial.gain == pytest.approx((17 + 6 * share) / (20 + 6 * share)) and trial.wanted


def test_graphs_that_are_hardly_replayed_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with rows of ever other lengths: some are captured, and the others go without."""
    clock = Clock()
    graphs, trial, cuda = benefit_of(with_adapters(tiny_model("llama")), clock, monkeypatch)
    trial.host_share, trial.gain = 1.0, 0.5
    for number in range(LOOKED_AT + 1):
        row = packed_row([40, ROW + 8 * number - 40], ROW + 8 * number)
        embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
        assert not trial.rare and len(graphs._captured) == min(number, MOST_GRAPHS)
        with monkeypatch.context() as faked:
            faked.setattr(torch, "cuda", cuda)
            assert (graphs.forward(embeds, row["position_ids"], row["packed"]) is not None) == (number < MOST_GRAPHS)
    assert trial.rare and not graphs._captured and "few forwards found one" in graphs.state[1]


@pytest.mark.parametrize("asked", [True, False])
def test_where_memory_runs_out_in_a_capture_training_goes_on_without(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there without a graph. Who asked for one is told; a capture that is broken off raises another error."""
    graphs, trial, cuda = benefit_of(with_adapters(tiny_model("llama")), Clock(), monkeypatch)
    trial.host_share, row = 1.0, packed_row(LENGTHS, ROW)
    embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()

    def fail(*_: Any) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs, "_backbone_forward", fail)
    if asked:
        graphs._benefit = None
    with monkeypatch.context() as faked, pytest.raises(RuntimeError) if asked else nullcontext():
        faked.setattr(torch, "cuda", cuda)
        assert graphs.forward(embeds, row["position_ids"], row["packed"]) is None
    assert not graphs._captured and (asked or graphs.state == ("off", "there was no memory for one"))


def test_a_graph_keeps_the_copies_of_adapters_that_were_off_in_some_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers make others then, and a replay still writes to those that it was captured with."""
    model = with_adapters(tiny_model("llama"), r=4)
    graphs = graphs_of(model, monkeypatch)
    forward_with(CudaOnTheCPU(), graphs, LENGTHS, monkeypatch)
    before, copied = _fingerprint(graphs._backbone), linears_of(graphs._backbone)[0].b
    copied = weakref.ref(copied)
    keys = [module for name, module in model.named_modules() if name.endswith("k_proj")]
    for on in (False, True):
        for key in keys:
            key.enable_adapters(on)
        with torch.no_grad():
            model(**packed_row(LENGTHS, ROW))
    gc.collect()
    assert _fingerprint(graphs._backbone) == before and linears_of(graphs._backbone)[0].b is copied()
    assert copied() is not None and len(graphs._captured) == 1


def test_parameters_that_were_replaced_or_are_used_twice_get_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cuda = with_adapters(tiny_model("llama")), CudaOnTheCPU()
    first, second = (layer.self_attn.q_proj for layer in model.get_base_model().model.layers[:2])
    second.lora_A.default.weight = first.lora_A.default.weight
    graphs = graphs_of(model, monkeypatch)
    forward_with(cuda, graphs, LENGTHS, monkeypatch).sum().backward()
    assert first.lora_A.default.weight.grad is not None
    first.lora_B.default.weight = torch.nn.Parameter(first.lora_B.default.weight.data)  # where it lay
    forward_with(cuda, graphs, LENGTHS, monkeypatch).sum().backward()
    assert first.lora_B.default.weight.grad is not None


def test_the_report_tells_of_hooks_on_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(with_adapters(tiny_model("llama")), monkeypatch)
    assert graphs.state[0] == "on"
    graphs.hooked = True
    assert graphs.state == ("off", "hooks move what is saved for the backward, or make it again")


def test_rows_of_another_shape_are_captured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, row = graphs_of(with_adapters(tiny_model("llama")), monkeypatch), packed_row([48, 48], 96)
    embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach()
    with monkeypatch.context() as faked:
        faked.setattr(torch, "cuda", CudaOnTheCPU())
        for shape in ((1, 96), (2, 48)):
            positions = row["position_ids"].view(shape)
            hidden = graphs.forward(embeds.view(*shape, -1), positions, row["packed"])
            assert hidden is not None and hidden.shape[:2] == shape
            del hidden  # else its backward may come
    assert len(graphs._captured) == 2


def test_few_graphs_serve_an_epoch_of_unlike_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long documents are packed with few others, short ones may be with many: 2 to 70 documents a row, here."""
    graphs, cuda = graphs_of(with_adapters(tiny_model("llama")), monkeypatch), CudaOnTheCPU()
    for documents in (2, 70, 9, 33, 16, 48, 17, 65):
        lengths = [1] * (documents - 1) + [ROW - documents + 1]
        forward_with(cuda, graphs, lengths, monkeypatch)
    assert [captured.packed.bucket for captured in graphs._captured.values()] == [32, 128, 64]
    assert len(graphs._captured) == 3 <= MOST_GRAPHS
    assert [room_for(documents) for documents in (1, 32, 33, 64, 65, 400)] == [32, 32, 64, 64, 128, 512]


def test_rows_longer_than_the_window_are_captured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without a window is what shorter ones are captured with; inputs that are trained have no graph."""
    monkeypatch.setattr("pronghorn.data.batch.SEQLEN_BUCKET", 1)
    cuda, graphs = CudaOnTheCPU(), graphs_of(with_adapters(tiny_model("mistral", sliding_window=16)), monkeypatch)
    for lengths, captured in (([16] * 6, 1), ([12] * 8, 1), ([32] * 3, 2)):
        forward_with(cuda, graphs, lengths, monkeypatch)
        assert len(graphs._captured) == captured
    row = packed_row([16] * 6, ROW)
    embeds = graphs._backbone.embed_tokens(row["input_ids"]).detach().requires_grad_()
    assert graphs.forward(embeds, row["position_ids"], row["packed"]) is None


def test_adapters_of_two_dtypes_are_not_captured() -> None:
    """A graph's backward gives all gradients in one tensor: some would be rounded."""
    model = with_adapters(tiny_model("llama"))
    model.get_base_model().model.layers[0].self_attn.q_proj.to(torch.bfloat16)
    assert _graph_refusal(model.get_base_model(), "auto") == "adapters differ in dtype"


def test_adapters_of_the_embeddings_are_not_captured() -> None:
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]))
    assert _graph_refusal(model.get_base_model(), "auto") == "weights besides adapters are trained"


def test_a_model_that_came_to_cuda_gets_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(tiny_model("llama"))
    assert attach(model, Plan.keep(), layers="fused", graph="on").graphs is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    assert attach(model, layers="fused", graph="on").graphs is not None


def test_what_is_decided_against_costs_nothing() -> None:
    """Where graphs don't pay nobody looks after changes in every forward."""
    graphs = BackboneGraphs(None, lambda: None, False, lambda: None, lambda: None, lambda: None)
    row = packed_row(LENGTHS, ROW)
    with pytest.raises(AttributeError):  # of the backbone that isn't there
        graphs.forward(torch.zeros(1), row["position_ids"], row["packed"])
    graphs._benefit.host_share = 0.1  # type: ignore[union-attr]
    assert graphs.forward(torch.zeros(1), row["position_ids"], row["packed"]) is None


def test_what_was_overwritten_is_not_used() -> None:
    """A stand-in for the graphs: y = x·w, whose backward reads x where the forward left it."""
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    x, out, d_out, gradients = (torch.zeros(1, 4, 1), torch.zeros(1, 4, 1), torch.zeros(1, 4, 1), torch.zeros(1))
    metadata = packed_row([4], 4)["packed"].without_labels()
    forward = SimpleNamespace(replay=lambda: out.copy_(x * weight.detach()))
    backward = SimpleNamespace(replay=lambda: gradients.copy_((d_out * x).sum().view(1)))
    positions = torch.arange(4)[None]
    captured = Captured(x, positions.clone(), metadata.clone(), out, d_out, gradients, forward, backward, [])  # type: ignore[arg-type]
    graphs = SimpleNamespace(replays=0, holds=lambda _: True)

    def run(value: float) -> torch.Tensor:
        given = torch.full((1, 4, 1), value)
        return Replay.apply(given, positions, metadata, graphs, captured, weight).sum()

    for value in (1.0, 2.0):
        run(value).backward()
    assert weight.grad is not None and weight.grad.item() == 4 * 1.0 + 4 * 2.0
    first, second = run(1.0), run(2.0)
    with pytest.raises(TrainingError, match="overwritten"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="overwritten"):
        second.backward()


def test_hooks_are_noticed() -> None:
    """A graph doesn't call modules: with a hook inside, or hidden states asked for by the config, it isn't used."""
    model = with_adapters(tiny_model("llama"))
    handle = attach(model, layers="fused")
    base = model.get_base_model()
    before = _fingerprint(base.model)
    base.model.embed_tokens.register_forward_hook(lambda *_: None)
    assert "per_document" in str(_graph_refusal(base, "auto"))
    hook = base.model.norm.register_forward_hook(lambda *_: None)
    assert _fingerprint(base.model) != before
    assert _graph_refusal(base, "auto") == "modules inside carry hooks, which a graph doesn't call"
    hook.remove()
    assert "per_document" in str(_graph_refusal(base, "auto"))
    handle.replan(Plan(graph=False))
    assert _graph_refusal(base, "auto") == "the plan's budget has no memory for one"


def test_another_plan_gives_graphs_back_and_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(tiny_model("llama"))
    graphs, handle = graphs_of(model, monkeypatch), attached(model)
    assert handle is not None and handle.graphs is graphs
    forward_with(CudaOnTheCPU(), graphs, LENGTHS, monkeypatch)
    assert graphs._captured
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    graphs._benefit = benefit = GraphBenefit()
    handle.replan(Plan.keep())
    assert not graphs._captured and not graphs._fingerprint and graphs._benefit not in (None, benefit)
    for before in (False, True):
        graphs.paused = before
        with handle.trying(Plan.recompute()):
            assert graphs.paused
        assert graphs.paused == before


def test_adapters_that_are_off_and_not_frozen_are_no_error() -> None:
    """Which a loop of one's own may unfreeze: they get no gradient, and a graph's backward gives each one."""
    model = with_adapters(tiny_model("llama"))
    model.add_adapter("other", model.peft_config["default"])
    base = model.get_base_model()
    assert "per_document" in str(_graph_refusal(base, "auto"))
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            parameter.requires_grad_(True)
    assert _graph_refusal(base, "auto") == "adapters that are off are not frozen"
    model.set_adapter("other")
    assert "per_document" in str(_graph_refusal(base, "auto"))
    keys = [module for name, module in model.named_modules() if name.endswith("k_proj")]
    for key in keys:
        key.enable_adapters(False)
    assert "per_document" in str(_graph_refusal(base, "auto"))
    keys[0].lora_A.requires_grad_(True)
    assert _graph_refusal(base, "auto") == "adapters that are off are not frozen"


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    model = with_adapters(tiny_model("qwen3", **(WIDE if "given" in change else BIASED)))
    attach(model, layers="fused")
    backbone, batch = model.get_base_model().model, packed_row(LENGTHS, ROW)
    model(**batch)
    before = _fingerprint(backbone)
    model(**batch)
    assert _fingerprint(backbone) == before
    CHANGES[change](model)
    assert _fingerprint(backbone) != before


def test_weights_that_two_layers_share_come_to_rest() -> None:
    """By the second forward, the last before a capture: else graphs would read where they lay before."""
    model = adapted(tiny_model("llama", **WIDE), r=8, target_modules=["down_proj"], layer_replication=[(0, 2), (1, 3)])
    attach(model, layers="fused")
    backbone, batch = model.get_base_model().model, packed_row(LENGTHS, ROW)
    for _ in range(2):
        model(**batch)
    before = _fingerprint(backbone)
    model(**batch)
    assert _fingerprint(backbone) == before


def test_a_forward_of_one_s_own_is_noticed() -> None:
    model = with_adapters(tiny_model("llama"))
    attach(model, layers="fused")
    backbone = model.get_base_model().model
    before, plain = _fingerprint(backbone), backbone.layers[1].mlp.forward
    backbone.layers[1].mlp.forward = lambda *args: plain(*args)
    assert _fingerprint(backbone) != before


def test_a_copied_model_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """None captured, which can't be copied, and refused by the state of the copy."""
    model = with_adapters(tiny_model("llama"))
    with monkeypatch.context() as as_on_cuda:
        as_on_cuda.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        graphs = attach(model, graph="on").graphs
        assert graphs is not None
        graphs._captured["key"] = torch.Generator()  # type: ignore[assignment]  # not to be copied, either
        twin = copy.deepcopy(model).get_base_model()
    copied = attached(twin).graphs  # type: ignore[union-attr]
    assert copied is twin.model.__dict__["_pronghorn_graphs"] and copied._backbone is twin.model
    assert not copied._captured
    twin.requires_grad_(True)
    assert copied.state[1] == "weights besides adapters are trained" != graphs.state[1]


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_config_asks_for_is_given(asked: bool) -> None:
    plain = type(tiny_model("llama").model)
    backbone, batch = tiny_model("llama", output_hidden_states=asked).model, packed_row([4], 4)
    backbone.__class__ = graphed_class(plain)
    graphs = SimpleNamespace(forward=lambda *_: torch.zeros(1), paused=False)
    backbone.__dict__["_pronghorn_graphs"] = graphs
    packed = SimpleNamespace(cu_seqlens=SimpleNamespace(is_cuda=True))
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], STEP: None}
    out = backbone(**inputs, packed=packed)
    assert (out.hidden_states is not None) == asked and (out.last_hidden_state.shape == (1,)) != asked


def test_the_cpu_has_none() -> None:
    model = with_adapters(tiny_model("llama"))
    assert graph_path(attach(model, layers="fused", graph="on")) == ("off", "it is for fused layers on CUDA")
    assert graph_path(attach(model, graph="off")) == ("off", "asked for")
    with pytest.raises(ConfigError, match="graph 'yes' is unknown: use one of auto, on, off"):
        attach(model, graph="yes")  # type: ignore[arg-type]
