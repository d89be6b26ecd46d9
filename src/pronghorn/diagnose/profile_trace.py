"""Find why a piece of a step's time was spent: torch's trace events become spans that nest, and a span has a cause.

A kernel has the cause of the host operation that launched it; a backward operation looks at the forward operation that
it belongs to (the trace's forward-backward links), and through it at the ranges of the model's parts. An operation of a
recomputed layer lies in ranges of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pronghorn.ranges import ADAPTERS, PREFIX, PRODUCTS, SCORES

ENGINE = "autograd::engine::evaluate_function"
STAGES = ("step", "backward", "wait")
"""Ranges that say when, not why."""


class Cause(StrEnum):
    """What time goes to; idle causes are the device's, or on a CPU nobody's."""

    GEMM = "dense products"
    ATTENTION = "attention"
    LORA = "LoRA"
    NORM = "norms, RoPE, activation"
    ELEMENTWISE = "residual adds, sums of gradients"
    LOSS = "loss, with the head's products"
    OPTIMISER = "optimiser, clipping, gradient watch"
    ON_DEVICE = "copies and casts, device → device"
    TO_DEVICE = "copies host → device"
    TO_HOST = "copies device → host"
    COMMUNICATION = "communication"
    DATA = "data wait"
    LOGGING = "logging"
    OTHER = "embedding, masks, rest of the model"
    AFTER_SYNC = "device idle after a synchronisation"
    IDLE = "device idle, the host is late"
    HOST = "Python and autograd between operations"
    UNEXPLAINED = "not explained"


TRANSFERS = (Cause.TO_DEVICE, Cause.TO_HOST, Cause.COMMUNICATION)
"""What runs beside computing without slowing it."""

_ATTENTION = ("flash_attention", "scaled_dot_product", "efficient_attention", "cudnn_attention")
_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul", "linear")}
_PRODUCTS |= {f"aten::{name}" for name in ("_grouped_mm", "_scaled_mm", "_scaled_mm_v2")}
_PRODUCTS |= {"bitsandbytes::gemv_4bit", "bitsandbytes::gemm_4bit"}
_WHOLE = {"data": Cause.DATA, "logging": Cause.LOGGING, "optimiser": Cause.OPTIMISER}
"""Ranges all of whose time has one cause, Python's included."""


@dataclass(slots=True, eq=False)
class Span:
    """An event of the host, in microseconds, within the one that was open when it began."""

    name: str
    category: str
    start: float
    end: float
    thread: Any
    args: dict[str, Any]
    parent: Span | None = None
    forward: Span | None = None
    """The forward operation that this backward node belongs to."""
    children: list[Span] = field(default_factory=list)

    @property
    def range(self) -> str | None:
        """Return which of our ranges this is, if it is one."""
        return self.name.removeprefix(PREFIX) if self.name.startswith(PREFIX) else None


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return the host's events as spans, by thread and start; `events` are a Chrome trace's, as torch writes them."""
    kinds = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function")
    host = [
        Span(e["name"], e["cat"], e["ts"], e["ts"] + e.get("dur", 0), e["tid"], e.get("args", {}))
        for e in events
        if e.get("ph") == "X" and e.get("cat") in kinds
    ]
    host.sort(key=lambda span: (str(span.thread), span.start, -span.end))
    places: dict[tuple[Any, float], Span] = {}
    inside: list[Span] = []
    for span in host:
        while inside and (inside[-1].thread != span.thread or inside[-1].end <= span.start):
            inside.pop()
        if inside:
            span.parent = inside[-1]
            span.end = min(span.end, span.parent.end)  # clocks are read one after the other
            span.parent.children.append(span)
        inside.append(span)
        places[span.thread, span.start] = span  # of those that begin together, the innermost
    _link(events, places)
    return host


def _link(events: Iterable[dict[str, Any]], places: dict[tuple[Any, float], Span]) -> None:
    ends: dict[Any, dict[str, Span | None]] = {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            ends.setdefault(event["id"], {})[event["ph"]] = places.get((event["tid"], event["ts"]))
    for pair in ends.values():
        forward, backward = pair.get("s"), pair.get("f")
        if forward is not None and backward is not None:
            backward.forward = forward


def cause(span: Span | None, ranks: frozenset[int]) -> tuple[Cause, bool]:
    """Return (why an operation runs, whether it computes again what the forward pass had computed).

    Args:
        ranks: the inner dimensions of LoRA's products in this model; a matrix that has one is LoRA's.
    """
    operations, ranges, again, sums = _way_out(span)
    names = [operation.name for operation in operations]
    inner = ranges[0] if ranges else None
    for kind in ranges:
        if kind in _WHOLE:
            return _WHOLE[kind], False
    if any(name.startswith("c10d::") for name in names):
        return Cause.COMMUNICATION, again
    if SCORES in ranges or any(part in name for name in names for part in _ATTENTION):
        return Cause.ATTENTION, again
    if ADAPTERS in ranges or PRODUCTS in ranges:
        return (Cause.LORA if ADAPTERS in ranges else Cause.GEMM), again
    if "model" in ranges and "backbone" not in ranges:
        return Cause.LOSS, again
    product = next((operation for operation in operations if operation.name in _PRODUCTS), None)
    if inner in ("lora", "dense"):
        return (Cause.LORA if inner == "lora" else Cause.GEMM), again
    if sums:
        return Cause.ELEMENTWISE, again
    block = inner in ("attention", "feed-forward", "layer")  # a fused layer computes what else these two do
    if block and ("aten::_foreach_copy_" in names or any(_low_rank(operation, ranks) for operation in operations)):
        return Cause.LORA, again
    if product is not None:
        scores = inner == "attention" and product.name in ("aten::bmm", "aten::baddbmm")
        return (Cause.ATTENTION if scores else Cause.GEMM), again
    if block and "aten::copy_" in names:
        return Cause.ON_DEVICE, again
    if inner == "layer" and any(name.startswith("aten::add") for name in names):
        return Cause.ELEMENTWISE, again
    if block or inner == "norm":
        return Cause.NORM, again
    if inner is not None:
        return Cause.OTHER, again
    return Cause.UNEXPLAINED, again


def _way_out(span: Span | None) -> tuple[list[Span], list[str], bool, bool]:
    """Return (operations, our ranges, computed again, a sum of gradients) around a span, innermost first.

    From a backward node the way goes on at its forward operation, unless a range was met before: then the operation is
    a forward one that the backward pass had to compute again.
    """
    operations: list[Span] = []
    ranges: list[str] = []
    again = crossed = sums = inside = False
    while span is not None:
        if span.range is None:
            operations.append(span)
            if span.name.startswith(ENGINE):
                again = again or (inside and not crossed)
                sums = sums or not (inside or crossed)
        elif span.range not in STAGES:
            ranges.append(span.range)
            inside = inside or span.range not in (SCORES, ADAPTERS, PRODUCTS)  # which the backward pass has, too
        if span.forward is not None and not inside:
            span, crossed = span.forward, True
        else:
            span = span.parent
    return operations, ranges, again, sums


def _low_rank(operation: Span, ranks: frozenset[int]) -> bool:
    shapes = operation.args.get("Input Dims", ()) if operation.name.startswith("aten::") else ()
    return any(len(shape) == 2 and not ranks.isdisjoint(x for x in shape if isinstance(x, int)) for shape in shapes)
