"""FastLanguageModel as scripts call it, its refusals, and what it saves."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from pronghorn import FastLanguageModel
from pronghorn.data.batch import Collator
from pronghorn.errors import ConfigError, DataError, TrainingError, UnsupportedError
from pronghorn.loading.load import FoundModel
from pronghorn.models.attach import attached
from pronghorn.models.families import recomputes_layers
from pronghorn.precision.loader import StoredTensor
from support.tiny import packed_row, tiny_model

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def load(folder: Path | str, **options: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), **({"max_seq_length": 128} | options))


def batch(row: int = 128) -> dict[str, Any]:
    ids = [3 + 7 * i % 400 for i in range(90)]
    return Collator(row, 0)([{"input_ids": ids, "labels": ids, "lengths": [1, 40, 49]}])


def train(model: Any, steps: int = 2, rate: float = 1e-2) -> list[float]:
    """A few plain steps; returns the losses."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    found = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def perturb(model: Any, std: float = 0.1) -> Any:
    """Make the adapter matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=std)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    model.eval()
    ids = torch.arange(3, 67)[None]
    return model(input_ids=ids).logits[0].float()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def snapshot(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- the seeds' script ----


@pytest.mark.parametrize("checkpointing", ["unsloth", "auto", True, False])
def test_the_script_of_the_seeds(stories: Path, checkpointing: Any) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(stories),
        max_seq_length=128,
        dtype=None,
        load_in_4bit=False,
        packing=True,
        use_gradient_checkpointing=checkpointing,
    )
    assert recomputes_layers(model) is bool(checkpointing)
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        bias="none",
        use_rslora=False,
        use_gradient_checkpointing=checkpointing,
        random_state=3407,
    )
    assert recomputes_layers(model) is bool(checkpointing)
    assert attached(model) is not None and model.max_seq_length == 128 and tokenizer.eos_token_id == 2
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }
    assert all(p.dtype == torch.float32 for p in model.parameters())
    FastLanguageModel.for_training(model)
    losses = train(model, steps=3)
    assert losses[-1] < losses[0]
    FastLanguageModel.for_inference(model)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    assert model.generate(prompt["input_ids"], max_new_tokens=4, do_sample=False).shape[1] > 4


def test_the_last_explicit_checkpointing_wins(stories: Path) -> None:
    model, _ = load(stories, use_gradient_checkpointing=False)
    assert not recomputes_layers(FastLanguageModel.get_peft_model(model, r=2))
    model, _ = load(stories, use_gradient_checkpointing=False)
    model = FastLanguageModel.get_peft_model(model, r=2, use_gradient_checkpointing="unsloth")
    assert recomputes_layers(model)
    FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    assert not recomputes_layers(model)
    with pytest.raises(ConfigError, match="use_gradient_checkpointing = 'always' is unknown"):
        FastLanguageModel.for_training(model, use_gradient_checkpointing="always")  # type: ignore[arg-type]


def test_training_and_inference_modes(stories: Path) -> None:
    model, _ = load(stories)
    model = FastLanguageModel.get_peft_model(model, r=2)
    assert FastLanguageModel.for_inference(model) is model and not model.training
    assert not any(module.training for module in model.modules())
    assert FastLanguageModel.for_training(model) is model
    assert all(module.training for module in model.modules())
    assert model.config.use_cache  # as it was loaded: it would be saved with the model


def test_without_packing_nothing_is_attached(stories: Path) -> None:
    model, _ = load(stories, packing=False)
    assert attached(model) is None


# ---- refusals ----


@pytest.mark.parametrize("argument", ["load_in_8bit", "fast_inference", "rope_scaling"])
def test_unsupported_loading_arguments_are_named(stories: Path, argument: str) -> None:
    with pytest.raises(NotImplementedError, match=f"from_pretrained does not support {argument} yet"):
        load(stories, **{argument: True})
    load(stories, **{argument: None if argument == "rope_scaling" else False})  # asking for nothing is fine


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("model", "write model_name=... instead of model=..."),
        ("pretrained_model_name_or_path", "write model_name=... instead of pretrained_model_name_or_path=..."),
        ("max_sequence_length", "write model_name=... in the call"),
    ],
)
def test_a_call_that_lacks_the_model_names_what_was_meant(argument: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FastLanguageModel.from_pretrained(**{argument: "folder", "max_seq_length": 64})  # type: ignore[arg-type]
    assert caught.value.problem == f"from_pretrained needs model_name, and does not take {argument}"
    assert caught.value.remedy == remedy


def test_a_call_that_lacks_its_folder_is_refused(stories: Path) -> None:
    model, tokenizer = load(stories)
    with pytest.raises(
        ConfigError, match=r"needs save_directory, .*: write save_directory=... instead of save_dir=..."
    ):
        model.save_pretrained_merged(save_dir="out", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"get_peft_model needs model: write model=\.\.\. in the call"):
        FastLanguageModel.get_peft_model(r=8)  # type: ignore[call-arg]


@pytest.mark.parametrize("argument", ["packing_metadata", "moe_routing", "masked_attention"])
def test_switches_for_measurements_are_refused_with_what_takes_them(stories: Path, argument: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"call pronghorn\.attach\(model, experimental=\{{'{argument}'"):
        load(stories, **{argument: "once"})


@pytest.mark.parametrize("argument", ["loftq_config", "layers_to_transform", "init_lora_weights"])
def test_unsupported_adapter_arguments_are_named(stories: Path, argument: str) -> None:
    model, _ = load(stories)
    with pytest.raises(NotImplementedError, match=f"get_peft_model does not support {argument} yet"):
        FastLanguageModel.get_peft_model(model, **{argument: "anything"})
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_length": True}, "max_seq_length True is not a positive number"),
        ({"max_seq_length": 0}, "max_seq_length 0 is not a positive number"),
        ({"max_seq_length": -5}, "max_seq_length -5 is not a positive number"),
        ({"max_seq_length": 513}, "max_seq_length 513 > 512, .*: use max_seq_length <= 512"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown: use one of float32, bfloat16, float16"),
        ({"dtype": torch.int8}, "dtype torch.int8 is unknown"),
        ({"full_finetuning": True, "load_in_4bit": True}, "4-bit weights can't be trained"),
        ({"full_finetuning": True, "compute": "fp8"}, "compute = 'fp8' with full_finetuning"),
        ({"packing": False, "compute": "fp8"}, "compute = 'fp8' with packing=False"),
        ({"compute": "int4"}, "compute 'int4' is unknown: use one of dtype, fp8, fp8_both, fp8_exact, int8"),
        ({"attention": "eager"}, "attention 'eager' is unknown"),
        ({"use_gradient_checkpointing": "sometimes"}, "use_gradient_checkpointing = 'sometimes' is unknown"),
    ],
)
def test_bad_loading_options(stories: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(stories, **options)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("fp32", torch.float32),
        ("float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.float16, torch.float16),
        ("fp16", torch.float16),
    ],
)
def test_dtypes(stories: Path, dtype: Any, expected: torch.dtype) -> None:
    model, _ = load(stories, dtype=dtype)
    assert model.dtype == expected


def test_adapters_of_a_bfloat16_base_are_float32(stories: Path) -> None:
    model = FastLanguageModel.get_peft_model(load(stories, dtype="bf16")[0], r=2)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert train(model)[0] > 0


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"GGUF file .* does not exist"):
        load(tmp_path / "nowhere.gguf")


def test_a_folder_without_weights(stories: Path, tmp_path: Path) -> None:
    shutil.copytree(stories, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(DataError, match="no weights at all"):
        load(tmp_path / "empty")


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.safetensors"])
def test_files_that_loading_does_not_read_may_be_anything(stories: Path, tmp_path: Path, name: str) -> None:
    """A stub of Mistral's own file, the index of its parts or of parts that a whole file took the place of."""
    folder = tmp_path / "model"
    shutil.copytree(stories, folder)
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (folder / f"{name}.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    assert torch.equal(logits(load(folder)[0]), logits(load(stories)[0]))
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"consolidated\.safetensors|part-1\.safetensors"):
        load(folder)


def test_parts_in_a_folder_of_their_own(stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(stories, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts" / "one.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "parts/one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(load(folder)[0]), logits(load(stories)[0]))


def test_pickled_weights_are_never_read(stories: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "pickled", tmp_path / "executed"
    shutil.copytree(stories, folder, ignore=shutil.ignore_patterns("*.safetensors"))

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    torch.save({"trap": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model\.bin.*pickled weights are never read"):
        load(folder)
    assert not marker.exists()


def test_a_pickled_adapter_is_never_read(stories: Path, tmp_path: Path) -> None:
    model = FastLanguageModel.get_peft_model(load(stories)[0], r=2)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    shutil.copy(stories / "model.safetensors", tmp_path / "adapter")  # which PEFT doesn't look at
    with pytest.raises(DataError, match="pickled weights are never read"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_other_quantisations_are_refused(stories: Path, tmp_path: Path, method: str) -> None:
    shutil.copytree(stories, tmp_path / "model")
    text = (tmp_path / "model" / "config.json").read_text()
    quantisation = f'{{"quantization_config": {{"quant_method": "{method}", "bits": 4}},'
    (tmp_path / "model" / "config.json").write_text(text.replace("{", quantisation, 1))
    with pytest.raises(UnsupportedError, match=f"quantised by '{method}'"):
        load(tmp_path / "model")


def test_a_model_type_without_a_causal_lm_is_refused_before_its_weights_load(stories: Path, tmp_path: Path) -> None:
    shutil.copytree(stories, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UnsupportedError, match="has no causal language model of the model type 'clip'"):
        load(tmp_path / "model")


@pytest.mark.parametrize(("argument", "value"), [("init_lora_weights", False), ("layers_to_transform", 0)])
def test_values_that_look_like_nothing_are_not_passed_over(stories: Path, argument: str, value: Any) -> None:
    """B that isn't zero, and the first layer alone."""
    base, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64)
    with pytest.raises(NotImplementedError, match=f"get_peft_model does not support {argument} yet"):
        FastLanguageModel.get_peft_model(base, **{argument: value})
    FastLanguageModel.get_peft_model(base, init_lora_weights=True, layers_to_transform=None)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_on_the_head_are_refused(stories: Path, target: str) -> None:
    with pytest.raises(UnsupportedError, match=f"adapter on {target} is not supported: name it in modules_to_save"):
        FastLanguageModel.get_peft_model(load(stories)[0], target_modules=["q_proj", target])


@pytest.mark.parametrize("kind", ["AutoModelForSequenceClassification", "AutoModel"])
def test_adapters_on_what_is_no_causal_lm_are_refused(stories: Path, kind: str) -> None:
    model = getattr(transformers, kind).from_pretrained(stories)
    with pytest.raises(UnsupportedError, match="is not a causal language model"):
        FastLanguageModel.get_peft_model(model, r=4)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_bad_adapters(stories: Path) -> None:
    model, _ = load(stories)
    with pytest.raises(ConfigError, match=r"target module 'c_attn' is not in the model: .*q_proj"):
        FastLanguageModel.get_peft_model(model, target_modules=["c_attn"])
    for wrong, message in (
        (
            ["k_proj", "layers.99.self_attn.q_proj"],
            r"target module 'layers\.99\.self_attn\.q_proj' is not in the model",
        ),
        (["proj"], "target module 'proj' is not in the model"),
        ("q_proj", r"'q_proj' matches no module: a string is a regular expression .*give a list, e\.g\. \['q_proj'\]"),
        ("(", r"'\(' is not a regular expression"),
        ([], "names no module"),
        (["q_proj", "self_attn"], "'self_attn' is not a linear: use some of q_proj"),
        (["rotary_emb"], "'rotary_emb' is not a linear"),
        (r".*self_attn.*", r"'model\.layers\.0\.self_attn' is not a linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            FastLanguageModel.get_peft_model(model, target_modules=wrong)
    for hidden in (["q_proj", "model.embed_tokens"], r".*(q_proj|lm_head)"):
        with pytest.raises(UnsupportedError, match="is not supported: name it in modules_to_save"):
            FastLanguageModel.get_peft_model(model, target_modules=hidden)
    with pytest.raises(ConfigError, match=r"modules_to_save 'layers\.9\.norm' is not in the model"):
        FastLanguageModel.get_peft_model(model, modules_to_save=["layers.9.norm"])
    for options, message in (
        ({"target_modules": [1]}, r"target_modules = \[1\] is not a list of names"),
        ({"modules_to_save": [1]}, r"modules_to_save = \[1\] is not a list of names"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern 'q_proj': '8' is not a module's name with a whole number"),
        ({"rank_pattern": {"q_proj": 8.0}}, "rank_pattern 'q_proj': 8.0 is not a module's name with a whole number"),
        ({"rank_pattern": {"q_proj": 0}}, "'q_proj' gives 0, no number above 0"),
        ({"alpha_pattern": {1: 8}}, "alpha_pattern 1: 8 is not a module's name with a number"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern 'q_proj': None is not a module's name with a number"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "'q_proj' gives nan, no number above 0"),
        ({"target_parameters": "mlp.experts.down_proj"}, r"target parameter 'mlp\.experts\.down_proj' is not a weight"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan is not a number above 0"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf is not a number above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            FastLanguageModel.get_peft_model(model, **options)
    assert not any("lora_" in name for name, _ in model.named_parameters())
    with pytest.raises(ConfigError, match="rank r = 0 is below 1"):
        FastLanguageModel.get_peft_model(model, r=0)
    options = {"use_dora": True, "target_parameters": ["experts.down_proj"]}
    with pytest.raises(ConfigError, match="PEFT has no DoRA for experts"):
        FastLanguageModel.get_peft_model(tiny_model("gpt_oss"), **options)
    model = FastLanguageModel.get_peft_model(model, r=2, target_modules="all-linear", alpha_pattern={"q_proj": 0.5})
    assert model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").scaling == {"default": 0.25}
    with pytest.raises(ConfigError, match="already has an adapter"):
        FastLanguageModel.get_peft_model(model)


# ---- seeds ----


def test_random_state_seeds_the_adapters_and_nothing_else(stories: Path) -> None:
    def adapters(seed: int) -> dict[str, Tensor]:
        model = FastLanguageModel.get_peft_model(load(stories)[0], r=4, random_state=seed)
        return {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = adapters(3407)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = adapters(3407), adapters(1)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(first[n], other[n]) == ("lora_B" in n) for n in first)


# ---- saving ----


def test_a_saved_adapter_loads_and_trains_on(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    model = FastLanguageModel.get_peft_model(model, r=4)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, tokenizer_2 = load(tmp_path / "adapter")
    assert attached(again) is not None and again.max_seq_length == 128
    assert tokenizer_2.get_vocab() == tokenizer.get_vocab()
    assert torch.equal(logits(again), logits(model))
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in again.named_parameters() if p.requires_grad} == names
    assert train(again) == train(model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Shira", {"r": 4}),
        ("Frod", {}),
        ("VBLoRA", {"r": 4, "num_vectors": 16, "vector_length": 8, "topk": 2, "save_only_topk_weights": True}),
    ],
)
def test_a_saved_adapter_with_integers_loads(stories: Path, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    made = getattr(peft, f"{kind}Config", None)
    if made is None:
        pytest.skip(f"this PEFT has no {kind}")
    config = made(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(load(stories)[0], config)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(load(tmp_path / "adapter")[0]), logits(model), rtol=1e-4, atol=1e-4)


def test_a_saved_adapter_is_not_fine_tuned_in_full(stories: Path, tmp_path: Path) -> None:
    FastLanguageModel.get_peft_model(load(stories)[0], r=4).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"full_finetuning, but .*adapter is a saved adapter: merge it first"):
        load(tmp_path / "adapter", full_finetuning=True)


def test_a_model_is_looked_at_once(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FastLanguageModel.get_peft_model(load(stories)[0], r=4).save_pretrained(tmp_path / "adapter")
    looked: list[str] = []
    get = PretrainedConfig.get_config_dict.__func__  # type: ignore[attr-defined]

    def noting(cls: Any, name: Any, **options: Any) -> Any:
        looked.append(str(name))
        return get(cls, name, **options)

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", classmethod(noting))
    load(stories)
    once = len(looked)
    load(stories, full_finetuning=True)
    assert len(looked) == 2 * once
    monkeypatch.setattr(FoundModel, "model", None)  # an adapter is refused before anything loads
    with pytest.raises(ConfigError, match="is a saved adapter"):
        load(tmp_path / "adapter", full_finetuning=True)


def test_a_saved_adapter_that_lost_weights_is_refused(stories: Path, tmp_path: Path) -> None:
    """PEFT would begin anew where they were."""
    FastLanguageModel.get_peft_model(load(stories)[0], r=4).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(path)
    save_file({name: tensor for name, tensor in weights.items() if ".layers.1." not in name}, path)
    with pytest.raises(DataError, match=r"adapter lacks 14 weights of its adapter .*layers\.1\..*lora_A"):
        load(tmp_path / "adapter")


def test_a_saved_adapter_that_the_base_has_no_place_for_is_refused(stories: Path, tmp_path: Path) -> None:
    """PEFT would leave out what it doesn't find a layer for."""
    FastLanguageModel.get_peft_model(load(stories)[0], r=4).save_pretrained(tmp_path / "adapter")
    shutil.copytree(stories, tmp_path / "short", copy_function=shutil.copyfile)
    AutoModelForCausalLM.from_pretrained(stories, num_hidden_layers=3).save_pretrained(tmp_path / "short")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "short")}))
    with pytest.raises(DataError, match=r"holds 28 weights that its base model has no place for .*layers\.3"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize("rows", [576, 500])
def test_a_saved_adapter_brings_its_rows_of_embeddings(stories: Path, tmp_path: Path, rows: int) -> None:
    """Other libraries pad embeddings to a multiple of 64, or cut rows that no token has."""
    from peft import LoraConfig, get_peft_model

    plain, tokenizer = load(stories, packing=False)
    plain.resize_token_embeddings(rows)
    model = perturb(get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")))
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter")
    assert again.get_input_embeddings().weight.shape[0] == rows
    assert torch.equal(logits(again), logits(model))


def test_a_saved_adapter_of_virtual_tokens_is_refused(stories: Path, tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(load(stories, packing=False)[0], PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match="is PROMPT_TUNING, tokens before the prompt"):
        load(tmp_path / "adapter")


def test_a_saved_adapter_whose_beginning_nobody_makes_again_is_refused(stories: Path, tmp_path: Path) -> None:
    """PiSSA by a random decomposition leaves another base each time; converted it is plain LoRA."""
    from peft import LoraConfig, get_peft_model

    init = "pissa_niter_1"
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=init)
    plain, tokenizer = load(stories, packing=False)
    model = get_peft_model(plain, config)
    model.peft_config["default"].init_lora_weights = True  # as PEFT's example saves it
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = init
    perturb(model)
    tokenizer.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=f"is {init}, .* path_initial_model_for_weight_conversion"):
        load(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    again, _ = load(tmp_path / "adapter")
    assert relative(logits(again), logits(model)) < 1e-4


def test_an_adapter_goes_on_the_revision_it_was_trained_on(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub's cache with two revisions, whose norms differ."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--own--tiny"
    (cache / "refs").mkdir(parents=True)
    for name, commit, factor in (("main", "a" * 40, 1.0), ("v2", "b" * 40, 2.0)):
        (cache / "refs" / name).write_text(commit)
        folder = shutil.copytree(stories, cache / "snapshots" / commit, copy_function=shutil.copyfile)
        weights = {key: value * factor for key, value in load_file(stories / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model, tokenizer = load("own/tiny", revision="v2")
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    other, _ = load(tmp_path / "adapter", revision="main")  # who asks for another gets it
    assert not torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("name", [None, ""])
def test_a_saved_adapter_that_names_no_model_is_refused(stories: Path, tmp_path: Path, name: str | None) -> None:
    FastLanguageModel.get_peft_model(load(stories)[0], r=4).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": name}))
    with pytest.raises(DataError, match=r"adapter_config\.json does not name the model .*base_model_name_or_path"):
        load(tmp_path / "adapter")


MERGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "both": {"modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", MERGES)
def test_a_merged_checkpoint_has_the_adapted_logits(stories: Path, tmp_path: Path, name: str) -> None:
    """float32 weights saved as bfloat16; stories260k ties its embeddings."""
    model, tokenizer = load(stories)
    plain = logits(model)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4, **MERGES[name]), std=0.02)
    train(model)
    adapted, before = logits(model), snapshot(model)
    model.train()
    folder = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert model.training
    after = snapshot(model)
    assert all(torch.equal(after[key], value) for key, value in before.items()) and after.keys() == before.keys()
    assert attached(model) is not None
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert merged.config.tie_word_embeddings  # trained or not, what was one stays one
    assert relative(merged.lm_head.weight, model.get_output_embeddings().weight) < 0.01
    assert relative(plain, adapted) > 0.05
    assert relative(logits(merged), adapted) < 0.01  # the weights' rounding to bfloat16, computed in float32
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2
    assert not list(folder.glob("adapter*"))
    again, _ = load(folder)
    assert train(again)[0] > 0


def test_a_merged_checkpoint_is_checked_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.export import merge

    gpu, free = torch.device("cuda", 1), merge._ROOM + 1000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free if device == gpu else 0, 2 * free))
    assert merge.place_beside(gpu, 1000) == gpu
    assert merge.place_beside(gpu, 1001) == torch.device("cpu") == merge.place_beside(torch.device("cpu"), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_without_adapter_saves_as_it_is(stories: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model, tokenizer = load(stories, dtype=dtype)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(stories, dtype=dtype)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert ours.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_merging_other_families(tmp_path: Path, stories: Path, family: str) -> None:
    """Biases (qwen2), tied and scaled embeddings (gemma)."""
    tiny_model(family).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "base")
    model = perturb(FastLanguageModel.get_peft_model(load(tmp_path / "base")[0], r=4))
    folder = model.save_pretrained_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert relative(logits(merged), logits(model)) < 0.02


def test_a_merge_that_forgets_the_adapter_is_caught(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft.tuners.lora import Linear

    model, tokenizer = load(stories)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: torch.zeros_like(right(self, adapter)))
    with pytest.raises(TrainingError, match="merge"):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: 2 * right(self, adapter))
    with pytest.raises(TrainingError, match="merge"):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_forgets_new_tokens_is_caught(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    from pronghorn.export import merge

    def forgets(base: Any, dtype: torch.dtype, *more: Any, **how: bool) -> Iterator[StoredTensor]:
        for tensor in right(base, dtype, *more, **how):
            bare = replace(tensor, rows=lambda start, stop: rows[start:stop].to(dtype))
            yield bare if tensor.name == "model.embed_tokens.weight" else tensor

    plain, _ = load(stories, packing=False)
    rows, right = plain.lm_head.weight.detach().clone(), merge.merged_tensors
    new = [len(rows) - 2]
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=new))
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter)
    monkeypatch.setattr(merge, "merged_tensors", forgets)
    with pytest.raises(TrainingError, match="merge"):
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "merged")
    monkeypatch.undo()
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "merged")


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_a_wrong_merge_of_a_small_adapter_is_caught(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """The adapter changes the logits by 1 %, less than rounding to bfloat16 may."""
    from peft.tuners.lora import Linear

    model, tokenizer = load(stories)
    plain = logits(model)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4), std=0.005)
    assert 0.005 < relative(logits(model), plain) < 0.02
    model.save_pretrained_merged(tmp_path / "right", tokenizer)
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: factor * right(self, adapter))
    with pytest.raises(TrainingError, match="of what the adapter changes in the logits"):
        model.save_pretrained_merged(tmp_path / "wrong", tokenizer)
    assert not (tmp_path / "wrong").exists()


def test_an_untrained_adapter_merges(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    model = FastLanguageModel.get_peft_model(model, r=4)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)


def _other_adapter(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    model.set_adapter("other")


@pytest.mark.parametrize(
    "switch", [_other_adapter, lambda model: model.base_model.disable_adapter_layers(), lambda model: None]
)
@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 9]}], ids=["head", "tokens"]
)
def test_what_is_active_is_merged_and_nothing_else(stories: Path, tmp_path: Path, options: Any, switch: Any) -> None:
    """A head of its own and tokens belong to one adapter, as its matrices do."""
    from peft import LoraConfig, get_peft_model

    plain, _ = load(stories, packing=False)
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"], **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    switch(model)
    folder = FastLanguageModel.save_pretrained_merged(model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert relative(logits(merged), logits(model)) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "has a bias of its own, and the linear has none"),
        ({"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}, r"model\.embed_tokens is DoraEmbedding"),
    ],
)
def test_adapters_that_are_more_than_lora_are_not_merged(
    stories: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Folders that other libraries saved."""
    from peft import LoraConfig, get_peft_model

    plain, tokenizer = load(stories, packing=False)
    get_peft_model(plain, LoraConfig(r=4, **options)).save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    model, _ = load(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=message):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert not (tmp_path / "merged").exists()


def test_where_a_merged_checkpoint_goes(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(stories)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    model.save_pretrained_merged(tmp_path / "link", tokenizer)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk/model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="is the current folder"):
        model.save_pretrained_merged(".", tokenizer)
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(ConfigError, match="volume is where a disk is mounted"):
        model.save_pretrained_merged(tmp_path / "volume", tokenizer)


def test_an_adapter_that_merge_and_unload_took_away(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    model = FastLanguageModel.get_peft_model(model, r=4)
    plain = model.merge_and_unload()
    with pytest.raises(
        ConfigError, match=r"has an adapter to merge: after merge_and_unload\(\) save the model that it"
    ):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert not list(tmp_path.iterdir())
    plain.save_pretrained_merged(tmp_path / "merged", tokenizer)


def test_an_adapter_that_is_merged_already(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    model.merge_adapter()
    before = snapshot(model)
    with pytest.raises(ConfigError, match=r"merged into the model's weights already: call model\.unmerge_adapter"):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.unmerge_adapter()
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)


def test_a_full_folder_and_other_methods_are_refused(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        model.save_pretrained_merged(tmp_path, tokenizer)
    with pytest.raises(NotImplementedError, match="save_method 'merged_4bit'"):
        model.save_pretrained_merged(tmp_path / "new", tokenizer, save_method="merged_4bit")
    with pytest.raises(NotImplementedError, match="save_pretrained_merged does not support push_to_hub, token yet"):
        model.save_pretrained_merged(tmp_path / "new", tokenizer, push_to_hub=True, token="secret")
    with pytest.raises(ConfigError, match="save_method 'lora' for a model without an adapter"):
        model.save_pretrained_merged(tmp_path / "new", tokenizer, save_method="lora")
    with pytest.raises(ConfigError, match="note already exists"):
        model.save_pretrained_merged(tmp_path / "note", tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["note"]


def test_the_adapter_alone_is_saved_by_its_method(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    model = perturb(FastLanguageModel.get_peft_model(model, r=2))
    saved = model.save_pretrained_merged(tmp_path / "adapter", tokenizer, save_method="lora")
    assert not (saved / "model.safetensors").exists()
    assert torch.equal(logits(load(saved)[0]), logits(model))


def test_a_full_disk_under_an_adapter_is_told(stories: Path, tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = FastLanguageModel.get_peft_model(load(stories)[0], r=2)
    model.save_pretrained = fails
    with pytest.raises(TrainingError, match=r"the disk of .*adapter is full: free some space"):
        model.save_pretrained_merged(tmp_path / "adapter", save_method="lora")


def test_an_adapter_that_peft_put_around_the_loaded_model_is_not_saved_as_a_base(stories: Path, tmp_path: Path) -> None:
    """The wrapper answers with the loaded model's own method."""
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"trainer\.model\.save_pretrained\(FOLDER\)"):
        wrapped.save_pretrained_merged(tmp_path / "adapter", tokenizer, save_method="lora")
    assert not (tmp_path / "adapter").exists()


def test_full_finetuning_trains_every_weight(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories, full_finetuning=True)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, steps=3)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(load(tmp_path / "whole")[0]), logits(model))


# ---- bitsandbytes ----


@pytest.fixture
def base_folder(tmp_path: Path, stories: Path) -> Path:
    """A tiny Llama whose linears are of sizes that bitsandbytes' CPU backend likes."""
    tiny_model("llama", intermediate_size=128).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def gradients(model: Any) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    model(**packed_row([1, 20, 30], 64)).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@needs_bitsandbytes
def test_4bit_trains_merges_and_reloads(base_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(base_folder, load_in_4bit=True)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**packed_row([1, 20, 30], 64)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter", load_in_4bit=True)
    torch.testing.assert_close(logits(again), adapted, rtol=1e-4, atol=1e-4)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged, _ = load(tmp_path / "merged", dtype="fp32")
    assert not hasattr(merged.config, "quantization_config")
    assert relative(logits(merged), adapted) < 0.02


@needs_bitsandbytes
def test_evaluating_a_4bit_model_does_not_change_its_gradients(base_folder: Path) -> None:
    """bitsandbytes repacks weights at evaluation on some CPUs, for a product that has no backward."""
    model = perturb(FastLanguageModel.get_peft_model(load(base_folder, load_in_4bit=True)[0], r=4))
    before = gradients(model)
    logits(model)
    after = gradients(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@needs_bitsandbytes
def test_a_prequantised_checkpoint_loads_as_it_is(base_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(base_folder, load_in_4bit=True)
    model.save_pretrained(tmp_path / "quantised")
    tokenizer.save_pretrained(tmp_path / "quantised")
    for asked in (False, True):
        again, _ = load(tmp_path / "quantised", load_in_4bit=asked)
        assert type(again.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
        assert torch.equal(logits(again), logits(model))
    again = FastLanguageModel.get_peft_model(again, r=4)
    assert all(value.isfinite().all() for value in gradients(again).values())


@needs_bitsandbytes
def test_4bit_stories_train(stories: Path) -> None:
    """Sizes that are no multiple of 32."""
    half = load(stories, load_in_4bit=True, dtype="bf16")[0].model.layers[0].mlp.up_proj
    assert half.compute_dtype == torch.bfloat16
    model = FastLanguageModel.get_peft_model(load(stories, load_in_4bit=True)[0], r=4)
    losses = train(model, steps=3)
    assert losses[-1] < losses[0]
    assert logits(model).isfinite().all()


def test_rows_are_as_long_as_the_model_s_positions_reach_where_nobody_says(stories: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories))
    assert model.max_seq_length == model.config.max_position_embeddings == 512
    shutil.copytree(stories, tmp_path / "longer")
    config = json.loads((stories / "config.json").read_text())
    (tmp_path / "longer/config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    assert FastLanguageModel.from_pretrained(str(tmp_path / "longer"))[0].max_seq_length == 2048
