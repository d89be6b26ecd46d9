"""A whole run from a recipe: load, read, pack, train, judge by held-out loss, save, report."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers import TrainerState

from pronghorn.config import Recipe
from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows, PackingStats
from pronghorn.device import device_name, peak_bytes, processes, versions
from pronghorn.errors import RunStopped, TrainingError
from pronghorn.export.folder import whole_folder
from pronghorn.models.load import trainable_parameters
from pronghorn.train.build import autocast_dtype, load, make_trainer, planned_steps
from pronghorn.train.checkpoint import checkpoints, clear_leftovers, step_of
from pronghorn.train.control import RunControl, trained_seconds
from pronghorn.train.documents import find, prepare, tokenizer_for
from pronghorn.train.evaluate import answer, heldout_loss
from pronghorn.train.journal import Journal, check_data, check_processes, open_journal, sole_run
from pronghorn.train.progress import ProgressCallback, track
from pronghorn.train.record import RunRecord
from pronghorn.train.report import check_report_dependencies, write_report
from pronghorn.train.trainer import SFTTrainer


def run(recipe: Recipe, console: Console, allow: bool = False) -> RunRecord:
    """Do what the recipe says and leave the adapter (or model), `run.json` and `report.html` in its output folder.

    A run that was killed or stopped goes on from its newest checkpoint when it is called again. `allow` lets it go on
    although recipe, data or the number of processes changed.

    Raises:
        ConfigError, DataError, UnsupportedError: before anything is trained.
        RunStopped: SIGINT or SIGTERM came; a checkpoint is saved.
        TrainingError: dead or non-finite gradients, a full disk, or a held-out loss that did not fall by
            `train.min_improvement` (which is judged last, with everything saved).
    """
    started = time.perf_counter()
    output = Path(recipe.train.output)
    journal = open_journal(output, recipe, allow)
    if recipe.report.html:
        check_report_dependencies()

    found = find(recipe)
    tokenizer = tokenizer_for(recipe, found)
    documents = prepare(recipe, "train", tokenizer, console)
    check_data(journal, "train", documents.key, allow)
    heldout = None
    if recipe.data.eval is not None:
        held = prepare(recipe, "eval", tokenizer, console)
        check_data(journal, "eval", held.key, allow)
        heldout = PackedRows(held.dataset, recipe.model.max_seq_length).first(recipe.data.eval_rows)
    console.print(f"[bold]Loading[/] {escape(recipe.model.name)}")
    model, handle = load(recipe, found, tokenizer, console)
    control = RunControl(recipe.train.max_minutes, recipe.train.save_minutes, recipe.train.patience)
    progress = ProgressCallback(console, recipe.train.max_minutes)
    trainer = make_trainer(recipe, model, tokenizer, documents.dataset, heldout, [control, progress])
    check_processes(journal, processes(), allow)
    main = trainer.accelerator.is_main_process
    with sole_run(output) if main else nullcontext():
        packing = _packing(recipe, trainer, documents.dataset, console)
        if main:
            clear_leftovers(output)
        trainer.accelerator.wait_for_everyone()

        if not journal.judged:
            journal.before, journal.answers = _judge(recipe, trainer, heldout, console, "before")
            journal.judged = True
        _note(journal, trainer)
        trainer.note = lambda text: console.print(f"[yellow]{escape(text)}[/]")
        try:
            _train(recipe, trainer, control, journal, console)
        finally:
            progress.close()
        if main:
            with whole_folder(output / ("adapter" if recipe.adapter.method == "lora" else "model")) as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
        after, answers_after = _judge(recipe, trainer, heldout, console, "after")

        history: list[Any] = trainer.state.log_history
        record = RunRecord(
            recipe=recipe.to_dict(),
            model=recipe.model.name,
            device=device_name(),
            versions=versions(),
            packing={
                **vars(packing),
                "dropped": documents.dropped,
                "truncated": documents.truncated,
                "split": documents.split,
                "sources": [asdict(count) for count in documents.counts],
            },
            paths=[vars(path) for path in handle.paths(autocast_dtype(recipe))],
            steps=_steps(history),
            heldout={"before": journal.before, "after": after, "rows": len(heldout) if heldout is not None else 0},
            samples=[
                {"prompt": prompt, "before": first, "after": last}
                for prompt, first, last in zip(
                    recipe.report.sample_prompts, journal.answers, answers_after, strict=True
                )
            ],
            trainable=trainable_parameters(model),
            seconds=time.perf_counter() - started + control.seconds_before,
            stopped=journal.stopped or ("max_steps" if recipe.train.max_steps else "epochs"),
            peak_memory_bytes=peak_bytes(model.device) if model.device.type == "cuda" else None,
            evaluations=[{"step": e["step"], "loss": e["eval_loss"]} for e in history if "eval_loss" in e],
            resumed_at=journal.resumed_at,
            out_of_memory=[entry["out_of_memory"] for entry in history if "out_of_memory" in entry],
        )
        if main:
            record.write(output)
            if recipe.report.html:
                write_report(record, output)
    _must_have_improved(recipe, journal.before, after)
    return record


def _train(recipe: Recipe, trainer: SFTTrainer, control: RunControl, journal: Journal, console: Console) -> None:
    """Train from the newest checkpoint, or the start, to the end; leave the model with the weights to keep."""
    found = checkpoints(Path(recipe.train.output))
    if found:
        state = TrainerState.load_from_json(str(found[-1] / "trainer_state.json"))
        ended, impatient = state.global_step >= planned_steps(trainer), control.out_of_patience(state)
        if journal.trained is None and (ended or impatient):
            journal.trained = state.global_step  # killed between the last checkpoint and this note
            journal.stopped = "patience" if impatient else None
    else:
        journal.trained = None  # whoever deletes all checkpoints begins again
    if journal.trained is None:
        if found:
            console.print(f"Going on from {found[-1].name}")
            journal.resumed_at.append(step_of(found[-1]))
            _note(journal, trainer)
        with control.signals():
            trainer.train(resume_from_checkpoint=str(found[-1]) if found else None)
        last = trainer.state.global_step
        if control.signal:
            raise RunStopped(
                f"stopped by {control.stopped} after step {last}; checkpoint-{last} is saved",
                "run the same command to go on",
                control.signal,
            )
        journal.trained, journal.stopped = last, control.stopped
        _note(journal, trainer)
    else:
        console.print(f"Training had ended at step {journal.trained}; what is left is to save and to judge")
        trainer.state = state
        control.seconds_before = trained_seconds(state)
        trainer.load_weights(found[-1])
    best = trainer.state.best_model_checkpoint
    if best is not None and recipe.train.load_best and step_of(Path(best)) != trainer.state.global_step:
        console.print(f"The lowest held-out loss was at step {step_of(Path(best))}: those weights are kept")
        trainer.load_weights(Path(best))


def _note(journal: Journal, trainer: SFTTrainer) -> None:
    if trainer.accelerator.is_main_process:
        journal.write(Path(str(trainer.args.output_dir)))


def _packing(recipe: Recipe, trainer: SFTTrainer, documents: Any, console: Console) -> PackingStats:
    """How full the rows are; without packing, how full they would be."""
    packed: Any = trainer.train_dataset
    if not recipe.packing.enabled:
        packed = PackedRows(documents, recipe.model.max_seq_length, seed=recipe.train.seed)
    packing = packed.stats
    console.print(
        f"{packing.documents:,} documents, {packing.tokens:,} tokens; packed into {packing.rows:,} rows of "
        f"{packing.row_tokens:,} they {'are' if recipe.packing.enabled else 'would be'} {packing.efficiency:.1%} full "
        f"(at most {packing.ceiling:.1%} is possible)"
    )
    rows = packing.rows if recipe.packing.enabled else packing.documents
    micro_batches = math.ceil(rows / recipe.packing.rows_per_step / processes())
    if (accumulated := recipe.train.gradient_accumulation_steps) > micro_batches:
        less = f"more than the {micro_batches:,} micro-batches of an epoch: each step is a whole epoch"
        console.print(f"[yellow]train.gradient_accumulation_steps {accumulated:,} is {less}[/]")
    return packing


def _judge(
    recipe: Recipe, trainer: SFTTrainer, heldout: PackedRows | None, console: Console, when: str
) -> tuple[float | None, list[str]]:
    """Held-out loss (None without held-out data) and the answers to the sample prompts."""
    model: Any = trainer.model
    tokenizer: Any = trainer.processing_class
    loss = None
    if heldout is not None:
        collator = Collator(recipe.model.max_seq_length, tokenizer.pad_token_id)
        with trainer.accelerator.autocast():
            loss = heldout_loss(
                model,
                heldout,
                range(len(heldout)),
                collator,
                lambda rows: track(rows, f"Held-out rows {when}", len(rows), console),
            )
        console.print(f"[bold]Held-out loss {when} training[/] {loss:.4f}")
    tokens, system = recipe.report.sample_tokens, recipe.data.system_prompt
    asked = [[{"role": "user", "content": prompt}] for prompt in recipe.report.sample_prompts]
    return loss, [answer(model, tokenizer, turns, tokens, system) for turns in asked]


def _steps(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The trainer's log as the run record's steps."""
    return [
        {
            "step": entry["step"],
            "loss": entry["loss"],
            "learning_rate": entry["learning_rate"],
            "grad_norm": entry.get("grad_norm", 0.0),
            "tokens": entry["tokens"],
            "labelled": entry["labelled_tokens"],
            "seconds": entry["step_seconds"],
            "packing_efficiency": entry["packing_efficiency"],
            "data_wait_share": entry["data_wait_share"],
            "skipped": entry["skipped_steps"],
        }
        for entry in history
        if "loss" in entry
    ]


def _must_have_improved(recipe: Recipe, before: float | None, after: float | None) -> None:
    wanted = recipe.train.min_improvement
    if wanted is not None and before is not None and after is not None and not before - after >= wanted:
        raise TrainingError(
            f"the held-out loss went from {before:.4f} to {after:.4f}, which is not a fall of {wanted} or more",
            "train longer, or change train.learning_rate; the run is saved and its report tells more",
        )
