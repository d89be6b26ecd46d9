"""The optimisers that can be asked for, by the names that transformers gives them, and what their states take."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from pronghorn.errors import ConfigError

Name = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit",
    "adamw_torch_8bit", "adamw_torch_4bit",
]  # fmt: skip
_BLOCK = 256
"""Elements that share a scale (float32) in 8 bits; 4 bits share it among 128."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimiser needs."""

    state_bytes: float | None
    """On the device, of an element that is trained; None for two numbers of the element's own dtype."""
    package: str | None = None
    """What has to be installed."""
    paged: bool = False
    """States are in memory that moves to the host when the device's runs short."""


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch_fused": Optimizer(None),
    "adamw_torch": Optimizer(None),
    "adamw_8bit": Optimizer(2 + 8 / _BLOCK, "bitsandbytes"),
    "adamw_bnb_8bit": Optimizer(2 + 8 / _BLOCK, "bitsandbytes"),
    "paged_adamw_32bit": Optimizer(0.0, "bitsandbytes", paged=True),
    "paged_adamw_8bit": Optimizer(0.0, "bitsandbytes", paged=True),
    "lion_8bit": Optimizer(1 + 4 / _BLOCK, "bitsandbytes"),
    "adamw_torch_8bit": Optimizer(2 + 8 / _BLOCK, "torchao"),
    "adamw_torch_4bit": Optimizer(1 + 8 / 128, "torchao"),
}
"""By name; others that a script gives to transformers are counted as AdamW in the parameters' dtype."""


def check_optimizer(name: str) -> None:
    """Refuse an optimiser whose package is missing.

    Raises:
        ConfigError: names the package.
    """
    package = OPTIMIZERS[name].package if name in OPTIMIZERS else None
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the optimiser {name} needs {package}, which is not installed",
            f"pip install {package}, or use adamw_torch_fused",
        )


def state_bytes(name: str) -> float | None:
    """Return an optimiser's bytes on the device of an element that is trained; None for two of the element's dtype."""
    return OPTIMIZERS[name].state_bytes if name in OPTIMIZERS else None
