"""Time writing a large model as GGUF, and the most host memory that it takes. No GPU.

    python -m benchmarks.export_time --model Llama-3.1-8B --tokenizer FOLDER --scratch DIR --out export-time.json

Weights are random, in bfloat16, a file a layer, as a merged export leaves them; making them isn't timed. They and the
GGUF file take about three bytes a weight in the scratch folder, which is left empty.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import parser_of, run, show
from benchmarks.random_weights import generated
from benchmarks.record import Facts
from pronghorn.diagnose.shapes import shape_of
from pronghorn.export.gguf import write_gguf


def make(shape: str, tokenizer: Path, folder: Path) -> int:
    """Write a model with random weights and a smaller vocabulary's tokenizer; return its parameters."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields: Any = shape_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    expected = {name: p for name, p in model.named_parameters(remove_duplicate=True)}
    files: dict[str, str] = {}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in expected.items():
        number = name.split(".")[2] if ".layers." in name else name
        layers.setdefault(number, {})[name] = tensor
    for number, tensors in layers.items():
        file = f"model-{number}.safetensors"
        save_file({each.name: each.read() for each in generated(tensors)}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(p.numel() for p in expected.values())


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """Yield a list whose last entry is the most anonymous memory, in bytes, that the block took beyond what was there
    before; pages of mapped files don't count."""
    before, most, ended = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            most.append(max(most[-1], _anonymous() - before))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny", help="a known shape")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with any tokenizer")
    parser.add_argument("--scratch", type=Path, help="where the files go for a while")
    parser.add_argument("--quantisation", default="q8_0")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Write once and show what it took."""
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch, Facts(given, "gguf") as facts:
        folder, file = Path(scratch) / "model", Path(scratch) / "model.gguf"
        parameters = make(given.model, given.tokenizer, folder)
        largest = max(each.stat().st_size for each in folder.glob("*.safetensors"))
        with most_memory() as most:
            start = time.perf_counter()
            write_gguf(folder, file, given.quantisation)
            seconds = time.perf_counter() - start
        facts |= {"model": given.model, "parameters": parameters, "quantisation": given.quantisation}
        facts |= {"seconds": seconds, "most host bytes": most[-1], "file bytes": file.stat().st_size}
        facts |= {"largest file of the checkpoint, bytes": largest, "cores used": torch.get_num_threads()}
        shutil.rmtree(folder)
    show(
        [{"seconds": f"{seconds:.0f}", "host memory, GiB": f"{most[-1] / 2**30:.2f}", "parameters": f"{parameters:,}"}]
    )
    return True


if __name__ == "__main__":
    run(arguments, main)
