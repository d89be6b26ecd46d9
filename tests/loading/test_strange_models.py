"""Files from strangers: adapters and models whose files would change the base, hang, run code, or load as another."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn import FastLanguageModel
from pronghorn.errors import ConfigError, DataError, PronghornError
from pronghorn.models.adapter_files import check_pattern

SOURCE = Path(__file__).parents[2] / "src" / "pronghorn"


def load(folder: Path | str, **options: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, **options)


@pytest.fixture
def model(stories: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stories, tmp_path / "model", copy_function=shutil.copyfile)


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    FastLanguageModel.get_peft_model(load(model)[0], r=2).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    "key", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_an_adapter_does_not_rewrite_its_base(adapter: Path, model: Path, key: str) -> None:
    file = adapter / "adapter_model.safetensors"
    base = load(model)[0].state_dict()[key]
    save_file(load_file(file) | {f"base_model.model.{key}": torch.zeros_like(base)}, file)
    with pytest.raises(DataError, match=key.replace(".", r"\.")):
        load(adapter)


def test_biases_are_an_adapter_s_only_where_it_declares_them(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.layers.0.mlp.up_proj.bias": torch.zeros(172)}, file)
    with pytest.raises(DataError, match=r"up_proj\.bias"):
        load(adapter)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_modules": r"(.*)*\.(a|b)"}, "target_modules: the regular expression .* may take for ever"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern: the regular expression .* may take for ever"),
        ({"alpha_pattern": {"x" * 2000: 4}}, "alpha_pattern: a regular expression of 2,000 characters"),
        ({"rank_pattern": {f"layers.{i}": 4 for i in range(2000)}}, "rank_pattern has 2,000 patterns"),
        ({"layers_pattern": "(a|a)*", "layers_to_transform": [0]}, "layers_pattern: the regular expression"),
        ({"layer_replication": [[0, 1]] * 100_000}, "layer_replication makes 100,000 layers"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication makes 1,000,000,000 layers"),
        ({"layer_replication": 7}, r"layer_replication is no list of \[start, end\]"),
        ({"target_modules": [""]}, "target_modules .* is no list of names"),
        ({"target_modules": ["nowhere"]}, "doesn't fit its base model"),
        ({"modules_to_save": ["model"]}, "modules_to_save 'model' holds the model's layers"),
        ({"modules_to_save": ["nowhere"]}, "modules_to_save 'nowhere' is not in the model"),
        ({"peft_type": "NEW"}, "is NEW, of an unknown kind"),
        ({"peft_type": ["LORA"]}, "of an unknown kind"),
        ({"task_type": "SEQ_CLS"}, r"is a classifier's \(SEQ_CLS\): train it by transformers or TRL"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_config is not supported"),
        ({"base_model_name_or_path": "ADAPTER"}, "which is an adapter itself"),
    ],
)
def test_configurations_of_adapters(adapter: Path, values: dict[str, Any], message: str) -> None:
    if "base_model_name_or_path" in values:
        values = {"base_model_name_or_path": str(adapter)}
    change(adapter / "adapter_config.json", **values)
    with pytest.raises(PronghornError, match=message):
        load(adapter)


def test_regular_expressions_that_people_use_are_taken() -> None:
    check_pattern(
        r"(?:.*?(?:vision|image|visual|patch|embed|frames|language|text).*?(?:self_attn|attention|attn|mlp|dense).*?"
        r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|qkv).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\."
        r"(?:(?:k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj)))"
    )
    for pattern in ("q_proj", r"layers\.\d+\.self_attn\.(q|k|v|o)_proj", r".*\.(gate|gate_up|up)_proj"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(a|a)*", "(|a)" * 40, "a?" * 40 + "a" * 40, ".*" * 9 + "x", "(?=(.*)+)x", "("]
)
def test_regular_expressions_that_never_end_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        check_pattern(pattern)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers 1000000000000 is not an integer from 0 to 1,000"),
        ({"num_hidden_layers": 900}, "num_hidden_layers 900, but the weights hold 5 layers"),
        ({"num_hidden_layers": 3}, "hold 5 layers: layers 3 to 4 would be left out"),
        ({"hidden_size": 10**5}, r"config\.json says \[512, 100000\] for model\.embed_tokens\.weight"),
        ({"vocab_size": 10**7}, r"config\.json says \[10000000, 64\]"),
        ({"vocab_size": "many"}, "vocab_size many is not an integer"),
        ({"num_experts": 10**9}, "num_experts 1000000000 is not"),
        ({"hidden_act": "wish"}, "hidden_act 'wish' is no activation"),
        ({"rope_parameters": {"rope_type": "wish", "rope_theta": 1e4}}, "rope_type 'wish' is unknown"),
        ({"eos_token_id": 512}, r"the stop token 512 \(eos_token_id\) is outside the vocabulary of 512"),
        ({"eos_token_id": [2, 900]}, "the stop token 900"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "is a LlamaForSequenceClassification, no causal language",
        ),
        ({"rope_parameters": 7}, r"its config\.json can't be used"),
    ],
)
def test_configurations_of_models(model: Path, values: dict[str, Any], message: str) -> None:
    change(model / "config.json", **values)
    with pytest.raises(PronghornError, match=message):
        load(model)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_a_broken_index_is_an_error(model: Path, text: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json"):
        load(model)


def test_a_run_is_no_model_and_the_error_says_where_its_adapter_is(adapter: Path) -> None:
    (adapter.parent / "run.json").write_text("{}")
    with pytest.raises(DataError, match=r"is a run, not a model: give .*adapter$"):
        load(adapter.parent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": [""]}, "target module '' is not in the model"),
        ({"modules_to_save": [""]}, "modules_to_save '' is not in the model"),
        ({"modules_to_save": ["model"]}, "modules_to_save 'model' holds the model's layers"),
        ({"target_modules": "(a+)+"}, "may take for ever"),
        *(
            ({"target_modules": targets, "modules_to_save": ["self_attn", "mlp"]}, "no linear is left for an adapter")
            for targets in (["q_proj", "down_proj"], r".*\.mlp\..*_proj", "all-linear", None)
        ),
    ],
)
def test_names_that_mean_the_whole_model(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PronghornError, match=message):
        FastLanguageModel.get_peft_model(load(model)[0], **options)


def test_linears_that_are_trained_whole_get_no_adapter_beside_others_that_do(model: Path) -> None:
    options = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]}
    adapted = FastLanguageModel.get_peft_model(load(model)[0], r=2, **options)
    trained = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert trained == {"q_proj"}


LOADERS = ("from_pretrained", "from_config", "get_config_dict")


def calls() -> list[Any]:
    """Every call that may run code which came with a model. PEFT's and Pronghorn's own run none,
    nor does reading a configuration of generation or making the quantiser of one."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in LOADERS) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                owner = ast.unparse(node.func.value)
                if (
                    not owner.endswith(
                        ("PeftConfig", "PeftModel", "GenerationConfig", "FastLanguageModel", "AutoHfQuantizer")
                    )
                    and "bench" not in file.parts
                ):
                    found.append(pytest.param(node, id=f"{file.relative_to(SOURCE)}:{owner}.{node.func.attr}"))
    return found


@pytest.mark.parametrize("call", calls())
def test_every_loader_is_told_whether_code_is_trusted(call: ast.Call) -> None:
    named = {keyword.arg for keyword in call.keywords}
    options = {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}
    assert "trust_remote_code" in named or "hub" in options or "options" in options, ast.unparse(call)


def test_the_walk_finds_the_loaders() -> None:
    assert len(calls()) >= 5
