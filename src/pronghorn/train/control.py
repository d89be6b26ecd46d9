"""When a run saves and when it ends: a signal, the time limit, minutes since the last checkpoint, no better evaluation.

Ranks have their own clocks and get their signals at different moments, but must save and stop after the same step. Each
step their wishes are reduced to the largest; on a GPU the result is read one step later, so that nobody waits for it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from pronghorn.device import processes
from pronghorn.train.gradients import to_host

HANGUP = signal.SIGHUP
"""The terminal is gone, or the connection to it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, HANGUP)
SAME_SIGNAL = 1.0
"""Seconds within which a second signal counts as the first: torchrun passes on a Ctrl-C that its processes got too."""
LOG_SECONDS = 30.0
"""Seconds since the last log after which a step logs, whatever its number."""


class RunControl(TrainerCallback):
    """Save every `save_minutes`; save and stop at a signal, after `max_minutes` of training in all, or after
    `patience` evaluations in a row without a lower loss. Every better evaluation is saved too. What is saved is logged
    first, and no run goes without a log for long.

    `stopped` says why training ended before its last step: a signal's name, "max_minutes", "patience", or None;
    `signal` is the number of the signal, or 0; `seconds_before` what training took before a resume; `hang_up` is called
    when the terminal is gone, where every write fails.
    """

    def __init__(self, max_minutes: float | None, save_minutes: float | None, patience: int | None) -> None:
        self.max_minutes, self.save_minutes, self.patience = max_minutes, save_minutes, patience
        self.hang_up: Callable[[], None] = lambda: None
        self.stopped: str | None = None
        self.signal = 0
        self.measured: dict[str, str] = {}
        """What held-out losses are of: which rows, and adapters of which scale. Empty where none are measured."""
        self._asked = 0
        self.seconds_before = 0.0
        self._started = self._saved = self._logged = 0.0
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP as a wish to stop after the step; a second one, later, ends the program as
        usual, unless it is SIGHUP again, which both a terminal and its shell send.

        A SIGHUP that is ignored (`nohup`) stays so. Does nothing outside the main thread, where Python allows no signal
        handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.getsignal(number) for number in SIGNALS}
        if earlier.get(HANGUP) == signal.SIG_IGN:
            del earlier[HANGUP]
        first = math.inf

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if number == HANGUP:
                self.hang_up()
            elif time.monotonic() - first > SAME_SIGNAL:
                for other, handler in earlier.items():
                    signal.signal(other, handler)
                signal.raise_signal(number)
            if not self._asked:
                self._asked, first = number, time.monotonic()

        for number in earlier:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = self._saved = self._logged = time.monotonic()
        self.seconds_before = trained_seconds(state)
        state.compute_steps(args, state.max_steps)  # a checkpoint's state has the intervals of its own recipe
        self.forget_other_losses(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        late = self.max_minutes is not None and self.seconds_before + now - self._started > 60 * self.max_minutes
        due = self.save_minutes is not None and now - self._saved > 60 * self.save_minutes
        silent = now - self._logged > LOG_SECONDS
        agreed = self._agree([self._asked, int(late), int(due), int(silent)], args.device)
        number, late, due, silent = agreed[0], bool(agreed[1]), bool(agreed[2]), bool(agreed[3])
        if due:
            control.should_save = True
        if number or late:
            control.should_save = control.should_training_stop = True
            self.signal = number
            if number or state.global_step < state.max_steps:
                self.stopped = signal.Signals(number).name if number else "max_minutes"
        # what is logged after a save would lack the steps before a resume, and a better evaluation is saved
        if silent or control.should_save or control.should_evaluate:
            control.should_log = True

    def forget_other_losses(self, state: Any) -> bool:
        """Leave out the losses of other held-out rows than those of now, or of adapters of another scale, and the best
        if it was one of them, as neither says whether a loss of now is lower; tell whether there were any."""
        others = [
            entry
            for entry in state.log_history
            if "eval_loss" in entry and any(entry.get(name, now) != now for name, now in self.measured.items())
        ]
        if not others:
            return False
        for entry in others:
            del entry["eval_loss"]
        if state.best_global_step in [entry["step"] for entry in others]:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        return True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history[-1] |= self.measured
        if _evaluations_since_best(state) == 0:
            control.should_save = True
        if self.out_of_patience(state):
            control.should_save = control.should_training_stop = True
            if not self.signal:  # which came first, and is what the run says
                self.stopped = "patience"

    def out_of_patience(self, state: Any) -> bool:
        """Tell whether the last `patience` evaluations were all no better than one before them."""
        return self.patience is not None and _evaluations_since_best(state) >= self.patience

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._logged = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = time.monotonic()

    def _agree(self, wishes: list[int], device: torch.device) -> list[int]:
        """Return the largest of all ranks' wishes, of this step or (on a GPU) of the step before."""
        if processes() == 1:
            return wishes
        shared = torch.tensor(wishes, dtype=torch.int32, device="cpu")
        if device.type == "cuda":
            shared = shared.pin_memory().to(device, non_blocking=True)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        host, event = to_host(shared)
        if event is None:
            return host.tolist()
        ready, self._pending = self._pending, (host, event)
        if ready is None:
            return [0] * len(wishes)
        ready[1].synchronize()
        return ready[0].tolist()


def _evaluations_since_best(state: Any) -> int:
    """Count the evaluations after the one of the lowest loss."""
    losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def trained_seconds(state: Any) -> float:
    """Return the logged seconds of training and evaluating so far, those before a resume included."""
    return sum(entry.get("step_seconds", 0.0) + entry.get("eval_runtime", 0.0) for entry in state.log_history)
