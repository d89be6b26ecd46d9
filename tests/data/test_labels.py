"""Which turns are trained, what splitting keeps, chosen templates, and the proof by tokenising prefixes again."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from pronghorn.config.recipe import Recipe
from pronghorn.data import labels as labels_module
from pronghorn.data.labels import Edges, Rendered, label_rows, token_ranges, verify
from pronghorn.data.overflow import fit_dataset, outcomes
from pronghorn.data.packing import Document
from pronghorn.data.rows import Message, PromptCompletion, TextDocument
from pronghorn.data.template import BUILT_IN, find_template
from pronghorn.errors import ConfigError, DataError
from pronghorn.train.run import run
from support.chats import CHATML, WHERE, byte_level, chat, one, texts, trained, written
from support.overflow import as_dataset, fit, fit_reference
from support.templates import CALLS, with_template

SYSTEM_IN_USER = ("gemma", "mistral")


def test_only_the_last_turn_is_trained() -> None:
    tokenizer = byte_level(CHATML)
    row = chat("a", "first", "b", "second")
    assert trained(one(row, tokenizer, loss_on="last"), tokenizer) == ["second<|im_end|>"]
    assert one(row, tokenizer, loss_on="last").input_ids == one(row, tokenizer).input_ids
    assert trained(one(chat("a", "first", "b"), tokenizer, loss_on="last"), tokenizer) == ["first<|im_end|>"]
    for row_ in (PromptCompletion("ab", " b", **WHERE), TextDocument("ab", **WHERE)):
        assert one(row_, byte_level(None), loss_on="last") == one(row_, byte_level(None))


def test_the_last_turn_needs_only_its_own_beginning() -> None:
    """A template that rewrites earlier answers serves `last` and is refused for every turn."""
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}"))
    row = chat("A", "first", "B", "second")
    assert trained(one(row, tokenizer, loss_on="last"), tokenizer) == ["second<|im_end|>"]
    with pytest.raises(DataError, match=r"message 2: .* 'FIRST<"):
        one(row, tokenizer)


documents = st.lists(st.booleans(), min_size=1, max_size=60).map(
    lambda on: Document([*range(len(on) + 1)], [-100, *(i + 1 if o else -100 for i, o in enumerate(on))], "f line 1")
)


@settings(deadline=None)
@given(st.lists(documents, min_size=1, max_size=4), st.integers(2, 20))
def test_a_split_keeps_every_label_and_token(given_: list[Document], length: int) -> None:
    if not any(document.supervised for document in given_):
        return
    given_ = [document for document in given_ if document.supervised]
    given_ = sorted(given_, key=lambda document: len(document) > length)  # what is cut stands at the end
    left, fitted = fit(given_, length, "split")
    assert all(0 < len(piece) <= length and piece.supervised for piece in left)
    labels = [label for piece in left for label in piece.labels if label != -100]
    assert labels == [label for document in given_ for label in document.labels if label != -100]
    pieces = sum(-(-(len(d) - 1) // (length - 1)) for d in given_)
    assert len(left) == pieces - fitted.dropped_pieces
    assert fitted.split == sum(len(document) > length for document in given_)
    assert (fitted.dropped, fitted.truncated) == (0, 0)


@settings(deadline=None, max_examples=50)
@given(st.lists(documents, min_size=1, max_size=6), st.integers(2, 20), st.sampled_from(["drop", "truncate", "split"]))
def test_overflow_is_what_it_is_document_by_document(given_: list[Document], length: int, overflow: Any) -> None:
    expected, count = fit_reference(given_, length, overflow)
    if expected:
        left, fitted = fit(given_, length, overflow)
        assert (left, asdict(fitted)) == (expected, count)
    long = any(len(document) > length for document in given_)
    assert {rule: asdict(done) for rule, done in outcomes(as_dataset(given_), length).items()} == (
        {rule: fit_reference(given_, length, rule)[1] for rule in ("drop", "truncate", "split")} if long else {}
    )


def test_cut_documents_are_never_all_in_memory(tmp_path: Path) -> None:
    """As Python's lists they took 150 bytes a token: 10 GB of long texts would have taken 400."""
    tokens = range(1000, 3000)
    whole = as_dataset([Document([*tokens], [-100, *tokens[1:]], "f line 1")] * 300)
    tracemalloc.start()
    try:
        fitted, dataset = fit_dataset(whole, 100, "split", tmp_path)
        outcomes(whole, 100)
        assert tracemalloc.get_traced_memory()[1] < 10 * 300 * 2000
    finally:
        tracemalloc.stop()
    assert (fitted.documents, len(dataset)) == (300 * 21, 300 * 21)
    assert list(tmp_path.iterdir()) == []  # a killed run leaves nothing


def test_pieces_overlap_by_one_token_and_name_their_document() -> None:
    long = Document([1, 2, 3, 4, 5, 6, 7], [-100, -100, -100, 4, 5, 6, 7], "f line 9")
    left, fitted = fit([long], 3, "split")
    assert left == [
        Document([3, 4, 5], [-100, 4, 5], "f line 9 piece 2"),
        Document([5, 6, 7], [-100, 6, 7], "f line 9 piece 3"),
    ]
    assert fitted.dropped_pieces == 1
    with pytest.raises(ConfigError, match="max_seq_length 1 < 2"):
        fit([long], 1, "split")


@pytest.mark.matrix(5)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), st.booleans())
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_train_exactly_the_answers(
    name: str, shared: Path, turns: list[tuple[str, str]], system: bool
) -> None:
    tokenizer = with_template(name, shared / "models" / "stories260k")
    row = chat(*(text for turn in turns for text in turn), system="Be brief." if system else None)
    end = BUILT_IN[name].end
    lead, earlier = {  # Mistral's prompt ends before the space; Qwen 3 has an empty block in the last turn alone
        "mistral": (" ", f" {{}}{end}"),
        "qwen-3": ("<think>\n\n</think>\n\n", f"{{}}{end}"),
        "gpt-oss": ("<|channel|>final<|message|>", "<|channel|>final<|message|>{}<|end|>"),
    }.get(name, ("", f"{{}}{end}"))
    last = f"{lead}{turns[-1][1]}{end}"
    expected = [earlier.replace("{}", answer) for _, answer in turns[:-1]]
    assert trained(one(row, tokenizer), tokenizer) == [*expected, last]
    assert trained(one(row, tokenizer, loss_on="last"), tokenizer) == [last]
    assert tokenizer.eos_token == end


WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
    "mistral": "<s>[INST] S\n\na[/INST] b</s>",
}
WRITTEN["qwen-2.5"] = WRITTEN["chatml"]
WRITTEN["phi-4"] = WRITTEN["chatml"].replace(">\n", ">").replace("\n", "<|im_sep|>")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_built_in_templates_write(name: str, shared: Path) -> None:
    tokenizer = with_template(name, shared / "models" / "stories260k")

    def written(system: str | None) -> str:
        messages = [{"role": m.role, "content": m.content} for m in chat("a", "b", system=system).messages]
        return tokenizer.apply_chat_template(messages, tokenize=False)

    assert written("S") == WRITTEN[name]
    bare = WRITTEN[name].replace("S\n\n", "") if name in SYSTEM_IN_USER else WRITTEN[name]
    if name == "qwen-2.5":
        bare = bare.replace("\nS<", "\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<")
    elif name in ("chatml", "phi-4"):
        bare = bare[bare.index("<|im_start|>user") :]
    elif name == "llama-3":
        bare = bare.replace("<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>", "")
    assert written(None) == bare
    if name in ("qwen-2.5", "mistral"):
        return
    tooled = replace(chat("a", "b"), tools=({"type": "function", "function": {"name": "f"}},))
    with pytest.raises(DataError, match="the chat template refuses the conversation"):
        label_rows([tooled], tokenizer)


def test_a_template_is_chosen_by_name_or_file(tmp_path: Path) -> None:
    assert find_template(None) is None
    tokenizer = byte_level(None)
    with pytest.raises(ConfigError) as caught:
        BUILT_IN["llama-3"].apply(tokenizer)
    for token in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "bos_token"):
        assert token in str(caught.value)
    assert tokenizer.chat_template is None
    chosen = find_template("chatml")
    assert chosen is not None
    chosen.apply(tokenizer)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == chosen.text

    (tmp_path / "own.j2").write_text(CHATML, encoding="utf-8-sig")  # as Windows' editors save it
    own = find_template(str(tmp_path / "own.j2"))
    assert own is not None and own.text == CHATML
    own.apply(tokenizer)
    assert trained(one(chat("a", "b"), tokenizer), tokenizer) == ["b<|im_end|>"]


def test_bad_templates_are_refused(tmp_path: Path) -> None:
    for choice, says in (
        (
            "llama",
            f"'llama' is neither a built-in template nor a .jinja file: set it to {', '.join(BUILT_IN)} or the path",
        ),
        ("no.jinja", "'no.jinja' does not exist"),
        (str(tmp_path / "empty.jinja"), "is empty"),
        (str(tmp_path / "latin.jinja"), "is not UTF-8"),
    ):
        (tmp_path / "empty.jinja").write_text(" \n")
        (tmp_path / "latin.jinja").write_bytes(b"\xe9")
        with pytest.raises(ConfigError) as caught:
            find_template(choice)
        assert says in str(caught.value)
    with pytest.raises(ConfigError, match="the chat template's line 2: "):
        label_rows([chat("a", "b")], byte_level("a\n{% if %}"))


def test_the_system_prompt_begins_conversations_without_one() -> None:
    tokenizer = byte_level(CHATML)
    assert one(chat("a", "b"), tokenizer, system_prompt="S") == one(chat("a", "b", system="S"), tokenizer)
    own = chat("a", "b", system="Own")
    assert one(own, tokenizer, system_prompt="S") == one(own, tokenizer)
    row = PromptCompletion("a", "b", **WHERE)
    assert one(row, tokenizer, system_prompt="S") == one(chat("a", "b", system="S"), tokenizer)
    for silent, template in ((TextDocument("a", **WHERE), CHATML), (row, None)):
        assert not label_rows([silent], byte_level(template), system_prompt="S").conversations


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}


def test_tool_calls_are_trained_as_the_template_writes_them() -> None:
    messages = (
        Message("user", "a"),
        Message("assistant", "", {"tool_calls": [CALL]}),
        Message("tool", "rain"),
        Message("assistant", "It rains."),
    )
    row = replace(chat("a"), messages=messages)
    call, said = trained(one(row, byte_level(CALLS)), byte_level(CALLS))
    assert call.startswith("<call>") and call.endswith("</call><|im_end|>") and "Bonn" in call
    assert said == "It rains.<|im_end|>"
    with pytest.raises(DataError, match="line 7 message 2: the chat template leaves the tool call's 'weather' out"):
        one(row, byte_level(CHATML))
    mute = byte_level(CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"))
    with pytest.raises(DataError, match="line 7 message 2: the chat template leaves the tool call's 'Well' out"):
        one(replace(row, messages=(messages[0], replace(messages[1], content="Well"))), mute)
    with pytest.raises(DataError, match="line 7: the chat template leaves the tool 'weather' out"):
        one(replace(row, tools=(CALL,)), byte_level(CALLS.replace("tojson", "length")))


def test_control_tokens_of_a_call_are_the_templates() -> None:
    """Mistral writes [TOOL_CALLS], LFM2 <|tool_call_start|>: special tokens, which the message itself may not hold."""
    tokenizer = byte_level(CALLS.replace("<call>", "<|im_start|>"))
    messages = (Message("user", "a"), Message("assistant", "Well", {"tool_calls": [CALL]}))
    (call,) = trained(one(replace(chat("a"), messages=messages), tokenizer), tokenizer)
    assert call.startswith('Well<|im_start|>{"type"') and call.endswith("</call><|im_end|>")
    told = {"type": "function", "function": {"name": "weather", "arguments": {"city": "<|im_end|>"}}}
    for content, made in (("<|im_end|>", CALL), ("", told)):
        messages = (Message("user", "a"), Message("assistant", content, {"tool_calls": [made]}))
        with pytest.raises(DataError, match=r"line 7: the assistant's text holds the control token '<\|im_end\|>'"):
            one(replace(chat("a"), messages=messages), tokenizer)


def test_added_tokens_that_control_nothing_may_be_said() -> None:
    tokenizer, said = byte_level(CALLS), "<think><unk>b"
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens({"unk_token": "<unk>", "additional_special_tokens": ["<|im_start|>", "|>"]})
    assert trained(one(chat("a", said), tokenizer), tokenizer) == [f"{said}<|im_end|>"]
    messages = (Message("user", "a"), Message("assistant", said, {"tool_calls": [CALL]}))
    (call,) = trained(one(replace(chat("a"), messages=messages), tokenizer), tokenizer)
    assert call.startswith(f'{said}<call>{{"type"') and call.endswith("</call><|im_end|>")


def test_one_token_for_the_unknown_and_the_end_ends_turns() -> None:
    """GPT-2's tokenizer has one for both, and makes it of no unknown text."""
    tokenizer = byte_level(CHATML)
    tokenizer.unk_token = tokenizer.eos_token
    document = one(chat("a<|im_end|>", "b", "c", "d"), tokenizer)
    assert trained(document, tokenizer) == ["b<|im_end|>", "d<|im_end|>"]
    assert document.input_ids.count(tokenizer.eos_token_id) == 4  # the user's is ordinary text
    with pytest.raises(DataError, match=r"line 7: the assistant's text holds the control token '<\|im_end\|>'"):
        one(chat("a", "b<|im_end|>c"), tokenizer)


def test_a_call_whose_lead_only_a_last_turn_has() -> None:
    """Qwen3 writes an empty reasoning block before the last of a conversation's turns."""
    lead = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    tokenizer = byte_level(CALLS.replace("{{ m.content }}", lead))
    call = Message("assistant", "", {"tool_calls": [CALL]})
    messages = (Message("user", "a"), call, Message("tool", "rain"), Message("assistant", "It rains."))
    first, second = trained(one(replace(chat("a"), messages=messages), tokenizer), tokenizer)
    assert first.startswith('<call>{"type"') and first.endswith("</call><|im_end|>")
    assert second == "<think>\n\n</think>\n\nIt rains.<|im_end|>"
    (alone,) = trained(one(replace(chat("a"), messages=messages[:2]), tokenizer), tokenizer)
    assert alone == f"<think>\n\n</think>\n\n{first}"


def test_reasoning_before_calls_alone_is_a_field_there() -> None:
    """Gemma 4's first templates render the reasoning of calls, and none of texts."""
    field = "{% if m.tool_calls and m.reasoning_content %}<thought>{{ m.reasoning_content }}</thought>{% endif %}"
    tokenizer = byte_level(CALLS.replace("{{ m.content }}", field + "{{ m.content }}"))
    call = Message("assistant", "", {"tool_calls": [CALL], "reasoning_content": "Ask."})
    messages = (Message("user", "a"), call, Message("tool", "rain"))
    said = Message("assistant", "It rains.", {"reasoning_content": "Told."})
    first, second = trained(one(replace(chat("a"), messages=(*messages, said)), tokenizer), tokenizer)
    assert first.startswith('<thought>Ask.</thought><call>{"type"')
    assert second == "<think>\nTold.\n</think>\n\nIt rains.<|im_end|>"


def test_a_lead_of_control_tokens_is_trained() -> None:
    """gpt-oss names the channel of an answer before its text."""
    lead = "{% if m.role == 'assistant' %}<|channel|>final<|message|>{% endif %}{{ m.content }}"
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", lead))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>", "<|im_start|>"]})
    turns = [f"<|channel|>final<|message|>{text}<|im_end|>" for text in ("b", "d")]
    assert trained(one(chat("a", "b", "c", "d"), tokenizer), tokenizer) == turns
    with pytest.raises(DataError, match=r"line 7: the assistant's text holds the control token '<\|channel\|>'"):
        one(chat("a", "b<|channel|>"), tokenizer)


def test_several_templates_and_none_by_default_are_an_error() -> None:
    tokenizer = byte_level(None)
    tokenizer.chat_template = {"tool_use": CHATML}
    with pytest.raises(DataError, match=r"line 7: the chat template fails on the conversation .*no default"):
        one(chat("a", "b"), tokenizer)


def test_a_prefix_with_other_tokens_by_itself_is_refused() -> None:
    """GPT-2's pattern gives "\\n\\n" at a text's end one token, and two before a word."""
    tokenizer = byte_level(None, ("ĊĊ",))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    row = PromptCompletion("x\n\n", "yes", **WHERE)
    with pytest.raises(DataError, match=r"line 7: the text up to the boundary .* has other tokens by itself"):
        one(row, tokenizer)
    with pytest.raises(DataError, match="has other tokens by itself"):  # others of the set have it, unchecked
        label_rows([row], tokenizer, on_bad=lambda error: pytest.fail("dropped"))
    assert one(row, tokenizer, verify_rows=0).supervised == 4
    good = one(PromptCompletion("x", "\n\nyes", **WHERE), tokenizer)
    assert trained(good, tokenizer) == ["\n\nyes<|im_end|>"]


@pytest.mark.parametrize("off", [(1, 0), (-1, 0), (0, -2)])
def test_labels_that_are_off_by_a_token_are_refused(off: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any) -> list[tuple[int, int]]:
        return [(first + off[0], end + off[1]) for first, end in token_ranges(*args)]

    monkeypatch.setattr(labels_module, "token_ranges", shifted)
    with pytest.raises(DataError, match="has other tokens by itself"):
        one(chat("a", "bcd"), byte_level(CHATML))


def test_an_end_of_turn_that_is_white_space_or_plain() -> None:
    tokenizer = byte_level(CHATML.replace("<|im_end|>", "\t"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["\t"]})
    assert trained(one(chat("a", "b"), tokenizer), tokenizer) == ["b\t"]
    tokenizer = byte_level(CHATML.replace("<|im_end|>", "~"))
    tokenizer.eos_token = "~"  # a plain token of the vocabulary
    assert trained(one(chat("a", "b"), tokenizer), tokenizer) == ["b~"]


def test_an_end_of_turn_of_two_tokens() -> None:
    tokenizer = byte_level(CHATML.replace("<|im_end|>", "<|end_response|><|im_end|>"))  # as Command R7B's
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_response|>"]})
    ended = [f"{text}<|end_response|><|im_end|>" for text in "bd"]
    assert trained(one(chat("a", "b", "c", "d"), tokenizer), tokenizer) == ended
    tokenizer.eos_token = "<s>"
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", "<|im_end|><|im_start|>")  # which begins the next turn
    assert trained(one(chat("a", "b"), tokenizer), tokenizer) == ["b<|im_end|>"]


def test_edges_go_by_the_texts_order() -> None:
    backend = byte_level(None, ("Ġb",), trim_offsets=True).backend_tokenizer
    edges = Edges(backend.encode("a b", add_special_tokens=False))
    asked = ((0, 0), (0, 1), (1, 0), (1, 2), (3, 0))  # no token covers the space
    assert [edges.first_past(character, start) for character, start in asked] == [0, 1, 1, 2, 2]
    pair = backend.encode("abc", "d", add_special_tokens=False)  # whose second part counts from 0 again
    with pytest.raises(DataError, match="f line 1: the tokenizer's offsets do not follow the text"):
        verify(Rendered("abcd", [], True, "f line 1"), pair.ids, [], Edges(pair), lambda texts: [])


def test_of_a_long_conversation_the_first_turns_and_the_last_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 2,000 turns took 5 minutes and 11 GB a row: what stands before them grows with their square."""
    tokenizer, parts = byte_level(CHATML), list[str]()
    row = chat(*(f"turn {number}" for number in range(100)))
    whole = one(row, tokenizer)
    ids_of = labels_module.Labeller.ids_of
    monkeypatch.setattr(labels_module, "CHARACTERS_PER_CALL", 3000)
    monkeypatch.setattr(
        labels_module.Labeller, "ids_of", lambda self, row, texts: parts.extend(texts) or ids_of(self, row, texts)
    )
    assert one(row, tokenizer) == whole
    assert sum(map(len, parts[:-2])) <= 3000 < sum(map(len, parts))
    assert parts[0].endswith("assistant\n") and parts[1].endswith("turn 1") and parts[-1].endswith("turn 99")


def test_a_template_that_trains_only_its_scaffolding_is_refused() -> None:
    with pytest.raises(DataError, match="line 7: the chat template leaves the assistant's text out"):
        one(chat("a", "bcd"), byte_level(CHATML.replace("m.content", "''")), loss_on="all")
    messages = (*chat("a").messages, Message("assistant", "", {"tool_calls": [CALL]}), Message("assistant", "bcd"))
    with pytest.raises(DataError, match="line 7: the chat template leaves the assistant's text out"):
        one(replace(chat("a"), messages=messages), byte_level(CHATML.replace("m.content", "''")), loss_on="all")
    with pytest.raises(DataError, match="message 2: the assistant's text is empty: nothing but the template's own"):
        one(chat("a", " "), byte_level(CHATML))


def test_a_run_saves_the_template_that_it_was_trained_with(shared: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% else %}[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}"
    )
    rows = [{"prompt": "Tell.", "completion": "Once upon a time there was a girl. " * 8}] * 4
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)).replace('. "', '."'))
    table: dict[str, dict[str, Any]] = {
        "model": {"name": str(shared / "models" / "stories260k"), "max_seq_length": 64},
        "data": {
            "train": tmp_path / "train.jsonl",
            "chat_template": str(template),
            "system_prompt": "Be brief.",
            "overflow": "split",
        },
        "train": {"output": tmp_path / "run", "max_steps": 1},
        "report": {"html": False},
    }
    record = run(Recipe.model_validate(table), Console(quiet=True))
    assert record.packing["split"] == 4 and record.packing["documents"] > 4
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    assert saved.chat_template == template.read_text()
    table["data"]["chat_template"] = "llama"
    table["train"]["output"] = tmp_path / "other"
    with pytest.raises(ConfigError, match=r"data\.chat_template 'llama' is neither a built-in template"):
        run(Recipe.model_validate(table), Console(quiet=True))


def test_conversations_do_not_see_what_the_template_set_before() -> None:
    """The compiled template is used again: top-level variables, macros and the generation prompt must not stay."""
    state = (
        "{% if seen is defined %}SEEN{% endif %}{% if messages | length > 1 %}{% set seen = 1 %}"
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% endif %}"
        "{% if twice is defined %}{{ twice('=') }}{% endif %}{{ tools is none }}{{ documents is none }}"
    )
    tokenizer = byte_level(state + CHATML)
    for row in (chat("a", "b", "c", "d"), chat("a"), chat("e", "f")):
        for before in (None, 1):
            told = [message.as_dict() for message in row.messages[:before]]
            expected = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=before is not None)
            assert written(row, tokenizer, before) == expected
    with pytest.raises(DataError, match="line 7: the chat template refuses the conversation"):
        written(chat("a"), byte_level("{{ raise_exception('no') }}"))
