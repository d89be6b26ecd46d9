"""Several GPUs of one host together, against the sum of what each does alone at the same time.

    python -m benchmarks.ranks --model Llama-3.1-8B --out ranks-llama-3.1-8b.json
    python -m benchmarks.ranks --model Qwen3-14B --method qlora --strategies copies --out ranks-qwen3-14b-nf4.json
    python -m benchmarks.ranks --model Llama-3.1-8B --tokens 32768 --lengths mixed --strategies copies --ahead 16

A process a GPU trains LoRA r16, or all weights, through `pronghorn.SFTTrainer`, one packed row of documents a step and
GPU, with random weights that every process makes from one seed:

    alone       all at the same time, none knows of the others, each with the rows that it has together: what heat and
                the host cost is in it
    copies      together, each holds the whole model
    sharded     together, each holds a part of every layer (`launch.strategy`)
    accelerate  full fine-tuning by accelerate's FSDP2 with compiled layers of transformers, which recomputes where it
                runs out of memory otherwise; its first loss is within 1 % of ours, more isn't judged
    ahead       as copies, rows of so many steps regrouped by cost (`packing.look_ahead`), beside the gain that was
                predicted; then nobody is alone

Before a rate counts, one step of plain SGD over a row of each process is compared with the same step of one process
that accumulates these rows: its loss within 1e-3, the change of what is trained with a cosine of at least 0.9999 and a
norm within 1 %. Where products may round otherwise, the change of adapters is at most twice as far from float32's as
that of one process: layers that are shared keep LoRA's A apart from the weight that it is multiplied with, and one
process that accumulates long rows may plan otherwise (tiles of the MLP's rows). In full
fine-tuning (float32 masters, bf16 compute) the change is that of every weight, gathered by the first process; where one
GPU has no room for the model, --gate-model judges its first layers. A second phase that fails costs no other; on the
CPU (gloo) it shows that it works, not how fast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts
from pronghorn.compute_names import ComputeName

STRATEGIES = ("copies", "sharded")
TOLD = ("model", "method", "compute", "processes", "tokens", "lengths", "logging", "copy_trained")
ACCELERATE = ("accelerate", "accelerate-recomputed")
ALONE, AHEAD, MIXED, ONE, EXACT = "alone", "copies-ahead", "mixed", "one", "exact"
WARM = 0.4
"""Share of the steps, at the start, whose time doesn't count."""
LOSS, COSINE, NORM = 1e-3, 0.9999, 0.01
FACTOR = 2.0
"""How many times as far from float32 as one process's gradients those of shared layers may be."""
ROOT = Path(__file__).resolve().parents[1]


def worker(given: Any) -> None:
    """Train as one process of a phase, and write what it took."""
    import torch

    from benchmarks import accelerate_fsdp
    from benchmarks.records import build
    from pronghorn.data.dealing import DealtRows, Share
    from pronghorn.environment import grow_segments
    from pronghorn.models.attach import attached
    from pronghorn.models.families import base_causal_lm
    from pronghorn.parallel.sharded import sharded

    grow_segments()
    rank, processes = given.rank, int(os.environ.get("WORLD_SIZE", "1"))
    cuda, folder = torch.cuda.is_available(), Path(given.folder)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if given.phase in ACCELERATE:
        found = accelerate_fsdp.train(given, rank, processes, WARM, given.phase == ACCELERATE[1])
        (folder / f"{given.phase}-{rank}.json").write_text(json.dumps(found))
        torch.distributed.destroy_process_group()
        return
    model = build(given.model, given.method)
    if given.phase == EXACT:
        model = model.float()
    before = values(model) if given.judged else {}
    trainer = trainer_of(model, given, folder / f"out-{rank}", rank, processes)
    found = {}
    if given.ahead:  # otherwise as the trainer chooses
        trainer.look_ahead = given.ahead if given.phase == AHEAD else 1
    loader = trainer.get_train_dataloader()
    dealt: Any = loader.batch_sampler
    if given.phase == ALONE:
        share = Share(rank, given.processes, 1, 1)
        vars(dealt).update(vars(DealtRows(dealt.costs, share, trainer.args.seed, look_ahead=None)))
        trainer.get_train_dataloader = lambda: loader
    found["look_ahead"] = dealt.look_ahead
    found["waiting"] = {ahead: dealt.waiting(ahead)[1] for ahead in {1, given.ahead or dealt.look_ahead}}
    losses, seconds, steps = trained(trainer)
    found |= {"losses": losses, "seconds": seconds, "steps": steps}
    handle: Any = attached(model)
    if given.judged:
        after = values(model)
        if after:
            change = torch.cat([(value - before[name]).flatten().float() for name, value in after.items()])
            torch.save(change, folder / f"{given.phase}-{rank}.pt")
    else:
        found["tokens_per_s"] = given.tokens * steps / seconds if steps else 0.0
    found["out_of_memory"] = [entry for entry in trainer.state.log_history if "out_of_memory" in entry]
    if cuda:
        shared = sharded(base_causal_lm(model))
        found["peak_bytes"] = torch.cuda.max_memory_allocated() + (0 if shared is None else shared.mapped_bytes)
        found["predicted"] = dict(handle.plan.predicted) if handle.plan is not None else {}
    with trainer.accelerator.autocast():
        found["paths"] = [f"{path.part}: {path.path} ({path.why})" for path in handle.report]
    (folder / f"{given.phase}-{rank}.json").write_text(json.dumps(found))
    if processes > 1:
        torch.distributed.destroy_process_group()


def values(model: Any) -> dict[str, Any]:
    """Return what is trained, in host memory; of trained layers that are shared the first process has all, others
    nothing."""
    from pronghorn.models.families import base_causal_lm
    from pronghorn.parallel.sharded import sharded
    from pronghorn.parallel.state import gathering
    from pronghorn.parity.parameters import trainable

    shared = sharded(base_causal_lm(model))
    if shared is None or shared.trained is None:
        return {name: p.detach().to("cpu", copy=True) for name, p in trainable(model).items()}
    with gathering(model) as read:
        return {} if read is None else {name: read(p).cpu() for name, p in model.named_parameters()}


def trainer_of(model: Any, given: Any, folder: Path, rank: int, processes: int) -> Any:
    """Make the trainer of one process; joins the others."""
    import torch
    from accelerate import PartialState
    from datasets import Dataset
    from trl import SFTConfig

    from benchmarks.workload import ROWS, make_rows
    from pronghorn.diagnose.shapes import byte_tokenizer
    from pronghorn.loading.share import share_layers
    from pronghorn.memory.plan import Plan
    from pronghorn.models.attach import attach
    from pronghorn.precision.compute import Compute
    from pronghorn.train.trainer import SFTTrainer

    cuda = torch.cuda.is_available()
    config = SFTConfig(
        output_dir=str(folder), packing=True, max_length=given.tokens, per_device_train_batch_size=1,
        gradient_accumulation_steps=given.accumulation, max_steps=given.steps,
        learning_rate=1.0 if given.judged else 1e-4,
        lr_scheduler_type="constant", optim="sgd" if given.judged else "adamw_torch_fused", max_grad_norm=0.0,
        logging_steps=1 if given.judged else given.logging, gradient_checkpointing=False,
        bf16=cuda and given.method == "full", save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        use_cpu=not cuda,
    )  # fmt: skip
    if processes > 1:
        PartialState(cpu=not cuda)
    if given.phase.startswith("sharded"):
        share_layers(model, model.device, Compute.of(given.compute), given.copy_trained)
        if cuda:
            torch.cuda.empty_cache()
    compute = "dtype" if given.phase == EXACT else given.compute
    plan = Plan.asked("auto") if cuda else Plan.keep()
    attach(model, plan, compute=compute, **({} if cuda else {"layers": "fused"}))
    documents = []
    for seed in range(math.ceil(given.steps * given.processes / ROWS)):  # no epoch ends while the clock runs
        lengths = ("one", "lognormal")[seed % 2] if given.lengths == MIXED else given.lengths
        rows = make_rows(given.tokens, lengths, 1.0, model.config.vocab_size, seed)
        documents += [row.input_ids[a:b] for row in rows for a, b in row.bounds if b > a + 1]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return SFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_list([{"input_ids": list(ids), "labels": list(ids)} for ids in documents]),
        tokenizer=byte_tokenizer(given.tokens),
    )


def trained(trainer: Any) -> tuple[list[float], float, int]:
    """Train; return the losses, and the seconds of so many last steps."""
    import torch
    from transformers import TrainerCallback

    warm, marks = int(WARM * trainer.args.max_steps), []

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (warm, args.max_steps):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())

    trainer.add_callback(Marks())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counted = trainer.args.max_steps - warm if len(marks) == 2 else 0
    return losses, marks[-1] - marks[0], counted


def phase(name: str, given: argparse.Namespace, folder: Path, judged: bool) -> list[dict[str, Any]]:
    """Run the processes of a phase at the same time, and return what each wrote.

    Raises:
        RuntimeError: one failed, with the end of what it printed.
    """
    together, one = name.startswith((*STRATEGIES, *ACCELERATE)), name in (ONE, EXACT)
    count = 1 if one else given.processes
    told = {
        **{key: getattr(given, key) for key in (*TOLD, "ahead")},
        **{"phase": name, "folder": str(folder), "judged": judged, "steps": 1 if judged else given.steps},
        "accumulation": given.processes if one else 1,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for rank in range(count):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), *sys.path]))
        }
        if together:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment |= {key: str(value) for key, value in numbers.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        elif "CUDA_VISIBLE_DEVICES" not in os.environ:
            environment["CUDA_VISIBLE_DEVICES"] = str((rank + (name == EXACT)) % given.processes)
        log = (folder / f"{name}-{rank}.log").open("w")
        command = [sys.executable, "-m", "benchmarks.ranks", "--worker", json.dumps(told | {"rank": rank})]
        running.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT), log))
    until = time.time() + given.limit
    codes = []
    for process, log in running:
        try:
            codes.append(process.wait(max(until - time.time(), 1)))
        except subprocess.TimeoutExpired:
            codes.append(-1)
        log.close()
    for process, _ in running:
        if process.poll() is None:
            process.kill()
    for rank, code in enumerate(codes):
        if code:
            printed = (folder / f"{name}-{rank}.log").read_text(errors="replace").splitlines()
            lines = [line for line in printed if line.strip() and not line.startswith("frame #")][-8:]
            raise RuntimeError(f"process {rank} of {name}: {'too slow' if code == -1 else f'code {code}'}: {lines}")
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(count)]


def gate(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare one step of a strategy with one process that accumulates."""
    import torch

    given = argparse.Namespace(**vars(given) | {"model": given.gate_model or given.model})

    def run_missing(*names: str) -> None:
        needed = [each for each in names if not (folder / f"{each}-0.pt").is_file()]
        with ThreadPoolExecutor() as pool:  # each on a GPU of its own
            list(pool.map(lambda each: phase(each, given, folder, judged=True), needed))

    by_exact = name == "sharded" and given.method.startswith("lora")
    run_missing(*(ONE, EXACT)[: 1 + by_exact])
    expected = json.loads((folder / "one-0.json").read_text())["losses"][0]
    loss = phase(f"{name}-judged", given, folder, judged=True)[0]["losses"][0]
    change, whole = torch.load(folder / f"{name}-judged-0.pt"), torch.load(folder / "one-0.pt")
    a, b = change.double(), whole.double()  # so many products that float32's sum is off by per cents
    cosine, norm = float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())
    files = [folder / f"{name}-judged-{rank}.pt" for rank in range(1, given.processes)]
    others = [torch.load(file) for file in files if file.is_file()]
    found = {"loss": loss, "of one": expected, "cosine": cosine, "norm": norm}
    found["processes agree"] = all(torch.equal(other, change) for other in others)
    near = cosine >= COSINE
    if by_exact or (not near and given.method.startswith("lora")):
        run_missing(EXACT)
        exact = torch.load(folder / f"{EXACT}-0.pt").double()
        found["error"], found["error of one"] = (float((x - exact).norm() / exact.norm()) for x in (a, b))
        near = found["error"] <= FACTOR * found["error of one"] + 1e-6
    near &= abs(loss - expected) <= LOSS * abs(expected) and abs(norm - 1) <= NORM
    return found | {"green": near and found["processes agree"]}


def measure(given: argparse.Namespace, facts: Facts) -> None:
    """Run all phases, keeping what is done."""
    with tempfile.TemporaryDirectory(prefix="pronghorn-ranks-") as scratch:
        folder = Path(scratch)
        facts["phases"] = phases = dict[str, Any]()
        for name in given.strategies:
            phases[name] = {}
            try:
                phases[name]["gate"] = gate(name, given, folder)
                if phases[name]["gate"]["green"]:
                    phases[name]["processes"] = phase(name, given, folder, judged=False)
            except RuntimeError as error:
                phases[name]["error"] = str(error)
            facts.keep()
        if given.ahead and "processes" in phases.get("copies", {}):
            try:
                phases[AHEAD] = {"processes": phase(AHEAD, given, folder, judged=False)}
            except RuntimeError as error:
                phases[AHEAD] = {"error": str(error)}
        if given.against:
            against(phases, given, folder)
            facts.keep()
        if given.ahead:  # what is compared is two ways to deal the same rows
            return
        try:
            phases[ALONE] = {"processes": phase(ALONE, given, folder, judged=False)}
        except RuntimeError as error:  # a base that fits no GPU is what sharding is for
            phases[ALONE] = {"error": str(error)}


def against(phases: dict[str, Any], given: argparse.Namespace, folder: Path) -> None:
    """Time accelerate's FSDP2; recomputing where keeping all activations fails."""
    expected = next((found["gate"]["of one"] for found in phases.values() if "gate" in found), None)
    for name in ACCELERATE:
        try:
            found = phase(name, given, folder, judged=False)
        except RuntimeError as error:
            phases[name] = {"error": str(error)}
            continue
        first = sum(each["losses"][0] for each in found) / len(found)
        near = expected is not None and abs(first - expected) <= 0.01 * expected
        phases[name] = {"processes": found} if near else {"error": f"first loss {first}, expected {expected}"}
        return


def rate(found: dict[str, Any]) -> float | None:
    """Return the tokens a second of all processes."""
    return sum(each["tokens_per_s"] for each in found["processes"]) if "processes" in found else None


def gain(phases: dict[str, Any], ahead: int) -> dict[str, float]:
    """Return how much faster regrouped rows were, and were predicted to be; empty where one of both didn't run."""
    turns, regrouped = (rate(phases.get(name, {})) for name in ("copies", AHEAD))
    if not turns or not regrouped:
        return {}
    waiting = phases[AHEAD]["processes"][0]["waiting"]
    return {"measured": regrouped / turns, "predicted": (1 - waiting[str(ahead)]) / (1 - waiting["1"])}


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny", help="a known shape")
    parser.add_argument("--method", default="lora", choices=("lora", "qlora", "lora+experts", "full"))
    parser.add_argument("--compute", default="dtype", choices=get_args(ComputeName), help="of frozen weights' products")
    parser.add_argument("--gate-model", metavar="NAME@N", help="what the gate compares where one GPU has no room")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--against", action="store_true", help="accelerate's FSDP2 beside, for --method full")
    parser.add_argument(
        "--copy-trained",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sharded, full: by copy engines, or by NCCL (`share_layers`)",
    )
    parser.add_argument("--processes", type=int, default=0, help="GPUs; 0: all there are, two on the CPU")
    parser.add_argument("--tokens", type=int, default=8192, help="of a packed row, one a step and process")
    parser.add_argument(
        "--lengths",
        default="lognormal",
        metavar="FILE|lognormal|one|mixed",
        help="of documents; mixed: every other four rows are one",
    )
    parser.add_argument("--ahead", type=int, default=0, help="steps whose rows are regrouped in a phase of its own")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--logging", type=int, default=10, help="steps from one log, which waits for the GPU, to the next"
    )
    parser.add_argument("--limit", type=int, default=170, metavar="SECONDS", help="of each phase")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure; tell whether every strategy ran with a green gate."""
    if given.worker:
        worker(argparse.Namespace(**json.loads(given.worker)))
        return True
    import torch

    given.processes = given.processes or max(torch.cuda.device_count(), 0) or 2
    with Facts(given, "trl") as facts:
        facts |= {key: getattr(given, key) for key in (*TOLD, "steps")}
        facts["lengths"] = Path(given.lengths).name
        measure(given, facts)
        alone = rate(facts["phases"].get(ALONE, {}))
        balanced = gain(facts["phases"], given.ahead)
        if balanced:
            facts["gain"] = balanced
            print(f"balanced: {balanced['measured']:.3f} times as fast, predicted {balanced['predicted']:.3f}")
        rows = []
        for name, found in facts["phases"].items():
            total = rate(found)
            if total is not None and alone and name != ALONE:
                found["of_the_sum"] = total / alone
            peaks = [each.get("peak_bytes", 0) for each in found.get("processes", [])]
            rows.append(
                {
                    "phase": name,
                    "tokens/s": f"{total:,.0f}" if total is not None else found.get("error", "gate is red"),
                    "of the sum alone": f"{found['of_the_sum']:.1%}" if "of_the_sum" in found else None,
                    "peak a GPU, GiB": f"{max(peaks) / 2**30:.2f}" if peaks else None,
                }
            )
    show(rows, f"{given.model}, {given.method}, {given.processes} processes, {facts['device']}")
    return all("processes" in facts["phases"][name] for name in given.strategies)


if __name__ == "__main__":
    run(arguments, main)
