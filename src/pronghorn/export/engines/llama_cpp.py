"""A GGUF file in llama.cpp, by the package `xllamacpp`, in a process of its own, as what it can't load aborts it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from pronghorn.errors import ServerError, UnsupportedError
from pronghorn.export.engine import NotServed, Scored
from pronghorn.export.engines.http import Server
from pronghorn.export.engines.openai import STEPS, OpenAIServer

_SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.port = sys.argv[1], 2048, 1, 0
params.verbosity, params.ui, params.warmup, params.n_gpu_layers = 0, False, False, 0
params.cpuparams.n_threads = 1
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
if len(sys.argv) > 2:
    lora = xllamacpp.CommonAdapterLoraInfo()
    lora.path, lora.scale = sys.argv[2], 1.0
    params.lora_adapters = [lora]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
_FORCED = 1000
"""Added to the logit of the token that is to be chosen; the log-probability told is the one before."""


def has_llama_cpp() -> bool:
    """Tell whether `xllamacpp` is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


class LlamaCpp(OpenAIServer):
    """A file that llama.cpp serves, whose positions are scored one by one, each token being forced in its place."""

    steps: int | None = STEPS
    """Positions of a text that are scored, spread evenly; None: all."""

    def logprobs(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Return what the model says of positions of a text, but for those of which it tells nothing: a token
        that is part of a character.

        Raises:
            NotServed: it tells nothing at all, or in another form.
        """
        last = len(token_ids) - 1
        steps = last if self.steps is None else min(self.steps, last)
        scored = {}
        for index in sorted({1 + round(i * (last - 1) / max(steps - 1, 1)) for i in range(steps)}):
            bias = [[token_ids[index], _FORCED]]
            body = {"prompt": list(token_ids[:index]), "n_predict": 1, "n_probs": 1, "logit_bias": bias}
            try:
                entries = self._post("/completion", body).get("completion_probabilities")
                if not entries:
                    continue
                [entry] = entries
                first = int(entry["top_logprobs"][0]["id"])
                scored[index] = Scored(int(entry["id"]), float(entry["logprob"]), first)
            except (KeyError, TypeError, ValueError, IndexError):
                scored = {}
                break
        if not scored:
            raise NotServed("llama.cpp tells no log-probabilities", "install another xllamacpp")
        return scored


@contextmanager
def serve_gguf(file: Path, lora: Path | None = None) -> Iterator[LlamaCpp]:
    """Serve a GGUF file on this machine's CPU while the block runs; keys and values are float32.

    Args:
        lora: the GGUF file of an adapter that is applied to it.
    Raises:
        UnsupportedError: xllamacpp isn't installed.
        ServerError: llama.cpp doesn't load the file.
    """
    if not has_llama_cpp():
        raise UnsupportedError("llama.cpp is not installed", "pip install xllamacpp")
    command = [sys.executable, "-c", _SERVE, str(file), *([str(lora)] if lora else [])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            address = next((line for line in process.stdout if line.startswith("http://")), None)
            if address is None:
                raise ServerError(f"llama.cpp doesn't load {file}", "look at what llama-server -m FILE says of it")
            engine = LlamaCpp(Server(address.strip(), timeout=600.0))
            engine.name = f"llama.cpp (xllamacpp {version('xllamacpp')})"  # its own version is unknown to itself
            yield engine
        finally:
            process.kill()
