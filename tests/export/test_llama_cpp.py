"""GGUF files in llama.cpp itself: every family that is written computes what transformers does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pronghorn.diagnose import export_run
from pronghorn.errors import ServerError, TrainingError, UnsupportedError
from pronghorn.export import gguf
from pronghorn.export.comparison import Check, Comparison, Name
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.models.gguf import load_gguf
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
TEXT = "Once upon a time, there was a girl."


def farthest(model: Any, tokenizer: Any, folder: Path) -> tuple[float, float]:
    """Return how far llama.cpp's log-probabilities are from transformers' at most, in nats, and how far transformers'
    own in float16 are, in which llama.cpp's CPU kernels look activations up and keep parts of attention."""
    model = model.float().eval()
    with torch.no_grad():  # uniform distributions would hide differences
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.rand_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference = TransformersEngine(model, tokenizer)
    ids = list(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])
    exact = reference.distribution(ids)
    with serve_gguf(write_gguf(folder, folder / "model.gguf", "f32"), 64) as engine:
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
        ("mistral", {"sliding_window": None}),
        ("granite", {}),
        ("olmo2", {}),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
        ("phi3", {"sliding_window": None}),
        ("gemma3_text", GEMMA3),
        ("seed_oss", {}),
        ("mixtral", {"sliding_window": None}),
        ("olmoe", {"num_key_value_heads": 4}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_llama_cpp_computes_the_same(stories: Path, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    found, own = farthest(tiny_model(family, vocab_size=len(tokenizer), **changes), tokenizer, tmp_path)
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
    with serve_gguf(file, 64) as engine:
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
    monkeypatch.setattr(gguf, "_tensors", lambda *given: ((name, stored, None) for name, stored, _ in plain(*given)))
    found, own = farthest(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, tmp_path)
    assert found > 4 * own, (found, own)


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
