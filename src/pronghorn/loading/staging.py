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

BYTES = 64 * 2**20
"""Of each of the two buffers: a millisecond's copy. With half of it and half the threads, copying takes two fifths
longer from the page cache, and a sixth longer from a disk (`benchmarks.load`, staged by half)."""
THREADS = 16
"""They read a buffer's parts side by side: one thread copies some 7 GB/s out of the system's page cache."""
PART = 2**20
"""Bytes that a thread reads at least."""


class Staging:
    """Two pinned buffers: while one is copied to the device, several threads read the file into the other.

    A buffer holds what lies in the file from a tensor on, so that small tensors which follow are in it already.

    A copy straight from a mapped file takes two to three times as long: one thread fills the driver's own buffer.
    Torch's threads are no help, because all wait while the system maps a page.

        with Staging(device) as staging:
            tensor = staging.copy(stored, torch.bfloat16)

    Args:
        device: a CUDA device; to another, tensors are copied straight.
        size: bytes of each buffer, a multiple of 8.
        staged: whether buffers are used; None for a CUDA device alone.
        threads: that read.
    """

    def __init__(
        self, device: torch.device, size: int = BYTES, staged: bool | None = None, threads: int = THREADS
    ) -> None:
        self._device, self._size = device, size
        on_cuda = device.type == "cuda"
        self._staged = on_cuda if staged is None else staged
        self._copied: list[torch.cuda.Event | None] = [torch.cuda.Event() if on_cuda else None for _ in range(2)]
        self._turn = 0
        self._file, self._start, self._stop = Path(), 0, 0  # which bytes of which file are in that buffer
        self._threads = ThreadPoolExecutor(min(threads, os.cpu_count() or 1), "pronghorn-load")
        self._parts = threads
        self._buffers: list[Tensor] = []
        if self._staged:
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]

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
        if not self._staged or not isinstance(where, InFile):
            tensor = stored.read()
            return tensor.to(self._device, dtype, copy=tensor.device.type == "cpu")
        result = torch.empty(stored.shape, dtype=dtype, device=self._device)
        target, size = result.view(-1), stored.dtype.itemsize
        done = 0
        while done < target.numel():
            values = self._bytes(where.file, where.offset + done * size, size).view(stored.dtype)
            part = target[done : done + len(values)]
            values = values[: len(part)]
            if stored.dtype != dtype:
                values = values.to(self._device, non_blocking=True)  # and converted there
            part.copy_(values, non_blocking=True)
            done += len(part)
        return result

    def _bytes(self, file: Path, position: int, size: int) -> Tensor:
        """Return a buffer's bytes from that position of the file on, a multiple of `size`; read them unless they are
        there."""
        has = file == self._file and self._start <= position and position + size <= self._stop
        if not has or (position - self._start) % size:
            self._next(file, position, size)
        length = (self._stop - position) // size * size
        return self._buffers[self._turn][position - self._start :][:length]

    def _next(self, file: Path, position: int, least: int) -> None:
        """Fill the other buffer from that position on, once the copies from it have ended; those from this one end
        with the work that the stream has now."""
        event = self._copied[self._turn]
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        self._file, self._start, self._stop = file, position, position
        try:
            length = min(self._size, file.stat().st_size - position)
            if length < least:
                raise DataError(f"{file} ended while it was read", "copy or download it again")
            self._fill(self._buffers[self._turn][:length], file, position)
        except OSError as error:
            raise DataError(f"{file} can't be read ({error})", "copy or download it again") from error
        self._stop = position + length

    def _fill(self, buffer: Tensor, file: Path, offset: int) -> None:
        """Read a file's bytes from the offset on until the buffer is full."""
        view = buffer.numpy().data
        part = max(PART, -(-len(view) // self._parts))
        starts = range(0, len(view), part)
        read = map if len(starts) == 1 else self._threads.map
        for _ in read(lambda start: _read(view[start : start + part], file, offset + start), starts):
            pass


def _read(view: Any, file: Path, offset: int) -> None:
    """Read a file's bytes from the offset on until the memory is full."""
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        while len(view):
            count = opened.readinto(view)
            if not count:
                raise DataError(f"{file} ended while it was read", "copy or download it again")
            view = view[count:]
