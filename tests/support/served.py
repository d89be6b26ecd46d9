"""A run that answers and stops, and a server with OpenAI's interface that is really a tiny transformers model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from pronghorn.config.recipe import Recipe
from pronghorn.data.rows import Conversation, Message
from pronghorn.data.template import render
from pronghorn.export.engine import Completion
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.train.chat import load_chat
from pronghorn.train.run import run

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '[' + m.role + ']' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(scope="session")
def answering_run(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """A finished run on stories260k that answers every question with one sentence, and ends it."""
    folder = tmp_path_factory.mktemp("answering")
    questions = ("Who?", "What is this?", "Why is the sky blue?", "And then?", "Name three colours.")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "A cat sat on a mat."}]}
        for q in questions
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 8))
    (folder / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "t.jinja").write_text(TEMPLATE)
    recipe = {
        "model": {"name": str(shared / "models" / "stories260k"), "max_seq_length": 256},
        "adapter": {"r": 8},
        "data": {
            "train": folder / "train.jsonl",
            "eval": folder / "eval.jsonl",
            "chat_template": str(folder / "t.jinja"),
        },
        "train": {"output": folder / "run", "max_steps": 60, "learning_rate": 5e-3, "warmup_steps": 0},
        "memory": {"gradient_checkpointing": False},
        "report": {"html": False},
    }
    run(Recipe.model_validate(recipe), Console(quiet=True))
    return folder / "run"


class Remembering(TransformersEngine):
    """An engine that computes once what tests ask it again and again. Its model is never changed in place."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: dict[tuple[Any, ...], Any] = {}

    def distribution(self, token_ids: Sequence[int]) -> Tensor:
        key = self.model, tuple(token_ids)
        if key not in self.known:
            self.known[key] = super().distribution(token_ids)
        found: Tensor = self.known[key]
        return found

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        key = self.model, self.tokenizer, self.stops, tuple(token_ids), max_tokens
        if key not in self.known:
            self.known[key] = super().complete(token_ids, max_tokens)
        found: Completion = self.known[key]
        return found


def trained(folder: Path) -> TransformersEngine:
    """The model of a run or an export, as a reference."""
    session = load_chat(folder)
    model = session.models.get("trained") or session.models["model"]
    return Remembering(model, session.tokenizer, "the run", session.models.get("base"))


@dataclass
class Stub:
    """What a stub server serves, and what is wrong with it."""

    engine: TransformersEngine
    serves: frozenset[str] = frozenset({"prompt_logprobs", "return_token_ids", "tokens as prompts"})
    """Of these, "echo", "apply-template", "steps" and "verbose"."""
    name: str = "tiny"
    doubled_bos: bool = False
    broken: bool = False
    """Whether texts have lost their characters, as those of bytes that are none."""
    silent_after: frozenset[int] = frozenset()
    """Tokens after which no log-probabilities are told one by one: what follows is part of a character."""
    knows: frozenset[str] | None = None
    """The fields of a request, if others are refused."""
    status: int | None = None
    """Of every answer but the list of models."""
    body: bytes | None = None
    """Every answer, if it isn't JSON."""
    streamed: tuple[str, bytes] | None = None
    """The media type and the bytes of an answer that is asked for as a stream, and then the connection's end."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The Authorization of each request."""

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": self.name, "owned_by": "stub"}]}
        return {"version": "1.0"} if path == "/version" else None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        unknown = body.keys() - (body.keys() if self.knows is None else self.knows)
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        if path == "/v1/chat/completions":
            ids = self.ids(body)
            return self.answer(ids, body, "message")
        if path == "/v1/completions" and "tokens as prompts" in self.serves:
            return self.answer(body["prompt"], body, "text")
        if path == "/apply-template" and "apply-template" in self.serves:
            conversation = self.conversation(body)
            tools = conversation.tools
            return {"prompt": render(conversation.messages, tools, self.engine.tokenizer, "x", answer=True)}
        if path == "/tokenize" and "apply-template" in self.serves:
            return {"tokens": self.engine.tokenizer(body.get("content", ""), add_special_tokens=False)["input_ids"]}
        return None

    def ids(self, body: dict[str, Any]) -> list[int]:
        ids = self.engine.tokenize(self.conversation(body))
        return [self.engine.tokenizer.bos_token_id, *ids] if self.doubled_bos else ids

    def conversation(self, body: dict[str, Any]) -> Conversation:
        messages = []
        for message in json.loads(json.dumps(body["messages"])):
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            role, content = message.pop("role"), message.pop("content")
            messages.append(Message(role, content, message))
        return Conversation(tuple(messages), tuple(body.get("tools") or ()), path="x", line=1)

    def answer(self, ids: list[int], body: dict[str, Any], kind: str) -> Any:
        done = self.engine.complete(ids, body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if done.stopped else "length"}
        text = "\ufffd" * len(done.text) if self.broken else done.text
        choice[kind] = {"role": "assistant", "content": text} if kind == "message" else text
        table = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if body.get("return_token_ids") and "return_token_ids" in self.serves:
            choice["token_ids"] = done.token_ids
            if kind == "message":
                table["prompt_token_ids"] = ids
        if body.get("return_tokens") and body.get("verbose") and "verbose" in self.serves:
            table["__verbose"] = {"tokens": done.token_ids}
        if kind == "text":
            choice |= self.scores(ids, body, done.token_ids or ())
        return table

    def scores(self, ids: list[int], body: dict[str, Any], made: tuple[int, ...]) -> dict[str, Any]:
        if body.get("prompt_logprobs") and "prompt_logprobs" in self.serves:
            said = self.engine.logprobs(ids)
            rows = self.engine.distribution(ids)
            entries = [
                {str(t): {"logprob": rows[i - 1][t].item()} for t in (s.token, s.first)} for i, s in said.items()
            ]
            return {"prompt_logprobs": [None, *entries]}
        if body.get("echo") and "echo" in self.serves:
            said = self.engine.logprobs(ids)
            rows = self.engine.distribution(ids)
            own = [None, *(s.logprob for s in said.values())]
            top = [{f"token_id:{s.first}": rows[i - 1][s.first].item()} for i, s in said.items()]
            return {"logprobs": {"token_logprobs": [*own, -1.0], "top_logprobs": [None, *top, {}]}}
        if body.get("logprobs") and "steps" in self.serves:
            if ids[-1] in self.silent_after:
                return {"logprobs": None}
            row = self.engine.distribution([*ids, 0])[-1]
            likely = [{"id": int(t), "logprob": row[t].item()} for t in row.topk(body["logprobs"]).indices]
            return {"logprobs": {"content": [{"top_logprobs": likely}]}}
        return {}


@contextmanager
def serving(stub: Stub, port: int = 0) -> Iterator[str]:
    """Serve a stub on a port of this machine, a free one if it is 0; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            stub.keys.append(self.headers.get("Authorization"))
            self.reply(stub.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.requests.append((self.path, body))
            if stub.status is not None:
                self.reply({"error": {"message": "out of order"}}, stub.status)
            elif body.get("stream") and stub.streamed is not None:
                self.send_response(200)
                self.send_header("Content-Type", stub.streamed[0])
                self.end_headers()
                self.wfile.write(stub.streamed[1])
            elif body.get("stream"):
                done = stub.engine.complete(stub.ids(body), body["max_tokens"])
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for word in done.text.split(" "):
                    event = {"choices": [{"delta": {"content": f"{word} "}}]}
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                try:
                    self.reply(stub.post(self.path, body))
                except Exception as error:
                    self.reply({"error": {"message": str(error)}}, 400)

        def reply(self, table: Any, status: int = 200) -> None:
            data = stub.body or json.dumps(table).encode()
            self.send_response(404 if table is None and not stub.body else status)
            self.send_header("Content-Type", "text/html" if stub.body else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
