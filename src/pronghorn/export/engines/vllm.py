"""A merged folder or an adapter in vLLM, in a process of an environment of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pronghorn.environment import environment_of_another_python
from pronghorn.errors import ConfigError, PronghornError, ServerError
from pronghorn.export.engines.http import Server
from pronghorn.export.engines.openai import OpenAIServer
from pronghorn.text import clip

STARTS = 900.0
"""Seconds that vLLM may take to answer."""
_ADAPTER = "mine"
_GUARD = '("$@"; kill -9 0) < /dev/null & cat > /dev/null; kill -9 0'
"""A shell's lines: run a command until it ends, or whoever holds the shell's input does; then end all that it began."""


def check_interpreter(python: Path) -> None:
    """Refuse what can't be the interpreter of an environment with vLLM (ConfigError)."""
    if not python.is_file():
        raise ConfigError(f"{python} is not an interpreter", "give the python of an environment with vLLM")


@contextmanager
def serve_vllm(
    python: Path,
    model: str | Path,
    *,
    adapter: Path | None = None,
    rank: int = 16,
    dtype: str = "float32",
    context: int = 1024,
) -> Iterator[OpenAIServer]:
    """Serve a model by vLLM on this machine while the block runs. Nothing is fetched.

    Args:
        python: the interpreter of an environment with vLLM.
        model: a merged folder, or an adapter's base.
        adapter: its folder, which has the tokenizer, too.
        rank: of the adapter, or more.
        dtype: that vLLM computes in; "auto" is the checkpoint's.
        context: tokens of the longest text.
    Raises:
        ConfigError: there is no such interpreter.
        ServerError: vLLM doesn't serve the model; with the last words of its log.
    """
    check_interpreter(python)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", model, "--dtype", dtype, "--max-model-len", context, "--enforce-eager"]
    if adapter is not None:
        ranks = next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= min(rank, 512))  # vLLM's own
        options += ["--tokenizer", adapter, "--enable-lora", "--max-lora-rank", ranks]
        options += ["--served-model-name", "base", "--lora-modules", f"{_ADAPTER}={adapter}"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port, *options]
    environment = environment_of_another_python() | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    guarded = ["/bin/sh", "-c", _GUARD, "sh", *map(str, command)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            guarded,
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        server = Server(f"http://127.0.0.1:{port}", timeout=600.0)
        try:
            until = time.monotonic() + STARTS
            while not _answers(server):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    lines = log.read().decode("utf-8", "replace").strip().splitlines() or ["its log is empty"]
                    raise ServerError(f"vLLM doesn't serve {model}: {clip(lines[-1], 200)}", "start it by hand")
                time.sleep(1)
            engine = OpenAIServer(server, None if adapter is None else _ADAPTER)
            engine.name = f"{engine.product}, {dtype}"
            yield engine
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers, too: busy ones outlive a SIGTERM


def _answers(server: Server) -> bool:
    try:
        server.ask("/v1/models")
    except PronghornError:
        return False
    return True
