"""What the figures that every training tells cost: the same training with and without them, by turns of four steps.

With them are the watch over gradients, the counters, what a log adds and the guard against memory that runs out.
Without, a step is TRL's over the same rows, model and loss. Two measurements:

    by turns     the median step of a turn with them over that of the next turn, without: the whole cost, and the
                 machine's noise
    on the host  the time that the host computes for them, less stock's norms of gradients and its clipping, which they
                 make superfluous, as a share of a step: on a CPU that is all of it

Both are taken of a training that clips gradients, and then of one that doesn't (`max_grad_norm: 0`).

    python -m benchmarks.always_on --model Llama-3.2-1B --tokens 8192 --pairs 20
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig

from benchmarks.program import parser_of, run
from benchmarks.record import Facts
from benchmarks.timing import STEPS_A_TURN, CudaClock, HostClock
from benchmarks.workload import make_rows
from pronghorn.diagnose.shapes import checkpoint_of
from pronghorn.loading.load import default_device, load_model
from pronghorn.models.lora import add_lora
from pronghorn.train.trainer import SFTTrainer

WARM_TURNS = 4
DOCUMENTS = 16
"""Of equal length in every row, so that all steps are alike."""


CALLS = ("training_step", "get_batch_samples", "log", "_clip_grad_norm", "_get_grad_norm")
NORMS = CALLS[3:]
"""Stock takes the norms of gradients in the one where it clips, in the other, for its log, where it doesn't."""


class Stock(trl.SFTTrainer):
    """TRL's trainer, timed on the host, below Pronghorn's."""

    inner = norms = 0.0


class ByTurns(SFTTrainer, Stock):
    """Pronghorn's trainer, that leaves its figures out every other turn."""

    def __init__(self, *args: Any, clock: CudaClock | HostClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock, self.marks, self.outer, self.told = clock, [], 0.0, True
        judge = self._watch.on_pre_optimizer_step
        self._watch.on_pre_optimizer_step = lambda *a, **k: self.outside(judge, *a, **k) if self.told else None

    def outside(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what Pronghorn does, timed on the host."""
        began = time.thread_time()
        result = call(*args, **kwargs)
        self.outer += time.thread_time() - began
        return result


def _below(name: str) -> Callable[..., Any]:
    def call(self: Stock, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = getattr(super(Stock, self), name)(*args, **kwargs)
        seconds = time.thread_time() - began
        self.inner += seconds
        self.norms += seconds if name in NORMS else 0.0
        return result

    return call


def _either(name: str) -> Callable[..., Any]:
    def call(self: ByTurns, *args: Any, **kwargs: Any) -> Any:
        if self.told:
            return self.outside(getattr(super(ByTurns, self), name), *args, **kwargs)
        return getattr(super(SFTTrainer, self), name)(*args, **kwargs)

    return call


for _name in CALLS:
    setattr(Stock, _name, _below(_name))
    setattr(ByTurns, _name, _either(_name))


class Turns(TrainerCallback):
    """Mark each step's beginning, and change what the trainer tells after each turn."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.inner_told = self.outer_told = self.stock_norms = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, step = self.trainer, state.global_step
        trainer.marks.append(trainer.clock.mark())
        if step % STEPS_A_TURN == 0:
            if step > WARM_TURNS * STEPS_A_TURN:
                if trainer.told:
                    self.inner_told, self.outer_told = self.inner_told + trainer.inner, self.outer_told + trainer.outer
                self.stock_norms += -trainer.norms if trainer.told else trainer.norms
            trainer.inner = trainer.outer = trainer.norms = 0.0
            trainer.told = (step // STEPS_A_TURN) % 2 == 0


def build(given: argparse.Namespace, checkpoint: Path, folder: Path, most: float) -> tuple[ByTurns, Turns]:
    """Return the trainer, which clips gradients to a norm of `most` (0: doesn't)."""
    device = default_device()
    torch.set_num_threads(1)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    model, tokenizer = load_model(checkpoint, max_seq_length=given.tokens, dtype=dtype, device=device)
    model = add_lora(model, r=16, lora_alpha=16)
    steps = STEPS_A_TURN * (WARM_TURNS + 2 * given.pairs)
    length = given.tokens // DOCUMENTS
    rows = make_rows(length * DOCUMENTS, "one", 1.0, model.config.vocab_size, seed=0)
    ids = [list(row.input_ids[i * length :][:length]) for row in rows for i in range(DOCUMENTS)]
    documents = [{"input_ids": document, "labels": document} for document in ids]
    config = SFTConfig(
        output_dir=str(folder / "out"),
        packing=True,
        max_length=given.tokens,
        per_device_train_batch_size=1,
        max_steps=steps,
        max_grad_norm=most,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=not cuda,
        disable_tqdm=True,
    )
    turns = Turns()
    trainer = ByTurns(
        model,
        config,
        train_dataset=Dataset.from_list(documents),
        tokenizer=tokenizer,
        callbacks=[turns],
        clock=CudaClock() if cuda else HostClock(time.thread_time),  # other programs' time isn't ours
    )
    turns.trainer = trainer
    return trainer, turns


def of_median_95(ordered: Sequence[float]) -> tuple[float, float]:
    """Return between which of some ordered values their median lies with 95 % at least, whatever their distribution.

    As many of n lie below it as tosses of a coin. All of fewer than six are less than that.
    """
    n = len(ordered)
    left_out = [k for k in range(1, n) if 2 * sum(math.comb(n, i) for i in range(k)) <= 0.05 * 2**n]
    least = max(left_out, default=1) - 1
    return ordered[least], ordered[n - 1 - least]


def measure(given: argparse.Namespace, checkpoint: Path, folder: Path, most: float) -> dict[str, Any]:
    """Train once, and compare the turns with the figures to those without."""
    gc.collect()  # a training before, whose memory and graphs shouldn't go in the midst of this one
    trainer, turns = build(given, checkpoint, folder, most)
    trainer.train()
    trainer.marks.append(trainer.clock.mark())
    # a turn's first step begins within the one before it: its figures are told late
    times = trainer.clock.milliseconds(trainer.marks)
    medians = [
        statistics.median(times[first + 1 : first + STEPS_A_TURN])
        for first in range(WARM_TURNS * STEPS_A_TURN, len(times), STEPS_A_TURN)
    ]
    costs = sorted(told / untold - 1 for told, untold in zip(medians[::2], medians[1::2], strict=True))
    steps = STEPS_A_TURN * given.pairs
    # with them, gradients are clipped by norms that the watch has taken: that stock's own aren't counts, too
    ours, stock = (seconds * 1e3 / steps for seconds in (turns.outer_told - turns.inner_told, turns.stock_norms))
    step = statistics.median(medians[1::2])
    return {
        "step_ms": step,
        "by_turns": statistics.median(costs),
        "by_turns_95": of_median_95(costs),
        "host_ms_a_step": ours - stock,
        "host_share": (ours - stock) / step,
        "host_ms_of_ours": ours,
        "host_ms_of_stock_s_norms": stock,
    }


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="Llama-3.2-1B", help="a shape's name or a model's folder")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=20, help="turns with and without the figures")
    return parser


def main(given: argparse.Namespace) -> None:
    """Measure a training that clips gradients, and one that doesn't."""
    with tempfile.TemporaryDirectory() as name, Facts(given, "trl") as facts:
        folder = Path(name)
        checkpoint = checkpoint_of(given.model, folder, seed=0)
        facts |= {"model": given.model, "tokens": given.tokens, **measure(given, checkpoint, folder, most=1.0)}
        facts["without_clipping"] = measure(given, checkpoint, folder, most=0.0)


if __name__ == "__main__":
    run(arguments, main)
