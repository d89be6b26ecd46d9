"""What a token reaches in each layer, and which parameters only act through positions, as the model's family tells."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.families.registry import family_of
from pronghorn.families.spec import Attention, BlockKind, Experts, GatedDelta, GatedMLP, PerLayerInput
from pronghorn.models.passes import in_evaluation
from pronghorn.parity.reference import logits_at

NEIGHBOUR = 4
"""Tokens of the documents before and after the probed one."""
AT = 2
"""The token of the probed document that is replaced: there are some before it, which must not see it."""


@dataclass(frozen=True)
class Visibility:
    """What sees a token in one token-mixing block of a layer."""

    layer: int

    inside: tuple[int, ...]
    """The positions of the probed document that see its token `AT`."""
    outside: bool
    """Whether another document sees it."""


def token_mixers(model: Any) -> list[tuple[int, nn.Module, BlockKind]]:
    """List the blocks of a causal LM's layers that read other tokens, as its family has them: layer, module, kind. Of a
    generic family none are known."""
    family = family_of(model.config)
    if family.generic:
        return []
    return [
        (number, layer.get_submodule(block.module), block.kind)
        for number, layer in enumerate(model.base_model.layers)
        for block in family.blocks(layer)
        if not isinstance(block.kind, GatedMLP | Experts | PerLayerInput)
    ]


def probe_tokens(model: Any) -> int:
    """Return the tokens of a probed document that is longer than what any token of it sees."""
    windows = [kind.window(module) or 0 for _, module, kind in token_mixers(model) if isinstance(kind, Attention)]
    return max([*windows, NEIGHBOUR]) + AT + NEIGHBOUR


def position_dependent(model: Any) -> tuple[str, ...]:
    """Return the prefixes of parameters that only reach the loss through rotated queries and keys."""
    names = {module: name for name, module in model.named_modules()}
    prefixes = []
    for _, module, kind in token_mixers(model):
        if isinstance(kind, Attention):
            projections = kind.qkv[:2] if len(kind.qkv) == 3 else kind.qkv  # a linear of all three counts
            projections = projections[kind.gated :]  # a gate reaches the loss by itself
            parts = (*projections, kind.query_norm, kind.key_norm)
            prefixes += [f"{names[module]}.{part}." for part in parts if part]
    return tuple(prefixes)


@torch.no_grad()
def visible_positions(
    model: Any,
    sample: Document,
    length: int,
    make_batch: Callable[[list[Document]], dict[str, Any]] | Literal[False],
) -> list[Visibility]:
    """Find exactly what a token reaches in each layer: replace one input row and see which outputs change.

    An output that doesn't see the row has the same bits, so this needs no tolerance. The inputs are random and the same
    for every path, so that trained attention that hardly looks somewhere doesn't hide it.

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
    visibility: list[Visibility] = []

    def look(
        number: int, kind: BlockKind, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        given: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        before = row.to(given)[None]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        def mixed(states: Tensor) -> Tensor:
            out = module.forward(states, *args[1:], **rest)
            return out[0] if isinstance(out, tuple) else out

        right = mixed(before)
        bind, reads = family_of(model.config).bind, (kind.reads or ()) if isinstance(kind, Attention) else ()
        shared = [bind((), kwargs)[name] for name in reads] if bind is not None else []  # views of another layer's k, v

        def seen_by(token: int) -> list[int]:
            after = before.clone()
            after[0, token] = other[AT].to(given)
            kept = [states[token].clone() for states in shared]
            for states in shared:
                states[token] = other[AT, : states.shape[-1]].to(states)
            changed = mixed(after) != right
            for states, values in zip(shared, kept, strict=True):
                states[token] = values
            return changed[0].any(-1).nonzero().flatten().tolist()

        seen = seen_by(start + AT)
        inside = tuple(t - start for t in seen if start <= t < start + length)
        outside = len(inside) < len(seen) or (start > 0 and max(seen_by(start - 1), default=0) >= start)
        if isinstance(kind, GatedDelta):  # rounding decides which later token doesn't see a state decay any more
            inside = tuple(t for t in inside if t <= AT + 1)
        visibility.append(Visibility(number, inside, outside))

    with ExitStack() as hooks, in_evaluation(model):
        for number, module, kind in token_mixers(model):
            hooks.enter_context(module.register_forward_hook(partial(look, number, kind), with_kwargs=True))
        logits_at(model, torch.zeros(1, dtype=torch.int64, device=model.device), **batch)
    return visibility
