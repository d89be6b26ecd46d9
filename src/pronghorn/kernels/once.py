"""The mark of backwards that can't be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pronghorn.errors import UnsupportedError


def refuse_second_derivatives(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `backward` that is an error where its result is to be differentiated (`create_graph=True`).

    torch's own mark is one only if the gradient that comes in needs a gradient itself, which that of a loss doesn't: a
    penalty on gradients would then be trained without this part, or not at all.
    """
    plain = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # autograd enables it for `create_graph` only
            raise UnsupportedError(
                "second derivatives (create_graph=True): Pronghorn's backwards have none", "detach the model first"
            )
        return plain(*args)

    return checked
