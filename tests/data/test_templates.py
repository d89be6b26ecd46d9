"""Built-in templates beside their originals, as TRL ships those, on conversations with tools and reasoning."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pronghorn.data.labels import label_rows
from pronghorn.data.rows import Conversation, Message
from pronghorn.data.template import _OPENED, BUILT_IN, _last_two
from pronghorn.errors import DataError
from support.chats import CHATML, WHERE, byte_level, one, trained, written
from support.templates import with_template

ORIGINALS = {"llama-3.1": "llama3_1", "qwen-2.5": "qwen2_5", "qwen-3": "qwen3", "gpt-oss": "gptoss"}
TEXTS = {"llama-3": "llama3", "gemma": "gemma3", **ORIGINALS}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": f"Tell {name}.", "parameters": parameters}}
    for name, parameters in (
        (
            "weather",
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Which <city> it's."},
                    "days": {"type": "integer", "default": 1},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "hours": {"type": "array", "items": {"type": "number"}, "nullable": True},
                    "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}},
                },
                "required": ["city"],
            },
        ),
        ("time", {}),
    )
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A message's extra of one call."""
    return {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def thinking(text: str, **extra: Any) -> dict[str, Any]:
    return {"reasoning_content": text, **extra}


CHATS: dict[str, tuple[Message, ...]] = {
    "plain": (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")),
    "system": (Message("system", "S"), Message("user", "a"), Message("assistant", "b")),
    "a question": (Message("system", "S"), Message("user", "a")),
    "a call": (
        Message("user", "Rain in Köln?"),
        Message("assistant", "", call("weather", city="Köln", days=2)),
        Message("tool", '{"rain": true}'),
        Message("assistant", "It rains."),
        Message("user", "Thanks"),
        Message("assistant", "Bye"),
    ),
    "a pending call": (Message("user", "a"), Message("assistant", "", call("time"))),
    "reasoning": (
        Message("user", "a"),
        Message("assistant", "b", thinking("One.")),
        Message("user", "c"),
        Message("assistant", "d", thinking("Two.\nThree.")),
    ),
    "reasoned calls": (
        Message("user", "a"),
        Message("assistant", "", thinking("Ask.", **call("time"))),
        Message("tool", "noon"),
        Message("assistant", "", thinking("Again.", **call("weather", city="x"))),
        Message("tool", "sun"),
        Message("assistant", "Fine", thinking("Enough.")),
    ),
}


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("answer", [False, True], ids=["whole", "prompt"])
@pytest.mark.parametrize("said", CHATS)
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_built_in_template_writes_what_its_original_does(
    name: str, said: str, answer: bool, tools: tuple[Any, ...], shared: Path
) -> None:
    tokenizer = with_template(name, shared / "models" / "stories260k")
    original = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    original.chat_template = (files("trl") / "chat_templates" / f"{ORIGINALS[name]}.jinja").read_text()
    row = Conversation(CHATS[said], tools, **WHERE)
    messages = [message.as_dict() for message in row.messages]
    expected: Any = original.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=answer
    )
    ours: Any = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=answer
    )
    if (name, said, answer) == ("gpt-oss", "reasoned calls", False):  # its prompts keep what the whole leaves out
        call_only = "<|start|>assistant to=functions."
        for thought in ("Ask.", "Again."):
            reasoned = f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>"
            assert ours.count(reasoned + call_only) == 1
            ours = ours.replace(reasoned, "")
    lines = [line for line in expected.split("\n") if not line.startswith("Current date: ")]
    assert ours == "\n".join(lines)


@pytest.mark.parametrize("system", ["", " S\n"], ids=["empty", "spaces"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_built_in_template_writes_system_texts_as_its_original_does(name: str, system: str, shared: Path) -> None:
    tokenizer = with_template(name, shared / "models" / "stories260k")
    original = (files("trl") / "chat_templates" / f"{TEXTS[name]}.jinja").read_text()
    messages = [message.as_dict() for message in (Message("system", system), *CHATS["plain"])]
    for tools in (None, list(TOOLS)) if name in ORIGINALS else (None,):
        ours, theirs = (
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=text)
            for text in (None, original)
        )
        assert ours == "\n".join(line for line in theirs.split("\n") if not line.startswith("Current date: "))


def test_mistral_writes_tools_calls_and_results_between_its_tokens(shared: Path) -> None:
    tokenizer = with_template("mistral", shared / "models" / "stories260k")
    messages = (
        Message("user", "a"),
        Message("assistant", "", {"tool_calls": [{"id": "123456789", **call("time")["tool_calls"][0]}]}),
        Message("tool", "noon", {"tool_call_id": "123456789"}),
        Message("assistant", "It is noon."),
    )
    text = written(Conversation(messages, ({"type": "function", "function": {"name": "time"}},), **WHERE), tokenizer)
    assert text == (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "time"}}][/AVAILABLE_TOOLS][INST] a[/INST]'
        '[TOOL_CALLS] [{"name": "time", "arguments": {}, "id": "123456789"}]</s>'
        '[TOOL_RESULTS] {"content": "noon", "call_id": "123456789"}[/TOOL_RESULTS] It is noon.</s>'
    )


CALLED = {
    "llama-3.1": '{"name": "time", "parameters": {}}<|eot_id|>',
    "qwen-2.5": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>',
    "qwen-3": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>',
    "mistral": '[TOOL_CALLS]  [{"name": "time", "arguments": {}}]</s>',  # the second space is stories260k's
    "gpt-oss": " to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
}


@pytest.mark.parametrize("name", CALLED)
def test_each_built_in_template_with_tools_supervises_calls_and_answers(name: str, shared: Path) -> None:
    tokenizer = with_template(name, shared / "models" / "stories260k")
    messages = (
        Message("user", "a"),
        Message("assistant", "", call("time")),
        Message("tool", "noon"),
        Message("assistant", "It is noon."),
    )
    (document,) = label_rows([Conversation(messages, TOOLS, **WHERE)], tokenizer).documents
    first, second = trained(document, tokenizer)
    assert first == CALLED[name]
    assert second.endswith(f"It is noon.{BUILT_IN[name].end}")


def test_a_template_without_tools_refuses_them(shared: Path) -> None:
    for name in sorted(set(BUILT_IN) - set(CALLED)):
        tokenizer = with_template(name, shared / "models" / "stories260k")
        with pytest.raises(DataError, match="this template renders no tools"):
            label_rows([Conversation(CHATS["plain"], TOOLS, **WHERE)], tokenizer)


def test_a_template_that_opens_the_reasoning_of_every_turn_needs_no_opening_in_the_text() -> None:
    """Its prompt is the beginning of what it writes, and the text begins behind it."""
    opens = CHATML.replace("{{ m.content }}", "{{ '<think>\\n' if m.role == 'assistant' }}{{ m.content }}")
    tokenizer = byte_level(opens.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    said = "Two pairs.</think>4"
    row = Conversation((Message("user", "2 + 2?"), Message("assistant", said)), **WHERE)
    assert trained(one(row, tokenizer), tokenizer) == [f"{said}<|im_end|>"]


OPENING = {
    "qwen3_5_think": "Hm.\n</think>\n\nb",
    "qwen3_5_nothink": "<think>\nHm.\n</think>\n\nb",
    "qwen3_6": "Hm.\n</think>\n\nb",
    "nemotron_3_nano": "Hm.\n</think>\nb",
    "deepseek_r1_distill": None,
}
"""Templates whose generation prompt opens reasoning, or leaves it empty, with what a turn with reasoning trains; None
for one that renders no reasoning."""


@pytest.mark.parametrize("name", OPENING)
def test_turns_without_reasoning_after_a_prompt_that_opens_it(name: str) -> None:
    """The last turn has an empty block, whose newlines are one token where the prompt ends with one of them; earlier
    turns have none, or one, too. Text and calls alone are trained."""
    original = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = byte_level(original, ("ĊĊ",))
    tokenizer.add_tokens(["<think>", "</think>"])
    if name.startswith("deepseek"):
        tokenizer.add_special_tokens({"eos_token": "<｜end▁of▁sentence｜>"})
    end, reasoned = tokenizer.eos_token, OPENING[name]
    assert trained(one(Conversation(CHATS["plain"], **WHERE), tokenizer), tokenizer) == [f"b{end}", f"d{end}"]
    assert trained(one(Conversation(CHATS["plain"][:2], **WHERE), tokenizer), tokenizer) == [f"b{end}"]
    asked = Message("user", "a")
    if reasoned is None:
        return
    thought = (asked, Message("assistant", "b", thinking("Hm.")))
    assert trained(one(Conversation(thought, **WHERE), tokenizer), tokenizer) == [f"{reasoned}{end}"]
    both = label_rows([Conversation((*thought, *CHATS["plain"][2:]), **WHERE)], tokenizer).documents
    assert [turn for document in both for turn in trained(document, tokenizer)] == [f"{reasoned}{end}", f"d{end}"]
    calls = (asked, Message("assistant", "", call("time", at="now")), Message("tool", "noon"))
    for chat in (calls[:2], (*calls, Message("assistant", "Noon."))):
        first, *others = trained(one(Conversation(chat, TOOLS, **WHERE), tokenizer), tokenizer)
        assert first.startswith("<tool_call>") and first.split("</tool_call>")[1].strip() == end
        assert others == [f"Noon.{end}"] * (len(chat) == 4)


LED = {  # generation prompts that end before what the model writes first: a recipient, an empty block
    "recipient": (">>>", ">>>all\n", "all\n"),
    "block": ("", "<think></think>", "<think></think>"),
    "channel": ("", "<|im_start|>reply\n", "<|im_start|>reply\n"),
    "closed": ("<think>", "</think>", ""),  # and that open reasoning, which a turn without any only closes
    "a line": ("<think>\n", "<think>\n\n</think>\n", ""),
    "thought": ("<|channel>thought\n<channel|>", "", ""),
    "thinking": ("<|START_THINKING|><|END_THINKING|>", "<|im_start|>", "<|im_start|>"),
}


@pytest.mark.parametrize(("prompt", "written", "lead"), LED.values(), ids=LED)
def test_what_the_template_writes_behind_its_generation_prompt_is_the_models(
    prompt: str, written: str, lead: str
) -> None:
    template = CHATML.replace("{{ m.content }}", f"{{{{ {written!r} if m.role == 'assistant' }}}}{{{{ m.content }}}}")
    tokenizer = byte_level(template.replace("assistant\n{% endif %}", f"assistant\n{prompt}{{% endif %}}"))
    document = one(Conversation(CHATS["plain"], **WHERE), tokenizer)
    assert trained(document, tokenizer) == [f"{lead}b<|im_end|>", f"{lead}d<|im_end|>"]
    own = (Message("user", "pronghorn"), Message("assistant", "a pronghorn"))  # what finds the lead may be said
    assert trained(one(Conversation(own, **WHERE), tokenizer), tokenizer) == [f"{lead}a pronghorn<|im_end|>"]


@pytest.mark.parametrize("before", ["", "a", "<think>\n", "<|im_end|><a"])
@pytest.mark.parametrize(
    "end",
    [
        *("", "b", "<think>", "<think>\n\n</think>\n", "</think>", "<|channel>thought\n<channel|>", "<channel|>"),
        *("<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>"),
    ],
)
def test_what_a_prompt_opens_is_looked_for_at_its_end_alone(before: str, end: str) -> None:
    """A conversation of thousands of turns is else searched whole once a turn."""
    prompt = before + end
    begin = _last_two(prompt)
    assert prompt.count("<", begin) <= 2
    everywhere, there = _OPENED.search(prompt), _OPENED.search(prompt, begin)
    assert (everywhere and everywhere.span()) == (there and there.span())


def test_a_system_message_that_moves_splits_the_conversation() -> None:
    """Mistral Nemo's stands before the last question, so that each answer has its own beginning."""
    template = (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST]"
        "{{ messages[0].content if loop.last or loop.index == loop.length - 1 else '' }}{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_level(template)
    row = Conversation((Message("system", "S"), *CHATS["plain"]), **WHERE)
    documents = label_rows([row], tokenizer).documents
    assert [tokenizer.decode(document.input_ids) for document in documents] == [
        "[INST]Sa[/INST]b<|im_end|>",
        "[INST]a[/INST]b<|im_end|>[INST]Sc[/INST]d<|im_end|>",
    ]
    assert [trained(document, tokenizer) for document in documents] == [["b<|im_end|>"], ["d<|im_end|>"]]


def test_parallel_calls_of_which_the_template_writes_one_are_refused() -> None:
    one_call = "{% for c in (m.tool_calls or [])[:1] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", "{{ m.content }}" + one_call))
    both = {"tool_calls": call("time", at=1)["tool_calls"] + call("time", at=2)["tool_calls"]}
    row = Conversation((Message("user", "a"), Message("assistant", "", both)), **WHERE)
    with pytest.raises(DataError, match="message 2: the chat template leaves the tool call's 'time' out"):
        label_rows([row], tokenizer)
