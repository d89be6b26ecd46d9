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

    _trains = False
    _filtered = False
    """Whether the micro-batch's loss is filtered already, so that stock isn't asked to."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make stock's accelerator one whose loaders don't wait for their batches to arrive."""
        super().create_accelerator_and_postprocess()
        if self.args.device.type == "cuda" and self.args.dataloader_pin_memory:
            self.accelerator.dataloader_config.non_blocking = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does."""
        self._trains = True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._trains = False
            self._ask_stock_again()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do a micro-batch's forward and backward. A loss that isn't finite counts as the mean so far, as in stock."""
        loss = super().training_step(*args, **kwargs)
        total, logged = getattr(self, "_tr_loss", None), getattr(self, "_globalstep_last_logged", None)
        if not self._trains or not self.args.logging_nan_inf_filter or total is None or logged is None:
            return loss  # where stock keeps its sum elsewhere, it filters itself
        self._filtered, self.args.logging_nan_inf_filter = True, False
        return torch.where(torch.isfinite(loss), loss, total.to(loss.device) / (1 + self.state.global_step - logged))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        self._ask_stock_again()  # the first that stock calls after it has added the loss, before any callback
        super()._track_num_input_tokens(inputs)

    def _ask_stock_again(self) -> None:
        if self._filtered:
            self._filtered, self.args.logging_nan_inf_filter = False, True
