"""Errors that name the value, the limit and the remedy.

Every refusal of Pronghorn is one of these. Each is also the builtin exception a caller would expect (`ValueError` for
bad input, `NotImplementedError` for what is not built yet), so plain `except ValueError` code keeps working.
"""

from collections.abc import Iterator
from typing import Any


class PronghornError(Exception):
    """A problem and what to do about it, shown as ``problem: remedy``."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.problem, self.remedy)  # so that it gets out of a worker process


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the one that it comes from or was raised while handling, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class ConfigError(PronghornError, ValueError):
    """A recipe, an argument or a command line that can't be served as written."""


class DataError(PronghornError, ValueError):
    """Input data that is missing, malformed, empty or inconsistent."""


class UnsupportedError(PronghornError, NotImplementedError):
    """A model, option or device that Pronghorn does not serve (yet)."""


class TrainingError(PronghornError, RuntimeError):
    """A run that must stop: dead or non-finite gradients, a loss that did not fall."""


class MemoryRanOut(TrainingError):
    """Memory ran out in a step that this process can't repeat alone. All processes can, started again: `event` says
    what they keep less of, as `train.oom_retry` wrote it."""

    def __init__(self, problem: str, remedy: str, event: dict[str, Any]) -> None:
        super().__init__(problem, remedy)
        self.event = event

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.remedy, self.event)


class RunStopped(PronghornError):
    """Somebody asked a run to stop and it did, with everything saved. `signal` is the number of the signal."""

    def __init__(self, problem: str, remedy: str, signal: int) -> None:
        super().__init__(problem, remedy)
        self.signal = signal

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.remedy, self.signal)


class ServerError(PronghornError, RuntimeError):
    """A server that can't be reached, fails, or isn't what it was taken for."""
