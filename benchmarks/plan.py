"""Predicted against measured: peak memory and step time of models of real shapes with random weights, on one GPU.

    python -m benchmarks.plan [--cases TEXT] [--checkpoints FOLDER] [--out FILE] [--commit ID]

A case's last part is a policy for every layer (`tiled`: offloaded, MLPs in tiles of rows), or a budget that the planner
fills. Peaks are torch's, with what CUDA
graphs hold; predicted times are the table's, and those after a layer was measured.
"""

import argparse
import gc
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.candidates.base import device, set_adapters
from benchmarks.program import packed_batches, parser_of, run, show
from benchmarks.random_weights import generated
from benchmarks.record import Facts
from benchmarks.timing import CudaClock
from benchmarks.workload import make_rows
from pronghorn.device import graph_bytes
from pronghorn.diagnose.shapes import checkpoint_of, shape_of
from pronghorn.errors import PronghornError
from pronghorn.loading.load import load_model
from pronghorn.loading.packed_checkpoint import PackedSkeleton
from pronghorn.memory.devices import parse_bytes
from pronghorn.memory.estimate import GIB, MemoryModel
from pronghorn.memory.plan import TILE_ROWS, Plan, Policy
from pronghorn.memory.planner import plan
from pronghorn.memory.step_time import step_times
from pronghorn.memory.tiles import tiled_times
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import cuda_device_spec, dims_of, measured_times, setup_of
from pronghorn.models.lora import add_lora

POLICIES = ("keep", "norms", "mlp", "layer", "offload")
CASES = """
Qwen3-0.6B lora 8192 keep; Qwen3-0.6B lora 16384 mlp
Llama-3.2-1B lora 8192 keep; Llama-3.2-1B lora 8192 norms; Llama-3.2-1B lora 8192 mlp; Llama-3.2-1B lora 8192 layer
Llama-3.2-1B lora 8192 offload; Llama-3.2-1B lora 32768 layer; Llama-3.2-1B lora 8192 8GiB
Llama-3.2-1B full 8192 keep; Llama-3.2-1B full 8192 layer
Llama-3.1-8B lora 8192 keep; Llama-3.1-8B lora 8192 mlp; Llama-3.1-8B lora 8192 24GiB; Llama-3.1-8B lora 8192 layer
Llama-3.1-8B lora 8192 offload
Llama-3.2-1B lora 65536 tiled; Llama-3.1-8B lora 65536 tiled; Llama-3.1-8B lora 131072 tiled
Llama-3.1-8B qlora 8192 keep; Llama-3.1-8B qlora 8192 12GiB
gpt-oss-20b mxfp4 4096 offload; gpt-oss-20b mxfp4+experts 4096 offload; gpt-oss-20b mxfp4 4096 keep
gpt-oss-120b mxfp4 4096 keep
"""
PUBLISHED: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
                    "dynamic": False,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}  # fmt: skip
"""The quantization_config of checkpoints as published: gpt-oss's, DeepSeek's and Qwen's, llm-compressor's."""
WARM, TIMED = 16, 8
"""Steps; the first ones decide about CUDA graphs."""


def load(shape: str, method: str, folder: Path | None) -> Any:
    """Load a shape with random weights, and with LoRA unless everything is trained.

    Args:
        folder: where its checkpoint is, or is written; none is of what is `PUBLISHED` in few bits, which is made on the
            device.
    """
    published = PUBLISHED.get(method.removesuffix("+experts"))
    if published:
        config = AutoConfig.for_model(**shape_of(shape) or {}, quantization_config=published)
        skeleton = PackedSkeleton.of(config, torch.bfloat16)
        packed = skeleton.fill(generated(skeleton.expected(), device=device()), device())
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if method.endswith("+experts") else []
        packed = add_lora(packed, target_parameters=targets)
        set_adapters(packed, seed=0)
        return packed.train()
    assert folder is not None
    dtype = torch.float32 if method == "full" else torch.bfloat16
    path = checkpoint_of(shape, folder, seed=0)
    model, _ = load_model(path, max_seq_length=8192, dtype=dtype, load_in_4bit=method == "qlora")
    if method != "full":
        model = add_lora(model)
        set_adapters(model, seed=0)
    return model.train()


def measure(model: Any, batches: list[dict[str, Any]], autocast: bool) -> tuple[int, float]:
    """Return peak bytes without those of graphs, and the median ms, of whole steps with AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
    clock, times = CudaClock(), []
    for step in range(WARM + TIMED):
        if step == WARM:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = clock.mark()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times += clock.milliseconds([start, clock.mark()])
        del loss
    return torch.cuda.max_memory_allocated(), statistics.median(times[WARM:])


def one(model: Any, method: str, tokens: int, wanted: str) -> dict[str, float]:
    """Predict and measure one case."""
    autocast, device = torch.bfloat16 if method == "full" else None, model.device
    shape, work = dims_of(model), setup_of(model, tokens, autocast, accumulates=False)
    card, held = cuda_device_spec(device), graph_bytes()
    rows = make_rows(tokens, "lognormal", 1.0, shape.vocab, seed=0)
    work = replace(work, documents=tokens * len(rows) // sum(len(row.lengths) for row in rows))  # as of a recipe's data
    batches = packed_batches(model, tokens, seed=0)  # of the same rows
    if wanted == "tiled":
        made = Plan((Policy.OFFLOAD,) * len(shape.layers), mlp_rows=TILE_ROWS)
    elif wanted in POLICIES:
        made = Plan((list(Policy)[POLICIES.index(wanted)],) * len(shape.layers))
    else:
        made = plan(shape, work, card, parse_bytes(wanted, "budget"))
    table = step_times(shape, work, card)
    calibrated = measured_times(model, shape, work, card, autocast)
    if made.mlp_rows:
        table, calibrated, work = tiled_times(table), tiled_times(calibrated), replace(work, mlp_rows=made.mlp_rows)
    kinds = MemoryModel.of(shape, work).peak(made.policies, made.buffers)
    handle = attach(model, made)
    try:
        peak, milliseconds = measure(model, batches, autocast is not None)
        graphs = max(0, graph_bytes() - held)  # of this case: an earlier one's may not be given back
        kinds["CUDA graph"] = MemoryModel.of(shape, work).graph if graphs else 0
    finally:
        handle.detach()
    return {
        "peak_bytes": peak + graphs,
        "predicted_bytes": sum(kinds.values()),
        "step_ms": milliseconds,
        "tokens_per_s": round(tokens / milliseconds * 1e3),
        "table_ms": table.step(made.policies, made.buffers),
        "calibrated_ms": calibrated.step(made.policies, made.buffers),
    }


def row(result: dict[str, Any]) -> dict[str, str]:
    """Return a case's measured figures, and its predictions with their errors."""
    cells = {"case": result["case"], "error": result.get("error", "")}
    for measured, predictions, unit in (("peak_bytes", ["predicted"], GIB), ("step_ms", ["table", "calibrated"], 1)):
        if measured in result:
            cells[measured] = f"{result[measured] / unit:.2f}"
            for name in predictions:
                value = result[f"{name}_{measured.split('_')[1]}"]
                cells[f"{name}_{measured}"] = f"{value / unit:.2f} ({value / result[measured] - 1:+.1%})"
    return cells


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", default="", help="only those that contain this text")
    parser.add_argument("--checkpoints", type=Path, help="where random checkpoints are kept")
    return parser


def main(given: argparse.Namespace) -> None:
    """Measure every case, the next one alone on the device."""
    cases = [part.strip() for part in CASES.strip().replace("\n", ";").split(";") if given.cases in part]
    loaded = model = None
    with tempfile.TemporaryDirectory() as scratch, Facts(given) as facts:
        facts["cases"] = []
        for case in cases:
            shape, method, tokens, wanted = case.split()
            try:
                if loaded != (shape, method):
                    loaded = model = None
                    gc.collect()
                    torch.cuda.empty_cache()
                    model = load(shape, method, given.checkpoints or Path(scratch))
                    loaded = shape, method
                facts["cases"].append({"case": case, **one(model, method, int(tokens), wanted)})
            except (PronghornError, torch.OutOfMemoryError) as error:
                facts["cases"].append({"case": case, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # of streams that only this case's graphs and calibration used
            torch.cuda.empty_cache()
            print(facts["cases"][-1], flush=True)
            facts.keep()
    show([row(result) for result in facts["cases"]])


if __name__ == "__main__":
    run(arguments, main)
