"""Unsloth's names for chat templates: `get_chat_template`, `standardize_sharegpt` and `train_on_responses_only`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.data.template import BUILT_IN
from pronghorn.errors import ConfigError, DataError
from pronghorn.train.responses import train_on_responses_only
from pronghorn.unsloth_names import elsewhere, refuse_arguments

__all__ = ["get_chat_template", "standardize_data_formats", "standardize_sharegpt", "train_on_responses_only"]

_SPELLINGS = {
    "llama-3": ("llama3",),
    "llama-3.1": ("llama-31", "llama-3.2", "llama-3.3"),
    "qwen-2.5": ("qwen2.5", "qwen25", "qwen-25"),
    "qwen-3": ("qwen3",),
    "phi-4": ("phi4",),
    "gpt-oss": ("gptoss",),
    "gemma": ("gemma2", "gemma-2", "gemma3", "gemma-3"),
}
"""What Unsloth calls the built-in templates. Its qwen3-instruct is none: that model writes no block of reasoning."""
_ROLES = {"human": "user", "input": "user", "gpt": "assistant", "output": "assistant"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}


def get_chat_template(
    tokenizer: Any, chat_template: str = "chatml", mapping: Any = None, map_eos_token: bool = True, **unsupported: Any
) -> Any:
    """Give the tokenizer a built-in chat template, by our name or Unsloth's, and the token that ends its turns.

    Raises:
        ConfigError: a template that is not built in, one whose tokens the tokenizer lacks, or a `mapping` of keys.
        UnsupportedError: another argument, e.g. a `system_message`.
    """
    refuse_arguments(unsupported, "get_chat_template", ("chat_template", "mapping", "map_eos_token"))
    if not map_eos_token:
        raise ConfigError(
            "get_chat_template with map_eos_token=False", "leave it out: generation stops at the token that ends turns"
        )
    if mapping and any(theirs != ours for ours, theirs in mapping.items()):
        raise ConfigError("get_chat_template with a mapping", "leave it out and call standardize_sharegpt(dataset)")
    if not hasattr(tokenizer, "apply_chat_template") or not isinstance(chat_template, str):
        raise ConfigError(
            f"get_chat_template({type(tokenizer).__name__}, {type(chat_template).__name__})",
            "give the tokenizer and a template's name; a template of one's own: tokenizer.chat_template = TEXT",
        )
    name = chat_template
    if name not in BUILT_IN:
        name = next((ours for ours, others in _SPELLINGS.items() if name in others), name)
    if name not in BUILT_IN:
        own = "leave the call out: the tokenizer has a template of its own"
        remedy = own if getattr(tokenizer, "chat_template", None) else f"use one of {', '.join(BUILT_IN)}"
        raise ConfigError(f"chat_template {chat_template!r} is not built in", remedy)
    BUILT_IN[name].apply(tokenizer)
    return tokenizer


def standardize_sharegpt(
    dataset: Any,
    aliases_for_system: Sequence[str] = (),
    aliases_for_user: Sequence[str] = (),
    aliases_for_assistant: Sequence[str] = (),
    **unsupported: Any,
) -> Any:
    """Return the data set with the turns of its `conversations` (or `messages`) as messages of `role` and `content`;
    one whose first rows are such comes back as it is.

    Args:
        aliases_for_system, aliases_for_user, aliases_for_assistant: what turns are `from`, beside ShareGPT's names.
    Raises:
        ConfigError: no data set.
        DataError: a data set without `conversations` or `messages`, or turns of a role that is not known.
        UnsupportedError: others than Unsloth's `tokenizer`, `batch_size` and `num_proc`, which decide nothing.
    """
    asked = {name: value for name, value in unsupported.items() if name not in ("tokenizer", "batch_size", "num_proc")}
    known = ("aliases_for_system", "aliases_for_user", "aliases_for_assistant")
    refuse_arguments(asked, "standardize_sharegpt", known)
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):
        raise ConfigError(
            f"standardize_sharegpt got a {type(dataset).__name__}",
            'give a datasets.Dataset: load_dataset("json", data_files=FILE, split="train")',
        )
    column = next((name for name in ("conversations", "messages") if name in columns), None)
    if column is None:
        raise DataError(f"no conversations among the columns {', '.join(columns)}", "leave standardize_sharegpt out")
    roles = dict(_ROLES)
    for role, aliases in (
        ("system", aliases_for_system),
        ("user", aliases_for_user),
        ("assistant", aliases_for_assistant),
    ):
        roles |= dict.fromkeys(aliases, role)
    first = dataset.select(range(min(len(dataset), 10)))[column]  # of so many Unsloth looks at, too
    if all(_is_message(turn, roles) for turns in first for turn in turns or ()):
        return dataset
    return dataset.map(_messages, fn_kwargs={"column": column, "roles": roles}, desc="Turns to messages")


def _is_message(turn: dict[str, Any], roles: dict[str, str]) -> bool:
    """Tell whether a turn is a message already; a role that isn't known is the template's to know."""
    return {"role", "content"} <= turn.keys() and roles.get(turn["role"], turn["role"]) == turn["role"]


standardize_data_formats = standardize_sharegpt
"""Unsloth's newer name."""


def _messages(row: dict[str, Any], column: str, roles: dict[str, str]) -> dict[str, Any]:
    """Return a row's turns as messages."""
    messages = []
    for turn in row[column] or ():
        role, content = ("role" if "role" in turn else "from"), ("content" if "content" in turn else "value")
        if turn.get(role) not in roles or content not in turn:
            raise DataError(
                f"a turn with the keys {', '.join(turn)}, {role} {turn.get(role)!r}",
                "call its keys from and value, and name the role: standardize_sharegpt(dataset, "
                "aliases_for_user=[...], aliases_for_assistant=[...])",
            )
        rest = {key: value for key, value in turn.items() if key not in (role, content)} if role == "role" else {}
        messages.append({"role": roles[turn[role]], "content": turn[content], **rest})
    return {column: messages}


def __getattr__(name: str) -> Any:
    elsewhere(name)
    raise AttributeError(f"module 'pronghorn.chat_templates' has no attribute {name!r}")
