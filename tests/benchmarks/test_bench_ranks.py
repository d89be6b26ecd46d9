"""The program that measures several GPUs, tried with two processes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ranks
from support import programs

SIZES = ("--model", "tiny", "--tokens", "128", "--steps", "8", "--processes", "2", "--lengths", "mixed")


@pytest.mark.slow
def test_two_processes_are_judged_and_timed_against_their_sum(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    done = programs.invoke(ranks, *SIZES, "--out", out)
    assert done.exit_code == 0, done.output
    phases = json.loads(out.read_text())["phases"]
    assert set(phases) == {"copies", "sharded", "alone"}
    for name in ranks.STRATEGIES:
        assert phases[name]["gate"]["green"] and len(phases[name]["processes"]) == 2 and phases[name]["of_the_sum"] > 0


@pytest.mark.slow
def test_regrouped_rows_are_timed_against_rows_as_they_were_drawn(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    done = programs.invoke(ranks, *SIZES, "--strategies", "copies", "--ahead", "4", "--out", out)
    assert done.exit_code == 0, done.output
    facts = json.loads(out.read_text())
    assert set(facts["phases"]) == {"copies", "copies-ahead"}
    assert facts["gain"]["predicted"] > 1 and facts["gain"]["measured"] > 0


@pytest.mark.slow
def test_full_fine_tuning_is_judged_by_all_weights(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    sizes = ("--model", "tiny", "--method", "full", "--strategies", "sharded", "--tokens", "128", "--steps", "3")
    done = programs.invoke(ranks, *sizes, "--processes", "2", "--against", "--out", out)
    assert done.exit_code == 0, done.output
    phases = json.loads(out.read_text())["phases"]
    assert phases["sharded"]["gate"]["green"] and len(phases["sharded"]["processes"]) == 2
    assert "accelerate-recomputed" not in phases, "it had room"
    assert [len(each["losses"]) for each in phases["accelerate"]["processes"]] == [3, 3]


def test_other_gradients_are_not_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy whose adapters moved another way, though its loss is right."""
    change = torch.randn(100, generator=torch.Generator().manual_seed(0))
    rounding = torch.randn(100, generator=torch.Generator().manual_seed(1)) * 0.02
    moved = {"one": [change], "copies-judged": [change * 1.001] * 2, "sharded-judged": [change + rounding / 2] * 2}
    moved["exact"] = [change + rounding]

    def phase(name: str, given: Any, folder: Path, judged: bool) -> list[dict[str, Any]]:
        for rank, value in enumerate(moved[name]):
            torch.save(value, folder / f"{name}-{rank}.pt")
        (folder / f"{name}-0.json").write_text(json.dumps({"losses": [2.0]}))
        return [{"losses": [2.0]}]

    monkeypatch.setattr(ranks, "phase", phase)
    given = ranks.arguments().parse_args(["--processes", "2"])
    assert ranks.gate("copies", given, tmp_path)["green"]
    assert ranks.gate("sharded", given, tmp_path)["green"], "nearer to float32's than one process"
    moved["sharded-judged"] = [change + 4 * rounding] * 2
    assert not ranks.gate("sharded", given, tmp_path)["green"]
    moved["copies-judged"] = [change, change * 1.0001]
    assert not ranks.gate("copies", given, tmp_path)["green"], "processes that go apart"
