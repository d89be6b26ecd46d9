"""Packed mode: TRL's SFTTrainer over packed rows of a fixed length and Pronghorn's loss.

Everything TRL's users know stays: `SFTConfig`, its data formats, its tokenising, logging, saving. What changes:

    rows      packed into rows of exactly `max_length` tokens, metadata made once by the collator
    loss      from the supervised tokens' hidden states (models.loss), over the supervised tokens of the whole
              accumulated batch and all ranks
    gradients watched (train.gradients)
    saving    checkpoints whole or not there, verified before they are loaded (train.checkpoint)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import is_bf16_supported, processes
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.towers import keep_names
from pronghorn.models.families import base_causal_lm
from pronghorn.optimizers import place_again
from pronghorn.parallel.sharded import sharded
from pronghorn.train import balance, by_length, checkpoint, padding_free, prepared_model, prepared_rows, validate
from pronghorn.train.check_dataset import check_dataset
from pronghorn.train.counters import StepCounters, is_spare
from pronghorn.train.evaluating import EvaluatingTrainer
from pronghorn.train.gradients import GradientWatch
from pronghorn.train.group import check_gpus_apart, check_same_data, settle_loading, share_output
from pronghorn.train.oom_retry import OomRetry, OutOfMemory
from pronghorn.train.ranks import (
    MOST_BYTES,
    CopiesAccelerator,
    OwnRandomState,
    attention_against_products,
    average_gradients,
    averages_at_once,
    copy_from_first,
    data_seed,
    dealt_loader,
    folder_of_all,
    leave_packed_to_each_process,
    nonempty,
    settle_loss_scale,
    step_rows,
)
from pronghorn.train.rates import kept_rates
from pronghorn.train.resumed import check_checkpoint
from pronghorn.train.tokenised import documents_of


class SFTTrainer(EvaluatingTrainer):
    """Train as TRL's `SFTTrainer` does, with the same arguments (and `tokenizer` for `processing_class`).

    It attaches the model if that isn't done yet. With `args.packing`, rows have `args.max_length` tokens (the model's
    `max_seq_length` if that is None). Without it, a micro-batch's documents lie end to end in one row, or padded if
    something needs padding. `args.eval_packing` says whether evaluation is packed; by default it is like training.

    Raises:
        ConfigError: no row length, or one over the model's.
        UnsupportedError: an argument the packed path doesn't serve.
    """

    def __init__(self, model: Any, args: Any = None, *given: Any, tokenizer: Any = None, **kwargs: Any) -> None:
        validate.check_old_arguments(model, kwargs := validate.by_name(given, kwargs))
        if args is None:
            args = trl.SFTConfig(output_dir="pronghorn-sft", packing=True, bf16=is_bf16_supported())
            if getattr(model, "max_seq_length", None) is not None:
                args.max_length = None  # TRL's default is nothing that was asked for, and may be over the model's
        if not isinstance(args, trl.SFTConfig):
            raise ConfigError(f"args is a {type(args).__name__}", "give a trl.SFTConfig, which has the same fields")
        if tokenizer is not None:
            kwargs["processing_class"] = tokenizer
        if kwargs.get("processing_class") is None and not getattr(getattr(model, "config", None), "name_or_path", ""):
            problem = "SFTTrainer was given no tokenizer, and the model doesn't say where it was loaded from"
            raise ConfigError(problem, "pass tokenizer=tokenizer")
        asked = args.packing, args.eval_packing, args.padding_free
        self._packs_train, self._packs_eval = asked[0], asked[0] if asked[1] is None else asked[1]
        validate.check_arguments(args, kwargs, self._packs_train, self._packs_eval)
        one_gpu = validate.use_one_gpu(args)
        check_gpus_apart(args.device)
        share_output(args)
        evaluated = kwargs.get("eval_dataset")
        settle_loading(args, self._packs_train, None if evaluated is None else self._packs_eval, evaluated)
        for name, packs in (("train_dataset", self._packs_train), ("eval_dataset", self._packs_eval)):
            check_dataset(name, kwargs.get(name), packs, args, kwargs, model)
        if kwargs.get("formatting_func") is None:  # which may read them; TRL's constructor looks at the columns, too
            kwargs["train_dataset"] = prepared_rows.readable("train_dataset", kwargs["train_dataset"], None, args)
        if args.packing or args.eval_packing:
            args.max_length = validate.check_row_length(args.max_length, getattr(model, "max_seq_length", None))
        # attached before TRL's constructor wraps `model.forward`, so that its wrapper calls ours
        if prepared_model.attached_on_its_device(model, args).plan is not None:
            prepared_model.let_the_plan_decide(args)
        trained = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
        validate.check_adapters(model, kwargs.get("peft_config"), self._packs_train or self._packs_eval)
        if not hasattr(model, "peft_config") and kwargs.get("peft_config") is None:
            validate.check_trained_dtypes(data.dtype for data in trained.values())
        self._train_is_prepared = False
        # TRL must not pack, nor warn of attention it doesn't know
        args.packing = args.eval_packing = args.padding_free = False
        try:
            super().__init__(model, args, **kwargs)
        finally:
            args.packing, args.eval_packing, args.padding_free = asked
        adapted: Any = self.model
        keep_names(adapted)
        balance.settle(self)
        prepared_model.unround_adapters(adapted, trained, getattr(model, "is_quantized", False))
        settle_loss_scale(self.accelerator, args)
        self._at_once = processes() > 1 and averages_at_once(adapted)
        if processes() > 1 and not self._at_once and sharded(base_causal_lm(adapted)) is not None:
            raise UnsupportedError(
                f"more than {MOST_BYTES / 2**30:.0f} GiB are trained beside layers that processes share",
                "use launch.strategy: copies, or a lower adapter.r",
            )
        if not self._at_once:
            leave_packed_to_each_process(adapted)
        # all is known now: where the model is, and its adapters, TRL's peft_config's too
        handle = prepared_model.attached_on_its_device(adapted, args).adopt_adapters()
        self.has_own_loss = type(self).compute_loss is not SFTTrainer.compute_loss
        self.padded = padding_free.settle(self, handle, self._packs_train, self._packs_eval)  # why batches are, if so
        settled = prepared_model.settled(self.accelerator, handle, self.padded is not None)
        prepared_model.resolve_plan(handle, args, **settled)
        validate.check_tokens(self)
        for name in ("train_dataset", "eval_dataset"):
            check_same_data(name, getattr(self, name))
        stock: Any = self.data_collator
        self._pack_collator = Collator(args.max_length or 0, stock.pad_token_id)
        self.data_collator = prepared_rows.Collators(self._pack_collator, stock)
        self._watch = GradientWatch(None if self._shared is None else self._shared.trained)
        for callback in (self._watch, OwnRandomState()):
            self.add_callback(callback)
        self._counted = StepCounters()
        self._memory = OomRetry(self._ran_out, prepared_model.TighterPlans(adapted, args, **settled))
        self.note: Callable[[str], None] = logging.getLogger(__name__).warning
        """Where a word to the user goes."""
        for told in (one_gpu, self.padded and f"documents are padded: {self.padded}"):
            if told is not None and args.should_log:
                self.note(told)
        self.look_ahead: int | None = None
        """Steps whose rows are regrouped so that those of a step take alike long; None: `data.dealing` decides."""
        self.recipe: str | None = None
        """The hash of the recipe that this training is of, for its checkpoints' manifests."""
        self.keep: int | None = None
        """The newest checkpoints of a recipe's run that stay, and the best. Stock is told no limit: at 1 it deletes the
        last at the end of a training of which another is the best, and a stopped run goes on from the last."""
        self.checked: Path | None = None
        """A checkpoint whose contents were compared with its manifest already."""
        self._fingerprint = checkpoint.Fingerprint.of(self.model)
        self._aside: Path | None = None
        self._joins: padding_free.EndToEnd | None = None
        """The collator of micro-batches that aren't packed, whose workers learn of graphs."""
        self._operations: int | None = None

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """Tokenise and truncate as TRL does, then pack; tokenised documents are packed as they are."""
        trains = dataset_name == "train" and not self._train_is_prepared  # a held-out set may be called so, too
        packing = self._packs_train if trains else self._packs_eval
        self._train_is_prepared = True  # TRL begins with it
        if isinstance(dataset, PackedRows):
            return dataset
        if packing and set(dataset.column_names or ()) == {"input_ids", "labels"}:
            if args.shuffle_dataset:
                dataset = dataset.shuffle(seed=args.seed)
            if trains:  # as TRL does: a row of them alone would be a step in which nothing learns
                dataset = prepared_rows.supervised(dataset_name, dataset)
                validate.check_documents(dataset_name, dataset, args.max_length)
            return PackedRows(dataset, args.max_length, seed=data_seed(args))
        dataset = prepared_rows.readable(dataset_name, dataset, formatting_func, args)
        documents = documents_of(self, dataset, processing_class, args, dataset_name)
        documents = prepared_rows.tidied(documents, dataset, processing_class)
        validate.check_documents(dataset_name, documents, args.max_length)
        return PackedRows(documents, args.max_length, seed=data_seed(args)) if packing else documents

    def create_accelerator_and_postprocess(self) -> None:
        """Make stock's accelerator one that leaves models unwrapped whose gradients travel in one piece."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = CopiesAccelerator

    def get_train_dataloader(self) -> DataLoader:
        """Deal packed rows to the processes by their costs; of what isn't packed the steps are stock's. A loader
        without a micro-batch is refused (DataError): stock would end without a step."""
        return by_length.seed_groups(nonempty(self._train_loader(), self.train_dataset, self.args), self.args)

    def _train_loader(self) -> DataLoader:
        rows, args = self.train_dataset, self.args
        if not isinstance(rows, PackedRows):
            given: Any = self.data_collator  # which evaluations have, whose logits somebody may read
            if self.padded or not isinstance(given, prepared_rows.Collators):  # somebody's own, set since
                return by_length.sort_steps(super().get_train_dataloader(), self)
            self._joins = padding_free.joining(self, given.padded.pad_token_id)
            self.data_collator = replace(given, padded=self._joins)
            try:
                return super().get_train_dataloader()
            finally:
                self.data_collator = given
        sampler = self._get_train_sampler()
        if not isinstance(sampler, (RandomSampler, SequentialSampler)):
            return super().get_train_dataloader()
        costs = attention_against_products(self.model), self.look_ahead
        return dealt_loader(rows, *costs, args, self.data_collator, self.accelerator, sampler)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = ["input_ids", "labels", "lengths"]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the model's own loss, divided by `num_items_in_batch`: the supervised tokens of the accumulated batch
        on all ranks (gradients are averaged over ranks, hence the factor)."""
        outputs = model(**inputs, use_cache=False, num_items_in_batch=num_items_in_batch)
        if model.training and self.aux_loss_enabled:
            self._counted.add_balance(balance.alone(outputs, self.model, inputs.get("packed"), num_items_in_batch))
        packs = self._packs_train or not model.training
        loss, aux = balance.separate(outputs, self.model, inputs.get("packed"), packs, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        if aux is not None:
            loss = loss + aux / (1 if num_items_in_batch is None else self.current_gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return a step's micro-batches; how long they are waited for is counted."""
        with self._counted.waiting():
            return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Do a micro-batch's forward and backward, repeated with less kept if memory runs out; after the last one of a
        step the watch observes the gradients."""
        step, last = self.state.global_step + 1, self.accelerator.sync_gradients
        once = super().training_step
        with padding_free.few_lengths(self._joins, self.model, inputs.get("packed")):
            loss = self._memory.run(model, step, last, inputs, lambda batch: once(model, batch, *args, **kwargs))
        self._counted.add(inputs)
        if last:
            if self._at_once:
                average_gradients(self._averaged, self._watch.shared)
            self._watch.observe(model)
        return loss

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count tokens as stock does. Of a row without padding between them it can't tell which are padding, and would
        leave out all that have its id: with many tokenizers each document's last one."""
        packed = inputs.get("packed")
        if is_spare(packed):
            inputs = {**inputs, "input_ids": inputs["input_ids"][:0], "attention_mask": torch.tensor(0)}
        elif packed is not None and self.args.include_num_input_tokens_seen == "non_padding":
            inputs = {**inputs, "attention_mask": torch.tensor(packed.real_tokens)}  # stock sums it
        super()._track_num_input_tokens(inputs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count as stock does, which goes through the whole model and takes milliseconds, but once, for one token."""
        tokens = inputs["input_ids"].numel()
        self._operations = self._operations or super().floating_point_ops(inputs) // tokens
        return self._operations * tokens

    def _clip_grad_norm(self, model: Any) -> Tensor | None:
        """Clip by the norms that the watch has already; where gradients are scaled or sharded, as stock does."""
        clipped = self._clip(self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if clipped is None else clipped

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm for the log where nothing is clipped; stock would scale every gradient by one for it."""
        grad_norm = self._clip(math.inf) if grad_norm is None else grad_norm
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _clip(self, most: float) -> Tensor | None:
        if (shared := self._watch.shared) is not None:
            return self._watch.clip(most, [*self._averaged, *shared.parts])
        served = self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU)
        if not served or self.accelerator.scaler is not None:
            return None
        optimizer: Any = self.optimizer
        return self._watch.clip(most, (p for group in optimizer.param_groups for p in group["params"]))

    def _ran_out(self, event: OutOfMemory) -> None:
        """Note it in the history, which checkpoints and the run's record keep, and tell the user."""
        self.state.log_history.append({"step": event.step, "out_of_memory": asdict(event)})  # type: ignore[dict-item]
        self.note(str(event))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Leave out TRL's card of a recipe's run, at whose end `model_card` writes a true one."""
        if self.recipe is None:
            super().create_model_card(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with a loss, what `StepCounters` counted since the last one; and of the training so far the steps that
        loss scaling skipped, with the scale there is now, and on a GPU the most memory."""
        if "loss" in logs:
            logs |= self._counted.take(self.args.device, self.aux_loss_enabled) | {"skipped_steps": self._watch.skipped}
            if self.accelerator.scaler is not None:
                logs["loss_scale"] = self.accelerator.scaler.get_scale()
            if self.args.device.type == "cuda":
                told = torch.cuda.memory_stats_as_nested_dict(self.args.device)  # a fifth of what the flat one costs
                logs["peak_memory_gib"] = round(told["allocated_bytes"]["all"]["peak"] / 2**30, 3)
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. A checkpoint to resume from is verified first (DataError: damaged, or of other weights;
        ConfigError: of another adapter, configuration or optimiser).
        A step that runs out of memory is repeated (TrainingError: that fails, see docs/out_of_memory.md)."""
        resume_from_checkpoint = checkpoint.named(Path(str(self.args.output_dir)), resume_from_checkpoint)
        prepared_model.check_trains(self.model, self.args, self.model_init)
        if self._packs_train or self._packs_eval or self.padded is None:
            validate.check_attached(self.model)
        if resume_from_checkpoint is not None:
            self._check(Path(resume_from_checkpoint))
            told = checkpoint.other_steps(Path(resume_from_checkpoint), step_rows(self.args))
            if told is not None and self.args.should_log:
                self.note(told)
        for told in prepared_model.told_of_saving(self.model) if self.recipe is None and self.args.should_log else ():
            self.note(told)
        gathers = sharded(base_causal_lm(self.model)) is not None
        self._memory.begin(waits_for_others=processes() > 1 and (gathers or not self._at_once))
        if self._at_once:
            self._averaged = copy_from_first(self.model)
        self._counted = StepCounters()
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except RuntimeError as error:
            meant = self._memory.explained(error, self.model, self.state.global_step + 1)
            if meant is None:
                raise
            raise meant from error

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch as stock does, but no step where a resumed training had its last: stock trains one more."""
        if (done := self.state.global_step) < (most := self.state.max_steps):
            super()._run_epoch(*args, **kwargs)
            return
        self.control.should_training_stop = True
        if self.args.should_log:
            self.note(f"nothing is left to train: {done:,} steps are done, and the training has {most:,}")

    def load_weights(self, folder: Path) -> None:
        """Put a checkpoint's trained weights into the model (DataError: damaged, or of another model)."""
        self._check(folder)
        self._load_from_checkpoint(str(folder))

    def _check(self, folder: Path) -> None:
        """Refuse a checkpoint that is damaged or of another training, of a recipe's one of another model."""
        contents = self.args.should_save and folder != self.checked  # of several processes one reads everything
        optimizer = str(getattr(self.args.optim, "value", self.args.optim)) if self.recipe is None else None
        check_checkpoint(folder, self.model, self._fingerprint, contents, optimizer)

    def _get_output_dir(self, trial: Any) -> str:
        """Return where checkpoints go: aside while one is being written."""
        return super()._get_output_dir(trial) if self._aside is None else str(self._aside)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load their states. A recipe's learning rate and weight decay are those of now, which `--allow` may have
        changed; stock goes on with the checkpoint's."""
        with kept_rates(self.optimizer, self.lr_scheduler) if checkpoint and self.recipe else nullcontext():
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            place_again(getattr(self.optimizer, "optimizer", self.optimizer))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as stock does, but whole or not at all: earlier checkpoints stay until the new one is complete."""
        output, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        with folder_of_all(output / name, self.args.should_save) as folder:
            self._aside = folder
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._aside = None
            self.accelerator.wait_for_everyone()
            checkpoint.name_best(self.state, output, name)  # in each process: all of them load it at the end
            if self.args.should_save:
                self.state.save_to_json(str(folder / name / "trainer_state.json"))
                for path in (folder / name).iterdir():  # stock makes a folder of that name in the one it is given
                    path.rename(folder / path.name)
                (folder / name).rmdir()
                checkpoint.seal(folder, self._fingerprint, self.recipe, step_rows(self.args))
        if self.args.should_save:
            best = Path(self.state.best_model_checkpoint or name)
            spared = (name, best.name)  # the new one, too: clocks may be set back
            if self.keep is None:
                checkpoint.keep_newest(output, self.args.save_total_limit, *spared, among=True)
            else:
                checkpoint.keep_newest(output, self.keep, *spared)
        self.accelerator.wait_for_everyone()
