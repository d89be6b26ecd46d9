"""Copying tensors of files to a device through pinned buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pronghorn.errors import DataError
from pronghorn.loading import staging
from pronghorn.loading.staging import Staging
from pronghorn.precision.loader import InFile, StoredTensor, checkpoint

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
SIZE = 4096
TENSORS = {
    "one number": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
    "one buffer": torch.arange(1024, dtype=torch.float32),
    "one number more": torch.arange(1025, dtype=torch.float32).view(5, 205),
    "many buffers": torch.arange(33_333, dtype=torch.float32).view(3, -1),
    "bfloat16": torch.randn(77, 91, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "codes": torch.arange(256, dtype=torch.uint8).repeat(100).view(torch.float8_e4m3fn),
    "integers": torch.arange(5000).view(2, 2500),
    "truths": torch.arange(9000) % 3 == 0,
}


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_copies_are_the_file_s_tensors(file: Path, device: torch.device) -> None:
    with Staging(device, SIZE) as each:
        copies = {stored.name: each.copy(stored, stored.dtype) for stored in checkpoint(file)}
    assert copies.keys() == TENSORS.keys()
    for name, copy in copies.items():
        assert (copy.dtype, copy.shape, copy.device.type) == (TENSORS[name].dtype, TENSORS[name].shape, device.type)
        assert torch.equal(bytes_of(copy), bytes_of(TENSORS[name])), name


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_copy_is_no_view_of_its_file(file: Path, device: torch.device) -> None:
    with Staging(device, SIZE) as each:
        copies = {stored.name: each.copy(stored, stored.dtype) for stored in checkpoint(file)}
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(bytes_of(copy), bytes_of(TENSORS[name])) for name, copy in copies.items())


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("name", "asked"), [("many buffers", torch.bfloat16), ("bfloat16", torch.float32)])
def test_a_copy_in_another_dtype_is_rounded_as_torch_does(
    file: Path, name: str, asked: torch.dtype, device: torch.device
) -> None:
    with Staging(device, SIZE) as each:
        found = next(each.copy(stored, asked) for stored in checkpoint(file) if stored.name == name)
    assert found.dtype == asked and torch.equal(bytes_of(found), bytes_of(TENSORS[name].to(asked)))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_source_without_a_file_is_copied_too(device: torch.device) -> None:
    drawn = torch.randn(30, 7)
    stored = StoredTensor("drawn", (30, 7), torch.float32, "generator", lambda start, stop: drawn[start:stop])
    with Staging(device, SIZE) as each:
        copy = each.copy(stored, torch.float32)
    assert torch.equal(copy.cpu(), drawn) and copy.data_ptr() != drawn.data_ptr()


def test_threads_read_what_a_file_holds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's copies read, with parts of which a buffer has many, and a last one that is shorter."""
    monkeypatch.setattr(staging, "PART", 100)
    for stored in checkpoint(file):
        assert isinstance(stored.rows, InFile)
        read = torch.zeros(TENSORS[stored.name].nbytes, dtype=torch.uint8)
        with Staging(torch.device("cpu")) as each:
            each._fill(read, stored.rows.file, stored.rows.offset)
        assert torch.equal(read, bytes_of(TENSORS[stored.name])), stored.name


def test_a_file_that_ends_or_goes_is_an_error(file: Path) -> None:
    stored = max(checkpoint(file), key=lambda each: each.rows.offset)  # type: ignore[attr-defined]
    size, rows = file.stat().st_size, stored.rows
    assert isinstance(rows, InFile)
    with Staging(torch.device("cpu")) as each:
        with pytest.raises(DataError, match="ended while it was read"):
            each._fill(torch.empty(size, dtype=torch.uint8), rows.file, rows.offset)
        with pytest.raises(DataError, match="can't be read"):
            each._fill(torch.empty(10, dtype=torch.uint8), file.with_name("gone.safetensors"), 0)


@pytest.mark.gpu
def test_a_buffer_is_not_filled_while_it_is_copied(tmp_path: Path) -> None:
    values = {f"{value:02}": torch.full((40_000,), float(value)) for value in range(20)}
    save_file(values, tmp_path / "model.safetensors")
    with Staging(torch.device("cuda"), SIZE) as each:
        torch.cuda._sleep(10**9)  # copies wait behind it, the host doesn't
        copies = {stored.name: each.copy(stored, torch.float32) for stored in checkpoint(tmp_path)}
    assert all(torch.equal(copies[name].cpu(), value) for name, value in values.items())
