"""A run record with hostile text in it, and a parser of the pages made of it."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

from pronghorn.records.record import RunRecord

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def record(steps: int = 80, **changes: Any) -> RunRecord:
    """A run of `steps` steps at 4,000 tokens a second, but for a first one ten times slower."""
    values: dict[str, Any] = {
        "recipe": {"model": {"name": "a/b"}, "data": {"train": "x.jsonl"}},
        "model": "a/b",
        "device": "Some GPU",
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "packing": {"documents": 1234, "tokens": 99_000, "rows": 25, "row_tokens": 4096, "efficiency": 0.9668}
        | {"ceiling": 0.9712, "dropped": 7, "truncated": 0},
        "paths": [{"part": "packed attention", "path": "flash", "why": "bfloat16 on Some GPU"}],
        "steps": [
            {"step": i + 1, "loss": 2 + math.exp(-i / 9), "learning_rate": 1e-4, "grad_norm": 1.0}
            | {"tokens": 4000, "labelled": 900, "seconds": 1.0 if i else 10.0}
            for i in range(steps)
        ],
        "heldout": {"before": 3.4567, "after": 2.3456, "rows": 16},
        "samples": [{"prompt": "Who?", "before": HOSTILE, "after": "Me & you"}],
        "trainable": {"tensors": 14, "parameters": 1_250_000, "share": 0.0125},
        "seconds": 185.0,
        "stopped": "max_steps",
        "peak_memory_bytes": 3 * 2**30,
    }
    return RunRecord(**{**values, **changes})


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
