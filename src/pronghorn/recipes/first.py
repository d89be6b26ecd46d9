"""Write a first recipe: for the model, the data and the machine that there are, looked at as training would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pronghorn.config.recipe import Recipe
from pronghorn.config.sections import Format
from pronghorn.data.cache import Progress
from pronghorn.data.files import READERS, read_file
from pronghorn.data.formats import PROVENANCE, columns_to_write, likely_columns, turns_column
from pronghorn.data.template import BUILT_IN, NoTemplateError, special_tokens
from pronghorn.device import probe
from pronghorn.diagnose.inspect import Inspection, inspect
from pronghorn.diagnose.plan_report import PlanReport, report_plan
from pronghorn.errors import DataError
from pronghorn.loading.load import FoundModel, find_model
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import GIB
from pronghorn.memory.planner import PlanDoesNotFit
from pronghorn.recipes.draft import Draft
from pronghorn.text import counted, duration

Task = Literal["sft", "pretrain"]
Method = Literal["lora", "qlora", "full"]
EXAMPLE_DATA = "my-data.jsonl"
SHORTEST, LONGEST, ON_A_CPU = 512, 8192, 1024
"""Tokens of a row: at least and at most, unless documents or the model's positions say otherwise."""


@dataclass(frozen=True)
class Machine:
    """What the recipe is for."""

    name: str
    gib: float
    """Of the GPU, of which `free` are free; of the host where there is none."""
    free: float
    gpu: bool

    @classmethod
    def of(cls, device: str | None) -> Machine:
        """Describe this machine, or a GPU that is named."""
        if device is not None:
            spec = device_spec(device)
            return cls(spec.name, spec.memory_bytes / GIB, spec.memory_bytes / GIB, True)
        device_here = probe()
        if device_here.type == "cpu":
            return cls("a CPU", device_here.ram_bytes / GIB, device_here.ram_bytes / GIB, False)
        import torch

        free, total = torch.cuda.mem_get_info(device_here.index)
        return cls(device_here.name, total / GIB, free / GIB, True)

    @property
    def model(self) -> str:
        """Return a model that this machine can train."""
        if not self.gpu:
            return "HuggingFaceTB/SmolLM2-135M-Instruct"
        sizes = ((7, "0.6B"), (14, "1.7B"), (30, "4B"))
        return "Qwen/Qwen3-" + next((size for gib, size in sizes if self.gib < gib), "8B")


def first_recipe(
    task: Task,
    method: Method,
    model: str | None,
    data: Path | None,
    device: str | None,
    progress: Progress | None = None,
    format: Format | None = None,
) -> Draft:
    """Return a recipe that trains `model` on `data`.

    Args:
        model, data: None for one that suits the machine, and for a file to be written.
        device: a GPU to write for, as `pronghorn plan` knows it; None for this machine.
        progress: is told of the rows that are tokenised.
        format: what a row is; None: its keys tell.
    Raises:
        ConfigError, DataError, UnsupportedError: what training would raise.
    """
    machine, draft = Machine.of(device), Draft({})
    lora = "every weight is trained" if method == "full" else "small matrices beside the frozen weights"
    draft.put("model.name", model or machine.model, "a folder, a hub name, or a saved adapter's folder")
    draft.put("model.max_seq_length", SHORTEST * 4 if machine.gpu else ON_A_CPU, "tokens of a packed row")
    if method == "qlora":
        draft.put("model.load_in_4bit", True, "NF4 weights: a quarter of the memory")
    draft.put("adapter.method", "full" if method == "full" else "lora", lora)
    if method != "full":
        draft.put("adapter.r", 16, "rank: more learns more, and takes more memory")
        draft.put("adapter.lora_alpha", 32, "their effect is scaled by lora_alpha / r")
    draft.put(
        "data.train", str(data or EXAMPLE_DATA), 'a row: {"prompt": "…", "completion": "…"}; pronghorn docs finetune'
    )
    if format is not None:
        draft.put("data.format", format, "what a row is; its other keys are ignored")
    if task == "pretrain":
        draft.put("data.loss_on", "all", "learn every token")
    draft.put("train.output", f"runs/{data.stem if data else 'mine'}", "adapter, run.json and report.html go here")
    draft.put("train.epochs", 1, "passes over the data; or max_steps")
    draft.put("train.learning_rate", 1e-5 if method == "full" else 2e-4, "the highest; it rises first, then falls")
    draft.put("train.lr_scheduler", "cosine", "how it falls")
    draft.put("packing.rows_per_step", 1, "rows of a micro-batch; each is full of documents")
    if data is not None:
        _look_at(draft, machine, model is not None, progress)
        if machine.gpu:
            _fit(draft, device, method)
    draft.check()
    return draft


def _recipe(draft: Draft, **data: Any) -> Recipe:
    """Return the draft as a recipe, with other settings of the data."""
    return Recipe.model_validate({**draft.recipe, "data": {**draft.recipe["data"], **data}})


def _look_at(draft: Draft, machine: Machine, named: bool, progress: Progress | None) -> None:
    """Set the row's length, the overflow rule and the columns by what the data are.

    Args:
        named: whether the user named the model, whose tokens and positions are counted.
    """
    name = draft.recipe["model"]["name"]
    path = Path(draft.recipe["data"]["train"])
    named_format = "format" in draft.recipe["data"]
    if path.is_file() and path.suffix.lower() in READERS and not named_format:
        _name_columns(draft, path)
    try:
        located = find_model(name, max_seq_length=1, weights=False)
    except DataError as error:
        if named:
            raise
        raise DataError(error.problem, "name a model that you have: --model FOLDER") from error
    limit = getattr((located.base or located).config, "max_position_embeddings", None) or LONGEST
    draft.put("model.max_seq_length", min(limit, 4 * LONGEST))
    try:
        seen = inspect(_recipe(draft, overflow="truncate"), "train", 0, progress)
    except NoTemplateError as error:
        _choose_template(draft, located, error)
        seen = inspect(_recipe(draft, overflow="truncate"), "train", 0, progress)
    except DataError as error:
        if named_format or "set data.format" not in error.remedy:
            raise
        raise DataError(error.problem, f"{error.remedy} (pronghorn init --format)") from error
    _choose_length(draft, seen, min(limit, LONGEST if machine.gpu else ON_A_CPU))


def _choose_template(draft: Draft, found: FoundModel, error: NoTemplateError) -> None:
    """Choose a chat template for conversations, where the model's tokenizer has none: the first one whose special
    tokens it has, else ChatML with tokens that are added and trained.

    Raises:
        DataError: every weight of it is trained, or it is a saved adapter: no tokens can be added then.
    """
    known, instead = special_tokens(found.tokenizer()), "or name the model's instruct version: --model"
    for template in BUILT_IN.values():
        if known.issuperset(template.needs):
            draft.put("data.chat_template", template.name, f"the model has none, but this one's tokens; {instead}")
            return
    chatml = BUILT_IN["chatml"]
    if found.is_adapter or draft.recipe["adapter"]["method"] == "full":
        other = "or its base (--model)" if found.is_adapter else "or leave --method full out"
        raise DataError(
            error.problem,
            f"name the model's instruct version (--model), {other}: with LoRA, ChatML's tokens are added and trained",
        ) from error
    draft.put("data.chat_template", chatml.name, f"the model has none; {instead}")
    lacking = [token for token in chatml.needs if token not in known]
    draft.put("adapter.new_tokens", lacking, "ChatML's, which the model lacks; they are trained")


def _name_columns(draft: Draft, path: Path) -> None:
    """Name the columns of rows of a prompt and an answer, or of turns, under other names."""
    row = next(iter(read_file(path)), (0, None))[1]
    known = [{"messages"}, {"conversations"}, {"text"}, {"chosen"}]
    known += [{"prompt", "completion"}, {"instruction", "output"}, {"instruction", "context", "response"}]
    if not isinstance(row, dict) or any(keys <= row.keys() for keys in known):
        return
    if likely := likely_columns(row):
        columns, unread = columns_to_write(row, likely)
    else:
        columns = turns_column(row)
        unread = [key for key in row if key not in {*columns.values()} | PROVENANCE]
    if columns:
        left_out = f"; not read: {', '.join(unread)}" if unread else ""
        draft.put("data.columns", columns, f"our names, and the file's{left_out}")


def _choose_length(draft: Draft, seen: Inspection, most: int) -> None:
    """Choose rows that hold the longest document, if that is within `most` tokens."""
    longest, median = seen.lengths[-1], seen.percentiles["median"]
    row = SHORTEST
    while row < longest:
        row *= 2
    row = min(row, most)
    cut = seen.prepared.fitted.truncated  # at the most that was looked at
    most_tokens = f"more than {longest:,}" if cut else f"{longest:,} at most"
    lengths = f"{counted(len(seen.lengths), 'document')} of {median:,} tokens in the median, {most_tokens}"
    draft.put("model.max_seq_length", row, f"tokens of a packed row; {lengths}")
    formats = ", ".join(dict.fromkeys(count.format for count in seen.prepared.counts))
    draft.put("data.train", draft.recipe["data"]["train"], f"{counted(seen.prepared.rows, 'row')} ({formats})")
    if longer := max(cut, sum(length > row for length in seen.lengths)):
        share = longer / len(seen.lengths)
        draft.put("data.overflow", "split", f"{share:.1%} are longer than a row: in pieces, no label is lost")


def _fit(draft: Draft, device: str | None, method: Method) -> None:
    """Make the recipe fit the GPU: 4-bit weights first, then shorter rows; and tell what it will take.

    Raises:
        PlanDoesNotFit: nothing of these is enough.
    """
    from rich.console import Console

    while True:
        try:
            report = report_plan(_recipe(draft), device, False, Console(quiet=True))
            break
        except PlanDoesNotFit:
            row = draft.recipe["model"]["max_seq_length"]
            if method == "lora" and "load_in_4bit" not in draft.recipe["model"]:
                draft.put("model.load_in_4bit", True, "NF4 weights, or they would not fit here")
            elif row > SHORTEST:
                draft.put("model.max_seq_length", row // 2, "tokens of a packed row; longer ones don't fit here")
                draft.put("data.overflow", "split", "longer documents in pieces: no label is lost")
            else:
                raise
    draft.put("memory.gradient_checkpointing", "auto", _predicted(report))


def _predicted(report: PlanReport) -> str:
    """Say what the plan takes."""
    process, budget = report.plan.predicted["process"] / GIB, (report.plan.budget_bytes or 0) / GIB
    whole = f", {duration(report.seconds)} in all" if report.seconds is not None else ""
    return f"planned: {process:.1f} of {budget:.1f} GiB, {report.step_ms:,.0f} ms a step{whole}"


def head(machine: Machine, data: Path | None) -> list[str]:
    """Return what the recipe says first."""
    memory = f"{machine.free:.0f} of {machine.gib:.0f} GiB free" if machine.gpu else f"{machine.gib:.0f} GiB"
    lines = [f"A recipe for {machine.name} ({memory}), written by `pronghorn init`. Every key: pronghorn docs recipe"]
    if data is None:
        lines.append(f"Put your rows into {EXAMPLE_DATA}, or name another file, folder or hub set in data.train.")
    return [*lines, "Held-out rows in data.eval show whether it learned: their loss is measured before and after."]
