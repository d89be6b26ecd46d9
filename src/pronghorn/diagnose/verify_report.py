"""What `verify` reports: checks, likely causes and the worst gradients, as JSON and in the terminal.

A cause is a `Cause` and the names it is about. Its words are here and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pronghorn.diagnose.tables import plain_table
from pronghorn.models.attach import PathTaken
from pronghorn.parity.distance import Distance
from pronghorn.text import counted

SCHEMA = "pronghorn-verify-v1"


class Name(StrEnum):
    """The checks, as JSON and the terminal call them."""

    REFERENCE = "the reference"
    LOSS = "loss"
    ACCUMULATED_LOSS = "accumulated loss"
    LOGITS = "logits"
    PRODUCTS = "8-bit products"
    GRADIENTS = "gradients"
    DEAD = "no dead gradient"
    EXPERTS = "experts train"
    CHOICES = "experts chosen"
    OUTPUTS = "experts by token"
    ALONE = "packed as alone"
    VISIBILITY = "sight"
    TWICE = "same twice"
    COSINE = "cosine to float32"
    MERGED = "merged weights"
    RELOADED = "saved and reloaded"


class Cause(Enum):
    """What is likely wrong; `{}` stands for what it is about."""

    REFERENCE_OVERFLOWS = (
        "the reference: plain transformers and PEFT give infinities or NaN themselves, so nothing is judged"
    )
    REFERENCE_CHANGED = (
        "the reference isn't transformers' own code, so nothing is judged; import nothing that replaces it, here and "
        "in training: {}"
    )
    NO_GRADIENT = "adapter or weight that gets no gradient: {}"
    EXPERT_NEVER_TRAINS = "an expert that never trains: {}"
    WRONG_EXPERT = "tokens that go to the wrong expert: {}"
    EXPERT_OUTPUT = "what experts give to a token: {}"
    MASK_LEAKS = "leaking mask: {}"
    MASK_OR_WINDOW = "causal mask or sliding window: {}"
    NEIGHBOURS_MATTER = "leaking mask: a document's logits depend on its neighbours"
    FORWARD = "forward pass: logits are off from a document's first token on (embeddings, norms, MLP or head)"
    POSITION = "wrong RoPE position (or attention scale): logits are off from a document's second token on"
    POSITION_IN_GRADIENTS = "wrong RoPE position (or attention scale): only gradients of queries and keys are off"
    PRODUCTS = "products in 8 bits: {}"
    BACKWARD = "backward pass: logits and loss are right, gradients are not: {}"
    LABELS_NOT_SHIFTED = "label shift: each token learns itself"
    LABELS_SHIFTED_TWICE = "label shift: each token learns the one after the next"
    LOSS = "loss: logits are right and the loss made of them is not"
    ACCUMULATION = "accumulation: a micro-batch's loss is not divided by the labels of the whole accumulated batch"
    TOO_COARSE = "coarser than asked for (precision.compute: dtype is exact): {}"
    NOT_REPEATABLE = "not repeatable: {}"
    MERGE = "merged weight {}"
    FILES = "saving or loading: {}"


@dataclass(frozen=True)
class Finding:
    """A likely cause."""

    cause: Cause
    about: str = ""

    def __str__(self) -> str:
        return self.cause.value.format(self.about)


@dataclass(frozen=True)
class Check:
    """One verdict."""

    name: Name
    ok: bool
    value: float
    limit: float
    detail: str
    finding: Finding | None = None
    """The likely cause, where this check alone tells it."""


@dataclass(frozen=True)
class Report:
    """All verdicts."""

    name: str
    findings: list[Finding]
    """What is likely wrong; empty where every check holds."""
    checks: list[Check]
    worst: list[Distance]
    """The ten gradients nearest to their limits, or over them."""
    tensors: int
    """Gradients compared."""
    dtype: str
    reference: str
    rule: str
    """By which limits are made."""
    rows: list[list[int]]
    """Tokens of each document, by row."""
    labels: int
    paths: list[PathTaken]
    """Which path each part of the attached model took, and why; among them what layers keep."""
    device: str
    versions: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Tell whether every check holds; what 8 bits themselves cost gradients is told, and is no error."""
        return all(check.ok or check.name is Name.COSINE for check in self.checks)

    @property
    def causes(self) -> list[str]:
        """Say what is likely wrong, in words."""
        return [str(finding) for finding in self.findings]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it; numbers that aren't finite become text."""
        fields = asdict(self)
        del fields["findings"]
        fields["causes"] = self.causes
        fields["checks"] = [
            {"name": c.name, "ok": c.ok, "value": c.value, "limit": c.limit, "detail": c.detail} for c in self.checks
        ]
        finite = json.loads(json.dumps(fields), parse_constant=str)
        return {"schema": SCHEMA, "ok": self.ok, **finite}


def render(report: Report) -> RenderableType:
    """Show the checks, the ten worst gradients and the verdict in the terminal."""
    failed = {check.name for check in report.checks if not check.ok}
    verdict = "[bold green]The numbers are right.[/]" if report.ok else "[bold red]The numbers are wrong.[/]"
    if failed == {Name.COSINE}:
        verdict = "[bold yellow]The numbers are what 8 bits give; some gradients turn further than is asked for.[/]"
    lines = [escape(f"{cause[0].upper()}{cause[1:]}.") for cause in report.causes]
    rows = " and ".join(f"{counted(len(row), 'document')} ({sum(row):,} tokens)" for row in report.rows)
    about = (
        f"{report.name}: {report.dtype}, against {report.reference} one document at a time; {rows}, "
        f"{counted(report.labels, 'label')}; {report.device}, {report.seconds:.0f} s"
    )
    about += f"\nLimits: {report.rule}."
    paths = {path.part: path for path in report.paths}
    if "activations" in paths:
        about += f"\nLayers: {paths['decoder layers'].path}. Their activations: {paths['activations'].path}."
    return Group(escape(about), "", _checks(report), "", _worst(report), "", verdict, *lines)


def _checks(report: Report) -> Table:
    table = plain_table()
    for name in ("Check", "", "Value", "Limit"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("Value", "Limit") else "left")
    table.add_column("", overflow="fold")
    for check in report.checks:
        mark = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        table.add_row(check.name, mark, f"{check.value:.2g}", f"{check.limit:.2g}", escape(check.detail))
    return table


def _worst(report: Report) -> Table:
    table = plain_table()
    table.add_column(f"Worst of {report.tensors:,} gradients", overflow="fold")
    for name in ("of limit", "L2", "plain's", "max", "1-cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    for tensor in report.worst:
        name = tensor.name.removeprefix("model.").removesuffix(".weight")
        figures = (tensor.relative, tensor.plain_relative, tensor.maximum, 1 - tensor.cosine)
        style = None if tensor.excess <= 1 else "red"
        table.add_row(name, f"{tensor.excess:.0%}", *(f"{x:.0e}" for x in figures), style=style)
    return table
