"""Adapters as GGUF files: llama.cpp computes the base and the adapter as PEFT does."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pronghorn.diagnose import export_run as exporting
from pronghorn.diagnose.export_run import export_run
from pronghorn.diagnose.verify_reference import perturb
from pronghorn.errors import UnsupportedError
from pronghorn.export import gguf_lora
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.export.gguf_lora import write_gguf_lora
from pronghorn.loading.gguf import tokenizer_of
from pronghorn.models.lora import add_lora
from support.adapters import adapter_that_shows
from support.tiny import tiny_model

gguf = pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")
TEXT = "Once upon a time, there was a girl."
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "granite": {},
    "granitemoehybrid": {},
    "phi3": {"sliding_window": None},
    "qwen3_5_text": {"linear_key_head_dim": 16},
    "qwen3_next": {"linear_key_head_dim": 16},
    "gemma4_unified_text": {},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ministral": {"layer_types": ["full_attention"] * 3},
    "ministral3": {},
    "olmo3": {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "glm4_moe": {},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "mixtral": {"sliding_window": None},
    "olmoe": {"num_key_value_heads": 4},
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(family: str, vocabulary: int, **options: Any) -> Any:
    model = tiny_model(family, vocab_size=vocabulary, **FAMILIES.get(family, {})).float().eval()
    model = add_lora(model, **{"r": 4, "lora_alpha": 12, **options})
    perturb(model)
    return model


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 3}}) for family in FAMILIES),
        *((family, EXPERTS) for family in ("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "glm4_moe")),
        ("glm4_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "experts" if value is EXPERTS else "",
)
def test_llama_cpp_applies_the_adapter(stories: Path, tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Ranks and scales of their own for some linears, or experts, and float16's own error as the measure."""
    found, own, base_alone = farthest(stories, tmp_path, family, options)
    assert found <= 2 * own < base_alone, (found, own, base_alone)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_adapters_of_other_experts_show(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The check above can fail: each expert has its neighbour's adapter."""
    right = gguf_lora.low_rank_factors
    monkeypatch.setattr(gguf_lora, "low_rank_factors", lambda *given: tuple(each.roll(1, 0) for each in right(*given)))
    found, own, _ = farthest(stories, tmp_path, family, EXPERTS)
    assert found > 4 * own, (found, own)


def farthest(stories: Path, tmp_path: Path, family: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return how far log-probabilities are from PEFT's at most: llama.cpp's, PEFT's in float16, and the base's."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    model = adapted(family, len(tokenizer), use_rslora=True, **options)
    with torch.no_grad():  # so that an adapter that is left out shows
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    base = model.get_base_model()
    folder = tmp_path / "base"
    plain = tiny_model(family, vocab_size=len(tokenizer), **FAMILIES[family]).float()
    state = {name.replace(".base_layer", ""): p for name, p in base.state_dict().items() if "lora_" not in name}
    plain.load_state_dict(state)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = list(tokenizer(TEXT)["input_ids"])
    exact = TransformersEngine(model, tokenizer).distribution(ids)
    without = TransformersEngine(plain, tokenizer).distribution(ids)
    lora = write_gguf_lora(model, tmp_path / "adapter.gguf")
    with serve_gguf(write_gguf(folder, tmp_path / "base.gguf", "f32"), lora=lora) as engine:
        scored = engine.logprobs(ids)
    rounded = TransformersEngine(model.half(), tokenizer).distribution(ids)
    found, own, base_alone = (
        max(abs(exact[at - 1, ids[at]].item() - told(at)) for at in scored)
        for told in (
            lambda at: scored[at].logprob,
            lambda at: rounded[at - 1, ids[at]].item(),
            lambda at: without[at - 1, ids[at]].item(),
        )
    )
    return found, own, base_alone


def test_a_file_says_what_it_is(stories: Path, tmp_path: Path) -> None:
    model = adapted("llama", 512, target_modules=["q_proj", "down_proj"])
    reader = gguf.GGUFReader(str(write_gguf_lora(model, tmp_path / "adapter.gguf")))
    told = {key: reader.fields[key].contents() for key in ("general.architecture", "general.type", "adapter.type")}
    assert told == {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    assert reader.fields["adapter.lora.alpha"].contents() == 12.0
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * 2 * 3
    assert [*tensors["blk.0.ffn_down.weight.lora_a"].shape] == [88, 4]  # the fastest dimension first
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    b = layer.lora_B["default"].weight.detach()
    turned = b.view(4, 2, 8, 4).transpose(1, 2).reshape(b.shape)  # 4 heads of 16 rows: halves become neighbours
    assert torch.equal(torch.tensor(tensors["blk.0.attn_q.weight.lora_b"].data), turned)


def test_a_file_is_not_taken_for_a_model(tmp_path: Path) -> None:
    path = write_gguf_lora(adapted("llama", 512, target_modules=["q_proj"]), tmp_path / "adapter.gguf")
    with pytest.raises(UnsupportedError, match=r"adapter\.gguf is a LoRA adapter, not a model: .*--lora FILE"):
        tokenizer_of(path)


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("llama", {"use_dora": True}, "doesn't read DoRA"),
        ("llama", {"init_lora_weights": "olora"}, r"beginning out of the base \(init_lora_weights: olora\)"),
        ("llama", {"bias": "all"}, r"doesn't read trained biases \(bias: all\)"),
        ("llama", {"modules_to_save": ["embed_tokens"]}, "modules that were trained whole"),
    ],
)
def test_what_llama_cpp_does_not_apply_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        write_gguf_lora(adapted(family, 512, **options), tmp_path / "adapter.gguf")


def test_the_active_adapter_of_several_is_written(tmp_path: Path) -> None:
    from peft import LoraConfig

    model: Any = adapted("llama", 512, target_modules=["q_proj", "v_proj"])
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj", "k_proj"]))
    perturb(model)
    model.set_adapter("other")
    written = {t.name: t.data for t in gguf.GGUFReader(write_gguf_lora(model, tmp_path / "other.gguf")).tensors}
    assert len(written) == 12 and not any("attn_v" in name for name in written)
    own = model.base_model.model.model.layers[0].self_attn.k_proj.lora_A["other"].weight
    assert torch.equal(torch.tensor(written["blk.0.attn_k.weight.lora_a"]), own)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedError, match="active are: default, other: choose one"):
        write_gguf_lora(model, tmp_path / "both.gguf")


def test_an_adapter_of_embeddings_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    with pytest.raises(UnsupportedError, match=r"adapter of model.embed_tokens can't be written"):
        write_gguf_lora(model, tmp_path / "adapter.gguf")


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path, tied: bool) -> None:
    """The base's file has the embeddings alone then, and llama.cpp refuses the whole adapter."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama", tie_word_embeddings=tied)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    refused = pytest.raises(UnsupportedError, match=r"adapter of lm_head has no place in llama\.cpp: the head is tied")
    with refused if tied else contextlib.nullcontext():
        written = gguf.GGUFReader(write_gguf_lora(model, tmp_path / "adapter.gguf")).tensors
        assert "output.weight.lora_a" in {tensor.name for tensor in written}


def test_the_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match="GGUF files need the package gguf"):
        write_gguf_lora(adapted("llama", 512), tmp_path / "adapter.gguf")


def test_an_export_without_llama_cpp_says_that_nothing_compared_it(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronghorn import FastLanguageModel

    monkeypatch.setattr(exporting, "has_llama_cpp", lambda: False)
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, dtype="float32")
    FastLanguageModel.get_peft_model(model, r=2).save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    exported = export_run(tmp_path / "run", "gguf-lora", None, "q8_0")
    assert exported.next == f"llama-server -m BASE.gguf --lora {exported.folder / 'adapter.gguf'}"
    assert "Not compared" in (exported.folder / "README.md").read_text()


@needs_llama_cpp
@pytest.mark.slow
def test_an_export_is_compared_with_its_base_in_llama_cpp(smollm2: Path, tmp_path: Path) -> None:
    adapter_that_shows(smollm2, tmp_path / "run")
    exported = export_run(tmp_path / "run", "gguf-lora", tmp_path / "out", "f16")
    [comparison] = exported.comparisons
    assert comparison.ok and comparison.engine.startswith("llama.cpp (xllamacpp 20")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "adapter.gguf"}
    assert not list(tmp_path.glob(".base-*")), "the base's file was left"
