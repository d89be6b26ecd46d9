"""Milliseconds of a training step: products at a sustained rate, everything else by the bytes that it moves.

    layer forward    2·T·N operations + attention + elementwise bytes        N: a layer's weights that a token meets
    layer backward   the same products for dX (and again for dW where weights are trained), twice the bytes
    head             logits and their gradient, chunk by chunk, in the forward pass

Fitted to four models on one H200, within 10 % of them (tests/test_plan.py); elsewhere an estimate, which a calibration
scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pronghorn.memory.devices import Card
from pronghorn.memory.estimate import Shape, Work, buffer_bytes
from pronghorn.memory.plan import Policy, followed

SUSTAINED = 0.87
"""Large products of a layer against the largest product."""
ELEMENTWISE = 0.75
"""Bandwidth of elementwise kernels against a plain copy."""
ATTENTION = 0.35
"""Attention's products against the largest product."""
GAPS = 0.27
"""Milliseconds of starting and ending kernels in a fused layer's forward, and as many in its backward."""
ROUTED_GAPS = 0.4
"""Milliseconds more of that where a layer has experts."""
HIDDEN = 0.9
"""The most of a copy to or from the host that other work hides."""
STOCK, STOCK_GAPS = 6.0, 3.5
"""Elementwise time of transformers' and PEFT's layers against the fused ones, and the least that a forward takes."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds."""

    forward: float
    """One layer."""
    backward: float
    """One layer that kept everything."""
    norms: float
    """Recomputing one layer's norms."""
    gate_up: float
    """Recomputing gate and up."""
    again: float
    """Recomputing one layer: its forward, which in fused layers needs no product of down."""
    copy: float
    """One layer's input to the host, or back; 0 where memory is shared."""
    rest: float
    """Embeddings, head, loss and optimiser."""

    def scaled(self, forward: float, backward: float, copy: float) -> StepTimes:
        """With one layer's measured times; recomputed parts and the rest are scaled with it."""
        by = (forward + backward) / (self.forward + self.backward)
        return replace(
            self, forward=forward, backward=backward, norms=by * self.norms, gate_up=by * self.gate_up,
            again=forward / self.forward * self.again, copy=copy, rest=by * self.rest,
        )  # fmt: skip

    def extra(self, buffers: int) -> dict[Policy, float]:
        """What a layer costs besides its forward and backward, by policy.

        An offloaded input goes out while its layer's forward runs and, with two buffers, comes back during the backward
        of the layer after it; with one it comes back when its own layer is next.
        """
        again, exposed = self.again, (1 - HIDDEN) * self.copy
        out = max(exposed, self.copy - self.forward)
        back = max(exposed, self.copy - again - self.backward) if buffers > 1 else self.copy
        return {
            Policy.KEEP: 0.0,
            Policy.RECOMPUTE_CHEAP: self.norms,
            Policy.RECOMPUTE_MLP: self.norms + self.gate_up,
            Policy.RECOMPUTE_LAYER: again,
            Policy.OFFLOAD: again + out + back,
        }

    def step(self, policies: Sequence[Policy], buffers: int = 2) -> float:
        """A whole step with one policy a layer."""
        extra = self.extra(buffers)
        layers = len(policies) * (self.forward + self.backward)
        return layers + self.rest + sum(extra[policy] for policy in followed(policies))


def step_times(shape: Shape, work: Work, card: Card) -> StepTimes:
    """Estimated times on a card."""
    t, h, i, b = work.tokens, shape.hidden, shape.intermediate, work.itemsize
    q, kv = shape.query, shape.key_value
    rate = 1e3 / (card.matmul * SUSTAINED * (1 if b == 2 else 0.1))  # ms an operation; float32: no tensor cores
    moving = 1e3 / (card.bandwidth * ELEMENTWISE) * (1 if work.fused else STOCK)
    products = 2 * t * shape.active_weights * rate
    attention = 2 * t * min(work.documents, t) * q * 1e3 / (card.matmul * ATTENTION)
    norms = shape.norms * 2 * t * h * work.stream_bytes * moving
    around = t * (6 * h * work.stream_bytes + (4 * q + 4 * kv + 3 * i) * b) * moving
    adapters = sum(t * _adapted(shape, work, names) * b for names in shape.groups) * moving
    if shape.experts:  # rows are gathered and combined, and read for each thin product beside
        rows = 2 * (shape.experts.chosen + 1) * h
        thin = 3 * shape.experts.chosen * h + 5 * i if work.expert_rank else 0
        around, adapters = around + t * rows * b * moving, adapters + 1.5 * t * thin * b * moving
    gaps = GAPS + (ROUTED_GAPS if shape.experts else 0.0) if work.fused else 0.0
    # 4-bit weights are written out for each product, half a byte read and two written an element
    written = 2.5 * shape.linear_weights * moving if work.method == "qlora" else 0.0
    forward = products + attention + norms + around + adapters + written + gaps
    trained = 2 if work.method == "full" else 1
    backward = trained * products + 2.5 * attention + 1.5 * (norms + around) + adapters + written + gaps
    if not work.fused:
        forward, backward = max(forward, STOCK_GAPS), max(backward, STOCK_GAPS)
    matrix = 2 * t * h * i * rate + written * h * i / shape.linear_weights
    # a Gemma layer's backward reads the product's norm
    spared = (
        matrix + 3 * t * h * work.stream_bytes * moving if work.fused and shape.norms == 2 and not shape.experts else 0
    )
    head = (6 if work.method == "full" else 4) * t * h * shape.vocab * rate + 4 * t * shape.vocab * b * moving
    updated = shape.parameters if work.method == "full" else 0
    rest = head + 30 * updated / card.bandwidth * 1e3 + 12 * t * h * b * moving
    copy = buffer_bytes(shape, work) / card.link * 1e3 if card.link else 0.0
    return StepTimes(forward, backward, norms / shape.norms * 2, 2 * matrix, forward - spared, copy, rest)


def _adapted(shape: Shape, work: Work, names: Sequence[str]) -> int:
    """Elements a token that LoRA on a merged product moves: x read, y read and written (the activation does gate's)."""
    widths = [shape.linears[name] for name in names if work.rank(name)]
    beside = work.fused and names[0] == "gate_proj"
    return (widths[0][1] if widths else 0) + (0 if beside else 2 * sum(rows for rows, _ in widths))
