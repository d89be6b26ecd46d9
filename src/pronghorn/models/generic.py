"""The forward of an attached causal LM of a generic family: transformers' own, told where documents begin and end.

How it is told is a `Way`; the first of `ways` under which the probe (`models.probe`) finds documents apart is taken. A
packed batch of one document is none: it goes transformers' plain causal path, which needs no proof.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from pronghorn.data.batch import PackedBatch
from pronghorn.data.media import refuse_media
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import UnsupportedError
from pronghorn.families.generic import (
    CHOSEN,
    COMPUTED,
    TOLD,
    chunks_follow_documents,
    limits_to_cross,
    scales_queries_from,
    text_config,
)
from pronghorn.families.registry import dropout_of, why_generic
from pronghorn.layers.linears import products_dtype
from pronghorn.layers.subclass import subclass
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models import experts
from pronghorn.models.causal_lm import PACKS, PackedCausalLM, has_own_loss
from pronghorn.models.families import set_attention, settle_balance
from pronghorn.models.loss import CHUNK_BYTES
from pronghorn.models.metadata import (
    check_causal,
    check_checkpointing,
    check_mixing,
    check_rope,
    mixing_adapter,
    refuse_transforms,
    stock_batch,
    warn_of_attentions,
)

if TYPE_CHECKING:
    from pronghorn.models.probe import Isolation

PACKING = "_pronghorn_packing"
"""The attribute of an attached causal LM that holds its `GenericPacking`."""


class Way(StrEnum):
    """How transformers' layers are told where documents begin and end."""

    BOUNDS = "by the documents' bounds"
    BOUNDS_AND_MASK = "by the documents' bounds; a mask is made for layers that read one"
    MASK = "under a dense mask that transformers makes of position_ids"
    OWN_MASK = "under a dense mask that it is given"


@dataclass
class GenericPacking:
    """How one attached model of a generic family packs."""

    model: Any
    implementation: str
    """The name of our attention function in transformers' registry."""
    previous: str
    """The attention implementation that the model had."""
    way: Way | None = None
    isolation: Isolation | None = None
    """What the probe found; None before the first packed batch."""
    crossed: int = 0
    """Tokens of the probe's longest document."""
    running: bool = False
    """Whether the causal LM's forward is running, which tells its backbone where documents begin."""

    def __post_init__(self) -> None:
        if dropout_of(self.model.config):
            warnings.warn(f"layers are transformers' own: {why_generic(self.model.config)}", stacklevel=4)

    @property
    def ways(self) -> list[Way]:
        """List the ways that this model's signatures allow, the cheapest first."""
        names, any_keyword = _signature(type(self.model).forward)
        ways = [Way.MASK] if any_keyword or "position_ids" in names else []
        windows = limits_to_cross(self.model.config)  # which a mask made here would not have
        chosen = any(name.startswith(CHOSEN) for name in windows)  # what an indexer chooses is no bounds of documents
        # the probe can't tell whether a limit that it doesn't cross holds without transformers' mask
        masked = any(n >= self.crossed and name not in (*TOLD, *COMPUTED) for name, n in windows.items())
        if any_keyword and not (chosen or masked) and getattr(self.model, "_supports_attention_backend", False):
            ways = [Way.BOUNDS, Way.BOUNDS_AND_MASK, Way.MASK]
        return ways if windows else [*ways, Way.OWN_MASK]

    def take(self, way: Way | None) -> None:
        """Let the model's forward go one of the ways; None: transformers' attention, for batches that aren't packed."""
        self.way = way
        bounds = way in (Way.BOUNDS, Way.BOUNDS_AND_MASK)
        wanted = self.implementation if bounds else self.previous
        if self.model.config._attn_implementation != wanted:
            set_attention(self.model, wanted)

    def tell(
        self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Tell a backbone that is called past its causal LM, as TRL's fused head does: a forward pre-hook of it."""
        if self.running:
            return None
        names, any_keyword = _signature(type(backbone).forward)
        given = kwargs | dict(zip(names, args, strict=False))
        packed = given.pop("packed", None) or stock_batch(given, _tokens(given))
        if packed is None:
            return None
        given = self.pack(packed, given)
        return (), given if any_keyword else {name: value for name, value in given.items() if name in names}

    @contextmanager
    def told(self) -> Iterator[None]:
        """Leave the backbone alone while the block runs."""
        before, self.running = self.running, True
        try:
            yield
        finally:
            self.running = before

    def pack(self, packed: PackedBatch, given: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a packed batch's forward, after a proof that its documents stay apart.

        Raises:
            UnsupportedError: they don't.
        """
        config = text_config(self.model.config)
        check_mixing(mixing_adapter(self.model), packed)
        check_causal(config, given)
        check_rope(self.model, packed)
        _check_chunks(config, packed)
        _check_scaled_queries(config, packed)
        if self.way is None and _documents(packed) > 1:  # the first packed batch; a probe sets the way itself
            from pronghorn.models.probe import require_isolation

            require_isolation(self.model)
        return self.arguments(packed, {**given, "use_cache": False})

    def arguments(self, packed: PackedBatch, given: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a packed batch's forward: what was given, and the documents' bounds."""
        if _documents(packed) <= 1:  # the padded tail comes after it, where a causal model doesn't look
            return {name: value for name, value in given.items() if name != "position_ids"}
        bounds = packed.cu_seqlens[: len(packed.lengths) + 1]
        longest = max(packed.lengths)
        given = given | {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": packed.document_ids[None],
        }
        if self.way in (Way.BOUNDS, Way.BOUNDS_AND_MASK):
            given["packed"] = packed
        given["attention_mask"] = None
        if self.way is Way.BOUNDS:  # transformers returns a mask of four dimensions as it is instead of making one
            given["attention_mask"] = bounds.view(1, 1, 1, -1)
        elif self.way is Way.OWN_MASK:
            given["attention_mask"] = self._dense_mask(packed)
        return given

    def _dense_mask(self, packed: PackedBatch) -> Tensor:
        """Return what is added to scores, [1, 1, T, T]: 0 where a token looks, else the least number."""
        dtype = products_dtype(self.model.get_input_embeddings().weight)
        hidden = ~packed.dense_mask(None)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


def followable(plan: Plan, layers: Iterable[nn.Module]) -> Plan:
    """Return the plan, or one that keeps everything in place of an `auto` that these layers can't follow.

    transformers has no gradient checkpointing for such layers.
    """
    can = all(hasattr(layer, "gradient_checkpointing") for layer in layers)
    return plan if can or not plan.undecided else replace(Plan.keep(), policies=(Policy.KEEP,))


@functools.cache
def _signature(forward: Any) -> tuple[tuple[str, ...], bool]:
    """Return the names that a causal LM's own forward takes, and whether it takes others, too."""
    parameters = inspect.signature(forward).parameters.values()
    names = tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self")
    return names, any(each.kind is each.VAR_KEYWORD for each in parameters)


@functools.cache
def generic_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of `original` with the same forward signature, which transformers and TRL read."""

    @functools.wraps(original.forward)
    def forward(
        self: Any,
        *args: Any,
        packed: PackedBatch | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if PACKING not in self.__dict__:  # detached; a trainer's wrapper, which was made before, still calls this
            given = {"labels": labels, "num_items_in_batch": num_items_in_batch}
            return original.forward(self, *args, **kwargs, **{k: v for k, v in given.items() if v is not None})
        names, any_keyword = _signature(original.forward)
        kwargs |= dict(zip(names, args, strict=False))
        refuse_media("the batch", (name for name, value in kwargs.items() if value is not None))
        packed = stock_batch(kwargs, _tokens(kwargs)) if packed is None else packed
        packing: GenericPacking = self.__dict__[PACKING]
        rows = None
        if packed is not None:
            kwargs = packing.pack(packed, kwargs)
            rows = packed.loss_rows if labels is not None and "logits_to_keep" in names else None
        warn_of_attentions(self.config, kwargs)
        check_checkpointing(text_config(self.config), self, self.modules())
        balanced = settle_balance(self.config, kwargs)
        own = labels is not None and (has_own_loss(self, kwargs) or balanced)
        if own:
            kwargs |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
        elif rows is not None:
            kwargs["logits_to_keep"] = rows
        if not any_keyword:
            kwargs = {name: value for name, value in kwargs.items() if name in names}
        # Triton launches on the current device, which need not be the model's.
        with packing.told(), torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if own or labels is None:
                outputs: Any = original.forward(self, **kwargs)
                return outputs if packed is None else experts.leave_tail_out(self, outputs, packed)
            return_dict = kwargs.pop("return_dict", None)
            outputs = original.forward(self, **kwargs)
            outputs["loss"] = logits_loss(outputs.logits, labels, rows, num_items_in_batch)
            outputs.move_to_end("loss", last=False)  # transformers gives it first: outputs[0], and of tuples
            if packed is not None:
                outputs["logits"] = None  # of some rows only
        if return_dict is False:
            return tuple(each for each in outputs.to_tuple() if each is not None)
        return outputs

    setattr(forward, PACKS, True)
    return subclass(original, PackedCausalLM, forward=forward)


def logits_loss(logits: Tensor, labels: Tensor, rows: Tensor | None, num_items: Tensor | int | None) -> Tensor:
    """Return next-token cross-entropy, in chunks whose float32 copies are made again in the backward pass.

    Args:
        logits: [B, L, V], or [1, M, V] of `rows` only.
        labels: int64 [B, L], unshifted, -100 where nothing is predicted.
        num_items: what the sum is divided by; None for this batch's own supervised tokens.
    """
    refuse_transforms()
    targets = pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    targets = targets if rows is None else targets[rows]
    flat = logits.flatten(0, -2)
    if rows is not None and len(rows) != len(flat):  # the model has kept all rows
        flat = flat[rows]

    def chunk_loss(chunk: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(chunk.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")

    step = max(256, CHUNK_BYTES // (4 * flat.shape[-1]))
    parts: list[Any] = [
        checkpoint(chunk_loss, chunk, target, use_reentrant=False)
        for chunk, target in zip(flat.split(step), targets.split(step), strict=True)
    ]
    count = (targets != IGNORE_INDEX).sum() if num_items is None else torch.as_tensor(num_items, device=flat.device)
    return torch.stack(parts).sum() / count.clamp(min=1)


def _tokens(given: dict[str, Any]) -> Any:
    """Return the tokens of a forward's keywords, ids or embeddings."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _check_chunks(config: Any, packed: PackedBatch) -> None:
    """Refuse a row whose documents this version of transformers would cut into chunks elsewhere than alone."""
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and packed.tokens > chunk and _documents(packed) > 1 and not chunks_follow_documents():
        raise UnsupportedError(
            f"a packed row of {packed.tokens:,} tokens is longer than attention_chunk_size = {chunk:,}, and this "
            "version of transformers counts chunks from the row's start, not from each document's",
            f"upgrade transformers, take rows of {chunk:,} tokens, or train unpacked: packing.enabled: false in a "
            "recipe, SFTConfig(packing=False) in a script",
        )


def _check_scaled_queries(config: Any, packed: PackedBatch) -> None:
    """Refuse a row of several documents that reaches to where queries are scaled by their place in the row."""
    first, tokens = scales_queries_from(config), packed.real_tokens
    if first is not None and _documents(packed) > 1 and tokens > first:
        raise UnsupportedError(
            f"a packed row holds documents of {tokens:,} tokens, and transformers scales queries of tokens beyond "
            f"{first:,} (config.floor_scale) by their place in the row, not in their document",
            f"take rows of {first:,} tokens at most, or train unpacked: packing.enabled: false in a recipe, "
            "SFTConfig(packing=False) in a script",
        )


def _documents(packed: PackedBatch) -> int:
    return len(packed.lengths) - (packed.padding > 0)
