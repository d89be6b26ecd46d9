"""Make the plan for a model at hand: sizes and training are read from it, times measured on it where it is on CUDA."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn

from pronghorn.device import processes
from pronghorn.errors import UnsupportedError
from pronghorn.families.layer_spec import layer_spec, linear_modules
from pronghorn.families.spec import Attention, Experts, ExpertsBeside, GatedDelta, GatedMLP, PerLayerInput
from pronghorn.kernels.fp8_blocks import has_own_codes
from pronghorn.kernels.packed import PackedTensor
from pronghorn.layers.decoder import FusedLayers
from pronghorn.layers.linears import active_adapters, adapter_of, base_of
from pronghorn.memory.devices import DeviceSpec, device_spec
from pronghorn.memory.estimate import CONTEXT_BYTES, Method, ModelDims, TrainSetup
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import PlanDoesNotFit, plan
from pronghorn.memory.step_time import StepTimes
from pronghorn.models import experts
from pronghorn.models.attach import Handle, attached
from pronghorn.models.attach_options import chooses_codes
from pronghorn.models.causal_lm import softcap_of
from pronghorn.models.families import base_causal_lm, check_config, has_experts
from pronghorn.models.loss import logits_bytes
from pronghorn.models.measured_layer import measured_times as measured_times
from pronghorn.optimizers import TrainedTensor, state_bytes
from pronghorn.parallel.sharded import sharded
from pronghorn.precision.compute import Compute

T = TypeVar("T")
LESS = 0.04
"""Of what a plan was to take, which ran out of memory, the next one leaves out. Peaks were within 1.2 % of plans."""


def dims_of(model: Any) -> ModelDims:
    """Read the sizes of a causal LM, which may be quantised, adapted, or without weights on the meta device.

    Raises:
        UnsupportedError: a model that no plan is made for (`refusal`).
    """
    base = base_causal_lm(model)
    reason = refusal(base)
    if reason is not None:
        raise UnsupportedError(f"no plan is made: {reason}", "choose memory.gradient_checkpointing yourself")
    family, config = check_config(base.config), base.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    tables = config.vocab_size * config.hidden_size * (1 if tied else 2)
    named = base.base_model.named_parameters()
    others = sum(p.numel() for name, p in named if _is_beside(name, p, family.embeddings))
    layers = tuple(layer_spec(family, layer) for layer in base.base_model.layers)
    return ModelDims(layers, config.vocab_size, tables + others, tied)


def _is_beside(name: str, parameter: torch.Tensor, embeddings: str) -> bool:
    """Tell whether a backbone's parameter lies outside its layers and its tokens' embeddings, and is no copy."""
    if name.startswith("layers.") or "lora_" in name:
        return False
    return parameter.dim() == 1 or not (name.startswith(f"{embeddings}.") or "modules_to_save." in name)


def refusal(model: Any, fused: bool = True) -> str | None:
    """Say why no plan is made for a causal LM, or None.

    Experts and gated delta nets are counted only as Pronghorn computes them, in packed batches and with fused
    attention; other layers than those of one mixer and one gated MLP, or experts, are not counted.
    """
    base = base_causal_lm(model)
    family = check_config(base.config)
    if family.generic:
        return f"what layers of {base.config.model_type} keep is not known"
    for layer in base.base_model.layers:
        for block in family.blocks(layer):
            if not all(_reaches(layer, path) for path in block.linears):  # PEFT's adaption prompt is around attention
                return f"what {type(layer.get_submodule(block.module)).__name__} keeps is not known"
    layers = [[block.kind for block in family.blocks(layer)] for layer in base.base_model.layers]
    kinds = {tuple(map(type, layer)) for layer in layers}
    for layer in kinds - _COUNTED:
        return f"what layers of {', '.join(kind.__name__ for kind in layer)} keep is not counted"
    if all(map(_is_plain, layers)):
        return None
    routed = any(isinstance(kind, Experts) for layer in layers for kind in layer)
    if not fused:
        what = "attention beside its experts, or a gated delta net," if routed else "attention, or a gated delta net,"
        return f"{what} is not fused, or batches are padded"
    if not routed:
        return unfused_reason(base, None)
    if attached(base) is not None and base.config._experts_implementation != experts.NAME:
        return "its experts go transformers' way"
    reasons = (unfused_reason(base, None), *map(experts.refusal, experts.expert_modules(base)))
    return next((reason for reason in reasons if reason is not None), None)


def _reaches(layer: Any, path: str) -> bool:
    """Tell whether a layer has a module at a path, or beneath what was put around it."""
    try:
        return layer.get_submodule(path) is not None
    except AttributeError:
        return False


_COUNTED = {
    (Attention, GatedMLP),
    (Attention, Experts),
    (Attention, GatedMLP, PerLayerInput),
    (Attention, GatedMLP, ExpertsBeside),
    (GatedDelta, GatedMLP),
    (GatedDelta, Experts),
}
"""The kinds of blocks that layers have whose bytes are counted."""


def _is_plain(kinds: Sequence[Any]) -> bool:
    """Tell whether what transformers' own layer keeps is counted, too."""
    attention = kinds[0]
    if not isinstance(attention, Attention) or attention.gated:
        return False
    return len(kinds) == 2 and isinstance(kinds[1], GatedMLP) and not (attention.value_norm or attention.reads)


def unfused_reason(model: Any, autocast: torch.dtype | None) -> str | None:
    """Say why a causal LM's layers would not be fused as they are now, or None."""
    return FusedLayers(model.base_model, check_config(model.config), "auto").reason(autocast)


class How(TypedDict, total=False):
    """How a model is about to be trained, as `setup_of` takes it."""

    autocast: torch.dtype | None
    """The dtype of autocast, if any."""
    padded: int
    """Rows of a micro-batch, if it is padded instead of packed."""
    accumulates: bool
    """Whether a step has several micro-batches."""
    optimizer: str
    """Its name, one of `OptimizerName`."""


def setup_of(
    model: Any,
    tokens: int,
    autocast: torch.dtype | None = None,
    padded: int = 0,
    accumulates: bool = True,
    optimizer: str = "adamw_torch_fused",
) -> TrainSetup:
    """Read how a model is about to be trained (`How`), with the adapters and the dtype that it has.

    Args:
        tokens: of a micro-batch.
    """
    base, handle = base_causal_lm(model), attached(model)
    family, ranks = check_config(base.config), dict[str, int]()
    for layer in base.base_model.layers:
        for path, linear in linear_modules(family, layer).items():
            adapter = adapter_of(linear)
            ranks[path] = max(ranks.get(path, 0), 0 if adapter is None else adapter.a.shape[0])
    linears = [x for layer in base.base_model.layers for x in linear_modules(family, layer).values()]
    weights = [base_of(linear).weight for linear in linears]
    adapted = [(linear, name) for linear in linears for name in active_adapters(linear)]
    # bitsandbytes keeps 4 bits as bytes; a packed weight has the dtype of the dense one
    packed, first = [weight for weight in weights if isinstance(weight, PackedTensor)], weights[0]
    own_codes = bool(packed) and all(map(has_own_codes, packed))
    quantised = not first.dtype.is_floating_point
    full = any(weight.requires_grad for weight in weights) and not any(ranks.values())
    method: Method = "full" if full else "qlora" if quantised else "lora"
    embeddings = base.get_input_embeddings().weight
    distributed = processes() > 1
    whole = {id(p): p.numel() for name, p in base.named_parameters() if p.requires_grad and "lora_" not in name}
    # before `attach` a model on CUDA is counted as it will be
    fuses = not padded and (embeddings.is_cuda if handle is None else handle.fuses)
    fused = fuses and unfused_reason(base, autocast) is None
    fp8 = fused and handle is not None and handle.options.compute.in_8_bits
    layers = handle.layers if fuses and handle is not None and handle.options.compute.in_8_bits else None
    fp8_experts = False
    if layers is not None and has_experts(base.config):
        fp8_experts = layers.experts_reason(autocast or embeddings.dtype) is None
    states, paged = state_bytes(optimizer, trained_tensors(model))
    # processes that average whole gradients have all of them at once; those that share trained layers sum into parts
    shared = sharded(base)
    parts = shared is not None and method == "full"
    adapters = (p.element_size() for name, p in base.named_parameters() if p.requires_grad and "lora_" in name)
    softcap = softcap_of(base.config)
    setup = TrainSetup(
        tokens=tokens,
        method=method,
        ranks=ranks,
        expert_rank=max((max(wrapper.r.values()) for wrapper in experts.wrappers(base)), default=0),
        itemsize=(autocast or embeddings.dtype).itemsize,
        fp8=fp8,
        fp8_forward=handle is None or handle.options.compute.forward_in_fp8,
        int8=fp8 and handle is not None and handle.options.compute is Compute.INT8,
        fp8_experts=fp8_experts,
        expert_bytes=experts.packed_bytes(base),
        linear_bytes=_bytes_a_number(weights) if packed else None,
        own_codes=own_codes,
        codes="kept" if layers is None or handle is None or not chooses_codes(layers) else handle.options.codes,
        written_out="auto" if handle is None else handle.options.experimental.written_out,
        fused=fused,
        dropout=any(type(linear.lora_dropout[name]) is not nn.Identity for linear, name in adapted),
        dora=any(name in linear.lora_variant for linear, name in adapted),
        trained_whole=0 if method == "full" else sum(whole.values()),
        logits_bytes=logits_bytes(base.get_output_embeddings(), base.config.vocab_size, tokens, softcap),
        graph=fuses and autocast is None and (handle is None or handle.options.graph != "off"),
        padded=padded,
        accumulates=accumulates or (distributed and not parts),
        distributed=distributed,
        adapter_itemsize=max(adapters, default=4),
        master_bytes=weights[0].element_size() if full and shared is None else 4,
        optimizer_bytes=states,
        paged_bytes=paged,
        processes=1 if shared is None else shared.processes,
        copy_trained=parts and shared is not None and bool(shared.mapped_bytes),
    )
    trained = sum(p.numel() for name, p in base.named_parameters() if p.requires_grad and (full or "lora_" in name))
    expected = sum(setup.trained(layer_spec(family, layer)) for layer in base.base_model.layers)
    if full:
        expected = sum(parameter.numel() for parameter in base.parameters())
    return replace(setup, trained_share=trained / expected) if expected else setup


def trained_tensors(model: Any) -> list[TrainedTensor]:
    """List a model's trained tensors, as far as their optimiser's states depend on them."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = (p for p in model.parameters() if p.requires_grad)
    return [TrainedTensor(p.numel(), p.element_size(), id(p) in tables) for p in trained]


def _bytes_a_number(weights: list[Any]) -> float:
    stored = sum(each.stored_bytes if isinstance(each, PackedTensor) else each.nbytes for each in weights)
    return stored / sum(each.numel() for each in weights)


def resolve(handle: Handle, rows: int, row_tokens: int, *, packs: bool, **how: Unpack[How]) -> Plan | None:
    """Return an attached model's plan; make it now where `auto` waited for the size of a micro-batch.

    That is `rows` times `row_tokens` (0: unknown). Models on the CPU or several devices recompute their layers. What no
    plan is made for (`refusal`) keeps everything until memory runs out, which the trainer survives by recomputing
    (`train.oom_retry`); it recomputes from the beginning where there is a budget, or other processes would wait.

    Args:
        packs: rows are packed, not padded.
        how: all but `padded`.
    Raises:
        PlanDoesNotFit: with what would.
    """
    model, asked, tokens = handle.model, handle.plan, rows * row_tokens
    together = len({parameter.device for parameter in model.parameters()}) == 1
    if asked is None or not asked.undecided or not tokens or not together or model.device.type != "cuda":
        return asked
    if refusal(model, fused=packs and handle.fuses) is not None:
        tries = asked.budget_bytes is None and not asked.mlp_rows and processes() == 1
        return handle.replan(Plan.keep()).plan if tries else asked
    how["padded"] = 0 if packs else rows
    return handle.replan(plan_for(model, tokens, asked.budget_bytes, mlp_rows=asked.mlp_rows, **how)).plan


def plan_for(
    model: Any, tokens: int, budget_bytes: int | None = None, *, mlp_rows: int = 0, **how: Unpack[How]
) -> Plan:
    """Decide what `auto` means on CUDA: everything kept where that fits, else the fastest plan that does.

    It goes by a layer's times as measured; by the table's where batches are padded, or there is no room to measure
    (which is logged). Several processes make the same plan, for the least memory that one of them has: each step waits
    for the slowest.

    Args:
        model: on one CUDA device, with its adapters, before or after `attach`; its plan isn't changed.
        tokens: of a micro-batch: rows a step times max_seq_length.
        budget_bytes: of the process; None for all that `available` tells, which is the most.
        mlp_rows: of the tiles that MLPs are to be computed in (`Plan.mlp_rows`).
    Raises:
        PlanDoesNotFit: with what would fit.
    """
    device = base_causal_lm(model).device
    dims, setup = dims_of(model), setup_of(model, tokens, **how)
    spec = smallest_device(device)
    shared = sharded(base_causal_lm(model))
    room = available(device, 0 if shared is None else shared.mapped_bytes)
    budget = min(_everywhere(min(room, budget_bytes or sys.maxsize)))
    asked = Plan((Policy.RECOMPUTE_LAYER,), mlp_rows=mlp_rows, undecided=True)
    # by the table first: where everything can be kept no time matters
    made = plan(dims, setup, spec, budget, asked=asked)
    if how.get("padded") or (set(made.policies) == {Policy.KEEP} and not made.codes_written):
        return made
    try:
        times: StepTimes | None = measured_times(model, dims, setup, spec, how.get("autocast"))
    except torch.OutOfMemoryError:
        times = None
    measured = _everywhere(times)
    if None in measured:  # all go by the table then, and else by the first process's times: plans must be equal
        logging.getLogger(__name__).warning("no memory to time a layer in: planned by the %s", spec.source)
        return made
    return plan(dims, setup, spec, budget, measured[0], asked)


def smaller_plan(model: Any, tokens: int, made: Plan, **how: Unpack[How]) -> Plan | None:
    """Make the fastest plan for `LESS` less memory than one that ran out of it, and for no more than there is now.

    By the device's estimate: nothing runs. None where the plan was asked for and not made, or nothing fits.

    Args:
        made: the plan that ran out.
        tokens, how: as `plan_for` took them.
    """
    if "process" not in made.predicted:
        return None
    device = base_causal_lm(model).device
    budget = min(int((1 - LESS) * made.predicted["process"]), available(device))
    asked = Plan((Policy.RECOMPUTE_LAYER,), mlp_rows=made.mlp_rows, undecided=True)
    setup = setup_of(model, tokens, **how)
    try:
        return plan(dims_of(model), setup, cuda_device_spec(device), budget, asked=asked)
    except PlanDoesNotFit:
        return None


def _everywhere(value: T) -> list[T]:
    """Return the value of each process, in the order of ranks."""
    if processes() == 1:
        return [value]
    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, value)
    return found


def available(device: torch.device, mapped: int = 0) -> int:
    """Return the bytes that this process may take of a CUDA device: what is free and what it holds.

    It is no more than its share (`torch.cuda.set_per_process_memory_fraction`).

    Args:
        mapped: of weights that lie outside torch's allocator (`ShardedLayers.mapped_bytes`).
    """
    free, total = torch.cuda.mem_get_info(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(min(free + torch.cuda.memory_reserved(device), share) + mapped + CONTEXT_BYTES, total)


def smallest_device(device: torch.device) -> DeviceSpec:
    """Return the one that plans are made for: the smallest of all processes' GPUs, each of which calls it."""
    return min(_everywhere(cuda_device_spec(device)), key=lambda spec: (spec.memory_bytes, spec.matmul, spec.name))


def cuda_device_spec(device: torch.device) -> DeviceSpec:
    """Look up a CUDA device, with its memory."""
    properties = torch.cuda.get_device_properties(device)
    found = device_spec(properties.name, properties.total_memory)
    return replace(found, pcie=0.0) if properties.is_integrated else found
