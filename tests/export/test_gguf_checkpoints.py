"""What checkpoints hold and GGUF files don't: experts in 4 bits, layers that predict further tokens, towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pronghorn import FastLanguageModel
from pronghorn.diagnose.export_run import export_run
from pronghorn.diagnose.verify_reference import perturb
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.export.gguf_mxfp4 import pack_mxfp4
from pronghorn.export.merge import save_merged
from pronghorn.loading.composite import Composite
from pronghorn.loading.gguf import read_header
from pronghorn.precision.loader import checkpoint
from support.composites import COMPOSITES, write_composite
from support.packed_checkpoints import mxfp4_checkpoint
from support.tiny import tiny_model

gguf = pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")
TEXT = "Once upon a time, there was a girl. She was very happy, and one day she went to the park."


def test_mxfp4_is_what_the_package_computes() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(63, 3, 96, generator=generator) * torch.randn(63, 3, 1, generator=generator).exp()
    weight[5] = 0.0
    weight[7, 0, :9] = torch.tensor([0.25, 0.75, 1.25, -1.75, 2.5, 3.5, -5.0, 6.0, -0.25])  # halfway between two
    packed = pack_mxfp4(weight)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert packed.dtype is torch.uint8 and torch.equal(packed, torch.tensor(expected))


def test_experts_in_mxfp4_come_out_as_they_were(tmp_path: Path) -> None:
    tensors = mxfp4_checkpoint(tmp_path / "base", vocab_size=512)
    add_a_merge(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=64, dtype="bfloat16")
    merged = model_folder(model, tokenizer, tmp_path / "merged")
    file = write_gguf(merged, tmp_path / "model.gguf", "mxfp4")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    gate = stored["blk.0.ffn_gate_exps.weight"]
    assert gate.tensor_type.name == "MXFP4" and stored["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"
    path = "model.layers.0.mlp.experts"
    blocks, scales = (tensors[f"{path}.gate_up_proj_{part}"] for part in ("blocks", "scales"))
    exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, H, 2 I]
    for name, expected in (("gate", exact[..., ::2]), ("up", exact[..., 1::2])):
        found = stored[f"blk.0.ffn_{name}_exps.weight"]
        again = torch.tensor(gguf.dequantize(found.data, found.tensor_type))
        assert torch.equal(again, expected.mT)
    with pytest.raises(ConfigError, match="mxfp4 is of experts, and llama has none"):
        write_gguf(model_folder(tiny_model("llama", vocab_size=512), tokenizer, tmp_path / "llama"), file, "mxfp4")


def add_a_merge(folder: Path) -> None:
    """Give a byte-level tokenizer, which isn't written without merges, one."""
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["vocab"]["ab"] = len(told["model"]["vocab"])
    told["model"]["merges"] = [["a", "b"]]
    file.write_text(json.dumps(told))


def model_folder(model: Any, tokenizer: Any, folder: Path) -> Path:
    save_merged(model, tokenizer, folder)
    return folder


@needs_llama_cpp
@pytest.mark.slow
def test_an_adapter_merged_into_experts_in_4_bits(stories: Path, tmp_path: Path) -> None:
    """The base itself is not a plain checkpoint, which is told. Of its experts mxfp4 is what q8_0 is."""
    mxfp4_checkpoint(tmp_path / "base", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, vocab_size=512)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(UnsupportedError, match=r"base holds weights in few bits.*merge it first"):
        write_gguf(tmp_path / "base", tmp_path / "base.gguf")
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=64, dtype="float32")
    model = FastLanguageModel.get_peft_model(model, r=4)
    perturb(model)
    ids = tokenizer(TEXT)["input_ids"]
    trained = TransformersEngine(model.eval(), tokenizer).distribution(ids)
    merged = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    own, rounded = (
        TransformersEngine(AutoModelForCausalLM.from_pretrained(merged, dtype=dtype), tokenizer).distribution(ids)
        for dtype in (torch.float32, torch.float16)
    )
    scored, eight, four = (
        served(write_gguf(merged, tmp_path / f"{name}.gguf", name), ids) for name in ("f32", "q8_0", "mxfp4")
    )
    with model.disable_adapter():
        base = TransformersEngine(model, tokenizer).distribution(ids)
    found, in_16_bits, merging, unmerged = (
        max(abs(told[at - 1, ids[at]].item() - of(at)) for at in scored)
        for told, of in (
            (own, lambda at: scored[at]),
            (own, lambda at: rounded[at - 1, ids[at]].item()),
            (trained, lambda at: scored[at]),
            (base, lambda at: scored[at]),
        )
    )
    assert found <= 2 * in_16_bits and merging < unmerged / 4, (found, in_16_bits, merging, unmerged)
    to_eight, to_four = (max(abs(scored[at] - told[at]) for at in scored) for told in (eight, four))
    assert max(abs(eight[at] - four[at]) for at in scored) < to_eight / 20 < to_four, (to_eight, to_four)


@needs_llama_cpp
@pytest.mark.slow
def test_an_adapter_of_experts_in_4_bits_is_compared_on_them(stories: Path, tmp_path: Path) -> None:
    """The base that `gguf-lora` is compared on is what its 4 bits stand for."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    mxfp4_checkpoint(tmp_path / "base", rope_parameters=rope, vocab_size=512)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.save_pretrained(tmp_path / "base")
    base, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=64, dtype="float32")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj"], target_parameters=experts)
    perturb(model)
    model.eval().save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    exported = export_run(tmp_path / "run", "gguf-lora", tmp_path / "out", "q8_0")
    assert [comparison.engine.split()[0] for comparison in exported.comparisons] == ["llama.cpp"]
    ids = tokenizer(TEXT)["input_ids"]
    trained = TransformersEngine(model, tokenizer).distribution(ids)
    with model.disable_adapter():
        alone = TransformersEngine(model, tokenizer).distribution(ids)
        plain = model_folder(model, tokenizer, tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "plain.gguf", "f32")
    scored = served(file, ids, exported.folder / "adapter.gguf")
    found, without = (max(abs(told[at - 1, ids[at]].item() - scored[at]) for at in scored) for told in (trained, alone))
    assert found < 1e-4 < without / 100, (found, without)


def served(file: Path, ids: list[int], lora: Path | None = None) -> dict[int, float]:
    with serve_gguf(file, lora=lora) as engine:
        return {at: told.logprob for at, told in engine.logprobs(ids).items()}


def test_layers_that_predict_further_tokens_are_left_out(stories: Path, tmp_path: Path) -> None:
    """As in GLM-4.5's published checkpoints, which transformers loads without them."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = tiny_model("glm4_moe", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    plain = write_gguf(tmp_path / "model", tmp_path / "plain.gguf", "f32").read_bytes()
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    last, after = "model.layers.2.", "model.layers.3."
    beyond = {name.replace(last, after): own.clone() for name, own in tensors.items() if name.startswith(last)}
    beyond[f"{after}eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | beyond, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    assert len(beyond) > 30 and write_gguf(tmp_path / "model", tmp_path / "more.gguf", "f32").read_bytes() == plain


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_of_a_model_with_towers_the_language_model_is_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
    growing = {"model_type": "ministral3", "rope_parameters": rope | {"llama_4_scaling_beta": 0.4}}
    windows = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
    text = COMPOSITES[kind]["text_config"] | (windows if kind == "gemma3" else growing)
    monkeypatch.setitem(COMPOSITES[kind], "text_config", text)
    whole, alone = tmp_path / "whole" / "model", tmp_path / "alone" / "model"
    write_composite(whole, kind)
    add_a_merge(whole)
    composite = Composite.of(whole, AutoConfig.from_pretrained(whole))
    assert composite is not None
    model = AutoModelForCausalLM.from_config(composite.text_config())
    weights = {stored.name: stored.read() for stored in composite.language(checkpoint(whole))}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.save_pretrained(alone)
    AutoTokenizer.from_pretrained(whole).save_pretrained(alone)
    files = [write_gguf(folder, tmp_path / f"{number}.gguf", "f32") for number, folder in enumerate((whole, alone))]
    told = [read_header(file) for file in files]
    assert told[0].metadata == told[1].metadata and told[0].tensors == told[1].tensors and len(told[0].tensors) > 20
    weights_of = [{stored.name: stored.read() for stored in checkpoint(file)} for file in files]
    assert all(torch.equal(weight, weights_of[1][name]) for name, weight in weights_of[0].items())
