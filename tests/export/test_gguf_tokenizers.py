"""Byte-level tokenizers in GGUF files: llama.cpp splits text as they do, and stops where the family does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from pronghorn import FastLanguageModel
from pronghorn.errors import UnsupportedError
from pronghorn.export import gguf
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.gguf import stop_tokens, write_gguf
from pronghorn.loading.gguf import load_gguf, read_header, reads
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


def without_merges(pieces: bool) -> Any:
    tokens = ["<unk>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=pieces))
    if not pieces:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def of_model(model: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")


@pytest.mark.parametrize(
    ("tokenizer", "kind"),
    [
        (without_merges(pieces=False), "a BPE tokenizer without merges"),
        (without_merges(pieces=True), "a BPE tokenizer without merges"),
        (of_model(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0)), "a Unigram tokenizer"),
        (of_model(models.WordPiece({"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]")), "a WordPiece tokenizer"),
        (ByT5Tokenizer(), "a ByT5Tokenizer, without tokenizer.json,"),
    ],
)
def test_a_tokenizer_that_no_reader_would_take_is_refused_before_anything_is_merged(
    tokenizer: Any, kind: str, stories: Path, tmp_path: Path
) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, dtype="float32")
    with pytest.raises(UnsupportedError, match=f"^{kind} is not written as GGUF.*: export it merged"):
        model.save_pretrained_gguf(tmp_path / "gguf", tokenizer)
    with pytest.raises(UnsupportedError, match=kind):
        write_gguf(saved(tokenizer, tmp_path / "whole"), tmp_path / "model.gguf")
    assert not (tmp_path / "gguf").exists() and not (tmp_path / "model.gguf").exists()


def runs_of_spaces() -> Any:
    """A tokenizer as Gemma's, whose pieces of spaces are added tokens that longest runs are joined to first."""
    runs = ["▁" * n for n in range(2, 5)]
    names = ["<unk>", "<bos>", "<eos>", *runs, *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "▁a"]
    merges = [("▁" * (n - 1), "▁") for n in (4, 3, 2)] + [("▁▁", "▁▁"), ("▁", "a")]
    model = models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs])
    bos = [("<bos>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single=["<bos>", "$A"], special_tokens=bos)
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


KINDS = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}


def test_runs_of_spaces_are_written_as_llama_cpp_looks_for_them(tmp_path: Path) -> None:
    tokenizer = runs_of_spaces()
    tiny_model("gemma3_text", vocab_size=len(tokenizer), **KINDS).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", "f32")
    assert read_header(file).metadata["tokenizer.ggml.tokens"][3:6] == ["  ", "   ", "    "]
    texts = ["a" + " " * count + "a" for count in range(1, 12)]
    if llama_cpp.has_llama_cpp():
        with serve_gguf(file) as engine:
            for text in texts:
                assert engine._post("/tokenize", {"content": text})["tokens"] == tokenizer(text)["input_ids"][1:], text
    for beside in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / beside).unlink()
    assert reads(file)  # an export is read back with what it says of itself
    _, again = load_gguf(file, torch.float32)
    for text in texts:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"], text


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("scheme", "template", "space", "right", "wrong"),
    [
        ("first", None, True, ["a b", "ab  a"], ["a</s> b"]),  # Llama 2's and Mistral's, as transformers 5 builds them
        ("first", PLAIN, True, ["a b", "ab  a"], ["a</s> b"]),
        ("first", "<s>" + PLAIN, False, ["<s>a b", "<s>a</s> b", "</s>a"], ["a b"]),
        ("always", None, True, ["a b", "ab  a", "a</s>b"], []),
        ("never", None, False, ["a b", "ab  a", "a</s> b"], []),
    ],
)
def test_a_space_before_text_is_written_where_conversations_have_it(
    stories: Path, tmp_path: Path, scheme: Any, template: str | None, space: bool, right: list[str], wrong: list[str]
) -> None:
    kept = AutoTokenizer.from_pretrained(stories).backend_tokenizer
    kept.normalizer, kept.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kept, chat_template=template, **special)
    file = write_gguf(saved(tokenizer, tmp_path), tmp_path / "model.gguf", "f32")
    assert read_header(file).metadata["tokenizer.ggml.add_space_prefix"] is space
    for beside in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / beside).unlink()
    _, again = load_gguf(file, torch.float32)
    same = [text for text in (*right, *wrong) if again(text)["input_ids"] == tokenizer(text)["input_ids"]]
    assert same == right
    if llama_cpp.has_llama_cpp():
        body = {"add_special": bool(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id), "parse_special": True}
        with serve_gguf(file) as engine:
            for text in right:
                told = engine._post("/tokenize", {"content": text, **body})["tokens"]
                assert told == tokenizer(text)["input_ids"], text


@pytest.mark.parametrize("differs", [{"rstrip": True}, {"lstrip": True}, {"normalized": True}, {}])
def test_added_tokens_that_are_found_otherwise_in_the_file_are_told(
    stories: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, differs: dict[str, bool]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.add_tokens([AddedToken("<new>", **{"normalized": False, **differs})])
    file = write_gguf(saved(tokenizer, tmp_path), tmp_path / "model.gguf", "f32")
    assert ("text with '<new>' may be other tokens there" in caplog.text) == bool(differs)
    for beside in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / beside).unlink()
    _, again = load_gguf(file, torch.float32)
    assert (again("a <new> b")["input_ids"] == tokenizer("a <new> b")["input_ids"]) == (not differs)


def test_added_tokens_beyond_the_embeddings_are_left_out_and_others_refused(tmp_path: Path) -> None:
    """Gemma 3 1B's tokenizer has a token of images, which the model has no row for."""
    tokenizer = byte_level("llama-bpe")
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<pad>"})
    tiny_model("llama", vocab_size=size).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    told = read_header(write_gguf(tmp_path, tmp_path / "model.gguf", "f32")).metadata
    assert len(told["tokenizer.ggml.tokens"]) == size and "tokenizer.ggml.padding_token_id" not in told
    tiny_model("llama", vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"a tokenizer of .* tokens, and the model embeds 100"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f32")


def test_templates_that_have_names_are_written(tmp_path: Path) -> None:
    tokenizer = byte_level("llama-bpe")
    default, tools = ("{% for m in messages %}" + each + "{{ m.content }}<|im_end|>{% endfor %}" for each in "AB")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = {"default": default, "tool_use": tools}
    folder = saved(tokenizer, tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", "f32")
    assert read_header(file).metadata["tokenizer.chat_template"] == default
    _, again = load_gguf(file, torch.float32)
    for beside in ("tokenizer.json", "tokenizer_config.json"):
        (folder / beside).unlink()
    _, alone = load_gguf(file, torch.float32)
    assert again.chat_template == alone.chat_template == {"default": default, "tool_use": tools}
    assert "<|im_end|>" in tokenizer.convert_ids_to_tokens(stop_tokens(folder, tokenizer))
