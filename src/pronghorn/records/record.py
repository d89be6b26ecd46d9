"""What a run leaves behind: one JSON file that the report, the summary and later comparisons read."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from pronghorn import state
from pronghorn.errors import DataError, TrainingError

T = TypeVar("T")

SCHEMA = "pronghorn-run-v1"
FILE_NAME = "run.json"
Number = Annotated[int | float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a file, where null is NaN."""


@dataclass
class RunRecord:
    """One run, in plain values."""

    recipe: dict[str, dict[str, Any]]
    model: str
    device: str
    versions: dict[str, str]
    packing: dict[str, Any]
    """documents, tokens, rows, row_tokens, efficiency, ceiling (the last two are shares of 1), dropped, truncated; and
    reasoning: whether the model learned to reason where the chat template opens that."""
    paths: list[dict[str, str]]
    """Each {part, path, why}: which way a part of the step went."""
    steps: list[dict[str, Number]]
    """Each {step, loss, learning_rate, grad_norm, tokens (real ones, of all processes), labelled, seconds (without
    evaluations), packing_efficiency and data_wait_share (shares of 1)}, since the entry before; and skipped, the steps
    without an update so far; in float16 loss_scale, after the step; on a GPU
    peak_memory_gib so far."""
    heldout: dict[str, int | float | None]
    """{before, after} in nats per supervised token (None: no held-out data), rows."""
    samples: list[dict[str, str]]
    """Each {prompt, before, after}."""
    trainable: dict[str, Number]
    """{tensors, parameters, share}."""
    seconds: float
    stopped: str
    """max_steps, epochs, max_minutes or patience."""
    peak_memory_bytes: int | None
    evaluations: list[dict[str, Number]] = field(default_factory=list)
    """Each {step, loss}: held-out loss during training."""
    resumed_at: list[int] = field(default_factory=list)
    """Steps at which the run was taken up again after it was killed or stopped."""
    kept_step: int | None = None
    """The step of the lowest held-out loss, whose weights are the result, where it isn't the last one."""
    out_of_memory: list[dict[str, Any]] = field(default_factory=list)
    """Each {step, micro_batch, used_bytes, total_bytes (None: CPU), plan}: what `train.oom_retry` survived."""
    schema: str = SCHEMA

    @property
    def packs(self) -> bool:
        """Whether rows were packed; else `packing` says how full they would be."""
        return bool((self.recipe.get("packing") or {}).get("enabled", True))

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median of real tokens per second; the first entry, with the warm-up, counts only if alone."""
        rates = [step["tokens"] / step["seconds"] for step in self.steps if step["seconds"] > 0]
        return statistics.median(rates[1:] or rates) if rates else None

    def write(self, folder: str | Path) -> Path:
        """Write `run.json` into `folder` (made if missing), with `tokens_per_second` for readers that aren't Python.

        Raises:
            TrainingError: it can't be written.
        """
        table = {**asdict(self), "tokens_per_second": self.tokens_per_second}
        return write_table(Path(folder) / FILE_NAME, SCHEMA, table)

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
        record = read_table(path, SCHEMA, cls, "give the run.json of a finished run, or restore the file")
        if record.heldout.get("rows"):  # there were held-out data: null is NaN
            record.heldout.update({key: math.nan for key, value in record.heldout.items() if value is None})
        return record


def steps_of_log(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the trainer's log as a record's `steps`."""
    return [
        {
            "step": entry["step"],
            "loss": entry["loss"],
            "learning_rate": entry["learning_rate"],
            "grad_norm": entry.get("grad_norm", 0.0),
            "tokens": entry["tokens"],
            "labelled": entry["labelled_tokens"],
            "seconds": entry["step_seconds"],
            "packing_efficiency": entry["packing_efficiency"],
            "data_wait_share": entry["data_wait_share"],
            "skipped": entry["skipped_steps"],
            **{name: entry[name] for name in ("loss_scale", "peak_memory_gib") if name in entry},
        }
        for entry in history
        if "loss" in entry
    ]


def peak_of(history: list[dict[str, float]], own: int) -> int:
    """Return the most bytes of a run's memory: this process's `own`, or what the log has of those before a resume."""
    return max([own, *(round(entry["peak_memory_gib"] * 2**30) for entry in history if "peak_memory_gib" in entry)])


def write_table(path: Path, schema: str, table: dict[str, Any]) -> Path:
    """Write a JSON file of the run's folder, whole or not at all; TrainingError if it can't be written."""
    try:
        return state.write_json(path, schema, _finite(table))
    except OSError as error:
        remedy = state.remedy_of(error, "fix its folder and the rights there, and run the same command again")
        raise TrainingError(f"{path} can't be written ({error.strerror})", remedy) from error


def read_table(path: Path, schema: str, kind: type[T], remedy: str) -> T:
    """Read a JSON file as a dataclass; DataError, which ends with `remedy`, if it isn't one or a field's type differs.

    Fields with a default may be missing: they came later than older files.
    """
    table = state.read_json(path, schema, remedy)
    try:
        return TypeAdapter(kind).validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise DataError(f"{path} is not whole: {name}: {first['msg']}", remedy) from error


def _finite(value: Any) -> Any:
    """Replace by null NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def trainable_parameters(model: Any) -> dict[str, float]:
    """Count how much of the model is trained: `tensors`, `parameters`, and their `share` of all parameters."""
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    everything = sum(_numbers(p) for p in model.parameters())
    return {"tensors": len(trained), "parameters": sum(trained), "share": sum(trained) / max(everything, 1)}


def _numbers(parameter: Any) -> int:
    """Count a weight's numbers. bitsandbytes stores two of 4 bits as one."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(parameter.shape if state is None else state.shape)
