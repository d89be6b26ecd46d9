"""The experts that tokens go to: recorded in one model, and given to another whose scores are rounded otherwise.

Where the scores of the last expert chosen and the first left out differ by less than rounding, two sound passes send a
token to different experts, and nothing after that can be compared. So the references take the choices of the model that
is judged, with weights from their own scores, and these say what each choice is short of: how much larger a score left
out is than one chosen. That may be no more than rounding explains (`judged`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pronghorn.models.experts import expert_modules, index_of
from pronghorn.models.families import base_causal_lm, decoder_layers
from pronghorn.models.passes import after_forward
from pronghorn.parity.distance import THREE_WAY, ratio

_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+|part)(?=\.|$)")
"""Names of what stands around a module: PEFT's wrappers, and `reference.UpcastPart`."""

Routes = dict[str, dict[int, Tensor]]
"""By experts module and document, int64 [T, K] on the host; -1 where it isn't known."""


def named_experts(model: nn.Module) -> dict[nn.Module, str]:
    """Name the experts modules of a causal LM, as they are called without PEFT's wrappers."""
    base = base_causal_lm(model)
    experts = set(expert_modules(base))
    return {module: _WRAPPED.sub("", name) for name, module in base.named_modules() if module in experts}


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield what holds, by experts module, the indices [T, K] of the first forward inside the block."""
    names = named_experts(model)
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], out: Any) -> None:
        index = index_of(arguments, keywords)
        if not (index.is_cuda and torch.cuda.is_current_stream_capturing()):  # which computes nothing yet
            seen.setdefault(names[module], index.detach().reshape(-1, index.shape[-1]).long().cpu())

    with after_forward(names, note, with_kwargs=True):
        yield seen


def by_document(seen: dict[str, Tensor], lengths: dict[int, int], tokens: int, rows: Tensor | None) -> Routes:
    """Part a packed row's indices by document.

    Args:
        lengths: of its documents, by their numbers.
        tokens: of the row, with its padding.
        rows: int64 [R], the tokens that the last layer computed, if it left others out.
    """
    routes: Routes = {}
    for name, index in seen.items():
        every = torch.full((tokens, index.shape[1]), -1)
        if len(index) == tokens:
            every = index
        elif rows is not None and len(index) == len(rows):
            every[rows.cpu()] = index
        parts = every[: sum(lengths.values())].split(list(lengths.values()))
        routes[name] = dict(zip(lengths, parts, strict=True))
    return routes


def merged(first: Routes, second: Routes) -> Routes | None:
    """Fill what isn't known in the first from the second; None where they differ in what both know."""
    filled: Routes = {}
    for name in first | second:
        ours, theirs = first.get(name, {}), second.get(name, {})
        filled[name] = {}
        for document in ours | theirs:
            a, b = ours.get(document, theirs.get(document)), theirs.get(document, ours.get(document))
            assert a is not None and b is not None
            if bool(((a >= 0) & (b >= 0) & (a.sort(1)[0] != b.sort(1)[0])).any()):
                return None
            filled[name][document] = torch.where(a >= 0, a, b)
    return filled


@dataclass
class Gaps:
    """How clear choices were in a pass, for each choice that a layer makes (of experts, of groups of them)."""

    short: dict[tuple[str, int], dict[int, Tensor]] = field(default_factory=dict)
    """[T] of each document: the largest score left out less the smallest chosen; below zero for the best choice."""
    scores: dict[tuple[str, int], dict[int, Tensor]] = field(default_factory=dict)
    """[T, E] of each document."""
    kept: dict[tuple[str, int], int] = field(default_factory=dict)
    """Chosen of E."""
    unguided: set[str] = field(default_factory=set)
    """Experts whose router wasn't found to choose by `topk`, and chose by itself."""


@dataclass
class Guide:
    """Makes a model's routers choose what is recorded; `begin` says which document comes."""

    routes: Routes
    gaps: Gaps = field(default_factory=Gaps)
    document: int = 0

    def begin(self, document: int) -> None:
        """Say that this document's forward and backward come next."""
        self.document = document

    @contextmanager
    def guiding(self, model: nn.Module) -> Iterator[None]:
        """Guide this model, which isn't attached, while the block runs."""
        base, names = base_causal_lm(model), named_experts(model)
        layers = {*decoder_layers(model)}
        self.gaps.unguided |= self.routes.keys() - set(names.values())
        with ExitStack() as undo:
            for module, name in names.items():
                parent: Any = base.get_submodule(name.rpartition(".")[0])
                if parent in layers:  # experts beside an MLP
                    parent = parent.router
                if name in self.routes and "forward" not in vars(parent):
                    parent.forward = partial(self._forward, parent, name, int(module.num_experts))  # type: ignore[arg-type]
                    undo.callback(vars(parent).pop, "forward")
            yield

    def _forward(self, parent: Any, name: str, experts: int, *args: Any, **kwargs: Any) -> Any:
        wanted = self.routes[name].get(self.document)
        if wanted is None:
            return type(parent).forward(parent, *args, **kwargs)
        with _Choosing(wanted, experts, partial(self._note, name)) as choosing:
            out = type(parent).forward(parent, *args, **kwargs)
        if not choosing.guided:
            self.gaps.unguided.add(name)
        return out

    def _note(self, name: str, number: int, scores: Tensor, chosen: Tensor) -> None:
        """Note a choice, once: layers are computed again in the backward pass."""
        key = name, number
        if self.document in self.gaps.short.setdefault(key, {}):
            return
        scores = scores.detach().reshape(-1, scores.shape[-1])
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen.reshape(len(scores), -1), True)
        left, least = scores.masked_fill(taken, -math.inf).amax(1), scores.masked_fill(~taken, math.inf).amin(1)
        self.gaps.short[key][self.document] = (left - least).cpu()
        self.gaps.scores.setdefault(key, {})[self.document] = scores.cpu()
        self.gaps.kept[key] = chosen.shape[-1]


class _Choosing(TorchFunctionMode):
    """Lets `topk` over experts' scores, or over those of groups of experts, return what is wanted."""

    def __init__(self, wanted: Tensor, experts: int, note: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.wanted, self.experts, self.note = wanted, experts, note
        self.calls, self.guided = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        size, (tokens, k) = scores.shape[-1], self.wanted.shape
        if scores.numel() != tokens * size or self.experts % size:
            return found
        wanted = self.wanted.to(scores.device).view(*scores.shape[:-1], k)
        own, known = found.indices, (wanted >= 0) & (wanted < self.experts)
        if size == self.experts and own.shape[-1] == k:
            chosen, self.guided = torch.where(known, wanted, own), True
        elif size < self.experts:  # groups: those that hold what is wanted, and the best others
            needed = torch.zeros_like(scores).scatter_(-1, (wanted // (self.experts // size)).clamp(0, size - 1), 1)
            first = scores.detach().masked_fill((needed > 0) & known[..., :1], math.inf)
            chosen = first.topk(own.shape[-1], dim=-1).indices
        else:
            return found
        self.note(self.calls, scores, chosen)
        self.calls += 1
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@dataclass(frozen=True)
class Judged:
    """How the choices of one layer compare with exact scores."""

    name: str
    others: int
    """Choices that aren't the best by exact scores."""
    excess: float
    """How short the worst is, over what rounding explains."""
    document: int
    token: int
    """Where the worst is."""


def judged(plain: Gaps, exact: Gaps) -> list[Judged]:
    """Judge every layer's choices.

    The best choice by exact scores is clear by a gap; plain's error of that gap, the largest of all tokens, is what
    rounding does to it, and by `THREE_WAY` a choice may be short by twice as much.
    """
    found: list[Judged] = []
    unclear: dict[str, Tensor] = {}
    for key, short in exact.short.items():
        every, rounded = (torch.cat(list(each.scores[key].values())).double() for each in (exact, plain))
        kept, missing = exact.kept[key], torch.cat(list(short.values())).double()
        if kept == every.shape[1]:
            continue
        if key[0] in unclear:  # of groups that may be others, which experts were to be had isn't known
            missing = missing.masked_fill(unclear[key[0]], -math.inf)
        order = every.topk(kept + 1, dim=1).indices[:, -2:]
        gap, near = (-scores.gather(1, order).diff(dim=1).flatten() for scores in (every, rounded))
        largest = every.gather(1, order).abs().amax(1)
        finite = gap.isfinite() & near.isfinite() & largest.isfinite()
        error, scale = ((gap - near)[finite].abs(), largest[finite]) if finite.any() else (gap.new_zeros(1),) * 2
        limit = THREE_WAY.limit(error.max().item(), scale.max().item())
        unclear[key[0]] = gap <= limit
        where = [(document, token) for document, each in short.items() for token in range(len(each))]
        worst = int(missing.argmax())
        excess = ratio(max(missing[worst].item(), 0.0), limit)
        found.append(Judged(key[0], int((missing > 0).sum()), excess, *where[worst]))
    return found
