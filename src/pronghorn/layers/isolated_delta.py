"""Gated delta nets that transformers calls, kept to documents.

transformers' own code for the convolution and the rule takes no documents' bounds. An attached model's modules get a
class whose forward of a packed batch computes these two by Pronghorn's kernels, and calls its linears and its norm; any
other batch goes transformers' way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.data.batch import PackedBatch
from pronghorn.errors import UnsupportedError
from pronghorn.families.spec import FamilySpec, GatedDelta
from pronghorn.kernels.gated_delta_forward import check_heads
from pronghorn.kernels.once import refuse_second_derivatives
from pronghorn.layers.gated_delta import DeltaNet, delta_net
from pronghorn.layers.subclass import subclass
from pronghorn.memory.recompute import has_own_forward


def delta_nets(backbone: Any, family: FamilySpec) -> list[tuple[nn.Module, GatedDelta]]:
    """List the gated delta nets of a model's layers.

    Raises:
        UnsupportedError: one's forward was replaced, and what is there now may mix documents; or the kernels don't
            take its heads.
    """
    blocks = [(layer, block) for layer in backbone.layers for block in family.blocks(layer)]
    nets = [(layer.get_submodule(b.module), b.kind) for layer, b in blocks if isinstance(b.kind, GatedDelta)]
    module: Any
    for module, _ in nets:
        own = f"{type(module).forward.__module__}.".startswith(f"{family.source}.")
        if not own or has_own_forward(module):
            raise UnsupportedError(
                f"{type(module).__name__} has another forward than transformers', which may mix documents",
                "take it off before attach, or train without packing and Pronghorn",
            )
        if module.A_log.device.type != "cpu":  # where plain torch computes any
            check_heads(module.head_k_dim, module.head_v_dim)
    return nets


def isolate_delta_nets(backbone: Any, family: FamilySpec) -> None:
    """Give a model's gated delta nets a class that keeps a packed batch's documents apart."""
    for module, kind in delta_nets(backbone, family):
        own: Any = type(module)
        module.__class__ = _isolated_class(own, kind)


@functools.cache
def _isolated_class(original: Any, kind: GatedDelta) -> type[nn.Module]:
    plain: Any = original.forward

    @functools.wraps(plain)
    def forward(self: Any, hidden_states: Tensor, *args: Any, packed: PackedBatch | None = None, **kwargs: Any) -> Any:
        if packed is None:
            return plain(self, hidden_states, *args, **kwargs)
        net, x = delta_net(self, kind), hidden_states.flatten(0, 1)
        if (device := next((str(each.device) for each in net.trained if each.device != x.device), None)) is not None:
            raise UnsupportedError(
                f"a packed row for {type(self).__name__}, of whose weights some are on {device} until they are called",
                "keep the whole model on its device (no cpu_offload, disk_offload or device_map), or don't pack",
            )
        qkvz, ba = (torch.cat([self.get_submodule(path)(x) for path in group], 1) for group in kind.inputs)
        qkv, z, b, a = net.layout.split(qkvz, ba)
        o = _Rule.apply(net, packed, qkv, b, a, *net.trained)
        normed = self.get_submodule(kind.norm)(o.flatten(0, 1), z.flatten(0, 1))
        y = self.get_submodule(kind.out)(normed.view(len(x), -1))
        return y.view(*hidden_states.shape[:-1], -1)

    return subclass(original, forward=forward)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, net: DeltaNet, packed: PackedBatch, qkv: Tensor, b: Tensor, a: Tensor, *trained: Tensor
    ) -> Tensor:
        with torch.autocast(qkv.device.type, enabled=False):
            o, saved = net.forward(qkv, b, a, packed)
        ctx.save_for_backward(qkv, b, a, *trained, *saved)
        ctx.net, ctx.packed = net, packed
        return o

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, do: Tensor) -> Any:
        tensors = ctx.saved_tensors
        (qkv, b, a), saved = tensors[:3], tensors[3 + len(ctx.net.trained) :]
        d_qkv, db, da, trained = ctx.net.backward(do.contiguous(), qkv, b, a, saved, ctx.packed)
        return None, None, d_qkv, db, da, *trained
