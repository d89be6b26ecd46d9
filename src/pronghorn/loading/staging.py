"""Copy tensors from mapped files to a GPU through pinned buffers: about as fast as the files' pages can be read."""

from __future__ import annotations

import torch
from torch import Tensor

BYTES = 32 * 2**20
"""Of each of the two buffers: a millisecond's copy."""


class Staging:
    """Two pinned buffers: while one is copied to the device, torch's threads read the file into the other.

    A copy straight from a mapped file goes through the driver's own buffer, which one thread fills.

    Args:
        device: a CUDA device. For another, `copy` copies straight.
        size: bytes of each buffer.
    """

    def __init__(self, device: torch.device, size: int = BYTES) -> None:
        self._device, self._size = device, size
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._buffers: list[Tensor] = []
        if device.type == "cuda":
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor to the device, as `dtype`; the result is never a view of it. It may be used by work that the
        current stream gets from now on."""
        if not self._buffers or tensor.device.type != "cpu":
            return tensor.to(self._device, dtype, copy=tensor.device.type == "cpu")
        source = tensor.reshape(-1)
        target = torch.empty(source.shape, dtype=dtype, device=self._device)
        count = self._size // dtype.itemsize
        for start in range(0, source.numel(), count):
            self._stage(source[start : start + count], target[start : start + count])
        return target.view(tensor.shape)

    def _stage(self, source: Tensor, target: Tensor) -> None:
        """Copy one buffer's worth."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        buffer = self._buffers[self._turn].view(target.dtype)[: target.numel()]
        buffer.copy_(source)  # converts, too
        target.copy_(buffer, non_blocking=True)
        event = self._copied[self._turn] = event or torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._turn = 1 - self._turn
