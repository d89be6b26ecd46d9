"""train_on_responses_only: labels by the markers' token ids, in both trainers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

import pronghorn
from pronghorn import SFTTrainer, train_on_responses_only
from pronghorn.data.packed_rows import PackedRows
from pronghorn.errors import ConfigError, DataError
from pronghorn.train.response_markers import Markers, response_labels
from pronghorn.train.template_parts import markers_of, template_parts
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


def markers(tokenizer: Any, user: str = USER, bot: str = BOT) -> Markers:
    return markers_of(user, bot, True, tokenizer)


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


@pytest.mark.parametrize("packing", [False, True])
def test_rows_may_have_a_format(packing: bool, stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    found = []
    for format in (None, "torch", "numpy"):
        data = Dataset.from_dict({"text": [TEXT, OTHER]}).with_format(format)
        trainer = SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=data, processing_class=tokenizer)
        train_on_responses_only(trainer, USER, BOT)
        rows = list(trainer.train_dataset)
        found.append([trained_text(tokenizer, row["input_ids"], row["labels"]) for row in rows])
    trainer.train()
    assert found[0] == found[1] == found[2] and len([answer for row in found[0] for answer in row]) == 3


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
    with pytest.raises(
        ConfigError,
        match=r"got no instruction_part and no response_part, and the chat template .*: .*'<\|im_start\|>user",
    ):
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


ROLES = (  # ChatML that keeps what each assistant calls, and writes tools' results under a role of their own
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
)
BESIDE = (  # as Mistral: tools before the last question, results and the answer behind them without a header
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ eos_token }}{% endif %}{% endfor %}"
)
WITHIN = (  # as Gemma 4: a call ends with the token that opens its result, and the turn goes on
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '[RESULT]' if messages[loop.index0 - 1].role == 'tool' }}"
    "{{ m.content }}[/RESULT]{% else %}"
    "{% if m.role == 'user' or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>{{ m.role }}\n{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}[RESULT]{% else %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
)
UNMARKED = WITHIN.replace("[/RESULT]", ")").replace("[RESULT]", "(")  # as Apertus, whose results end with "]"
BLOCKS = CHATML.replace(  # as Nemotron 3: an empty block where nothing was thought
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}",
)
OPENS = CHATML.replace("{{ m.role }}\n", "{{ m.role }}{{ '[CALL]' if m.tool_calls else '\n' }}").replace(
    "{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
)
TOOL_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": "asked"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "sys"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "found"},
    {"role": "assistant", "content": "said"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "bye"},
    {"role": "user", "content": "third"},
    {"role": "assistant", "content": "end"},
]


def with_control(template: str, eos: str = "<|im_end|>") -> Any:
    tokenizer = byte_level(template)
    tokens = [
        "[TOOLS]",
        "[/TOOLS]",
        "[INST]",
        "[/INST]",
        "[RESULT]",
        "[/RESULT]",
        "[CALL]",
        "<|im_start|>",
        "<|im_end|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens, "eos_token": eos})
    return tokenizer


def said_in(chat: list[dict[str, Any]], tokenizer: Any, parts: tuple[str, str] | None = None) -> list[str]:
    found = parts or template_parts(tokenizer)
    assert found[0] is not None and found[1] is not None
    tools = [{"type": "function", "function": {"name": "f", "description": "known", "parameters": {}}}]
    ids = tokenizer.apply_chat_template(chat, tools=tools, return_dict=True)["input_ids"]
    labels = response_labels(ids, markers_of(found[0], found[1], parts is not None, tokenizer), tokenizer)
    return trained_text(tokenizer, ids, labels)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("template", "eos", "end", "of_call"),
    [
        (ROLES, "<|im_end|>", "<|im_end|>", "<|im_end|>"),
        (ROLES, "<s>", "<|im_end|>", "<|im_end|>"),  # a base model's tokenizer
        (BESIDE, "<|im_end|>", "<|im_end|>", "<|im_end|>"),
        (WITHIN, "<|im_end|>", "<|im_end|>", "[RESULT]"),
    ],
    ids=["roles", "base", "beside", "within"],
)
def test_tool_results_are_not_trained_and_answers_behind_them_are(
    template: str, eos: str, end: str, of_call: str, given: bool
) -> None:
    tokenizer = with_control(template, eos)
    parts = ("[INST]", "[/INST]") if template is BESIDE else ("<|im_start|>user\n", "<|im_start|>assistant\n")
    if not given and eos != end:
        assert template_parts(tokenizer) == (None, None)
        return
    call, *answers = said_in(CHAT[1:], tokenizer, parts if given else None)
    assert "asked" in call and call.endswith(of_call) and "found" not in call
    assert answers == [f"{word}{end}" for word in ("said", "bye", "end")]
    call, *answers = said_in([*CHAT[1:4], CHAT[3], *CHAT[4:]], tokenizer, parts if given else None)
    assert "asked" in call and answers == [f"{word}{end}" for word in ("said", "bye", "end")]


def test_results_that_nothing_marks_are_refused(stories: Path, tmp_path: Path) -> None:
    model, _ = adapted(stories)
    tokenizer = with_control(UNMARKED)
    model.resize_token_embeddings(len(tokenizer))
    for turns, refused in ((CHAT[1:5], True), (CHAT[5:7], False)):
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        rows = Dataset.from_dict({"text": [text] * 2})
        trainer = SFTTrainer(model, config(tmp_path, max_length=128), train_dataset=rows, processing_class=tokenizer)
        if refused:
            with pytest.raises(DataError, match=r"train_dataset: tool results, .* can't be told from answers"):
                train_on_responses_only(trainer)
        else:
            train_on_responses_only(trainer)


@pytest.mark.parametrize(
    ("template", "more"), [(BLOCKS, {"reasoning_content": "hm"}), (OPENS, {"tool_calls": [TOOL_CALL]})]
)
def test_reasoning_and_calls_begin_with_less_than_answers(template: str, more: dict[str, Any]) -> None:
    thought, plain = said_in([*CHAT[5:8], {**CHAT[8], **more}], with_control(template))[::-1]
    assert (
        plain == "bye<|im_end|>" and thought.endswith("<|im_end|>") and {"hm", "asked"} & {*re.findall(r"\w+", thought)}
    )


def test_answers_whose_end_is_not_trained_are_told(stories: Path, tmp_path: Path) -> None:
    model, _ = adapted(stories)
    tokenizer = with_control(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '' if loop.last else eos_token }}{% endfor %}"
    )
    model.resize_token_embeddings(len(tokenizer))
    rows = Dataset.from_list([{"messages": CHAT[7:]}] * 2)
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=rows, processing_class=tokenizer)
    with pytest.warns(UserWarning, match=r"no answer ends with a special token, .*: end answers with <\|im_end\|>"):
        train_on_responses_only(trainer)
    with pytest.raises(ConfigError, match=r"begins with <\|im_end\|>, the end of answers"):
        train_on_responses_only(trainer, "<|im_end|><|im_start|>user\n", "<|im_start|>assistant\n")


def test_given_parts_train_no_other_answers() -> None:
    tokenizer = with_control(BLOCKS)
    parts = ("<|im_start|>user\n", "<|im_start|>assistant\n<think></think>")
    assert said_in([*CHAT[5:8], {**CHAT[8], "reasoning_content": "hm"}], tokenizer, parts) == ["bye<|im_end|>"]
    parts = ("<|im_start|>user\n", "<|im_start|>assistant\n<think>hm</think>")
    assert said_in([*CHAT[1:8], {**CHAT[8], "reasoning_content": "hm"}], tokenizer, parts) == ["end<|im_end|>"]


def test_an_end_that_only_a_last_turn_lacks_is_trained() -> None:
    """As Apriel's, whose calls end with the token of all turns only when more follows."""
    template = (
        "{% for m in messages %}{{ '[RESULT]' if m.role == 'tool' else '[INST]' if m.role == 'user' else '[/INST]' }}"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ '' if loop.last else '<|im_end|>' }}{% endfor %}"
    )
    for eos in ("<|im_end|>", "<s>"):
        call, *answers = said_in(CHAT[1:8], with_control(template, eos), ("[INST]", "[/INST]"))
        assert call.endswith("<|im_end|>") and answers == ["said<|im_end|>", "bye<|im_end|>"]


def test_a_template_that_writes_results_like_answers_trains_their_ends() -> None:
    """As Llama 2's, which knows no tools."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert said_in(CHAT[5:], with_control(template)) == ["bye<|im_end|>", "end<|im_end|>"]
    base = with_control(template.replace("eos_token", "'<|im_end|>'"), "<s>")
    assert said_in(CHAT[5:], base, ("[INST]", "[/INST]")) == ["bye<|im_end|>", "end<|im_end|>"]
