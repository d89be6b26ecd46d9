"""Unsloth's names for chat templates: `get_chat_template`, `standardize_sharegpt` and `train_on_responses_only`."""

from __future__ import annotations

from typing import Any

from pronghorn.data.template import BUILT_IN
from pronghorn.errors import ConfigError, DataError
from pronghorn.train.responses import train_on_responses_only
from pronghorn.unsloth_names import elsewhere

__all__ = ["get_chat_template", "standardize_data_formats", "standardize_sharegpt", "train_on_responses_only"]

_SPELLINGS = {
    "llama-3": ("llama3", "llama-3.1", "llama-31", "llama-3.2", "llama-3.3"),
    "qwen-2.5": ("qwen2.5", "qwen25", "qwen-25"),
    "qwen-3": ("qwen3", "qwen-3-instruct", "qwen3-instruct"),
    "gemma": ("gemma2", "gemma-2", "gemma3", "gemma-3"),
}
"""What Unsloth calls the built-in templates."""
_ROLES = {"human": "user", "gpt": "assistant"}


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", mapping: Any = None, **options: Any) -> Any:
    """Give the tokenizer a built-in chat template, by our name or Unsloth's, and the token that ends its turns.

    Raises:
        ConfigError: a template that is not built in, one whose tokens the tokenizer lacks, or a `mapping` of keys.
    """
    if mapping and mapping.get("role", "role") != "role":
        raise ConfigError("get_chat_template with a mapping", "leave it out and call standardize_sharegpt(dataset)")
    name = chat_template
    if name not in BUILT_IN:
        name = next((ours for ours, others in _SPELLINGS.items() if name in others), name)
    if name not in BUILT_IN:
        own = "leave the call out: the tokenizer has a template of its own"
        remedy = own if getattr(tokenizer, "chat_template", None) else f"use one of {', '.join(BUILT_IN)}"
        raise ConfigError(f"chat_template {chat_template!r} is not built in", remedy)
    BUILT_IN[name].apply(tokenizer)
    return tokenizer


def standardize_sharegpt(dataset: Any, **options: Any) -> Any:
    """Return the data set with its `conversations` as messages of `role` and `content`; others come back as they are.

    Raises:
        DataError: a data set without `conversations` or `messages`.
    """
    columns = dataset.column_names
    if "conversations" not in columns:
        if "messages" in columns:
            return dataset
        raise DataError(f"no conversations among the columns {', '.join(columns)}", "leave standardize_sharegpt out")
    if len(dataset) and "role" in dataset[0]["conversations"][0]:
        return dataset
    return dataset.map(_messages, desc="Turns to messages")


standardize_data_formats = standardize_sharegpt
"""Unsloth's newer name."""


def _messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's turns as messages."""
    turns = row["conversations"]
    return {"conversations": [{"role": _ROLES.get(t["from"], t["from"]), "content": t["value"]} for t in turns]}


def __getattr__(name: str) -> Any:
    elsewhere(name)
    raise AttributeError(f"module 'pronghorn.chat_templates' has no attribute {name!r}")
