"""The experts of transformers' mixture-of-experts layers, computed by `moe.experts`, and PEFT's LoRA on them.

transformers asks a registered function for the output of each experts module; ours groups tokens once and reads the
parameters where they lie. PEFT adapts 3-dimensional parameters (`target_parameters`) by a wrapper that folds W + ΔW for
all experts in every forward; `enable` gives the wrappers a class that hands A and B over instead. Names and layouts of
what is saved stay transformers' and PEFT's: `lora_A` [E·r, in] is expert-major, `lora_B` [out, r·E] expert-minor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.parametrize import is_parametrized

from pronghorn.data.batch import PackedBatch
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.errors import UnsupportedError
from pronghorn.families.registry import FAMILIES
from pronghorn.families.spec import ACTIVATIONS
from pronghorn.families.spec import Experts as ExpertsKind
from pronghorn.kernels.grouped_codes import choose_coded
from pronghorn.kernels.grouped_gemm import choose
from pronghorn.kernels.moe_glu import Gate
from pronghorn.kernels.nf4_experts import NF4Tensor
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.build import watched
from pronghorn.layers.expert_codes import codes_for
from pronghorn.layers.linears import products_dtype
from pronghorn.layers.subclass import own_class, subclass
from pronghorn.models.families import set_experts
from pronghorn.moe.experts import Experts, LowRank, experts
from pronghorn.moe.route import route
from pronghorn.precision.compute import Compute

Routing = Literal["once", "loop"]
NAME = "pronghorn_experts"
"""What the function is called in transformers' registry."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HELD = "_pronghorn_lora"
"""The attribute of an experts module that holds adapters during a call, by the thread that calls and the weight."""


@dataclass(frozen=True)
class ExpertLayers:
    """What `enable` did to one model."""

    model: Any
    previous: str | None
    """The experts implementation it had."""
    refused: str | None
    """Why the experts stay transformers'."""

    def paths(self, dtype: torch.dtype, compute: Compute = Compute.DTYPE) -> list[tuple[str, str, str]]:
        """List (part, path, why) for the report, with products in that dtype, or frozen ones in 8 bits."""
        implementation = self.model.config._experts_implementation
        if implementation != NAME:
            why = self.refused or "ablation: tokens are looked up again for each expert"
            return [("experts", f"transformers' {implementation}", why)]
        module = next(expert_modules(self.model))
        way, why = choose(weights(module)[0].device, dtype, _sizes(module))
        if isinstance(weights(module)[0], PackedTensor) and way != "loop":
            way, why = "triton", "weights in 4 bits are written out, a few experts at a time"
        products = f"products by {way}"
        adapted = list(wrappers(self.model))
        if compute.in_8_bits and self._fold_reason(adapted) is None:
            integers = compute is Compute.INT8
            way, why_coded = choose_coded(weights(module)[0].device, _sizes(module), integers)
            in_8_bits = f"products in {'8-bit integers' if integers else 'FP8'} by {way}"
            if compute.forward_in_8_bits:
                products, why = in_8_bits, why_coded
            else:
                products, why = f"forward {products}, input gradients' {in_8_bits}", f"{why}; in FP8: {why_coded}"
        lines = [("experts", f"routed once, {products}", why)]
        if adapted:
            folds = self._fold_reason(adapted)
            path = "folded into the weights by PEFT" if folds else "low-rank products beside the experts'"
            lines.append(("expert LoRA", path, folds or "A and B are read from PEFT's parameters"))
        return lines

    def _fold_reason(self, adapted: list[Any]) -> str | None:
        if any(len(_active(wrapper)) > 1 for wrapper in adapted):
            return "several adapters are active at once"
        if any(wrapper.num_experts == 1 for wrapper in adapted):
            return "there is one expert"
        late = not all(map(own_class, adapted))  # read as factors, but torch's parametrize folds them to check itself
        return "the adapter came after attach: attach again" if late else None

    def adopt(self) -> None:
        """Give PEFT's wrappers, those too that came since, the class that hands A and B over."""
        if self.model.config._experts_implementation == NAME:
            for wrapper in wrappers(self.model):
                own: Any = type(wrapper)
                if own_class(wrapper) is None:
                    wrapper.__class__ = wrapper_class(own)

    def disable(self) -> None:
        """Undo `enable`, but for wrappers' classes (`subclass.restore`)."""
        set_experts(self.model, self.previous)


def enable(model: Any, routing: Routing) -> ExpertLayers | None:
    """Route a causal LM's experts `once`, or by transformers' own `loop` (for ablations); None without experts."""
    modules = list(expert_modules(model))
    if not modules:
        return None
    refused = next((reason for reason in map(refusal, modules) if reason is not None), None)
    layers = ExpertLayers(model, model.config._experts_implementation, refused)
    if routing == "loop":
        set_experts(model, "eager")
    elif refused is None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        register(ALL_EXPERTS_FUNCTIONS)
        set_experts(model, NAME)
        layers.adopt()
    return layers


def register(registry: Any) -> None:
    """Make our function known to transformers' registry of experts' implementations, under `NAME`."""
    if NAME not in registry.valid_keys():
        registry.register(NAME, _forward)


def expert_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that transformers' `use_experts_implementation` made switchable.

    PEFT's wrapper around experts that are trained whole has what these have, but for their class's functions.
    """
    marks = ("is_concatenated", "is_transposed", "num_experts")
    gated = (module for module in model.modules() if hasattr(type(module), "_apply_gate"))
    return (module for module in gated if all(hasattr(module, mark) for mark in marks))


def index_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """Return the indices [T, K] that an experts module was called with."""
    index: Tensor = keywords.get("top_k_index", keywords.get("router_indices", (*arguments, None, None)[1]))
    return index


def weight_names(model: nn.Module) -> list[str]:
    """List the parameters that an adapter can be put on, as PEFT's `target_parameters` match them."""
    modules = set(expert_modules(model))
    named = [(name, module) for name, module in model.named_modules() if module in modules]
    return [f"{name}.{weight}" for name, module in named for weight in _weight_names(module)]


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of all experts of a model without adapters, by their names."""
    return ((name, model.get_parameter(name)) for name in weight_names(model))


def packed_bytes(model: nn.Module) -> float | None:
    """Return the bytes of a number of the experts' weights, or None where they are dense or there are none."""
    first = next((weights(module)[0] for module in expert_modules(model)), None)
    return first.stored_bytes / first.numel() if isinstance(first, PackedTensor) else None


def _kind(module: Any) -> ExpertsKind:
    """Return what the family of an experts module says of it."""
    family = FAMILIES.get(module.config.model_type)
    return ExpertsKind() if family is None else family.experts


def _weight_names(module: Any) -> tuple[str, str]:
    kind = _kind(module)
    return kind.gate_up, kind.down


def low_rank_factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Return A [E, r, in] and B [E, out, r] of one of a PEFT wrapper's adapters, views of its parameters."""
    a, b, count = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.num_experts
    return a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1)


def refusal(module: Any) -> str | None:
    """Say why a module's experts can't be computed here, or None."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return f"{type(module).__name__} is not gate, up and down"
    if getattr(module, "_is_expert_parallel", False):
        return "experts are spread over ranks"
    if any(hasattr(weight, "device_mesh") for weight in weights(module)):
        return "the experts are sharded"
    for weight in weights(module):
        if weight.dim() != 3 or weight.dtype not in _DTYPES or (weight.is_cuda and weight.dtype is torch.float64):
            return f"the experts are {str(weight.dtype).removeprefix('torch.')} [{weight.dim()} dimensions]"
    if gate(module) is None:
        return f"the activation of {type(module).__name__} has no kernel"
    activation = getattr(module, _kind(module).activation, None)  # which is computed here, and not called
    if isinstance(activation, nn.Module) and watched([activation]):
        return f"the activation of {type(module).__name__} carries hooks, or a forward of its own"
    return None


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute experts as transformers calls them: hidden [T, H], indices and weights [T, K] to [T, H]."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch.compile can't trace Pronghorn's experts",
            "leave it out (generate() with a static cache: disable_compile=True), or detach the model first",
        )
    reason = refusal(module)
    if reason is not None:
        raise UnsupportedError(f"since attach, {reason}", "detach, change the model, then attach again")
    (gate_up, gate_up_lora, gate_up_bias), (down, down_lora, down_bias) = low_rank_weights(module)
    dtype = products_dtype(gate_up)
    codes = codes_for(module, gate_up, down)
    if not module.is_transposed:
        gate_up, down = (
            weight.turned() if isinstance(weight, NF4Tensor) else weight.transpose(1, 2) for weight in (gate_up, down)
        )
    activation = gate(module)
    assert activation is not None
    layer = Experts(gate_up, down, activation, gate_up_bias, down_bias, gate_up_lora, down_lora, codes)
    way, _ = choose(hidden_states.device, dtype, _sizes(module))
    with torch.autocast(hidden_states.device.type, enabled=False):  # the function chooses every dtype itself
        routing = route(top_k_index, module.num_experts)
        out = experts(hidden_states.to(dtype).contiguous(), top_k_weights, routing, layer, way)
    return out.to(hidden_states.dtype)


def balancing_loss(
    model: Any, router_logits: tuple[Tensor, ...], labels: Tensor, packed: PackedBatch, num_items: Tensor | int | None
) -> Tensor:
    """Compute the family's own auxiliary loss (`load_balancing_loss_func`), not yet times its coefficient.

    Tokens of documents without a label don't count (the padded tail is one). A batch counts by its share of the
    labels, as its cross-entropy does, so that accumulated batches sum to one auxiliary loss, where transformers sums
    one for each.

    Args:
        router_logits: [T, E] of each layer; labels: int64 [1, T], unshifted, -100 where nothing is predicted.
        num_items: the supervised tokens of the accumulated batch; None for this batch's own.
    Raises:
        UnsupportedError: no layer has a router, or the family has no such loss.
    """
    if not router_logits:  # transformers' own function fails then
        raise UnsupportedError(
            f"{type(model).__name__} is to have an auxiliary loss, and no layer of it routes tokens to experts",
            "set config.output_router_logits to false",
        )
    upto = pad((labels.flatten() != IGNORE_INDEX).cumsum(0), (1, 0))
    counts = upto[packed.cu_seqlens[1:]] - upto[packed.cu_seqlens[:-1]]
    counted = (counts > 0)[packed.document_ids]
    if not packed.n_labels:  # the mean over no tokens would be NaN
        return router_logits[0].sum() * 0
    aux = _balancing_loss(model, router_logits, counted)
    return aux if num_items is None else aux * (packed.n_labels / num_items)


def leave_tail_out(model: Any, outputs: Any, packed: PackedBatch) -> Any:
    """Return what a model's own forward gave of a packed row, its auxiliary loss without the padded tail's tokens."""
    aux, coefficient = getattr(outputs, "aux_loss", None), getattr(model, "router_aux_loss_coef", None)
    if aux is None or coefficient is None or not packed.padding:
        return outputs
    counted = torch.arange(packed.tokens, device=aux.device) < packed.real_tokens
    outputs.aux_loss = _balancing_loss(model, outputs.router_logits, counted)
    if outputs.loss is not None:
        outputs.loss = outputs.loss + coefficient * (outputs.aux_loss - aux)
    return outputs


def _balancing_loss(model: Any, router_logits: tuple[Tensor, ...], counted: Tensor) -> Tensor:
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no auxiliary loss that we know", "set config.output_router_logits to false"
        )
    loss: Tensor = function(router_logits, model.num_experts, model.num_experts_per_tok, counted[None])
    return loss


def gate(module: Any) -> Gate | None:
    """Return the activation of an experts module; None for one that has no kernel."""
    formula, described = type(module)._apply_gate.__qualname__, _kind(module)
    if formula == described.clamped_gate:
        return Gate("clamped", float(module.alpha), float(module.limit))
    kind: Any = ACTIVATIONS.get(type(getattr(module, described.activation, None)).__name__)
    return Gate(kind) if kind and module.is_concatenated and formula == "_default_apply_gate" else None


def weights(module: Any) -> list[Tensor]:
    """Return gate_up and down as they are stored, without computing what PEFT has put around them."""
    return [
        module.parametrizations[name].original if is_parametrized(module, name) else getattr(module, name)
        for name in _weight_names(module)
    ]


def _sizes(module: Any) -> tuple[int, ...]:
    return tuple(size for weight in weights(module) for size in weight.shape[1:])


def _weight(module: Any, name: str) -> tuple[Tensor, LowRank | None]:
    """Return a weight as it is stored, and its adapter.

    The adapter is handed over by our wrapper, or read from PEFT's parametrization (one that came after attach). With
    several adapters at once it is the weight with all of them folded in.
    """
    chain: Any = module.parametrizations[name] if is_parametrized(module, name) else []
    if len(chain) != 1 or not all(hasattr(chain[0], part) for part in ("lhs", "rhs", "scaling")):
        return getattr(module, name), module.__dict__.get(_HELD, {}).get((get_ident(), name))
    left, right = chain[0].lhs, chain[0].rhs
    a, b = (left.transpose(1, 2), right.transpose(1, 2)) if module.is_transposed else (right, left)
    # the next forward's parametrization writes the same numbers into the weight, of which autograd then says that
    # it was changed if this forward's backward is still to come
    weight = chain.original if chain.original.requires_grad else chain.original.data
    return weight, LowRank(a, b, chain[0].scaling)


def low_rank_weights(module: Any) -> list[tuple[Tensor, LowRank | None, Tensor | None]]:
    """List gate_up and down as they are stored, each with its active adapter and its bias."""
    biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in _weight_names(module)]
    pairs = [_weight(module, name) for name in _weight_names(module)]
    return [(*pair, bias) for pair, bias in zip(pairs, biases, strict=True)]


def wrappers(model: nn.Module) -> Iterator[Any]:
    """Yield PEFT's wrappers around the weights of experts."""
    modules = set(expert_modules(model))
    for module in model.modules():
        wrapper: Any = module
        if hasattr(module, "parameter_name") and hasattr(module, "lora_A"):
            inner = wrapper.get_base_layer()
            if inner in modules and wrapper.parameter_name in _weight_names(inner):
                yield wrapper


def _active(wrapper: Any) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


@functools.cache
def wrapper_class(original: Any) -> type[nn.Module]:
    """Make a subclass of PEFT's ParamWrapper whose active adapter's A and B lie on the experts for one forward."""

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        mine = _active(self)
        module = self.get_base_layer()
        # Another implementation of the experts would not look for the adapter.
        if len(mine) != 1 or self.num_experts == 1 or module.config._experts_implementation != NAME:
            with original._activate_lora(self, active_adapters):
                yield
            return
        held, key = module.__dict__.setdefault(_HELD, {}), (get_ident(), self.parameter_name)
        held[key] = LowRank(*low_rank_factors(self, mine[0]), self.scaling[mine[0]])
        try:
            yield
        finally:
            del held[key]

    return subclass(original, _activate_lora=_activate_lora)
