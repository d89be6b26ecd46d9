"""Prove on a loaded model of a generic family, before its first step, that the documents of a packed row don't mix.

A few short documents lie in one row, every second one of set A, the others of set B.

    exact    the loss of A has a gradient of zero with respect to B's hidden states after every layer, and the other way
             round; A's hidden states keep their bits when B's tokens change, and the other way round
    causal   no hidden state changes when the last token of its document does
    alone    packed logits equal those of each document by itself, through transformers' own attention

The first layer whose output changes is the first that mixes: what comes before it had the same input.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.data.batch import PackedBatch
from pronghorn.errors import PronghornError, UnsupportedError
from pronghorn.families.generic import limits_to_cross, routes, text_config
from pronghorn.layers.linears import products_dtype
from pronghorn.memory.recompute import INSTALLED
from pronghorn.models.families import base_causal_lm, decoder_layers, rope_limit, without_checkpointing
from pronghorn.models.generic import PACKING, GenericPacking, Way
from pronghorn.models.passes import (
    after_forward,
    as_rows,
    differs,
    in_evaluation,
    recorded,
    relative_error,
    seeded,
    short,
    undisturbed,
)

LENGTHS = (1, 65, 2)
"""Tokens of the probe's documents: one token, one that is shorter than a convolution, one beyond a tile of 64. A longer
one that crosses a window or a chunk follows, then one of `LAST`."""
LAST = 5
MOST = 160
"""Tokens of the longest document of the probe."""
LONG_LENGTHS = (1, 65, 2, 3, 4, 17, 63, 1, 64, 129, 256, 257)
"""Of the documents of the long probe (`verify`), which one beyond every limit follows."""
LONG_MOST = 8192
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 0.03, torch.bfloat16: 0.15}
"""How far packed logits may be from those of a document alone, by root mean square over that of the logits: the two go
through other kernels, and a wrong position or a leak is off by much more. Where tokens are routed to experts, whose
products have the number of tokens in their shapes, this holds in place of equal bits, too."""


@dataclass(frozen=True)
class Leak:
    """Where documents mix first."""

    layer: int | None
    """None: before the first layer."""
    mixer: str
    """The class of the innermost module that mixes."""
    how: str

    def __str__(self) -> str:
        place = "before the first layer" if self.layer is None else f"in layer {self.layer}"
        return f"{place} ({self.mixer}): {self.how}"


@dataclass(frozen=True)
class Isolation:
    """What the probe found of one model."""

    model_type: str
    way: Way | None
    """How layers are told the documents' bounds; None where there is no way to tell them."""
    lengths: tuple[int, ...]
    """Tokens of the documents."""
    not_crossed: tuple[str, ...]
    """Windows and chunks of the configuration that no document was longer than."""
    problem: Leak | str | None = None
    """What is wrong, or why the probe could not be run; None if nothing is."""
    exact: bool = True
    """Whether bits were compared; else values, for the layers route tokens to experts."""
    error: float = 0.0
    """The largest error of a document's packed logits, relative to those of the document alone."""
    tolerance: float = 0.0
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether documents stay apart."""
        return self.problem is None

    def __str__(self) -> str:
        if not self.clean:
            return f"documents of a packed row are not apart: {self.problem}"
        left = f"; not crossed: {', '.join(self.not_crossed)}" if self.not_crossed else ""
        return f"no mixing found at these lengths: {', '.join(map(str, self.lengths))}{left}"


def require_isolation(model: Any) -> Isolation:
    """Return what the probe finds of an attached generic model, which then packs in the way that was proven.

    Raises:
        UnsupportedError: documents mix, or the model's forward fails on a packed row; names the first layer.
    """
    packing: GenericPacking = base_causal_lm(model).__dict__[PACKING]
    found = packing.isolation or probe(model)
    if not found.clean:
        where = found.problem
        raise UnsupportedError(
            f"{found.model_type} can't be trained on packed rows here: "
            + (f"documents mix {where}" if isinstance(where, Leak) else str(where)),
            "train unpacked: packing.enabled: false in a recipe, SFTConfig(packing=False) in a script",
        )
    return found


def probe(model: Any, lengths: Sequence[int] | None = None) -> Isolation:
    """Look whether documents stay apart, in the first of the model's ways in which they do.

    Weights, gradients, buffers and random state stay as they are; hooks are on this instance, and taken off again.
    Takes six forward and two backward passes of a row of at most 233 tokens, and a forward of each of its five
    documents; up to three times if the first ways fail (docs/verify.md has the cost).

    Args:
        model: attached, of a generic family, with adapters or not; on any device.
        lengths: of the documents, instead of short ones that cross what they can.
    """
    started = time.perf_counter()
    base = base_causal_lm(model)
    packing: GenericPacking = base.__dict__[PACKING]
    longest = getattr(text_config(base.config), "max_position_embeddings", None) or 0
    longest = longest if longest > 0 else 1 << 30  # XLNet says -1
    longest = min(longest, rope_limit(text_config(base.config)) or longest)
    limits = limits_to_cross(base.config)
    lengths = tuple(min(n, longest) for n in lengths or _lengths(limits))
    missed = tuple(f"{name} {n:,}" for name, n in limits.items() if n >= max(lengths))
    blank = Isolation(base.config.model_type, None, lengths, missed)
    found = replace(blank, problem="its forward takes neither position_ids nor the bounds of documents")
    packing.crossed = max(lengths)
    for way in packing.ways:
        tried = _tried(base, packing, replace(blank, way=way))
        if tried.clean or not isinstance(found.problem, Leak):  # a forward that fails in the next way tells less
            found = tried
        if found.clean:
            break
    found = replace(found, seconds=time.perf_counter() - started)
    packing.isolation = found
    packing.take(found.way if found.clean else None)
    return found


def long_lengths(config: Any) -> tuple[int, ...]:
    """Return lengths for a long probe: around tiles and chunks, and beyond each limit up to `LONG_MOST` tokens."""
    beyond = sorted({n + 1 for n in limits_to_cross(config).values() if n < LONG_MOST})
    return (*LONG_LENGTHS, *beyond, LAST)


def _tried(base: Any, packing: GenericPacking, found: Isolation) -> Isolation:
    """Return the record of one way of packing, that its forward fails if it does."""
    try:
        # of transformers' checkpointing, which a plan replaces, the reentrant kind has no torch.autograd.grad
        with undisturbed(base), nullcontext() if INSTALLED in base.__dict__ else without_checkpointing(base):
            return _judged(base, packing, found)
    except PronghornError as error:
        return replace(found, problem=error.problem)
    except Exception as error:  # whatever a stranger's forward raises is why it can't be used
        return replace(found, problem=f"its forward fails ({type(error).__name__}: {short(error)})")


def _lengths(limits: dict[str, int]) -> tuple[int, ...]:
    """Return the lengths of the probe's documents: one is beyond each limit that is short enough."""
    beyond = [n + 1 for n in limits.values() if n < MOST]
    return (*LENGTHS, max([*beyond, 40]), LAST)


@dataclass(frozen=True)
class _Row:
    """The packed row of the probe."""

    packed: PackedBatch
    positions: Tensor
    """int64 [1, T]."""
    sets: tuple[Tensor, Tensor]
    """bool [T]: the tokens of documents A and of documents B."""
    last: Tensor
    """bool [T]: the last token of each document that has more than one."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> _Row:
        packed = PackedBatch.build(lengths, tokens=sum(lengths), device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        odd = packed.document_ids % 2 == 1
        last = torch.zeros_like(odd)
        last[[end - 1 for n, end in zip(lengths, accumulate(lengths), strict=True) if n > 1]] = True
        return cls(packed, positions, (~odd, odd), last)

    def call(self, model: Any, ids: Tensor) -> Tensor:
        """Return the logits [T, V] of the packed row."""
        return model(input_ids=ids[None], position_ids=self.positions, packed=self.packed).logits[0]


def _judged(base: Any, packing: GenericPacking, found: Isolation) -> Isolation:
    """Return the record with what is wrong in this way of packing, if anything is."""
    packing.take(found.way)
    row, layers = _Row.of(found.lengths, base.device), decoder_layers(base)
    exact = not routes(layers)
    embeddings = base.get_input_embeddings().weight
    found, vocabulary = replace(found, exact=exact, tolerance=TOLERANCE[products_dtype(embeddings)]), len(embeddings)
    generator = torch.Generator().manual_seed(0)
    ids, other = torch.randint(0, vocabulary, (2, len(row.last)), generator=generator, device="cpu").to(base.device)
    other = torch.where(other == ids, (ids + 1) % vocabulary, other)
    with recorded(base, layers, len(ids)) as states:
        gradients = []
        for own in row.sets:  # a forward for each: offloaded activations are there for one backward
            states.clear()
            logits = seeded(lambda: row.call(base, ids))
            before = list(states)
            problem = _unlike_layers(before, layers)
            if problem is not None:
                return replace(found, problem=problem)
            targets = other % logits.shape[-1]
            losses = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
            gradients.append(torch.autograd.grad(losses[own].sum(), before, allow_unused=True))
        for own, changed in (row.sets, row.sets[::-1]):
            leak = _changed(base, row, found, (ids, torch.where(changed, other, ids)), own, before, states)
            if leak is not None:
                return replace(found, problem=leak)
        for own, grads in zip(row.sets, gradients, strict=True):
            # the last state that is reached is before the layer that mixes
            for index in reversed(range(len(before))):
                grad = grads[index]
                if grad is not None and grad.reshape(len(ids), -1)[~own].count_nonzero():
                    inside = min(index, len(layers) - 1)
                    how = "a document's loss has a gradient with respect to another's hidden states"
                    return replace(found, problem=Leak(inside, type(layers[inside]).__name__, how))
        leak = _changed(base, row, found, (ids, torch.where(row.last, other, ids)), ~row.last, before, states)
        if leak is not None:
            return replace(found, problem=replace(leak, how="a token sees one that comes after it"))
    del logits, losses, before, gradients
    return _compared_with_alone(base, packing, found, row, ids)


def _unlike_layers(states: list[Tensor], layers: nn.ModuleList) -> str | None:
    """Say why nothing can be told of recorded hidden states, or None."""
    if len(states) != len(layers) + 1:
        return "its layers were not called as modules, so that nothing can be proven"
    for index, state in enumerate(states):
        if not state.detach().isfinite().all():
            name = type(layers[index - 1]).__name__ if index else "the embeddings"
            return f"hidden states after {name} {index - 1} are not finite"
    return None


def _changed(
    base: Any,
    row: _Row,
    found: Isolation,
    ids: tuple[Tensor, Tensor],
    own: Tensor,
    before: list[Tensor],
    states: list[Tensor],
) -> Leak | None:
    """Run the row with the second of two lists of tokens; name the first layer after which rows that are `own` differ
    from those `before`, by the first list, or return None."""
    states.clear()
    with torch.no_grad():
        seeded(lambda: row.call(base, ids[1]))
    for index, (old, new) in enumerate(zip(before, states, strict=True)):
        if differs(old.detach()[own], new[own], found.tolerance, found.exact):
            layer = None if index == 0 else index - 1
            name = _mixer(base, row, found, ids, own, layer)
            return Leak(layer, name, "a document's hidden states change with another's tokens")
    return None


def _mixer(base: Any, row: _Row, found: Isolation, ids: tuple[Tensor, Tensor], own: Tensor, layer: int | None) -> str:
    """Name the class of the innermost module that is given the same rows of its own and returns others."""
    if layer is None:
        return type(base.get_input_embeddings()).__name__
    whole = decoder_layers(base)[layer]
    runs: list[dict[nn.Module, tuple[Tensor | None, Tensor | None]]] = []
    names: list[nn.Module] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = next(iter([*args, *kwargs.values()]), None)
        given = kwargs.get("hidden_states", given)
        runs[-1].setdefault(module, (as_rows(given, len(own)), as_rows(output, len(own))))
        names.append(module)

    with after_forward(whole.modules(), note, with_kwargs=True), torch.no_grad():
        for tokens in ids:
            runs.append({})
            seeded(lambda tokens=tokens: row.call(base, tokens))
    for module in names:  # the innermost come first
        (given, result), (given_then, result_then) = runs[0][module], runs[1].get(module, (None, None))
        pairs = (given, given_then), (result, result_then)
        if any(part is None for pair in pairs for part in pair):
            continue
        limits = found.tolerance, found.exact
        same_in, same_out = (not differs(a[own], b[own], *limits) for a, b in pairs)  # type: ignore[index]
        if same_in and not same_out:
            return type(module).__name__
    return type(whole).__name__


def _compared_with_alone(base: Any, packing: GenericPacking, found: Isolation, row: _Row, ids: Tensor) -> Isolation:
    """Return the record with the error of packed logits, or with what is wrong if it is beyond the tolerance."""
    try:
        with torch.no_grad(), in_evaluation(base):
            packed = row.call(base, ids)
            packing.take(None)
            bounds = pairwise([0, *accumulate(found.lengths)])
            errors = [
                relative_error(packed[start:end], base(input_ids=ids[None, start:end], use_cache=False).logits[0])
                for start, end in bounds
            ]
    finally:
        packing.take(found.way)
    worst = max(range(len(errors)), key=lambda index: errors[index])
    found = replace(found, error=errors[worst])
    if errors[worst] <= found.tolerance:
        return found
    return replace(
        found,
        problem=f"the document of {found.lengths[worst]} tokens has other logits in a packed row than alone (relative "
        f"error {errors[worst]:.1e}, tolerance {found.tolerance:.0e}): its positions or its attention are not its own",
    )
