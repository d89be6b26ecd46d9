"""What every step says of itself, always: counted on the host from what it knows anyway, so nothing waits for it.

Several processes add up what they counted when a log gathers their losses anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.data.batch import PackedBatch
from pronghorn.device import processes


def is_spare(packed: Any) -> bool:
    """Tell whether a micro-batch takes part for the other processes' sake alone, without labels (`data.dealing`)."""
    return isinstance(packed, PackedBatch) and packed.n_labels == 0 and processes() > 1


class StepCounters:
    """Tokens of all processes and time of this one since the last log. A padded batch's real tokens are
    summed on the device and read when the log reads the loss anyway."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._started: float | None = None
        self._tokens = self._labelled = self._places = 0
        self._padded: list[Tensor] = []
        self._balance: list[Tensor] = []
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the fetching of batches. While the device is still busy with the step before, waiting costs nothing, so
        the share is at most this."""
        began = time.perf_counter()
        self._started = self._started or began
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what is not part of a step."""
        started, began = self._started, time.perf_counter()
        try:
            yield
        finally:
            self._started = None if started is None else started + time.perf_counter() - began

    def add(self, inputs: dict[str, Any]) -> None:
        """Count a micro-batch."""
        self._started = self._started or time.perf_counter()
        packed = inputs.get("packed")
        if is_spare(packed):
            return
        self._places += inputs["input_ids"].numel()
        if isinstance(packed, PackedBatch):
            self._tokens += packed.real_tokens
            self._labelled += packed.n_labels
        else:
            self._padded.append(torch.stack([inputs["attention_mask"].sum(), (inputs["labels"][:, 1:] != -100).sum()]))

    def add_balance(self, aux_loss: Tensor | None) -> None:
        """Count a micro-batch's auxiliary loss of routers, if it has one. It is copied: a graph that is replayed writes
        to the same place again."""
        if aux_loss is not None:
            self._balance.append(aux_loss.detach().float().clone())

    def take(self, device: torch.device, balances: bool = False) -> dict[str, float]:
        """Return the figures since the last time: real and supervised tokens, seconds, and shares of them. All
        processes call it, each with its device.

        Args:
            balances: of all processes, whether there is an auxiliary loss, whose mean over micro-batches is returned.
        """
        tokens, labelled, places = self._tokens, self._labelled, self._places
        for counted in self._padded:
            tokens, labelled = tokens + int(counted[0]), labelled + int(counted[1])
        if processes() > 1:
            counts = torch.tensor([tokens, labelled, places], device=device)
            dist.all_reduce(counts)
            tokens, labelled, places = counts.tolist()
        now = time.perf_counter()
        seconds = now - (self._started or now)
        figures = {
            "tokens": tokens,
            "labelled_tokens": labelled,
            "step_seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "supervised_share": labelled / max(tokens, 1),
            "packing_efficiency": tokens / max(places, 1),
            "data_wait_share": min(self._waited / max(seconds, 1e-9), 1.0),
        }
        if balances:
            # torch's sum() of none is 0: a process may have had rows without labels alone
            summed = torch.stack([torch.zeros((), device=device), *self._balance]).sum()
            both = torch.stack([summed, torch.tensor(float(len(self._balance)), device=device)])
            if processes() > 1:
                dist.all_reduce(both)
            figures["aux_loss"] = (both[0] / both[1].clamp(min=1)).item()
        self._reset()
        self._started = now
        return figures
