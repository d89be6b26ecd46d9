"""Known shapes as the planner counts them."""

from __future__ import annotations

from transformers import AutoConfig

from pronghorn.diagnose.shapes import shape_of
from pronghorn.memory.estimate import ModelDims
from pronghorn.models.auto_plan import dims_of
from pronghorn.train.weightless import skeleton


def dims_of_shape(name: str) -> ModelDims:
    """Return the sizes of a shape that the program knows."""
    fields = shape_of(name)
    assert fields is not None
    return dims_of(skeleton(AutoConfig.for_model(**fields)))
