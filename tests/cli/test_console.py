"""What commands print with."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pronghorn.cli.console import Console, starting
from pronghorn.cli.main import app
from pronghorn.train.control import RunControl
from support.forked import forked
from support.runs import Make, make  # noqa: F401  (the fixture)


class Terminal(io.StringIO):
    """Text that was written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "rank", "shown"), [(Terminal, "0", True), (Terminal, "1", False), (io.StringIO, "0", False)]
)
def test_a_command_shows_on_a_terminal_that_it_has_begun(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], rank: str, shown: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", written := stream())
    with starting():
        pass
    assert ("loading libraries" in written.getvalue()) is shown
    assert shown or not written.getvalue().strip()


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("number", "hang_up", "code", "last"),
    [
        pytest.param(signal.SIGINT, signal.SIG_DFL, 130, "checkpoint-5", id="Ctrl-C ends tee, too"),
        pytest.param(None, signal.SIG_DFL, 129, "checkpoint-6", id="head has read enough"),
        pytest.param(None, signal.SIG_IGN, 0, "checkpoint-12", id="nohup"),
    ],
)
def test_a_training_whose_output_nobody_reads_any_more_loses_nothing(
    make: Make,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals | None,
    hang_up: signal.Handlers,
    code: int,
    last: str,
) -> None:
    recipe = make("run", train={"save_steps": 100})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))

    def train() -> None:
        reads, writes = os.pipe()
        signal.signal(signal.SIGHUP, hang_up)

        def at_the_fifth(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> None:
            if state.global_step == 4:
                os.close(reads)
                if number is not None:
                    os.kill(os.getpid(), number)

        monkeypatch.setattr(RunControl, "on_step_begin", at_the_fifth)
        with open(writes, "w") as sys.stdout:
            app(["train", "recipe.yaml"])

    ended = forked(tmp_path, train)
    assert ended.returncode == code, ended.stderr
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [last]
    assert (tmp_path / "run/run.json").exists() is (code == 0)


def test_a_terminal_that_is_gone_is_no_error() -> None:
    main, other = pty.openpty()
    with open(other, "w") as terminal:
        console = Console(file=terminal)
        os.close(main)
        console.print("to nobody")
        assert console.quiet
        console.print("to nobody")


def test_errors_that_nobody_reads_leave_the_exit_code() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as pipe:
        Console(file=pipe, stderr=True).print("error: to nobody")
