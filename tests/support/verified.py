"""Documents that verify is asked about, and what its report must say of a defect."""

from __future__ import annotations

import random

from pronghorn.diagnose.verify_report import Report
from support.tiny import VOCAB

TOKENS = 96


def documents(count: int = 12, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(12, 40))]
        made.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    return made


def only_cause(report: Report, words: str) -> None:
    assert not report.ok
    assert len(report.causes) == 1 and words in report.causes[0], (report.causes, report.checks)
