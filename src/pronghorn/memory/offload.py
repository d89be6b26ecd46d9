"""The offload engine: layers are recomputed in the backward pass, and their inputs wait for it in host memory.

    forward      compute   layer 0 │ layer 1 │ layer 2 │ …      input k leaves while layer k runs, and its memory is
                 download   in 0     in 1      in 2             given back to compute before layer k + 1 runs

    backward     compute   … │ layer k      │ layer k − 1  │    input k − 1 comes while layer k runs: a layer costs
                 upload        in k − 1       in k − 2          max(copy, compute) instead of copy + compute

Nothing waits on the host, and streams wait for events of single copies, never for other streams as a whole. Memory that
comes back is had from the allocator of the compute stream at the moment when the layer before starts its backward: what
used that memory until then is over when an event recorded there is, and reference counts free it. So at most `buffers`
inputs are on their way or in use at a time, and none can be overwritten.

The input of the last layer that is offloaded never leaves: it would have to come back at once, with nothing to hide
behind.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pronghorn.errors import TrainingError
from pronghorn.memory.pinned import PinnedPool, Slot, allocate_pinned

DOWNLOAD, UPLOAD = 0, 1


@dataclass(frozen=True)
class LayerTiming:
    """One layer's backward in milliseconds on the device."""

    layer: int
    copy_ms: float
    """Of its input from the host; 0 where that never left."""
    compute_ms: float
    """From its input's arrival until the backward of the layer before it in the model asks for its own."""
    exposed_ms: float
    """What compute waited for the input."""


@dataclass(eq=False)
class _Input:
    """A layer's input between its forward and its backward: on the device, on its way, or away."""

    engine: OffloadEngine
    layer: int
    device: torch.device
    requires_grad: bool
    before: weakref.ref[_Input] | None
    """The input that left before it in the same forward pass, which is wanted after it."""
    hidden: Tensor | None
    """Its memory on the device, if it has any."""
    compute: Any
    """The stream that `hidden` was made on; None on the CPU."""
    slot: Slot | None = None
    """Its place in host memory, if it has one."""
    away: Tensor | None = None
    """The tensor there."""
    ready: Any = None
    """The event of the last copy that was started: it must be over before anything else uses either."""
    copied: tuple[Any, Any] | None = None
    """Where its copy from the host is timed."""
    taken: bool = False

    def __del__(self) -> None:
        # Its graph died, after a backward or without one. A copy may be under way, in memory that goes back to compute.
        if not sys.is_finalizing():
            self.settle()
            if self.slot is not None:
                self.engine.pool(self.device).give(self.slot, self.ready)

    def settle(self) -> Tensor | None:
        """Return its memory on the device, which compute may use from here on; the input itself lets go of it."""
        hidden, self.hidden = self.hidden, None
        if hidden is not None and self.ready is not None:
            self.compute.wait_event(self.ready)
        return hidden


class _Run:
    """What is checkpointed: a layer, first on its input as it is, in the backward pass on what came back."""

    def __init__(
        self, forward: Callable[..., Any], kept: _Input, hidden: Tensor, rest: tuple[Any, ...], again: Mapping[str, Any]
    ) -> None:
        self.forward, self.kept, self.rest, self.again = forward, kept, rest, again
        self.hidden: Tensor | None = hidden

    def __call__(self, _: Tensor) -> Any:
        hidden = self.hidden  # still there if the layer itself takes gradients, inside its forward
        if hidden is not None:
            return self.forward(hidden, *self.rest)
        return self.forward(self.kept.engine.bring_back(self.kept), *self.rest, **self.again)


class OffloadEngine:
    """Offloads the inputs of one model's layers. Owns its streams, and its host memory until `release`.

    Args:
        last: index of the last layer that is offloaded.
        buffers: 2 reloads an input while the layer after it computes; 1 only when it is wanted (the ablation).
        allocate_host: makes page-locked memory, as `pinned.allocate_pinned`.
        allocate_device: makes what an input comes back into, as `torch.empty_strided`.
    """

    def __init__(
        self,
        last: int,
        buffers: int = 2,
        *,
        allocate_host: Callable[[int], Tensor] = allocate_pinned,
        allocate_device: Callable[..., Tensor] = torch.empty_strided,
    ) -> None:
        self.last, self.buffers = last, buffers
        self.timed = False
        """Record events for `timings`."""
        self._no_room = False
        self._allocate_host, self._allocate_device = allocate_host, allocate_device
        self._pools: dict[bool, PinnedPool] = {}
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._latest: weakref.ref[_Input] | None = None
        self._marks: list[tuple[_Input, Any, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadEngine:
        """Return an engine for the copied model, with nothing in flight."""
        return OffloadEngine(
            self.last, self.buffers, allocate_host=self._allocate_host, allocate_device=self._allocate_device
        )

    @property
    def state(self) -> str:
        """Buffers and kind of memory, for the report."""
        buffers = "one buffer" if self.buffers == 1 else "two buffers"
        buffers += ", no room for the second" if self._no_room else ""
        return ", ".join([buffers, *dict.fromkeys(pool.kind for pool in self._pools.values())])

    @property
    def host_bytes(self) -> int:
        """Host memory that the engine holds."""
        return sum(pool.bytes for pool in self._pools.values())

    def release(self) -> None:
        """Give the host memory back."""
        for pool in self._pools.values():
            pool.release()

    def checkpoint(
        self, layer: int, again: Mapping[str, Any], forward: Callable[..., Any], hidden: Tensor, *rest: Any
    ) -> Any:
        """Run a layer's forward in training, so that all it leaves for the backward pass is its input, in host memory.

        Args:
            layer: its index; a forward pass calls layers by rising index.
            again: what `forward` is given besides in the backward pass.
            forward: called with `hidden` and `rest`, now and again in the backward pass.
            hidden: its input, any shape and dtype.
        Raises:
            TrainingError: in the backward pass, if it is the second one through this graph.
        """
        if not torch.is_grad_enabled():
            return forward(hidden, *rest)
        run = _Run(forward, self._send_away(layer, hidden), hidden, rest, again)
        whose = hidden.detach().new_empty(0)  # tells checkpoint the device whose random state it is to restore
        try:
            return checkpoint(run, whose, use_reentrant=False)
        finally:
            run.hidden = None

    def _send_away(self, layer: int, hidden: Tensor) -> _Input:
        before = self._latest() if self._latest is not None else None
        if before is not None and before.slot is not None:
            before.settle()
        follows = before is not None and before.layer < layer  # else it is of another forward pass
        kept = _Input(
            engine=self,
            layer=layer,
            device=hidden.device,
            requires_grad=hidden.requires_grad,
            before=self._latest if follows else None,
            hidden=hidden.detach(),
            compute=torch.cuda.current_stream(hidden.device) if hidden.is_cuda else None,
        )
        self._latest = weakref.ref(kept)
        if layer != self.last:
            kept.hidden = source = _without_gaps(hidden.detach())
            kept.slot = self.pool(hidden.device).take(source.nbytes)
            kept.away = kept.slot.like(source)
            with self._copying(kept, DOWNLOAD, kept.slot.free_after):
                kept.away.copy_(source, non_blocking=True)
        return kept

    def bring_back(self, kept: _Input) -> Tensor:
        """Return a layer's input, on the device, at the start of its backward; ask for the one that is wanted next."""
        if kept.taken:
            raise TrainingError(
                "a second backward pass through one forward, whose offloaded inputs are gone",
                "leave retain_graph out, or recompute without offloading (use_gradient_checkpointing=True)",
            )
        kept.taken = True
        if kept.hidden is None:
            self._fetch(kept)
        before = kept.before() if kept.before is not None else None
        if self.buffers == 2 and before is not None and before.hidden is None and not before.taken:
            try:
                self._fetch(before)
            except torch.OutOfMemoryError:
                self.buffers, self._no_room = 1, True
        arrived = self._mark(kept.compute)
        hidden = kept.settle()
        assert hidden is not None
        if arrived is not None:
            self._marks.append((kept, arrived, self._mark(kept.compute)))
        return hidden.requires_grad_(kept.requires_grad)

    def _fetch(self, kept: _Input) -> None:
        """Start an input's copy from the host, into memory that compute is done with when it gets here."""
        away = kept.away
        assert away is not None
        with torch.cuda.stream(kept.compute):  # backward may be on another device, whose thread has another stream
            hidden = self._allocate_device(away.shape, away.stride(), dtype=away.dtype, device=kept.device)
        with self._copying(kept, UPLOAD, kept.ready):
            hidden.copy_(away, non_blocking=True)
        kept.hidden = hidden

    @contextmanager
    def _copying(self, kept: _Input, way: int, after: Any) -> Iterator[None]:
        """Run the block on the stream of that way, after all that compute was given so far and the event `after`."""
        if kept.compute is None:
            yield
            return
        stream = self.streams(kept.device)[way]
        stream.wait_event(kept.compute.record_event())
        if after is not None:
            stream.wait_event(after)
        begin = self._mark(stream)
        with torch.cuda.stream(stream):
            yield
        kept.ready = stream.record_event(self._timing_event())
        kept.copied = None if begin is None else (begin, kept.ready)

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams of copies to the host and from it, on a CUDA device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def pool(self, device: torch.device) -> PinnedPool:
        """Return the host memory that inputs on a device go to."""
        pinned = device.type == "cuda"
        if pinned not in self._pools:
            self._pools[pinned] = PinnedPool(pinned, self._allocate_host)
        return self._pools[pinned]

    def timings(self) -> list[LayerTiming]:
        """Return what was recorded while `timed` was on, in order. Waits for the device.

        The layer that ends each backward is left out: its compute has no end to measure.
        """
        if self._marks:
            torch.cuda.synchronize(self._marks[-1][0].device)
        found = []
        for (kept, arrived, ready), (following, end, _) in pairwise(self._marks):
            if following.layer < kept.layer:
                copy_ms = 0.0 if kept.copied is None else kept.copied[0].elapsed_time(kept.copied[1])
                found.append(LayerTiming(kept.layer, copy_ms, ready.elapsed_time(end), arrived.elapsed_time(ready)))
        self._marks.clear()
        return found

    def _timing_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.timed else None

    def _mark(self, stream: Any) -> Any:
        return stream.record_event(self._timing_event()) if self.timed and stream is not None else None


def _without_gaps(x: Tensor) -> Tensor:
    """Return x as it is if its elements lie together in whatever order, else contiguous.

    Another order could mean other kernels, and other bits.
    """
    dense = x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()
    return x if dense else x.contiguous()
