"""Two processes share the frozen weights of a model's layers, and compute what one does with all of them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from support.tiny import packed_row, tiny_model

WORLD = 2
PLANS = {
    "keep": None,
    "recompute": Plan.recompute(),
    "offload": Plan.offload(),
}


def adapted(family: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(family, num_hidden_layers=5)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model


def gradients(model: Any, layers: str, plan: Plan | None) -> dict[str, Tensor]:
    """Of two micro-batches, with a forward without gradients between them; with the losses."""
    attach(model, plan, layers=layers)
    losses = []
    for seed in (0, 1):
        loss = model(**packed_row([1, 20, 27], 48, seed=seed)).loss
        loss.backward()
        with torch.no_grad():
            model(**packed_row([48], 48, seed=3))
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


CASES = [(family, layers, plan) for family in ("llama", "qwen2") for layers in ("stock", "fused") for plan in PLANS]


def worker(rank: int, port: int, folder: Path) -> None:
    from pronghorn.models.share import share_layers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    for case in CASES:
        family, layers, plan = case
        model = adapted(family)
        share_layers(model, torch.device("cpu"))
        torch.save(gradients(model, layers, PLANS[plan]), folder / f"{'-'.join(case)}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared_gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(worker, (port, folder), nprocs=WORLD, start_method="fork")
    return folder


@pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])
def test_shared_layers_give_the_gradients_of_whole_ones(shared_gradients: Path, case: tuple[str, str, str]) -> None:
    family, layers, plan = case
    expected = gradients(adapted(family), layers, PLANS[plan])
    for rank in range(WORLD):
        found = torch.load(shared_gradients / f"{'-'.join(case)}-{rank}.pt")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
