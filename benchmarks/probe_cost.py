"""How long the probe of a generic family takes before its first step: a model of some 8B that no family's file knows.

    python -m benchmarks.probe_cost --out probe-cost.json
    python -m benchmarks.probe_cost --cold --out probe-cost-cold.json

The model is a StarCoder 2 of about Llama-3.1-8B's sizes with random weights in bfloat16, made on the device, with LoRA
r16. The probe runs three times, each from the beginning: the first also compiles and warms up. Ends with code 1 where
documents mix or a probe takes more than `--most` seconds.

`--cold` asks what a probe adds where nothing was ever compiled, since the first step compiles the same kernels: two
pairs of new processes, each with empty caches of compiled kernels. One takes its first step at once, the other probes
before, and what counts is how much later its first step has ended.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.program import packed_batches, parser_of, run, show
from benchmarks.record import Facts

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "sliding_window": None,
}
RUNS, TOKENS = 3, 2048
PARTS = "first step", "probe and first step", "first step again", "probe and first step again"


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--most", type=float, default=3.0, metavar="SECONDS", help="that a probe may take")
    parser.add_argument("--cold", action="store_true", help="new processes with empty caches of compiled kernels")
    parser.add_argument("--tiny", action="store_true", help="try the program on a small model")
    parts.add_arguments(parser, PARTS, limit_s=200)
    return parser


def built(tiny: bool) -> Any:
    """Make the model on the device, attached and ready to train."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.candidates.base import device
    from pronghorn.models.attach import attach
    from pronghorn.models.lora import add_lora

    sizes = {**SIZES, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    torch.manual_seed(0)
    with torch.device(device()):
        config = AutoConfig.for_model("starcoder2", **(sizes if tiny else SIZES))
        model = add_lora(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).train()
    attach(model)
    return model


def part(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Take a first step, after a probe or without one; return when what had ended, in seconds from the built model."""
    import torch

    from pronghorn.models.probe import probe

    model = built(given.tiny)
    batch = packed_batches(model, TOKENS, seed=0)[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    started, found = time.perf_counter(), {}
    if name.startswith("probe"):
        clean = probe(model).clean
        found = {"probe": time.perf_counter() - started, "clean": clean}
    model(**batch).loss.backward()
    optimizer.step()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    return found | {"first step ended": time.perf_counter() - started}


def cold(given: argparse.Namespace) -> bool:
    """Tell whether the first step ends no later after a probe than is allowed, where nothing was compiled before."""

    def measure(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            caches = {f"{tool}_CACHE_DIR": str(Path(folder) / tool) for tool in ("TRITON", "TORCHINDUCTOR")}
            os.environ.update(caches)  # the process inherits them
            return parts.one(name, given, lambda *files: parts.command_of("benchmarks.probe_cost", *files))

    with Facts(given) as facts:
        found = parts.run_parts(facts, given, "", measure)
        ended = [found[name].get("first step ended", math.nan) for name in PARTS]
        facts |= {"later_s": [ended[1] - ended[0], ended[3] - ended[2]], "most_s": given.most}
        later = statistics.mean(facts["later_s"])
    show([{"process": name, **found[name]} for name in PARTS], f"the first step ends {later:.2f} s later after a probe")
    return later <= given.most and all(found[name].get("clean", True) for name in PARTS)


def main(given: argparse.Namespace) -> bool:
    """Time the probes; tell whether documents stay apart and each was fast enough."""
    from pronghorn.models.probe import probe

    if given.cold:
        return cold(given)
    with Facts(given) as facts:
        model = built(given.tiny)
        found = [probe(model) for _ in range(RUNS)]
        facts |= {"parameters": sum(p.numel() for p in model.parameters()), "most_s": given.most}
        facts |= {"seconds": [each.seconds for each in found], "clean": all(each.clean for each in found)}
        facts |= {"found": [str(each) for each in found]}
    show([{"probe": n, "seconds": f"{each.seconds:.2f}", "found": str(each)} for n, each in enumerate(found, 1)])
    return all(each.clean and each.seconds <= given.most for each in found)


if __name__ == "__main__":
    run(arguments, main)
