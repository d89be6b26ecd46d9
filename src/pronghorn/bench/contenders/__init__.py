"""Who can be measured: each contender by name. Importing this imports none of their libraries."""

from __future__ import annotations

from pronghorn.bench.contenders.base import Built, Contender, Spec
from pronghorn.bench.contenders.pronghorn import PRONGHORN
from pronghorn.bench.contenders.stock import HF, HF_COMPILE, HF_FLEX, HF_SDPA, LIGER, LIGER_SDPA
from pronghorn.bench.contenders.unsloth import UNSLOTH

CONTENDERS = {c.name: c for c in (PRONGHORN, HF, HF_COMPILE, HF_SDPA, HF_FLEX, LIGER, LIGER_SDPA, UNSLOTH)}

__all__ = ["CONTENDERS", "Built", "Contender", "Spec"]
