"""What is known of an unfinished run: enough to go on after anything, and to refuse to go on with another.

`journal.json` is written before training (the recipe, what the data hash to, the held-out loss before) and again when
training has ended, each time whole. `run.json` is there when everything is.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from pronghorn.config.errors import without_removed
from pronghorn.config.recipe import Recipe
from pronghorn.config.sections import ON_LOSS
from pronghorn.device import versions
from pronghorn.errors import ConfigError
from pronghorn.loading.load import FoundModel
from pronghorn.models.adapter_files import CONFIG as ADAPTER_CONFIG
from pronghorn.records.record import read_table, write_table
from pronghorn.text import counted
from pronghorn.train.checkpoint import checkpoints

FILE_NAME = "journal.json"
SCHEMA = "pronghorn-journal-v1"

FREE = (
    "report",
    "launch",
    "data.cache",
    "data.workers",
    "train.output",
    "train.max_minutes",
    "train.min_improvement",
    "train.save_steps",
    "train.save_minutes",
    "train.keep_checkpoints",
    "train.load_best",
    "train.logging_steps",
    "train.report_to",
)
"""Keys, or whole sections, that a resumed run may change: they change no step of the training."""


@dataclass
class RunState:
    """The state of an unfinished run. Where a field has an alias, that is its key in the file."""

    recipe: dict[str, dict[str, Any]]
    data: dict[str, str] = field(default_factory=dict)
    """Hashes of the tokenised data, by split."""
    model: str | None = None
    """The version of transformers and, as that reads it, the hash of the model's configuration."""
    eval_loss_before: Annotated[float | None, Field(alias="before")] = None
    """Held-out loss before training."""
    samples_before: Annotated[list[str], Field(alias="answers")] = field(default_factory=list)
    """The sample prompts' answers before training."""
    baseline_done: Annotated[bool, Field(alias="judged")] = False
    """`eval_loss_before` and `samples_before` are there."""
    trained: int | None = None
    """The last step, once training has ended; it holds as long as that step's checkpoint is the newest."""
    stopped: str | None = None
    """Why it ended before the last planned step, if it did."""
    processes: int | None = None
    """How many trained, so that each step had the rows of so many."""
    resumed_at: list[int] = field(default_factory=list)
    """The steps at which the run was taken up again."""
    versions: dict[str, str] = field(default_factory=versions)
    schema: str = SCHEMA

    def write(self, output: Path) -> None:
        """Write `journal.json` into the run's folder; TrainingError if it can't be written."""
        write_table(output / FILE_NAME, SCHEMA, TypeAdapter(RunState).dump_python(self, by_alias=True))


def open_run_state(output: Path, recipe: Recipe, allow: bool) -> RunState:
    """Return the state of the unfinished run in `output`, or a new one where nothing was begun.

    Only the holder of the folder's lock may call this.

    Raises:
        ConfigError: unless `allow`, a run of another recipe; one of another optimiser even then.
        DataError: a file that can't be read.
    """
    path = output / FILE_NAME
    if not path.exists():
        return RunState(recipe.to_dict())
    remedy = "restore the file, go on with the version that began the run, or choose another train.output"
    state = read_table(path, SCHEMA, RunState, remedy)
    changes = changed_keys(state.recipe, recipe.to_dict())
    if changes and not allow:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in changes)
        raise ConfigError(
            f"{output} holds an unfinished run of another recipe: {listed}",
            "put them back, choose another train.output, or give --allow to go on with the changed recipe",
        )
    if changes:
        _refuse_unfit_states(changes, state.recipe["train"], recipe, output)
        state.trained = state.stopped = None  # there may be more to train now
    if changes or state.recipe.get("report") != recipe.to_dict()["report"]:
        state.baseline_done = False  # the loaded model, before a checkpoint's weights, answers the prompts of now
    if state.baseline_done and state.eval_loss_before is None and recipe.data.eval is not None:
        state.eval_loss_before = math.nan  # which JSON lacks
    state.recipe = recipe.to_dict()
    return state


def _refuse_unfit_states(
    changes: list[tuple[str, Any, Any]], before: dict[str, Any], recipe: Recipe, output: Path
) -> None:
    """Refuse changes with which the states in a checkpoint, if there is one, can't be gone on with (ConfigError)."""
    own = ["train.optimizer"]
    if {before.get("lr_scheduler"), recipe.train.lr_scheduler} & set(ON_LOSS):  # these change the rate that they find
        own += ["train.lr_scheduler", "train.lr_scheduler_kwargs", "train.learning_rate"]
    listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in changes if key in own)
    if listed and checkpoints(output):
        raise ConfigError(
            f"{listed}: the states in {output}'s checkpoints are of the earlier one, whatever is allowed",
            "put it back, or choose another train.output",
        )


_LATER = {
    "packing.look_ahead": 1,
    "train.optimizer": "adamw_torch_fused",
    "precision.adapter_dtype": "auto",
    "precision.tf32": False,
}
"""Keys that recipes of earlier runs don't have, and what those runs did."""


def changed_keys(earlier: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, earlier value, value now) of every recipe key that differs and isn't free to."""
    old, new = _fixed_keys(without_removed(earlier)), _fixed_keys(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [(key, old.get(key, _LATER.get(key)), new.get(key, _LATER.get(key))) for key in changed]


def recipe_hash(recipe: Recipe) -> str:
    """Hash the keys of a recipe that aren't free to change: checkpoints name the recipe that trained them by it."""
    fixed = {key: value for key, value in _fixed_keys(recipe.to_dict()).items() if value is not None}
    return hashlib.blake2b(json.dumps(fixed, sort_keys=True).encode(), digest_size=16).hexdigest()


def _fixed_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the keys, as section.key, that a resumed run may not change."""
    flat = {f"{section}.{key}": value for section, keys in recipe.items() for key, value in keys.items()}
    return {
        key: value
        for key, value in flat.items()
        if key not in FREE and key.partition(".")[0] not in FREE and value != _LATER.get(key)
    }


def check_data(state: RunState, split: str, key: str, allow: bool) -> None:
    """Note what the data of `split` hash to; refuse other data than the run began with, unless `allow`."""
    earlier = state.data.setdefault(split, key)
    if earlier != key and not allow:
        raise ConfigError(
            f"data.{split}: the data, the tokenizer or the chat template changed since the run began",
            "put them back, choose another train.output, or give --allow to go on with the data as they are",
        )
    if earlier != key and split == "eval":
        state.baseline_done = False  # the loss before was of other rows than the one after will be
    state.data[split] = key


_OF_FILES = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a configuration that say where and how a model was saved, not what it computes."""


def check_configuration(state: RunState, found: FoundModel, allow: bool) -> None:
    """Note what the configuration of the model, and of an adapter that it is, hash to; refuse another one than the run
    began with, unless `allow`. A checkpoint's tensors don't tell an epsilon, a RoPE or an activation.

    Other versions of transformers add keys to a configuration, so what another one noted is not compared.
    """
    config: Any = (found.base or found).config
    if config is None:  # a GGUF file's lies within it
        return
    table = {key: value for key, value in config.to_dict().items() if key not in _OF_FILES}
    if found.is_adapter:
        table["adapter"] = json.loads((Path(found.name) / ADAPTER_CONFIG).read_bytes())
    content = json.dumps(table, sort_keys=True, default=lambda value: type(value).__name__).encode()
    now = f"{versions()['transformers']} {hashlib.blake2b(content, digest_size=16).hexdigest()}"
    before, state.model = state.model or now, now
    if before == now or before.partition(" ")[0] != now.partition(" ")[0]:
        return
    if not allow:
        raise ConfigError(
            f"model.name: the configuration in {found.name} changed since the run began",
            "put it back, choose another train.output, or give --allow to go on with the model as it is",
        )
    state.baseline_done = False  # the loss before was of the earlier one


def note_processes(state: RunState, count: int) -> str | None:
    """Note how many processes train, and return what to tell where others did before: steps have the same rows, but
    sums are rounded in another order."""
    before, state.processes = state.processes, count
    if before in (None, count):
        return None
    return f"Began on {counted(before or 1, 'GPU')}, goes on with {count}: the same rows a step, not the same bits"
