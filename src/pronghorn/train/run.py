"""A whole run from a recipe: load, read, pack, train, judge by held-out loss, save, report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pronghorn.config import Recipe
from pronghorn.data.chat import fit, tokenize
from pronghorn.data.packed_rows import PackedRows
from pronghorn.data.rows import read_rows
from pronghorn.errors import ConfigError, TrainingError
from pronghorn.export.folder import whole_folder
from pronghorn.models.attach import Handle, attach
from pronghorn.models.families import recompute_layers
from pronghorn.models.load import default_device, load_model, resolve_dtype, trainable_parameters
from pronghorn.models.lora import add_lora
from pronghorn.train.evaluate import answer, heldout_loss
from pronghorn.train.progress import ProgressCallback, track
from pronghorn.train.record import RunRecord, versions
from pronghorn.train.report import check_report_dependencies, write_report

if TYPE_CHECKING:
    from rich.console import Console


def run(recipe: Recipe, console: Console) -> RunRecord:
    """Do what the recipe says and leave adapter (or model), `run.json` and `report.html` in its output folder.

    Raises:
        ConfigError, DataError, UnsupportedError: before anything is trained.
        TrainingError: dead or non-finite gradients, a full disk, or a held-out loss that did not fall by
            `train.min_improvement` (everything is saved before that is judged).
    """
    started = time.perf_counter()
    output = Path(recipe.train.output)
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} already holds a run", "choose another train.output or delete the folder")
    if recipe.report.html:
        check_report_dependencies()

    device = default_device()
    console.print(f"[bold]Loading[/] {recipe.model.name} on {device}")
    model, tokenizer, dtype = _load(recipe, device)
    rows, counts = _packed(recipe, recipe.data.train, tokenizer, console)
    heldout = _packed(recipe, recipe.data.eval, tokenizer, console)[0] if recipe.data.eval else None
    console.print(
        f"{rows.stats.documents:,} documents, {rows.stats.tokens:,} tokens in {rows.stats.rows:,} rows of "
        f"{rows.stats.row_tokens:,}: {rows.stats.efficiency:.1%} full (at most {rows.stats.ceiling:.1%} is possible)"
    )
    handle = _adapt(recipe, model)
    model = handle.wrapped
    trainer = _trainer(recipe, model, tokenizer, rows, dtype, console)
    collate = trainer.collate_packed
    before = heldout_loss(model, heldout, collate, recipe.data.eval_rows, console, "Held-out loss before")
    first_answers = [answer(model, tokenizer, p, recipe.report.sample_tokens) for p in recipe.report.sample_prompts]
    trainer.train()
    after = heldout_loss(model, heldout, collate, recipe.data.eval_rows, console, "Held-out loss after")
    last_answers = [answer(model, tokenizer, p, recipe.report.sample_tokens) for p in recipe.report.sample_prompts]

    if trainer.accelerator.is_main_process or trainer.is_fsdp_enabled:
        _save(recipe, trainer, tokenizer, output)
    record = RunRecord(
        recipe=recipe.to_dict(),
        model=str(recipe.model.name),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        versions=versions(),
        packing={**vars(rows.stats), **counts},
        paths=[vars(path) for path in handle.attached.report],
        steps=_steps(trainer.state.log_history),
        heldout={"before": before, "after": after, "rows": min(len(heldout or ()), recipe.data.eval_rows or 10**9)},
        samples=[
            {"prompt": p, "before": b, "after": a}
            for p, b, a in zip(recipe.report.sample_prompts, first_answers, last_answers, strict=True)
        ],
        trainable=trainable_parameters(model),
        seconds=time.perf_counter() - started,
        stopped=trainer.stopped_by,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )
    if trainer.accelerator.is_main_process:
        record.write(output)
        if recipe.report.html:
            write_report(record, output)
    _judge(recipe, before, after)
    return record
