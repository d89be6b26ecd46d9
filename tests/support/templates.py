"""A tokenizer with a given template, and one with tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pronghorn.data.template import BUILT_IN
from support.chats import CHATML


def with_template(name: str, folder: Path) -> Any:
    """stories260k's tokenizer with the special tokens that the built-in template needs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = BUILT_IN[name]
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in template.needs if t != "</s>"]})
    template.apply(tokenizer)
    return tokenizer


CALLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>{% endfor %}"
)
