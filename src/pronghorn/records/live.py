"""report.html while a run trains: written now and then, and reloading itself in the browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pronghorn.errors import PronghornError
from pronghorn.records.record import RunRecord
from pronghorn.records.report import write_report

EVERY = 30.0
"""Seconds between two pages."""
SHARE = 0.01
"""Of the time, the most that drawing may take."""


class LivePage(TrainerCallback):
    """Write the page of a run that trains after a log, at most every `EVERY` seconds; on the main process only."""

    def __init__(self, record: Callable[[Any], RunRecord], folder: Path, note: Callable[[str], None]) -> None:
        self._record, self._folder, self._note = record, folder, note
        self._due = time.monotonic() + EVERY  # short runs do without

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        started = time.monotonic()
        if not logs or "loss" not in logs or not state.is_world_process_zero or started < self._due:
            return
        pause = EVERY
        try:
            write_report(self._record(state), self._folder, refresh=round(EVERY))
            pause = max(EVERY, (time.monotonic() - started) / SHARE)
        except PronghornError as error:
            self._note(f"no live page: {error}")
            pause = float("inf")
        self._due = time.monotonic() + pause
