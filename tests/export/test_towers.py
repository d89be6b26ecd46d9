"""What is saved of a language model out of one with towers loads where the original did, in plain classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, ProcessorMixin

from pronghorn import FastLanguageModel
from pronghorn.errors import ConfigError, DataError, TrainingError, UnsupportedError
from pronghorn.export.merge import save_merged
from pronghorn.export.towers import keep_names
from pronghorn.loading.composite import Composite
from pronghorn.loading.load import load_model
from pronghorn.loading.weights import whole_model
from pronghorn.models.lora import add_lora
from support.composites import (
    COMPOSITES,
    SERVED,
    VOCAB,
    add_tensors,
    class_of,
    logits_of_whole,
    stored_tensors,
    write_composite,
)

TOKENS = torch.arange(1, 30)[None]


def plain(folder: Path) -> Any:
    """The whole model, by transformers alone."""
    config = AutoConfig.from_pretrained(folder)
    return class_of(config).from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return result


def loaded(folder: Path) -> Any:
    """The language model alone, of any family."""
    composite = Composite.of(folder, AutoConfig.from_pretrained(folder))
    assert composite is not None
    model = whole_model(
        folder,
        composite,
        config=composite.text_config(),
        dtype=torch.float32,
        token=None,
        revision=None,
        device_map={"": "cpu"},
    )
    model.composite = composite
    model._checkpoint_conversion_mapping = composite.adapter_names
    keep_names(model)
    return model


def moved(model: Any) -> Any:
    """Train a model, as far as its weights show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    write_composite(tmp_path / "base", "gemma3")
    return tmp_path / "base"


def adapted(folder: Path, **lora: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, dtype="float32")
    return moved(FastLanguageModel.get_peft_model(model, r=4, **lora))


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": r"model\.layers\.\d\.self_attn\.(q|v)_proj"},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["norm", "layers.1.mlp"]},  # a tower has both names
        {"target_modules": ["q_proj", "layers.1.mlp.down_proj"]},
        {"alpha_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 64}},
        {"rank_pattern": {"model.layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 64}},
    ],
)
def test_an_adapter_applies_to_the_whole_model_in_plain_peft(
    lora: dict[str, Any], gemma3: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = adapted(gemma3, **lora)
    before = logits(plain(gemma3))
    model.save_pretrained(tmp_path / "adapter")
    whole = PeftModel.from_pretrained(plain(gemma3), tmp_path / "adapter")
    torch.testing.assert_close(logits(whole), logits(model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(whole), before, atol=1e-3)
    assert not [name for name, _ in whole.named_parameters() if "lora" in name and "vision" in name]


def test_each_of_several_adapters_is_saved_with_its_own_linears(gemma3: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    model = adapted(gemma3, target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter("other")
    right = logits(moved(model))
    model.save_pretrained(tmp_path / "adapters")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapters/other"), max_seq_length=64, dtype="float32")
    assert torch.equal(logits(again), right)


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in COMPOSITES), ("qwen3_5_moe", EXPERTS)])
def test_an_adapter_of_any_family_is_the_whole_models_and_loads_again(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    write_composite(tmp_path / "base", kind)
    targets = ["q_proj", "o_proj", "down_proj"]
    model = moved(get_peft_model(loaded(tmp_path / "base"), LoraConfig(r=4, target_modules=targets, **more)))
    keep_names(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    whole = PeftModel.from_pretrained(plain(tmp_path / "base"), tmp_path / "adapter")
    answers = logits_of_whole(whole, TOKENS)
    torch.testing.assert_close(answers, logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(answers, logits_of_whole(plain(tmp_path / "base"), TOKENS), atol=1e-3)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", SERVED)
def test_an_adapter_holds_nothing_but_the_language_models_matrices(kind: str, tmp_path: Path) -> None:
    write_composite(tmp_path / "base", kind)
    adapted(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    names = stored_tensors(tmp_path / "adapter")
    assert names and all(".lora_" in name for name in names)
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64, dtype="float32")
    again.save_pretrained(tmp_path / "again")
    assert stored_tensors(tmp_path / "again").keys() == names.keys()
    first, second = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("adapter", "again"))
    assert first["target_modules"] == second["target_modules"]
    if kind in ("qwen3_vl", "qwen3_5"):  # their towers have no linears of these names
        assert isinstance(first["target_modules"], list)


def test_an_adapter_of_new_tokens_holds_the_embeddings(gemma3: Path, tmp_path: Path) -> None:
    from pronghorn.loading.new_tokens import grow_embeddings

    model, tokenizer = load_model(gemma3, max_seq_length=64, dtype="float32")
    tokenizer.add_tokens(["<new>"])
    grow_embeddings(model, tokenizer, exactly=VOCAB + 4)
    model = moved(add_lora(model, r=4))
    keep_names(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, _ = load_model(tmp_path / "adapter", max_seq_length=64, dtype="float32")
    assert torch.equal(logits(again), logits(model)) and logits(again).shape[-1] == VOCAB + 4


FULL_NAME = "model.language_model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": r".*language_model.*\.(q|v)_proj"},
        {"target_modules": ["q_proj"], "alpha_pattern": {FULL_NAME: 64}, "rank_pattern": {FULL_NAME: 2}},
        {"target_modules": ["q_proj"], "alpha_pattern": {r"language_model\.layers\.[01].*": 64}},
    ],
)
def test_an_adapter_that_peft_alone_made_of_the_whole_model_loads(
    lora: dict[str, Any], gemma3: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, exclude_modules=r".*vision_tower.*", **lora)
    whole: Any = moved(get_peft_model(plain(gemma3), config))
    whole.save_pretrained(tmp_path / "adapter")
    model, _ = load_model(tmp_path / "adapter", max_seq_length=64, dtype="float32")
    torch.testing.assert_close(logits(model), logits(whole), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(whole), logits(plain(gemma3)), atol=1e-3)


def test_an_adapter_in_pickled_weights_is_refused(gemma3: Path, tmp_path: Path) -> None:
    """Its names would be the causal LM's, which the whole model has not."""
    with pytest.raises(UnsupportedError, match="safetensors alone"):
        adapted(gemma3).save_pretrained(tmp_path / "adapter", safe_serialization=False)


def test_an_adapter_of_a_tower_is_refused_by_name(gemma3: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(plain(gemma3), LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    table = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({**table, "base_model_name_or_path": str(gemma3)})
    )
    with pytest.raises(DataError, match=r"no place for .*vision_tower"):
        load_model(tmp_path / "adapter", max_seq_length=64, dtype="float32")


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": r"model\.layers\.\d\.self_attn\.(q|v)_proj"},
        {"modules_to_save": ["norm", "layers.1.mlp"]},
    ],
)
def test_an_adapter_loads_again(lora: dict[str, Any], gemma3: Path, tmp_path: Path) -> None:
    model = adapted(gemma3, **lora)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64, dtype="float32")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("adapter", "again"))
    assert first == second


def test_a_checkpoint_of_an_adapter_is_read_by_load_adapter(gemma3: Path, tmp_path: Path) -> None:
    model = adapted(gemma3)
    after = logits(model)
    model.save_pretrained(tmp_path / "checkpoint")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    model.load_adapter(str(tmp_path / "checkpoint"), "default", is_trainable=True)
    assert torch.equal(logits(model), after)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", COMPOSITES)
@pytest.mark.parametrize("shards", ["1GB", "30KB"])
def test_a_merged_model_is_the_whole_one_with_its_towers(kind: str, shards: str, tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "merged"
    write_composite(base, kind)
    extra = {"mtp.fc.weight": torch.randn(2, 3)} if kind.startswith("qwen3_5") else {}
    add_tensors(base, extra)
    model = loaded(base)
    if kind in SERVED:
        model = moved(add_lora(model, r=4))
    else:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.1)
    try:
        save_merged(model, None, target, dtype=torch.float32, max_shard_size=shards)
    except UnsupportedError as error:
        logits_of_whole(plain(base), TOKENS)  # skips the test where transformers' own model fails
        raise error
    assert (len(list(target.glob("*.safetensors"))) > 1) == (shards != "1GB")
    original, written = stored_tensors(base), stored_tensors(target)
    assert original.keys() == written.keys()
    names = Composite.of(base, AutoConfig.from_pretrained(base))
    assert names is not None
    towers = [name for name in original if names.inside(name) is None]
    assert towers and set(extra) <= set(towers)
    assert all(torch.equal(original[name], written[name]) for name in towers)
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (base / name).read_bytes()
    before, after = (logits_of_whole(plain(folder), TOKENS) for folder in (base, target))
    torch.testing.assert_close(after, logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after, before, atol=1e-3)


def test_the_template_of_the_training_is_the_processor_s_too(gemma3: Path, tmp_path: Path) -> None:
    """A processor, and so a server, prefers the older places of a template."""
    (gemma3 / "chat_template.json").write_text('{"chat_template": "old"}')
    (gemma3 / "processor_config.json").write_text('{"processor_class": "Gemma3Processor", "chat_template": "old"}')
    model, tokenizer = FastLanguageModel.from_pretrained(str(gemma3), max_seq_length=64, dtype="float32")
    save_merged(model, tokenizer, tmp_path / "without")
    assert ProcessorMixin.get_processor_dict(tmp_path / "without")[0]["chat_template"] == "old"
    tokenizer.chat_template = "new"
    save_merged(model, tokenizer, tmp_path / "merged")
    told = ProcessorMixin.get_processor_dict(tmp_path / "merged")[0]
    assert told["chat_template"] == "new" and told["processor_class"] == "Gemma3Processor"


@pytest.mark.parametrize("first", ["model", "tokenizer"])
def test_a_script_s_own_saving_leaves_one_template(gemma3: Path, tmp_path: Path, first: str) -> None:
    (gemma3 / "chat_template.json").write_text('{"chat_template": "old"}')
    (gemma3 / "processor_config.json").write_text('{"processor_class": "Gemma3Processor", "chat_template": "old"}')
    model, tokenizer = FastLanguageModel.from_pretrained(str(gemma3), max_seq_length=64, full_finetuning=True)
    tokenizer.chat_template, tokenizer.eos_token = "new", "<unk>"
    for part in (model, tokenizer) if first == "model" else (tokenizer, model):
        part.save_pretrained(tmp_path / "full")
    assert ProcessorMixin.get_processor_dict(tmp_path / "full")[0]["chat_template"] == "new"
    again = AutoTokenizer.from_pretrained(tmp_path / "full")
    assert (again.chat_template, again.eos_token) == ("new", "<unk>")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("own", ["old", "other"])
def test_a_processor_s_own_template_stays(gemma3: Path, tmp_path: Path, own: str, place: str) -> None:
    (gemma3 / "chat_template.json").write_text('{"chat_template": "old"}')
    table = json.loads((gemma3 / "tokenizer_config.json").read_text()) | {"chat_template": own}
    (gemma3 / place).write_text(json.dumps(table) if place.endswith("json") else own)
    model, _ = FastLanguageModel.from_pretrained(str(gemma3), max_seq_length=64, full_finetuning=True)
    for _ in range(2):
        model.save_pretrained(tmp_path / "full")
        assert ProcessorMixin.get_processor_dict(tmp_path / "full")[0]["chat_template"] == "old"
        assert AutoTokenizer.from_pretrained(tmp_path / "full").chat_template == own


def test_merging_in_16_bits_says_so_and_keeps_the_towers_bytes(gemma3: Path, tmp_path: Path) -> None:
    save_merged(adapted(gemma3), None, tmp_path / "merged")
    original, written = stored_tensors(gemma3), stored_tensors(tmp_path / "merged")
    tower = "vision_tower.encoder.layers.0.mlp.fc1.weight"
    assert written[tower].dtype == torch.float32 and torch.equal(written[tower], original[tower])
    assert written["language_model.model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_names_of_an_unusual_checkpoint_are_kept(gemma3: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    renamed = {
        f"model.{name}".replace("language_model.model.", "language_model."): tensor
        for name, tensor in stored_tensors(gemma3).items()
    }
    save_file(renamed, gemma3 / "model.safetensors", {"format": "pt"})
    model = adapted(gemma3)
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    assert stored_tensors(tmp_path / "merged").keys() == renamed.keys()
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), logits(model), rtol=1e-4, atol=1e-4)


def test_a_fully_trained_model_is_saved_whole_and_read_back(gemma3: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(gemma3), max_seq_length=64, full_finetuning=True)
    moved(model).save_pretrained(tmp_path / "full")
    original, written = stored_tensors(gemma3), stored_tensors(tmp_path / "full")
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in original if "vision" in name)
    assert torch.equal(logits(plain(tmp_path / "full")), logits(model))
    again, _ = load_model(tmp_path / "full", max_seq_length=64, dtype="float32")
    assert torch.equal(logits(again), logits(model))
    after = logits(model)
    moved(model)
    result = model.load_state_dict(written, strict=False)  # as transformers' trainer resumes
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys
    assert torch.equal(logits(model), after)


def test_new_tokens_and_an_untied_head_change_the_configuration(gemma3: Path, tmp_path: Path) -> None:
    from pronghorn.loading.new_tokens import grow_embeddings

    model, tokenizer = load_model(gemma3, max_seq_length=64, dtype="float32")
    grow_embeddings(model, tokenizer, exactly=VOCAB + 4)
    model = moved(add_lora(model, r=4, modules_to_save=["lm_head"]))
    model.get_base_model().get_output_embeddings()
    keep_names(model)
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), logits(model), rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["text_config"]["vocab_size"] == VOCAB + 4


def test_towers_that_are_gone_are_told(gemma3: Path, tmp_path: Path) -> None:
    model = adapted(gemma3)
    gemma3.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="where the model's towers are, is gone"):
        save_merged(model, None, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_towers_in_few_bits_are_not_merged(gemma3: Path, tmp_path: Path) -> None:
    name = "vision_tower.encoder.layers.0.mlp.fc1.weight"
    add_tensors(gemma3, {name: stored_tensors(gemma3)[name].to(torch.float8_e4m3fn)})
    with pytest.raises(UnsupportedError, match=r"1 tensor beside the language model in few bits \(vision_tower"):
        save_merged(adapted(gemma3), None, tmp_path / "merged")


def test_a_merge_that_forgot_the_adapter_is_caught(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (layer.get_base_layer().weight.float(),) * 2

    monkeypatch.setattr("pronghorn.export.merge.merged_linear", forgets)
    with pytest.raises(TrainingError, match="the merged checkpoint"):
        save_merged(adapted(gemma3), None, tmp_path / "merged")


def test_a_model_is_not_saved_over_the_towers_that_it_needs(gemma3: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(gemma3), max_seq_length=64, full_finetuning=True)
    with pytest.raises(ConfigError, match="holds the towers"):
        model.save_pretrained(gemma3)


def test_options_that_saving_has_no_place_for_are_named(gemma3: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(gemma3), max_seq_length=64, full_finetuning=True)
    with pytest.raises(UnsupportedError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "full", push_to_hub=True)
