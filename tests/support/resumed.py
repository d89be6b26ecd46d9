"""The comparison of a run that was taken up again with one that was never stopped."""

from __future__ import annotations

from pathlib import Path

from pronghorn.records.record import RunRecord
from pronghorn.train.checkpoint import checkpoints

STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def same_run(one: Path, other: Path) -> None:
    """Losses, weights, optimiser, scheduler and random state are equal bit for bit."""
    first, second = RunRecord.read(one), RunRecord.read(other)
    assert [step["loss"] for step in first.steps] == [step["loss"] for step in second.steps]
    assert first.heldout == second.heldout and first.evaluations == second.evaluations
    weights = [path.relative_to(one) for path in one.glob("*/*.safetensors")]
    last = checkpoints(one)[-1].name
    for name in [*weights, *(Path(last) / file for file in STATE)]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
