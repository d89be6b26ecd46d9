"""The merged folder, written shard by shard, is what transformers' `save_pretrained` writes of a merged model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pronghorn.errors import TrainingError, UnsupportedError
from pronghorn.export import merge
from pronghorn.export.adapter_layouts import write_served_adapter
from pronghorn.export.gguf_lora import write_gguf_lora
from pronghorn.export.merge import merged_tensors, save_merged
from pronghorn.loading.load import find_model
from pronghorn.models.families import base_causal_lm
from support.causal_lms import tiny, with_adapters
from support.tiny import FAMILIES, MOE_FAMILIES, tiny_model

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(family: str, **lora: Any) -> Any:
    """A tiny model of the family, its adapter not zero."""
    if family in MOE_FAMILIES:
        lora = {"target_parameters": EXPERTS, **lora}
    targets = ["qkv_proj", "gate_up_proj"] if family == "phi3" else ["q_proj", "v_proj"]
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(family), LoraConfig(r=4, target_modules=targets, **lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save_as_transformers_does(model: Any, folder: Path, **options: Any) -> None:
    """Save a plain model that holds all merged weights by `save_pretrained`."""
    base = base_causal_lm(model)
    state = {tensor.name: tensor.read().clone() for tensor in merged_tensors(base, torch.bfloat16)}
    config = type(base.config).from_dict(base.config.to_dict())
    head, embedding = state["lm_head.weight"], state["model.embed_tokens.weight"]
    config.tie_word_embeddings = config.tie_word_embeddings and torch.equal(head, embedding)
    plain = type(base)(config).to(torch.bfloat16)
    plain.load_state_dict(state)
    plain.tie_weights()
    plain.generation_config = base.generation_config
    plain.save_pretrained(folder, **options)


def files(folder: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of all shards."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_logits_of_zeros_after_a_padding_token_are_no_wrong_merge(tmp_path: Path) -> None:
    """transformers begins the embedding of `pad_token_id` with zeros, and the first token that is compared is 0."""
    model = adapted("qwen3_moe")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
        assert not model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits.any()
    save_merged(model, None, tmp_path / "merged")


def small_adapter_beside_experts() -> Any:
    """A tiny gpt-oss whose adapter changes each token's logits by about a percent, less than rounding may."""
    model = adapted("gpt_oss", target_parameters=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 0.04 if "lora_B" in name else 1.0
    return model


def test_a_token_that_only_the_adapter_sends_to_other_experts_is_no_wrong_merge(tmp_path: Path) -> None:
    model = small_adapter_beside_experts()

    def elsewhere(module: Any, _: Any, output: Any) -> None:
        if not next(each for each in module.modules() if isinstance(each, Linear)).disable_adapters:
            output.logits[0, 5] *= -1

    handle = base_causal_lm(model).register_forward_hook(elsewhere)
    save_merged(model, None, tmp_path / "merged")
    handle.remove()


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_a_wrong_merge_of_a_small_adapter_beside_experts_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    model, right = small_adapter_beside_experts(), Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: factor * right(self, adapter))
    with pytest.raises(TrainingError, match="of what the adapter changes in the logits"):
        save_merged(model, None, tmp_path / "wrong")


def spread(model: Any) -> Any:
    """Move everything that is trained away from where it begins."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    return model


MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("llama", {"use_dora": True, "use_rslora": True}),
    "biases of B": ("qwen2", {"lora_bias": True}),
    "biases of experts": ("gpt_oss", {"target_parameters": ["experts.gate_up_proj_bias"]}),
}


@pytest.mark.parametrize("kind", MERGED)
def test_what_a_plain_linear_can_hold_is_merged(tmp_path: Path, kind: str) -> None:
    family, lora = MERGED[kind]
    model = spread(adapted(family, **lora)).eval()
    merged = AutoModelForCausalLM.from_pretrained(save_merged(model, None, tmp_path / "it", dtype=torch.float32))
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "targets", "more"),
    [
        ("gemma3_text", ["embed_tokens", "q_proj"], {}),  # scaled
        ("gemma3_text", ["embed_tokens", "lm_head"], {"bias": "all"}),
        ("gpt2", ["c_attn", "c_proj", "c_fc"], {"lora_bias": True}),
        ("gpt2", ["c_attn", "c_proj", "c_fc"], {"use_dora": True}),
        ("gpt2", ["wte", "wpe"], {"use_rslora": True}),
    ],
)
def test_adapters_of_embeddings_and_of_transposed_linears_are_merged(
    tmp_path: Path, model_type: str, targets: list[str], more: dict[str, Any]
) -> None:
    """The head is tied to the embedding that has an adapter, and stays as it is."""
    model = spread(get_peft_model(tiny(model_type), LoraConfig(r=4, target_modules=targets, **more))).eval()
    assert model.config.tie_word_embeddings
    merged = AutoModelForCausalLM.from_pretrained(save_merged(model, None, tmp_path / "it", dtype=torch.float32))
    ids = torch.arange(3, 20)[None]
    with model.disable_adapter():
        assert (merged(ids).logits - model(ids).logits).abs().max() > 0.1
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_dora_of_embeddings_is_refused_by_name(tmp_path: Path) -> None:
    """PEFT leaves out the embedding's own scale there, as no plain model does."""
    lora = LoraConfig(r=4, target_modules=["embed_tokens"], use_dora=True)
    with pytest.raises(UnsupportedError, match="embed_tokens is DoraEmbedding, more than W"):
        save_merged(get_peft_model(tiny_model("gemma3_text"), lora), None, tmp_path / "it")


@pytest.mark.parametrize("name", ["kasa", "bdlora"])
def test_variants_of_lora_that_are_more_than_a_sum_are_refused_by_name(tmp_path: Path, name: str) -> None:
    made = getattr(peft, "KasaConfig" if name == "kasa" else "BdLoraConfig", None)
    if made is None:
        pytest.skip(f"this PEFT has no {name}")
    options = {} if name == "kasa" else {"target_modules_bd_b": ["q_proj"], "nblocks": 2, "match_strict": False}
    model = adapted("llama", **{"kasa_config" if name == "kasa" else "use_bdlora": made(**options)})
    for write, told in (
        (save_merged, r"q_proj is (Kasa|BdLora), more than W"),
        (write_served_adapter, "q_proj has a (Kasa|BdLora) adapter"),
        (lambda model, _, folder: write_gguf_lora(model, folder), "q_proj is (Kasa|BdLora)"),
    ):
        with pytest.raises(UnsupportedError, match=told):
            write(model, None, tmp_path / "it")
        assert not (tmp_path / "it").is_dir()


def test_layers_that_repeat_frozen_weights_are_written_apart(tmp_path: Path) -> None:
    """In the checkpoint's dtype nothing is copied on the way, and PEFT's repeated layers share what isn't adapted."""
    model = adapted("llama", layer_replication=[(0, 2), (1, 3)]).to(torch.bfloat16)
    merged = AutoModelForCausalLM.from_pretrained(save_merged(model, None, tmp_path / "merged"))
    expected = {tensor.name: tensor.read() for tensor in merged_tensors(base_causal_lm(model), torch.bfloat16)}
    repeated = "model.layers.2.mlp.down_proj.weight"
    assert merged.config.num_hidden_layers == 4
    assert torch.equal(merged.get_parameter(repeated), expected[repeated])


@pytest.mark.matrix(8)
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_a_merged_folder_is_what_transformers_writes(tmp_path: Path, family: str) -> None:
    model = adapted(family)
    save_merged(model, None, tmp_path / "merged")
    save_as_transformers_does(model, tmp_path / "expected")
    assert files(tmp_path / "merged") == files(tmp_path / "expected")


@pytest.mark.matrix(6)
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_shards_are_those_that_transformers_writes(tmp_path: Path, family: str) -> None:
    """All but those of fused experts: transformers keeps all parts of a layer's in one shard, larger than it may be."""
    model = adapted(family)
    save_merged(model, None, tmp_path / "merged", max_shard_size="30KB")
    save_as_transformers_does(model, tmp_path / "expected", max_shard_size="30KB")
    merged, expected = files(tmp_path / "merged"), files(tmp_path / "expected")
    if family in FAMILIES or family == "gpt_oss":
        assert merged == expected and len(merged) > 5
        return
    index = json.loads(merged["model.safetensors.index.json"])
    reference = json.loads(expected["model.safetensors.index.json"])
    assert index["metadata"] == reference["metadata"] and index["weight_map"].keys() == reference["weight_map"].keys()
    largest = max(tensor.nbytes for tensor in tensors(tmp_path / "merged").values())
    assert all(len(value) < max(30_000, largest) + 5_000 for value in merged.values())
    weights, right = tensors(tmp_path / "merged"), tensors(tmp_path / "expected")
    assert weights.keys() == right.keys() and all(torch.equal(weights[name], right[name]) for name in right)


@pytest.mark.parametrize("modules", [[], ["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_a_tied_head_is_written_once_and_one_trained_apart_beside_it(tmp_path: Path, modules: list[str]) -> None:
    model = adapted("gemma3_text", modules_to_save=modules)
    assert model.config.tie_word_embeddings
    save_merged(model, None, tmp_path / "merged")
    save_as_transformers_does(model, tmp_path / "expected")
    assert files(tmp_path / "merged") == files(tmp_path / "expected")


@pytest.mark.parametrize("model_type", ["opt", "gpt_bigcode", "bert"])
def test_a_tied_head_of_a_family_that_no_file_knows_has_other_names(tmp_path: Path, model_type: str) -> None:
    """Llama's names of embedding and head are not everybody's, and BERT ties a bias, too."""
    model = with_adapters(tiny(model_type))
    assert model.config.tie_word_embeddings
    base = base_causal_lm(model)
    tied = base.all_tied_weights_keys
    assert tied.keys() != {"lm_head.weight"} or "model.embed_tokens.weight" not in tied.values()
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    assert tensors(tmp_path / "merged").keys() == {tensor.name for tensor in merged_tensors(base, torch.float32)} - set(
        tied
    )
    plain = type(base).from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(3, 20)[None]
    assert torch.allclose(plain(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-4)


@pytest.mark.parametrize("model_type", ["hrm_text", "inkling_text"])
def test_strange_classes_are_merged(tmp_path: Path, model_type: str) -> None:
    """HRM's files join linears of several modules; Inkling's configuration doesn't say whether its head is tied."""
    save_merged(with_adapters(tiny(model_type)), None, tmp_path / "merged", dtype=torch.float32)  # which compares


def test_a_head_that_the_files_hold_beside_the_embeddings_is_merged(tmp_path: Path) -> None:
    """The configuration says that they are tied; transformers leaves them apart, as they lie there."""
    tiny_model("llama", eos_token_id=2).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    base = find_model(tmp_path / "base", max_seq_length=16).model(torch.float32, torch.device("cpu"))
    assert base.config.tie_word_embeddings is False
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    merged = save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    own, right = tensors(merged), tensors(tmp_path / "base")
    assert torch.equal(own["lm_head.weight"], right["lm_head.weight"])
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_model_without_attention_is_merged(tmp_path: Path) -> None:
    """As a Qwen3.5 cut to three layers is, for which transformers' cache fails."""
    model = tiny_model("qwen3_5_text", num_hidden_layers=3, layer_types=["linear_attention"] * 3)
    save_merged(with_adapters(model), None, tmp_path / "merged", dtype=torch.float32)


def test_a_head_with_a_bias_whose_rows_were_trained_is_refused(tmp_path: Path) -> None:
    """PEFT computes it without the bias, and no plain model does."""
    lora = LoraConfig(r=4, target_modules="all-linear", trainable_token_indices={"tok_embeddings": [3, 5]})
    model = get_peft_model(tiny("modernbert-decoder"), lora)
    with pytest.raises(UnsupportedError, match="decoder has a bias, which PEFT leaves out"):
        save_merged(model, None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_names_that_several_modules_share_in_files_are_converted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values become one tensor, which no module has alone."""

    def fused(plain: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = {}
        for name, tensor in state.items():
            parts = [name.replace("q_proj", other) for other in ("q_proj", "k_proj", "v_proj")]
            if "q_proj" in name and state.keys() >= set(parts):
                out[name.replace("q_proj", "qkv")] = torch.cat([state[part] for part in parts])
            elif "k_proj" not in name and "v_proj" not in name:
                out[name] = tensor
        return out

    for module in ("core_model_loading", "modeling_utils"):
        monkeypatch.setattr(f"transformers.{module}.revert_weight_conversion", fused)
    monkeypatch.setattr(merge, "_check", lambda *_: None)  # transformers can't load what this made up
    model = adapted("llama")
    save_merged(model, None, tmp_path / "merged", max_shard_size="30KB")
    save_as_transformers_does(model, tmp_path / "expected", max_shard_size="30KB")
    assert "model.layers.0.self_attn.qkv.weight" in tensors(tmp_path / "merged")
    assert files(tmp_path / "merged") == files(tmp_path / "expected")


def test_a_transformers_that_names_weights_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("transformers.core_model_loading.revert_weight_conversion")
    with pytest.raises(UnsupportedError, match=r"has no core_model_loading\.revert_weight_conversion"):
        save_merged(adapted("llama"), None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


MEASURE = """
import sys, threading, time
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from pronghorn.export import merge

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def sample():
    while not done:
        grown.append(anonymous() - before)
        time.sleep(0.001)

config = LlamaConfig(vocab_size=64_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
model = AutoModelForCausalLM.from_config(config)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
merge.save_merged(get_peft_model(AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)),
    LoraConfig(target_modules="all-linear")), None, sys.argv[1] + "/small")  # all is imported
before, grown, done = anonymous(), [], False
sampler = threading.Thread(target=sample)
sampler.start()
merge.save_merged(model, None, sys.argv[1] + "/merged", max_shard_size="20MB")
done = True
sampler.join()
print(max(grown))
"""


def test_rounding_in_the_products_of_16_bits_is_not_the_merge_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 model's merge in bfloat16 that is too far off is judged by its weights alone, computed in float32."""
    loaded, load = [], AutoModelForCausalLM.from_pretrained

    def spied(*given: Any, dtype: torch.dtype, **options: Any) -> Any:
        loaded.append(dtype)
        return load(*given, dtype=dtype, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spied)
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    save_merged(model, None, tmp_path / "near", dtype=torch.bfloat16)
    assert loaded == [torch.bfloat16]
    errors = iter([0.06, 0.01, 0.06, 0.06])
    monkeypatch.setattr(merge, "relative_error", lambda *_: next(errors))
    save_merged(model, None, tmp_path / "far", dtype=torch.bfloat16)
    assert loaded[1:] == [torch.bfloat16, torch.float32]
    with pytest.raises(TrainingError, match="logits differ"):
        save_merged(model, None, tmp_path / "wrong", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_finer_dtype_than_the_model_s_is_no_wrong_merge(tmp_path: Path, dtype: torch.dtype) -> None:
    """The adapted model's own logits are those of products in bfloat16."""
    model = adapted("llama").to(torch.bfloat16)
    save_merged(model, None, tmp_path / "merged", dtype=dtype)
    stored = {tensor.name: tensor.read() for tensor in merged_tensors(base_causal_lm(model), dtype)}
    assert all(torch.equal(each, stored[name]) for name, each in tensors(tmp_path / "merged").items())


def test_weights_that_a_training_broke_are_no_wrong_merge(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    next(weight for name, weight in model.named_parameters() if ".lora_B" in name).data.fill_(float("nan"))
    with pytest.raises(TrainingError, match="before anything is merged"):
        save_merged(model, None, tmp_path / "merged")


def test_a_class_of_transformers_that_fails_by_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Llama 4's with its tower does in transformers 5.24; nothing is left behind."""

    class Failing(torch.nn.Module):
        def forward(self, **_: Any) -> None:
            raise AttributeError("no image_outputs")

    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: Failing())
    with pytest.raises(UnsupportedError, match=r"transformers' Failing fails by itself \(no image_outputs\): save the"):
        save_merged(model, None, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_merging_holds_one_shard_in_memory(tmp_path: Path) -> None:
    """200 MB in shards of at most 66 MB, an embedding's, loaded again to be checked; a whole copy is thrice that."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # what is held, not what the C library keeps
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    sizes = [file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors")]
    assert sum(sizes) > 2.8 * max(sizes)
    assert 2**20 < int(run.stdout) < 1.5 * max(sizes)
