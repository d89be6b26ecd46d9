"""A checkpoint's names of a model's weights, by transformers' rules, and experts that lie apart in files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import DataError

_JOINS = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""Transformers' operations that are known here: experts of a list become a tensor's first dimension, and several
linears of each its second."""
_NUMBER = re.compile(r"\.(\d+)\.")


class Names:
    """The names that a model has for a checkpoint's tensors."""

    def __init__(self, model: Any, expected: Mapping[str, Tensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.joins: list[Any] = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
        self._prefix, self._expected, self._rename = model.base_model_prefix, dict(expected), rename_source_key

    def of(self, name: str) -> str:
        """Return a tensor's name in the model."""
        if name in self._expected:
            return name
        new: str = self._rename(name, self._renamings, [], self._prefix, self._expected)[0]
        return new

    def joined(self, name: str) -> tuple[str, Any, int]:
        """Return the weight that a tensor is a part of, the rule that says so and the number of its source there; no
        rule if the tensor is none."""
        if name in self._expected:
            return name, None, 0
        weight, pattern = self._rename(name, self._renamings, self.joins, self._prefix, self._expected)
        rule = next((rule for rule in self.joins if pattern in rule.source_patterns), None)
        return weight, rule, list(rule.source_patterns).index(pattern) if rule is not None else 0


@dataclass(frozen=True)
class Part:
    """Where a file's tensor belongs in a model's weight: rows of one expert."""

    weight: str
    expert: int
    start: int
    rows: int


def parts_of(names: Names, stored: Iterable[str], expected: Mapping[str, Tensor]) -> dict[str, Part] | None:
    """Return the parts among a checkpoint's tensors, by their names there; None where weights are joined in other ways
    than are known here.

    Raises:
        DataError: an expert's part is missing, or comes twice.
    """
    parts: dict[str, Part] = {}
    for name in stored:
        weight, rule, source = names.joined(name)
        if rule is None or weight not in expected:
            continue
        count, shape, number = len(rule.source_patterns), expected[weight].shape, _NUMBER.findall(name)
        if not _is_known(rule) or len(shape) != 3 or shape[1] % count or not number or int(number[-1]) >= shape[0]:
            return None
        rows = shape[1] // count
        parts[name] = Part(weight, int(number[-1]), source * rows, rows)
    rows_of = Counter[str]()
    for part in set(parts.values()):
        rows_of[part.weight] += part.rows
    wrong = [weight for weight, rows in rows_of.items() if rows != expected[weight].shape[:2].numel()]
    if wrong or len(set(parts.values())) < len(parts):
        raise DataError(
            f"the checkpoint doesn't hold each expert's part of {wrong[0] if wrong else 'a weight'} once",
            "download or copy it again: configuration and weights must be of one model",
        )
    return parts


def _is_known(rule: Any) -> bool:
    """Tell whether a rule joins as is known here."""
    kinds = [type(operation).__name__ for operation in rule.operations]
    if kinds not in _JOINS or (len(kinds) > 1) != (len(rule.source_patterns) > 1):
        return False
    return [operation.dim for operation in rule.operations] == [0, 1][: len(kinds)]


class Joining:
    """Puts parts where they belong, and hands a weight over when its last part has come."""

    def __init__(self, parts: Mapping[str, Part], expected: Mapping[str, Tensor]) -> None:
        self._parts, self._expected = parts, expected
        self._waiting: dict[str, Tensor] = {}
        self._missing = Counter(part.weight for part in parts.values())

    def add(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return a weight's name and the weight, or None if parts of it are missing. A tensor that is no part is a
        weight."""
        part = self._parts.get(name)
        if part is None:
            return name, tensor
        like = self._expected[part.weight]
        if part.weight not in self._waiting:
            self._waiting[part.weight] = torch.empty(like.shape, dtype=like.dtype, device=tensor.device)
        self._waiting[part.weight][part.expert, part.start : part.start + part.rows] = tensor
        self._missing[part.weight] -= 1
        return None if self._missing[part.weight] else (part.weight, self._waiting.pop(part.weight))
