"""Whether a script that goes on from a checkpoint goes on with the training that wrote it.

A checkpoint's tensors don't tell an adapter's scale, an epsilon or an optimiser: with another one training goes on, to
other numbers or into an error of torch. What a checkpoint says of itself is compared: `adapter_config.json`,
`config.json` of whole models, and the optimiser in `training_args.bin`. What only says how long, how fast, where and in
which batches to train may change. `pronghorn train` compares recipes instead (train.run_state).
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers

from pronghorn import state
from pronghorn.errors import ConfigError
from pronghorn.export.original import composite_of
from pronghorn.models.adapter_files import CONFIG as ADAPTER_CONFIG
from pronghorn.models.adapter_files import changes_base
from pronghorn.models.families import base_causal_lm
from pronghorn.text import short
from pronghorn.train.checkpoint import Fingerprint, check_folder, check_model, verify

_SCALES = ("lora_alpha", "alpha", "alpha_pattern", "use_rslora", "lora_dropout", "trainable_token_indices")
"""Fields of an adapter that its tensors don't tell."""
_SHAPES = (
    *("peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "bias", "use_dora", "lora_bias"),
)
"""Fields that names and shapes of tensors tell, by which adapters that are written otherwise may be the same."""
_NAMES = ("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "modules_to_save", "target_parameters")
"""Fields that name modules: of a model with towers they are saved with the whole model's names."""
_FREE = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef"),
)
"""Keys of a model's configuration that change no logit, or that trainers set themselves."""


def check_checkpoint(
    folder: Path, model: Any, fingerprint: Fingerprint, contents: bool, optimizer: str | None = None
) -> None:
    """Refuse a folder that is no checkpoint, is damaged, or is of another training than a script's. Of one without a
    manifest (stock TRL's) only what it says of itself can be compared.

    Args:
        model: what is trained, with its adapters.
        contents: compare the files with the manifest's digests, too.
        optimizer: transformers' name of a script's optimiser; None: whoever calls has compared its recipe.
    Raises:
        DataError: no checkpoint, a damaged one, or one of other weights.
        ConfigError: another adapter, configuration or optimiser, with what it was.
    """
    check_folder(folder)
    manifest = verify(folder, contents=contents) if (folder / state.MANIFEST).exists() else None
    if optimizer is not None:
        made_with = (manifest or {}).get("model")
        same_tensors = isinstance(made_with, dict) and made_with.get("trainable") == fingerprint.trainable
        changes = [*_of_method(folder, model), *_of_adapters(folder, model, same_tensors), *_of_model(folder, model)]
        before = saved_optimizer(folder)
        if before is not None and _states(before) != _states(optimizer):
            changes.append(("optim", before, optimizer))
        if changes:
            listed = "; ".join(f"{name} was {short(old)}, is {short(new)}" for name, old, new in changes)
            raise ConfigError(
                f"{folder} is a checkpoint of another training: {listed}",
                "put back what changed to go on; or call train() without resume_from_checkpoint to begin anew (from "
                "these weights: from_pretrained takes the checkpoint's folder)",
            )
    if manifest is not None:
        check_model(folder, manifest, fingerprint)


def _of_method(folder: Path, model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield whether adapters or every weight are trained, where the checkpoint has the other."""
    ways = {False: "every weight", True: "an adapter"}
    now, whole = hasattr(model, "peft_config"), (folder / "config.json").is_file()
    before = any(_file(folder, name).is_file() for name in getattr(model, "peft_config", ["default"]))
    if now != before and (before or whole):
        yield "what is trained", ways[before], ways[now]


def _file(folder: Path, adapter: str) -> Path:
    """Return where PEFT saves the configuration of an adapter of this name."""
    return folder / ADAPTER_CONFIG if adapter == "default" else folder / adapter / ADAPTER_CONFIG


def _of_adapters(folder: Path, model: Any, same_tensors: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value before, value now) of each field of the adapters in which model and checkpoint differ."""
    for adapter, config in getattr(model, "peft_config", {}).items():
        saved, now = _read(_file(folder, adapter)), config.to_dict()
        fields = _SCALES if same_tensors else (*_SHAPES, *_SCALES)
        unlike = _NAMES if composite_of(model) is not None else ()
        if "ADALORA" in str(saved.get("peft_type")):
            unlike = (*unlike, "rank_pattern")  # which it writes itself as it trains
        for field in fields:
            if field in saved and field in now and field not in unlike and _differ(field, saved[field], now[field]):
                yield field, saved[field], _plain(now[field])
        begun = saved.get("init_lora_weights", True)
        of_other_base = changes_base(SimpleNamespace(init_lora_weights=begun)) != changes_base(config)
        if saved and not same_tensors and of_other_base:
            yield "init_lora_weights", begun, config.init_lora_weights


def _differ(field: str, before: Any, now: Any) -> bool:
    """Tell whether two values of an adapter's field differ. Where modules are named by a pattern they can't be compared
    with others; what isn't set and what is empty are the same."""
    before, now = _plain(before), _plain(now)
    if field == "target_modules" and (isinstance(before, str) or isinstance(now, str)):
        return False
    return bool(before != now and (before or now))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, with names in order: PEFT keeps sets of them."""
    value = getattr(value, "value", value)
    if isinstance(value, set | list | tuple):
        return sorted(value) if all(isinstance(each, str) for each in value) else [*value]
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else value


def _of_model(folder: Path, model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value before, value now) of each key in which a whole model's configuration differs. Another version
    of transformers may write it otherwise, so such a one is not compared."""
    saved = _read(folder / "config.json")
    if hasattr(model, "peft_config") or saved.get("transformers_version") != transformers.__version__:
        return
    now = json.loads(base_causal_lm(model).config.to_json_string())  # as it would be saved: JSON lacks an infinity
    if saved.get("model_type") != now.get("model_type"):  # of a model with towers its language model is trained
        saved = saved.get("text_config") or {}
    if saved.get("model_type") != now.get("model_type"):
        return  # whose weights tell
    for key in sorted(saved.keys() & now.keys() - {*_FREE}):
        if saved[key] != now[key]:
            yield key, saved[key], now[key]


def _read(file: Path) -> dict[str, Any]:
    """Return a checkpoint's JSON; empty if there is none, or none that can be read: whoever loads it tells."""
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def saved_optimizer(folder: Path) -> str | None:
    """Return transformers' name of the optimiser whose states a checkpoint has, as `training_args.bin` tells it, or
    None. Nothing of that file is run: every class in it becomes an empty one."""
    try:
        with zipfile.ZipFile(folder / "training_args.bin") as archive:
            name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            with archive.open(name) as file:
                table = _Unpickler(file).load()
    except Exception:  # whatever a damaged or foreign file raises: then it doesn't tell
        return None
    found = getattr(table, "__dict__", {}).get("optim")
    told = found if isinstance(found, str) else next(iter(getattr(found, "given", ())), None)
    return told if isinstance(told, str) else None


class _Empty:
    """Stands for an object of any class, and keeps what it was made of."""

    def __init__(self, *given: Any, **_: Any) -> None:
        self.given = given


class _Unpickler(pickle.Unpickler):
    """Reads a pickle without calling anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        return _Empty

    def persistent_load(self, key: Any) -> None:
        return None


def _states(optimizer: str) -> str:
    """Return a name that optimisers share which go on with each other's states."""
    if optimizer.startswith("adamw_torch") and not optimizer.endswith("bit"):
        return "adamw_torch"  # fused, of other devices
    return optimizer.removeprefix("paged_").replace("adamw_bnb_", "adamw_").removesuffix("_32bit")
