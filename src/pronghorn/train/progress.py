"""How far along: a live bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import TrainerCallback

from pronghorn.text import counted, duration
from pronghorn.train.control import trained_seconds

T = TypeVar("T")
_LINES = 10
"""About how many lines a whole training prints where there is no terminal."""
_SECONDS = 30
"""Between two lines of rows being tokenised."""
WAITING = 0.1
"""Share of the time spent waiting for data from which on it is shown."""


class ProgressCallback(TrainerCallback):
    """Show step, loss, tokens a second, elapsed and remaining time while a `Trainer` trains; rank 0 only.

    The trainer tells callbacks nothing when a step raises: call `close` then, so that the terminal's cursor comes back.
    """

    def __init__(self, console: Console, max_minutes: float | None = None) -> None:
        self.console = console
        self._limit = math.inf if max_minutes is None else 60 * max_minutes
        self._first = self._printed = 0
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._started = 0.0
        self._figures = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()
        self._limit -= trained_seconds(state)
        self._first = self._printed = state.global_step
        self._figures = ""
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        self._progress = _bar(self.console)
        begun: dict[str, Any] = {"completed": state.global_step, "figures": "", "limit": self._limit}
        self._task = self._progress.add_task("Training", total=state.max_steps, **begun)
        self._progress.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        speed = logs.get("tokens_per_second")
        self._figures = f"loss {logs['loss']:.4f}" + ("" if speed is None else f" · {speed:,.0f} tokens/s")
        if logs.get("data_wait_share", 0.0) > WAITING:
            self._figures += f" · waits {logs['data_wait_share']:.0%} for data"
        if logs.get("skipped_steps"):
            self._figures += f" · skipped {logs['skipped_steps']:,}, loss scale {logs.get('loss_scale', 1):,.6g}"
        self._show(state)
        every = max(1, state.max_steps // _LINES)
        due = state.global_step // every > self._printed // every
        self._printed = state.global_step
        if self._progress is None and state.is_world_process_zero and (due or state.global_step >= state.max_steps):
            self._print_line(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar down and leave its last state on the screen. Harmless if there is none."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, state: Any) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step, figures=self._figures)

    def _print_line(self, state: Any) -> None:
        elapsed = time.perf_counter() - self._started
        left = elapsed / max(state.global_step - self._first, 1) * (state.max_steps - state.global_step)
        left = max(min(left, self._limit - elapsed), 0)
        self.console.print(
            f"step {state.global_step}/{state.max_steps} · {self._figures} · {duration(elapsed)} elapsed, "
            f"about {duration(left)} left",
            highlight=False,
            soft_wrap=True,
        )


def track(iterable: Iterable[T], description: str, total: int | None, console: Console) -> Iterator[T]:
    """Yield the items of `iterable`, showing how many are done; without a terminal, one line when all are."""
    with _bar(console, transient=True) as progress:
        task = progress.add_task(description, total=total, figures="")
        for item in iterable:
            yield item
            progress.advance(task)
    if not console.is_terminal:
        [done] = progress.tasks
        console.print(f"{description}: {done.completed:,.0f} in {duration(done.elapsed or 0.0)}", highlight=False)


class RowsProgress:
    """Show data being read and tokenised: bars with the time left on a terminal, and a line a source when all are done;
    without a terminal a line now and then, too.

    A context manager; called with (source, rows done, rows in all or None).
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = _bar(console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._printed = time.perf_counter()

    def __call__(self, source: str, done: int, total: int | None) -> None:
        if source not in self._tasks:
            self._tasks[source] = self._bar.add_task(f"Tokenising {escape(source)}", total=total, figures="")
        self._bar.update(self._tasks[source], completed=done)
        if not self.console.is_terminal and time.perf_counter() - self._printed > _SECONDS:
            self._printed = time.perf_counter()
            left = next(task.time_remaining for task in self._bar.tasks if task.id == self._tasks[source])
            of = "" if total is None else f" of {total:,}"
            about = "" if left is None else f", about {duration(left)} left"
            self.console.print(f"{source}: {done:,}{of} rows tokenised{about}", markup=False, highlight=False)

    def __enter__(self) -> RowsProgress:
        self._bar.add_task("Reading the data", total=None, figures="")  # while they are hashed and packed, too
        self._bar.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        self._bar.stop()
        if error is not None:  # whose own message says what happened
            return
        for source, task in zip(self._tasks, self._bar.tasks[1:], strict=True):
            rows = counted(int(task.completed), "row")
            self.console.print(f"{source}: {rows} tokenised in {duration(task.elapsed or 0.0)}", markup=False)


class _TimeLeft(TimeRemainingColumn):
    """The time that the steps left will take, or what is left of the task's `limit` in seconds if that is less."""

    def render(self, task: Task) -> Text:
        limit = max(task.fields.get("limit", math.inf) - (task.elapsed or 0.0), 0.0)
        steps = math.inf if task.time_remaining is None else task.time_remaining
        if steps <= limit:
            return super().render(task)
        minutes, seconds = divmod(int(limit), 60)
        return Text(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}", style="progress.remaining")


def _bar(console: Console, transient: bool = False) -> Progress:
    """Make a progress bar, which shows only on a terminal."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        _TimeLeft(),
        console=console,
        disable=not console.is_terminal,
        transient=transient,
        expand=True,
        speed_estimate_period=math.inf,  # rich forgets steps older than 30 s, so slow ones never had a time left
    )
