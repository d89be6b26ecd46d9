"""train_on_responses_only: labels by the markers' token ids, in both trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

import pronghorn
from pronghorn import SFTTrainer, train_on_responses_only
from pronghorn.data.packed_rows import PackedRows
from pronghorn.errors import ConfigError, DataError
from pronghorn.train.responses import Marker, _spellings, response_labels, template_parts
from support.chats import CHATML, byte_level, chat, one
from support.templates import with_template
from support.tiny import stock_loss_on_cpu
from support.trainers import adapted, config

USER, BOT = "### User:\n", "### Bot:\n"
TEXT = "### User:\nHi there\n### Bot:\nOnce upon\n### User:\nMore\n### Bot:\nThe end."
OTHER = "### User:\nWho?\n### Bot:\nLily ran."
SILENT = "Once there was a girl."


def trained_text(tokenizer: Any, ids: list[int], labels: list[int]) -> list[str]:
    runs: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, -100)
        if label == -100 and runs[-1]:
            runs.append([])
        elif label != -100:
            runs[-1].append(token)
    return [tokenizer.decode(run).strip() for run in runs if run]


def markers(tokenizer: Any, user: str = USER, bot: str = BOT) -> list[Marker]:
    parts = ((user, "instruction", False), (bot, "response", True))
    return [Marker(i, *around, begins) for p, n, begins in parts for i, around in _spellings(p, tokenizer, n).items()]


def stock(stories: Path, folder: Path, texts: list[str], kind: Any = trl.SFTTrainer, **changes: Any) -> Any:
    model, tokenizer = adapted(stories)
    data = Dataset.from_dict({"text": texts})
    return kind(model, config(folder, **changes), train_dataset=data, processing_class=tokenizer)


def test_chatml_markers_give_the_labels_of_the_template() -> None:
    tokenizer = byte_level(CHATML)
    document = one(chat("Hi", "Once upon", "and then?", "The end.", system="Tell."), tokenizer)
    labels = response_labels(
        document.input_ids, markers(tokenizer, "<|im_start|>user\n", "<|im_start|>assistant\n"), tokenizer
    )
    newlines = [i for i, (a, b) in enumerate(zip(labels, document.labels, strict=True)) if a != b]
    assert {tokenizer.decode([document.input_ids[i]]) for i in newlines} == {"\n"} and len(newlines) == 2


def test_a_newline_of_the_part_may_be_in_the_token_before() -> None:
    tokenizer = byte_level(None, (".Ċ",))
    user, bot = "\nUser:", "\nBot: "
    text = "User: a.\nBot: b. User: c.\nUser: d\nBot: e"  # "User:" within a line ends no answer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    labels = response_labels(ids, markers(tokenizer, user, bot), tokenizer)
    assert trained_text(tokenizer, ids, labels) == ["b. User: c.", "e"]


def test_a_newline_of_the_part_may_be_in_the_token_after() -> None:
    tokenizer = byte_level(CHATML, ("ĊĊ",))
    parts = markers(tokenizer, "<|im_start|>user\n", "<|im_start|>assistant\n")
    document = one(chat("Hi", "Once", "\nmore", "The end."), tokenizer)  # and the user's words must not be trained
    labels = response_labels(document.input_ids, parts, tokenizer)
    assert trained_text(tokenizer, document.input_ids, labels) == ["Once<|im_end|>", "The end.<|im_end|>"]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\nOnce<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert trained_text(tokenizer, ids, response_labels(ids, parts, tokenizer)) == ["Once<|im_end|>"]
    ids = tokenizer(text.replace("\n\n", " of "), add_special_tokens=False)["input_ids"]  # another part
    assert trained_text(tokenizer, ids, response_labels(ids, parts, tokenizer)) == []


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", [SFTTrainer, pytest.param(trl.SFTTrainer, marks=stock_loss_on_cpu)])
def test_trainers_learn_responses_only(kind: Any, packing: bool, stories: Path, tmp_path: Path) -> None:
    trainer = stock(stories, tmp_path, [TEXT, OTHER, SILENT], kind, packing=packing, max_length=128)
    if kind is trl.SFTTrainer and packing:  # two documents in a row: the second begins outside the first's answer
        assert len(trainer.train_dataset) < 3
        assert train_on_responses_only(trainer, USER, BOT) is trainer
    else:
        with pytest.warns(UserWarning, match="train_dataset: 1 of 3 documents has no response"):
            assert train_on_responses_only(trainer, USER, BOT) is trainer
    assert isinstance(trainer.train_dataset, PackedRows) == (packing and kind is SFTTrainer)
    found = [trained_text(trainer.processing_class, row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    answers = [answer.removesuffix("</s>").strip() for row in found for answer in row]
    assert sorted(answers) == ["Lily ran.", "Once upon", "The end."]
    trainer.args.max_steps = 1
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize("kind", [SFTTrainer, trl.SFTTrainer])
def test_evaluation_may_be_unpacked(kind: Any, stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    data = Dataset.from_dict({"text": [TEXT, OTHER]})
    args = config(tmp_path, eval_packing=False)
    trainer = kind(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    train_on_responses_only(trainer, USER, BOT)
    labels = [label for row in trainer.eval_dataset for label in row["labels"]]
    assert len(trainer.eval_dataset) == 2 and -100 in labels and max(labels) > 0


def test_what_is_found_nowhere_is_an_error(stories: Path, tmp_path: Path) -> None:
    trainer = stock(stories, tmp_path, [TEXT, OTHER], SFTTrainer)
    before = trainer.train_dataset
    with pytest.raises(DataError, match=r"train_dataset: no response_part with something to train .* of 2 documents"):
        train_on_responses_only(trainer, USER, "### Robot:\n")
    assert trainer.train_dataset is before
    with pytest.raises(ConfigError, match="have the same tokens"):
        train_on_responses_only(trainer, USER, USER)
    with pytest.raises(ConfigError, match="response_part is ' '"):
        train_on_responses_only(trainer, USER, " ")
    with pytest.raises(ConfigError, match=r"got no instruction_part and no response_part: .*'<\|im_start\|>user"):
        train_on_responses_only(trainer)
    with pytest.raises(ConfigError, match=r"got no response_part: "):
        train_on_responses_only(trainer, instruction_part=USER)
    assert pronghorn.train_on_responses_only is train_on_responses_only


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("llama-3.1", [f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant")]),
        ("qwen-3", ["<|im_start|>user\n", "<|im_start|>assistant\n"]),
        ("gemma", ["<start_of_turn>user\n", "<start_of_turn>model\n"]),
        ("mistral", ["[INST] ", "[/INST] "]),
        ("phi-4", ["<|im_start|>user<|im_sep|>", "<|im_start|>assistant<|im_sep|>"]),
        ("gpt-oss", [None, None]),  # only the last answer ends with the eos token
    ],
)
def test_the_chat_template_tells_the_parts(template: str, parts: list[str | None], stories: Path) -> None:
    assert list(template_parts(with_template(template, stories))) == parts


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # answers don't end
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",  # nothing begins them
        "{% for m in messages %}{{ m.role }}: {{ m.content | lower }}{{ eos_token }}{% endfor %}",
        "{{ raise_exception('none') }}",
        None,
    ],
)
def test_a_template_that_tells_no_parts_leaves_them_to_be_given(template: str | None, stories: Path) -> None:
    _, tokenizer = adapted(stories)
    tokenizer.chat_template = template
    assert template_parts(tokenizer) == (None, None)


@pytest.mark.parametrize("packing", [True, False])
def test_parts_may_be_left_out_where_the_template_tells_them(packing: bool, stories: Path, tmp_path: Path) -> None:
    model, _ = adapted(stories)
    tokenizer = with_template("chatml", stories)
    model.resize_token_embeddings(len(tokenizer))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]
    rows = Dataset.from_list([{"text": tokenizer.apply_chat_template(turns, tokenize=False)}] * 4)
    trainer = SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=rows, tokenizer=tokenizer)
    assert train_on_responses_only(trainer) is trainer
    [document, *_] = getattr(trainer.train_dataset, "documents", trainer.train_dataset)
    assert tokenizer.decode([label for label in document["labels"] if label != -100]).startswith("A cat.<|im_end|>")
