"""Byte-level tokenizers in GGUF files: llama.cpp splits text as they do, and stops where the family does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pronghorn.export import gguf
from pronghorn.export.conversations import built_in
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.gguf import stop_tokens, write_gguf
from pronghorn.models.gguf_tokenizer import PRE_TOKENIZERS
from support.tiny import tiny_model

pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")
TEXTS = [
    *(str(message.content) for named in built_in() for message in named.conversation.messages if message.content),
    "It's 12,345.67 km; isn't it?  Yes.\n\n\tNo, you'LL see: x_1 += 2**10  # ok\r\n",
    "HelloWorld ÜBERgröße camelCase XMLHttpRequest DON'T we've ПРИВЕТмир path/to//file\r\n\r\n  x 你好，世界 🙂 ½",
]
MARKS = "e\u0301cole"
"""A letter and a combining accent, which llama.cpp splits where gpt-oss' and Mistral's tokenizers don't."""


def trained(name: str) -> Any:
    """Train a small byte-level tokenizer that splits text in the way of this name."""
    words = PRE_TOKENIZERS[name]
    assert words is not None
    tokenizer = Tokenizer(models.BPE())
    splits = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<|return|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator([*TEXTS, MARKS] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>")


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
    tokenizer = trained(name)
    assert unlike(tokenizer, saved(tokenizer, tmp_path)) == differ
    other = {"llama-bpe": "tekken", "gpt-4o": "llama-bpe", "tekken": "gpt-2"}[name]
    monkeypatch.setattr(gguf, "splits_alike", lambda tokenizer, name: name == other)
    assert len(unlike(tokenizer, tmp_path)) > len(differ), "another way of splitting didn't show"


def test_a_part_of_an_answer_does_not_end_it(tmp_path: Path) -> None:
    """gpt-oss ends what it thinks by a token that ends turns of other families."""
    tokenizer = trained("gpt-4o")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    for family, ends in (("gpt_oss", False), ("llama", True)):
        folder = saved(tokenizer, tmp_path / family, family)
        own = AutoTokenizer.from_pretrained(folder)
        assert ("<|end|>" in own.convert_ids_to_tokens(stop_tokens(folder, own))) is ends
