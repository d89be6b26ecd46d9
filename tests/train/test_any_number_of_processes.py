"""The trainer's steps are those of one process on any number of them: what is trained, how it is kept, what layers
recompute, however unevenly the supervised tokens lie.

A step has 12 rows, which 1, 2, 3 and 4 processes share. The last step of the epoch has one, so that all processes but
one compute a row without a label; the documents of another row have none of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

from pronghorn.data.packed_rows import PackedRows
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.loading.share import share_layers
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import add_lora
from pronghorn.parallel.sharded import sharded
from pronghorn.train import ranks
from support.processes import together, whole_state
from support.tiny import in_4_bits, packed_row, tiny_model
from support.trainers import Noting, config

ROW, STEP_ROWS = 48, 12
ROWS = {1: 3, 2: 3, 3: 2, 4: 1}
"""Of a micro-batch, by the number of processes; 1 where there are experts, whose auxiliary loss is a micro-batch's."""
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXED = Plan((Policy.KEEP, Policy.RECOMPUTE_MLP, Policy.OFFLOAD))
TILED = replace(Plan.recompute(), mlp_rows=16)


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    family: str = "llama"
    full: bool = False
    plan: Plan = MIXED
    shared: bool = False
    """Processes share the layers; otherwise each has a copy."""
    by_ddp: bool = False
    """Gradients are averaged by DDP, as those of large models."""
    steps: int = 3

    def __str__(self) -> str:
        return f"{self.name}, {'shared layers' if self.shared else 'DDP' if self.by_ddp else 'copies'}"


METHODS = [
    Case("LoRA"),
    Case("NF4 LoRA", "qwen2 nf4"),
    Case("experts LoRA", "qwen3_moe", plan=Plan.recompute()),
    Case("full", full=True),
    Case("experts full", "qwen3_moe", full=True, plan=Plan.recompute()),
]
PLANS = {**{str(policy): Plan((policy,)) for policy in Policy}, "in tiles": TILED}
ALL = [replace(case, shared=shared) for case in METHODS for shared in (False, True)]
QUICK = [case for case in ALL if str(case) in ("LoRA, copies", "NF4 LoRA, shared layers", "full, shared layers")]
POLICIES = [
    replace(case, name=f"{case.name}, {name}", plan=plan, shared=shared)
    for case in (METHODS[0], METHODS[3])
    for name, plan in PLANS.items()
    for shared in (False, True)
]
BY_DDP = [replace(case, by_ddp=True) for case in METHODS if case.full]
LONG = [replace(case, steps=20) for case in ALL if case.name in ("LoRA", "full")]


def model_of(case: Case) -> Any:
    family, _, quantised = case.family.partition(" ")
    model = tiny_model(family)
    if case.full:
        return model
    if quantised:
        in_4_bits(model)
    model = add_lora(model, r=4, target_parameters=ON_EXPERTS if "moe" in family else None)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def documents() -> Dataset:
    """Two documents a row; of every third row nearly all tokens are supervised, of one none, of the others few."""
    rows = []
    for index in range(2 * STEP_ROWS + 1):
        for document, length in enumerate((29, 19)):
            batch = packed_row([length], length, seed=2 * index + document)
            ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
            few = 0 if index == 5 else 2
            rows.append(
                {"input_ids": ids, "labels": labels if index % 3 == 0 else [-100] * (length - few) + ids[-few:]}
            )
            rows[-1]["labels"] = rows[-1]["labels"][:length] if few else [-100] * length
    return Dataset.from_list(rows)


def train(case: Case, processes: int, folder: Path) -> dict[str, Any]:
    """Train with this process's share of the steps; return what is known of each step, and what was trained."""
    model = model_of(case)
    if case.shared and processes > 1:
        share_layers(model, torch.device("cpu"))
    attach(model, case.plan, layers="fused")
    rows = 1 if "moe" in case.family else ROWS[processes]
    args = config(
        folder,
        max_length=ROW,
        max_steps=case.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=STEP_ROWS // (rows * processes),
        train_sampling_strategy="random",
    )
    with pytest.MonkeyPatch.context() as patch:
        if case.by_ddp:
            patch.setattr(ranks, "MOST_BYTES", 0)
        trainer: Any = Noting(model, args, train_dataset=documents(), processing_class=byte_tokenizer(512))
        # with those of no label, which the trainer leaves out
        trainer.train_dataset = PackedRows(documents(), ROW, seed=ranks.data_seed(args))
        trainer.train()
    wrapped = isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    assert wrapped == (case.by_ddp and processes > 1) and len(trainer.train_dataset) == 2 * STEP_ROWS + 1
    base = base_causal_lm(model)
    parts = sharded(base) is not None and case.full
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == case.steps
    return {
        "steps": [(entry["loss"], entry["grad_norm"]) for entry in history],
        "counts": [(entry["tokens"], entry["labelled_tokens"]) for entry in history],
        "documents": trainer.documents,
        "unlabelled": trainer.unlabelled,
        "weights": whole_state(base) if parts else trained,
    }


def worker(cases: list[Case], processes: int, rank: int, folder: Path) -> None:
    for case in cases:
        torch.save(train(case, processes, folder / f"{rank}"), folder / f"{case}-{rank}.pt")


def check(cases: list[Case], processes: int, folder: Path) -> None:
    together(partial(worker, cases, processes), folder, processes)
    for case in cases:
        expected = train(case, 1, folder / "alone")
        found = [torch.load(folder / f"{case}-{rank}.pt", weights_only=False) for rank in range(processes)]
        for step in range(case.steps):
            dealt = [document for each in found for document in each["documents"][step]]
            assert sorted(dealt) == sorted(expected["documents"][step]), f"{case}: other rows in step {step + 1}"
        assert sum(each["unlabelled"] > 0 for each in found) >= processes - 1, "a process had labels in every row"
        for rank, each in enumerate(found):
            assert each["counts"] == [(tokens, labels) for tokens, labels in expected["counts"]], case
            for (loss, norm), (one_loss, one_norm) in zip(each["steps"], expected["steps"], strict=True):
                assert loss == pytest.approx(one_loss, rel=2e-5), case
                assert norm == pytest.approx(one_norm, rel=1e-4), case
            if rank > 0 and not each["weights"]:
                continue  # one process has all of the weights
            assert each["weights"].keys() == expected["weights"].keys()
            for name, value in expected["weights"].items():
                assert (each["weights"][name] - value).norm() <= 1e-3 * value.norm(), f"{case}: {name}"


def test_steps_of_two_are_those_of_one(tmp_path: Path) -> None:
    assert len(QUICK) == 3
    check(QUICK, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_steps_of_more_are_those_of_one(processes: int, tmp_path: Path) -> None:
    check(ALL, processes, tmp_path)


@pytest.mark.slow
def test_whatever_layers_recompute_or_ddp_averages(tmp_path: Path) -> None:
    check(POLICIES + BY_DDP, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_twenty_steps(processes: int, tmp_path: Path) -> None:
    check(LONG, processes, tmp_path)
