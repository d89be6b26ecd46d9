"""A running server with OpenAI's interface: vLLM, SGLang, llama-server, Ollama.

The interface itself knows no token ids, so each server's own way to them is tried, the closest to a real request first;
what answers is used from then on. The server's answers are a stranger's: a field that is missing or of another type is
"not served".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pronghorn.data.rows import Conversation
from pronghorn.errors import ConfigError, PronghornError, ServerError
from pronghorn.export.engine import Completion, NotServed, Refused, Scored
from pronghorn.export.engines.http import Server

STEPS = 12
"""Positions of a text that are asked for one by one, of servers that don't score a whole prompt."""
_LIKELIEST = 10
"""Tokens asked for at such a position."""
_ASKS_FOR_IDS = {"return_token_ids": True, "return_tokens": True, "verbose": True}
"""The token ids of what was generated: as vLLM is asked for them, and as llama-server is."""


class OpenAIServer:
    """A model of a server, as an engine."""

    def __init__(self, server: Server, model: str | None = None) -> None:
        """Ask the server for its models, and choose one.

        Raises:
            ServerError: it can't be reached, or isn't OpenAI-compatible.
            ConfigError: it serves no model of this name, or several and none was named.
        """
        self.server = server
        served = self._models()
        names = [entry["id"] for entry in served]
        if model is None and len(names) != 1:
            raise ConfigError(f"{server.url} serves {len(names)} models", f"name one: --model {' or '.join(names)}")
        if model is not None and model not in names:
            raise ConfigError(
                f"{server.url} serves no model {model!r}", f"use one of {', '.join(names)}, or start it with that name"
            )
        self.model = names[0] if model is None else model
        owner = next(str(entry.get("owned_by") or "") for entry in served if entry["id"] == self.model)
        self.product = " ".join(filter(None, (owner or "server", self._version())))
        self.name = f"{self.product} at {server.url}, {self.model}"
        self._tokenizes: Callable[[Conversation], list[int]] | None = None
        self._scores: Callable[[Sequence[int]], Mapping[int, Scored]] | None = None
        self._refuses_ids = False
        """Whether it refuses requests with fields that it doesn't know."""

    def _models(self) -> list[dict[str, Any]]:
        remedy = "give the address of an OpenAI-compatible server, e.g. http://127.0.0.1:8000"
        try:
            table = self.server.ask("/v1/models")
        except (NotServed, Refused) as error:
            raise ServerError(f"{self.server.url} is not OpenAI-compatible: {error.problem}", remedy) from None
        models = table.get("data") if isinstance(table, dict) else None
        if not isinstance(models, list) or not all(
            isinstance(m, dict) and isinstance(m.get("id"), str) for m in models
        ):
            raise ServerError(f"{self.server.url} is not OpenAI-compatible: /v1/models lists no models", remedy)
        return models

    def _version(self) -> str:
        """Return the server's version, if it tells one."""
        for path, key in (("/version", "version"), ("/api/version", "version"), ("/props", "build_info")):
            try:
                version = self.server.ask(path).get(key)
            except (PronghornError, AttributeError):
                continue
            if isinstance(version, str):
                return version[:40]
        return ""

    def tokenize(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation as the server renders it."""
        ways = (self._ids_of_request, self._ids_of_vllm, self._ids_of_llama_cpp)
        return self._first("token ids of a conversation", "_tokenizes", ways, conversation)

    def logprobs(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Return what the server says of a text's positions."""
        ways = (self._prompt_logprobs, self._echoed, self._step_by_step)
        return self._first("log-probabilities of a prompt's tokens", "_scores", ways, token_ids)

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        """Continue a text greedily."""
        try:
            table = self._generate("/v1/completions", {"prompt": list(token_ids), "max_tokens": max_tokens})
        except Refused as error:
            raise NotServed(f"the server takes no token ids as a prompt ({error.problem})", error.remedy) from None
        if _count(table, "prompt_tokens") not in (None, len(token_ids)):
            raise NotServed("the server takes token ids as a prompt for something else", "use a server that reads them")
        choice = _choice(table)
        return _completion(table, choice, choice.get("text"))

    def answer(self, conversation: Conversation, max_tokens: int) -> Completion:
        """Answer a conversation greedily, by the request that its users make."""
        table = self._generate("/v1/chat/completions", {**_request(conversation), "max_tokens": max_tokens})
        choice = _choice(table)
        message = choice.get("message")
        if not isinstance(message, dict) or message.get("tool_calls"):
            raise NotServed("the server answers with a call of a tool, not a text", "start it without a tool parser")
        return _completion(table, choice, f"{_thought(message)}{message.get('content') or ''}")

    def stream(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float
    ) -> Iterator[tuple[str, str]]:
        """Yield the pieces of an answer as they are made, of its reasoning and of its text."""
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        for event in self.server.stream("/v1/chat/completions", body):
            if isinstance(event, dict) and event.get("error"):
                raise ServerError(f"{self.server.url} fails: {str(event['error'])[:200]}", "look at the server's log")
            choices = event.get("choices") if isinstance(event, dict) else None
            choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
            delta = choice.get("delta") or choice.get("message")  # a message: the server doesn't stream
            if isinstance(delta, dict):
                yield _thought(delta), str(delta.get("content") or "")
            if choice.get("finish_reason"):  # some servers say nothing after it
                return

    def _generate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for a text and its token ids; for the text alone where a server refuses the fields that ask for ids."""
        if self._refuses_ids:
            return self._post(path, body)
        try:
            return self._post(path, {**body, **_ASKS_FOR_IDS})
        except Refused:
            table = self._post(path, body)
            self._refuses_ids = True
            return table

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        table = self.server.ask(path, {"model": self.model, "temperature": 0, **body})
        if not isinstance(table, dict):
            raise NotServed(f"{path} gives no object", "use an OpenAI-compatible server")
        return table

    def _first(self, what: str, chosen: str, ways: Sequence[Callable[[Any], Any]], asked: Any) -> Any:
        """Try ways until one is served, and keep to it; a refusal of the first ones may be of their extra fields."""
        own = getattr(self, chosen)
        if own is not None:
            return own(asked)
        refused: Refused | None = None
        for way in ways:
            try:
                result = way(asked)
            except NotServed:
                continue
            except Refused as error:
                refused = refused or error
                continue
            setattr(self, chosen, way)
            return result
        if refused is not None:
            raise refused
        raise NotServed(f"the server doesn't tell {what}", "use vLLM or llama-server to compare them")

    def _ids_of_request(self, conversation: Conversation) -> list[int]:
        """Ask for an answer of one token, and for the prompt's ids with it (vLLM)."""
        body = {**_request(conversation), "max_tokens": 1, "return_token_ids": True}
        return _ids(self._post("/v1/chat/completions", body).get("prompt_token_ids"))

    def _ids_of_vllm(self, conversation: Conversation) -> list[int]:
        """Ask for the ids of messages (vLLM before 0.10.2)."""
        return _ids(self._post("/tokenize", {**_request(conversation), "add_generation_prompt": True}).get("tokens"))

    def _ids_of_llama_cpp(self, conversation: Conversation) -> list[int]:
        """Ask for the text, and then for its ids (llama-server)."""
        text = self._post("/apply-template", _request(conversation)).get("prompt")
        if not isinstance(text, str):
            raise NotServed("/apply-template gives no prompt", "use llama-server")
        return _ids(
            self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True}).get("tokens")
        )

    def _prompt_logprobs(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Read `prompt_logprobs` (vLLM): for each position a table of ids, the text's own and the likeliest."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 1}
        table = self._post("/v1/completions", body)
        entries = _choice(table).get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(token_ids):
            raise NotServed("no prompt_logprobs", "use vLLM")
        try:
            scored = {}
            for index, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
                if index:
                    likely = {int(key): float(value["logprob"]) for key, value in entry.items()}
                    scored[index] = Scored(token, likely[token], max(likely, key=likely.__getitem__))
            return scored
        except (KeyError, TypeError, ValueError, AttributeError):
            raise NotServed("prompt_logprobs of another form", "use vLLM") from None

    def _echoed(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Let the prompt be echoed with log-probabilities (OpenAI's older interface, SGLang)."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "echo": True, "logprobs": 1}
        table = self._post("/v1/completions", {**body, "return_tokens_as_token_ids": True})
        try:
            given = _choice(table)["logprobs"]
            own, likeliest = given["token_logprobs"], given.get("top_logprobs") or []
            if len(own) < len(token_ids) or own[0] is not None:
                raise NotServed("the prompt isn't echoed", "use vLLM")
            scored = {}
            for index, token in enumerate(token_ids):
                if index:
                    likely = dict(likeliest[index]) if index < len(likeliest) and likeliest[index] else {}
                    key = max(likely, key=likely.__getitem__, default="")
                    first = token if likely and likely[key] <= own[index] else _id_of(key)
                    scored[index] = Scored(token, float(own[index]), first)
            return scored
        except (KeyError, TypeError, ValueError, AttributeError):
            raise NotServed("log-probabilities of another form", "use vLLM") from None

    def _step_by_step(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Ask for the likeliest tokens after some beginnings of the text (llama-server), and leave those out of which
        it tells nothing: a token that is part of a character."""
        steps = min(STEPS, len(token_ids) - 1)
        positions = sorted({1 + round(i * (len(token_ids) - 2) / max(steps - 1, 1)) for i in range(steps)})
        scored: dict[int, Scored] = {}
        for index in positions:
            body = {"prompt": list(token_ids[:index]), "max_tokens": 1, "logprobs": _LIKELIEST}
            table = self._post("/v1/completions", {**body, "return_tokens_as_token_ids": True})
            given = _choice(table).get("logprobs")
            if not given:
                continue
            likely = _likeliest(given)
            first = max(likely, key=likely.__getitem__)
            token = token_ids[index] if token_ids[index] in likely else first
            scored[index] = Scored(token, likely[token], first)
        if not scored:
            raise NotServed("the server tells no log-probabilities", "use vLLM or llama-server")
        return scored


def _request(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation as a request has it: arguments of calls are a string of JSON there."""
    messages = [message.as_dict() for message in conversation.messages]
    for message in messages:
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            texts = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
            message["tool_calls"] = [
                {**call, "function": text} for call, text in zip(message["tool_calls"], texts, strict=True)
            ]
    tools = {"tools": [dict(tool) for tool in conversation.tools], "tool_choice": "none"} if conversation.tools else {}
    return {"messages": messages, **tools}


def _choice(table: dict[str, Any]) -> dict[str, Any]:
    choices = table.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise NotServed("the server's answer has no choices", "use an OpenAI-compatible server")
    return choices[0]


def _thought(message: Mapping[str, Any]) -> str:
    """Return a message's reasoning: `reasoning` in Ollama and newer vLLM, `reasoning_content` in others."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def _completion(table: dict[str, Any], choice: dict[str, Any], text: Any) -> Completion:
    told = table.get("__verbose")  # llama-server's
    ids = choice.get("token_ids", told.get("tokens") if isinstance(told, dict) else None)
    token_ids = tuple(ids) if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
    stopped = choice.get("finish_reason") == "stop"
    return Completion(str(text or ""), stopped, token_ids, _count(table, "prompt_tokens"))


def _count(table: dict[str, Any], key: str) -> int | None:
    usage = table.get("usage")
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(isinstance(token, int) for token in value):
        raise NotServed("no token ids", "use vLLM or llama-server")
    return value


def _id_of(text: str) -> int | None:
    number = text.removeprefix("token_id:")
    return int(number) if number.isdecimal() and number != text else None


def _likeliest(given: Any) -> dict[int, float]:
    """Read the likeliest tokens of one position: llama-server's list of {id, logprob}, or OpenAI's older table."""
    try:
        if "content" in given:
            likely = {int(entry["id"]): float(entry["logprob"]) for entry in given["content"][0]["top_logprobs"]}
        else:
            pairs = ((_id_of(key), value) for key, value in given["top_logprobs"][0].items())
            likely = {token: float(value) for token, value in pairs if token is not None}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        likely = {}
    if not likely:
        raise NotServed("the server tells no log-probabilities of token ids", "use vLLM or llama-server")
    return likely
