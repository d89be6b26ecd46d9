"""Compare two source trees of Pronghorn on the same training step, by turns, in one run on one machine.

    python benchmarks/compare_trees.py --base OLD/src --tree src --case Qwen3-0.6B:lora:8192:off --out result.json

Each tree runs in a process of its own, on the same random weights, adapters and rows. Before the clock counts, losses
and gradients of both trees are compared (the gate). A case is MODEL:METHOD:TOKENS:GRAPH[:PLAN], METHOD lora, attention
(LoRA on attention's linears), full or qlora, GRAPH off, auto or on, PLAN keep or recompute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

TURNS, STEPS = 4, 6
GRADIENTS = 24
"""Tensors whose gradients are compared, spread over the model."""


def main() -> None:
    """Run every case and write the results so far after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="src folder of the tree to compare with")
    parser.add_argument("--tree", type=Path, required=True, help="src folder of the tree that is judged")
    parser.add_argument("--case", action="append", required=True)
    parser.add_argument("--commit", default="unknown", help="of the tree that is judged")
    parser.add_argument("--base-commit", default="unknown")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        serve(given.worker)
        return
    found = []
    for case in given.case:
        found.append(compare(case, {"base": given.base, "tree": given.tree}, given.turns))
        found[-1] |= {"commits": {"base": given.base_commit, "tree": given.commit}}
        print(json.dumps(found[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n")


def compare(case: str, trees: dict[str, Path], turns: int) -> dict[str, Any]:
    """Measure one case on all trees by turns."""
    workers = {name: Worker(case, source) for name, source in trees.items()}
    result: dict[str, Any] = {"schema": "pronghorn-trees-v1", "case": case}
    try:
        first = {name: worker.ask("load") for name, worker in workers.items()}
        result |= {"versions": first["tree"]["versions"], "device": first["tree"]["device"]}
        result |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        gates = {name: worker.ask("gate") for name, worker in workers.items()}
        far = max(
            abs(a - b) / max(abs(a), 1e-12)
            for a, b in zip(gates["base"]["numbers"], gates["tree"]["numbers"], strict=True)
        )
        result["gate"] = {"largest relative difference of loss and gradients' norms": far, "green": far < 0.02}
        times: dict[str, list[float]] = {name: [] for name in workers}
        for worker in workers.values():
            worker.ask("warm")
        for _ in range(turns):
            for name, worker in workers.items():
                times[name] += worker.ask("steps")["ms"]
        more = {name: worker.ask("more") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    medians = {name: statistics.median(each) for name, each in times.items()}
    result |= {"timings_ms": {name: [round(ms, 3) for ms in each] for name, each in times.items()}}
    result |= {"step_ms": medians, "ratio": medians["base"] / medians["tree"], **{"details": more}}
    return result


class Worker:
    """A process that measures one tree, told what to do line by line."""

    def __init__(self, case: str, source: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{source.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, __file__, "--base", ".", "--tree", ".", "--case", case, "--worker", case]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, command: str) -> dict[str, Any]:
        """Have one command done and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
            sys.stderr.write(line)
        raise RuntimeError(f"the process that was to do {command!r} ended")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve(case: str) -> None:
    """Do what is asked on standard input, in a worker's process."""
    measured: Any = None
    for line in sys.stdin:
        command = line.strip()
        if command == "load":
            measured = Measured(case)
            answer = measured.about()
        else:
            answer = getattr(measured, command)()
        print("ANSWER " + json.dumps(answer), flush=True)


class Measured:
    """One model, attached by the tree on this process's path, with its optimiser and rows."""

    def __init__(self, case: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from pronghorn.memory.plan import Plan
        from pronghorn.models.attach import attach
        from pronghorn.models.lora import add_lora

        name, method, tokens, graph, plan = [*case.split(":"), "keep"][:5]
        self.tokens, self.torch, self.full = int(tokens), torch, method == "full"
        self.warm_steps = 4 if graph == "off" else 24
        fields = dict(shape(name))
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(0)
        dtype = torch.float32 if self.full else torch.bfloat16
        family_attention = "eager" if config.model_type == "gpt_oss" else "sdpa"
        with torch.device("cuda"):
            torch.set_default_dtype(dtype)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=family_attention, dtype=dtype)
            torch.set_default_dtype(torch.float32)
        if method == "qlora":
            quantise(model)
        if method != "full":
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
            targets = targets if method == "attention" else [*targets, "gate_proj", "up_proj", "down_proj"]
            model = add_lora(model, r=16, lora_alpha=16, target_modules=targets)
            torch.manual_seed(1)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "lora_B" in key:
                        parameter.normal_(0, 0.01)
        self.model = model.train()
        self.handle = attach(model, Plan.keep() if plan == "keep" else Plan.recompute(), graph=graph)
        self.trained = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW([p for _, p in self.trained], lr=1e-6, fused=True)
        self.rows = [self._row(seed) for seed in range(4)]
        self._count = 0

    def _row(self, seed: int) -> dict[str, Any]:
        from pronghorn.data.batch import Collator

        rng, lengths = random.Random(seed), []
        while sum(lengths) < self.tokens:
            lengths.append(max(16, min(2048, int(rng.lognormvariate(4.9, 0.75)))))
        lengths[-1] -= sum(lengths) - self.tokens
        generator = self.torch.Generator().manual_seed(seed)
        ids = self.torch.randint(10, 1000, (self.tokens,), generator=generator).tolist()
        batch = Collator(self.tokens, 0)([{"input_ids": ids, "labels": list(ids), "lengths": lengths}])
        return {key: value.to("cuda") for key, value in batch.items()}

    def about(self) -> dict[str, Any]:
        """Tell device and versions."""
        from pronghorn.device import device_name, versions

        return {"device": device_name(), "versions": versions()}

    def _loss(self, row: dict[str, Any]) -> Any:
        with self.torch.autocast("cuda", self.torch.bfloat16, enabled=self.full):
            return self.model(**row).loss

    def gate(self) -> dict[str, Any]:
        """Compute losses and norms of gradients of one row."""
        loss = self._loss(self.rows[0])
        loss.backward()
        some = self.trained[:: max(1, len(self.trained) // GRADIENTS)]
        numbers = [loss.item(), *(p.grad.float().norm().item() for _, p in some)]
        self.optimizer.zero_grad(set_to_none=True)
        return {"numbers": numbers}

    def _step(self) -> None:
        self._loss(self.rows[self._count % len(self.rows)]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._count += 1

    def warm(self) -> dict[str, Any]:
        """Take the steps that compile, and those by which graphs are judged."""
        for _ in range(self.warm_steps):
            self._step()
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        return {}

    def steps(self) -> dict[str, Any]:
        """Time steps that follow each other, each from the end of the one before, on the device."""
        marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 3)]
        for mark in marks:
            mark.record()
            self._step()
        self.torch.cuda.synchronize()
        return {"ms": [a.elapsed_time(b) for a, b in pairwise(marks[2:])]}

    def more(self) -> dict[str, Any]:
        """Time launching on the host and work on the device, and read the peak of memory."""
        torch = self.torch
        peak = torch.cuda.max_memory_allocated()
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        row = {key: self.rows[0][key] for key in ("input_ids", "position_ids", "packed")}
        launch = []
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16, enabled=self.full):
                out = base.model(**row, use_cache=False).last_hidden_state
            launch.append((time.perf_counter() - start) * 1e3)
            del out
        found = {"peak_bytes": peak, "forward_launch_ms": statistics.median(launch[2:])}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):
                self._step()
            torch.cuda.synchronize()
        events = [each for each in profile.events() if str(each.device_type).endswith("CUDA")]
        found["device_ms"] = sum(each.device_time for each in events) / 2e3
        found["kernels"] = len(events) / 2
        return found | self._bare(row)

    def _bare(self, row: dict[str, Any]) -> dict[str, Any]:
        """Time the same launches of the layers called one after the other, without autograd and modules."""
        try:
            from pronghorn.layers.block import Block, Call
            from pronghorn.layers.decoder import RUN
        except ImportError:
            return {}
        torch, base = self.torch, self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        layers, packed = base.model._pronghorn_layers, row["packed"]
        embeds = base.model.embed_tokens(row["input_ids"])
        with torch.autocast("cuda", torch.bfloat16, enabled=self.full):
            step = layers.begin(packed, embeds.dtype, narrow=False)
        tables = base.model.rotary_emb(embeds, row["position_ids"])
        runs = [layer.__dict__[RUN] for layer in base.model.layers]
        if not all(isinstance(block, Block) for run in runs for block in run.blocks):
            return {}
        cos, sin = step.rotary(tables, packed.tokens)
        attention = step.attention(runs[0].blocks[0], embeds.device)
        from pronghorn.memory.plan import Policy

        call = Call(packed, cos, sin, Policy.KEEP, None, True, attention)
        times = []
        with torch.no_grad():
            for _ in range(12):
                torch.cuda.synchronize()
                start, x = time.perf_counter(), embeds.flatten(0, 1)
                step.copies = None
                for run in runs:
                    for block in run.blocks:
                        begun = [linear.begin()[0] for linear in block.linears]
                        x = block.compute(x, (), begun, call).x
                times.append((time.perf_counter() - start) * 1e3)
        looks = []
        for _ in range(20):
            start = time.perf_counter()
            assert layers._builds[0].watch.same()
            looks.append((time.perf_counter() - start) * 1e3)
        return {"bare_launch_ms": statistics.median(times[2:]), "watch_ms": statistics.median(looks)}


def quantise(model: Any) -> None:
    """Replace the linears of all layers by bitsandbytes' NF4 ones."""
    import bitsandbytes as bnb
    import torch

    for layer in model.model.layers:
        for path, linear in list(layer.named_modules()):
            if type(linear) is torch.nn.Linear:
                options = {"quant_type": "nf4", "compress_statistics": True}
                made = bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    device="meta",
                    **options,
                )
                made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **options).to("cuda")
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, made)
    model.is_loaded_in_4bit = True


def shape(name: str) -> dict[str, Any]:
    """The fields of a known shape."""
    try:
        from pronghorn.diagnose.shapes import shape_of
    except ImportError:  # trees before the benchmarks left the package
        from pronghorn.bench.shapes import shape_of
    found = shape_of(name)
    assert found is not None, name
    return found


if __name__ == "__main__":
    main()
