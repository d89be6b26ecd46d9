"""The adapters of a trainer's checkpoint, put back into a model, and what such a checkpoint doesn't hold.

PEFT saves the adapter "default" in a folder itself and each other one in a folder of its name below. transformers reads
them back one way when it resumes, which leaves one adapter active and trained, and another way for the best checkpoint,
where it takes the folder's own for whichever adapter is active.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

from pronghorn.errors import DataError
from pronghorn.models.adapter_files import WEIGHTS, tensor_shapes
from pronghorn.models.families import base_causal_lm
from pronghorn.text import counted, does

_WRAPPED = "base_model.model."
"""What names begin with in a PEFT model and in all adapters' files."""
_OF_ADAPTERS = ("modules_to_save", "token_adapter")
"""Parts of the names of what PEFT trains beside an adapter's own matrices, and saves."""


def load_adapters(model: Any, folder: Path) -> None:
    """Put a checkpoint's adapters into the model's of the same names. Which are active, what is trained, and in which
    dtype, stays as it is.

    Args:
        model: a PEFT model, or a model of transformers with an adapter by its `add_adapter`, which saves the active one
            in the folder itself, whatever its name.
    Raises:
        DataError: the folder lacks an adapter, or base weights that are trained beside it.
    """
    held: set[str] = set()
    wrapped = isinstance(model, PeftModel)
    for adapter in model.peft_config if wrapped else model.active_adapters():
        place = _place(folder, adapter, alone=not wrapped or len(model.peft_config) == 1)
        held |= {name.removeprefix(_WRAPPED) for name in tensor_shapes(place / WEIGHTS)}
        if wrapped:
            model.load_adapter(str(place), adapter, is_trainable=True, autocast_adapter_dtype=False)
        else:
            weights = load_peft_weights(str(place), device="cpu")
            set_peft_model_state_dict(
                model, {name.removeprefix(_WRAPPED): value for name, value in weights.items()}, adapter
            )
    lost = [name for name in trained_beside(model) if name.removeprefix(_WRAPPED) not in held]
    if lost:
        raise DataError(
            f"{folder} lacks {counted(len(lost), 'weight')} that {does(len(lost), 'are')} trained beside the adapter "
            f"({lost[0]} ...)",
            "freeze them, or name their modules in modules_to_save and begin anew: PEFT saves them then",
        )


def _place(folder: Path, adapter: str, alone: bool) -> Path:
    """Return where an adapter's files are. A model's only one may have had another name."""
    own = folder if adapter == "default" else folder / adapter
    for place in (own, folder) if alone else (own,):
        if (place / WEIGHTS).is_file():
            return place
    found = sorted(str(file.parent.relative_to(folder)) for file in folder.glob(f"*/{WEIGHTS}"))
    found = ["default"] * (folder / WEIGHTS).is_file() + found
    raise DataError(
        f"{folder} holds no adapter {adapter!r}, which the model has (it holds {', '.join(found) or 'none'})",
        "resume with the adapters that it was saved with, by their names",
    )


def trained_beside(model: Any) -> list[str]:
    """List an adapted model's trained weights that `save_pretrained` leaves out: its base's, declared nowhere."""
    configs = getattr(model, "peft_config", {})
    kinds = {config.peft_type for config in configs.values()}
    if not kinds:
        return []
    own = tuple(prefix for kind, prefix in PEFT_TYPE_TO_PREFIX_MAPPING.items() if kind in kinds and prefix)
    inside = {id(parameter) for parameter in base_causal_lm(model).parameters()}
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in inside and not _is_adapters(name, own)
    }
    if not trained:
        return []
    saved = {
        tensor.data_ptr()
        for adapter in configs
        for tensor in get_peft_model_state_dict(model, adapter_name=adapter).values()
    }
    return [name for name, parameter in trained.items() if parameter.data_ptr() not in saved]


def _is_adapters(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(part in _OF_ADAPTERS or part.startswith(prefixes) for part in name.split("."))
