"""The backbone (all decoder layers and the last norm) as two CUDA graphs, a forward and a backward, for packed rows.

A small model's layers take the host longer to launch than the device to compute. A graph launches them all at once; to
autograd it is one function, so accumulation, loss scaling, clipping and the trainer stay as they are. Embedding, head
and loss run as usual. In the manner of `torch.cuda.make_graphed_callables`.

One graph serves every batch of the same tokens and number of documents, rounded up to a power of two: their bounds are
data on the device. Others run without: evaluation, recomputation, autocast, long documents.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pronghorn.data.batch import PackedBatch, room_for
from pronghorn.device import is_out_of_memory
from pronghorn.layers.decoder import RUN, STEP, FusedLayers
from pronghorn.layers.step import Step
from pronghorn.layers.subclass import moving, subclass
from pronghorn.layers.watch import hooks_saved_tensors
from pronghorn.memory.plan import POLICY, Policy
from pronghorn.models.families import looks_tokens_up
from pronghorn.models.graph_benefit import GraphBenefit
from pronghorn.models.graph_replay import Captured, Replay
from pronghorn.models.metadata import LAYERS
from pronghorn.models.unpadded import CHECKPOINTING, GRAPHS, asks_for_more

Graph = Literal["auto", "on", "off"]
MOST_GRAPHS = 8
"""Different numbers of tokens and documents (`room_for`) that are captured; rows of others run without a graph."""
WARM_UPS = 2


class BackboneGraphs:
    """The graphs of one model.

    Args:
        backbone: what has embeddings, layers and the last norm.
        plain: its forward without a graph, a function of the backbone and keywords.
        always: capture at once instead of measuring whether it pays.
        refusal: why the model as it is now can't be captured, or None.
        longest: tokens from which on documents leave the batch's tiles (`attention.long_documents`), or None.
        settle: merges what layers multiply with (`FusedLayers.merge_weights`).

    The last three are copied with the model: closures over it would ask the one that it was copied from.
    """

    def __init__(
        self,
        backbone: Any,
        plain: Callable[..., Any],
        always: bool,
        refusal: Callable[[], str | None],
        longest: Callable[[], int | None],
        settle: Callable[[], None],
    ) -> None:
        self._backbone, self._plain = backbone, plain
        self._benefit = None if always else GraphBenefit()
        self._refusal, self._longest, self._settle = refusal, longest, settle
        self._parameters: list[nn.Parameter] = []
        self._captured: dict[Any, Captured] = {}
        self._fingerprint: list[Any] = []
        self._pool: Any = None
        self._stream: Any = None
        self._refused: str | None = None
        self.hooked = False
        """Whether the last training forward ran under hooks on saved tensors."""
        self.paused = False
        """Whether forwards go without graphs for now, and tell nothing about what graphs gain."""
        self.replays = 0
        """Forwards and backwards so far. All graphs share memory: each overwrites what a forward before it left."""
        self.waits: weakref.ref[Any] | None = None
        """What lives until the last replayed forward's backward has run, or can't any more."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BackboneGraphs:
        """Return graphs of the copied model, which captures its own."""
        asked = self._refusal, self._longest, self._settle
        backbone, asked = copy.deepcopy((self._backbone, asked), memo)
        return BackboneGraphs(backbone, self._plain, self._benefit is None, *asked)

    @property
    def replayed(self) -> bool:
        """Whether forwards go through graphs, as far as is known."""
        wanted = self._benefit is None or self._benefit.wanted
        return wanted and self._refused is None and not self.hooked and not looks_tokens_up(self._backbone)

    @property
    def waiting(self) -> bool:
        """Whether a replayed forward's backward may still come."""
        return self.waits is not None and self.waits() is not None

    def may_serve(self, longest: int) -> bool:
        """Tell whether a graph may serve the forward that begins, of documents of so many tokens at most. Not under
        hooks on saved tensors, whatever the forward before had: checkpointing around a model wants the same tokens
        once more in the backward."""
        served = self.replayed and is_training(self._backbone) and not hooks_saved_tensors()
        return served and not (self.paused or self.waiting or self._is_long(longest))

    def _is_long(self, document: int) -> bool:
        """Tell whether a document of so many tokens leaves the tiles: its length is the host's there, not data."""
        longest = self._longest()
        return longest is not None and document >= longest

    @property
    def state(self) -> tuple[str, str]:
        """What is done at present, and why: a line of `Handle.report`."""
        refused = self._refusal()
        if refused is not None:
            return "off", refused
        if self.hooked:
            return "off", "hooks move what is saved for the backward, or make it again"
        longest = self._longest()
        but = "" if longest is None else f"; not for rows with a document of {longest:,} tokens or more"
        if self.waiting:
            but += "; none now: the output of a forward is kept whose backward didn't come"
        if self._benefit is None:
            return "on", f"asked for{but}"
        return ("on", self._benefit.why + but) if self._benefit.wanted else ("off", self._benefit.why)

    def forward(self, embeds: Tensor, position_ids: Tensor, packed: PackedBatch) -> Tensor | None:
        """Return the backbone's output [1, T, H] through a graph; None if this batch goes without one."""
        if self._benefit is not None:
            self._benefit.judge()
            if self._benefit.lost:  # nothing stays captured that a change could concern
                if self._captured:
                    self.clear()
                    torch.cuda.empty_cache()  # else nothing but graphs could use what was theirs
                return None
        fingerprint = _fingerprint(self._backbone)
        if fingerprint != self._fingerprint:  # weights were moved, adapters switched: what was captured reads others
            if self._captured and self._benefit is not None:
                self._benefit.given_back()
            self.clear()
            self._refused = self._refusal()
            self._parameters = [p for p in self._backbone.parameters() if p.requires_grad]
            self._fingerprint = fingerprint
        if self._refused is not None or embeds.requires_grad or not (self._benefit is None or self._benefit.wanted):
            return None
        if self._is_long(max(packed.lengths)):
            return None
        if self.waiting:  # a replay would overwrite what its backward reads
            return None
        packed = packed.with_room(room_for(len(packed.lengths)))
        window = getattr(self._backbone.config, "sliding_window", None)
        key = embeds.shape, packed.bucket, embeds.dtype, window is not None and packed.max_seqlen > window
        if self._benefit is not None:
            self._benefit.looked_for(there=key in self._captured)
        if key not in self._captured:
            if len(self._captured) >= MOST_GRAPHS:
                return None
            self._settle()  # warming up would do so where the graphs before write
            if _fingerprint(self._backbone) != fingerprint:
                self.clear()
            captured = self._capture_if_it_fits(embeds, position_ids, packed)
            if captured is None:
                return None
            self._captured[key] = captured
            self._fingerprint = _fingerprint(self._backbone)  # the first products put weights together
        if self._benefit is not None:
            self._benefit.replay_begins(self.replays)
        return Replay.apply(embeds, position_ids, packed, self, self._captured[key], *self._parameters)

    def clear(self) -> None:
        """Give the graphs back, once replays that are on their way have run: before torch unmaps growing segments it
        waits for the stream that they are of, the captures', and no other."""
        if self._captured:
            torch.cuda.synchronize(self._stream.device)
            self._captured.clear()

    def restart(self) -> None:
        """Give the graphs back and ask anew whether there are to be some: layers follow another plan."""
        self.clear()
        self._fingerprint = []
        if self._benefit is not None:
            self._benefit = GraphBenefit()

    def holds(self, captured: Captured) -> bool:
        """Tell whether it wasn't given back."""
        return any(each is captured for each in self._captured.values())

    def without(self, run: Callable[[], Any]) -> Any:
        """Return the outputs of `run`, a training forward without a graph."""
        return run() if self._benefit is None or self._refused is not None else self._benefit.plain(run)

    def _capture_if_it_fits(self, embeds: Tensor, position_ids: Tensor, packed: PackedBatch) -> Captured | None:
        """Capture, or return None where memory runs out that was there without a graph, and nobody asked for one."""
        try:
            return self._capture(embeds, position_ids, packed)
        except RuntimeError as error:
            if self._benefit is None or not is_out_of_memory(error):
                raise
        self._benefit.no_memory = True
        self.clear()
        torch.cuda.empty_cache()  # after the handler: until then the error holds what was made
        return None

    def _capture(self, embeds: Tensor, position_ids: Tensor, packed: PackedBatch) -> Captured:
        if not self._captured:  # a pool ends with its graphs
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None or self._stream.device != embeds.device:
            self._stream = torch.cuda.Stream(embeds.device)  # one: it has workspaces, and its memory only it uses again
        self.replays += 1  # from the second graph on warming up overwrites what a forward left
        static = embeds.detach().clone(), position_ids.clone(), packed.without_labels().clone()
        # Other threads may be pinning memory.
        options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # what the forwards before left on another stream can't be used on this one
        here = torch.cuda.current_stream(embeds.device)
        # `stream(here)`: a capture that fails leaves its own the current one
        with (
            torch.cuda.stream(here),
            torch.enable_grad(),
            _without_norms(self._backbone.layers),
            _aliased(self._backbone) as parameters,
            self._backbone.__dict__[LAYERS].apart(embeds.dtype) as step_of,
        ):
            self._stream.wait_stream(here)
            try:
                with torch.cuda.stream(self._stream), self._in_pool(embeds.device):
                    for _ in range(WARM_UPS):
                        out = self._backbone_forward(*static, step_of)
                        torch.autograd.grad(out, parameters, torch.zeros_like(out))
                    del out
            finally:  # where memory ran out, too: a replay of another graph writes to the same
                here.wait_stream(self._stream)
            with torch.cuda.graph(forward, **options):
                out = self._backbone_forward(*static, step_of)
            d_out = torch.empty_like(out)
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=embeds.device)
            with torch.cuda.graph(backward, **options):
                gradients = torch.autograd.grad(out, parameters, d_out)
                torch._foreach_copy_(list(flat.split(sizes)), [gradient.flatten() for gradient in gradients])
            runs = runs_of(self._backbone)
        return Captured(*static, out.detach(), d_out, flat, forward, backward, runs)

    def _in_pool(self, device: torch.device) -> AbstractContextManager[None]:
        """Let what this thread allocates, a forward's activations, go into the memory of the graphs there are: beside
        them it would take as much again. (A backward's thread takes little.) Not before the first one: a pool that no
        graph has lives no longer than this."""
        pool: Any = SimpleNamespace(id=self._pool)  # a MemPool, too, ends the process if a graph outlives it
        return torch.cuda.use_mem_pool(pool, device) if self._captured else nullcontext()

    def _backbone_forward(
        self, embeds: Tensor, position_ids: Tensor, packed: PackedBatch, step_of: Callable[[PackedBatch], Step]
    ) -> Tensor:
        return self._plain(
            self._backbone,
            inputs_embeds=embeds,
            position_ids=position_ids,
            attention_mask=packed.cu_seqlens.view(1, 1, 1, -1),  # a placeholder, as in `models.metadata`
            packed=packed,
            use_cache=False,
            return_dict=True,
            **{STEP: step_of(packed)},
        ).last_hidden_state


@functools.cache
def graphed_class(original: Any) -> type[nn.Module]:
    """Make a subclass of a backbone's class, whose instances look for their graphs."""
    plain: Any = original.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed")
        told = asks_for_more(self.config, kwargs)
        looked = STEP in kwargs and not looks_tokens_up(self)  # by the pre-hook: else nobody knows what changed
        if packed is None or args or told or not (is_training(self) and looked) or not packed.cu_seqlens.is_cuda:
            return plain(self, *args, **kwargs)
        from transformers.modeling_outputs import MoeModelOutputWithPast  # with the fields of all families

        graphs: BackboneGraphs = self.__dict__[GRAPHS]
        graphs.hooked = hooks_saved_tensors()
        if graphs.hooked or graphs.paused:
            return plain(self, *args, **kwargs)
        embeds: Any = kwargs.get("inputs_embeds")
        unread = False
        if embeds is None:
            embeds = self.get_input_embeddings()(kwargs["input_ids"])
            unread = embeds.is_leaf and _for_checkpointing(self.get_input_embeddings())
        hidden = graphs.forward(embeds.detach() if unread else embeds, kwargs["position_ids"], packed)
        if hidden is not None:
            return MoeModelOutputWithPast(last_hidden_state=hidden)
        return graphs.without(lambda: plain(self, **{**kwargs, "input_ids": None, "inputs_embeds": embeds}))

    moved = moving(original, lambda self: self.__dict__[GRAPHS].clear())  # which hold weights where they lay
    return subclass(original, forward=forward, _apply=moved)


def is_training(backbone: Any) -> bool:
    """Tell whether a forward is of a training that graphs serve."""
    return backbone.training and torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")


def runs_of(backbone: Any) -> list[Any]:
    """List what layers were built into: blocks, merged weights and copies of adapters."""
    return [layer.__dict__[RUN] for layer in backbone.layers if layer.__dict__.get(RUN) is not None]


def _for_checkpointing(embedding: nn.Module) -> bool:
    """Tell whether only hooks for reentrant checkpointing make its output require a gradient that nobody reads."""
    return {getattr(hook, "__name__", "") for hook in embedding._forward_hooks.values()} <= {*CHECKPOINTING}


@contextmanager
def _aliased(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Yield leaves over the same storage that stand in for the trained parameters meanwhile. Autograd accumulates a
    leaf's gradients on the stream that first used it, which for the parameters is not the one that is captured."""
    places = [
        (module, name, parameter)
        for module in backbone.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    aliases = {parameter: nn.Parameter(parameter.detach()) for *_, parameter in places}  # one may have two places
    try:
        for module, name, parameter in places:
            module._parameters[name] = aliases[parameter]
        yield [*aliases.values()]
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


@contextmanager
def _without_norms(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers that are fused as a whole keep no norms' results meanwhile: making them again takes a percent of a
    step at 1B at most and, but of short rows, frees more than graphs hold besides."""
    policies = [(layer, layer.__dict__.get(POLICY)) for layer in layers]
    kept = [(layer, policy) for layer, policy in policies if policy is not Policy.RECOMPUTE_MLP]  # it keeps less
    try:
        for layer, _ in kept:
            layer.__dict__[POLICY] = Policy.RECOMPUTE_NORMS
        yield
    finally:
        for layer, policy in kept:
            layer.__dict__[POLICY] = policy
            if policy is None:
                del layer.__dict__[POLICY]


def _fingerprint(backbone: Any) -> list[Any]:
    """List what captured graphs rely on: the layers as they were built (`FusedLayers.begin` looked a moment ago), what
    their policies are, and the modules beside them."""
    layers: FusedLayers = backbone.__dict__[LAYERS]
    found: list[Any] = [layers.generation]
    for layer in backbone.layers:
        found += getattr(layer, "gradient_checkpointing", False), layer.__dict__.get(POLICY)
    others = [module for module in backbone._modules.values() if module is not None and module is not backbone.layers]
    for module in (backbone, *others):
        for each in module._parameters.values():
            if each is not None:
                found += each.data_ptr(), each.requires_grad and id(each)  # `_parameters` keeps those alive
        hooks = *module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks
        found += *hooks, module.__dict__.get("forward")
    return found
