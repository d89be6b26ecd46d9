"""Spike: a tiny Gemma 4 with shared keys and values and per-layer inputs, through the block interface, on the CPU.

    python benchmarks/spikes/gemma4_blocks.py

A family from outside: its kinds of blocks are defined here, in plain torch. k and v of the layer that makes them are
named outputs of its block and named inputs of the layers that reuse them. Trained under every policy; losses and
gradients are compared with transformers'.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.attention.masked import per_document_attention
from pronghorn.data.batch import Collator
from pronghorn.families.registry import register_family
from pronghorn.families.spec import FamilySpec, GatedMLP, ResidualBlock
from pronghorn.layers.block import Block, Call, Gradients, Result
from pronghorn.layers.decoder import is_fused
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach


class InputsOnly(NamedTuple):
    """x; the named inputs are the state."""

    x: Tensor


class PlainBlock(Block):
    """A block in plain torch, computed again in the backward: the slowest way, and the reference for faster ones."""

    Saved = InputsOnly
    linears = ()

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        trained: Sequence[Tensor],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
    ) -> None:
        self.function, self.trained = function, list(trained)
        self.inputs, self.outputs = inputs, outputs  # type: ignore[misc]

    def compute(self, x: Tensor, inputs: Sequence[Tensor], linears: Any, call: Call) -> Result:
        with torch.no_grad():
            y, *outputs = self.function(x, inputs, call)
        return Result(y, tuple(outputs), InputsOnly(x), tuple(inputs))

    def gradients(
        self, dx: Tensor, d_outputs: Any, saved: Any, state: Sequence[Tensor], linears: Any, call: Call, wanted: bool
    ) -> Gradients:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (saved.x, *state)]
            found = self.function(leaves[0], leaves[1:], call)
            pairs = [(y, dy) for y, dy in zip(found, (dx, *d_outputs), strict=True) if dy is not None]
            wrt = [*leaves, *self.trained]
            needed = [each for each in wrt if each.requires_grad]
            grads = iter(torch.autograd.grad([y for y, _ in pairs], needed, [dy for _, dy in pairs], allow_unused=True))
        every = [next(grads) if each.requires_grad else None for each in wrt]
        return Gradients(every[0], every[1 : len(leaves)], every[len(leaves) :])


class SharedAttention:
    """Gemma 4's attention: k and v may be another layer's."""

    linears = ()

    def build(self, builder: Any, layer: Any, block: ResidualBlock, dtype: torch.dtype) -> Block:
        attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
        kind = attention.layer_type

        def rotate(x: Tensor, call: Call) -> Tensor:
            half = call.cos.shape[1] // 2
            first, second = x[..., :half], x[..., half:]
            return x * call.cos[:, None] + torch.cat([-second, first], -1) * call.sin[:, None]

        def function(x: Tensor, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
            n, dim = norms[0](x), attention.head_dim
            q = rotate(attention.q_norm(attention.q_proj(n).view(len(n), -1, dim)), call)
            if attention.is_kv_shared_layer:
                k, v = inputs
            else:
                raw = attention.k_proj(n).view(len(n), -1, dim)
                k = rotate(attention.k_norm(raw), call)
                v = attention.v_norm(raw if attention.v_proj is None else attention.v_proj(n).view(len(n), -1, dim))
            mixed = per_document_attention(q, k, v, call.packed, 1.0, attention.sliding_window)
            y = x + norms[1](attention.o_proj(mixed.flatten(1)))
            return (y, k, v) if attention.store_full_length_kv else (y,)

        names = f"{kind} k", f"{kind} v"
        modules = attention, *norms
        trained = [p for module in modules for p in module.parameters()]
        inputs = names if attention.is_kv_shared_layer else ()
        return PlainBlock(function, trained, inputs, names if attention.store_full_length_kv else ())


class PerLayerInput:
    """x -> (x + norm(projection(act(gate(x)) * input of the layer))) * scalar."""

    linears = ()

    def build(self, builder: Any, layer: Any, block: ResidualBlock, dtype: torch.dtype) -> Block:
        def function(x: Tensor, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
            y = layer.per_layer_projection(layer.act_fn(layer.per_layer_input_gate(x)) * inputs[0])
            return ((x + layer.post_per_layer_input_norm(y)) * layer.layer_scalar,)

        modules = layer.per_layer_input_gate, layer.per_layer_projection, layer.post_per_layer_input_norm
        trained = [p for module in modules for p in module.parameters()]
        return PlainBlock(function, trained, ("per_layer_input",), ())


def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name what transformers gives a layer: its per-layer input, and k and v of the layers that shared theirs."""
    named = {"per_layer_input": args[0].flatten(0, 1)}
    for kind, (k, v) in kwargs["shared_kv_states"].items():
        named |= {f"{kind} k": k, f"{kind} v": v}
    return named


def emit(named: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Share k and v where transformers does: [T, H_kv, D] each."""
    for kind in {name[:-2] for name in named if name.endswith(" k")}:
        kwargs["shared_kv_states"][kind] = named[f"{kind} k"], named[f"{kind} v"]


GEMMA4 = FamilySpec(
    model_type="gemma4_text",
    members="Gemma 4 text (spike)",
    source="transformers.models.gemma4",
    blocks=lambda layer: (
        ResidualBlock("self_attn", SharedAttention(), before="input_layernorm", after="post_attention_layernorm"),
        ResidualBlock("mlp", GatedMLP(), before="pre_feedforward_layernorm", after="post_feedforward_layernorm"),
        ResidualBlock("per_layer_input_gate", PerLayerInput(), before="post_per_layer_input_norm"),
    ),
    bind=bind,
    emit=emit,
)


def main() -> None:
    """Compare every policy with transformers, one document at a time."""
    config = AutoConfig.for_model(
        "gemma4_text", vocab_size=131, vocab_size_per_layer_input=131, hidden_size=64, intermediate_size=88,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        hidden_size_per_layer_input=8, num_kv_shared_layers=3, sliding_window=5, max_position_embeddings=512,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    lengths = [9, 1, 14, 6]
    ids = torch.randint(3, 131, (sum(lengths),)).tolist()
    row = Collator(sum(lengths), 0)([{"input_ids": ids, "labels": list(ids), "lengths": lengths}])

    reference, total, start = copy.deepcopy(model), 0.0, 0
    for length in lengths:
        alone = row["input_ids"][:, start : start + length]
        if length > 1:
            logits = reference(input_ids=alone, use_cache=False).logits[0, :-1].float()
            total = total + torch.nn.functional.cross_entropy(logits, alone[0, 1:], reduction="sum")
        start += length
    expected: Any = total / row["packed"].n_labels  # type: ignore[operator]
    expected.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    register_family(GEMMA4)
    mixed = Plan(
        policies=tuple(
            [Policy.KEEP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD, Policy.RECOMPUTE_MLP] + [Policy.OFFLOAD] * 2
        )
    )
    plans = {policy.value: Plan(policies=(policy,)) for policy in Policy} | {"mixed": mixed}
    for name, plan in plans.items():
        ours = copy.deepcopy(model)
        attach(ours, plan, layers="fused")
        loss = ours(**row).loss
        assert all(map(is_fused, ours.model.layers)), "a layer took transformers' way"
        loss.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        found = {key: p.grad for key, p in ours.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        far = max(((found[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted)
        assert far < 1e-4, (name, far)
        print(f"{name}: loss {loss.item():.6f} = {expected.item():.6f}, {len(found)} gradients within {far:.1e}")


if __name__ == "__main__":
    main()
