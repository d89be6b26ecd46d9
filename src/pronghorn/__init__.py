"""Pronghorn: fine-tune large language models on NVIDIA GPUs, packed, fast, and with the numbers shown to be right.

Public names load on first use; importing this package imports no torch, touches no device and patches nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pronghorn.version import VERSION

__version__ = VERSION

_HOMES = {
    "FastLanguageModel": "pronghorn.api",
    "FastModel": "pronghorn.api",
    "SFTTrainer": "pronghorn.train.trainer",
    "attach": "pronghorn.models.attach",
    "is_bf16_supported": "pronghorn.device",
    "is_bfloat16_supported": "pronghorn.device",
    "Handle": "pronghorn.models.attach",
    "Plan": "pronghorn.memory.plan",
    "PackedBatch": "pronghorn.data.batch",
    "Collator": "pronghorn.data.batch",
    "PackedRows": "pronghorn.data.packed_rows",
    "Recipe": "pronghorn.config.recipe",
    "register_family": "pronghorn.families.registry",
    "train_on_responses_only": "pronghorn.train.responses",
}
__all__ = [
    "Collator",
    "FastLanguageModel",
    "FastModel",
    "Handle",
    "PackedBatch",
    "PackedRows",
    "Plan",
    "Recipe",
    "SFTTrainer",
    "__version__",
    "attach",
    "is_bf16_supported",
    "is_bfloat16_supported",
    "register_family",
    "train_on_responses_only",
]

if TYPE_CHECKING:
    from pronghorn.api import FastLanguageModel, FastModel
    from pronghorn.config.recipe import Recipe
    from pronghorn.data.batch import Collator, PackedBatch
    from pronghorn.data.packed_rows import PackedRows
    from pronghorn.device import is_bf16_supported, is_bfloat16_supported
    from pronghorn.families.registry import register_family
    from pronghorn.memory.plan import Plan
    from pronghorn.models.attach import Handle, attach
    from pronghorn.train.responses import train_on_responses_only
    from pronghorn.train.trainer import SFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from pronghorn.unsloth_names import elsewhere

        elsewhere(name)
        raise AttributeError(f"module 'pronghorn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
