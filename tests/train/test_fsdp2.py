"""Two processes over gloo on the CPU give what one process gives: FSDP2 by hand, and DDP through the trainer.

Each pair of processes is started once and writes what it found into a folder; the tests compare.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from pronghorn.errors import ConfigError
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from support.tiny import packed_row, tiny_model

WORLD = 2
RATE = 0.5
# (name, adapters, tied embeddings, layers recomputed, which module is the root that is sharded last)
CASES = [
    ("lora", True, False, False, "peft"),
    ("lora-recompute", True, True, True, "peft"),
    ("full", False, False, False, "causal"),
    ("full-tied-recompute", False, True, True, "causal"),
    ("full-head-apart", False, False, False, "head"),
    ("lora-fused", True, False, False, "peft"),
    ("full-fused", False, False, True, "causal"),
]


def build(adapters: bool, tied: bool) -> Any:
    model = tiny_model("llama", tie_word_embeddings=tied)
    if not adapters:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model


def batch(rank: int) -> dict[str, Any]:
    """A row of its own for each rank, with other documents and other label counts."""
    return packed_row([[1, 20, 27], [5, 6]][rank], 48, seed=rank)


def labels_of_all() -> int:
    return sum(batch(rank)["packed"].n_labels for rank in range(WORLD))


def shard(model: Any, root: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    base = model.get_base_model() if root == "peft" else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    if root == "head":
        fully_shard(base.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_worker(rank: int, port: int, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    for name, adapters, tied, recompute, root in CASES:
        model = build(adapters, tied)
        layers: Any = "fused" if name.endswith("fused") else "stock"
        handle = attach(model, Plan.recompute() if recompute else None, layers=layers)
        model = shard(model, root)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        losses = []
        for _ in range(2):
            # FSDP averages gradients over ranks, hence the factor
            loss = model(**batch(rank), num_items_in_batch=labels_of_all()).loss * WORLD
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach() / WORLD)
        total = torch.stack(losses)
        dist.all_reduce(total)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        try:
            handle.detach()
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        if rank == 0:
            torch.save({"losses": total, "state": whole, "refusal": refusal}, folder / f"{name}.pt")
            handle.model.save_pretrained(folder / name, state_dict=whole)
    dist.barrier()
    dist.destroy_process_group()


def alone(adapters: bool, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The same two steps in one process over both rows."""
    model = build(adapters, tied)
    attach(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(2):
        total = 0.0
        for rank in range(WORLD):
            loss = model(**batch(rank), num_items_in_batch=labels_of_all()).loss
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.state_dict().items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(worker: Any, *args: Any) -> None:
    """Forked, which spares each process the imports."""
    torch.multiprocessing.start_processes(worker, (free_port(), *args), nprocs=WORLD, start_method="fork")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    start(fsdp_worker, folder)
    return folder


@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_attach_then_shard_then_step_equals_one_process(sharded: Path, case: tuple[str, bool, bool, bool, str]) -> None:
    name, adapters, tied, _, _ = case
    found = torch.load(sharded / f"{name}.pt")
    losses, state = alone(adapters, tied)
    assert found["losses"].tolist() == pytest.approx(losses, rel=1e-5)
    start = build(adapters, tied).state_dict()
    assert found["state"].keys() == state.keys()
    moved = 0
    for key, value in state.items():
        torch.testing.assert_close(found["state"][key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
        moved += not torch.equal(value, start[key])
    assert moved >= (18 if adapters else 20)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_detach_refuses_once_sharded(sharded: Path, case: tuple[str, bool, bool, bool, str]) -> None:
    refusal = torch.load(sharded / f"{case[0]}.pt")["refusal"]
    assert refusal.endswith("was wrapped or sharded after attach: detach before sharding the model")


@pytest.mark.parametrize("name", ["full", "full-tied-recompute"])
def test_a_sharded_model_saves_as_a_plain_checkpoint(sharded: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(sharded / name)
    state = torch.load(sharded / f"{name}.pt")["state"]
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


# ---- DDP through the trainer ----


def train(folder: Path, accumulation: int) -> tuple[list[float], float, dict[str, Tensor]]:
    """Two steps of two rows of very different label counts; returns losses, held-out loss and weights."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig

    from pronghorn import SFTTrainer

    documents = []
    for seed, length in enumerate((40, 47, 30, 44)):
        row = packed_row([length], 48, seed=seed)
        ids, labels = (row[key][0, :length].tolist() for key in ("input_ids", "labels"))
        documents.append({"input_ids": ids, "labels": labels if seed % 2 else [-100] * (length - 3) + labels[-3:]})
    args = SFTConfig(
        output_dir=str(folder / "out"),
        packing=True,
        max_length=48,
        max_steps=2,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo" if accumulation == 1 else None,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_list(documents)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = build(adapters=True, tied=False)
    trainer = SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    assert trainer.accelerator.num_processes == (WORLD if accumulation == 1 else 1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    heldout = trainer.evaluate()["eval_loss"]
    return losses, heldout, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def ddp_worker(rank: int, port: int, folder: Path) -> None:
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # earlier tests had one process
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.save(train(folder, accumulation=1), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_twice_the_accumulation(tmp_path: Path, stories: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "tokenizer")
    start(ddp_worker, tmp_path)
    losses, _, weights = train(tmp_path, accumulation=WORLD)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD)]
    for found_losses, _, found in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert ranks[0][1] == ranks[1][1]
