"""Copying tensors to a device through pinned buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pronghorn.loading.staging import Staging

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
SIZE = 4096
TENSORS = {
    "one number": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
    "one buffer": torch.arange(1024, dtype=torch.float32),
    "one number more": torch.arange(1025, dtype=torch.float32).view(5, 205),
    "many buffers": torch.arange(33_333, dtype=torch.float32).view(3, -1),
    "transposed": torch.arange(20_000, dtype=torch.float32).view(100, 200).T,
    "codes": torch.arange(256, dtype=torch.uint8).repeat(100).view(torch.float8_e4m3fn),
    "integers": torch.arange(5000).view(2, 2500),
}


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_is_its_tensor_and_no_view_of_it(name: str, device: torch.device) -> None:
    source = TENSORS[name].clone()
    copies = [Staging(device, SIZE).copy(source, source.dtype) for _ in range(2)]
    source.zero_()
    for copy in copies:
        assert (copy.dtype, copy.shape, copy.device.type) == (source.dtype, source.shape, device.type)
        assert torch.equal(bytes_of(copy), bytes_of(TENSORS[name]))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("given", "asked"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_copy_in_another_dtype_is_rounded_as_torch_does(
    given: torch.dtype, asked: torch.dtype, device: torch.device
) -> None:
    source = (torch.randn(50, 301, generator=torch.Generator().manual_seed(0)) * 1e3).to(given)
    assert torch.equal(bytes_of(Staging(device, SIZE).copy(source, asked)), bytes_of(source.to(asked)))


@pytest.mark.gpu
def test_a_buffer_is_not_filled_while_it_is_copied() -> None:
    device, staging = torch.device("cuda"), Staging(torch.device("cuda"), SIZE)
    sources = [torch.full((40_000,), float(value)) for value in range(20)]
    torch.cuda._sleep(10**8)  # copies wait behind it, and the host doesn't
    copies = [staging.copy(source, torch.float32) for source in sources]
    assert all(torch.equal(copy, source.to(device)) for copy, source in zip(copies, sources, strict=True))
