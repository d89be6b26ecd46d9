"""A whole run from a recipe. Read it from the top: every function is called in the order in which it stands here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.markup import escape
from transformers import TrainerState
from trl import SFTConfig

from pronghorn.config.checks import high_rate, missed
from pronghorn.config.recipe import Recipe
from pronghorn.config.sections import CHANGES_BASE
from pronghorn.data.cache import Prepared
from pronghorn.data.dealing import LOOK_AHEAD, WORTH_REGROUPING, ByLength, DealtRows
from pronghorn.data.packed_rows import PackedRows, PackingStats
from pronghorn.data.reasoning import is_trained
from pronghorn.device import device_name, peak_bytes, processes, versions
from pronghorn.errors import DataError, PronghornError, RunStopped
from pronghorn.export.folder import save_tokenizer, whole_folder
from pronghorn.export.licences import copy_licences
from pronghorn.models.attach import Handle
from pronghorn.optimizers import check_optimizer
from pronghorn.precision.float32 import check_tf32, tf32_products
from pronghorn.records.live import LivePage
from pronghorn.records.model_card import write_cards
from pronghorn.records.record import RunRecord, peak_of, steps_of_log, trainable_parameters
from pronghorn.records.report import write_report
from pronghorn.text import counted
from pronghorn.train.build import autocast_dtype, check_device, load, make_trainer, planned_steps, training_arguments
from pronghorn.train.checkpoint import step_of
from pronghorn.train.control import RunControl, trained_seconds
from pronghorn.train.documents import find, prepare, tokenizer_for
from pronghorn.train.evaluate import answer, heldout_loss, worse_than_guessing
from pronghorn.train.padding_free import how_batched
from pronghorn.train.progress import ProgressCallback, track
from pronghorn.train.run_folder import must_have_improved, open_folder
from pronghorn.train.run_state import RunState, check_configuration, check_data, note_processes, recipe_hash
from pronghorn.train.trainer import SFTTrainer
from pronghorn.train.validate import check_ids, check_no_fsdp, use_one_gpu

T = TypeVar("T")


def run(
    recipe: Recipe, console: Console, allow: bool = False, allow_older: bool = False, overwrite: bool = False
) -> RunRecord:
    """Do what the recipe says and leave the adapter (or model), `run.json` and `report.html` in its output folder.

    A run that was killed or stopped goes on from its newest checkpoint when it is called again; of a finished one only
    what is missing is made. The folder is locked over the whole run, and nothing in it is read before it is.

    Args:
        allow: go on although recipe or data changed.
        allow_older: where the newest checkpoint is damaged, go on from the one before; otherwise a terminal is asked.
        overwrite: delete the run that the output folder holds, and begin anew.
    Raises:
        ConfigError, DataError, UnsupportedError: before anything is trained.
        RunStopped: SIGINT, SIGTERM or SIGHUP came; a checkpoint is saved.
        TrainingError: dead or non-finite gradients, a full disk, or a held-out loss that did not fall by
            `train.min_improvement` (which is judged last, with everything saved).
    """
    started = time.perf_counter()
    args = _training_arguments(recipe, console)
    with ExitStack() as locked:
        if recipe.precision.tf32:
            locked.enter_context(tf32_products())
        opened = _from_main_process(args, lambda: open_folder(recipe, console, locked, allow, allow_older, overwrite))
        if isinstance(opened, RunRecord):
            return opened
        current = _build(recipe, console, args, *opened, allow)
        _measure_baseline(current)
        try:
            _train(current)
        finally:
            current.progress.close()
        _save_model(current)
        record = _record(current, started, current.trainer.state.log_history, *_evaluate(current, "after"))
        if current.trainer.accelerator.is_main_process:
            write_cards(record, current.output)  # before the record, after which nothing but the report is made again
            record.write(current.output)
            if recipe.report.html:
                write_report(record, current.output)
    must_have_improved(recipe, record.heldout)
    return record


def _training_arguments(recipe: Recipe, console: Console) -> SFTConfig:
    """Return the trainer's arguments; refuse what can't be served before anything is read or loaded."""
    args = training_arguments(recipe)
    check_no_fsdp(args)
    check_optimizer(recipe.train.optimizer, args.device.type)
    if recipe.precision.tf32:
        check_tf32(args.device)
    check_device(recipe, args.device.type, console)
    use_one_gpu(args)  # what starts runs has said how many it takes
    return args


def _from_main_process(args: SFTConfig, make: Callable[[], T]) -> T:
    """Return on every process what `make` returns on the main one, or raise its error."""
    result: list[Any] = [None]
    if args.process_index == 0:
        try:
            result[0] = make()
        except PronghornError as error:
            result[0] = error
    broadcast_object_list(result)
    if isinstance(result[0], PronghornError):
        raise result[0]
    return result[0]


@dataclass
class _Run:
    """What the phases of a run hand on."""

    recipe: Recipe
    console: Console
    state: RunState
    newest: Path | None
    """The checkpoint to go on from."""
    documents: Prepared
    heldout: PackedRows | None
    packing: PackingStats
    handle: Handle
    trainer: SFTTrainer
    control: RunControl
    progress: ProgressCallback
    kept_step: int | None = None

    @property
    def output(self) -> Path:
        """Return the run's folder."""
        return Path(self.recipe.train.output)

    @property
    def reasons(self) -> bool:
        """Tell whether the model is trained to reason where the chat template opens it."""
        return is_trained(self.documents.dataset, self.trainer.processing_class, self.recipe.data.loss_on)

    def write_state(self) -> None:
        """Write `journal.json` on the main process."""
        if self.trainer.accelerator.is_main_process:
            self.state.write(self.output)


def _build(
    recipe: Recipe, console: Console, args: SFTConfig, state: RunState, newest: Path | None, allow: bool
) -> _Run:
    """Read and tokenise the data, load the model, and make the trainer."""
    source = find(recipe)
    check_configuration(state, source, allow)
    tokenizer = tokenizer_for(recipe, source)
    documents = prepare(recipe, "train", tokenizer, console)
    check_data(state, "train", documents.key, allow)
    heldout = None
    alone = not recipe.packing.enabled and source.is_generic  # nothing proves then that packed documents don't mix
    if recipe.data.eval is not None:
        eval_documents = prepare(recipe, "eval", tokenizer, console, documents)
        check_data(state, "eval", eval_documents.key, allow)
        heldout = PackedRows(eval_documents.dataset, recipe.model.max_seq_length, alone=alone).first(
            recipe.data.eval_rows
        )
    console.print(f"[bold]Loading[/] {escape(recipe.model.name)}")
    model, handle = load(recipe, source, tokenizer, console)
    _keep_initial(recipe, model, args)
    control = RunControl(recipe.train.max_minutes, recipe.train.save_minutes, recipe.train.patience)
    control.hang_up = lambda: setattr(console, "quiet", True)
    if heldout is not None:
        scale = f"{recipe.adapter.lora_alpha}, {recipe.adapter.use_rslora}, {recipe.adapter.alpha_pattern}"
        rows = f"{state.data['eval']}, {recipe.model.max_seq_length}, {recipe.data.eval_rows}"
        control.measured = {"heldout": rows, "scale": scale}
    progress = ProgressCallback(console, recipe.train.max_minutes)
    trainer = make_trainer(recipe, model, tokenizer, documents.dataset, heldout, [control, progress], args)
    check_ids("data.eval", heldout, tokenizer, model)
    handle.paths(autocast_dtype(recipe))  # an attention that can't be served is refused now, not at the end
    if handle.isolation is not None:
        console.print(f"Probe: {escape(str(handle.isolation))}", highlight=False)
    trainer.recipe, trainer.checked = recipe_hash(recipe), newest
    trainer.look_ahead = None if recipe.packing.look_ahead == "auto" else recipe.packing.look_ahead
    if (other := note_processes(state, processes())) is not None:
        console.print(f"[yellow]{other}[/]", highlight=False)
    packing = _packing_stats(recipe, trainer, documents.dataset, console)
    return _Run(recipe, console, state, newest, documents, heldout, packing, handle, trainer, control, progress)


def _packing_stats(recipe: Recipe, trainer: SFTTrainer, documents: Any, console: Console) -> PackingStats:
    """Print and return how full the rows are; without packing, how full they would be."""
    packed: Any = trainer.train_dataset
    if not recipe.packing.enabled:
        packed = PackedRows(documents, recipe.model.max_seq_length, seed=recipe.data_seed)
    packing = packed.stats
    console.print(
        f"{counted(packing.documents, 'document')}, {counted(packing.tokens, 'token')}; packed into "
        f"{counted(packing.rows, 'row')} of "
        f"{packing.row_tokens:,} they {'are' if recipe.packing.enabled else 'would be'} {packing.efficiency:.1%} full "
        f"(at most {packing.ceiling:.1%} is possible)"
    )
    _tell_dealing(trainer, console)
    rows = packing.rows if recipe.packing.enabled else packing.documents
    micro_batches = math.ceil(rows / recipe.packing.rows_per_step)
    if (accumulated := recipe.train.gradient_accumulation_steps) > micro_batches:
        less = f"more than {counted(micro_batches, 'micro-batch')} of an epoch: each step is a whole epoch"
        console.print(f"[yellow]train.gradient_accumulation_steps {accumulated:,} is {less}[/]")
    high = high_rate(recipe.train, recipe.adapter.method == "full")
    for told in (*missed(recipe.train, planned_steps(trainer)), *high):
        console.print(f"[yellow]{told}[/]")
    return packing


def _tell_dealing(trainer: SFTTrainer, console: Console) -> None:
    """Print how long processes will wait for each other, by the predicted time of each row; or how full batches are."""
    dealt = getattr(trainer.get_train_dataloader(), "batch_sampler", None)
    if isinstance(order := getattr(dealt, "sampler", None), ByLength):
        stock, ours = order.text_shares()
        console.print(f"Padded batches are {ours:.1%} text, sorted by length within each step ({stock:.1%} unsorted)")
    if processes() == 1 or not isinstance(dealt, DealtRows):
        return
    in_turn, waiting = dealt.waiting(1)[0], dealt.waiting()[1]
    regrouped = f", those of {dealt.look_ahead} steps regrouped" if dealt.look_ahead > 1 else ""
    console.print(
        f"Rows dealt to {processes()} processes by predicted time{regrouped}: they wait {waiting:.1%} of it for each "
        f"other ({in_turn:.1%} with rows dealt in turn)"
    )
    less = dealt.waiting(LOOK_AHEAD)[1]
    if dealt.look_ahead < LOOK_AHEAD and less < waiting - WORTH_REGROUPING:
        console.print(
            f"packing.look_ahead: {LOOK_AHEAD} regroups the rows of so many steps: they would wait {less:.1%}"
        )


def _measure_baseline(current: _Run) -> None:
    """Measure the held-out loss and answer the sample prompts before training, unless an earlier start did."""
    state = current.state
    if not state.baseline_done:
        state.eval_loss_before, state.samples_before = _evaluate(current, "before")
        state.baseline_done = True
    if (told := worse_than_guessing(state.eval_loss_before, current.trainer.model)) is not None:
        current.console.print(f"[yellow]{told}[/]")
    current.write_state()
    current.trainer.note = lambda text: current.console.print(f"[yellow]{escape(text)}[/]")


def _evaluate(current: _Run, when: str) -> tuple[float | None, list[str]]:
    """Return the held-out loss (None without held-out data) and the answers to the sample prompts."""
    recipe, console, heldout = current.recipe, current.console, current.heldout
    trainer: Any = current.trainer
    model, tokenizer, loss = trainer.model, trainer.processing_class, None
    if heldout is not None:
        collator, shown = trainer.data_collator.packed, f"Held-out rows {when}"
        with trainer.accelerator.autocast():
            loss = heldout_loss(model, heldout, collator, lambda rows: track(rows, shown, len(rows), console))
        console.print(f"[bold]Held-out loss {when} training[/] {loss:.4f}")
    tokens, system, rule = recipe.report.sample_tokens, recipe.data.system_prompt, recipe.data.control_tokens
    how: dict[str, Any] = {"control_tokens": rule, "reasons": current.reasons}
    conversations = [[{"role": "user", "content": prompt}] for prompt in recipe.report.sample_prompts]
    return loss, [answer(model, tokenizer, turns, tokens, system, **how) for turns in conversations]


def _train(current: _Run) -> None:
    """Train from the newest checkpoint, or the start, to the end; leave the model with the weights to keep."""
    if not _load_if_trained(current):
        _train_on(current)
    trainer = current.trainer
    best, asked = trainer.state.best_model_checkpoint, current.recipe.train
    if best is None or not (asked.load_best and asked.eval_steps) or step_of(Path(best)) == trainer.state.global_step:
        return
    current.kept_step = step_of(Path(best))
    current.console.print(f"The lowest held-out loss was at step {current.kept_step}: those weights are kept")
    try:
        trainer.load_weights(current.output / Path(best).name)  # the folder may have been moved since
    except DataError as error:
        raise DataError(error.problem, "set train.load_best=false to keep the weights of the last step") from error


def _load_if_trained(current: _Run) -> bool:
    """Load the newest checkpoint's weights if training had ended with it, and tell whether it had."""
    state, newest, trainer = current.state, current.newest, current.trainer
    if newest is None:
        return False
    saved = TrainerState.load_from_json(str(newest / "trainer_state.json"))
    if current.control.forget_other_losses(saved):
        changed = "The held-out rows or the adapters' scale changed"
        current.console.print(f"[yellow]{changed}: losses of the earlier ones don't count[/]")
    impatient = current.control.out_of_patience(saved)
    # killed between the last checkpoint and its note in the journal, which may be of a checkpoint that is gone
    out_of_time = state.stopped == "max_minutes" and state.trained == saved.global_step
    if not (saved.global_step >= planned_steps(trainer) or impatient or out_of_time):
        return False
    state.stopped = "patience" if impatient else "max_minutes" if out_of_time else None
    current.console.print(f"Training had ended at step {saved.global_step}; what is left is to save and to judge")
    trainer.state = saved
    current.control.seconds_before = trained_seconds(saved)
    trainer.load_weights(newest)
    return True


def _train_on(current: _Run) -> None:
    """Train until the last step, the time limit, the end of patience or a signal (RunStopped)."""
    state, newest, trainer, control = current.state, current.newest, current.trainer, current.control
    if current.recipe.report.html:
        begun = time.perf_counter()
        page = LivePage(lambda state: _record(current, begun, state.log_history), current.output, trainer.note)
        trainer.add_callback(page)
    if newest is not None:
        current.console.print(f"Going on from {newest.name}")
        state.resumed_at.append(step_of(newest))
    state.trained = state.stopped = None
    current.write_state()
    with control.signals():
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    last = trainer.state.global_step
    if control.signal:
        raise RunStopped(
            f"stopped by {control.stopped} after step {last}; checkpoint-{last} is saved",
            "run the same command to go on",
            control.signal,
        )
    state.trained, state.stopped = last, control.stopped
    current.write_state()


def _save_model(current: _Run) -> None:
    """Save the adapter, or the whole model with its base's licences, and the tokenizer on the main process."""
    trainer: Any = current.trainer
    with trainer.gathering_weights():
        if trainer.accelerator.is_main_process:
            name = "adapter" if current.recipe.adapter.method == "lora" else "model"
            with whole_folder(current.output / name) as folder:
                trainer.model.save_pretrained(folder, **_initial(current.output))
                save_tokenizer(trainer.processing_class, folder)
                if name == "model":
                    copy_licences(trainer.model, folder)


INITIAL = "initial_adapter"


def _keep_initial(recipe: Recipe, model: Any, args: SFTConfig) -> None:
    """Write the adapter as it begins, if that was taken out of the base's weights: what is saved is the difference."""
    if args.process_index == 0 and str(recipe.adapter.init_lora_weights).startswith(CHANGES_BASE):
        with whole_folder(Path(recipe.train.output) / INITIAL) as folder:
            model.save_pretrained(folder)


def _initial(output: Path) -> dict[str, Any]:
    """Return what makes PEFT save the difference from the first adapter as plain LoRA, where there is one."""
    folder = output / INITIAL
    return {"path_initial_model_for_weight_conversion": str(folder)} if folder.exists() else {}


def _record(
    current: _Run, started: float, history: list[Any], loss_after: float | None = None, samples_after: Any = ()
) -> RunRecord:
    """Return what is known of the run, without what is measured after training if it still trains."""
    recipe, state, documents, heldout = current.recipe, current.state, current.documents, current.heldout
    model: Any = current.trainer.model
    taken = current.handle.paths(autocast_dtype(recipe))
    before = state.samples_before
    samples = zip(recipe.report.sample_prompts, before, samples_after or [""] * len(before), strict=True)
    return RunRecord(
        recipe=recipe.to_dict(),
        model=recipe.model.name,
        device=device_name(),
        versions=versions(),
        packing={
            **vars(current.packing),
            "dropped": documents.dropped,
            "dropped_share": documents.dropped_share,
            "truncated": documents.fitted.truncated,
            "cut_share": documents.cut_share,
            "split": documents.fitted.split,
            "reasoning": current.reasons,
            "sources": [asdict(count) for count in documents.counts],
        },
        paths=[*map(vars, how_batched(current.trainer, recipe.packing.enabled)), *map(vars, taken)],
        steps=steps_of_log(history),
        heldout={"before": state.eval_loss_before, "after": loss_after, "rows": len(heldout or ())},
        samples=[{"prompt": prompt, "before": before, "after": after} for prompt, before, after in samples],
        trainable=trainable_parameters(model),
        seconds=time.perf_counter() - started + current.control.seconds_before,
        stopped=state.stopped or ("max_steps" if recipe.train.max_steps else "epochs"),
        peak_memory_bytes=peak_of(history, peak_bytes(model.device)) if model.device.type == "cuda" else None,
        evaluations=[{"step": e["step"], "loss": e["eval_loss"]} for e in history if "eval_loss" in e],
        resumed_at=state.resumed_at,
        kept_step=current.kept_step,
        out_of_memory=[entry["out_of_memory"] for entry in history if "out_of_memory" in entry],
    )
