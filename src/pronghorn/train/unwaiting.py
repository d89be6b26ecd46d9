"""What stock's loop waits for the GPU for in every step, done without waiting: the host would prepare the next step
only when the GPU has nothing left to do.

    batches    travel from pinned memory while the GPU computes
    losses     those that aren't finite are left out of the log's mean on the device; stock reads each loss for that
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.train.shared_layers import SharedLayersTrainer


class UnwaitingTrainer(SharedLayersTrainer):
    """TRL's trainer without these waits. Its arguments keep their meaning, and their values wherever they are read."""

    _corrects = False
    """Whether a training goes on whose losses are filtered here."""
    _before: Tensor | None = None
    """The sum of losses before this micro-batch's, if stock isn't to filter that one."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make stock's accelerator one whose loaders don't wait for their batches to arrive."""
        super().create_accelerator_and_postprocess()
        if self.args.device.type == "cuda" and self.args.dataloader_pin_memory:
            self.accelerator.dataloader_config.non_blocking = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does."""
        self._corrects = True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._corrects = False
            self._let_stock_filter()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do a micro-batch's forward and backward, as stock does. It won't look whether the loss is finite."""
        if self._before is not None:  # stock didn't call what corrects its sum
            self._corrects = False
            self._let_stock_filter()
        loss = super().training_step(*args, **kwargs)
        total: Tensor | None = getattr(self, "_tr_loss", None)
        if total is None or not hasattr(self, "_globalstep_last_logged"):
            return loss  # stock keeps its sum elsewhere, and filters itself
        if self._corrects and self.args.logging_nan_inf_filter:
            self._before, self.args.logging_nan_inf_filter = total.clone(), False
        return loss

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count as stock does. It is what stock calls after it has added the loss and before any callback, so here a
        loss that wasn't finite, also of somebody's own `training_step`, becomes the mean so far, as in stock."""
        before = self._before
        self._let_stock_filter()
        if before is not None:
            mean = before / (1 + self.state.global_step - self._globalstep_last_logged)
            self._tr_loss.copy_(torch.where(torch.isfinite(self._tr_loss), self._tr_loss, before + mean))
        super()._track_num_input_tokens(inputs)

    def _let_stock_filter(self) -> None:
        if self._before is not None:
            self._before, self.args.logging_nan_inf_filter = None, True
