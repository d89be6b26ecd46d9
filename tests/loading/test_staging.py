"""Copying tensors of files to a device through buffers, which are pinned for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pronghorn.errors import DataError
from pronghorn.loading import staging
from pronghorn.loading.staging import Staging
from pronghorn.precision.loader import StoredTensor, checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZE = 4096
WAYS: dict[str, Callable[[], Staging]] = {
    "straight": lambda: Staging(CPU, SIZE),
    "buffers": lambda: Staging(CPU, SIZE, staged=True),
    "gpu": lambda: Staging(CUDA, SIZE),
}
TENSORS = {
    "one number": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
    "one buffer": torch.arange(1024, dtype=torch.float32),
    "one number more": torch.arange(1025, dtype=torch.float32).view(5, 205),
    "many buffers": torch.arange(33_333, dtype=torch.float32).view(3, -1),
    "bfloat16": torch.randn(77, 91, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "codes": torch.arange(256, dtype=torch.uint8).repeat(100)[:-3].view(torch.float8_e4m3fn),
    "integers": torch.arange(5000).view(2, 2500),
    "truths": torch.arange(9000) % 3 == 0,
    **{f"small {number:02}": torch.full((number, 3), float(number)) for number in range(40)},
}

GPU = pytest.param("gpu", marks=pytest.mark.gpu)
ways = pytest.mark.parametrize("way", ["straight", "buffers", GPU])
buffered = pytest.mark.parametrize("way", ["buffers", GPU])


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several threads read each buffer."""
    monkeypatch.setattr(staging, "PART", 100)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def copies(file: Path, way: str) -> dict[str, Tensor]:
    with WAYS[way]() as each:
        return {stored.name: each.copy(stored, stored.dtype) for stored in checkpoint(file)}


@ways
def test_copies_are_the_file_s_tensors(file: Path, way: str) -> None:
    made = copies(file, way)
    assert made.keys() == TENSORS.keys()
    for name, copy in made.items():
        assert (copy.dtype, copy.shape, copy.is_cuda) == (TENSORS[name].dtype, TENSORS[name].shape, way == "gpu")
        assert torch.equal(bytes_of(copy), bytes_of(TENSORS[name])), name


@buffered
@pytest.mark.parametrize("take", [slice(None, None, -1), slice(None, None, 3), slice(1, None, 2)], ids=str)
def test_tensors_may_come_in_any_order_or_be_left_out(file: Path, way: str, take: slice) -> None:
    with WAYS[way]() as each:
        made = [(stored.name, each.copy(stored, stored.dtype)) for stored in list(checkpoint(file))[take]]
    assert all(torch.equal(bytes_of(copy), bytes_of(TENSORS[name])) for name, copy in made)


@buffered
def test_two_files_by_turns(tmp_path: Path, way: str) -> None:
    values = {f"{number}": torch.randn(50, 7, generator=torch.Generator().manual_seed(number)) for number in range(6)}
    for name, value in values.items():
        (tmp_path / name).mkdir()
        save_file({name: value, "other": value + 1}, tmp_path / name / "model.safetensors")
    stored = [list(checkpoint(tmp_path / name)) for name in values]
    with WAYS[way]() as each:
        made = [(one.name, each.copy(one, one.dtype)) for pair in zip(*stored, strict=True) for one in pair]
    assert all(torch.equal(copy.cpu(), values[name]) for name, copy in made if name != "other")


@ways
def test_a_copy_is_no_view_of_its_file(file: Path, way: str) -> None:
    made = copies(file, way)
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(bytes_of(copy), bytes_of(TENSORS[name])) for name, copy in made.items())


@ways
@pytest.mark.parametrize(("name", "asked"), [("many buffers", torch.bfloat16), ("bfloat16", torch.float32)])
def test_a_copy_in_another_dtype_is_rounded_as_torch_does(file: Path, name: str, asked: torch.dtype, way: str) -> None:
    with WAYS[way]() as each:
        found = next(each.copy(stored, asked) for stored in checkpoint(file) if stored.name == name)
    assert found.dtype == asked and torch.equal(bytes_of(found), bytes_of(TENSORS[name].to(asked)))


@ways
def test_a_source_without_a_file_is_copied_too(way: str) -> None:
    drawn = torch.randn(30, 7)
    stored = StoredTensor("drawn", (30, 7), torch.float32, "generator", lambda start, stop: drawn[start:stop])
    with WAYS[way]() as each:
        copy = each.copy(stored, torch.float32)
    assert torch.equal(copy.cpu(), drawn) and copy.data_ptr() != drawn.data_ptr()


@pytest.mark.parametrize("left", [0, 1, 100, 20_000])
def test_a_file_that_ends_or_goes_is_an_error(file: Path, left: int) -> None:
    stored = list(checkpoint(file))
    content = file.read_bytes()
    file.unlink()  # what is mapped stays whole
    file.write_bytes(content[:left])
    with Staging(CPU, SIZE, staged=True) as each, pytest.raises(DataError, match="ended while it was read"):
        [each.copy(one, one.dtype) for one in stored]
    file.unlink()
    with Staging(CPU, SIZE, staged=True) as each, pytest.raises(DataError, match="can't be read"):
        [each.copy(one, one.dtype) for one in stored]


@pytest.mark.gpu
def test_a_buffer_is_not_filled_while_it_is_copied(tmp_path: Path) -> None:
    values = {f"{value:02}": torch.full((40_000,), float(value)) for value in range(20)}
    save_file(values, tmp_path / "model.safetensors")
    with Staging(CUDA, SIZE) as each:
        torch.cuda._sleep(10**9)  # copies wait behind it, the host doesn't
        made = {stored.name: each.copy(stored, torch.float32) for stored in checkpoint(tmp_path)}
    assert all(torch.equal(made[name].cpu(), value) for name, value in values.items())


class Queue:
    """Copies that a device makes later: when an event is waited for that comes after them, or never before the end."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def run(self, until: int) -> None:
        for target, source in self.copies[self.done : until]:
            target.copy_(source)
        self.done = max(self.done, until)

    def event(self) -> Any:
        event = SimpleNamespace(at=0)
        event.record = lambda _: setattr(event, "at", len(self.copies))
        event.synchronize = lambda: self.run(event.at)
        return event


def test_no_copy_finds_the_bytes_of_another_however_late_the_device_makes_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, copy_now = Queue(), Tensor.copy_

    def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            queue.copies.append((target, source))
            return target
        return copy_now(target, source)

    monkeypatch.setattr("torch.cuda.current_stream", lambda _: None)
    monkeypatch.setattr(Tensor, "copy_", copy)
    with Staging(CPU, SIZE, staged=True) as each:
        each._copied = [queue.event(), queue.event()]
        made = {stored.name: each.copy(stored, stored.dtype) for stored in checkpoint(file)}
    assert 0 < queue.done < len(queue.copies), "some copies wait until the end"
    queue.run(len(queue.copies))
    assert all(torch.equal(bytes_of(copy), bytes_of(TENSORS[name])) for name, copy in made.items())
