"""Run a program of benchmarks/ in this process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

from benchmarks.program import run


@dataclass(frozen=True)
class Done:
    """How a program ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(program: Any, *arguments: object) -> Done:
    """Run a module that has `arguments` and `main`."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            run(program.arguments, program.main, [*map(str, arguments)])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    return Done(code, out.getvalue(), errors.getvalue())
