"""Keys of adapters, optimisers and schedules reach PEFT and transformers, and train, by slower paths where need be."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from torch import nn
from trl import SFTConfig

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.config.checks import missed
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.layers.linears import unfused_reason
from pronghorn.train.build import check_device, training_arguments
from pronghorn.train.run import run
from support.runs import QUIET, Make

PLAIN = {"max_steps": 2, "save_steps": None, "logging_steps": 1}


def config_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "adapter" / "adapter_config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("adapter", "saved"),
    [
        ({"use_dora": True}, {"use_dora": True}),
        ({"init_lora_weights": "gaussian"}, {"init_lora_weights": "gaussian"}),
        ({"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"q_proj": 32}}, {"rank_pattern": {"down_proj": 8}}),
    ],
    ids=str,
)
def test_kinds_of_adapters_train(adapter: dict[str, Any], saved: dict[str, Any], make: Make, tmp_path: Path) -> None:
    recipe = make("run", adapter={"lora_dropout": 0.0, **adapter}, train=PLAIN)
    record = run(recipe, QUIET)
    assert record.heldout["after"] < record.heldout["before"]  # type: ignore[operator]
    config = config_of(tmp_path / "run")
    assert {key: config[key] for key in saved} == saved


def test_dora_goes_by_the_slower_path_and_the_reason_is_told() -> None:
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"], use_dora=True))
    assert unfused_reason([model.base_model.model[0]], torch.float32) == "an adapter that is not plain LoRA"


@pytest.mark.matrix(2)
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_what_was_taken_out_of_the_base_is_saved_as_plain_lora(
    init: str, make: Make, tmp_path: Path, stories: Path
) -> None:
    """A plain base with the saved adapter says what the trained model says."""
    recipe = make("run", adapter={"lora_dropout": 0.0, "init_lora_weights": init}, train=PLAIN)
    record = run(recipe, QUIET)
    config = config_of(tmp_path / "run")
    assert config["init_lora_weights"] is True and config["r"] == 8 and config["lora_alpha"] == 32
    again = make("again", model={"name": str(tmp_path / "run" / "adapter")}, train={**PLAIN, "max_steps": 1})
    assert run(again, QUIET).heldout["before"] == pytest.approx(record.heldout["after"], abs=2e-4)
    assert record.heldout["after"] < record.heldout["before"]  # type: ignore[operator]


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_rank_above_what_a_weight_has_is_refused_before_training(init: str, make: Make) -> None:
    """PEFT makes such adapters of a smaller rank, which could not be loaded to be saved when all was trained."""
    wide = {"lora_dropout": 0.0, "init_lora_weights": init, "rank_pattern": {"k_proj": 48}}
    with pytest.raises(ConfigError, match="with rank 48 of k_proj, whose weight has 32"):
        run(make("run", adapter=wide, train=PLAIN), QUIET)


def test_a_rank_of_a_pattern_has_the_limit_of_the_rank(make: Make) -> None:
    with pytest.raises(ConfigError, match="rank_pattern 'q_proj' gives 5000, above 256, the most for this model"):
        run(make("run", adapter={"rank_pattern": {"q_proj": 5000}}), QUIET)


@pytest.mark.parametrize("pattern", ["dwn_proj", "layers.0"])  # PEFT compares ends of linears' names
def test_a_pattern_of_no_module_is_refused(pattern: str, make: Make) -> None:
    with pytest.raises(ConfigError, match=f"rank_pattern or alpha_pattern '{pattern}' matches no module"):
        run(make("run", adapter={"rank_pattern": {pattern: 8}}), QUIET)


def test_patterns_whose_order_decides_are_refused(make: Make) -> None:
    """PEFT takes the first, and saves them sorted: what is loaded again would be another model."""
    both = {"q_proj": 64, "layers.1.self_attn.q_proj": 8}
    with pytest.raises(ConfigError, match=r"'q_proj' and 'layers.1.self_attn.q_proj' both match model.layers.1"):
        run(make("run", adapter={"alpha_pattern": both}), QUIET)
    run(make("sorted", adapter={"alpha_pattern": dict(sorted(both.items()))}, train={**PLAIN, "max_steps": 1}), QUIET)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("optimizer", ["adafactor", "rmsprop", "adagrad", "sgd"])
def test_optimisers_of_transformers_train(optimizer: str, make: Make) -> None:
    record = run(make("run", train={**PLAIN, "optimizer": optimizer}), QUIET)
    assert record.heldout["after"] != record.heldout["before"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("scheduler", "more"),
    [
        ("cosine_with_restarts", {}),
        ("polynomial", {}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.5}),
        ("warmup_stable_decay", {"num_decay_steps": 2}),
        ("reduce_lr_on_plateau", {}),
    ],
)
def test_schedules_of_transformers_train(scheduler: str, more: dict[str, float], make: Make) -> None:
    train = {**PLAIN, "max_steps": 4, "warmup_ratio": 0.5, "lr_scheduler": scheduler, "lr_scheduler_kwargs": more}
    record = run(make("run", train={**train, "eval_steps": 2}), QUIET)
    rates = [step["learning_rate"] for step in record.steps]
    assert len(rates) == 4
    if scheduler != "reduce_lr_on_plateau":
        assert rates[0] == 0 and rates[1] == pytest.approx(0.5e-2)


def test_polynomial_needs_a_step_after_the_warm_up(make: Make) -> None:
    """A warm-up has five steps by default, as may a first try."""
    recipe = make("run", train={**PLAIN, "max_steps": 5, "warmup_steps": 5, "lr_scheduler": "polynomial"})
    says = "train.lr_scheduler: polynomial with 5 steps of warm-up in a run of 5: lower train."
    with pytest.raises(ConfigError, match=f"{says}warmup_steps"):
        run(recipe, QUIET)
    by_ratio = recipe.train.model_copy(update={"warmup_ratio": 0.9})
    with pytest.raises(ConfigError, match=f"{says}warmup_ratio"):
        list(missed(by_ratio, 5))
    assert list(missed(by_ratio, 11)) == []  # ten steps of warm-up


def test_neftune_adds_noise_to_training_alone(make: Make) -> None:
    plain = run(make("plain", adapter={"lora_dropout": 0.0}, train=PLAIN), QUIET)
    noisy = run(make("noisy", adapter={"lora_dropout": 0.0}, train={**PLAIN, "neftune_noise_alpha": 50.0}), QUIET)
    assert plain.heldout["before"] == noisy.heldout["before"]
    assert plain.steps[0]["loss"] != noisy.steps[0]["loss"]


def test_a_seed_for_data_alone_changes_the_order_and_not_the_adapter(make: Make) -> None:
    base, other = make("a"), make("b", data={"seed": 7})
    assert (base.data_seed, other.data_seed) == (base.train.seed, 7)
    arguments = training_arguments(other)
    assert arguments.data_seed == 7 and arguments.seed == base.train.seed


def test_what_a_cpu_can_not_do_is_told(make: Make) -> None:
    with pytest.raises(ConfigError, match="graph: on without a CUDA device"):
        run(make("run", packing={"graph": "on"}), QUIET)
    with pytest.raises(ConfigError, match="feed_forward: tiled without a CUDA device"):
        run(make("run", memory={"feed_forward": "tiled"}), QUIET)
    console = Console(file=io.StringIO(), width=200)
    check_device(make("run", memory={"budget": "16GB"}), "cpu", console)
    assert "memory.budget 16GB is of GPU memory" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("attention", ["flash", "tiled"])
def test_an_attention_that_can_not_be_served_is_refused_before_training(
    attention: str, packs: bool, make: Make, tmp_path: Path
) -> None:
    """Padded batches never ask for it: the run ended in this error once all was trained, without its record."""
    with pytest.raises(UnsupportedError, match=f"attention '{attention}' was asked for, but device cpu has no"):
        run(make("run", packing={"attention": attention, "enabled": packs}, train=PLAIN), QUIET)
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock"}


def test_names_between_commas_are_a_list(make: Make) -> None:
    recipe = make("run", adapter={"modules_to_save": "lm_head, embed_tokens", "target_modules": "q_proj,v_proj"})
    assert recipe.adapter.modules_to_save == ["lm_head", "embed_tokens"]
    assert recipe.adapter.target_modules == ["q_proj", "v_proj"]
    again = Recipe.model_validate(recipe.to_dict())
    assert again == recipe


def test_muon_trains_lora_in_a_script(stories: Path, tmp_path: Path) -> None:
    """transformers has no Muon by name, so recipes refuse it; its matrices are what LoRA trains."""
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=128)
    model = FastLanguageModel.get_peft_model(model, r=8, rank_pattern={"down_proj": 4})
    assert {parameter.dim() for parameter in model.parameters() if parameter.requires_grad} == {2}
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 8),
        args=SFTConfig(str(tmp_path), packing=True, max_length=128, max_steps=3, bf16=False, report_to="none"),
        optimizer_cls_and_kwargs=(torch.optim.Muon, {"lr": 2e-3, "adjust_lr_fn": "match_rms_adamw"}),
    )
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < before
