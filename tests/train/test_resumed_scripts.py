"""A script goes on from a checkpoint with the training that wrote it, or is told what changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AdaLoraConfig, LoHaConfig, LoraConfig
from transformers.training_args import OptimizerNames

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.errors import ConfigError, DataError
from pronghorn.models.attach import attach
from pronghorn.state import MANIFEST
from pronghorn.train.checkpoint import Fingerprint, seal
from pronghorn.train.resumed import _of_adapters, _of_model, _states, saved_optimizer
from support.composites import write_composite
from support.tiny import FAMILIES, tiny_model
from support.trainers import LINEARS, ROW, config

ROWS = Dataset.from_list([{"prompt": "One day", "completion": f" a cat sat {n}."} for n in range(8)])


def trainer(model: Path, folder: Path, full: bool = False, lora: dict[str, Any] | None = None, **args: Any) -> Any:
    loaded, tokenizer = FastLanguageModel.from_pretrained(
        str(model), max_seq_length=ROW, full_finetuning=full, use_gradient_checkpointing=False
    )
    if not full:
        settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **(lora or {})}
        loaded = FastLanguageModel.get_peft_model(loaded, **settings)
    asked = config(folder, **{"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **args})
    return SFTTrainer(loaded, asked, train_dataset=ROWS, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def saved(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A checkpoint of an adapter, and one of every weight."""
    folder = tmp_path_factory.mktemp("saved")
    for full in (False, True):
        trainer(stories, folder / str(full), full).train()
    return {full: folder / str(full) / "checkpoint-1" for full in (False, True)}


def without_manifest(saved: Path, folder: Path) -> Path:
    """Return a copy as stock TRL saves it."""
    shutil.copytree(saved, folder / "stock/checkpoint-1")
    (folder / "stock/checkpoint-1" / MANIFEST).unlink()
    return folder / "stock/checkpoint-1"


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"lora": {"lora_alpha": 64}}, "lora_alpha was 8, is 64"),
    "rslora": ({"lora": {"use_rslora": True}}, "use_rslora was False, is True"),
    "dropout": ({"lora": {"lora_dropout": 0.1}}, "lora_dropout was 0.0, is 0.1"),
    "an alpha of some": ({"lora": {"alpha_pattern": {"q_proj": 2}}}, "alpha_pattern was {}, is {'q_proj': 2}"),
    "rank": ({"lora": {"r": 8}}, "r was 4, is 8"),
    "targets": ({"lora": {"target_modules": ["q_proj"]}}, "target_modules was ["),
    "several": ({"lora": {"r": 8, "lora_alpha": 16}}, "r was 4, is 8; lora_alpha was 8, is 16"),
    "every weight": ({"full": True}, "what is trained was 'an adapter', is 'every weight'"),
    "SGD": ({"optim": "sgd"}, "optim was 'adamw_torch_fused', is 'sgd'"),
    "Adafactor": ({"optim": "adafactor"}, "optim was 'adamw_torch_fused', is 'adafactor'"),
}


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize(("changes", "said"), [pytest.param(*each, id=name) for name, each in OTHER.items()])
def test_another_adapter_or_optimiser_is_refused(
    stories: Path, saved: dict[bool, Path], tmp_path: Path, changes: dict[str, Any], said: str, stock: bool
) -> None:
    """Before a weight is loaded."""
    folder = without_manifest(saved[False], tmp_path) if stock else saved[False]
    other = trainer(stories, tmp_path / "other", **changes)
    before = [parameter.clone() for parameter in other.model.parameters()]
    with pytest.raises(ConfigError) as error:
        other.train(resume_from_checkpoint=str(folder))
    assert f"{folder} is a checkpoint of another training: {said}" in error.value.problem
    assert "put back what changed" in error.value.remedy
    assert all(map(torch.equal, before, other.model.parameters()))


SAME: dict[str, dict[str, Any]] = {
    "longer": {"max_steps": 4, "learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1},
    "batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 7, "seed": 3},
    "AdamW's other kernel": {"optim": "adamw_torch"},
    "targets by a pattern": {"lora": {"target_modules": rf".*\.({'|'.join(LINEARS)})"}},
    "targets in another order": {"lora": {"target_modules": LINEARS[::-1]}},
    "biases where there are none": {"lora": {"bias": "all"}},
    "another beginning": {"lora": {"random_state": 9}},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_what_may_change(stories: Path, saved: dict[bool, Path], tmp_path: Path, changes: dict[str, Any]) -> None:
    other = trainer(stories, tmp_path / "other", **{"max_steps": 3, **changes})
    other.train(resume_from_checkpoint=str(saved[False]))
    assert other.state.global_step == other.args.max_steps


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps was 1e-05, is 0.001"),
        ({"hidden_act": "gelu"}, "hidden_act was 'silu', is 'gelu'"),
        ({"eos_token_id": 1, "use_cache": False, "architectures": ["Another"]}, None),
    ],
)
@pytest.mark.parametrize("stock", [False, True])
def test_every_weight_of_another_configuration_is_refused(
    stories: Path, saved: dict[bool, Path], tmp_path: Path, change: dict[str, Any], said: str | None, stock: bool
) -> None:
    folder = without_manifest(saved[True], tmp_path) if stock else saved[True]
    shutil.copytree(stories, tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    other = trainer(tmp_path / "model", tmp_path / "other", full=True)
    if said is None:
        other.train(resume_from_checkpoint=str(folder))
        assert other.state.global_step == 2
    else:
        with pytest.raises(ConfigError) as error:
            other.train(resume_from_checkpoint=str(folder))
        assert error.value.problem == f"{folder} is a checkpoint of another training: {said}"


def test_an_adapter_does_not_go_on_from_every_weight(stories: Path, saved: dict[bool, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="what is trained was 'every weight', is 'an adapter'"):
        trainer(stories, tmp_path).train(resume_from_checkpoint=str(saved[True]))


def test_a_recipe_s_run_is_judged_by_its_recipe(stories: Path, saved: dict[bool, Path], tmp_path: Path) -> None:
    """`--allow` goes on with another alpha. Other weights are refused all the same."""
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(saved[False], folder)
    allowed = trainer(stories, tmp_path, lora={"lora_alpha": 64})
    allowed.recipe = "its hash"
    seal(folder, Fingerprint.of(allowed.model), allowed.recipe, 1)
    allowed.train(resume_from_checkpoint=str(folder))
    assert allowed.state.global_step == 2
    other = trainer(stories, tmp_path, lora={"r": 8})
    other.recipe = "its hash"
    with pytest.raises(DataError, match="its trainable weights have other names"):
        other.train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("full", [False, True])
def test_models_with_towers_go_on(tmp_path: Path, full: bool) -> None:
    """Whose checkpoints name the whole model's modules, and have its configuration."""
    write_composite(tmp_path / "model", "gemma3")
    lora = {"target_modules": ["q_proj"], "alpha_pattern": {"model.layers.0.self_attn.q_proj": 2}}
    trainer(tmp_path / "model", tmp_path / "run", full, lora, max_steps=1).train()
    assert (tmp_path / "run/checkpoint-1" / ("config.json" if full else "adapter_config.json")).is_file()
    again = trainer(tmp_path / "model", tmp_path / "run", full, lora)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    with pytest.raises(ConfigError, match="was 'adamw_torch_fused', is 'sgd'" if full else "lora_alpha was 8, is 9"):
        trainer(tmp_path / "model", tmp_path / "run", full, {**lora, "lora_alpha": 9}, optim="sgd").train(True)


@pytest.mark.parametrize(
    ("before", "now", "same_tensors", "changed"),
    [
        (LoraConfig(init_lora_weights="gaussian"), LoraConfig(), False, []),
        (LoraConfig(init_lora_weights="pissa"), LoraConfig(), False, ["init_lora_weights"]),
        (LoraConfig(), LoraConfig(init_lora_weights="olora"), True, []),  # the frozen weights tell
        (LoraConfig(target_modules={"b", "a"}), LoraConfig(target_modules=["a", "b"]), False, []),
        (LoraConfig(trainable_token_indices=[5, 6]), LoraConfig(trainable_token_indices=[6, 5]), True,
         ["trainable_token_indices"]),
        (AdaLoraConfig(total_step=9, rank_pattern={"a": [True]}), AdaLoraConfig(total_step=20), False, []),
        (AdaLoraConfig(total_step=9, lora_alpha=4), AdaLoraConfig(total_step=9), False, ["lora_alpha"]),
        (LoHaConfig(alpha=4), LoHaConfig(alpha=8), True, ["alpha"]),
        (LoHaConfig(), LoraConfig(), False, ["peft_type"]),
    ],
)  # fmt: skip
def test_fields_of_adapters_that_are_compared(
    tmp_path: Path, before: Any, now: Any, same_tensors: bool, changed: list[str]
) -> None:
    for name, folder in (("default", tmp_path), ("mine", tmp_path / "mine")):
        before.save_pretrained(folder)
        model = SimpleNamespace(peft_config={name: now})
        assert [field for field, *_ in _of_adapters(tmp_path, model, same_tensors)] == changed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_was_saved_is_of_its_own_configuration(family: str, tmp_path: Path) -> None:
    model = attach(tiny_model(family)).model
    model.config.save_pretrained(tmp_path)
    assert list(_of_model(tmp_path, model)) == []
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"vocab_size": 7}))
    assert list(_of_model(tmp_path, model)) == [("vocab_size", 7, model.config.vocab_size)]
    (tmp_path / "config.json").write_text(json.dumps(table | {"vocab_size": 7, "transformers_version": "4.0"}))
    assert list(_of_model(tmp_path, model)) == [], "another version may write it otherwise"


def test_the_optimiser_of_a_checkpoint_is_read_without_running_anything(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    def told(content: bytes) -> str | None:
        with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
            archive.writestr("training_args/data.pkl", content)
        return saved_optimizer(tmp_path)

    arguments = SFTArguments(optim=OptimizerNames.ADAFACTOR, bad=Bad())
    assert told(pickle.dumps(arguments)) == "adafactor"
    assert told(pickle.dumps(SFTArguments(optim="sgd"))) == "sgd"
    assert told(pickle.dumps(SFTArguments())) is told(pickle.dumps({"optim": "sgd"})) is told(b"\x80") is None
    assert not (tmp_path / "ran").exists()
    (tmp_path / "training_args.bin").write_bytes(b"no archive")
    assert saved_optimizer(tmp_path) is saved_optimizer(tmp_path / "nowhere") is None


class SFTArguments:
    """Stands for a trainer's arguments."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("adamw_torch_fused", "adamw_torch", True),
        ("adamw_bnb_8bit", "paged_adamw_8bit", True),
        ("ademamix", "paged_ademamix_32bit", True),
        ("adamw_torch", "adamw_torch_8bit", False),
        ("adamw_torch", "paged_adamw_32bit", False),
        ("adamw_8bit", "lion_8bit", False),
        ("rmsprop", "rmsprop_bnb", False),
        ("lion_32bit", "lion_8bit", False),
    ],
)
def test_optimisers_that_have_the_same_states(one: str, other: str, alike: bool) -> None:
    assert (_states(one) == _states(other)) == alike
