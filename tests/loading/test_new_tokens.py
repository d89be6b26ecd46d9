"""Modules trained whole and tokens that are new: trained, saved, loaded, merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.loading.load import load_model
from pronghorn.loading.new_tokens import add_tokens, grow_embeddings, trainable_tokens
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from pronghorn.models.reach import end_names
from pronghorn.train.run import run
from support.causal_lms import tiny
from support.documents import LENGTHS, ROW, gradients, one_document_at_a_time
from support.tiny import packed_row, tiny_model
from support.tolerance import assert_three_way

QUIET = Console(quiet=True)
TRAINED: dict[str, dict[str, Any]] = {
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "a norm": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [5, 9, 11], "lm_head": [5, 9, 11]}},
}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("what", TRAINED)
def test_gradients(what: str, tied: bool, layers: Any) -> None:
    """The packed loss goes through the trained copies: every gradient as one document at a time gives it."""
    batch = packed_row(LENGTHS, ROW, vocab=20)
    model = add_lora(tiny_model("llama", tie_word_embeddings=tied), r=2, lora_alpha=2, **TRAINED[what]).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05)
    reference, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    _, exact_loss = one_document_at_a_time(reference, batch)
    exact_loss.backward()
    stock = plain(**{name: batch[name] for name in ("input_ids", "position_ids", "labels")}, use_cache=False).loss
    stock.backward()
    attach(model, layers=layers)
    loss = model(**batch).loss
    loss.backward()
    assert_three_way("loss", loss, stock, exact_loss)
    exact, theirs = gradients(reference), gradients(plain)
    for name, grad in gradients(model).items():
        assert_three_way(f"gradient of {name}", grad, theirs[name], exact[name])


def recipe(folder: Path, stories: Path, **adapter: Any) -> Recipe:
    rows = [{"prompt": f"<call> Tom {i}", "completion": " said hello. <end>"} for i in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Recipe.model_validate(
        {
            "model": {"name": str(stories), "max_seq_length": 256},
            "adapter": {"r": 4, **adapter},
            "data": {"train": folder / "train.jsonl"},
            "train": {"output": folder / "run", "max_steps": 6, "learning_rate": 1e-2, "warmup_steps": 0},
            "report": {"html": False},
        }
    )


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer("<call> Tom 3 said <end>", return_tensors="pt")).logits


def test_new_tokens_are_trained_saved_loaded_and_merged(stories: Path, tmp_path: Path) -> None:
    record = run(recipe(tmp_path, stories, new_tokens=["<call>", "<end>"]), QUIET)
    assert record.steps[-1]["loss"] < record.steps[0]["loss"]
    model, tokenizer = load_model(tmp_path / "run/adapter", max_seq_length=256)
    assert tokenizer.convert_tokens_to_ids(["<call>", "<end>"]) == [512, 513]
    assert tokenizer.tokenize("a <call>").count("<call>") == 1
    fresh, _ = load_model(stories, max_seq_length=256)
    expected = fresh.get_input_embeddings().weight
    embeddings = model.get_base_model().get_input_embeddings()
    found = embeddings(torch.arange(514)).detach()
    assert torch.equal(found[:512], expected) and found.shape[0] == 514
    assert not torch.allclose(found[512], found[513])

    from pronghorn.api import FastLanguageModel

    before = logits(model, tokenizer)
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "merged", tokenizer)
    merged, its_tokenizer = load_model(tmp_path / "merged", max_seq_length=256)
    assert (logits(merged, its_tokenizer) - before).norm() < 0.01 * before.norm()  # the weights' rounding to bfloat16


def test_new_tokens_that_a_built_in_template_needs_end_its_turns(stories: Path, tmp_path: Path) -> None:
    """They were added as ordinary ones, and the template said that the tokenizer lacked them."""
    settings = recipe(tmp_path, stories, new_tokens=["<|im_start|>", "<|im_end|>", "<think>"])
    data = settings.data.model_copy(update={"chat_template": "chatml"})
    record = run(settings.model_copy(update={"data": data}), QUIET)
    assert record.steps[-1]["loss"] < record.steps[0]["loss"]
    _, tokenizer = load_model(tmp_path / "run/adapter", max_seq_length=256)
    assert tokenizer.eos_token == "<|im_end|>"
    added = tokenizer.added_tokens_decoder
    assert [added[i].special for i in (512, 513, 514)] == [True, True, False]


@pytest.mark.parametrize("name", ["embed_tokens", "model.embed_tokens"])
def test_rows_of_what_is_trained_whole_are_not_trained_beside_it(name: str) -> None:
    """Whichever of its names modules_to_save has."""

    class Tokenizer:
        def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
            return [3] * len(tokens)

    model = tiny_model("llama")
    rows = trainable_tokens(model, Tokenizer(), ["<call>"], [name])
    assert rows == {"lm_head": [3]}
    trained = [n for n, p in add_lora(model, modules_to_save=[name], trainable_token_indices=rows).named_parameters()]
    assert not any("embed_tokens.token_adapter" in name for name in trained)


def test_modules_to_save_through_a_recipe(stories: Path, tmp_path: Path) -> None:
    run(recipe(tmp_path, stories, modules_to_save=["lm_head"], new_tokens=["<call>"]), QUIET)
    model, tokenizer = load_model(tmp_path / "run/adapter", max_seq_length=256)
    fresh, _ = load_model(stories, max_seq_length=256)
    head = model.get_base_model().get_output_embeddings()
    assert len(tokenizer) == 513 and not torch.equal(head.weight[:512], fresh.get_output_embeddings().weight)


@pytest.mark.parametrize("rows", [512, 513, 520])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_new_tokens_begin_at_the_mean_and_always_the_same(rows: int, tied: bool, stories: Path) -> None:
    """Rows to spare may be zeros or noise: they become the mean too, and neither draw touches the global generator."""
    found = []
    for _ in range(2):
        _, tokenizer = load_model(stories, max_seq_length=256)
        model = tiny_model("llama", vocab_size=rows, tie_word_embeddings=tied)
        ends = [layer.weight.data for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
        for weight in ends:
            weight[512:] = 9 if rows == 520 else 0
        old = [weight[:512].clone() for weight in ends]
        add_tokens(tokenizer, ["<call>", "<end>"])
        state = torch.random.get_rng_state()
        grow_embeddings(model, tokenizer, ["<call>", "<end>"])
        assert torch.equal(state, torch.random.get_rng_state())
        for layer, before in zip((model.get_input_embeddings(), model.get_output_embeddings()), old, strict=True):
            assert layer.weight.shape[0] == max(rows, 514) and torch.equal(layer.weight[:512], before)
            # a drawn row varies by about 1e-4, a row mean by what 512 rows leave; a zero row is far from both
            mean = before.mean(0)
            assert (layer.weight[512:514] - mean).norm(dim=1).max() < mean.norm() / 10
        found.append(model.get_input_embeddings().weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("tied", "whole", "ends"),
    [
        (False, [], ["embed_tokens", "lm_head"]),
        (False, ["lm_head"], ["embed_tokens"]),
        (False, ["lm_head", "embed_tokens"], []),
        (True, [], ["embed_tokens"]),
        (True, ["lm_head"], []),
        (True, ["embed_tokens"], []),
    ],
)
def test_new_tokens_are_trained_where_nothing_else_trains_them(tied: bool, whole: list[str], ends: list[str]) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda tokens: [512 + i for i, _ in enumerate(tokens)])
    found = trainable_tokens(model, tokenizer, ["<call>", "<end>"], whole)
    assert found == ({end: [512, 513] for end in ends} or None)


def test_a_step_may_have_none_of_the_new_tokens(stories: Path, tmp_path: Path) -> None:
    """Where head and embeddings aren't tied, their rows have no gradient then: no adapter is dead."""
    _, tokenizer = load_model(stories, max_seq_length=256)
    tiny_model("llama", vocab_size=512).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = recipe(tmp_path, tmp_path / "base", new_tokens=["<rare>"])
    assert len(run(settings, QUIET).steps) == 6


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_run(stories: Path, tmp_path: Path) -> None:
    records = []
    for name in "ab":
        (tmp_path / name).mkdir()
        records.append(run(recipe(tmp_path / name, stories, new_tokens=["<call>", "<end>"]), QUIET))
    first, second = ([step["loss"] for step in record.steps] for record in records)
    assert first == second


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"new_tokens": ["<s>"]}, "adapter.new_tokens: '<s>' is a token already"),
        ({"new_tokens": ["<a>", "<a>"]}, "adapter.new_tokens: '<a>' is named twice"),
        ({"new_tokens": [" "]}, "adapter.new_tokens: ' ' is empty"),
        ({"modules_to_save": ["lm_haed"]}, "modules_to_save 'lm_haed' is not in the model"),
    ],
)
def test_bad_names(stories: Path, tmp_path: Path, adapter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(recipe(tmp_path, stories, **adapter), QUIET)


def test_whole_modules_in_float16_are_refused(stories: Path, tmp_path: Path) -> None:
    table = recipe(tmp_path, stories, modules_to_save=["lm_head"]).to_dict()
    table["precision"]["dtype"] = "float16"
    with pytest.raises(ConfigError, match="modules_to_save in float16"):
        run(Recipe.model_validate(table), QUIET)


def test_a_saved_adapter_keeps_its_tokens(stories: Path, tmp_path: Path) -> None:
    run(recipe(tmp_path, stories, new_tokens=["<call>", "<end>"]), QUIET)
    saved = recipe(tmp_path, stories).model_copy(update={})
    table = saved.to_dict()
    table["model"]["name"] = str(tmp_path / "run/adapter")
    table["train"]["output"] = str(tmp_path / "again")
    again = run(Recipe.model_validate(table), QUIET)
    assert len(again.steps) == 6
    table["adapter"]["new_tokens"] = ["<more>"]
    table["train"]["output"] = str(tmp_path / "more")
    with pytest.raises(ConfigError, match="is a saved adapter, which has the tokens it was trained with"):
        run(Recipe.model_validate(table), QUIET)


@pytest.mark.parametrize("model_type", ["phi", "modernbert-decoder"])
def test_rows_of_a_head_with_a_bias_are_refused(model_type: str) -> None:
    """PEFT would compute the head without its bias, from the first step on. Trained whole it keeps it."""
    model = tiny(model_type).eval()
    embeddings, head = end_names(model)
    rows = {embeddings: [3]} if model.config.tie_word_embeddings else {embeddings: [3], head: [3]}
    with pytest.raises(UnsupportedError, match=f"rows of new tokens in {head}, which has a bias"):
        add_lora(model, trainable_token_indices=rows)
    ids = torch.arange(3, 20)[None]
    before = model(input_ids=ids).logits
    whole = add_lora(model, modules_to_save=list(rows)).eval()
    assert torch.allclose(whole(input_ids=ids).logits, before, atol=1e-5)
