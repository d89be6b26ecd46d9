"""Run a program's parts, each in a process of its own with a time limit, and keep what is done: a part that is cut off,
or that fails, costs no other, and the same command goes on where it stopped.

    python -m benchmarks.parts benchmarks.ablation Qwen3-0.6B ARGUMENTS.json RESULT.json      (one part; not by hand)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pronghorn.state import write_text

ROOT = Path(__file__).resolve().parents[1]
LINES = 12
"""Of a failed part's output that are kept."""
Command = Callable[[str, Path, Path], Sequence[str]]
"""Makes the command of a part from its name, the file of its arguments and that of its result."""


def add_arguments(parser: argparse.ArgumentParser, parts: Sequence[str], limit_s: int) -> None:
    """Declare which parts, and how long each may take."""
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="some of the parts")
    parser.add_argument("--limit", type=int, default=limit_s, metavar="SECONDS", help="of each part; it is ended then")
    parser.add_argument("--again", action="store_true", help="measure parts that --out holds already, too")


def run_parts(
    facts: Any, given: argparse.Namespace, module: str, measure: Callable[[str], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Measure what `facts` (a `record.Facts`) doesn't hold yet under `parts`, and return all of it by name.

    Args:
        module: it has a function `part(name, given)` that returns what becomes JSON; `given.keep(found)` keeps what
            it has so far, should it be ended, and `given.before` is what was kept of it so in an earlier run.
        measure: measures a part by its name, in its place; `one` runs a command.
    """
    done: dict[str, Any] = {} if given.again else _earlier(given.out)
    facts["parts"] = done
    for name in given.only:
        if name in done and "error" not in done[name]:
            print(f"{name}: measured before", flush=True)
            continue
        file = None if given.out is None else part_file(given.out, name)
        if file is not None and given.again:
            file.unlink(missing_ok=True)
        before = _read(file) or done.get(name, {})
        done[name] = (
            measure(name) if measure else one(name, given, lambda *files: command_of(module, *files), before, file)
        )
        said = done[name].get("error") or f"{done[name]['part_s']:.0f} s"
        print(f"{name}: {said}", flush=True)
        facts.keep()
        if file is not None:
            file.unlink(missing_ok=True)
    return done


def part_file(out: Path, name: str) -> Path:
    """Return where a part keeps what it has until it is recorded: this process may be ended, too."""
    return out.resolve().with_name(f"{out.name}.{name}.part")


def _earlier(out: Path | None) -> dict[str, Any]:
    """Return the parts in the file, or in what a run that was cut off left beside it."""
    from benchmarks.record import unfinished

    files = [] if out is None else [unfinished(out), out]
    return _read(next((file for file in files if file.is_file()), None)).get("parts", {})


def _read(file: Path | None) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where it isn't there."""
    return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}


def command_of(module: str, name: str, arguments: Path, result: Path) -> Sequence[str]:
    """Return the command that measures one part of a module."""
    return [sys.executable, "-m", "benchmarks.parts", module, name, str(arguments), str(result)]


def one(
    name: str,
    given: argparse.Namespace,
    command: Command,
    before: Mapping[str, Any] | None = None,
    file: Path | None = None,
) -> dict[str, Any]:
    """Measure one part, or what `before` lacks of it; return its result, or the `error`.

    Args:
        file: where the part writes what it has; otherwise in a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="pronghorn-part-") as folder:
        arguments, result, log = (Path(folder) / each for each in ("arguments.json", "result.json", "log.txt"))
        result = file or result
        began = time.time()
        if before:
            write_text(result, json.dumps(before))  # it may be ended before it has more
        arguments.write_text(
            json.dumps({**vars(given), "began": began, "before": before or {}}, default=str), encoding="utf-8"
        )
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        quiet = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
        with log.open("w") as output:
            try:
                process = subprocess.run(
                    command(name, arguments, result),
                    timeout=given.limit,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | quiet,
                    cwd=folder,
                )
                code: str = f"ended with code {process.returncode}"
            except subprocess.TimeoutExpired:
                code = f"took longer than {given.limit} s and was ended"
            except OSError as error:
                code = f"can't be started ({error})"
        found = _read(result)
        if "ended with code 0" not in code or not found:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
            found |= {"error": code, "output": lines}
        return found | {"part_s": time.time() - began}


def main(module: str, name: str, arguments: str, result: str) -> None:
    """Measure one part and write its result."""
    from pronghorn.environment import grow_segments

    grow_segments()  # as the commands do, before torch starts with the GPU
    given: Mapping[str, Any] = json.loads(Path(arguments).read_text(encoding="utf-8"))

    def keep(found: Any) -> None:
        write_text(Path(result), json.dumps(found))

    keep(importlib.import_module(module).part(name, SimpleNamespace(**given, keep=keep)))


if __name__ == "__main__":
    main(*sys.argv[1:])
