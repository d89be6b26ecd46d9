"""The class of an attached causal LM: a packed batch's loss from supervised tokens; other calls run the original."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.data.batch import PackedBatch
from pronghorn.data.media import refuse_media
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.families.registry import family_of
from pronghorn.layers.decoder import output_is_seen
from pronghorn.layers.subclass import subclass
from pronghorn.models import experts
from pronghorn.models.families import set_attention, settle_balance, without_checkpointing
from pronghorn.models.loss import packed_lm_loss
from pronghorn.models.metadata import LOSS_ROWS_ONLY
from pronghorn.models.unpadded import LABELS

PACKS = "_pronghorn_packs"
"""The attribute of the forwards made here and in `models.generic`; wrappers copy it or lead to it."""
_LOSS_OPTIONS = ("shift_labels", "ignore_index")
"""Keywords of transformers' cross-entropy which the losses computed here don't have."""


class _NewModel:
    """Make an instance for `copy`, which only calls this; `pickle`, which writes it out, is refused."""

    def __call__(self, kind: type, *args: Any) -> Any:
        return kind.__new__(kind, *args)

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "an attached model can't be pickled (torch.save, multiprocessing)",
            "save it with save_pretrained or torch.save(model.state_dict()), or detach it first",
        )


class PackedCausalLM:
    """Mixed into the class of an attached causal LM; marks it, and computes the loss of packed batches."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _NewModel(), *reduced[1:]

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, and in training mode, too, with a cache in every layer.

        Layers that recompute are given none there, and each new token would be computed without those before.
        """
        generates: Any = super()
        with without_checkpointing(self):
            return generates.generate(*args, **kwargs)

    @contextmanager
    def continuous_batching_context_manager(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Generate by continuous batching with the attention that the model had: transformers takes no other there."""
        attention = self.config._attn_implementation
        set_attention(self, self._pronghorn_handle.previous_attention)
        try:
            batches: Any = super()
            with batches.continuous_batching_context_manager(*args, **kwargs) as manager:
                yield manager
        finally:
            set_attention(self, attention)

    def packed_forward(
        self: Any,
        *args: Any,
        packed: PackedBatch,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None,
        return_dict: bool | None,
        **kwargs: Any,
    ) -> Any:
        """Run the backbone, then compute the loss of supervised rows. Logits are never built."""
        from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

        balanced = settle_balance(self.config, kwargs)
        told = kwargs.get("output_hidden_states", getattr(self.config, "output_hidden_states", False))
        # the last layer may leave unsupervised rows out, unless somebody looks at hidden states or routers' logits
        fewer = packed.loss_rows is not None and len(packed.loss_rows) < packed.tokens
        kwargs |= {"packed": packed, "use_cache": False, "return_dict": True}
        if fewer and not told and not balanced and not output_is_seen(self.base_model):
            kwargs[LOSS_ROWS_ONLY] = True
        outputs = self.base_model(*args, **kwargs)
        loss = packed_lm_loss(
            outputs.last_hidden_state,
            labels,
            packed,
            self.get_output_embeddings(),
            self.config.vocab_size,
            softcap=softcap_of(self.config),
            scale=family_of(self.config).logit_scale(self.config),
            num_items=num_items_in_batch,
        )
        result: Any = CausalLMOutputWithPast(loss=loss, hidden_states=outputs.hidden_states)
        if balanced:
            aux = experts.balancing_loss(self, outputs.router_logits, labels, packed, num_items_in_batch)
            loss = loss + self.config.router_aux_loss_coef * aux
            result = MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux, hidden_states=outputs.hidden_states)
        return result.to_tuple() if return_dict is False else result


def softcap_of(config: Any) -> float | None:
    """Return c of c · tanh(logits / c), where the configuration's class has such a field (Gemma): transformers computes
    nothing of what another model's conversion left in `config.json`."""
    name, kind = "final_logit_softcapping", config.__class__
    return getattr(config, name, None) if _declares(kind, name) else None


@functools.cache
def _declares(config_class: Any, name: str) -> bool:
    return hasattr(config_class, name) or name in inspect.signature(config_class.__init__).parameters


def has_own_loss(model: Any, keywords: Mapping[str, Any] | None = None) -> bool:
    """Tell whether a causal LM is to compute its loss itself: somebody gave it another `loss_function` than
    transformers' cross-entropy, or the forward's keywords are options of that one."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    asked = keywords is not None and any(keywords.get(name) is not None for name in _LOSS_OPTIONS)
    return asked or model.loss_function is not ForCausalLMLoss


def check_forward(model: Any) -> None:
    """Refuse to attach a causal LM whose forward was wrapped when it wasn't attached: the wrapper calls transformers'.

    TRL's trainers wrap it when they are made, accelerate for mixed precision when training begins.

    Raises:
        ConfigError: a wrapper that packed batches would not come through.
    """
    wrapper = model.__dict__.get("forward")
    if wrapper is not None and not hasattr(inspect.unwrap(wrapper, stop=lambda each: hasattr(each, PACKS)), PACKS):
        raise ConfigError(
            f"the forward of this {type(model).__name__} was wrapped before it was attached, by an earlier trainer "
            "perhaps, and packed rows would go past Pronghorn",
            "load it by FastLanguageModel or attach it before the first trainer; or save it and load it again",
        )


@functools.cache
def packed_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of `original` with the same forward signature, which transformers and TRL read."""
    names = [*inspect.signature(original.forward).parameters][1:]

    @functools.wraps(original.forward)
    def forward(
        self: Any,
        *args: Any,
        packed: PackedBatch | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        refuse_media("the batch", kwargs)
        given = {"packed": packed, "labels": labels, "num_items_in_batch": num_items_in_batch}
        # Triton launches on the current device, which need not be the model's.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            supervised = packed is not None and packed.loss_rows is not None and labels is not None
            if supervised and not has_own_loss(self, kwargs):
                return self.packed_forward(*args, **given, return_dict=return_dict, **kwargs)
            kwargs |= {name: value for name, value in given.items() if value is not None}
            settle_balance(self.config, kwargs)
            told = self.base_model.__dict__
            if packed is None:
                told[LABELS] = dict(zip(names, args, strict=False)).get("labels", labels)
            try:
                return original.forward(self, *args, return_dict=return_dict, **kwargs)
            finally:
                told.pop(LABELS, None)

    setattr(forward, PACKS, True)
    return subclass(original, PackedCausalLM, forward=forward)
