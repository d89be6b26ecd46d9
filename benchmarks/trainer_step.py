"""What a step of Pronghorn's trainer costs over the bare step: forward, backward and AdamW's update, in a loop.

    python -m benchmarks.trainer_step --out trainer-step.json
    python -m benchmarks.trainer_step --only qwen3-0.6b --pairs 10 --out trainer-step.json

Both train one model, attached once, on the same rows, by turns of `STEPS` steps in one process: the trainer takes a
turn, with all that it does by default (the next row is read and moved, gradients are watched and clipped, figures are
logged every 10 steps), then the bare loop takes the rows of that turn, which lie on the device already. A turn is
timed as a whole, from an idle device until it is idle again. LoRA r16, one packed row of log-normal documents a step.

The learning rate is 0, with which AdamW computes as with any other: weights stay as they are, and each bare loss must
be the trainer's of that row, else figures are withheld. `waits` lists where the trainer's last untimed turn waited for
the GPU; the log, which it writes once, is one of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import parts
from benchmarks.ablation import documents_of
from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts
from benchmarks.timing import spread


@dataclass(frozen=True)
class Case:
    """A shape, and what a script asks for."""

    shape: str
    most: float
    """The most that the trainer's step may take over the bare one; 0: nothing is asked."""
    logging_steps: int = 10
    bf16: bool = False
    """Whether the trainer puts its step under autocast, TRL's default on a GPU; the bare one has none."""


CASES = {
    "qwen3-0.6b": Case("Qwen3-0.6B", 1.05),
    "llama-3.1-8b": Case("Llama-3.1-8B", 1.03),
    "qwen3-0.6b-each-logged": Case("Qwen3-0.6B", 0.0, logging_steps=1),
    "qwen3-0.6b-autocast": Case("Qwen3-0.6B", 0.0, bf16=True),
    "tiny": Case("tiny", 0.0),
}
"""The last one tries the program."""
ASKED = [name for name, case in CASES.items() if case.most]
STEPS = 8
"""Of a turn."""
WARM_TURNS = 4
"""Turns at the start that don't count: more steps than Pronghorn needs to choose CUDA graphs."""
COINCIDE = 1e-5
"""The most that a bare loss may be off the trainer's, as a share: kernels and weights are the same."""
COINCIDE_IN_AUTOCAST = 1e-3
"""The same where the trainer alone rounds as autocast does."""


def part(name: str, given: Any) -> dict[str, Any]:
    """Measure one case."""
    import torch

    from benchmarks.records import build

    case = CASES[name]
    model = build(case.shape, "lora")
    with tempfile.TemporaryDirectory() as folder:
        trainer, turns = trainer_of(model, case, given, folder)
        trainer.train()
    cuda = torch.cuda.is_available()
    pairs = turns.pairs[WARM_TURNS:]
    found: dict[str, Any] = {"shape": case.shape, "tokens": given.tokens, "steps_a_turn": STEPS, "most": case.most}
    found |= {name: [pair[name] / STEPS for pair in pairs] for name in ("trainer_ms", "bare_ms")}
    found["ratio"] = spread([pair["trainer_ms"] / pair["bare_ms"] for pair in pairs])
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
    found["waits"] = turns.waits
    found["paths"] = [f"{path.part}: {path.path} ({path.why})" for path in turns.handle.paths(None)]
    off = max(pair["loss_off"] for pair in turns.pairs)
    most = COINCIDE_IN_AUTOCAST if case.bf16 else COINCIDE
    return found | {"gate": {"losses off by": off, "most": most, "green": off <= most}}


def trainer_of(model: Any, case: Case, given: Any, folder: str) -> tuple[Any, Any]:
    """Make the trainer, and the callback that takes the bare turns and times both."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig

    from pronghorn.diagnose.profile import watch_synchronisations
    from pronghorn.diagnose.shapes import byte_tokenizer
    from pronghorn.models.attach import attached
    from pronghorn.train.trainer import SFTTrainer

    cuda = torch.cuda.is_available()

    def now() -> float:
        """Return the milliseconds at which all work so far is done."""
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    class Keeping(SFTTrainer):
        """Keep each step's batch and loss, for the bare turn."""

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = self._prepare_inputs(inputs)
            loss = super().training_step(model, batch, *args, **kwargs)
            turns.kept.append((batch, loss))
            return loss

    class Turns(TrainerCallback):
        """Time the trainer's turns; take and time the bare ones between them."""

        def __init__(self) -> None:
            self.kept: list[tuple[Any, Any]] = []
            self.pairs: list[dict[str, float]] = []
            self.began: float | None = None
            self.watched = ExitStack()
            self.places: list[Any] = []
            self.waits: list[str] = []
            self.handle: Any = attached(model)
            parameters = [p for p in model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=cuda)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if len(self.kept) == STEPS or self.began is None:
                self.take()
                self.began = now()
                if cuda and len(self.pairs) == WARM_TURNS - 1:
                    self.places = self.watched.enter_context(watch_synchronisations())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.take()

        def take(self) -> None:
            """End the trainer's turn and take the bare one over its rows."""
            if self.began is None:
                return
            if cuda and len(self.pairs) == WARM_TURNS - 1:
                self.watched.close()
                self.waits = [f"{os.path.basename(at.filename)}:{at.lineno}: {at.line}" for at in self.places]
            begun, trained, losses = self.began, now(), []
            for batch, _ in self.kept:
                loss = model(**batch).loss
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
            ended = now()
            off = max(abs((a / b.item()).item() - 1) for a, (_, b) in zip(losses, self.kept, strict=True))
            self.pairs.append({"trainer_ms": trained - begun, "bare_ms": ended - trained, "loss_off": off})
            self.kept.clear()

    config = SFTConfig(
        output_dir=folder, packing=True, max_length=given.tokens, per_device_train_batch_size=1,
        max_steps=STEPS * (WARM_TURNS + given.pairs), learning_rate=0.0, gradient_checkpointing=False,
        bf16=case.bf16 and cuda, logging_steps=case.logging_steps, save_strategy="no", report_to="none",
        disable_tqdm=True, seed=0, use_cpu=not cuda,
    )  # fmt: skip
    documents = [{"input_ids": list(ids), "labels": list(ids)} for ids in documents_of(model, given.tokens)]
    tokenizer = byte_tokenizer(given.tokens)
    trainer = Keeping(model, config, train_dataset=Dataset.from_list(documents), tokenizer=tokenizer)
    turns = Turns()
    trainer.add_callback(turns)
    return trainer, turns


def row_of(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a case's row of the table."""
    trainer, bare = (statistics.median(found[each]) for each in ("trainer_ms", "bare_ms"))
    middle, least, most = found["ratio"]
    told = f"{middle:.3f} ({least:.3f} to {most:.3f})" if found["gate"]["green"] else "withheld: losses differ"
    return {
        "model": name,
        "trainer's step, ms": f"{trainer:,.2f}",
        "bare step, ms": f"{bare:,.2f}",
        "trainer over bare": told,
        "asked": f"{found['most']:.2f}" if found["most"] else None,
    }


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of a packed row, one row a step")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each that count")
    parts.add_arguments(parser, list(CASES), limit_s=400)
    parser.set_defaults(only=ASKED)
    return parser


def main(given: argparse.Namespace) -> bool:
    """Measure the cases; tell whether all ran and their losses coincide."""
    with Facts(given, "trl") as facts:
        done = parts.run_parts(facts, given, "benchmarks.trainer_step")
        done = {name: done[name] for name in given.only}
    whole = {name: found for name, found in done.items() if "error" not in found}
    show([row_of(name, found) for name, found in whole.items()], str(facts["device"]))
    return len(whole) == len(done) and all(found["gate"]["green"] for found in whole.values())


if __name__ == "__main__":
    run(arguments, main)
