"""GGUF files in llama.cpp itself: every family that is written computes what transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, GemmaTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from pronghorn import FastLanguageModel
from pronghorn.diagnose import export_run
from pronghorn.errors import ServerError, TrainingError, UnsupportedError
from pronghorn.export import gguf
from pronghorn.export.comparison import Check, Comparison, Name
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.families.gemma4 import GEMMA4_UNIFIED
from pronghorn.families.gguf_spec import Gguf, Part, Rows
from pronghorn.families.glm4_moe import GLM4_MOE
from pronghorn.families.gpt_oss import GPT_OSS as GPT_OSS_SPEC
from pronghorn.families.olmo3 import OLMO3 as OLMO3_SPEC
from pronghorn.families.registry import FAMILIES
from pronghorn.loading.gguf import load_gguf, read_header
from support.composites import add_tensors, class_of, composite_config
from support.tiny import tiny_model

pytest.importorskip("gguf")
needs_quantiser = pytest.mark.skipif(gguf.quantiser() is None, reason="needs llama-quantize (ik-llama-cpp-python)")
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""As the 4B model has it; smaller ones have no scaling."""
GEMMA4: dict[str, Any] = {
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 512,
}
"""The last two layers have the keys and values of the two before."""
DELTA = {"linear_key_head_dim": 16, "num_hidden_layers": 5, "full_attention_interval": 3}
"""llama.cpp's heads have keys and values of one size."""
GPT_OSS_FORM, OLMO3_FORM, GLM_FORM = (spec.gguf for spec in (GPT_OSS_SPEC, OLMO3_SPEC, GLM4_MOE))
assert GPT_OSS_FORM is not None and OLMO3_FORM is not None and GLM_FORM is not None
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 12}
NO_YARN = {"rope_type": "default", "rope_theta": 1e4}
GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "original_max_position_embeddings": 64, "truncate": True},
}
OLMO3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "rope_parameters": {"full_attention": YARN | {"attention_factor": 1.4}, "sliding_attention": NO_YARN},
}
MINISTRAL3: dict[str, Any] = {
    "head_dim": 24,
    "rope_parameters": YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0},
}
GLM_4_5: dict[str, Any] = {"n_group": 2, "topk_group": 2, "use_qk_norm": False, "first_k_dense_replace": 2}
FULL = {"layer_types": ["full_attention"] * 3}
TEXT = "Once upon a time, there was a girl. She was very happy, and one day she went to the park with her mom."
"""More tokens than the windows of tiny models have."""
LONG = "Once upon a time, there was a girl. " + (
    "She had a big red ball and a small dog, and they played in the park all day. Then the dog ran away. " * 2
)
"""More than a chunk of 64 tokens, by which gated delta nets are computed."""

MARKED = "नमस्ते दुनिया, it's 12,345 km; isn't it?\n\n  हिन्दी में"


def qwen_tokenizer() -> Any:
    """Return a small tokenizer of Qwen3.5's kind."""
    tokenizer = Qwen3_5Tokenizer()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.backend_tokenizer.train_from_iterator([MARKED] * 10, trainer)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    return tokenizer


def farthest(model: Any, tokenizer: Any, folder: Path, text: str = TEXT) -> tuple[float, float]:
    """Return how far llama.cpp's log-probabilities are from transformers' at most, in nats, and how far transformers'
    own in float16 are, in which llama.cpp's CPU kernels look activations up and keep parts of attention."""
    model = model.float().eval()
    with torch.no_grad():  # uniform distributions would hide differences
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.rand_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference = TransformersEngine(model, tokenizer)
    ids = list(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    exact = reference.distribution(ids)
    with serve_gguf(write_gguf(folder, folder / "model.gguf", "f32")) as engine:
        scored = engine.logprobs(ids)
    assert len(scored) == min(len(ids) - 1, engine.steps or 0)
    assert exact.std() > 0.3
    rounded = TransformersEngine(model.half(), tokenizer).distribution(ids)
    found, own = (
        max(abs(exact[at - 1, ids[at]].item() - told(at)) for at in scored)
        for told in (lambda at: scored[at].logprob, lambda at: rounded[at - 1, ids[at]].item())
    )
    return found, own


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen2", {"use_sliding_window": False, "rope_parameters": YARN}),
        ("llama", {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": None}),
        ("granite", {}),
        ("granitemoehybrid", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("olmo2", {}),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
        ("phi3", {"sliding_window": None}),
        ("gemma3_text", GEMMA3),
        ("seed_oss", {}),
        ("mixtral", {"sliding_window": None}),
        ("olmoe", {"num_key_value_heads": 4}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("qwen3_5_text", {**DELTA, "linear_num_value_heads": 6}),
        ("qwen3_5_text", {**DELTA, "linear_num_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
        ("qwen3_5_moe_text", {**DELTA, "linear_num_value_heads": 6}),
        ("qwen3_next", {**DELTA, "linear_num_value_heads": 6}),
        ("gemma3_text", {**GEMMA3, "final_logit_softcapping": 5.0}),
        ("gemma4_text", GEMMA4),
        ("gemma4_text", {**GEMMA4, "final_logit_softcapping": None}),
        ("gemma4_unified_text", {}),
        ("gemma4_text with experts", {}),
        ("gpt_oss", GPT_OSS),
        ("gpt_oss", {"rope_parameters": NO_YARN}),
        ("ministral3", MINISTRAL3),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}, "tie_word_embeddings": True}),
        ("ministral", FULL | {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": 512}),
        ("olmo3", OLMO3),
        ("olmo3", OLMO3 | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), NO_YARN)}),
        ("glm4_moe", {}),
        ("glm4_moe", GLM_4_5),
        ("glm4_moe", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_llama_cpp_computes_the_same(stories: Path, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    found, own = farthest(tiny_model(family, vocab_size=len(tokenizer), **changes), tokenizer, tmp_path, LONG)
    assert found <= 2 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
def test_experts_that_lie_together_are_read(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints of Qwen3.5 have them, where transformers saves each by itself."""
    plain = write_gguf

    def together(folder: Path, *given: Any) -> Path:
        assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return plain(folder, *given)

    monkeypatch.setitem(globals(), "write_gguf", together)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = tiny_model("qwen3_5_moe_text", vocab_size=len(tokenizer), **DELTA)
    found, own = farthest(model, tokenizer, tmp_path)
    assert found <= 2 * own, (found, own)


@needs_llama_cpp
@needs_quantiser
@pytest.mark.parametrize(("quantisation", "kinds"), [("q4_k_m", {"Q4_K", "Q6_K"}), ("q6_k", {"Q6_K"})])
def test_k_quants_are_read_by_llama_cpp(stories: Path, tmp_path: Path, quantisation: str, kinds: set[str]) -> None:
    """By llama-quantize itself: the file holds such blocks, and llama.cpp computes what transformers does with them
    (but for activations, which it rounds to 8 bits)."""
    from gguf import GGUFReader

    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # K-quants have blocks of 256
    model = tiny_model("llama", vocab_size=len(tokenizer), **wide).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.rand_like(parameter))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ids = list(tokenizer(TEXT)["input_ids"])
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", quantisation)
    assert {tensor.tensor_type.name for tensor in GGUFReader(str(file)).tensors} == {*kinds, "F32"}
    read, own_tokenizer = load_gguf(file, torch.float32)
    right, exact = (TransformersEngine(each, tokenizer).distribution(ids) for each in (read.eval(), model))
    assert own_tokenizer(TEXT)["input_ids"] == ids
    with serve_gguf(file) as engine:
        scored = engine.logprobs(ids)
    off, lost = (
        sum(abs(each[at - 1, ids[at]].item() - told(at)) for at in scored) / len(scored)
        for each, told in (
            (right, lambda at: scored[at].logprob),
            (right, lambda at: exact[at - 1, ids[at]].item()),
        )
    )
    assert off < 0.5 * lost, (off, lost)


@needs_llama_cpp
@pytest.mark.slow
def test_rows_in_transformers_order_show(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: llama.cpp's order of rows forgotten."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    plain = gguf._tensors
    monkeypatch.setattr(gguf, "_tensors", lambda *given: ((name, stored, Part()) for name, stored, _ in plain(*given)))
    found, own = farthest(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, tmp_path)
    assert found > 4 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_value_heads_in_transformers_order_show(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    plain = gguf._tensors
    monkeypatch.setattr(
        gguf,
        "_tensors",
        lambda *given: ((n, s, replace(how, rows=None, columns=None)) for n, s, how in plain(*given)),
    )
    torch.manual_seed(0)  # of norms: with some, float16 alone sends a token to another expert
    found, own = farthest(tiny_model(family, vocab_size=len(tokenizer), **DELTA), tokenizer, tmp_path, LONG)
    assert found > 4 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "qwen3_vl"])
def test_the_language_model_of_one_with_towers_is_written(stories: Path, tmp_path: Path, kind: str) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(stories), composite_config(kind)
    config.text_config.vocab_size = config.text_config.vocab_size_per_layer_input = len(tokenizer)
    torch.manual_seed(0)
    found, own = farthest(class_of(config)._from_config(config), tokenizer, tmp_path, LONG)
    assert found <= 2 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
def test_pairs_that_do_not_turn_show(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    monkeypatch.setattr(gguf, "rope_factors", lambda *_: torch.ones(16))
    found, own = farthest(tiny_model("gemma4_text", vocab_size=len(tokenizer), **GEMMA4), tokenizer, tmp_path, LONG)
    assert found > 4 * own, (found, own)


def gemma_tokenizer(begins: bool = True) -> Any:
    """Return a small tokenizer of Gemma 4's kind, whose merges aren't in the order of their tokens."""
    learned = Tokenizer(BPE(unk_token="<unk>"))
    learned.normalizer = Replace(" ", "▁")
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    learned.train_from_iterator([LONG, "naïve 12,345"], trainer)
    model = json.loads(learned.to_str())["model"]
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\n\n"]
    words = [*first, *reversed([word for word in model["vocab"] if word not in first])]
    merges = [("\n", "\n"), *map(tuple, model["merges"])]
    tokenizer = GemmaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<turn|>"]})
    if begins:
        bos = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
        tokenizer.backend_tokenizer.post_processor = bos
    return tokenizer


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("merged", ["gemma4", None])
def test_llama_cpp_joins_pieces_as_gemma_4_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: Any) -> None:
    """And not by scores in the order of tokens."""
    tokenizer = gemma_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_model("gemma4_unified_text", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    assert GEMMA4_UNIFIED.gguf is not None
    form = replace(GEMMA4_UNIFIED.gguf, merged_pieces=merged)
    monkeypatch.setitem(FAMILIES, GEMMA4_UNIFIED.model_type, replace(GEMMA4_UNIFIED, gguf=form))
    texts = LONG, "  two  spaces\n\nand a\n\n\n line \n x", "naïve 🙂 12,345 the dog", "<|channel>park<turn|> day"
    with serve_gguf(write_gguf(tmp_path, tmp_path / "model.gguf", "f32")) as engine:
        posted = [engine._post("/tokenize", {"content": text, "add_special": True})["tokens"] for text in texts]
    tokens = AutoTokenizer.from_pretrained(tmp_path)([*texts])["input_ids"]
    assert (posted == tokens) == (merged is not None)


def test_gemma_4_s_tokens(tmp_path: Path) -> None:
    """Those that llama.cpp reads thoughts by are shown, the end of a turn stops, and BOS can't be left out."""
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<turn|>\n{% endfor %}"
    tiny_model("gemma4_unified_text", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    told = read_header(write_gguf(tmp_path, tmp_path / "model.gguf", "f32")).metadata
    kinds = dict(zip(told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"], strict=True))
    assert (kinds["<|channel>"], kinds["<turn|>"], kinds["<0x0A>"]) == (4, 3, 6)
    assert told["tokenizer.ggml.eot_token_id"] == tokenizer.convert_tokens_to_ids("<turn|>")
    gemma_tokenizer(begins=False).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="a gemma4 tokenizer without BOS"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f32")


def test_an_export_says_that_towers_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, config = qwen_tokenizer(), composite_config("qwen3_5")
    config.text_config.vocab_size = len(tokenizer)
    for part in (class_of(config)._from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "whole")
    add_tensors(tmp_path / "whole", {"mtp.fc.weight": torch.randn(2, 3)})  # which predicts further tokens
    monkeypatch.setattr(export_run, "has_llama_cpp", lambda: False)
    done = export_run.export_run(tmp_path / "whole", "gguf", tmp_path / "out", "f16")
    assert not done.comparisons, "transformers reads no such file"
    told = "The GGUF file holds the language model alone; not written: model.visual."
    assert done.notes == (told,) and told in (tmp_path / "out" / "README.md").read_text()
    model, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "whole"), max_seq_length=64, dtype="float32")
    with pytest.warns(UserWarning, match=re.escape(told)):
        model.save_pretrained_gguf(tmp_path / "by name", tokenizer, "f16")


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("named", ["qwen35", "qwen2"])
def test_llama_cpp_splits_text_as_qwen3_5_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """And as Qwen 2 splits it is told: letters' marks are apart there."""
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_model("qwen3_5_text", vocab_size=len(tokenizer), **DELTA).save_pretrained(tmp_path)
    if named == "qwen2":
        monkeypatch.setattr(gguf, "byte_level_names", lambda: ["qwen2"])
        monkeypatch.setattr(gguf, "splits_alike", lambda *_: True)
    with serve_gguf(write_gguf(tmp_path, tmp_path / "model.gguf", "f32")) as engine:
        tokens = engine._post("/tokenize", {"content": MARKED})["tokens"]
    assert (tokens == AutoTokenizer.from_pretrained(tmp_path)(MARKED)["input_ids"]) == (named == "qwen35")


def swapped(name: str, config: Any) -> Mapping[str, Rows]:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    right = GPT_OSS_FORM.split(name, config)
    return {re.sub("gate_proj|up_proj", lambda found: names[found[0]], own): part for own, part in right.items()}


def without(leaf: str, form: Gguf) -> dict[str, Any]:
    def none(rows: torch.Tensor) -> torch.Tensor:
        return torch.full_like(rows, -100.0 if leaf == "sinks" else 0.0)

    def split(name: str, config: Any) -> Mapping[str, Rows]:
        return {own: none if name.endswith(leaf) else part for own, part in form.split(name, config).items()}

    return {"split": split}


def other(form: Gguf, **values: Any) -> dict[str, Any]:
    return {"values": lambda config: {**form.values(config), **values}}


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "fault"),
    [
        ("gpt_oss", GPT_OSS, {"split": swapped}),
        ("gpt_oss", GPT_OSS, without("sinks", GPT_OSS_FORM)),
        ("gpt_oss", GPT_OSS, without("down_proj_bias", GPT_OSS_FORM)),
        ("gpt_oss", GPT_OSS, other(GPT_OSS_FORM, sliding_window=6)),
        ("gpt_oss", GPT_OSS, {"rope": lambda config: {**config.rope_parameters, "attention_factor": 1.0}}),
        ("ministral3", MINISTRAL3, {"values": lambda config: {}}),
        ("ministral3", MINISTRAL3, {"interleaved": False}),
        ("olmo3", OLMO3, other(OLMO3_FORM, sliding_window=7)),
        ("olmo3", OLMO3, {"rope": lambda config: config.rope_parameters["sliding_attention"]}),
        ("glm4_moe", {}, without("e_score_correction_bias", GLM_FORM)),
        ("glm4_moe", {}, other(GLM_FORM, expert_group_used_count=1)),
        ("glm4_moe", {}, {"rope": lambda config: {**config.rope_parameters, "partial_rotary_factor": 1.0}}),
        ("glm4_moe", {}, other(GLM_FORM, expert_weights_scale=1.0)),
    ],
)
def test_faults_of_a_family_show(
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    fault: dict[str, Any],
) -> None:
    """The check above can fail for each thing that these families alone have."""
    right = FAMILIES[family]
    assert right.gguf is not None
    wrong = replace(right, gguf=replace(right.gguf, **fault))
    monkeypatch.setattr(gguf, "written_family", lambda config: (wrong, wrong.gguf))
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    found, own = farthest(tiny_model(family, vocab_size=len(tokenizer), **changes), tokenizer, tmp_path)
    assert found > 4 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
def test_where_llama_cpp_rounds_the_ends_of_yarn_is_all_that_differs(
    stories: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gpt-oss as published: its file is written, with a warning, and is that of a model that rounds them, too."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    models, file = [], tmp_path / "model.gguf"
    for truncate in (True, False):
        rope = GPT_OSS["rope_parameters"] | {"truncate": truncate}
        changes = GPT_OSS | {"rope_parameters": rope}
        models.append(tiny_model("gpt_oss", vocab_size=len(tokenizer), **changes).float().eval())
        models[-1].save_pretrained(tmp_path / str(truncate))
        tokenizer.save_pretrained(tmp_path / str(truncate))
        assert "llama.cpp" not in caplog.text
        write_gguf(tmp_path / str(truncate), file, "f32")
    assert "llama.cpp begins and ends YaRN's ramp at whole frequencies" in caplog.text
    ids = tokenizer(TEXT)["input_ids"]
    rounded, exact = (TransformersEngine(model, tokenizer).distribution(ids) for model in models)
    with serve_gguf(file) as engine:
        scored = engine.logprobs(ids)
    found, off = (
        max(abs(told[at - 1, ids[at]].item() - scored[at].logprob) for at in scored) for told in (rounded, exact)
    )
    assert found < 1e-4 < off / 10, (found, off)


def test_without_llama_cpp_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "has_llama_cpp", lambda: False)
    with pytest.raises(UnsupportedError, match="pip install xllamacpp"), serve_gguf(tmp_path / "model.gguf"):
        pass


def test_positions_that_llama_cpp_tells_nothing_of_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so of tokens that are part of a character; all others are compared."""
    engine = object.__new__(llama_cpp.LlamaCpp)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        token = body["logit_bias"][0][0]
        told = {"id": token, "logprob": -1.0, "top_logprobs": [{"id": token}]}
        return {"content": ""} if token == 7 else {"completion_probabilities": [told]}

    monkeypatch.setattr(engine, "_post", post)
    assert [*engine.logprobs([1, 5, 7, 6])] == [1, 3]
    with pytest.raises(UnsupportedError, match="tells no log-probabilities"):
        engine.logprobs([1, 7, 7])


@needs_llama_cpp
def test_what_llama_cpp_does_not_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ServerError, match=r"llama\.cpp doesn't load"), serve_gguf(tmp_path / "model.gguf"):
        pass


def test_an_export_that_llama_cpp_answers_otherwise_is_not_published(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed every file is compared there, too."""

    class Engine:
        name = "llama.cpp"

    def compare(reference: Any, engine: Any, **_: Any) -> Comparison:
        ok = engine.name != "llama.cpp"
        check = Check(Name.LOGPROBS, ok, "", "")
        causes = () if ok else ("weights differ",)
        return Comparison(engine.name, "run", "f16", 0, (), 0, "", None, None, None, (check,), causes)

    monkeypatch.setattr(export_run, "compare", compare)
    monkeypatch.setattr(export_run, "has_llama_cpp", lambda: False)
    done = export_run.export_run(stories, "gguf", tmp_path / "alone", "f16")
    assert [each.engine for each in done.comparisons] == ["gguf in transformers"]
    monkeypatch.setattr(export_run, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(export_run, "serve_gguf", lambda file: nullcontext(Engine()))
    with pytest.raises(TrainingError, match=r"not what was trained \(llama\.cpp\): weights differ"):
        export_run.export_run(stories, "gguf", tmp_path / "both", "f16")
    assert not (tmp_path / "both").exists()
    with pytest.raises(TrainingError, match="bears few bits badly: try --to gguf --quantization q8_0"):
        export_run.export_run(stories, "gguf", tmp_path / "few", "q4_0")
