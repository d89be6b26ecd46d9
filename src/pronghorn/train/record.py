"""What a run leaves behind: one JSON file that the report, the summary and later comparisons read."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pronghorn.errors import DataError

SCHEMA = "pronghorn-run-v1"
FILE_NAME = "run.json"


@dataclass
class RunRecord:
    """One run, in plain values."""

    recipe: dict[str, Any]
    model: str
    device: str
    versions: dict[str, str]
    packing: dict[str, Any]
    """documents, tokens, rows, row_tokens, efficiency, ceiling (the last two are shares of 1), dropped, truncated."""
    paths: list[dict[str, str]]
    """Each {part, path, why}: which way a part of the step went."""
    steps: list[dict[str, float]]
    """Each {step, loss, learning_rate, grad_norm, tokens (real ones, of all processes), labelled, seconds (without
    evaluations), packing_efficiency and data_wait_share (shares of 1)}, since the entry before; and skipped, the steps
    without an update so far."""
    heldout: dict[str, Any]
    """{before, after} in nats per labelled token (None: no held-out data), rows."""
    samples: list[dict[str, str]]
    """Each {prompt, before, after}."""
    trainable: dict[str, float]
    """{tensors, parameters, share}."""
    seconds: float
    stopped: str
    """max_steps, epochs, max_minutes or patience."""
    peak_memory_bytes: int | None
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Each {step, loss}: held-out loss during training."""
    resumed_at: list[int] = field(default_factory=list)
    """Steps at which the run was taken up again after it was killed or stopped."""
    out_of_memory: list[dict[str, Any]] = field(default_factory=list)
    """Each {step, micro_batch, used_bytes, total_bytes (None: CPU), plan}: what `train.survive` survived."""
    schema: str = SCHEMA

    @property
    def tokens_per_second(self) -> float | None:
        """Median over `steps` of real tokens per second; the first entry, with the warm-up, counts only if alone."""
        rates = [step["tokens"] / step["seconds"] for step in self.steps if step["seconds"] > 0]
        return statistics.median(rates[1:] or rates) if rates else None

    def to_json(self) -> str:
        """The record as JSON text, `tokens_per_second` included for readers that aren't Python."""
        values = {**asdict(self), "tokens_per_second": self.tokens_per_second}
        return json.dumps(_finite(values), indent=1, ensure_ascii=False, allow_nan=False)

    def write(self, folder: str | Path) -> Path:
        """Write `run.json` into `folder` (made if missing); the file appears whole or not at all."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{FILE_NAME}.unfinished")
        unfinished.write_text(self.to_json() + "\n", encoding="utf-8")
        unfinished.replace(path)
        return path

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read a record from a `run.json` or the folder that holds it.

        Raises:
            DataError: no such file, or not a run record.
        """
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise DataError(f"{path} does not exist", "give the output folder of a finished run")
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error})", "restore the file or run again") from None
        if not isinstance(table, dict) or table.get("schema") != SCHEMA:
            raise DataError(f"{path} is not a {SCHEMA} record", "give the run.json of a finished run")
        given = {each.name: table[each.name] for each in fields(cls) if each.name in table}
        try:
            return cls(**given)  # what has a default came later: older records lack it
        except TypeError as error:
            raise DataError(f"{path} is not whole ({error})", "restore the file or run again") from None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
