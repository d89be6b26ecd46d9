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
from pronghorn.errors import ConfigError, DataError, PronghornError, UnsupportedError
from pronghorn.models.adapter_files import check_pattern
from pronghorn.train.evaluate import answer

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
        ({"layer_replication": 7}, r"layer_replication is not a list of \[start, end\]"),
        ({"target_modules": [""]}, "target_modules .* is not a list of names"),
        ({"target_modules": ["nowhere"]}, "doesn't fit its base model"),
        ({"modules_to_save": ["model"]}, "modules_to_save 'model' holds the model's layers"),
        ({"modules_to_save": ["nowhere"]}, "modules_to_save 'nowhere' is not in the model"),
        ({"peft_type": "NEW"}, "is NEW, of an unknown kind"),
        ({"peft_type": ["LORA"]}, "of an unknown kind"),
        ({"task_type": "SEQ_CLS"}, r"is a classifier's \(SEQ_CLS\): train it by transformers or TRL"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_config is not supported"),
        ({"base_model_name_or_path": "ADAPTER"}, "which is an adapter itself"),
        ({"r": 0}, "rank 0 of r is not from 1"),
        ({"r": 10**9}, "rank 1000000000 of r is not"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank '2' of q_proj is not"),
        ({"lora_alpha": float("nan")}, "nan of lora_alpha is not a finite number"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "inf of q_proj is not a finite number"),
        ({"use_rslora": "false"}, "use_rslora 'false' is neither true nor false"),
        ({"bias": "some"}, "bias 'some' is not one of none, all and lora_only"),
        ({"modules_to_save": ["lm_head"]}, r"lacks 1 weight of its adapter \(base_model\.model\.lm_head\.weight"),
        ({"trainable_token_indices": [600]}, "doesn't fit its base model .index 600 is out of bounds"),
        ({"layer_replication": [[0, 9]]}, "doesn't fit its base model .index 5 is out of range"),
    ],
)
def test_configurations_of_adapters(adapter: Path, values: dict[str, Any], message: str) -> None:
    if "base_model_name_or_path" in values:
        values = {"base_model_name_or_path": str(adapter)}
    change(adapter / "adapter_config.json", **values)
    with pytest.raises(PronghornError, match=message):
        load(adapter)


@pytest.mark.parametrize("base", ["/nowhere/base", "./nowhere", "old/runs/base"])
def test_an_adapter_whose_base_was_moved(adapter: Path, base: str) -> None:
    change(adapter / "adapter_config.json", base_model_name_or_path=base)
    with pytest.raises(DataError, match=f"the adapter's base, {base}, does not exist") as caught:
        load(adapter)
    assert f"base_model_name_or_path of {adapter / 'adapter_config.json'}" in caught.value.remedy


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        ("model.layers", "transformer.h", r"lacks 70 weights .*; it holds .*transformer\.h\.0\.mlp"),
        ("base_model.", "module.base_model.", r"it holds module\.base_model"),
    ],
)
def test_an_adapter_of_other_names(adapter: Path, here: str, there: str, message: str) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace(here, there, 1): weight for name, weight in load_file(file).items()}, file)
    with pytest.raises(DataError, match=message) as caught:
        load(adapter)
    assert len(str(caught.value)) < 600


def test_an_adapter_of_codes(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name: (weight * 10).to(torch.int8) for name, weight in load_file(file).items()}, file)
    with pytest.raises(DataError, match=r"lora_A\.weight is torch\.int8, of which nothing says"):
        load(adapter)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_an_adapter_with_numbers_that_are_none(adapter: Path, number: float) -> None:
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = [*weights][-1]
    weights[name][0, 0] = number
    save_file(weights, file)
    with pytest.raises(DataError, match=rf"adapter_model\.safetensors: {name} holds NaN or infinite numbers"):
        load(adapter)


def test_an_adapter_in_several_files(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(file), "part.safetensors")}
    file.rename(adapter / "part.safetensors")
    (adapter / f"{file.name}.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"holds an adapter in several files .* and PEFT reads adapter_model"):
        load(adapter)


def test_an_adapter_with_another_model_s_tokenizer(adapter: Path, model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, adapter / name)
    load(adapter)
    table = json.loads((adapter / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    table["model"]["vocab"] = {token: len(vocabulary) - 1 - index for token, index in vocabulary.items()}
    (adapter / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match=r"of the base's \d+ tokens their ids: it is another model's"):
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


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 3,
    "long_factor": [1.0] * 3,
    "original_max_position_embeddings": 128,
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


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
        ({"hidden_act": "wish"}, "hidden_act 'wish' is not an activation"),
        ({"rope_parameters": {"rope_type": "wish", "rope_theta": 1e4}}, "rope_type 'wish' is unknown"),
        ({"eos_token_id": 512}, r"the stop token 512 \(eos_token_id\) is outside the vocabulary of 512"),
        ({"eos_token_id": [2, 900]}, "the stop token 900"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "is a LlamaForSequenceClassification, no causal language",
        ),
        ({"rope_parameters": 7}, r"its config\.json can't be used"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan is not from 0 to 1"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05 is not"),
        (ROPE | {"rope_theta": 0}, "rope_theta 0 of its RoPE is not a positive number"),
        (ROPE | {"rope_theta": "1e4"}, "rope_theta '1e4' of its RoPE"),
        (ROPE | {"rope_type": "linear", "factor": 0}, "factor 0 of its RoPE"),
        (ROPE | {"rope_type": "linear", "factor": "8"}, "factor '8' of its RoPE"),
        (ROPE | LONG, "3 numbers in long_factor, and heads have 4 frequencies"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 is not an integer from 1"),
        ({"pad_token_id": -1000}, "pad_token_id -1000 is outside the vocabulary of 512"),
        ({"return_dict": False}, "return_dict false"),
        ({"text_config": {"vocab_size": 512}}, "a text_config, which llama doesn't have"),
        ({"quantization_config": NF4}, "bitsandbytes quantised the weights, and they are plain: remove"),
    ],
)
def test_configurations_of_models(model: Path, values: dict[str, Any], message: str) -> None:
    if "rope_theta" in values or "rope_type" in values:
        values = {"rope_parameters": values}
    change(model / "config.json", **values)
    with pytest.raises(PronghornError, match=message):
        load(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a JSON table"),
        ("[]", "is not a JSON table"),
        ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ('{"eos_token_id": 9999}', r"generation_config\.json: the stop token 9999 .* outside the vocabulary of 512"),
        ('{"eos_token_id": ["</s>"]}', "the stop token '</s>'"),
    ],
)
def test_configurations_of_generation(model: Path, text: str, message: str) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load(model)


QUERY = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_codes_without_a_quantization_config_are_no_weights(model: Path, dtype: torch.dtype) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {QUERY: (weights[QUERY] * 10).to(dtype)}, file)
    with pytest.raises(DataError, match=rf"{QUERY} is {dtype}, and config\.json has no quantization_config"):
        load(model)


def test_a_tied_head_of_another_shape(model: Path) -> None:
    file = model / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.ones(500, 64)}, file)
    with pytest.raises(DataError, match=r"\[512, 64\] for lm_head\.weight, the weights hold \[500, 64\]"):
        load(model)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("", "module."),
        ("", "_orig_mod."),
        ("", "base_model.model."),
        ("model.", "model._orig_mod."),
        ("layers.2.", "layers.2._checkpoint_wrapped_module."),
        ("layers.2.", "layers.2._fsdp_wrapped_module."),
    ],
)
def test_names_of_a_wrapped_model(model: Path, here: str, there: str) -> None:
    file = model / "model.safetensors"
    save_file({name.replace(here, there, 1): weight for name, weight in load_file(file).items()}, file)
    with pytest.raises(DataError, match=r"of a wrapper around the model in its name: save the model inside"):
        load(model)


@pytest.mark.parametrize(
    ("file", "beside", "remedy"),
    [
        ("model.fp16.safetensors", (), "name a single file model.safetensors"),
        ("model-00001-of-00002.safetensors", (), "several need their model.safetensors.index.json"),
        ("model.safetensors", ("adapter_config.json",), "remove that file if it is a whole model"),
        ("model.bin", (), "pickled weights are never read"),
        ("model.bin", ("zero_to_fp32.py",), "it is DeepSpeed's checkpoint: python .*zero_to_fp32.py"),
        ("pytorch_model_fsdp_0/__0_0.distcp", (), "accelerate merge-weights .*pytorch_model_fsdp_0 "),
    ],
)
def test_weights_that_others_saved(model: Path, file: str, beside: tuple[str, ...], remedy: str) -> None:
    (model / file).parent.mkdir(exist_ok=True)
    (model / "model.safetensors").rename(model / file)
    for name in beside:
        (model / name).write_text("{}")
    with pytest.raises(DataError, match=remedy):
        load(model)


def test_weights_that_are_a_link_to_nothing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("gone")
    with pytest.raises(DataError, match=r"model\.safetensors is not a file, or a link to none"):
        load(model)


def test_what_transformers_fails_over_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("Padding_idx must be within num_embeddings")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(UnsupportedError, match=r"transformers can't load .*model .AssertionError: Padding_idx must"):
        load(model)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_a_broken_index_is_an_error(model: Path, text: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json"):
        load(model)


def test_a_tensor_that_two_files_hold(model: Path) -> None:
    """transformers takes the last one, whatever the index says."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "first.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "first.safetensors") | {"lm_head.weight": "last"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    head = weights["model.embed_tokens.weight"]
    save_file({"lm_head.weight": head, QUERY: weights[QUERY]}, model / "last", {"format": "pt"})
    load(model)
    save_file({"lm_head.weight": head, QUERY: weights[QUERY] + 1}, model / "last", {"format": "pt"})
    with pytest.raises(DataError, match=rf"first\.safetensors and .*last hold other values of {QUERY}"):
        load(model)


@pytest.mark.parametrize("wrong", ["swapped", "absent"])
def test_an_index_and_files_that_differ(model: Path, wrong: str) -> None:
    """transformers, which loads to the CPU, takes what the files hold, whatever the index says."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    halves = {"a.safetensors": [*weights][:20], "b.safetensors": [*weights][20:]}
    index: dict[str, Any] = {
        "metadata": {},
        "weight_map": {name: file for file, names in halves.items() for name in names},
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, names in halves.items():
        save_file({name: weights[name] for name in names}, model / file, {"format": "pt"})
    load(model)
    if wrong == "swapped":
        (model / "a.safetensors").rename(model / "c")
        (model / "b.safetensors").rename(model / "a.safetensors")
        (model / "c").rename(model / "b.safetensors")
    else:
        index["weight_map"]["model.layers.0.self_attn.rotary.inv_freq"] = "b.safetensors"
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        DataError, match=r"index\.json names .*, which .*\.safetensors lacks: copy, download or save it"
    ):
        load(model)


def test_a_configuration_without_end_is_an_error(model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(PronghornError, match=r"its config\.json can't be used"):
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token": ""}, r"no token '' \(eos_token\)"),
        ({"model_max_length": "long"}, "model_max_length 'long' is not a number"),
    ],
)
def test_configurations_of_tokenizers(model: Path, values: dict[str, Any], message: str) -> None:
    change(model / "tokenizer_config.json", **values)
    with pytest.raises(DataError, match=message):
        load(model)


def test_a_tokenizer_of_a_class_with_types_of_tokens_answers(model: Path) -> None:
    change(model / "tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    loaded, tokenizer = load(model)
    assert "token_type_ids" in tokenizer("Once")
    assert answer(loaded, tokenizer, [{"role": "user", "content": "Once upon"}], 4)
