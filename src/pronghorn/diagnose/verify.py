"""Is the packed path right on this model and these documents? Three passes over the same weights and tokens:

    plain      transformers and PEFT, one document at a time, in the dtype of training
    exact      the same in float32 (float64 where training is float32), a layer's weights widened at a time
    ours       the attached model on packed rows, accumulated as the trainer does

Everything that ours computes may be as far from exact as twice what plain is, and a few roundings (docs/numerics.md):
what is judged, and the names of likely causes, are in `verify_checks`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pronghorn.device import device_name, versions
from pronghorn.diagnose import verify_checks as checks
from pronghorn.diagnose.verify_checks import Check
from pronghorn.diagnose.verify_passes import Run, Subject
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.models.attach import PathTaken
from pronghorn.models.families import base_causal_lm
from pronghorn.parity.distance import BaselineNoise, Distance

SCHEMA = "pronghorn-verify-v1"


@dataclass(frozen=True)
class Report:
    """The verdict."""

    name: str
    causes: list[str]
    """What is likely wrong, in words; empty where every check holds."""
    checks: list[Check]
    worst: list[Distance]
    """The ten gradients nearest to their limits, or over them."""
    tensors: int
    """Gradients compared."""
    dtype: str
    reference: str
    rows: list[list[int]]
    """Tokens of each document, by row."""
    labels: int
    paths: list[PathTaken]
    """Which way each part of ours went, and why: among them what layers keep, as training's plan has it."""
    device: str
    versions: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; numbers that aren't finite become text."""
        finite = json.loads(json.dumps(asdict(self)), parse_constant=str)
        return {"schema": SCHEMA, "ok": self.ok, **finite}


def verify(subject: Subject, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run the passes and judge them.

    Args:
        say: told what is being done.
    Raises:
        DataError: nothing is labelled.
        UnsupportedError: 4-bit weights in float32.
        TrainingError: the disk of temporary files is full.
    """
    started = time.perf_counter()
    if not subject.n_labels:
        raise DataError("the rows to verify hold no label", "give documents with trained tokens")
    say("loading")
    run = Run(subject)
    compute = subject.autocast or base_causal_lm(run.model).get_input_embeddings().weight.dtype
    wide = torch.float64 if compute is torch.float32 else torch.float32
    if wide is torch.float64 and any(hasattr(module, "compute_dtype") for module in run.model.modules()):
        raise UnsupportedError(
            "verify of 4-bit weights in float32 needs products in float64, which they have not",
            "set precision.dtype (or --dtype) to bfloat16",
        )
    plain_sight = run.sight(packed=False)
    plain, exact = run.references(wide, say)
    say("attached")
    subject.attach(run.model)
    ours, again = run.ours(), run.ours()
    own_loss, packed, alone = run.own_loss(), run.packed_logits(), run.alone_logits()
    noise = BaselineNoise.of(plain.gradients, exact.gradients)
    gradients = checks.gradient_distances(ours, plain, exact, noise)
    found = [
        checks.loss("loss", own_loss, plain, exact),
        checks.loss("accumulated loss", ours.loss, plain, exact),
        checks.logits(packed, plain, exact),
        checks.gradients(gradients, len(run.parameters)),
        checks.dead(ours.dead, exact.dead),
        *([] if ours.experts is None else [ours.experts]),
        checks.packed_or_alone(packed, alone, plain, exact),
        checks.sights(run.sight(packed=True), plain_sight),
        checks.twice(ours, again, plain, exact, noise),
    ]
    from_first = bool(checks.rows_off(packed, plain, exact)[run.first_tokens].any())
    causes = list(checks.causes({check.name: check for check in found}, gradients, from_first, run.shift))
    if not plain.finite:
        causes = ["the reference: plain transformers and PEFT give infinities or NaN themselves, so nothing is judged"]
    paths = run.paths()
    say("merged, saved and loaded again")
    found += checks.merged(run.model)
    found.append(run.reloaded(plain, exact))
    causes += checks.file_causes(found)
    return Report(
        name=subject.name,
        causes=causes,
        checks=found,
        worst=gradients[:10],
        tensors=len(gradients),
        dtype=str(compute).removeprefix("torch."),
        reference=str(wide).removeprefix("torch."),
        rows=[[len(document) for document in row] for row in subject.rows],
        labels=subject.n_labels,
        paths=paths,
        device=device_name(),
        versions=versions(),
        seconds=time.perf_counter() - started,
    )
