"""Two processes share layers that are trained, in float32, and train as one process does on the rows of both."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.export.merge import write_model
from pronghorn.layers.decoder import is_fused
from pronghorn.loading.share import share_layers
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.parallel.peers import Mapped
from pronghorn.parallel.sharded import BUFFERS, sharded, whole_trained
from pronghorn.parallel.state import gathering, load_state
from pronghorn.train.ranks import average_gradients
from pronghorn.train.shared_layers import load_whole
from support.processes import WORLD, gather_gradients, selected, together, whole_state
from support.tiny import packed_row, tiny_model

STEPS, MICRO_BATCHES = 5, 2
PLANS = {"keep": None, "recompute": Plan.recompute(), "offload": Plan.offload()}
# family, plan, tied embeddings, autocast
CASES = [
    *(("llama", plan, plan == "recompute", None) for plan in PLANS),
    ("llama", "recompute", False, torch.bfloat16),
    ("qwen2", "keep", False, None),  # with biases
    ("gemma4_text", "keep", True, None),  # later layers read earlier ones' keys and values
    ("qwen3_moe", "recompute", False, None),
]
QUICK = [CASES[index] for index in (2, 3, 5, 6)]
"""Each plan, 16 bits, each kind of layer."""
IDS = ["-".join(map(str, case)).replace("torch.", "") for case in CASES]


def row(step: int, micro_batch: int, rank: int) -> dict[str, Any]:
    """A row of its own for each rank, with other documents; of rank 1 the first has no label."""
    batch = packed_row([[1, 20, 27], [5, 6, 37]][rank], 48, seed=10 * step + 2 * micro_batch + rank)
    if rank == 1 and micro_batch == 0:
        batch = packed_row([1] * 48, 48, seed=step)
    return batch


def train(case: tuple[Any, ...], ranks: list[int], device: torch.device | None, copies: bool = False) -> dict[str, Any]:
    """Return losses, gradient norms and the weights after all steps."""
    family, plan, tied, autocast = case
    model = tiny_model(family, tie_word_embeddings=tied)
    if device is not None:
        share_layers(model, device, copy_trained=copies)
    attach(model, PLANS[plan], layers="fused")
    shared = sharded(model)
    assert (shared is not None) is (device is not None)
    outside = [p for p in model.parameters() if p.requires_grad]
    pieces: list[Tensor] = []
    if shared is not None and shared.trained is not None:
        outside = whole_trained(model)
        decayed = {id(p) for p in model.parameters() if p.dim() > 1}
        pieces = [piece.parameter for _, piece in shared.trained.pieces(decayed)]
    optimizer = torch.optim.AdamW([*outside, *pieces], lr=1e-2, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        total = sum(row(step, m, rank)["packed"].n_labels for m in range(MICRO_BATCHES) for rank in range(WORLD))
        loss_of_step = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            for rank in ranks:
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = model(**row(step, micro_batch, rank), num_items_in_batch=total).loss
                (loss * (1 if device is None else WORLD)).backward()
                loss_of_step += loss.detach()
        if device is not None:
            average_gradients(outside)
            assert shared is not None and shared.trained is not None
            shared.trained.finish()
            assert all(p.grad is None for layer in model.model.layers for p in layer.parameters())
            dist.all_reduce(loss_of_step)
        inside = sum((p.grad.square().sum() for p in pieces), torch.zeros(()))  # type: ignore[union-attr]
        if device is not None:
            dist.all_reduce(inside)
        norms.append((inside + sum(p.grad.square().sum() for p in outside)).sqrt())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss_of_step)
    if device is not None:
        with pytest.raises(UnsupportedError, match="each process has a part of them"):
            model.save_pretrained("nowhere")
    fused = [is_fused(layer) for layer in model.model.layers]
    state = model.state_dict() if shared is None else whole_state(model)
    size = 0 if shared is None else shared.bytes
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "state": state, "fused": fused, "bytes": size}


def worker(cases: list[tuple[Any, ...]], rank: int, folder: Path) -> None:
    for case in cases:
        torch.save(train(case, [rank], torch.device("cpu")), folder / f"{IDS[CASES.index(case)]}-{rank}.pt")


@pytest.fixture(scope="module")
def shared_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    together(partial(worker, selected(request, "case")), folder)
    return folder


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=IDS
)
def test_trained_layers_that_are_shared_train_as_whole_ones(shared_runs: Path, case: tuple[Any, ...]) -> None:
    expected = train(case, list(range(WORLD)), None)
    whole = sum(p.nbytes for p in tiny_model(case[0]).model.layers.parameters())
    for rank in range(WORLD):
        found = torch.load(shared_runs / f"{IDS[CASES.index(case)]}-{rank}.pt", weights_only=False)
        assert all(found["fused"]) and all(expected["fused"])
        for kind, near in (("losses", 2e-5), ("norms", 1e-4)):
            assert torch.allclose(found[kind], expected[kind], rtol=near if case[-1] is None else 5e-3), kind
        if rank > 0:
            assert not found["state"], "one process has all of the weights"
            continue
        assert found["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            error = (found["state"][name] - value).norm() / value.norm()
            assert error < (1e-3 if case[-1] is None else 2e-2), name
    layers = len(tiny_model(case[0]).model.layers)
    # parts and gradients; gathered layers, one whole layer of gradients and the sum of its part
    assert found["bytes"] <= 1.25 * (2 * whole / WORLD + (BUFFERS + 1.5) * whole / layers) + 2**17


NARROW_PLANS = ("keep", "recompute", "offload")


def alike(family: str, plan: str, device: torch.device | None, copies: bool = False) -> dict[str, Tensor]:
    """Return losses and gradients of two backward passes in bfloat16, where all processes have the same row; between a
    forward and its backward there are others: packed in float32, and padded."""
    model = tiny_model(family)
    if device is not None:
        share_layers(model, device, copy_trained=copies)
    attach(model, PLANS[plan], layers="fused")
    losses, padded = [], torch.arange(1, 9)[None]
    for seed in (0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**packed_row([1, 20, 27], 48, seed=seed)).loss
        with torch.no_grad():
            losses += [model(**packed_row([48], 48, seed=3)).loss, model(input_ids=padded, labels=padded).loss]
        loss.backward()
        losses.append(loss.detach())
    shared = sharded(model)
    if shared is not None:
        gather_gradients(model)
        with torch.autocast("cpu", torch.bfloat16):
            model(**packed_row([48], 48, seed=0))
        narrow = [p.isnan().all() for layer in model.model.layers for p in layer.parameters() if p.dim() > 1]
        assert all(narrow) or family == "qwen3_moe", "products were gathered as they are stored"
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), **found}


def worker_alike(rank: int, folder: Path) -> None:
    for plan in NARROW_PLANS:
        for family in ("llama", "qwen3_moe"):
            torch.save(alike(family, plan, torch.device("cpu")), folder / f"{family}-{plan}-{rank}.pt")


def test_products_travel_in_16_bits_with_the_bits_of_one_process(tmp_path: Path) -> None:
    together(worker_alike, tmp_path)
    for plan in NARROW_PLANS:
        for family in ("llama", "qwen3_moe"):
            expected = alike(family, plan, None)
            for rank in range(WORLD):
                found = torch.load(tmp_path / f"{family}-{plan}-{rank}.pt")
                assert found.keys() == expected.keys()
                assert [n for n, value in expected.items() if not torch.equal(found[n], value)] == [], (family, plan)


def reload(rank: int, folder: Path) -> None:
    """Save a model that is trained in parts, lose its weights, and load what was saved."""
    for family in RELOADED:
        model = tiny_model(family)
        share_layers(model, torch.device("cpu"))
        before = whole_state(model)
        with gathering(model) as read:
            if read is not None:
                (folder / family).mkdir()
                write_model(model, torch.float32, folder / family, RELOADED[family], read)
                tiny_model(family).save_pretrained(folder / f"{family}-alone", max_shard_size=RELOADED[family])
        dist.barrier()
        zeros = {name: torch.zeros(p.shape) for name, p in tiny_model(family).named_parameters()}
        load_state(model, zeros.__getitem__, zeros)
        left = any(value.any() for value in whole_state(model).values())
        load_whole(model, folder / family)
        after = whole_state(model)
        if rank == 0:
            same = all(torch.equal(after[name], value) for name, value in before.items())
            torch.save((left, same), folder / f"{family}.pt")


RELOADED = {"llama": "20KB", "qwen3_moe": "5GB"}
"""Families, and the size of their shards; the second one's experts are saved by other names."""


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    together(reload, tmp_path)
    for family in RELOADED:
        files, expected = (
            {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in (family, f"{family}-alone")
        )
        assert len(files) > 2 and files == expected, "the files of a model that one process has"
        assert torch.load(tmp_path / f"{family}.pt") == (False, True), family


def files_that_all_map(folder: Path, rank: int) -> Any:
    """Put memory of files that each process maps in the place of GPUs' `open_memory`; it is full of NaN at first, and
    reading it ends the process when nobody has a reference to its own any more."""
    numbers = count()

    def open_memory(sizes: list[int], device: torch.device, group: Any) -> list[Mapped]:
        found = []
        for size in sizes:
            name = str(folder / f"memory-{next(numbers)}-")
            own, *peers = [
                torch.from_file(f"{name}{each}", shared=True, size=size, dtype=torch.uint8)
                for each in (rank, *range(dist.get_world_size()))
            ]
            peers[rank].fill_(255)
            finalize(own, os.truncate, f"{name}{rank}", 0)
            dist.barrier(group)
            found.append(Mapped(own, peers))
        return found

    return patch("pronghorn.parallel.peers.open_memory", open_memory)


def copied(case: tuple[Any, ...], rank: int, folder: Path) -> None:
    """Save what a training gives by sums of gloo, and by copies."""
    by_gloo = train(case, [rank], torch.device("cpu"))
    with files_that_all_map(folder, rank):
        torch.save((by_gloo, train(case, [rank], torch.device("cpu"), True)), folder / f"{rank}.pt")


@pytest.mark.parametrize("case", [CASES[3], pytest.param(CASES[6], marks=pytest.mark.slow)], ids=[IDS[3], IDS[6]])
def test_copies_of_weights_and_gradients_have_the_bits_of_sums(tmp_path: Path, case: tuple[Any, ...]) -> None:
    together(partial(copied, case), tmp_path)
    for rank in range(WORLD):
        by_gloo, by_copies = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert torch.equal(by_gloo["losses"], by_copies["losses"]) and torch.equal(by_gloo["norms"], by_copies["norms"])
        assert all(torch.equal(value, by_copies["state"][name]) for name, value in by_gloo["state"].items())


def copied_by_three(rank: int, folder: Path) -> None:
    with files_that_all_map(folder, rank):
        torch.save(alike("llama", "keep", torch.device("cpu"), True), folder / f"{rank}.pt")


@pytest.mark.slow
def test_three_processes_copy_each_others_parts(tmp_path: Path) -> None:
    together(copied_by_three, tmp_path, world=3)
    expected = alike("llama", "keep", None)
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-7) for name, value in expected.items())


def trained_on_a_gpu(rank: int, copies: bool) -> tuple[str, list[Tensor], dict[str, Tensor]]:
    """Return how weights came together, the losses and the weights of three steps in bfloat16, of layers wide enough
    that copies take while beside compute."""
    cuda = torch.device("cuda", rank)
    wide: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
    wide |= {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096}
    model = tiny_model("llama", **wide)
    share_layers(model, cuda, copy_trained=copies)
    attach(model, Plan.recompute(), layers="fused")
    shared = sharded(model)
    assert shared is not None and shared.trained is not None
    pieces = [piece.parameter for _, piece in shared.trained.pieces(set())]
    optimizer, losses = torch.optim.AdamW([*whole_trained(model), *pieces], lr=1e-3), list[Tensor]()
    for step in range(3):
        for micro_batch in range(MICRO_BATCHES):
            row = packed_row([1, 200, 1847], 2048, seed=10 * step + 2 * micro_batch + rank)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**{name: value.to(cuda) for name, value in row.items()}).loss
            loss.backward()
            losses.append(loss.detach().cpu())
        average_gradients(whole_trained(model))
        shared.trained.finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return shared.gathered_by, losses, {name: value.cpu() for name, value in whole_state(model).items()}


def on_gpus(rank: int, world: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    torch.save([trained_on_a_gpu(rank, copies) for copies in (True, False)], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_gpus_copy_what_nccl_would_bring(tmp_path: Path, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs are needed")
    torch.multiprocessing.start_processes(on_gpus, (world, tmp_path), nprocs=world, start_method="spawn")
    for rank in range(world):
        (by_copies, losses, state), (by_nccl, expected, expected_state) = torch.load(tmp_path / f"{rank}.pt")
        assert (by_copies, by_nccl) == ("copied out of the other GPUs' memory", "gathered by nccl")
        assert all(map(torch.equal, losses, expected))
        assert all(torch.equal(value, state[name]) for name, value in expected_state.items())
