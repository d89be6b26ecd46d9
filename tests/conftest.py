"""Fixtures shared by all tests: where data lies, tiny models of every family, NaN-poisoned memory."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ("support.runs", "support.served")
"""Modules of fixtures, which import all of Pronghorn."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shared", type=Path, default=ROOT.parent / "shared", help="folder with data/ and models/")
    parser.addoption("--vllm", type=Path, default=None, help="a Python that has vLLM, e.g. of its CPU build")
    parser.addoption("--smollm2", type=Path, default=None, help="SmolLM2-135M-Instruct as a safetensors folder")


def pytest_configure(config: pytest.Config) -> None:
    """Import what takes seconds in the processes that run tests, not in the one that waits for these."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch
    import typer.testing

    torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings
    # a command line is made of its functions' signatures again for each call, which took half of the call's time
    if hasattr(typer.testing, "_get_command"):
        typer.testing._get_command = functools.cache(typer.testing._get_command)
    if hasattr(copy, "_deepcopy_dispatch"):
        copy._deepcopy_dispatch[OrderedDict] = copy_of_ordered_dict
    os.fsync = lambda descriptor: None  # files need not outlive the machine, and every saved run waits for dozens
    os.register_at_fork(after_in_child=own_lock_of_bars)
    for name in FIXTURES:
        config.pluginmanager.import_plugin(name)


def own_lock_of_bars() -> None:
    """Give a forked process a lock of its own for tqdm's bars: processes share one, and whoever is killed while it
    draws keeps it from all others for good."""
    if (bars := sys.modules.get("tqdm.std")) is None:
        return
    kinds, own = [bars.tqdm], threading.RLock()
    for kind in kinds:  # each class may have one
        kind.set_lock(own)
        kinds += kind.__subclasses__()


def copy_of_ordered_dict(value: OrderedDict[Any, Any], memo: dict[int, Any]) -> OrderedDict[Any, Any]:
    """Copy as `deepcopy` does, in a tenth of its time where nothing is in it: every module has a dozen such."""
    made: OrderedDict[Any, Any] = OrderedDict()
    memo[id(value)] = made
    for key, each in value.items():
        made[copy.deepcopy(key, memo)] = copy.deepcopy(each, memo)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `matrix` leaves to `make test-all`, before variants are selected by their marks."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix") is not None:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in variants.values():
        [count] = group[0].get_closest_marker("matrix").args  # type: ignore[union-attr]
        always = {round(i * (len(group) - 1) / max(count - 1, 1)) for i in range(count)}
        for index, item in enumerate(group):
            if index not in always:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what imports made out of garbage collections; every training ends in one, which took 0.3 seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Leave what tests before this file's have imported out of garbage collections, too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenised data goes to a folder of this test session, in this process and in those that it starts."""
    folder = str(tmp_path_factory.getbasetemp() / "hf")
    monkeypatch.setenv("HF_HOME", folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", folder)


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Path:
    """The folder of data and models the tests read in place."""
    folder = request.config.getoption("--shared").resolve()  # tests may change the current folder
    if not (folder / "models").is_dir():
        if folder == ROOT.parent / "shared":
            pytest.skip(f"needs data and models in {folder}: CONTRIBUTING.md says which, and how to get them")
        pytest.fail(f"no data at {folder}: give the folder with data/ and models/ by --shared PATH")
    return folder


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """stories260k: a real Llama of 260,000 parameters with grouped heads."""
    return shared / "models" / "stories260k"


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct as a safetensors folder: --smollm2, or fetched once by the demo into .cache."""
    folder = request.config.getoption("--smollm2")
    if folder is not None:
        return folder
    from demo.model import fetch_smollm2

    return fetch_smollm2(ROOT / ".cache")


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Every uninitialised tensor holds NaN, so that what nobody wrote shows."""
    import torch

    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
