"""List who can be measured, by name. Importing this imports none of their libraries."""

from __future__ import annotations

from benchmarks.candidates.base import Built, Candidate, Spec
from benchmarks.candidates.pronghorn import PADDED, PRONGHORN
from benchmarks.candidates.stock import STOCK
from benchmarks.candidates.unsloth import UNSLOTH

CANDIDATES = {candidate.name: candidate for candidate in (PRONGHORN, *STOCK, UNSLOTH, PADDED)}

__all__ = ["CANDIDATES", "Built", "Candidate", "Spec"]
