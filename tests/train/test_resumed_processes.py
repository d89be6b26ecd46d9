"""A run goes on with other processes than it began with, in the middle of an epoch: their number, and what each holds.
It has the steps of a run that was never stopped; with the same processes, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pronghorn.text import counted
from support.launched import launch
from support.several import Make, recipes, same, same_bits, stopped_at

STOPPED_AT = 7
"""In the middle of the second epoch of five steps, of which the last has fewer rows."""
TRAIN = {"save_steps": 1, "keep_checkpoints": 20, "deterministic": True, "weight_decay": 0.1, "max_grad_norm": 0.5}
RATE = {"lora": 1e-2, "nf4": 1e-2, "full": 1e-3}
Way = tuple[int, str]
"""A number of processes, and what each holds."""
ONE, COPIES, SHARED, FOUR = (1, "copies"), (2, "copies"), (2, "sharded"), (4, "copies")
QUICK = [("full", COPIES, SHARED)]
FOUR_SHARED = (4, "sharded")
WAYS = [
    *((COPIES, ONE), (COPIES, SHARED), (COPIES, FOUR), (SHARED, ONE), (SHARED, COPIES), (SHARED, FOUR_SHARED)),
    *((ONE, COPIES), (ONE, SHARED)),
]
MORE = [(method, *ways) for method in ("lora", "full") for ways in WAYS]
MORE += [("nf4", SHARED, ONE), ("nf4", ONE, SHARED)]
CHANGES = [*QUICK, *(pytest.param(*change, marks=pytest.mark.slow) for change in MORE if change not in QUICK)]

Whole = Callable[..., Path]


@pytest.fixture(scope="module")
def recipe(stories: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return recipes(stories, shared, tmp_path_factory.mktemp("resumed"), documents=20)


def train(make: Make, name: str, method: str, way: Way, dropout: float = 0.0) -> Any:
    file, run = make(name, {"strategy": way[1]}, **TRAIN, learning_rate=RATE[method])
    changes = ["adapter.method=full"] if method == "full" else [f"adapter.lora_dropout={dropout}"]
    changes += ["model.load_in_4bit=true"] if method == "nf4" else []
    return launch(way[0], file, *changes, folder=run.parent)


@pytest.fixture(scope="module")
def whole(recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run of a method that was never stopped, trained once."""
    found: dict[tuple[Any, ...], Path] = {}

    def of(method: str, way: Way, dropout: float = 0.0) -> Path:
        key = method, way, dropout
        if key not in found:
            name = "-".join(map(str, (method, *way, dropout)))
            done = train(recipe, name, method, way, dropout)
            assert done.returncode == 0, done.stderr
            found[key] = recipe(name)[1]
            saved = json.loads((found[key] / f"checkpoint-{STOPPED_AT}/trainer_state.json").read_text())
            assert 1.2 < saved["epoch"] < 1.8
        return found[key]

    return of


def goes_on(make: Make, whole: Whole, name: str, method: str, before: Way, after: Way, dropout: float = 0.0) -> Path:
    """Take up a stopped run with other processes, and return its folder."""
    run = make(name)[1]
    stopped_at(STOPPED_AT, whole(method, before, dropout), run)
    done = train(make, name, method, after, dropout)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert f"Going on from checkpoint-{STOPPED_AT}" in told
    assert (f"Began on {counted(before[0], 'GPU')}, goes on with {after[0]}" in told) is (before[0] != after[0])
    return run


def words(value: Any) -> str:
    return value if isinstance(value, str) else f"{value[0]} {value[1]}"


@pytest.mark.parametrize(("method", "before", "after"), CHANGES, ids=words)
def test_other_processes_go_on(recipe: Make, whole: Whole, method: str, before: Way, after: Way) -> None:
    name = "-".join(map(str, (method, *before, *after)))
    same(goes_on(recipe, whole, name, method, before, after), whole(method, before))


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("full", SHARED),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("lora", COPIES), ("lora", SHARED), ("full", COPIES), ("full", FOUR))
        ),
    ],
    ids=words,
)
def test_the_same_processes_go_on_bit_for_bit(recipe: Make, whole: Whole, method: str, way: Way) -> None:
    """With dropout, where there is any: each process has its own random state."""
    dropout = 0.1 if method == "lora" else 0.0
    name = "-".join(map(str, (method, *way, "again")))
    same_bits(goes_on(recipe, whole, name, method, way, way, dropout), whole(method, way, dropout))


def test_processes_that_can_not_share_its_steps_are_refused(recipe: Make, whole: Whole) -> None:
    """What a run that was begun can't change is not the only remedy."""
    run = recipe("indivisible")[1]
    stopped_at(STOPPED_AT, whole("full", COPIES), run)
    before = sorted(run.rglob("*"))
    done = train(recipe, "indivisible", "full", (3, "copies"))
    told = " ".join(done.stderr.split())
    assert done.returncode == 1 and told.count("error:") == 1 and "Traceback" not in told
    assert "a step of 4 rows" in told and "can't be shared by 3 processes" in told
    assert "or use 2 GPUs, as a run that was begun keeps its steps" in told
    assert sorted(run.rglob("*")) == before
