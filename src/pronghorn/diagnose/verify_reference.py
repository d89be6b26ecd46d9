"""What `verify` compares: passes over the same weights and tokens.

    plain      transformers and PEFT, one document at a time, in the dtype of training
    exact      the same in float32 (float64 where training is float32), a layer's weights upcast at a time
    ours       the attached model on packed rows, accumulated as the trainer does

Where frozen weights multiply in 8 bits, plain and exact multiply the same quantised operands (`parity.quantised`); both
run once more without, for what 8 bits cost. Beside them the attached model is asked what a token reaches in each layer,
what its products give, and what comes back from its files.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate as running_sum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.data.packing import IGNORE_INDEX, Document
from pronghorn.diagnose.verify_subject import Subject
from pronghorn.export.folder import whole_folder
from pronghorn.families.registry import family_of
from pronghorn.layers.decoder import FusedLayers
from pronghorn.models.attach import PathTaken, attached
from pronghorn.models.expert_gradients import count_tokens
from pronghorn.models.experts import refusal
from pronghorn.models.families import base_causal_lm
from pronghorn.models.passes import after_forward
from pronghorn.models.probe import Isolation, long_lengths, probe
from pronghorn.parity.distance import Distance
from pronghorn.parity.own_code import own_code
from pronghorn.parity.parameters import canonical, trainable
from pronghorn.parity.quantised import compared_products, quantised_products
from pronghorn.parity.quantised_experts import compared_experts, quantised_experts
from pronghorn.parity.reference import accumulate, kept_gradients, logits_at, upcast_of, without_dropout
from pronghorn.parity.routing import Gaps, Guide, Routes, by_document, named_experts, recorded_choices
from pronghorn.parity.visibility import NEIGHBOUR, Visibility, position_dependent, probe_tokens, visible_positions
from pronghorn.precision.compute import Compute, Rule
from pronghorn.text import counted

LOGIT_ROWS = 384
"""Labelled rows whose logits are compared, spread over all."""
FIRST_TOKENS = 64
"""Documents whose first token's logits are compared as well: they tell a wrong position from a wrong layer."""
CRESTS, PASSES, SMALL = 200, 8, 2**27
"""How far a single number may be off is learned from plain's gradients. A model with fewer than `CRESTS` of them is run
again, `PASSES` times at most, if it has no more than `SMALL` parameters: of a larger one no second has room."""
ALONE = 12
"""Documents that are run through the attached model by themselves."""


@dataclass(frozen=True)
class Passes:
    """The results of a pass over all rows; tensors on the host."""

    loss: float
    losses: list[Tensor]
    """[labels] of each document with labels; empty where the pass doesn't tell."""
    logits: Tensor
    """[R, V] at the compared positions; empty where the pass isn't asked for them."""
    gradients: dict[str, Tensor]
    dead: list[str]
    """Trained tensors with no gradient, a zero one, or one that is not finite."""
    untrained: list[str] | None = None
    """Experts that saw tokens and whose slice has no gradient, in words; None where the pass doesn't tell, or no expert
    is trained."""
    idle: int = 0
    """Experts that saw no token."""
    gaps: Gaps = field(default_factory=Gaps)
    """How clear the choices were that routers were given."""

    @property
    def finite(self) -> bool:
        """Tell whether there is no infinity or NaN in it."""
        return all(bool(x.isfinite().all()) for x in (*self.losses, self.logits, *self.gradients.values()))


def compared_positions(documents: list[Document]) -> list[list[int]]:
    """Return the positions of each document whose logits are compared: supervised ones, and first tokens."""
    supervised = [
        (number, t)
        for number, document in enumerate(documents)
        for t in range(len(document) - 1)
        if document.labels[t + 1] != IGNORE_INDEX
    ]
    chosen = set(supervised[:: -(-len(supervised) // LOGIT_ROWS)]) | {
        (number, 0) for number in range(min(len(documents), FIRST_TOKENS))
    }
    positions: list[list[int]] = [[] for _ in documents]
    for number, t in sorted(chosen):
        positions[number].append(t)
    return positions


def perturb(model: nn.Module) -> None:
    """Give every LoRA's B that is still zero N(0, 0.01²): A has no gradient while B is zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name and not parameter.any():
            noise = torch.empty(parameter.shape, device="cpu").normal_(0, 0.01, generator=generator)
            parameter.data.copy_(noise)


class Run:
    """The passes over one subject, on a model of its own."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.model: Any = subject.build().train()
        without_dropout(self.model)
        perturb(self.model)
        self.positions = compared_positions(subject.documents)
        self.parameters: dict[str, Tensor] = trainable(self.model)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.kept = set(kept_gradients(self.parameters))
        base = base_causal_lm(self.model)
        if getattr(base.config, "output_router_logits", False):  # what is compared is the cross-entropy alone
            base.config.output_router_logits = False
        self.device = base.device
        self.routed = bool(named_experts(self.model))
        self.routes: dict[str, Routes] = {}
        """Of passes of the attached model, by their names."""
        self.probe = min(probe_tokens(base), subject.row_tokens - 2 * NEIGHBOUR)
        self.position_dependent = position_dependent(base)
        self.first_tokens = [t == 0 for document in self.positions for t in document]

    def references(
        self, wide: torch.dtype, say: Callable[[str], None], quantised: bool = True, routes: Routes | None = None
    ) -> tuple[Passes, Passes]:
        """Run the plain pass and the exact one; the latter in `wide`, without autocast.

        Args:
            quantised: in 8 bits what the attached model multiplies so.
            routes: what routers choose.
        """
        with self._in_8_bits(self.model, quantised), upcast_of(base_causal_lm(self.model)) as upcast:
            apart = "" if quantised else "; without 8 bits"
            say(f"plain transformers and PEFT, one document at a time{apart}")
            with self._autocast():
                plain = self._documents(routes)
            upcast(wide)
            say(f"the same in {str(wide).removeprefix('torch.')}, layer by layer{apart}")
            return plain, self._documents(routes)

    def coded_products(self, model: Any) -> list[tuple[list[nn.Module], Rule]]:
        """Return the linears of each product that the attached model computes in 8 bits, and its rule."""
        return self._of_layers(model, FusedLayers.coded_products)

    def coded_experts(self, model: Any) -> list[nn.Module]:
        """Return the experts whose weights the attached model multiplies in 8 bits."""
        return [each for each in self._of_layers(model, FusedLayers.coded_experts) if refusal(each) is None]

    def _of_layers(self, model: Any, listed: Callable[[FusedLayers, torch.dtype], list[Any]]) -> list[Any]:
        base, subject = base_causal_lm(model), self.subject
        if not subject.compute.in_8_bits:
            return []
        layers = FusedLayers(base.base_model, family_of(base.config), "auto", subject.compute)
        return listed(layers, subject.autocast or base.get_input_embeddings().weight.dtype)

    @contextmanager
    def _in_8_bits(self, model: Any, wanted: bool = True) -> Iterator[None]:
        """Let the model multiply in 8 bits what the attached one does, if that is wanted, while the block runs."""
        products, experts = (self.coded_products(model), self.coded_experts(model)) if wanted else ([], [])
        with quantised_products(products), quantised_experts(experts, self.subject.compute.rule):
            yield

    def product_distances(self) -> list[Distance]:
        """Judge each product in 8 bits of the attached model, forward and input gradient, by random rows; by name."""
        names = {
            module: name.removesuffix(".base_layer") for name, module in base_causal_lm(self.model).named_modules()
        }
        handle, fast = attached(self.model), self.subject.compute is not Compute.FP8_EXACT
        if handle is None or handle.layers is None:
            return []
        of_linears = [
            compared
            for linear in handle.layers.linears()
            if linear.in_8_bits
            for compared in compared_products(linear, ", ".join(names[base] for base in linear.bases), fast)
        ]
        lent = handle.layers.lent_codes()
        return of_linears + [one for codes in lent for one in compared_experts(codes, names[codes.module], fast)]

    def _documents(self, routes: Routes | None = None) -> Passes:
        subject, guide = self.subject, Guide(routes or {})
        with guide.guiding(self.model):
            passed = accumulate(self.model, subject.documents, subject.n_labels, self.positions, guide.begin)
        losses = [each.losses for each in passed if each.losses is not None]
        logits = torch.cat([each.logits for each in passed if each.logits is not None])
        return replace(self._take(losses, torch.cat(losses).double().mean().item(), logits), gaps=guide.gaps)

    def anew(self) -> Run:
        """Build the model again, with the same weights and nothing attached."""
        other = Run(self.subject)
        for name, parameter in other.parameters.items():
            parameter.data.copy_(self.parameters[name])
        return other

    def rounded(self, say: Callable[[str], None], routes: Routes | None = None) -> list[dict[str, Tensor]]:
        """Return the gradients of more plain passes, each with the embeddings off by up to one rounding; none of a
        model that is large or has many tensors.

        They are of a second model with the same weights, so that this one stays attached.
        """
        passes = min(CRESTS // max(len(self.kept), 1), PASSES)
        if not passes or self.size > SMALL:
            return []
        say("plain again, inputs rounded otherwise: single numbers are off")
        other = self.anew()
        with other._in_8_bits(other.model), other._autocast():
            return [other._rounded(seed, routes) for seed in range(passes)]

    def _rounded(self, seed: int, routes: Routes | None) -> dict[str, Tensor]:
        """Return the gradients of a pass whose embeddings are multiplied by 1 ± up to the dtype's spacing."""
        draw = torch.Generator(self.device).manual_seed(seed)

        def round_again(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
            signs = 2 * torch.rand(embedded.shape, generator=draw, device=embedded.device) - 1
            return (embedded.double() * (1 + signs * torch.finfo(embedded.dtype).eps)).to(embedded.dtype)

        with after_forward([base_causal_lm(self.model).get_input_embeddings()], round_again):
            return self._documents(routes).gradients

    def paths(self) -> list[PathTaken]:
        """Tell which way the parts of the attached model's step went, and why."""
        return [] if (handle := attached(self.model)) is None else handle.paths(self.subject.autocast)

    def with_other_weights(self) -> None:
        """Run a row forward and backward with every trained weight times −2, and take that back, in place as an
        optimiser would: whatever the attached model made of weights in an earlier step must follow them."""
        batch, trained = self._batch(self.subject.rows[-1]), list(self.parameters.values())
        with torch.no_grad():
            torch._foreach_mul_(trained, -2.0)
        with self._autocast():
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        with torch.no_grad():
            torch._foreach_mul_(trained, -0.5)  # the same bits: powers of two
        for parameter in trained:
            parameter.grad = None

    @contextmanager
    def _recording(self, name: str, numbers: Sequence[int], batch: dict[str, Any]) -> Iterator[None]:
        """Keep which experts the tokens of these documents go to in a forward of the attached model."""
        with recorded_choices(self.model) as seen:
            yield
        lengths = {number: len(self.subject.documents[number]) for number in numbers}
        found = by_document(seen, lengths, batch["input_ids"].shape[1], batch["packed"].loss_rows)
        for module, documents in found.items():
            self.routes.setdefault(name, {}).setdefault(module, {}).update(documents)

    def ours(self, name: str = "ours") -> Passes:
        """Run the accumulated batch: every row's loss over the labels of all rows, as the trainer does."""
        total = 0.0
        items = torch.tensor(self.subject.n_labels, device=self.device)
        with count_tokens(self.model) as routed:
            for numbers, batch in self._batches():
                with self._autocast(), self._recording(name, numbers, batch):
                    loss = self.model(**batch, use_cache=False, num_items_in_batch=items).loss
                loss.backward()
                total += loss.item()
        untrained = None
        if any(routed.tensors()):  # before gradients are taken off the model
            untrained = [
                f"{canonical(name)}, expert {e} ({counted(count, 'token')})" for name, e, count in routed.untrained()
            ]
        return replace(self._take([], total, torch.empty(0)), untrained=untrained, idle=routed.idle())

    def _take(self, losses: list[Tensor], loss: float, logits: Tensor) -> Passes:
        """Take the gradients off the model: on the host, for the next pass needs the room."""
        taken, dead = {}, []
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or not gradient.isfinite().all() or not gradient.any():
                dead.append(name)
            if name in self.kept:
                taken[name] = torch.zeros(parameter.shape) if gradient is None else gradient.detach().cpu()
            parameter.grad = None
        return Passes(loss, losses, logits, taken, dead)

    @torch.no_grad()
    def own_loss(self) -> float:
        """Return the rows' own mean losses, weighed by their labels."""
        total = 0.0
        for numbers, batch in self._batches():
            labels = sum(self.subject.documents[number].supervised for number in numbers)
            with self._autocast(), self._recording("loss", numbers, batch):
                total += self.model(**batch, use_cache=False).loss.item() * labels if labels else 0.0
        return total / self.subject.n_labels

    def packed_logits(self) -> Tensor:
        """Return the compared logits [R, V] of the packed rows."""
        return torch.cat([self._logits(numbers, "logits") for numbers in self._numbers()])

    def alone_logits(self) -> tuple[list[int], Tensor]:
        """Return the logits of some documents, each alone in its row, and their rows in `packed_logits`."""
        documents = self.subject.documents
        starts = [0, *running_sum(map(len, self.positions))]
        some = [n for n in range(len(documents)) if self.positions[n]]
        some = some[:: -(-len(some) // ALONE)]
        rows = [row for n in some for row in range(starts[n], starts[n + 1])]
        return rows, torch.cat([self._logits([n], "alone") for n in some])

    @torch.no_grad()
    def _logits(self, numbers: Sequence[int], name: str, positions: list[list[int]] | None = None) -> Tensor:
        row = [self.subject.documents[number] for number in numbers]
        positions = positions or [self.positions[number] for number in numbers]
        starts = [0, *running_sum(map(len, row))]
        keep = [start + t for start, ts in zip(starts, positions, strict=False) for t in ts]
        batch = self._batch(row)
        del batch["labels"]
        with self._autocast(), self._recording(name, numbers, batch):
            return logits_at(self.model, torch.tensor(keep, device=self.device), **batch).cpu()

    def visibility(self, packed: bool) -> list[Visibility]:
        """Find what a token reaches in each layer, in a packed row or alone."""
        base, sample = base_causal_lm(self.model), self.subject.documents[0]
        with self._autocast():
            return visible_positions(base, sample, self.probe, packed and self._batch)

    @property
    def is_generic(self) -> bool:
        """Whether nothing is known of the layers, so that what a token reaches is probed from outside."""
        return family_of(base_causal_lm(self.model).config).generic

    def isolation(self) -> Isolation:
        """Probe an attached generic model at more and longer lengths than training does."""
        with self._autocast():
            return probe(self.model, long_lengths(base_causal_lm(self.model).config))

    @torch.no_grad()
    def shift(self) -> int | None:
        """Tell by how many tokens labels are shifted, by the loss of one document; None where no shift explains it."""
        documents = self.subject.documents
        number = min(
            (n for n, d in enumerate(documents) if d.supervised > 1), key=lambda n: len(documents[n]), default=-1
        )
        if number < 0:
            return None
        document = documents[number]
        labels = torch.tensor([*document.labels, *[IGNORE_INDEX] * 2])
        predicting = (labels[1:-2] != IGNORE_INDEX).nonzero().flatten()
        logits = self._logits([number], "shift", [predicting.tolist()]).float()
        with self._autocast():
            loss = self.model(**self._batch([document]), use_cache=False).loss.item()
        for shift in (1, 0, 2):
            sums = nn.functional.cross_entropy(logits, labels[predicting + shift], reduction="sum").item()
            if abs(sums / len(predicting) - loss) <= 1e-2 * abs(loss):
                return shift
        return None

    def reloaded(self, routes: Routes | None = None) -> tuple[Tensor, list[str]]:
        """Save as users do, let go of the model and load what was saved: its logits, and the tensors that differ."""
        trained = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}
        with tempfile.TemporaryDirectory(prefix="pronghorn-verify-") as scratch:
            folder = Path(scratch) / "saved"
            with whole_folder(folder) as writing:  # a full disk is told
                self.model.save_pretrained(writing)
            self.model, self.parameters = None, trained
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            again = self.subject.reload(folder).train()
        without_dropout(again)
        there = {canonical(name): p for name, p in again.named_parameters()}
        differ = [n for n, p in trained.items() if n not in there or not torch.equal(there[n].detach().cpu(), p)]
        guide = Guide(routes or {})
        with torch.no_grad(), self._autocast(), own_code(again), self._in_8_bits(again), guide.guiding(again):
            passed = accumulate(again, self.subject.documents, self.subject.n_labels, self.positions, guide.begin)
        logits = torch.cat([each.logits for each in passed if each.logits is not None])
        return logits, differ

    def _numbers(self) -> list[range]:
        """List the documents of each row."""
        ends = list(running_sum(map(len, self.subject.rows)))
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _batches(self) -> Iterator[tuple[range, dict[str, Any]]]:
        """Yield the documents and the batch of each row."""
        return ((numbers, self._batch(row)) for numbers, row in zip(self._numbers(), self.subject.rows, strict=True))

    def _batch(self, row: list[Document]) -> dict[str, Any]:
        columns = {
            "input_ids": [token for document in row for token in document.input_ids],
            "labels": [label for document in row for label in document.labels],
            "lengths": [len(document) for document in row],
        }
        return {name: value.to(self.device) for name, value in self.subject.collate([columns]).items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.subject.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
