"""Turns of a conversation as data sets write them (OpenAI's and ShareGPT's way), read into Messages and checked.

Tool calls come out in the form that chat templates are written for: arguments as an object (some data sets hold them as
a string of JSON), tools as {"type": "function", "function": {...}} (some leave that wrapping out).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pronghorn.data.files import load_json
from pronghorn.data.media import REMEDY, TEXT_ONLY, media_in
from pronghorn.data.rows import ROLES, Message
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
WEIGHTS = ("weight", "loss_weight", "train")
"""What says whether an assistant's turn is supervised: 0 and false except it."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What data sets call that which the assistant thinks before it speaks."""


def read_turns(read: Callable[[Any, str], Message], items: Any, name: str, at: str) -> list[Message]:
    """Read a list of turns, each with `read` (`openai_message` or `sharegpt_message`); `at` says where they stand."""
    if not isinstance(items, list) or not items:
        remedy = "give a list of at least one message" + (
            ", not its text (json.loads)" if isinstance(items, str) else ""
        )
        raise DataError(f"{at}: {name} is {show(items)}", remedy)
    return [read(item, f"{at} message {number}") for number, item in enumerate(items, 1)]


def openai_message(item: Any, at: str) -> Message:
    """Read {"role", "content"} and optionally "tool_calls" (or OpenAI's earlier "function_call"), "name",
    "tool_call_id", "reasoning_content", "weight" or "train"; null is absent.

    The content may be null beside tool calls, and a list of parts {"type": "text", "text": str}, which are joined.
    """
    remedy = 'write a message as {"role": ..., "content": ...}'
    if not isinstance(item, dict):
        raise DataError(f"{at}: {show(item)}, no object", remedy)
    given = {key: value for key, value in item.items() if value is not None or key in ("role", "content")}
    calls = given.get("tool_calls") or [given[key] for key in ("function_call",) if given.get(key)]
    allowed = {"role", "content", "tool_calls", "function_call", *NAMES, *WEIGHTS, *REASONING}
    if "role" not in given or not (calls or "content" in given):
        raise DataError(f"{at}: keys {keys(given)}", remedy)
    if unknown := set(given) - allowed:
        known = ", ".join(key for key in given if key in allowed)
        raise DataError(f"{at}: keys {keys(sorted(unknown))}", f"delete them: {known} are what is read here")
    role, content = given["role"], given.get("content")
    role = "tool" if role == "function" else role
    if role not in ROLES:
        raise DataError(f"{at}: role {show(role)}", _other(role, ROLES))
    supervised = _supervised(given, role, at)
    text = "" if calls and content is None else _content(content, at)
    extra: dict[str, Any] = {key: string(given[key], key, at) for key in NAMES if key in given}
    if calls:
        if role != "assistant":
            raise DataError(f"{at}: tool_calls in a message of role {role}", "only the assistant calls tools")
        extra["tool_calls"] = _tool_calls(calls, at)
    reasoning = next((string(given[key], key, at) for key in REASONING if key in given), "")
    if reasoning.strip():
        if role != "assistant":
            raise DataError(f"{at}: reasoning in a message of role {role}", "only the assistant's is trained")
        extra["reasoning_content"] = reasoning
    return Message(role, text, extra, supervised)


_MEANT = {
    "developer": "system",
    **dict.fromkeys(("ai", "bot", "chatbot", "model", "gpt"), "assistant"),
    "human": "user",
}
"""Roles of others, and ours."""


def _other(role: Any, known: Iterable[str]) -> str:
    """Return what to do about a role that isn't one of those known."""
    meant = _MEANT.get(role.lower().strip()) if isinstance(role, str) else None
    return f"use one of {', '.join(known)}" + (f"; {meant} for this one" if meant else "")


def sharegpt_message(item: Any, at: str) -> Message:
    """Read {"from", "value"} and optionally "weight"; a `function_call` holds {"name", "arguments"} as JSON, or a
    list."""
    if not isinstance(item, dict) or not {"from", "value"} <= set(item) <= {"from", "value", *WEIGHTS, *REASONING}:
        what = f"keys {keys(item)}" if isinstance(item, dict) else f"{show(item)}, no object"
        raise DataError(f"{at}: {what}", 'write a turn as {"from": ..., "value": ...} and nothing else')
    origin, value = item["from"], string(item["value"], "value", at)
    if not isinstance(origin, str) or origin not in SHAREGPT_ROLES:
        raise DataError(f"{at}: from {show(origin)}", _other(origin, SHAREGPT_ROLES))
    turn: dict[str, Any] = {"role": SHAREGPT_ROLES[origin], "content": value}
    turn |= {key: given for key, given in item.items() if key not in ("from", "value")}
    if origin == "function_call":
        calls = _of_json(value, "function_call", at)
        turn |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return openai_message(turn, at)


def in_order(messages: Sequence[Message], at: str, first: int = 1) -> tuple[Message, ...]:
    """Return the messages, if their order can be a conversation's: system first, then a user, no two users in a row, a
    tool's result after a call, nothing empty where the assistant speaks. Raises DataError otherwise; the messages
    count from `first`."""
    previous, called = "", False
    for number, message in enumerate(messages, first):
        role, wrong = message.role, None
        if role == "system" and previous:
            wrong = "a system message that is not the first", "move it to the front"
        elif role == "assistant" and previous in ("", "system"):
            wrong = "an assistant message with no user message before it", "start with the user's turn"
        elif role == "user" and previous == "user":
            wrong = "two user messages in a row", "join them, or add the answer that is missing"
        elif role == "tool" and not (previous == "tool" or called):
            wrong = "a tool's result with no call before it", "put the assistant's tool_calls before it"
        if wrong is not None:
            raise DataError(f"{at} message {number}: {wrong[0]}", wrong[1])
        previous, called = role, "tool_calls" in message.extra
        if role == "assistant" and not called and message.supervised:
            not_empty(message.content, "assistant message", f"{at} message {number}")
    return tuple(messages)


def read_tools(value: Any, at: str) -> tuple[Mapping[str, Any], ...]:
    """Read a row's tools, a list or JSON of one, each {"name", ...} or wrapped as OpenAI does; null and "" are none."""
    if value is None or value == "":
        return ()
    items = _of_json(value, "tools", at)
    if not isinstance(items, list):
        raise DataError(f"{at}: tools is {show(items)}, not a list", "give a list of functions")
    tools = []
    for number, item in enumerate(items, 1):
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(f"{at} tool {number}: {show(item)} has no name", 'write a tool as {"name": ..., ...}')
        _check_encodable(function, f"{at} tool {number}")
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def string(value: Any, name: str, at: str) -> str:
    """Return `value`, if it is a string that can be encoded. Raises DataError otherwise."""
    if not isinstance(value, str):
        raise DataError(f"{at}: {name} is {show(value)}, not a string", f"give {name} as a string")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{at}: {name} holds half a surrogate pair, which is not text", "fix its \\u escapes")
    return value


def not_empty(value: Any, name: str, at: str) -> str:
    """Return `value`, if it is a string of more than white space. Raises DataError otherwise."""
    if not string(value, name, at).strip():
        raise DataError(f"{at}: an empty {name}", "fill it in or delete the row")
    return value


def keys(names: Iterable[str]) -> str:
    """Return the keys as errors list them: 'prompt', 'completion'."""
    return ", ".join(map(repr, names)) or "(none)"


def show(value: Any) -> str:
    """Return a value with its type, shortened: 'hello', int 3, null."""
    text = repr(value)
    text = text if len(text) <= 40 else text[:37] + "..."
    return "null" if value is None else text if isinstance(value, str) else f"{type(value).__name__} {text}"


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        not_text = ", not its text (json.loads)" if isinstance(calls, str) else ""
        raise DataError(f"{at}: tool_calls is {show(calls)}, not a list", f"give a list of calls{not_text}")
    read = []
    for number, call in enumerate(calls, 1):
        at_call = f"{at} tool call {number}"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise DataError(f"{at_call}: {show(call)}", 'write a call as {"name": ..., "arguments": {...}}')
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{at_call}: no name, but keys {keys(function)}", "name the function that is called")
        arguments = _of_json(function.get("arguments"), "arguments", at_call)
        if not isinstance(arguments, dict):
            raise DataError(
                f"{at_call}: arguments is {show(arguments)}", "give the arguments as an object, {} for none"
            )
        _check_encodable([name, arguments], at_call)
        identity = {"id": string(call["id"], "id", at_call)} if call.get("id") is not None else {}
        read.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return read


def _of_json(value: Any, name: str, at: str) -> Any:
    """Return `value`, or what it says where it is a string of JSON."""
    if not isinstance(value, str):
        return value
    string(value, name, at)
    try:
        return load_json(value)
    except ValueError as error:
        raise DataError(f"{at}: {name} {show(value)} is not valid JSON ({error})", f"write {name} as JSON") from error


def _check_encodable(value: Any, at: str) -> None:
    """Refuse a string anywhere in `value` that can't be encoded: templates write it out as JSON."""
    string(json.dumps(value, ensure_ascii=False, default=str), "its JSON", at)


def _content(value: Any, at: str) -> str:
    """Read a string, or the joined text of parts; images and sounds are refused rather than left out."""
    if not isinstance(value, list):
        return string(value, "content", at)
    texts = []
    for part in value:
        if isinstance(part, dict) and media_in([part.get("type")]):
            raise DataError(f"{at}: content part {part['type']!r}: {TEXT_ONLY}", REMEDY)
        if not isinstance(part, dict) or part.get("type") != "text":
            raise DataError(f"{at}: content part {show(part)}, not a text", "leave out what is not text")
        texts.append(string(part.get("text", part.get("value")), "content", at))
    return "".join(texts)


def _supervised(given: Mapping[str, Any], role: str, at: str) -> bool:
    """Read whether a turn is supervised, which only the assistant's can be; refuse weights other than 0 and 1."""
    supervised = role == "assistant"
    for key in WEIGHTS:
        weight = given.get(key)
        if weight is None:
            continue
        if weight not in (0, 1) or (weight and role != "assistant"):
            raise DataError(
                f"{at}: {key} {show(weight)} on a message of role {role}",
                "give the assistant's turns 1 (supervised) or 0 (not), and others 0 or no weight",
            )
        supervised = supervised and bool(weight)
    return supervised or role != "assistant"
