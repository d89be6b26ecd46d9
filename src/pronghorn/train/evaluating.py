"""How the trainer evaluates: packed rows by a mean over every supervised token, padded batches as stock does, but
without logits where nobody reads them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from transformers.trainer_utils import speed_metrics

from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import processes
from pronghorn.errors import UnsupportedError
from pronghorn.models.attach import attached
from pronghorn.models.families import balances_experts, base_causal_lm
from pronghorn.parallel.state import refuse_sharded
from pronghorn.train import padding_free, validate
from pronghorn.train.check_dataset import check_dataset
from pronghorn.train.counters import StepCounters
from pronghorn.train.evaluate import heldout_loss
from pronghorn.train.non_blocking import NonBlockingTrainer


class EvaluatingTrainer(NonBlockingTrainer):
    """The part of `SFTTrainer` that evaluates and predicts."""

    args: Any
    model: Any
    processing_class: Any
    padded: str | None
    has_own_loss: bool
    _packs_eval: bool
    _pack_collator: Collator
    _counted: StepCounters
    is_in_train: bool

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as TRL does. Over packed rows the loss is the mean over every supervised token, on all ranks. The
        time counts for no step."""
        with self._counted.paused():
            rows = self.eval_dataset if eval_dataset is None else eval_dataset
            if isinstance(rows, str) and isinstance(self.eval_dataset, dict):
                rows = self.eval_dataset[rows]
            raw = hasattr(rows, "column_names") and not isinstance(rows, (PackedRows, dict))  # a DatasetDict has them
            if raw and rows is not self.eval_dataset and not isinstance(eval_dataset, str):  # given to this call
                given = {"processing_class": self.processing_class, "formatting_func": self._formatting_func}
                check_dataset("eval_dataset", rows, self._packs_eval, self.args, given, self.model)
            if self._packs_eval and raw:
                tokenizer, formatting = self.processing_class, self._formatting_func
                rows = self._prepare_dataset(rows, tokenizer, self.args, False, formatting, "eval")
            if not isinstance(rows, PackedRows):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            validate.check_attached(self.model)
            self._cast_as_stock()
            self._memory_tracker.start()  # for skip_memory_metrics=False
            started = time.perf_counter()
            with self.accelerator.autocast():
                loss = heldout_loss(self.model, rows, self._pack_collator)
            began = time.time() - (time.perf_counter() - started)  # stock's clock, which may be set while it evaluates
            counts = len(rows), -(-len(rows) // processes())  # rows, and how many one process computes
            metrics = {f"{metric_key_prefix}_loss": loss, **speed_metrics(metric_key_prefix, began, *counts)}
            self.log(metrics)  # which adds the epoch, as to stock's
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            self._memory_tracker.stop_and_update_metrics(metrics)
            return metrics

    def _cast_as_stock(self) -> None:
        """Do what stock's evaluation does for `bf16_full_eval` and `fp16_full_eval`: outside of training it casts the
        model, which stays so.

        Raises:
            UnsupportedError: processes share the layers.
        """
        half = self.args.fp16_full_eval
        if self.is_in_train or not (half or self.args.bf16_full_eval):
            return
        refuse_sharded(base_causal_lm(self.model), "fp16_full_eval" if half else "bf16_full_eval")
        self.model.to(dtype=torch.float16 if half else torch.bfloat16, device=self.args.device)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as stock does. Packed rows are refused: predictions would be None, the loss a mean of rows'."""
        if isinstance(test_dataset, PackedRows):
            problem = "predict() was given packed rows, for which no logits are made"
            raise UnsupportedError(problem, "give it the documents, or take the loss from evaluate()")
        return super().predict(test_dataset, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Evaluate a batch as stock does. Where its loss alone is asked for, its documents lie end to end in one row,
        for which no logits are made: of a large vocabulary they take more memory than training does."""
        if prediction_loss_only and self._evaluates_end_to_end():  # not in a collator: stock's mean goes by its rows
            collate = replace(padding_free.joining(self, self._pack_collator.pad_token_id), few=None)
            inputs = padding_free.end_to_end(inputs, collate)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _evaluates_end_to_end(self) -> bool:
        """Tell whether nothing keeps documents from lying so: what keeps training's, or an auxiliary loss, whose tokens
        are a batch's."""
        return (
            self.padded is None
            and (self.args.padding_free or not self.has_own_loss)
            and attached(self.model) is not None
            and not balances_experts(base_causal_lm(self.model).config)
            and padding_free.why_padded(self.model, None, self.args.max_length) is None
        )
