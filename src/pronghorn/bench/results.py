"""Reading result files back."""

from __future__ import annotations

import json
from pathlib import Path

from pronghorn.bench.record import SCHEMA, Result, Workload
from pronghorn.errors import DataError


def read_results(path: Path) -> list[Result]:
    """The results in a file that `record.write_results` wrote.

    Raises:
        DataError: no JSON, or results of another schema than this version writes.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})", "give a file that pronghorn bench wrote") from error
    rows = stored if isinstance(stored, list) else [stored]
    schemas = {row.get("schema") if isinstance(row, dict) else None for row in rows}
    if schemas - {SCHEMA}:
        found = ", ".join(sorted(map(str, schemas)))
        raise DataError(f"{path} has results of schema {found}, not {SCHEMA}", "measure again, or give another file")
    return [Result(**{**row, "workload": Workload(**row["workload"])}) for row in rows]
