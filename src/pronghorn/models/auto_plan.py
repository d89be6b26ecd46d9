"""The plan for a model at hand: its shape and training read from it, times measured on it where it is on CUDA."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.data.batch import PackedBatch
from pronghorn.errors import UnsupportedError
from pronghorn.memory.devices import Card, card_of
from pronghorn.memory.estimate import CONTEXT_BYTES, GROUPS, Method, Shape, Work
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import plan
from pronghorn.memory.step_time import StepTimes, step_times
from pronghorn.models import fast
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import base_causal_lm, check_config
from pronghorn.models.merged import adapter_of, base_of

REPEATS = 5


def shape_of(model: Any) -> Shape:
    """The shape of a causal LM, which may be quantised, adapted, or without weights on the meta device.

    Raises:
        UnsupportedError: layers that aren't dense decoder layers.
    """
    base = base_causal_lm(model)
    config, layers = base.config, base.base_model.layers
    first = layers[0]
    if not hasattr(first.mlp, "gate_proj"):
        raise UnsupportedError(
            f"{type(first.mlp).__name__} has no plan: only dense models do", "choose gradient_checkpointing yourself"
        )
    linears = {name: _linear(first, name) for names in GROUPS for name in names}
    sizes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    small = sum(
        parameter.numel()
        for name, parameter in base.base_model.named_parameters()
        if parameter.dim() == 1 and "lora_" not in name
    )
    head_dim = fast.head_dim(config)
    return Shape(
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=sizes["gate_proj"][0],
        heads=sizes["q_proj"][0] // head_dim,
        kv_heads=sizes["k_proj"][0] // head_dim,
        head_dim=head_dim,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        norms=sum(type(module).__name__.endswith("RMSNorm") for module in first.children()),
        qk_norm=hasattr(first.self_attn, "q_norm"),
        parameters=len(layers) * sum(rows * columns for rows, columns in sizes.values()) + ends + small,
    )


def shape_of_config(config: Any) -> Shape:
    """The shape of a model by its configuration; no weights are made. Raises as `shape_of`."""
    from transformers import AutoModelForCausalLM

    check_config(config)
    with torch.device("meta"):
        return shape_of(AutoModelForCausalLM.from_config(config))


def work_of(model: Any, tokens: int, autocast: torch.dtype | None = None) -> Work:
    """How a model is about to be trained, with the adapters and the dtype that it has.

    Args:
        tokens: of a micro-batch.
        autocast: dtype of autocast, if any.
    """
    base = base_causal_lm(model)
    first = base.base_model.layers[0]
    linears = {name: _linear(first, name) for names in GROUPS for name in names}
    query = base_of(linears["q_proj"]).weight
    ranks = {}
    for name, linear in linears.items():
        adapter = adapter_of(linear)
        ranks[name] = 0 if adapter is None else adapter.a.shape[0]
    quantised = not query.dtype.is_floating_point
    method: Method = "full" if query.requires_grad and not any(ranks.values()) else "qlora" if quantised else "lora"
    embeddings = base.get_input_embeddings().weight
    whole = {id(p): p.numel() for name, p in base.named_parameters() if p.requires_grad and "lora_" not in name}
    return Work(
        tokens=tokens,
        method=method,
        ranks=ranks,
        itemsize=(autocast or embeddings.dtype).itemsize,
        fused=embeddings.is_cuda and fast.refusal(base, autocast) is None,
        trained_whole=0 if method == "full" else sum(whole.values()),
        graph=embeddings.is_cuda,
    )


def plan_for(
    model: Any,
    tokens: int,
    budget_bytes: int | None = None,
    *,
    autocast: torch.dtype | None = None,
    measure: bool = True,
) -> Plan:
    """What `auto` means on CUDA: everything kept where that fits, else the fastest plan that does.

    Args:
        model: on CUDA, with its adapters, before or after `attach`; its plan isn't changed.
        tokens: of a micro-batch: rows a step times max_seq_length.
        budget_bytes: of the process; None for what is free on the device now, and what this process holds.
        autocast: dtype that training will run under, if any.
        measure: where not everything fits, time a layer on the device; else, or if that runs out of memory, the table's
            rates are taken.
    Raises:
        PlanDoesNotFit: with what would fit.
    """
    device = base_causal_lm(model).device
    shape, work, card = shape_of(model), work_of(model, tokens, autocast), device_card(device)
    budget = budget_bytes
    if budget is None:
        budget = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + CONTEXT_BYTES
    made = plan(shape, work, card, budget)
    if not measure or set(made.policies) == {Policy.KEEP}:
        return made
    try:
        return plan(shape, work, card, budget, measured_times(model, shape, work, card, autocast))
    except torch.OutOfMemoryError:  # two layers that keep everything may be more than what is planned
        logging.getLogger(__name__).warning("measuring two layers ran out of memory: planned by the card's rates")
        return made


def device_card(device: torch.device) -> Card:
    """The card of a CUDA device, with its memory."""
    properties = torch.cuda.get_device_properties(device)
    return card_of(properties.name, properties.total_memory)


def measured_times(model: Any, shape: Shape, work: Work, card: Card, autocast: torch.dtype | None = None) -> StepTimes:
    """The card's estimate scaled by one layer's times, keeping everything, and the copy of its input, measured.

    The backbone runs with one layer and with two; the difference is a layer's. Takes about a second; gradients, random
    state and the model are left as they were.
    """
    base, handle = base_causal_lm(model), attached(model)
    given = None if handle is None else (handle.plan, handle.options[3])
    handle = attach(model, Plan.keep(), graph="off") if handle is None else handle.replan(Plan.keep(), graph="off")
    try:
        with torch.cuda.device(base.device), torch.autocast("cuda", autocast, enabled=autocast is not None):
            return _measure(base, shape, work, card)
    finally:
        if given is None:
            handle.detach()
        else:
            handle.replan(*given)
        torch.cuda.empty_cache()  # what the allocator keeps would be in training's way


def _measure(base: Any, shape: Shape, work: Work, card: Card) -> StepTimes:
    device, backbone = base.device, base.base_model
    lengths = [work.documents] * (work.tokens // work.documents) + [work.tokens % work.documents]
    packed = PackedBatch.build([n for n in lengths if n], tokens=work.tokens, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    dtype = torch.float32 if work.method == "full" else base.get_input_embeddings().weight.dtype
    layers = backbone.layers
    times = []
    with torch.random.fork_rng(devices=[device]):
        states = torch.randn(1, work.tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
        try:
            for count in (1, 2):
                backbone.layers = nn.ModuleList(list(layers)[:count])
                trained = [p for p in backbone.layers.parameters() if p.requires_grad]
                times.append(_forward_backward(backbone, states, positions, packed, trained))
        finally:
            backbone.layers = layers
    forward, backward = (max(two - one, 1e-3) for one, two in zip(*times, strict=True))
    copy = 0.0
    if card.link:
        host = torch.empty(states.shape, dtype=dtype, pin_memory=True)
        copy = _milliseconds(lambda: host.copy_(states.detach(), non_blocking=True))
    return step_times(shape, work, card).scaled(forward, backward, copy)


def _forward_backward(
    backbone: Any, states: Tensor, positions: Tensor, packed: PackedBatch, trained: list[Tensor]
) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward, medians."""
    seed = torch.randn_like(states)
    found = []
    for _ in range(REPEATS + 2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        y = backbone(inputs_embeds=states, position_ids=positions, packed=packed, use_cache=False).last_hidden_state
        marks[1].record()
        torch.autograd.grad(y, [states, *trained], seed, allow_unused=True)
        marks[2].record()
        marks[2].synchronize()
        found.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
    forward, backward = (statistics.median(times) for times in zip(*found[2:], strict=True))
    return forward, backward


def _milliseconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found[1:])


def _linear(layer: Any, name: str) -> Any:
    return getattr(layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp, name)
