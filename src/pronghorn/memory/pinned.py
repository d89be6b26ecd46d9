"""Host memory for activations that leave the device: slots cut from large page-locked blocks, used again and again.

Page-locked (pinned) memory is what a GPU copies to and from while the host goes on. Where the system refuses it (WSL,
limits of a container) the pool uses ordinary memory, whose copies block the host, and says so in `kind`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLOTS_A_BLOCK = 4


@dataclass(eq=False)
class Slot:
    """Room for one tensor in host memory."""

    block: int
    """The id of the block it was cut from."""
    memory: Tensor
    """uint8 [capacity]."""
    free_after: Any = None
    """The CUDA event after which nothing reads or writes it any more; None: from the start."""

    def like(self, x: Tensor) -> Tensor:
        """Return its first bytes as a tensor of x's shape, strides (which leave no gaps) and dtype."""
        return self.memory[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())


def allocate_pinned(size: int) -> Tensor:
    """Make uint8 [size] of page-locked memory; RuntimeError where the system refuses it."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class PinnedPool:
    """Slots for the inputs of one model's layers.

    Args:
        pinned: whether the slots should be page-locked; for tensors of the CPU they needn't be.
        allocate: makes page-locked memory of so many bytes, or raises RuntimeError.
    """

    def __init__(self, pinned: bool, allocate: Callable[[int], Tensor] = allocate_pinned) -> None:
        self._pinned, self._allocate = pinned, allocate
        self._blocks: dict[int, list[Slot]] = {}
        self._free: list[Slot] = []
        self._made = 0
        self.refused: str | None = None
        """Why page-locked memory was not to be had."""

    @property
    def kind(self) -> str:
        """What kind of memory the slots are."""
        if self.refused is not None:
            return f"pageable host memory, whose copies block (pinning was refused: {self.refused})"
        return "pinned host memory" if self._pinned else "host memory"

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(slots[0].memory.untyped_storage().nbytes() for slots in self._blocks.values())

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self, size: int) -> Slot:
        """Take the smallest free slot of at least `size` bytes; make a block of more slots where there is none."""
        fitting = [slot for slot in self._free if slot.memory.numel() >= size]
        if not fitting:
            self._drop_unused_blocks()
            fitting = self._grow(size)
        slot = min(fitting, key=lambda slot: slot.memory.numel())
        self._free.remove(slot)
        return slot

    def give(self, slot: Slot, free_after: Any) -> None:
        """Take a slot back, for use once the event `free_after` has happened (None: now)."""
        slot.free_after = free_after
        if slot.block in self._blocks:  # else the pool was released meanwhile
            self._free.append(slot)

    def release(self) -> None:
        """Give all memory back; slots that are still held keep theirs until they die."""
        self._blocks.clear()
        self._free.clear()
        empty = getattr(torch._C, "_host_emptyCache", None)
        if self._pinned and empty is not None:
            empty()  # torch would keep freed page-locked memory for itself

    def _grow(self, size: int) -> list[Slot]:
        """Make a block of slots of `size` rounded up by an eighth at most, so that rows of nearly equal length share
        them. It is a power of two, which torch's allocator rounds page-locked memory up to anyway."""
        eighth = max(64, 1 << max(0, (size - 1).bit_length() - 4))
        capacity = -(-size // eighth) * eighth
        block = self._new(1 << (SLOTS_A_BLOCK * capacity - 1).bit_length())
        self._made += 1
        slots = [Slot(self._made, part) for part in block.split(capacity) if part.numel() == capacity]
        self._blocks[self._made] = slots
        self._free += slots
        return slots

    def _new(self, size: int) -> Tensor:
        if self._pinned and self.refused is None:
            try:
                return self._allocate(size)
            except RuntimeError as error:
                self.refused = (str(error).splitlines() or [type(error).__name__])[0]
        return torch.empty(size, dtype=torch.uint8)

    def _drop_unused_blocks(self) -> None:
        """Drop blocks whose slots are all free, which are too small for what is wanted now."""
        free = Counter(slot.block for slot in self._free)
        self._blocks = {number: slots for number, slots in self._blocks.items() if free[number] < len(slots)}
        self._free = [slot for slot in self._free if slot.block in self._blocks]
