"""Byte-level tokenizers in GGUF files: llama.cpp splits text as they do, and stops where the family does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pronghorn.export import gguf
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.gguf import stop_tokens, write_gguf
from support.byte_level import MARKS, TEXTS, byte_level
from support.tiny import tiny_model

pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")


def saved(tokenizer: Any, folder: Path, family: str = "llama") -> Path:
    tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def unlike(tokenizer: Any, folder: Path) -> list[str]:
    """Return the texts of which llama.cpp makes other tokens."""
    with serve_gguf(write_gguf(folder, folder / "model.gguf", "f32")) as engine:
        told = {text: engine._post("/tokenize", {"content": text})["tokens"] for text in [*TEXTS, MARKS]}
    return [text for text, ids in told.items() if ids != tokenizer(text)["input_ids"]]


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(("name", "differ"), [("llama-bpe", []), ("gpt-4o", [MARKS]), ("tekken", [MARKS])])
def test_llama_cpp_makes_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, differ: list[str]
) -> None:
    tokenizer = byte_level(name)
    assert unlike(tokenizer, saved(tokenizer, tmp_path)) == differ
    other = {"llama-bpe": "tekken", "gpt-4o": "llama-bpe", "tekken": "gpt-2"}[name]
    monkeypatch.setattr(gguf, "splits_alike", lambda tokenizer, name: name == other)
    assert len(unlike(tokenizer, tmp_path)) > len(differ), "another way of splitting didn't show"


def test_a_part_of_an_answer_does_not_end_it(tmp_path: Path) -> None:
    """gpt-oss ends what it thinks by a token that ends turns of other families."""
    tokenizer = byte_level("gpt-4o")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    for family, ends in (("gpt_oss", False), ("llama", True)):
        folder = saved(tokenizer, tmp_path / family, family)
        own = AutoTokenizer.from_pretrained(folder)
        assert ("<|end|>" in own.convert_ids_to_tokens(stop_tokens(folder, own))) is ends
