"""Chat templates: the same text as transformers renders, and limits for those that never end or write gigabytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pronghorn.data import sandbox
from pronghorn.data.rows import Conversation, Message, PromptCompletion
from pronghorn.data.template import BUILT_IN, find_template
from pronghorn.errors import ConfigError, DataError
from support import huge_templates
from support.chats import CHATML, INST, QWEN3_LIKE, byte_level, chat, written
from support.data_files import read_rows

MANY_FEATURES = (
    "{% macro turn(m, n=2) %}<{{ m.role * n }}>{{ caller() if caller else m.content }}{% endmacro %}"
    "{% set ns = namespace(text='', seen=[]) %}{% set block %}{{ 'a' | upper }}{% endset %}{{ block }}"
    "{% for m in messages if m.content %}{% if loop.index > 6 %}{% break %}{% endif %}"
    "{% set ns.text = ns.text ~ m.role ~ '=' ~ loop.index ~ ';' %}{% set ns.seen = ns.seen + [m.role] %}"
    "{{ turn(m) }}{% call turn(m, n=1) %}{{ '%s|%05d' % (m.content, 2 ** 3 * loop.index) }}{% endcall %}"
    "{{ '{:>8}'.format(m.role) ~ '{0}'.format(1) }}{{ m.content.replace('a', 'bb') | trim | indent(2) }}"
    "{{ ', '.join(m.content.split()) }}{{ m.content.split() | join('-') }}{{ m | tojson(indent=2) }}"
    "{% generation %}{{ m.content | center(20) }}{% endgeneration %}{% else %}none{% endfor %}{{ ns.text }}"
    "{{ ns.seen | unique | sort | list }}{{ range(3) | map('string') | join }}"
    "{{ messages | map(attribute='role') | list }}"
    "{{ (10 // 3) - 1 }}{{ undefined_name ~ '' }}{{ tools is none }}{{ documents is none }}{{ 2.5 | round }}"
    "{% for x in [[1, [2]], [3]] recursive %}({{ loop(x) if x is iterable else x }}){% endfor %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'x' ~ (1 ~ 2) }}"
    "{{ add_generation_prompt }}"
)


@pytest.mark.parametrize(
    "template", [MANY_FEATURES, CHATML, INST, QWEN3_LIKE, BUILT_IN["mistral"].text], ids=lambda text: text[:30]
)
@pytest.mark.parametrize("name", ["gsm8k/test.jsonl", "llamafactory/v1_sft_demo.jsonl"])
def test_conversations_render_as_transformers_renders_them(
    name: str, template: str, shared: Path, stories: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.chat_template = template
    columns = {"prompt": "question", "completion": "answer"} if "gsm8k" in name else {}
    compared = 0
    for row in read_rows(shared / "data" / name, columns)[:60]:
        if isinstance(row, PromptCompletion):
            messages = (Message("user", row.prompt), Message("assistant", row.completion))
            row = Conversation(messages, path=row.path, line=row.line)
        assert isinstance(row, Conversation)
        for before in (None, *range(1, len(row.messages), 2)):
            told = [message.as_dict() for message in row.messages[:before]]
            expected = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=before is not None)
            assert written(row, tokenizer, before) == expected
            compared += 1
    assert compared >= 60


def test_tools_render_as_transformers_renders_them() -> None:
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"n": 10**400}}},)
    tokenizer = byte_level({"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML})  # type: ignore[arg-type]
    row = Conversation(chat("a", "b").messages, tools, path="x.jsonl", line=1)
    told = [message.as_dict() for message in row.messages]
    expected = tokenizer.apply_chat_template(told, tools=list(tools), tokenize=False)
    assert written(row, tokenizer) == expected
    assert '"add"' in expected


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro m() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) %}{{ m() }}{% endfor %}",
    "macros that call each other twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "filters over filters": "{% for a in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_templates_that_do_not_end_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.MOST_SECONDS == 20 and sandbox.MOST_STEPS == 1_000_000
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 1)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"line 7: the chat template (takes longer than 1 s|goes on after 1,000,000)"):
        written(chat("a", "b"), byte_level(template + CHATML))
    assert time.monotonic() - began < 5


@pytest.fixture(scope="module")
def huge() -> dict[str, tuple[str, int]]:
    """Make every template of HUGE write, in a process without threads: tracemalloc has crashed beside some."""
    given = [sys.executable, "-W", "ignore", huge_templates.__file__]
    return json.loads(subprocess.run(given, check=True, capture_output=True, text=True, timeout=300).stdout)


@pytest.mark.parametrize("name", huge_templates.HUGE)
def test_templates_that_make_gigabytes_are_stopped(name: str, huge: dict[str, tuple[str, int]]) -> None:
    assert sandbox.MOST_CHARACTERS == 2**26 and sandbox.MOST_MADE == 2**30
    error, most = huge[name]
    assert re.search(r"line 7: the chat template (makes|writes|pads|formats).*: set data\.chat_", error)
    assert most < 2**29


FAILING = {
    "divides by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "recurses": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "asks for too long a range": ("{% for a in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    "includes a file": ("{% include 'x' %}", "fails"),
    "looks at Python": ("{{ messages.__class__.__mro__ }}", "refuses"),
    "has a key that is missing": ("{{ messages[9].content }}", "refuses"),
    "writes lorem ipsum": ("{{ lipsum(99999) }}", "refuses"),
    "says a long thing": ("{{ raise_exception('a' * 99999) }}", "refuses"),
}


@pytest.mark.parametrize(("template", "error"), FAILING.values(), ids=FAILING)
def test_templates_that_fail_are_errors_of_the_row(template: str, error: str) -> None:
    with pytest.raises(DataError, match=f"line 7: the chat template .*{error}") as caught:
        written(chat("a", "b"), byte_level(template + CHATML))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ["x" * 5000 + ".jinja", "a\0.jinja"])
def test_a_template_file_that_can_not_be_read_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*(can't be read|does not exist)") as caught:
        find_template(name)
    assert len(str(caught.value)) < 500
