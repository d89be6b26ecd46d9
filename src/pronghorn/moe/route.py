"""Routing, once: which rows go to which expert, found in one pass after the router's top-k and read by every kernel.

The T·K pairs of a token and one of its experts are its *slots*, numbered t·K + k. Sorted by expert, slots of one expert
in the order of their tokens, they are the *rows* of all that experts compute: expert e has rows
`offsets[e-1] : offsets[e]`. T·K is fixed and all else is data on the device, so nothing waits for the host and a CUDA
graph can hold it; integers only, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pronghorn.kernels import moe_route
from pronghorn.kernels.moe_rows import Rows


class Routing(NamedTuple):
    """The order of S = T·K rows; int32, but for the indices, on their device."""

    choice: Tensor
    """int64 [T, K], the expert of each slot, as the router chose."""
    offsets: Tensor
    """[E], where each expert's rows end."""
    slots: Tensor
    """[S], the slot of each row; its token is `tokens`."""
    tokens: Tensor
    """[S], the token of each row."""
    experts: Tensor
    """[S], the expert of each row, ascending."""
    inverse: Tensor
    """[T, K], the row of each slot."""

    @property
    def rows(self) -> Rows:
        """Tokens and their rows, both ways."""
        return Rows(self.tokens, self.inverse)


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Group slots by expert.

    Args:
        top_k_index: integers [T, K] in [0, num_experts).
        num_experts: E.
    """
    return Routing(top_k_index.long(), *moe_route.route(top_k_index, num_experts))
