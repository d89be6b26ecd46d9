"""GGUF files: what is written is what is read back, and what isn't the trained model is not published."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from pronghorn import FastLanguageModel
from pronghorn.cli.main import app
from pronghorn.diagnose import export_run as exporting
from pronghorn.diagnose.export_run import FORMATS, export_run, modelfile
from pronghorn.diagnose.served import render
from pronghorn.errors import ConfigError, DataError, TrainingError, UnsupportedError
from pronghorn.export import gguf
from pronghorn.export.gguf import write_gguf
from pronghorn.export.gguf_lora import write_gguf_lora
from pronghorn.export.gguf_rope import rope_factors
from pronghorn.families.gguf_spec import Part
from pronghorn.families.registry import FAMILIES
from pronghorn.loading.gguf import ARCHITECTURES, load_gguf, read_header, reads
from support.adapters import adapter_that_shows
from support.byte_level import byte_level
from support.fused import with_adapters
from support.tiny import tiny_model

pytest.importorskip("gguf")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
IGNORED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3 |= {"original_max_position_embeddings": 8192}
FACTOR = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OLMO3 = {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 12}
GEMMA3_YARN = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
}
LINEAR_IN_WINDOWS = {"full_attention": YARN, "sliding_attention": YARN | {"rope_type": "linear"}}
TEXT = "It's 1,234 km from here.\n\n你好 naïve 🙂"


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(input_ids=torch.tensor([ids])).logits[0]


def check_what_is_read_back(tokenizer: Any, family: str, changes: dict[str, Any], folder: Path) -> None:
    """Assert that files of three kinds have the model's logits and the tokenizer's tokens, marks and template."""
    model = tiny_model(family, vocab_size=len(tokenizer), **changes)
    merged = save(model, tokenizer, folder / "merged")
    tokenizer = AutoTokenizer.from_pretrained(merged)  # a family has its own way of splitting text
    ids, told = tokenizer(TEXT)["input_ids"], {"config": model.config, "tokenizer": tokenizer}
    for quantisation, allowed in (("f32", 1e-5), ("f16", 2e-3), ("q8_0", 3e-2)):
        file = write_gguf(merged, folder / f"{quantisation}.gguf", quantisation)
        again, own = load_gguf(file, torch.float32, **({} if reads(file) else told))
        assert own(TEXT)["input_ids"] == ids and own.chat_template == tokenizer.chat_template
        assert own.eos_token_id == tokenizer.eos_token_id
        exact = logits(model, ids)
        assert (logits(again, ids) - exact).norm() <= allowed * exact.norm(), quantisation


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tokenizer = byte_level("llama-bpe")  # a small one is written and read in no time
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    check_what_is_read_back(tokenizer, "llama", {"attention_bias": True, "mlp_bias": True}, tmp_path)


def test_a_partial_rotary_factor_that_the_family_does_not_read_is_not_written(tmp_path: Path) -> None:
    tokenizer = byte_level("llama-bpe")
    model = tiny_model("llama", vocab_size=len(tokenizer), rope_parameters=IGNORED)
    file = write_gguf(save(model, tokenizer, tmp_path / "merged"), tmp_path / "model.gguf", "f32")
    assert read_header(file).of_model("rope.dimension_count") == model.config.head_dim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("granite", {}),
        ("olmo2", {}),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
        ("phi3", {"sliding_window": None}),
        ("gemma3_text", {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}),
        ("seed_oss", {}),
        ("ministral", {"layer_types": ["full_attention"] * 3}),
        ("ministral3", {}),
        ("olmo3", OLMO3),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_families_and_their_vocabularies_are_read_back(
    smollm2: Path, stories: Path, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2 if family in ARCHITECTURES else stories)  # the smaller is faster
    check_what_is_read_back(tokenizer, family, changes, tmp_path)


def test_rows_are_written_some_at_a_time(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for at_once in (2**25, 1000, 1):
        monkeypatch.setattr(gguf, "_AT_ONCE", at_once)
        files.append(write_gguf(stories, tmp_path / f"{at_once}.gguf", "q8_0").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.slow
def test_rows_in_transformers_order_are_another_model(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: llama.cpp's order of rows forgotten."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    folder = save(model, tokenizer, tmp_path / "merged")
    right = gguf._tensors
    monkeypatch.setattr(gguf, "_tensors", lambda *given: ((name, stored, Part()) for name, stored, _ in right(*given)))
    again, _ = load_gguf(write_gguf(folder, tmp_path / "wrong.gguf", "f32"), torch.float32)
    ids = tokenizer(TEXT)["input_ids"]
    exact = logits(model, ids)
    assert (logits(again, ids) - exact).norm() > 1e-2 * exact.norm()


def test_sentence_piece_vocabularies_are_written(stories: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    file = write_gguf(stories, tmp_path / "stories.gguf", "f16")
    _, own = load_gguf(file, torch.float32)
    for text in ("Once upon a time, Lily", "  two  spaces", "naïve 🙂"):
        assert own(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_the_file_names_every_stop_token(smollm2: Path, tmp_path: Path) -> None:
    """As Llama 3 has it: the end of a text, of a turn (in the template), and of a message."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.eos_token = "<|endoftext|>"
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<file_sep>")]
    folder = save(model, tokenizer, tmp_path / "merged")
    stops = gguf.stop_tokens(folder, tokenizer)
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|endoftext|>", "<file_sep>", "<|im_end|>"]
    file = write_gguf(folder, tmp_path / "model.gguf", "f16")
    metadata = read_header(file).metadata
    assert [metadata[f"tokenizer.ggml.{end}_token_id"] for end in ("eos", "eot", "eom")] == stops
    assert load_gguf(file, torch.float32)[0].generation_config.eos_token_id == stops
    assert modelfile("model.gguf", ["<|endoftext|>", "<|im_end|>"]).count("PARAMETER stop") == 2
    model.generation_config.eos_token_id = [*stops[:2], 9]
    with pytest.raises(UnsupportedError, match="4 stop tokens, and a GGUF file names three"):
        write_gguf(save(model, tokenizer, tmp_path / "four"), tmp_path / "four.gguf", "f16")


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "weights of experts that don't sum to one is not written as GGUF"),
        ("smollm3", {}, "smollm3 with RoPE in other layers than three of four is not written as GGUF"),
        (
            "gemma3_text",
            {"layer_types": ["full_attention"] * 3},
            "gemma3_text with windows in other layers than five of six is not written as GGUF",
        ),
        ("llama", {"rope_parameters": FACTOR["full_attention"]}, "RoPE scaling 'proportional' is not written as GGUF"),
        ("mistral", {}, "a window of 7 tokens is not written as GGUF"),
        (
            "gemma4_text",
            {},
            "shared keys and values of other layers than a last one with a window and then one without",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 99}, "99 tokens with inputs of each"),
        (
            "gemma4_unified_text",
            {"attention_bias": True},
            "gemma4_unified_text with biases in attention is not written",
        ),
        ("gemma4_unified_text", {"hidden_activation": "gelu"}, "with the activation gelu is not written"),
        ("gemma4_unified_text", {"rope_parameters": FACTOR}, "another RoPE than Gemma 4's is not written"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "dense MLPs in some layers is not written as GGUF"),
        ("qwen3_next", {"norm_topk_prob": False}, "weights of experts that don't sum to one is not written"),
        ("qwen3_next", {}, "keys of 32 and values of 16 in a delta net's head is not written as GGUF"),
        ("qwen3_5_text", {}, "keys of 32 and values of 16 in a delta net's head is not written as GGUF"),
        (
            "qwen3_5_text",
            {"linear_key_head_dim": 16, "layer_types": [*["linear_attention"] * 2, "full_attention"][::-1]},
            "full attention in other layers than every so many",
        ),
        ("qwen3_5_text", {"linear_key_head_dim": 16, "attention_bias": True}, "with biases in attention"),
        ("qwen3_5_text", {"linear_key_head_dim": 16, "rope_parameters": YARN}, "with RoPE scaling 'yarn'"),
        ("ministral", {}, "a window of 6 tokens is not written as GGUF"),
        ("olmo2", {"head_dim": 24}, "olmo2 with heads of 24 and not hidden_size / num_attention_heads"),
        ("olmo2", {"tie_word_embeddings": True}, "olmo2 with a head that is the embeddings"),
        ("olmo3", {}, "olmo3 with windows in other layers than three of four"),
        ("olmo3", OLMO3 | {"rope_parameters": LINEAR_IN_WINDOWS}, "another RoPE in windows than the unscaled one"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "gpt_oss with windows in other layers than every second"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"gpt_oss with a gate of α = 1\.702, clamped at 5\.0"),
        ("gpt_oss", {"attention_bias": False}, "gpt_oss with attention without biases"),
        ("gpt_oss", {"tie_word_embeddings": True}, "gpt_oss with a head that is the embeddings"),
        (
            "qwen3",
            {"rope_parameters": YARN | {"rope_type": "dynamic"}},
            "RoPE scaling 'dynamic' is not written as GGUF",
        ),
        ("gemma3_text", GEMMA3_YARN, "gemma3_text with YaRN beside windows"),
        # what files don't say, and llama.cpp would compute otherwise without a word
        ("llama", {"hidden_act": "gelu"}, "llama with the activation gelu"),
        ("gemma3_text", GEMMA3_YARN | {"hidden_activation": "silu"}, "gemma3_text with the activation silu"),
        # of which it doesn't load the file
        ("qwen3", {"attention_bias": True}, "qwen3 with biases in attention"),
        ("smollm3", {"mlp_bias": True}, "smollm3 with biases in MLPs"),
        ("seed_oss", {"attention_out_bias": True}, "seed_oss with biases in attention's output"),
        ("qwen2", {"head_dim": 24}, "qwen2 with heads of 24 and not hidden_size / num_attention_heads"),
        ("qwen3", {"rope_parameters": LLAMA3}, "qwen3 with RoPE scaling 'llama3'"),
    ],
)
def test_families_that_are_not_written_are_refused(
    stories: Path, tmp_path: Path, family: str, changes: dict[str, Any], problem: str
) -> None:
    folder = save(tiny_model(family, **changes), AutoTokenizer.from_pretrained(stories), tmp_path / "merged")
    with pytest.raises(UnsupportedError, match=problem):
        write_gguf(folder, tmp_path / "model.gguf")


def test_a_family_of_one_s_own_is_not_written(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose file says nothing of GGUF; neither is its adapter."""
    monkeypatch.setitem(FAMILIES, "qwen2", replace(FAMILIES["qwen2"], gguf=None))
    model = tiny_model("qwen2")
    folder = save(model, AutoTokenizer.from_pretrained(stories), tmp_path / "merged")
    with pytest.raises(UnsupportedError, match="qwen2 is not written as GGUF here"):
        write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match="qwen2 is not written as GGUF here"):
        write_gguf_lora(with_adapters(model), tmp_path / "adapter.gguf")


STUB = """#!/bin/sh
echo "$0 $*" > "{told}"
cp "$1" "$2"
"""


def test_k_quants_are_made_by_llama_cpp(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is told how to get, is given an f16 file that goes again, and its failure is told."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(gguf, "_CARRIER", "no_such_package")
    with pytest.raises(UnsupportedError, match=r"q4_k_m is made by llama\.cpp's llama-quantize.*install llama\.cpp"):
        write_gguf(stories, tmp_path / "model.gguf", "q4_k_m")
    with pytest.raises(ConfigError, match=r"quantisation 'q4_k_x' is unknown: use one of .*q4_k_m"):
        write_gguf(stories, tmp_path / "model.gguf", "q4_k_x")
    package = tmp_path / "site" / "no_such_package"
    (package / "bin").mkdir(parents=True)
    (package / "bin" / "llama-quantize").write_text("#!/bin/sh\n")
    (package / "bin" / "llama-quantize").chmod(0o755)
    monkeypatch.syspath_prepend(package.parent)
    assert gguf.quantiser() == str(package / "bin" / "llama-quantize")
    told, quantiser = tmp_path / "told", tmp_path / "bin" / "llama-quantize"
    quantiser.parent.mkdir()
    quantiser.write_text(STUB.format(told=told))
    quantiser.chmod(0o755)
    monkeypatch.setenv("PATH", f"{quantiser.parent}:/usr/bin:/bin")
    assert gguf.quantiser() == str(quantiser), "one that was installed goes first"
    file = write_gguf(stories, tmp_path / "model-q4_k_m.gguf", "q4_k_m")
    assert told.read_text().split()[1:] == [str(tmp_path / "model-q4_k_m.f16.gguf"), str(file), "Q4_K_M"]
    assert load_gguf(file, torch.float32)[0].config.hidden_size == 64
    assert not list(tmp_path.glob("*.f16.gguf"))
    file.unlink()
    quantiser.write_text("#!/bin/sh\necho unknown type Q4_K_M >&2\nexit 1\n")
    with pytest.raises(TrainingError, match="llama-quantize made no q4_k_m of the model: unknown type Q4_K_M"):
        write_gguf(stories, file, "q4_k_m")
    assert not list(tmp_path.glob("*.gguf"))


def test_numbers_beyond_float16_are_not_written_as_infinity(tmp_path: Path) -> None:
    tokenizer = byte_level("llama-bpe")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 70_000
    folder = save(model, tokenizer, tmp_path / "merged")
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_down\.weight holds numbers beyond float16's: use bf16"):
        write_gguf(folder, tmp_path / "model.gguf", "f16")
    write_gguf(folder, tmp_path / "model.gguf", "bf16")


def test_unsloth_s_call_writes_one_file_a_method(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, dtype="float32")
    files = model.save_pretrained_gguf(tmp_path / "gguf", tokenizer, quantization_method=["Q8_0", "f16"])
    assert [file.name for file in files] == ["model-q8_0.gguf", "model-f16.gguf"] and all(map(Path.is_file, files))
    with pytest.raises(ConfigError, match="holds the tokenizer, and none is given"):
        model.save_pretrained_gguf(tmp_path / "none")
    with pytest.raises(ConfigError, match="gguf already exists"):
        model.save_pretrained_gguf(tmp_path / "gguf", tokenizer)
    for nothing in (None, []):
        with pytest.raises(ConfigError, match="names none: use 'q8_0', or a list"):
            model.save_pretrained_gguf(tmp_path / "none", tokenizer, quantization_method=nothing)
    assert all(map(Path.is_file, files)) and [path.name for path in tmp_path.iterdir()] == ["gguf"]


# ---- pronghorn export ----


@pytest.fixture(scope="module")
def adapter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_that_shows(smollm2, tmp_path_factory.mktemp("adapter") / "adapter")


@pytest.mark.slow
def test_an_export_is_compared_and_says_so(adapter: Path, tmp_path: Path) -> None:
    line = ["export", str(adapter), "--to", "ollama", "--quantization", "f16", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "The served model is the trained one." in " ".join(done.output.split())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "Modelfile", "model-f16.gguf"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| token ids | same: " in card and "gguf 0" in card
    again = CliRunner().invoke(app, line)
    assert again.exit_code == 1 and "already exists" in again.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("template", "template differs"), ("rows", "weights differ"), ("base", "weights differ|adapter")],
)
def test_an_export_that_is_not_what_was_trained_is_not_published(
    adapter: Path, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str
) -> None:
    right = write_gguf

    def wrong(source: Path, file: Path, quantisation: str) -> Path:
        if fault == "base":
            return right(smollm2, file, quantisation)
        if fault == "template":
            tokenizer = AutoTokenizer.from_pretrained(source)
            tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            tokenizer.save_pretrained(source)
        else:
            tensors = gguf._tensors
            monkeypatch.setattr(
                gguf, "_tensors", lambda *given: ((n, stored, Part()) for n, stored, _ in tensors(*given))
            )
        return right(source, file, quantisation)

    monkeypatch.setattr(exporting, "write_gguf", wrong)
    with pytest.raises(TrainingError, match=cause):
        export_run(adapter, "gguf", tmp_path / "out", "f16")
    assert not list(tmp_path.iterdir()), "something was left"


def test_what_cannot_be_exported(stories: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'onnx' is not a format: use one of merged, adapter"):
        export_run(stories, "onnx", tmp_path / "out", "q8_0")
    with pytest.raises(ConfigError, match=r"the run has no adapter.*use --to merged"):
        export_run(stories, "adapter", tmp_path / "out", "q8_0")
    with pytest.raises(TrainingError, match=r"can't be written \(File name too long\): fix the path"):
        export_run(stories, "merged", tmp_path / ("x" * 300), "q8_0")
    assert not list(tmp_path.iterdir())
    assert all(name in CliRunner().invoke(app, ["export", "--help"]).output for name in FORMATS)


def test_an_adapter_s_export_leaves_the_run_s_own_alone(stories: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, dtype="float32")
    FastLanguageModel.get_peft_model(model, r=2).save_pretrained(run)
    tokenizer.save_pretrained(run)
    exported = export_run(run, "adapter", None, "q8_0")
    assert exported.folder == run / "exported-adapter" and (exported.folder / "adapter_config.json").is_file()
    with pytest.raises(ConfigError, match="exported-adapter already exists"):
        export_run(run, "adapter", None, "q8_0")


def test_a_whole_model_is_exported(stories: Path, tmp_path: Path) -> None:
    """Without a template and held-out rows nothing can be compared, and that is told."""
    exported = export_run(stories, "gguf", tmp_path / "out of it", "f16")
    comparison = exported.comparisons[0]
    assert not comparison.ok and not any(check.ok is False for check in comparison.checks)
    console = Console(width=80, file=StringIO())
    console.print(render(comparison))
    told = console.file.getvalue()
    assert "The trained template renders none of the 26 built-in conversations" in told and "one word" not in told
    assert re.search(r"^log-probabilities ", told, re.MULTILINE), "no name is cut at a terminal's usual width"
    assert "not compared: the trained model has no template" in (exported.folder / "README.md").read_text()
    assert exported.next == f"llama-server -m '{tmp_path}/out of it/model-f16.gguf'"


def test_float32_weights_are_rounded_once(stories: Path, tmp_path: Path) -> None:
    """From float32, rather than from the 16 bits of a merged checkpoint."""
    exported = export_run(stories, "gguf", tmp_path / "gguf", "f32")
    [file] = exported.folder.glob("*.gguf")
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, dtype="float32")
    expected = model.get_input_embeddings().weight
    assert not torch.equal(expected, expected.bfloat16().float())
    assert torch.equal(load_gguf(file, torch.float32)[0].get_input_embeddings().weight, expected)


def test_a_lost_expert_is_told(stories: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    folder = save(tiny_model("qwen3_moe", vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"has 7 of 8 experts' model\.layers\.1\.mlp\.experts\.up_proj\.weight"):
        write_gguf(folder, tmp_path / "model.gguf", "f32")


def test_a_file_with_experts_is_compared_by_llama_cpp_alone(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "has_llama_cpp", lambda: False)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    folder = save(tiny_model("qwen3_moe", vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    exported = export_run(folder, "gguf", tmp_path / "out", "f32")
    assert exported.comparisons == ()
    tensors = read_header(exported.folder / "model-f32.gguf").tensors
    assert tensors["blk.0.ffn_up_exps.weight"] == [64, 24, 8]  # the fastest dimension first


def test_experts_in_8_bits_are_refused_by_the_run_s_name(stories: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    folder = save(tiny_model("qwen3_moe", vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"/model has experts.*use --to merged"):
        export_run(folder, "fp8", tmp_path / "out", "q8_0")
    assert not (tmp_path / "out").exists()


def test_what_llama_cpp_computes_otherwise_is_told(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "has_llama_cpp", lambda: False)
    folder = save(tiny_model("gpt_oss", vocab_size=512), AutoTokenizer.from_pretrained(stories), tmp_path / "model")
    exported = export_run(folder, "gguf", tmp_path / "out", "q8_0")
    assert "whole frequencies (truncate: true)" in exported.notes[0]
    assert exported.notes[0] in (exported.folder / "README.md").read_text()
    told = read_header(exported.folder / "model-q8_0.gguf")
    assert told.metadata["gpt-oss.rope.scaling.type"] == "yarn" and told.tensors["blk.0.attn_sinks.weight"] == [4]
    assert told.tensors["blk.0.ffn_gate_exps.bias"] == [24, 8]


def test_rope_that_turns_a_part_of_heads_is_scaled_as_transformers_scales_it() -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "head_dim": 8, "factor": 2.0}
    assert rope_factors(rope, None).tolist() == pytest.approx([2.0, 2.0, 1e30, 1e30])


def test_yarn_of_a_part_of_heads_is_written(tmp_path: Path) -> None:
    tokenizer = byte_level("llama-bpe")
    rope = YARN | {"partial_rotary_factor": 0.5}
    model = tiny_model("glm4_moe", vocab_size=len(tokenizer), rope_parameters=rope)
    told = read_header(write_gguf(save(model, tokenizer, tmp_path / "merged"), tmp_path / "model.gguf", "f32"))
    assert told.of_model("rope.dimension_count") == model.config.head_dim // 2
    assert told.of_model("rope.scaling.attn_factor") == pytest.approx(1.0)
