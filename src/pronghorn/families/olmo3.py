"""Olmo 3 (`transformers.models.olmo3`): OLMo 2's layers, windows in most, and RoPE by the kind of layer."""

from pronghorn.families.olmo2 import OLMO_BLOCKS
from pronghorn.families.spec import FamilySpec

OLMO3 = FamilySpec(
    model_type="olmo3",
    members="Olmo 3",
    source="transformers.models.olmo3",
    blocks=OLMO_BLOCKS,
)
