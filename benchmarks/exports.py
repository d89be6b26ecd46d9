"""Compare exports of a fine-tuned model, in the engines that read them, with the run that trained it.

    python -m benchmarks.exports --model SMOLLM2_FOLDER --data FOLDER_OF_GSM8K --vllm PYTHON --out exports.json

A short run of LoRA is exported as GGUF, merged and as adapter. Compared are token ids of conversations,
log-probabilities of held-out rows (at every position), answers and stops, by the formats' own limits. Needs the package
`xllamacpp`; no GPU. `--vllm` names an interpreter that has vLLM; without it vLLM is left out.

All is computed in float32. Rows that are no exports say what rounding alone costs: the run and the merged folder
computed in bfloat16, a merge that is rounded to the nearest, weights in `q8_0` whose activations are rounded as
llama.cpp does, and the file that llama.cpp's own `llama-quantize` makes, where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.program import names, parser_of, run, show
from benchmarks.record import Facts
from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.served import heldout_rows
from pronghorn.errors import TrainingError
from pronghorn.export.adapter_layouts import write_served_adapter
from pronghorn.export.compare import compare
from pronghorn.export.engine import Completion, Engine
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.engines.vllm import serve_vllm
from pronghorn.export.gguf import quantiser, write_gguf
from pronghorn.export.merge import merged_tensors, save_merged
from pronghorn.loading.gguf import load_gguf
from pronghorn.loading.load import load_model
from pronghorn.models.families import base_causal_lm
from pronghorn.records.record import FILE_NAME as RECORD
from pronghorn.records.record import RunRecord
from pronghorn.train.chat import load_chat, recipe_of
from pronghorn.train.run import run as train

TRAINED_ON = 256
"""Rows that are trained on."""


class Remembering(TransformersEngine):
    """The reference, which is asked the same of every export, and computes it once."""

    def distribution(self, token_ids: Sequence[int]) -> Tensor:
        """Return log-probabilities as its parent does."""
        return self._rows(tuple(token_ids))

    def base_distribution(self, token_ids: Sequence[int]) -> Tensor | None:
        """Return the base's as its parent does."""
        return self._base_rows(tuple(token_ids))

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        """Continue a text as its parent does."""
        return self._completion(tuple(token_ids), max_tokens)

    @functools.cached_property
    def _rows(self) -> Callable[[tuple[int, ...]], Tensor]:
        return functools.cache(super().distribution)

    @functools.cached_property
    def _base_rows(self) -> Callable[[tuple[int, ...]], Tensor | None]:
        return functools.cache(super().base_distribution)

    @functools.cached_property
    def _completion(self) -> Callable[[tuple[int, ...], int], Completion]:
        return functools.cache(super().complete)


def fine_tune(model: Path, data: Path, folder: Path, held_out: int, steps: int) -> Path:
    """Train LoRA for some steps on questions and answers, and return the run's folder. A run that is there is gone on
    with, or taken as it is if it has ended."""
    folder.mkdir(exist_ok=True)
    output = folder / "run"
    if (output / RECORD).is_file():
        return output
    for name, source, count in (("train", "train", TRAINED_ON), ("eval", "test", held_out)):
        with (data / f"{source}.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in itertools.islice(lines, count)]
        text = "".join(json.dumps({"prompt": row["question"], "completion": row["answer"]}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    table = {
        "model": {"name": str(model), "max_seq_length": 512},
        "data": {"train": folder / "train.jsonl", "eval": folder / "eval.jsonl"},
        "train": {"output": output, "max_steps": steps, "learning_rate": 2e-4},
        "memory": {"gradient_checkpointing": False},
        "report": {"html": False, "sample_tokens": 2},
    }
    train(Recipe.model_validate(table), Console(quiet=True))
    return output


def same_tensors(ours: Path, theirs: Path) -> str:
    """Say how many tensors of two GGUF files are the same bytes."""
    from gguf import GGUFReader

    one, other = (
        {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in GGUFReader(str(file)).tensors}
        for file in (ours, theirs)
    )
    return f"{sum(one[name] == other.get(name) for name in one)} of {len(one.keys() | other.keys())}"


def by_llama_quantize(plain: Path, file: Path) -> Path:
    """Let llama.cpp's own program make `q8_0` of a file in 32 bits."""
    done = subprocess.run([str(quantiser()), str(plain), str(file), "Q8_0"], capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"llama-quantize fails: {done.stderr[-200:]}", "install another llama.cpp")
    return file


def round_activations(model: Any) -> Any:
    """Let each linear of a model see its input as llama.cpp rounds it beside `q8_0`: 8 bits, a scale for 32 numbers."""

    def rounded(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        blocks = given[0].reshape(-1, 32)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        whole = (blocks / scale).nan_to_num().round()
        return ((whole * scale.half().float()).view_as(given[0]),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    return model


@torch.no_grad()
def rounded_to_the_nearest(trained: Any, folder: Path) -> Any:
    """Return a merged folder's model with the weights that rounding to the nearest gives."""
    model, _ = load_model(folder, max_seq_length=1, dtype="float32")
    weights = dict(model.named_parameters(remove_duplicate=False))
    for tensor in merged_tensors(base_causal_lm(trained), torch.bfloat16):
        weights[tensor.name].copy_(tensor.read())
    return model


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the folder of GSM8K")
    parser.add_argument("--rows", type=int, default=4, help="held-out rows; every position is asked for")
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--keep", type=Path, help="a folder for the run, which is gone on with, or taken as it is")
    parser.add_argument("--quantisations", type=names, default=("f16", "q8_0"))
    parser.add_argument("--vllm", type=Path, help="an interpreter that has vLLM")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Train, export, load and compare; tell whether all exports keep to their limits."""
    with Facts(given, "gguf", "xllamacpp") as facts, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        output = fine_tune(given.model, given.data, given.keep or folder, given.rows, given.steps)
        record = RunRecord.read(output)
        facts |= {"model": given.model.name, "rows": given.rows, "seconds to write": {}}
        facts |= {"steps": record.steps[-1]["step"], "held-out loss": record.heldout}
        found: dict[str, Any] = facts.setdefault("compared", {})
        session = load_chat(output)
        trained, tokenizer = session.models["trained"], session.tokenizer
        reference = Remembering(trained, tokenizer, "the run", session.models["base"])
        rows = heldout_rows(recipe_of(output), tokenizer, print)[: given.rows]

        def judge(name: str, engine: Engine, format: str, export: bool = True) -> None:
            engine.name = name
            result = compare(reference, engine, format=format, rows=rows, exact=True).to_dict()
            found[name] = {"export": export, **result}
            facts.keep()

        def local(name: str, model: Any, format: str, export: bool = True) -> None:
            judge(name, TransformersEngine(model, tokenizer), format, export)

        def in_llama_cpp(name: str, file: Path, format: str, export: bool = True) -> None:
            with serve_gguf(file, threads=torch.get_num_threads()) as engine:
                engine.steps = None
                judge(name, engine, format, export)

        local("the run in bfloat16", copy.deepcopy(trained).bfloat16(), "merged", export=False)
        whole = save_merged(trained, tokenizer, folder / "float32", dtype=torch.float32)
        for quantisation in given.quantisations:
            start = time.perf_counter()
            file = write_gguf(whole, folder / f"{quantisation}.gguf", quantisation)
            facts["seconds to write"][quantisation] = round(time.perf_counter() - start, 1)
            in_llama_cpp(f"{quantisation} in llama.cpp", file, quantisation)
            again = load_gguf(file, torch.float32)[0]
            local(f"{quantisation} read back", again, quantisation)
            if quantisation == "q8_0":
                local("q8_0 read back, activations in 8 bits", round_activations(again), "q8_0", export=False)
        if quantiser() is not None and "q8_0" in given.quantisations:
            other = by_llama_quantize(write_gguf(whole, folder / "f32.gguf", "f32"), folder / "other.gguf")
            facts["tensors of q8_0 that are llama-quantize's"] = same_tensors(folder / "q8_0.gguf", other)
            in_llama_cpp("q8_0 of llama-quantize in llama.cpp", other, "q8_0", export=False)
        merged = save_merged(trained, tokenizer, folder / "merged")
        local("merged in transformers", load_model(merged, max_seq_length=1, dtype="float32")[0], "merged")
        local("merged to the nearest", rounded_to_the_nearest(trained, merged), "merged", export=False)
        if given.vllm is not None:
            with serve_vllm(given.vllm, merged) as engine:
                facts["vLLM"] = engine.product
                judge("merged in vLLM", engine, "merged")
            adapter = write_served_adapter(trained, tokenizer, folder / "adapter")
            rank = trained.active_peft_config.r
            with serve_vllm(given.vllm, given.model.resolve(), adapter=adapter, rank=rank) as engine:
                judge("adapter in vLLM", engine, "adapter")
            with serve_vllm(given.vllm, merged, dtype="bfloat16") as engine:
                judge("merged in vLLM, computed in bfloat16", engine, "merged", export=False)
        shown = ("ok", "positions", "mean", "tail", "same")
        show([{"compared": name} | {key: entry[key] for key in shown} for name, entry in found.items()])
    return all(entry["ok"] for entry in found.values() if entry["export"])


if __name__ == "__main__":
    run(arguments, main)
