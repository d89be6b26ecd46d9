"""Name what frozen weights can be multiplied in: for recipes, commands and scripts, without torch."""

from typing import Literal

ComputeName = Literal["dtype", "fp8", "fp8_both", "fp8_exact", "int8"]
"""Read by `precision.compute.Compute`, which says what each is."""
