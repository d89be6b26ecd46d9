"""Experts that lie apart in files: which tensor goes where, and what is left to transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pronghorn.errors import DataError
from pronghorn.loading.joined import Joining, parts_of

EXPECTED = {
    "e.gate_up": torch.empty(2, 6, 4, device="meta"),
    "e.down": torch.empty(2, 4, 3, device="meta"),
    "norm": torch.empty(4, device="meta"),
}
NAMES = [f"e.{expert}.{linear}.weight" for expert in (0, 1) for linear in ("down", "gate", "up")]


def operation(kind: str, dim: int) -> Any:
    return type(kind, (), {"dim": dim})()


class Stub:
    """Names by two rules, as Qwen3-MoE's are."""

    def __init__(self, *operations: Any) -> None:
        both = SimpleNamespace(source_patterns=["gate", "up"], operations=operations)
        self.rules = {"gate": (both, 0), "up": (both, 1)}
        self.rules["down"] = SimpleNamespace(source_patterns=["down"], operations=[operation("MergeModulelist", 0)]), 0

    def joined(self, name: str) -> tuple[str, Any, int]:
        linear = name.split(".")[-2] if name.count(".") > 1 else ""
        rule, source = self.rules.get(linear, (None, 0))
        return ("e.down" if linear == "down" else "e.gate_up") if rule is not None else name, rule, source


KNOWN = (operation("MergeModulelist", 0), operation("Concatenate", 1))


def test_parts_come_together_in_any_order() -> None:
    parts = parts_of(Stub(*KNOWN), [*NAMES, "norm"], EXPECTED)  # type: ignore[arg-type]
    assert parts is not None and parts.keys() == set(NAMES)
    gate_up, down = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    files = {f"e.{e}.gate.weight": gate_up[e, :3] for e in (0, 1)} | {
        f"e.{e}.up.weight": gate_up[e, 3:] for e in (0, 1)
    }
    files |= {f"e.{e}.down.weight": down[e] for e in (0, 1)}
    joining = Joining(parts, EXPECTED)
    made = [joining.add(name, files[name]) for name in ["e.1.up.weight", *reversed(NAMES[:5])]]
    found = dict(pair for pair in made if pair is not None)
    assert torch.equal(found["e.gate_up"], gate_up) and torch.equal(found["e.down"], down) and len(found) == 2
    assert joining.add("norm", down) == ("norm", down)


@pytest.mark.parametrize(
    "operations",
    [
        [operation("MergeModulelist", 0), operation("Concatenate", 0)],
        [operation("MergeModulelist", 1), operation("Concatenate", 1)],
        [*KNOWN, operation("Transpose", 0)],
        [operation("MergeModulelist", 0)],
        [operation("Chunk", 0), operation("Concatenate", 1)],
    ],
)
def test_other_ways_to_join_are_left_to_transformers(operations: list[Any]) -> None:
    assert parts_of(Stub(*operations), NAMES, EXPECTED) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "told"),
    [(NAMES[1:], "e.down"), (NAMES[:-1], "e.gate_up"), ([*NAMES, "copy.e.1.up.weight"], "each expert's part")],
)
def test_parts_that_are_missing_or_come_twice_are_an_error(names: list[str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        parts_of(Stub(*KNOWN), names, EXPECTED)  # type: ignore[arg-type]


def test_more_experts_than_the_configuration_has_are_left_to_transformers() -> None:
    assert parts_of(Stub(*KNOWN), [*NAMES, "e.2.up.weight"], EXPECTED) is None  # type: ignore[arg-type]
