"""A tokenizer with a given template, and one with tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pronghorn.data.template import BUILT_IN
from support.chats import CHATML, byte_level


def with_template(name: str, folder: Path) -> Any:
    """stories260k's tokenizer with the special tokens that the built-in template needs."""
    template = BUILT_IN[name]
    # stories260k's puts a space behind each special token, of which gpt-oss has some within a turn
    tokenizer = byte_level(None) if name == "gpt-oss" else AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in template.needs if t != "</s>"]})
    template.apply(tokenizer)
    return tokenizer


CALLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>{% endfor %}"
)
