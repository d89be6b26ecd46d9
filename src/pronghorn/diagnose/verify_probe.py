"""What a token reaches in each layer's attention, exactly: one input row is replaced and the outputs that change are
those that see it. No tolerance, no rounding: a row that doesn't see it has the same bits.

The inputs are random, the same for every path, so that trained attention that hardly looks somewhere doesn't hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pronghorn.data.packing import IGNORE_INDEX, Document

NEIGHBOUR = 4
"""Tokens of the documents before and after the probed one."""
AT = 2
"""The token of the probed document that is replaced: there are some before it, which must not see it."""


@dataclass(frozen=True)
class Sight:
    """One layer's."""

    inside: tuple[int, ...]
    """The positions of the probed document that see its token `AT`."""
    outside: bool
    """Whether another document sees it."""


def probe_tokens(config: Any) -> int:
    """Tokens of a probed document that is longer than what any token of it sees."""
    return max(getattr(config, "sliding_window", None) or 0, NEIGHBOUR) + AT + NEIGHBOUR


@torch.no_grad()
def sight(
    model: Any,
    sample: Document,
    length: int,
    make_batch: Callable[[list[Document]], dict[str, Any]] | Literal[False],
) -> list[Sight]:
    """What a causal LM's layers let a token reach.

    Args:
        model: attached or not.
        sample: where the probe's tokens come from.
        length: tokens of the probed document; a longer window isn't reached.
        make_batch: packs documents into a batch on the device; False runs the probed document alone.
    """
    tokens = (sample.input_ids * (length // len(sample) + 1))[:length]

    def document(n: int) -> Document:
        return Document(tokens[:n], [IGNORE_INDEX] * n)

    start = 0 if make_batch is False else NEIGHBOUR
    if make_batch is False:
        batch: dict[str, Any] = {"input_ids": torch.tensor(tokens, device=model.device)[None]}
    else:
        batch = make_batch([document(NEIGHBOUR), document(length), document(NEIGHBOUR)])
        del batch["labels"]
    generator = torch.Generator().manual_seed(0)
    inputs, other = torch.randn(2, length, model.config.hidden_size, generator=generator)
    row = torch.randn(batch["input_ids"].shape[1], model.config.hidden_size, generator=generator)
    row[start : start + length] = inputs
    found: list[Sight] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        before = row.to(given)[None]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        right = module.forward(before, *args[1:], **rest)[0]

        def seen_by(token: int) -> list[int]:
            after = before.clone()
            after[0, token] = other[AT].to(given)
            changed = module.forward(after, *args[1:], **rest)[0] != right
            return changed[0].any(-1).nonzero().flatten().tolist()

        seen = seen_by(start + AT)
        inside = tuple(t - start for t in seen if start <= t < start + length)
        outside = len(inside) < len(seen) or (start > 0 and max(seen_by(start - 1), default=0) >= start)
        found.append(Sight(inside, outside))

    hooks = [layer.self_attn.register_forward_hook(look, with_kwargs=True) for layer in model.base_model.layers]
    was_training = model.training
    model.eval()
    try:
        model(**batch, use_cache=False, logits_to_keep=1)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found
