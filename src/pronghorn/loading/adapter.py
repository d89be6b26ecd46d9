"""A saved adapter, put whole on its base model."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from pronghorn.errors import DataError, UnsupportedError
from pronghorn.models.adapter_files import CONFIG, WEIGHTS, tensor_shapes
from pronghorn.models.lora import check_whole_modules
from pronghorn.text import clip, counted

_NAME_BASE = "set base_model_name_or_path in its adapter_config.json to the model that it was trained on"


def with_adapter(base: Any, folder: str | Path) -> Any:
    """Put a saved adapter, whole, on its base. PEFT only warns of weights that the folder lacks, and begins anew there;
    those that the model has no place for it drops without a word.

    Raises:
        DataError: configuration, weights and base don't fit each other.
        UnsupportedError: PEFT needs a package that isn't installed.
    """
    from peft import PeftConfig, PeftModel

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder}: its {CONFIG} can't be used ({error})", "save the adapter again") from error
    except ImportError as error:  # scipy, of which LoftQ's beginning is made
        raise UnsupportedError(f"the adapter in {folder} can't be loaded ({error})", "install that package") from error
    if (composite := getattr(base, "composite", None)) is not None:
        composite.adapt(config, base)
    check_whole_modules(base, getattr(config, "modules_to_save", None) or ())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            model: Any = PeftModel.from_pretrained(base, folder, is_trainable=True, config=config)
    except (KeyError, UserWarning) as error:
        raise _lacking(folder, re.findall(r"'([^']+)'", str(error))) from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise DataError(f"{folder} has matrices of other shapes than its base model", _NAME_BASE) from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        reason = clip(" ".join(str(error).split()), 300)
        raise DataError(
            f"the adapter in {folder} doesn't fit its base model ({reason})", f"fix or save again its {CONFIG}"
        ) from error
    names = getattr(base, "_checkpoint_conversion_mapping", None)
    again = model.load_adapter(
        folder, model.active_adapter, is_trainable=True, key_mapping=names
    )  # from_pretrained keeps this to itself
    dropped = [key for key in again.unexpected_keys if "lora_" in key]
    if dropped:
        raise DataError(
            f"{folder} holds {counted(len(dropped), 'weight')} that its base model has no place for ({dropped[0]} ...)",
            _NAME_BASE,
        )
    return model


def _lacking(folder: str | Path, names: list[str]) -> DataError:
    """Return the error of an adapter that lacks weights, with a name that it has: they may be of another family."""
    held = next(iter(tensor_shapes(Path(folder) / WEIGHTS)), "no tensor")
    return DataError(
        f"{folder} lacks {counted(len(names), 'weight')} of its adapter ({names[0] if names else '?'} ...; it holds "
        f"{held} ...)",
        f"copy or save the adapter again, or {_NAME_BASE}",
    )


def has_more_tokens(folder: str | Path, tokenizer: Any, base: Any) -> bool:
    """Tell whether an adapter's tokenizer has tokens that its base's lacks.

    Raises:
        DataError: it is another model's: rows are grown at the end, and its ids would mean other tokens' rows.
    """
    own, special = tokenizer.get_vocab(), set(base.all_special_tokens)
    # if the base has no tokenizer's files, transformers makes a tokenizer of special tokens alone
    known = {token: index for token, index in base.get_vocab().items() if token not in special}
    same = sum(own.get(token) == index for token, index in known.items())
    if same < len(known) / 2:  # some are renamed where a model has tokens to spare
        raise DataError(
            f"{folder}: its tokenizer gives {same:,} of the base's {len(known):,} tokens their ids: it is another "
            "model's",
            "copy the files of its own tokenizer there; without tokenizer_config.json the base's are used",
        )
    return len(tokenizer) > len(base)
