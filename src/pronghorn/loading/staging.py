"""Copy tensors from files to a GPU through pinned buffers, about as fast as the system gives their bytes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import DataError
from pronghorn.precision.loader import InFile, StoredTensor

BYTES = 32 * 2**20
"""Of each of the two buffers: a millisecond's copy."""
THREADS = 8
"""They read a buffer's parts side by side: one thread copies some 7 GB/s out of the system's page cache."""
PART = 2**20
"""Bytes that a thread reads at least."""


class Staging:
    """Two pinned buffers: while one is copied to the device, several threads read the file into the other.

    A copy straight from a mapped file takes four times as long: one thread fills the driver's own buffer. Torch's
    threads are no help, because all wait while the system maps a page.

        with Staging(device) as staging:
            tensor = staging.copy(stored, torch.bfloat16)

    Args:
        device: a CUDA device; to another, tensors are copied straight.
        size: bytes of each buffer, a multiple of 8.
    """

    def __init__(self, device: torch.device, size: int = BYTES) -> None:
        self._device, self._size = device, size
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._buffers: list[Tensor] = []
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "pronghorn-load")
        if device.type == "cuda":
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def copy(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Copy a stored tensor to the device, as `dtype`; the result is never a view of its file. It may be used by
        work that the current stream gets from now on.

        Raises:
            DataError: the file can't be read, or ends before the tensor does.
        """
        where = stored.rows
        if not self._buffers or not isinstance(where, InFile):
            tensor = stored.read()
            return tensor.to(self._device, dtype, copy=tensor.device.type == "cpu")
        result = torch.empty(stored.shape, dtype=dtype, device=self._device)
        target, size = result.view(-1), stored.dtype.itemsize
        count = self._size // size
        for start in range(0, target.numel(), count):
            part = target[start : start + count]
            read = self._next_buffer()[: part.numel() * size]
            self._fill(read, where.file, where.offset + start * size)
            values = read.view(stored.dtype)
            if stored.dtype != dtype:
                values = values.to(self._device, non_blocking=True)  # and converted there
            part.copy_(values, non_blocking=True)
            self._is_copied()
        return result

    def _next_buffer(self) -> Tensor:
        """Return the buffer whose turn it is, once the copy from it has ended."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def _is_copied(self) -> None:
        """Mark where the copy from the buffer ends, and go on to the other."""
        event = self._copied[self._turn] = self._copied[self._turn] or torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._turn = 1 - self._turn

    def _fill(self, buffer: Tensor, file: Path, offset: int) -> None:
        """Read a file's bytes from the offset on until the buffer is full."""
        view = buffer.numpy().data
        part = max(PART, -(-len(view) // THREADS))
        starts = range(0, len(view), part)
        read = map if len(starts) == 1 else self._threads.map
        for _ in read(lambda start: _read(view[start : start + part], file, offset + start), starts):
            pass


def _read(view: Any, file: Path, offset: int) -> None:
    """Read a file's bytes from the offset on until the memory is full."""
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while len(view):
                count = opened.readinto(view)
                if not count:
                    raise DataError(f"{file} ended while it was read", "copy or download it again")
                view = view[count:]
    except OSError as error:
        raise DataError(f"{file} can't be read ({error})", "copy or download it again") from error
