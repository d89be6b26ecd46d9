"""Spike: residual blocks under FSDP2 on two gloo ranks, on the CPU; weights go back to shards between layers.

    python benchmarks/spikes/fsdp2_blocks.py

Frozen weights are sharded by FSDP2 a layer, adapters stay whole and are reduced by hand, once. A block asks its
gathered source for each product, forward and backward, and saves no weight: what FSDP2 frees after a layer is free.
"""

from __future__ import annotations

import functools
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.attention import explicit
from pronghorn.data.batch import Collator
from pronghorn.families.registry import family_of
from pronghorn.layers.attention import AttentionBlock
from pronghorn.layers.block import Block, Call, Norm
from pronghorn.layers.build import LayerBuilder
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.memory.plan import Policy
from pronghorn.models.lora import add_lora
from pronghorn.precision.source import Activation, LowRankGrad, WeightSource

WORLD, TOKENS = 2, 30
LENGTHS = [[9, 1, 14, 6], [12, 18]]


class GatheredSource(WeightSource):
    """The weights of linears as they are when a product is made: whole inside a layer, shards outside."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linears = linears

    def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
        y = torch.cat([x.dense @ linear.weight.t() for linear in self._linears], 1)
        return y if bias is None else y + bias

    def input_grad(self, dy: Activation, low_rank: LowRankGrad | None) -> Tensor:
        parts = dy.dense.split([linear.out_features for linear in self._linears], 1)
        dx = sum(part @ linear.weight for part, linear in zip(parts, self._linears, strict=True))
        return dx if low_rank is None else dx + low_rank.dya @ low_rank.a  # type: ignore[return-value]


class GatheredNorm(Norm):
    """A norm whose frozen weight is read from its module at each use."""

    def __init__(self, module: Any) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "eps", module.variance_epsilon)
        object.__setattr__(self, "offset", 0.0)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.module.weight  # type: ignore[attr-defined]


class BlockLayer(nn.Module):
    """A decoder layer that runs its blocks, for FSDP2 to wrap."""

    def __init__(self, layer: Any, builder: LayerBuilder) -> None:
        super().__init__()
        self.layer = layer
        self.blocks = builder.blocks(layer, torch.float32)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.before = GatheredNorm(  # type: ignore[attr-defined]
                layer.input_layernorm if isinstance(block, AttentionBlock) else layer.post_attention_layernorm
            )
            block.trained = [None if t is None or not t.requires_grad else t for t in block.trained]

    def forward(self, x: Tensor, call: Call) -> Tensor:
        for block in self.blocks:
            x = block(x, {}, call)  # type: ignore[operator,call-arg]
        return x


def build() -> tuple[Any, list[Tensor]]:
    """Make the model with adapters, and list these."""
    config = AutoConfig.for_model(
        "llama", vocab_size=131, hidden_size=64, intermediate_size=88, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = add_lora(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), r=8, lora_alpha=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model, [p for p in model.parameters() if p.requires_grad]


def loss_of(model: Any, layers: list[Any], rank: int) -> Tensor:
    """The loss of one rank's row through these layers."""
    ids = torch.randint(3, 131, (TOKENS,), generator=torch.Generator().manual_seed(rank)).tolist()
    row = Collator(TOKENS, 0)([{"input_ids": ids, "labels": list(ids), "lengths": LENGTHS[rank]}])
    base = model.get_base_model()
    embeds = base.model.embed_tokens(row["input_ids"])
    cos, sin = (x[0] for x in base.model.rotary_emb(embeds, row["position_ids"]))
    options = explicit.Options.choose("per_document", torch.empty(0, 16), row["packed"], 0.25, None)
    call = Call(row["packed"], cos, sin, Policy.KEEP, None, True, options)
    x = embeds[0]
    for layer in layers:
        x = layer(x, call)
    logits = base.lm_head(base.model.norm(x))
    labels = torch.cat([row["labels"][0, 1:], torch.tensor([-100])])
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def worker(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    dense, wanted = build()
    builder = LayerBuilder(family_of(dense.get_base_model().config), "per_document")
    whole = [BlockLayer(layer, builder) for layer in dense.get_base_model().model.layers]
    update_copies(whole)
    exact: Any = sum(loss_of(dense, whole, each) for each in range(WORLD))
    exact.backward()

    model, adapters = build()
    plain_source = FusedLinear._source
    try:  # the builder of a sharded model would choose this source itself
        FusedLinear._source = lambda self, storage, below: GatheredSource(self.bases)  # type: ignore[method-assign]
        layers = [BlockLayer(layer, builder) for layer in model.get_base_model().model.layers]
    finally:
        FusedLinear._source = plain_source  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=set(adapters), reshard_after_forward=True)
    frozen = [[p for p in layer.parameters() if not p.requires_grad] for layer in layers]
    seen: list[list[bool]] = []

    def note(layer: Any, *_: Any) -> None:
        seen.append(
            [all(hasattr(p, "device_mesh") for p in each.parameters() if not p.requires_grad) for each in layers]
        )

    for layer in layers:
        layer.layer.register_forward_hook(note)
        layer.register_forward_hook(functools.partial(note))
    update_copies(layers)
    loss = loss_of(model, layers, rank)
    assert seen, "no layer ran"
    for looked in seen:
        assert sum(not sharded for sharded in looked) <= 2, f"more than two layers are whole at once: {looked}"
    loss.backward()
    assert all(hasattr(p, "device_mesh") for group in frozen for p in group), "weights are not shards after a step"
    flat = torch.cat([p.grad.flatten() for p in adapters])  # one bucket, one reduction
    dist.all_reduce(flat)
    expected = torch.cat([p.grad.flatten() for p in wanted])
    far = ((flat - expected).norm() / expected.norm()).item()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item():.6f} = {exact.item():.6f}; adapters' gradients within {far:.1e} of one process's")
        print(f"layers whole at once, seen after each layer: {[sum(not s for s in looked) for looked in seen]}")
    assert far < 1e-5 and abs(total.item() - exact.item()) < 1e-3
    dist.barrier()
    dist.destroy_process_group()


def update_copies(layers: list[BlockLayer]) -> None:
    """Copy adapters into the products' operands, as `FusedLayers` does once a model forward."""
    for layer in layers:
        for block in layer.blocks:
            for linear in block.linears:  # type: ignore[union-attr]
                for target, source in linear.copies:
                    target.copy_(source)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(number,), nprocs=WORLD)
