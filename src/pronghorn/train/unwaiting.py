"""What stock's loop waits for the GPU for in every step, done without waiting: the host would prepare the next step
only when the GPU has nothing left to do.

    batches    travel from pinned memory while the GPU computes
    losses     those that aren't finite are left out of the log's mean on the device; stock reads each loss for that
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pronghorn.train.shared_layers import SharedLayersTrainer


class UnwaitingTrainer(SharedLayersTrainer):
    """TRL's trainer without these waits. Its arguments keep their meaning."""

    _filters: bool | None = None
    """During a training: whether `logging_nan_inf_filter` was asked for."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make stock's accelerator one whose loaders don't wait for their batches to arrive."""
        super().create_accelerator_and_postprocess()
        if self.args.device.type == "cuda" and self.args.dataloader_pin_memory:
            self.accelerator.dataloader_config.non_blocking = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does."""
        self._filters = bool(self.args.logging_nan_inf_filter)
        try:
            with self._stock_filters(False):
                return super().train(*args, **kwargs)
        finally:
            self._filters = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do a micro-batch's forward and backward. A loss that isn't finite counts as the mean so far, as in stock."""
        loss = super().training_step(*args, **kwargs)
        if not self._filters:
            return loss
        total, logged = getattr(self, "_tr_loss", None), getattr(self, "_globalstep_last_logged", None)
        if total is None or logged is None:  # stock keeps its sum elsewhere
            self.args.logging_nan_inf_filter = True
            return loss
        return torch.where(torch.isfinite(loss), loss, total.to(loss.device) / (1 + self.state.global_step - logged))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as stock does, which reads losses anyway."""
        with self._stock_filters(self._filters):
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._stock_filters(self._filters):  # the arguments are saved, too
            super()._save_checkpoint(*args, **kwargs)

    @contextmanager
    def _stock_filters(self, does: bool | None) -> Iterator[None]:
        """Let stock filter losses or not; None changes nothing."""
        before = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = before if does is None else does
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = before
