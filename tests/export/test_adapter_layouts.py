"""Adapters of experts by the names that vLLM and SGLang read; what these drop is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from pronghorn.diagnose.verify_reference import perturb
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.adapter_layouts import write_served_adapter
from pronghorn.export.merge import save_merged
from pronghorn.families.registry import FAMILIES
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from support.tiny import tiny_model

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
EACH = {
    "mixtral": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w2 block_sparse_moe.experts.{}.w3",
    "qwen3_moe": "mlp.experts.{}.gate_proj mlp.experts.{}.down_proj mlp.experts.{}.up_proj",
    "olmoe": "mlp.experts.{}.gate_proj mlp.experts.{}.down_proj mlp.experts.{}.up_proj",
}


def adapted(family: str, parameters: list[str] | None = None, **options: Any) -> Any:
    model = add_lora(tiny_model(family), r=2, target_parameters=BOTH if parameters is None else parameters, **options)
    perturb(model)
    return model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("parameters", [BOTH, BOTH[::-1], BOTH[:1], BOTH[1:]], ids=["both", "turned", "up", "down"])
def test_every_expert_s_own_adapter_is_what_merging_adds(family: str, parameters: list[str], tmp_path: Path) -> None:
    """vLLM's names, asserted as its source has them; and each product is the merged checkpoint's difference."""
    model = adapted(family, parameters)
    write_served_adapter(model, None, tmp_path / "adapter")
    tensors = weights(tmp_path / "adapter")
    tiny_model(family).save_pretrained(tmp_path / "base")
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    scale, expected = 16 / 2, set()
    for layer in range(3):
        for name in (n.format(expert) for n in EACH[family].split() for expert in range(8)):
            key = f"model.layers.{layer}.{name}"
            a, b = (tensors[f"base_model.model.{key}.lora_{side}.weight"] for side in "AB")
            torch.testing.assert_close(
                scale * b @ a, merged[f"{key}.weight"] - base[f"{key}.weight"], atol=1e-6, rtol=1e-4
            )
            expected |= {f"base_model.model.{key}.lora_{side}.weight" for side in "AB"}
    rest = tensors.keys() - expected
    assert rest and all(".self_attn." in name for name in rest)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] is None and config["r"] == 2
    assert {name.rpartition(".")[2] for name in EACH[family].split()} <= set(config["target_modules"])


@pytest.mark.parametrize("parameters", [BOTH, BOTH[::-1], BOTH[:1], BOTH[1:]], ids=["both", "turned", "up", "down"])
def test_gpt_oss_has_gate_and_up_inside_and_both_there(parameters: list[str], tmp_path: Path) -> None:
    """vLLM takes `experts.base_layer` for gate and up, [E·r, in] and [out, r·E], whatever was wrapped first."""
    model = adapted("gpt_oss", parameters)
    write_served_adapter(model, None, tmp_path / "adapter")
    tensors = weights(tmp_path / "adapter")
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    merged, base = load_file(tmp_path / "merged" / "model.safetensors"), tiny_model("gpt_oss").state_dict()
    for inner, name in ((".base_layer", "gate_up_proj"), ("", "down_proj")):
        path = "model.layers.0.mlp.experts"
        a, b = (tensors[f"base_model.model.{path}{inner}.lora_{side}.weight"] for side in "AB")
        each = b.reshape(len(b), -1, 8).permute(2, 0, 1) @ a.reshape(8, -1, a.shape[1])  # as vLLM takes them apart
        difference = merged[f"{path}.{name}"] - base[f"{path}.{name}"]
        torch.testing.assert_close(8 * each.mT, difference, atol=1e-6, rtol=1e-4)


def test_an_attached_model_s_adapter_is_the_same(tmp_path: Path) -> None:
    model = adapted("qwen3_moe")
    write_served_adapter(model, None, tmp_path / "plain")
    attach(model)
    write_served_adapter(model, None, tmp_path / "attached")
    plain, attached = weights(tmp_path / "plain"), weights(tmp_path / "attached")
    assert plain.keys() == attached.keys() and all(torch.equal(plain[name], attached[name]) for name in plain)


def test_a_dense_model_s_adapter_stays_peft_s(tmp_path: Path) -> None:
    model = add_lora(tiny_model("llama"), r=2)
    model.save_pretrained(tmp_path / "peft")
    write_served_adapter(model, None, tmp_path / "served")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "served" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes()


def new_tokens() -> Any:
    model = tiny_model("llama")
    indices = {"embed_tokens": [3, 4]}
    return add_lora(model, r=2, trainable_token_indices=indices)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: add_lora(tiny_model("llama"), r=2, modules_to_save=["lm_head"]), "modules_to_save"),
        (new_tokens, "trainable_token_indices"),
        (lambda: add_lora(tiny_model("qwen2"), r=2, bias="all"), "bias"),
        (lambda: get_peft_model(tiny_model("llama"), LoraConfig(use_dora=True, target_modules=["q_proj"])), "use_dora"),
        (
            lambda: get_peft_model(
                tiny_model("llama"), LoraConfig(r=2, rank_pattern={"v_proj": 4}, target_modules=["q_proj", "v_proj"])
            ),
            "rank_pattern",
        ),
        (
            lambda: get_peft_model(
                tiny_model("llama"), LoraConfig(r=2, init_lora_weights="pissa", target_modules=["q_proj"])
            ),
            "init_lora_weights",
        ),
    ],
    ids=["modules_to_save", "new tokens", "bias", "DoRA", "ranks", "PiSSA"],
)
def test_what_servers_drop_is_refused_by_name(make: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"{named} .*: merge instead"):
        write_served_adapter(make(), None, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_the_active_adapter_of_several_is_written(tmp_path: Path) -> None:
    """PEFT saves all of them, each but the first in a folder of its own."""
    model: Any = add_lora(tiny_model("llama"), r=2, target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["v_proj"]))
    model.set_adapter("other")
    folder = write_served_adapter(model, None, tmp_path / "adapter")
    names = {name.split(".")[-3] for name in load_file(folder / "adapter_model.safetensors")}
    assert names == {"v_proj"} and LoraConfig.from_pretrained(folder).r == 3 and not (folder / "other").exists()
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedError, match="active are: default, other: choose one"):
        write_served_adapter(model, None, tmp_path / "both")


def test_experts_whose_names_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="adapters of glm4_moe's experts isn't known here: merge instead"):
        write_served_adapter(adapted("glm4_moe"), None, tmp_path / "adapter")


def test_a_folder_that_is_there_and_a_model_without_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    with pytest.raises(ConfigError, match="already exists"):
        write_served_adapter(adapted("mixtral"), None, tmp_path / "a")
    with pytest.raises(ConfigError, match="has no adapter: export it merged"):
        write_served_adapter(tiny_model("llama"), None, tmp_path / "b")


def test_the_families_say_what_their_checkpoints_do() -> None:
    """vLLM names adapters of experts as their checkpoints name experts."""
    served = {name: family.experts.served for name, family in FAMILIES.items() if family.experts.served}
    assert served == {"mixtral": "each", "qwen3_moe": "each", "olmoe": "each", "gpt_oss": "together"}
