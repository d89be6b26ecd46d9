"""Optimisers by name: what is refused, what their states take, and that a run goes on to the same bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers.training_args import OptimizerNames

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError
from pronghorn.models.auto_plan import setup_of, trained_tensors
from pronghorn.optimizers import OptimizerName, TrainedTensor, check_optimizer, place_again, state_bytes
from pronghorn.train.run import run
from pronghorn.train.run_state import changed_keys, recipe_hash
from support.runs import QUIET, Make
from support.tiny import tiny_model
from support.trainers import config

NAMES = get_args(OptimizerName)
_BITSANDBYTES = "adamw_8bit", "adamw_bnb_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"
PACKAGES = {"adamw_torch_8bit": "torchao", "adamw_torch_4bit": "torchao", "adafactor": "transformers"}
PACKAGES |= dict.fromkeys(_BITSANDBYTES, "bitsandbytes")


@pytest.fixture(scope="session")
def rows() -> Dataset:
    return Dataset.from_dict({"input_ids": [[1, *range(5, 60 + 9 * i)] for i in range(8)]})


def trainer_of(stories: Path, rows: Dataset, folder: Path, **changes: Any) -> SFTTrainer:
    """Trains every weight: embeddings, matrices above and below the quantised size, and norms."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(stories), max_seq_length=256, full_finetuning=True, use_gradient_checkpointing=False
    )
    settings = {"max_length": 256, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3} | changes
    return SFTTrainer(model, config(folder, **settings), train_dataset=rows, tokenizer=tokenizer)


def bytes_of(optimizer: Any) -> tuple[int, int]:
    """What the states' tensors take on the device, and what is paged, without the counters of steps; what several share
    counts once."""
    parts: list[Tensor] = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                inner = getattr(value, "tensor_attrs", None)
                parts += [getattr(value, attribute) for attribute in inner] if inner else [value]
    paged = {part.data_ptr(): part.nbytes for part in parts if getattr(part, "is_paged", False)}
    whole = {part.data_ptr(): part.nbytes for part in parts}
    return sum(whole.values()) - sum(paged.values()), sum(paged.values())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", [name for name in NAMES if "paged" not in name])
def test_states_take_what_is_counted_and_a_run_goes_on_to_the_same_bits(
    name: str, stories: Path, rows: Dataset, tmp_path: Path
) -> None:
    check_a_run(name, stories, rows, tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_states_take_what_is_counted_and_a_run_goes_on_to_the_same_bits(
    name: str, rows: Dataset, tmp_path: Path
) -> None:
    """In bfloat16, over matrices and embeddings that paged optimisers page."""
    wide = tiny_model("llama", vocab_size=512, hidden_size=256, intermediate_size=512, eos_token_id=2)
    wide.save_pretrained(tmp_path / "wide")
    byte_tokenizer(512).save_pretrained(tmp_path / "wide")
    trainer = check_a_run(name, tmp_path / "wide", rows, tmp_path / "whole", use_cpu=False, bf16=True)
    assert trainer.model.device.type == "cuda"
    assert (bytes_of(trainer.optimizer.optimizer)[1] > 0) == ("paged" in name)


def check_a_run(name: str, model: Path, rows: Dataset, folder: Path, **changes: Any) -> SFTTrainer:
    """Train with an optimiser, and once more from a checkpoint in the middle; return the second trainer."""
    pytest.importorskip(PACKAGES.get(name.removeprefix("paged_"), "torch"))
    trainer = trainer_of(model, rows, folder, optim=name, **changes)
    setup = setup_of(trainer.model, 256, optimizer=name)
    trainer.train()
    inner = trainer.optimizer.optimizer
    package = PACKAGES.get(name, "bitsandbytes" if "paged" in name else "torch")
    assert type(inner).__module__.startswith(package), "another optimiser trained"
    counted = setup.optimizer_bytes, setup.paged_bytes
    if name == "adafactor":  # its sums over rows and columns are left out
        assert counted == (0, 0) and sum(bytes_of(inner)) < sum(p.nbytes for p in trainer.model.parameters()) / 20
    else:
        assert bytes_of(inner) == counted, f"states take {bytes_of(inner)}, counted were {counted} (device, paged)"
    resumed = trainer_of(model, rows, folder, optim=name, **changes)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert bytes_of(resumed.optimizer.optimizer)[1] == bytes_of(inner)[1], "loaded states aren't paged"
    rates = [each.optimizer.param_groups[0]["lr"] for each in (trainer, resumed)]
    places = [rate.device if isinstance(rate, Tensor) else None for rate in rates]
    assert rates[0] == rates[1] and places[0] == places[1], f"learning rates {rates}"  # tensors of torchao
    losses, after = (
        [(entry["loss"], entry["grad_norm"]) for entry in each.state.log_history if "loss" in entry]
        for each in (trainer, resumed)
    )
    once, again = (dict(each.model.named_parameters()) for each in (trainer, resumed))
    differ = {
        key: f"{int((weight != again[key]).sum())} of {weight.numel()}, by {(weight - again[key]).abs().max():.3g}"
        for key, weight in once.items()
        if not torch.equal(weight, again[key])
    }
    # the third step's loss differs: what was loaded does; the fourth's: the third update; neither: the fourth update
    assert not differ, f"{differ}; (loss, norm of gradients) by step {losses}, resumed {after}"
    assert len({loss for loss, _ in losses}) == 4 and resumed.state.global_step == 4, f"nothing was trained: {losses}"
    return resumed


def test_learning_rates_of_a_checkpoint_go_where_parameters_are() -> None:
    """The meta device stands for a GPU; rates that are no tensors stay."""
    weights = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in ("meta", "cpu", "meta")]
    groups = [{"params": [weight]} for weight in weights]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(1e-3))
    optimizer.param_groups[2]["lr"] = 1e-3
    place_again(optimizer)
    assert [group["lr"].device.type for group in optimizer.param_groups[:2]] == ["meta", "cpu"]
    assert optimizer.param_groups[2]["lr"] == 1e-3


def test_quantised_states_take_less_than_float32_ones() -> None:
    table, matrix, norm = TrainedTensor(2**20, 4, embedding=True), TrainedTensor(2**20, 4), TrainedTensor(64, 4)
    assert state_bytes("adamw_torch", [table, matrix, norm]) == (8 * (2**21 + 64), 0)
    blocks = 2 * 4 * 2**12
    assert state_bytes("adamw_8bit", [table, matrix, norm]) == (8 * (2**20 + 64) + 2 * 2**20 + blocks + 2048, 0)
    assert state_bytes("lion_8bit", [matrix]) == (2**20 + blocks // 2 + 1024, 0)
    assert state_bytes("paged_adamw_32bit", [matrix, norm]) == (8 * 64, 8 * 2**20)
    assert state_bytes("paged_adamw_8bit", [matrix]) == (blocks + 2048, 2 * 2**20)
    assert state_bytes("adamw_torch_4bit", [matrix]) == (2**20 + blocks + 2 * 64, 0)
    assert state_bytes("adamw_torch", [TrainedTensor(64, 2)]) == (4 * 64, 0), "states have the parameter's dtype"


def test_an_embedding_is_told_from_a_linear(stories: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=256, full_finetuning=True)
    assert [tensor.elements for tensor in trained_tensors(model) if tensor.embedding] == [512 * 64]


def test_every_name_is_one_of_transformers() -> None:
    assert set(NAMES) <= {each.value for each in OptimizerNames}


def test_optimisers_that_cannot_work_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        if "paged" in name:
            with pytest.raises(ConfigError, match=f"{name} on the CPU.*use adamw_"):
                check_optimizer(name, "cpu")
            check_optimizer(name, "cuda")
    optional = {name: package for name, package in PACKAGES.items() if package != "transformers"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in optional.values() else object())
    for name, package in optional.items():
        with pytest.raises(ConfigError, match=f"{name} needs {package}.*pip install {package}"):
            check_optimizer(name, "cuda")


def test_a_recipe_s_optimiser_is_refused_before_the_model_loads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronghorn.train.run.find", lambda *_: pytest.fail("the model was looked for"))
    with pytest.raises(ConfigError, match="paged_adamw_8bit on the CPU"):
        run(make("run", train={"optimizer": "paged_adamw_8bit"}), QUIET)
    assert not (tmp_path / "run").exists()


def test_a_script_s_optimiser_is_refused_before_it_trains(stories: Path, rows: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"paged_adamw_32bit on the CPU.*use adamw_torch"):
        trainer_of(stories, rows, tmp_path, optim="paged_adamw_32bit")


def test_runs_that_began_before_the_keys_were_there_go_on(make: Make) -> None:
    now, earlier = make("run"), make("run").to_dict()
    del earlier["train"]["optimizer"], earlier["precision"]["adapter_dtype"], earlier["precision"]["tf32"]
    assert changed_keys(earlier, now.to_dict()) == []
    other = make("run", train={"optimizer": "lion_8bit"})
    assert changed_keys(earlier, other.to_dict()) == [("train.optimizer", "adamw_torch_fused", "lion_8bit")]
    assert recipe_hash(now) != recipe_hash(other)


def test_a_recipe_trains_with_the_optimiser_it_names(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run(make("run", train={"optimizer": "adamw_8bit", "max_steps": 2}), QUIET)
    saved = torch.load(tmp_path / "run" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert all("state1" in str(state) and "exp_avg" not in str(state) for state in saved["state"].values())
