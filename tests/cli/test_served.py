"""`verify --served` and `chat --served`: what they print, and what they say when something is wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.export.engines.transformers import TransformersEngine
from support.served import Stub, serving, trained


@pytest.fixture(scope="module")
def engine(answering_run: Path) -> TransformersEngine:
    return trained(answering_run)


def command(*arguments: str | Path, text: str = "", **environment: str) -> Any:
    settings = {"COLUMNS": "200", "NO_COLOR": "1", **environment}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text, env=settings)


def refused(result: Any, problem: str, remedy: str) -> None:
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    first, second = result.stderr.strip().splitlines()[-2:]
    assert problem in first and remedy in second, result.stderr


def test_a_server_of_the_trained_model_is_the_same(engine: TransformersEngine, answering_run: Path) -> None:
    with serving(Stub(engine)) as url:
        result = command("verify", "--served", url, answering_run)
    assert result.exit_code == 0, result.output + result.stderr
    assert "The served model is the trained one." in result.stdout and "prompts too" in result.stdout
    for check in ("token ids", "log-probabilities", "same first choice", "greedy answers", "generation stops"):
        assert check in result.stdout


@pytest.mark.slow
def test_a_server_with_a_fault_ends_with_code_1_and_its_cause(engine: TransformersEngine, answering_run: Path) -> None:
    with serving(Stub(engine, doubled_bos=True)) as url:
        shown = command("verify", "--served", f"{url}/v1", answering_run, "--model", "tiny")
        table = command("verify", "--served", url, answering_run, "--json")
    assert shown.exit_code == table.exit_code == 1
    assert "cause: BOS doubled" in shown.stdout and "differs" in shown.stdout
    verdict = json.loads(table.stdout)
    assert not verdict["ok"] and verdict["causes"][0].startswith("BOS doubled") and len(verdict["checks"]) == 5


def test_what_could_not_be_compared_is_printed(engine: TransformersEngine, answering_run: Path) -> None:
    with serving(Stub(engine, frozenset())) as url:
        result = command("verify", "--served", url, answering_run)
    assert result.exit_code == 0
    assert "not compared: token ids, log-probabilities, same first choice, generation stops." in result.stdout


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("name", ["verify", "chat"])
def test_a_server_that_is_not_there(name: str, answering_run: Path) -> None:
    run = [answering_run] if name == "verify" else []
    refused(command(name, "--served", closed_port(), *run), "nothing answers at http://127", "start the server")
    refused(command(name, "--served", "http://no.such.host.invalid", *run), "no such host", "fix the address")
    refused(command(name, "--served", "ftp://x", *run), "'ftp://x' is not an address", "give e.g. http://")
    refused(command(name, "--served", "http://x:99999", *run), "is not an address", "give e.g. http://")
    refused(command(name, "--served", "http://me:key@x", *run), "is not an address", "give e.g. http://")


def test_a_server_that_is_not_openai_compatible(engine: TransformersEngine, answering_run: Path) -> None:
    with serving(Stub(engine, body=b"<html>hello</html>")) as url:
        refused(command("verify", "--served", url, answering_run), "is not JSON but text/html", "OpenAI-compatible")
    with serving(Stub(engine, body=b'{"models": []}')) as url:
        refused(command("verify", "--served", url, answering_run), "is not OpenAI-compatible", "OpenAI-compatible")
    with serving(Stub(engine)) as url:
        refused(command("verify", "--served", f"{url}/app", answering_run), "is not OpenAI-compatible", "address")


def test_a_wrong_name_of_a_model(engine: TransformersEngine, answering_run: Path) -> None:
    with serving(Stub(engine)) as url:
        for arguments in (("verify", answering_run), ("chat",)):
            result = command(*arguments, "--served", url, "--model", "large")
            refused(result, "serves no model 'large'", "use one of tiny")


def test_a_server_that_fails(engine: TransformersEngine, answering_run: Path) -> None:
    for status, problem, remedy in (
        (500, "fails (500: out of order)", "look at the server's log"),
        (401, "denies access (401)", "PRONGHORN_API_KEY"),
        (429, "too many requests", "wait"),
        (307, "leads elsewhere", "the server's own address"),
    ):
        with serving(Stub(engine, status=status)) as url:
            refused(command("verify", "--served", url, answering_run), problem, remedy)
            refused(command("chat", "--served", url, text="Who?\n"), problem, remedy)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_does_not_answer_in_time(silent: str, answering_run: Path) -> None:
    result = command("verify", "--served", silent, answering_run, "--timeout", "0.2")
    refused(result, "gave no answer within 0.2 s", "--timeout")


def test_a_key_is_sent_from_the_environment_and_to_no_other_server(engine: TransformersEngine) -> None:
    stub = Stub(engine)
    with serving(stub) as url:
        result = command("chat", "--served", url, text="Who?\n", PRONGHORN_API_KEY="secret-of-mine")
        assert result.exit_code == 0 and set(stub.keys) == {"Bearer secret-of-mine"}
        assert "secret-of-mine" not in result.output + result.stderr
        leading, keys = redirecting(url)
        asked = len(stub.keys)
        result = command("chat", "--served", leading, text="Who?\n", PRONGHORN_API_KEY="secret-of-mine")
        refused(result, "leads elsewhere (302)", "the server's own address")
        assert keys == ["Bearer secret-of-mine"] and len(stub.keys) == asked


def redirecting(target: str) -> tuple[str, list[str | None]]:
    """A server that answers one request, with a redirect."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            self.send_response(302)
            self.send_header("Location", target + self.path)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.handle_request, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}", keys


def test_options_that_do_not_go_together(answering_run: Path, tmp_path: Path) -> None:
    refused(command("verify", "--served", "http://x"), "needs one run", "pronghorn verify --served http://x runs/mine")
    refused(command("verify", "--served", "http://x", answering_run, "--format", "q9"), "'q9' is unknown", "q8_0")
    refused(command("chat", answering_run, "--served", "http://x"), "and one of them", "pronghorn chat runs/mine")
    refused(command("chat", answering_run, "--model", "x"), "name of a server's model", "leave it out")
    refused(command("chat", tmp_path / "none"), "is not a folder", "a merged folder")


def test_a_chat_with_a_server_streams_and_remembers(engine: TransformersEngine) -> None:
    stub = Stub(engine)
    with serving(stub) as url:
        result = command("chat", "--served", url, "--system", "Be kind.", text="Who?\nWhy?\n/reset\nWho?\n")
    assert result.exit_code == 0, result.output + result.stderr
    assert result.stdout.count("A cat sat on a mat.") == 3
    first, second, third = (body["messages"] for _, body in stub.requests)
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"].strip() == "A cat sat on a mat." and first == third
    assert all(body["stream"] for _, body in stub.requests)


def streamed(*choices: dict[str, Any]) -> bytes:
    return b"".join(f"data: {json.dumps({'choices': [choice]})}\n\n".encode() for choice in choices)


def test_a_stream_that_is_cut_is_no_whole_answer(engine: TransformersEngine) -> None:
    half = streamed({"delta": {"content": "half an"}})
    with serving(Stub(engine, streamed=("text/event-stream", half))) as url:
        refused(command("chat", "--served", url, text="Who?\n"), "ended in the middle of an answer", "server's log")
    for end in (streamed({"delta": {}, "finish_reason": "stop"}), b"data:[DONE]\n\n"):
        with serving(Stub(engine, streamed=("text/event-stream; charset=utf-8", half + end))) as url:
            result = command("chat", "--served", url, text="Who?\n")
        assert result.exit_code == 0 and result.stdout.strip() == "half an", result.output


def test_an_answer_that_is_no_stream_is_read_or_refused(engine: TransformersEngine) -> None:
    whole = json.dumps({"choices": [{"message": {"role": "assistant", "content": "whole"}}]}).encode()
    with serving(Stub(engine, streamed=("application/json", whole))) as url:
        result = command("chat", "--served", url, text="Who?\n")
    assert result.exit_code == 0 and result.stdout.strip() == "whole", result.output
    with serving(Stub(engine, streamed=("application/json", b'{"error": "loading"}'))) as url:
        refused(command("chat", "--served", url, text="Who?\n"), "fails: loading", "server's log")
    with serving(Stub(engine, streamed=("text/html", b"<html>"))) as url:
        refused(command("chat", "--served", url, text="Who?\n"), "is not JSON but text/html", "OpenAI-compatible")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_and_not_sent_back_as_an_answer_s_text(engine: TransformersEngine, name: str) -> None:
    pieces = streamed({"delta": {name: "Hm, "}}, {"delta": {name: "so."}}, {"delta": {"content": "A "}})
    pieces += streamed({"delta": {"content": "cat."}, "finish_reason": "stop"})
    stub = Stub(engine, streamed=("text/event-stream", pieces))
    with serving(stub) as url:
        result = command("chat", "--served", url, text="Who?\nWhy?\n")
    assert result.stdout.strip() == "\n".join(["Hm, so.", "", "A cat."] * 2), result.output
    assert stub.requests[1][1]["messages"][1] == {"role": "assistant", "content": "A cat."}


@pytest.fixture(scope="module")
def merged(answering_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pronghorn.export.merge import save_merged
    from pronghorn.loading.load import load_model

    model, tokenizer = load_model(answering_run / "adapter", max_seq_length=256)
    folder = tmp_path_factory.mktemp("export") / "merged"
    return save_merged(model, tokenizer, folder, dtype=torch.float16)  # the base is float32: bfloat16 rounds too far


def test_a_chat_with_a_merged_folder(merged: Path) -> None:
    result = command("chat", merged, text="Who?\n", COLUMNS="80")
    assert result.exit_code == 0 and result.stdout.strip() == "model: A cat sat on a mat."


def test_a_chat_with_an_adapter_s_folder(answering_run: Path) -> None:
    result = command("chat", answering_run / "adapter", text="Who?\n", COLUMNS="80")
    assert result.exit_code == 0 and "trained: A cat sat on a mat." in result.stdout and "base: " in result.stdout


def test_a_merged_model_that_is_served_is_the_run_s(merged: Path, answering_run: Path) -> None:
    from pronghorn.loading.load import load_model

    served = TransformersEngine(*load_model(merged, dtype="float32", max_seq_length=256))
    with serving(Stub(served)) as url:
        result = command("verify", "--served", url, answering_run)
    assert result.exit_code == 0, result.output
