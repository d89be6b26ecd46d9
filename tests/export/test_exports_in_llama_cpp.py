"""Whole exports in llama.cpp: a model whose answers are broken bytes passes by its token ids, and faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pronghorn.diagnose.export_run import export_run
from pronghorn.errors import TrainingError
from pronghorn.export import gguf
from pronghorn.export.compare import compare
from pronghorn.export.comparison import Name
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.families.gguf_spec import Part
from pronghorn.loading.load import load_model
from support.served import TEMPLATE
from support.tiny import tiny_model

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")


@pytest.fixture
def random_model(stories: Path, tmp_path: Path) -> Path:
    """A model that says anything, bytes that are no characters among it."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.rand_like(parameter))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_broken_bytes_are_the_same_tokens(random_model: Path, tmp_path: Path) -> None:
    exported = export_run(random_model, "gguf", tmp_path / "out", "f32")
    in_transformers, in_llama_cpp = exported.comparisons
    assert in_transformers.ok and in_llama_cpp.ok and in_llama_cpp.engine.startswith("llama.cpp (xllamacpp 20")
    answers = {check.name: check.value for check in in_llama_cpp.checks}[Name.ANSWERS]
    assert answers == "8 of 8 the same", answers
    model = TransformersEngine(*load_model(random_model, dtype="float32", max_seq_length=1))
    with serve_gguf(tmp_path / "out" / "model-f32.gguf") as engine:
        texts = [engine.complete(model.tokenizer(word)["input_ids"], 32).text for word in ("Once", "Yes", "The end")]
    assert any("\ufffd" in text for text in texts), "its answers are sound: ids need not be compared"


@pytest.mark.slow
def test_answers_that_are_not_greedy_are_found_by_their_tokens(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = llama_cpp.LlamaCpp._generate

    def hot(self: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return right(self, path, {**body, "temperature": 2.0, "seed": 1})

    monkeypatch.setattr(llama_cpp.LlamaCpp, "_generate", hot)
    with pytest.raises(TrainingError, match="answers differ though the model is the same"):
        export_run(random_model, "gguf", tmp_path / "out", "f32")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_weights_are_found_by_answers_too(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's order of rows forgotten."""
    model, tokenizer = load_model(random_model, dtype="float32", max_seq_length=1)
    plain = gguf._tensors
    monkeypatch.setattr(gguf, "_tensors", lambda *given: ((name, stored, Part()) for name, stored, _ in plain(*given)))
    with serve_gguf(write_gguf(random_model, tmp_path / "model.gguf", "f32")) as engine:
        comparison = compare(TransformersEngine(model, tokenizer), engine, format="f32")
    found = {check.name: check.ok for check in comparison.checks}
    assert found[Name.TOKENS] and found[Name.LOGPROBS] is False and found[Name.ANSWERS] is False
