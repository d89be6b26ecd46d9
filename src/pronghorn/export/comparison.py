"""What a comparison of a served or exported model with the trained one finds: limits, causes, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How far log-probabilities may be off, in nats, and how often the first choice must be the same."""

    mean: float
    tail: float
    """The 99.9th percentile."""
    same: float


LIMITS: Mapping[str, Limits] = {
    "f32": Limits(0.001, 0.01, 0.999),
    "f16": Limits(0.01, 0.1, 0.995),
    "bf16": Limits(0.02, 0.3, 0.985),
    "merged": Limits(0.02, 0.3, 0.985),
    "adapter": Limits(0.02, 0.3, 0.985),
    "q8_0": Limits(0.03, 0.3, 0.985),
    "fp8": Limits(0.06, 0.8, 0.95),
    "4bit": Limits(0.25, 3.0, 0.85),
}
"""By format. Those of few bits are wide: they find what is wrong, not what rounding costs."""


class Name(StrEnum):
    """The checks, as tables and files call them."""

    TOKENS = "token ids"
    LOGPROBS = "log-probabilities"
    FIRST = "same first choice"
    ANSWERS = "greedy answers"
    STOPS = "generation stops"


class Cause(Enum):
    """What is likely wrong; `{}` stands for where it shows."""

    BOS_DOUBLED = "BOS doubled: the template writes it, and the engine adds it once more"
    BOS_MISSING = "BOS missing: in training the first token was {}"
    BOS_ADDED = "BOS added: training had none"
    TEMPLATE = "template differs: {}"
    TOKENIZER = "tokenizer differs: the same text is other token ids ({})"
    BASE = "adapter missing: the log-probabilities are those of the model that training began from"
    WEIGHTS = "weights differ: merged onto another base, a damaged file, or rounding that costs more than {} explains"
    STOP = "stop token missing: after {} the trained model stops, and the engine goes on"
    ANSWERS = "answers differ though the model is the same: the engine doesn't generate greedily at temperature 0 ({})"


@dataclass(frozen=True)
class Check:
    """One thing that was compared, or could not be."""

    name: Name
    ok: bool | None
    """None: not compared; `detail` says why."""
    value: str
    limit: str
    detail: str = ""


@dataclass(frozen=True)
class Comparison:
    """What was compared, with what, and what came out: plain values, for tables, JSON and model cards."""

    engine: str
    reference: str
    format: str
    conversations: int
    skipped: tuple[str, ...]
    """Conversations that the trained model's template can't render."""
    positions: int
    scored_on: str
    mean: float | None
    tail: float | None
    same: float | None
    checks: tuple[Check, ...]
    causes: tuple[str, ...]
    losses: tuple[float, float] | None = None
    """In nats a token of the scored positions: the trained model's, the engine's. None where it scored other tokens."""

    @property
    def ok(self) -> bool:
        """Tell whether nothing differs, and something was compared."""
        states = [check.ok for check in self.checks]
        return False not in states and True in states

    @property
    def loss(self) -> str | None:
        """Say the loss before and after, if the engine scored the texts' own tokens."""
        if self.losses is None:
            return None
        trained, served = self.losses
        return f"Loss on {self.scored_on}: {trained:.4f} nats a token of the trained model, {served:.4f} of this one"

    @property
    def not_compared(self) -> tuple[Name, ...]:
        """Return what could not be compared."""
        return tuple(check.name for check in self.checks if check.ok is None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a table of JSON."""
        return {"ok": self.ok, "not_compared": list(self.not_compared), **asdict(self)}
