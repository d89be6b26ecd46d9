"""Turns of a conversation as data sets write them (OpenAI's and ShareGPT's way), read into Messages and checked.

Tool calls come out in the form that chat templates are written for: arguments as an object (some data sets hold them as
a string of JSON), tools as {"type": "function", "function": {...}} (some leave that wrapping out).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pronghorn.data.row_types import ROLES, Message
from pronghorn.data.values import keys, not_empty, parsed, show, string
from pronghorn.errors import DataError

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "tool": "tool",
}
"""ShareGPT's `from` to our role; what a `function_call` says is the call, as JSON."""

NAMES = ("name", "tool_call_id")
WEIGHTS = ("weight", "loss_weight")
MESSAGE_FORM = '{"role": ..., "content": ...}'


def openai_message(item: Any, at: str) -> Message:
    """{"role", "content"} and optionally "tool_calls", "name", "tool_call_id", "weight"; null is absent.

    The content may be null beside tool calls, and a list of parts {"type": "text", "text": str}, which are joined.
    """
    if not isinstance(item, dict):
        raise DataError(f"{at}: {show(item)}", f"write a message as {MESSAGE_FORM}")
    given = {key: value for key, value in item.items() if value is not None or key in ("role", "content")}
    allowed = {"role", "content", "tool_calls", *NAMES, *WEIGHTS}
    calls = given.get("tool_calls") or []
    if "role" not in given or not (calls or "content" in given) or not set(given) <= allowed:
        raise DataError(f"{at}: keys {keys(given)}", f"write a message as {MESSAGE_FORM}")
    role = given["role"]
    if role not in ROLES:
        raise DataError(f"{at}: role {show(role)}", f"use one of {', '.join(ROLES)}")
    _check_weight(given, role, at)
    content = "" if calls and given.get("content") is None else _content(given["content"], at)
    extra: dict[str, Any] = {key: string(given[key], key, at) for key in NAMES if key in given}
    if calls:
        if role != "assistant":
            raise DataError(f"{at}: tool_calls in a message of role {role}", "only the assistant calls tools")
        extra["tool_calls"] = _tool_calls(calls, at)
    return Message(role, content, extra)


def sharegpt_message(item: Any, at: str) -> Message:
    """{"from", "value"} and optionally "weight"; a `function_call` holds {"name", "arguments"} as JSON, or a list."""
    if not isinstance(item, dict) or not {"from", "value"} <= set(item) <= {"from", "value", *WEIGHTS}:
        found = f"keys {keys(item)}" if isinstance(item, dict) else show(item)
        raise DataError(f"{at}: {found}", 'write a turn as {"from": ..., "value": ...}')
    origin, value = item["from"], string(item["value"], "value", at)
    if not isinstance(origin, str) or origin not in SHAREGPT_ROLES:
        raise DataError(f"{at}: from {show(origin)}", f"use one of {', '.join(SHAREGPT_ROLES)}")
    _check_weight(item, SHAREGPT_ROLES[origin], at)
    if origin != "function_call":
        return Message(SHAREGPT_ROLES[origin], value)
    calls = parsed(value, "function_call", at)
    return Message("assistant", "", {"tool_calls": _tool_calls(calls if isinstance(calls, list) else [calls], at)})


def in_order(messages: Sequence[Message], at: str) -> tuple[Message, ...]:
    """The messages, if their order can be a conversation's: system first, then a user, no two users in a row, a tool's
    result after a call, nothing empty where the assistant speaks. Else DataError."""
    before: Message | None = None
    for number, message in enumerate(messages, 1):
        here, role = f"{at} message {number}", message.role
        after = before.role if before is not None else None
        if role == "system" and after is not None:
            raise DataError(f"{here}: a system message that is not the first", "move it to the front")
        if role == "assistant" and after in (None, "system"):
            raise DataError(
                f"{here}: an assistant message with no user message before it", "start with the user's turn"
            )
        if role == "user" and after == "user":
            raise DataError(f"{here}: two user messages in a row", "join them, or add the answer that is missing")
        if role == "tool" and not (after == "tool" or (before is not None and "tool_calls" in before.extra)):
            raise DataError(
                f"{here}: a tool's result with no call before it", "put the assistant's tool_calls before it"
            )
        if role == "assistant" and "tool_calls" not in message.extra:
            not_empty(message.content, "assistant message", here)
        before = message
    return tuple(messages)


def tools(value: Any, at: str) -> tuple[Mapping[str, Any], ...]:
    """A row's tools, a list or JSON of one, each {"name", ...} or wrapped as OpenAI does; null and "" are none."""
    if value is None or value == "":
        return ()
    items = parsed(value, "tools", at)
    if not isinstance(items, list):
        raise DataError(f"{at}: tools is {show(items)}, not a list", "give a list of functions")
    found = []
    for number, item in enumerate(items, 1):
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(f"{at} tool {number}: {show(item)} has no name", 'write a tool as {"name": ..., ...}')
        _encodable(function, f"{at} tool {number}")
        found.append({"type": "function", "function": function})
    return tuple(found)


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise DataError(f"{at}: tool_calls is {show(calls)}, not a list", "give a list of calls")
    found = []
    for number, call in enumerate(calls, 1):
        here = f"{at} tool call {number}"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise DataError(f"{here}: {show(call)}", 'write a call as {"name": ..., "arguments": {...}}')
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{here}: no name, but keys {keys(function)}", "name the function that is called")
        arguments = parsed(function.get("arguments"), "arguments", here)
        if not isinstance(arguments, dict):
            raise DataError(f"{here}: arguments is {show(arguments)}", "give the arguments as an object, {} for none")
        _encodable([name, arguments], here)
        identity = {"id": string(call["id"], "id", here)} if call.get("id") is not None else {}
        found.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def _encodable(value: Any, at: str) -> None:
    """DataError where a string anywhere in `value` can't be encoded: templates write it out as JSON."""
    string(json.dumps(value, ensure_ascii=False, default=str), "its JSON", at)


def _content(value: Any, at: str) -> str:
    """A string, or the joined text of parts; images and sounds are refused rather than left out."""
    if not isinstance(value, list):
        return string(value, "content", at)
    texts = []
    for part in value:
        texts.append(part.get("text", part.get("value")) if isinstance(part, dict) else None)
        if not isinstance(part, dict) or part.get("type") != "text":
            raise DataError(f"{at}: content part {show(part)}, not a text", "leave out what is not text")
    return "".join(string(text, "content", at) for text in texts)


def _check_weight(given: Mapping[str, Any], role: str, at: str) -> None:
    """Weights that say what is trained anyway are fine; others would be disregarded silently."""
    for key in WEIGHTS:
        if given.get(key) is not None and given[key] != (1 if role == "assistant" else 0):
            raise DataError(
                f"{at}: {key} {show(given[key])} on a message of role {role}",
                "weights can't be told apart yet: assistant turns are trained (1) and others not (0); end the "
                "conversation before this turn or delete the weight",
            )
