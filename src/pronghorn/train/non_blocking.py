"""Keep the host ahead of the GPU: a step of the trainer waits for nothing but its log.

Stock's loop waits twice in each step, and then prepares the next one while the GPU has nothing to do:

    batches    for each to arrive; here they travel from pinned memory while the GPU computes
    losses     to leave those that aren't finite out of the log's mean, which is done on the device here
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.train.shared_layers import SharedLayersTrainer


class NonBlockingTrainer(SharedLayersTrainer):
    """TRL's trainer without these waits. Its arguments mean the same, and whoever reads them finds the same values."""

    _corrects = False
    """Whether losses are filtered here: during a training, as long as stock calls what corrects their sum."""
    _before: Tensor | None = None
    """The sum of losses without this micro-batch's, between a step and the correction of the sum. Stock's filter is off
    in between."""

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
        """Do a micro-batch's forward and backward as stock does, which won't read the loss afterwards."""
        if self._before is not None:  # this version of stock doesn't call what corrects its sum
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
        """Count as stock does, and correct its sum of losses: one that isn't finite counts as the mean so far, as in
        stock. Stock calls this after it has added the loss, a subclass's own too, and before any callback."""
        before = self._before
        self._let_stock_filter()
        if before is not None:
            mean = before / (1 + self.state.global_step - self._globalstep_last_logged)
            self._tr_loss.copy_(torch.where(torch.isfinite(self._tr_loss), self._tr_loss, before + mean))
        super()._track_num_input_tokens(inputs)

    def _let_stock_filter(self) -> None:
        if self._before is not None:
            self._before, self.args.logging_nan_inf_filter = None, True
