"""Licence files of a base model: most licences ask that whoever passes weights on passes them on, too."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

_WORD = r"licen[cs]es?|notices?|copying|copyright|patents?|(acceptable_)?use_policy|usage_policy|terms(_of_use)?"
_NAME = re.compile(rf"(?:.*_)?(?:{_WORD})(?:_.*)?(?:\.(?:md|txt|rst|pdf|html))?", re.IGNORECASE)
"""Of files that licences name, with `_` for whatever stands between words: LICENSE, Notice.txt, USE_POLICY.md,
LICENSE-MODEL."""


def copy_licences(base: Any, folder: Path) -> None:
    """Copy the licence files beside a base's checkpoint. Of a model on the hub those that are in the cache: nothing is
    downloaded.

    Args:
        base: a causal LM, or the folder of its checkpoint.
        folder: where its weights are written.
    """
    source = base if isinstance(base, Path) else _folder_of(base)
    if source is None or source.resolve() == folder.resolve():
        return
    for file in source.iterdir():
        if _NAME.fullmatch(re.sub(r"[- ]", "_", file.name)) and file.is_file():
            shutil.copyfile(file, folder / file.name)


def _folder_of(base: Any) -> Path | None:
    """Return the folder that a model was loaded from, if it lies here."""
    name = str(getattr(base, "name_or_path", "") or "")
    if not name:  # made from a configuration
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    revision = getattr(base.config, "_commit_hash", None) or getattr(base, "hub_revision", None)
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a file, or a folder that is gone
        return None
    return Path(found).parent if isinstance(found, str) else None
