"""Policies put on a model's decoder layers, each on its own, and taken off again.

The place where they take hold is transformers' own: every decoder layer has a flag `gradient_checkpointing` and a
function `_gradient_checkpointing_func` that then runs its forward in training. Fused layers read
their policy from `_pronghorn_policy` and recompute their norms or their MLP themselves.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pronghorn.errors import TrainingError, UnsupportedError
from pronghorn.families.registry import family_of
from pronghorn.families.spec import FamilySpec
from pronghorn.memory.offload import OffloadEngine
from pronghorn.memory.plan import MLP_ROWS, POLICY, Plan, Policy
from pronghorn.memory.tiles import is_tiled_kind

INSTALLED = "_pronghorn_installed"
"""The attribute of a causal LM that holds what is installed on it."""
OUTPUT_NOT_WANTED = "_pronghorn_output_not_wanted"
"""The attribute of a layer's class whose forward takes `output_wanted=False`: a recomputation leaves the output out."""
WHOLE_LAYER = (Policy.RECOMPUTE_LAYER, Policy.OFFLOAD)
_ABSENT: Any = ...  # which stays itself in a copied model


@dataclass(eq=False)
class Installed:
    """A plan on one model, and the way back."""

    layers: list[Any]
    policies: tuple[Policy, ...]
    engine: OffloadEngine | None
    """None if no layer offloads."""
    flags: list[tuple[Any, bool]] = field(default_factory=list)
    """Modules with transformers' flag, and what the plan sets it to."""
    mlp_rows: int = 0
    """`Plan.mlp_rows`."""
    _before: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def counts(self, unfused: str | None = None) -> Counter[Policy]:
        """Count the layers by the policy that they follow now. `unfused`: why fused layers go transformers' way."""
        counts: Counter[Policy] = Counter()
        for layer, policy in zip(self.layers, self.policies, strict=True):
            off = policy in WHOLE_LAYER and not layer.gradient_checkpointing
            off |= policy is Policy.RECOMPUTE_NORMS and unfused is not None
            counts[Policy.KEEP if off else policy] += 1
        return counts

    def path(self, unfused: str | None = None) -> tuple[str, str]:
        """Say what layers do now, and why: a line of the report."""
        counts = self.counts(unfused)
        what = "; ".join(f"{n} of {len(self.layers)} layers: {policy}" for policy, n in counts.items())
        what = what if len(counts) > 1 else min(counts).value
        if self.mlp_rows and unfused is None:
            what += f"; MLPs in tiles of {self.mlp_rows:,} rows"
        if self.engine is not None and counts[Policy.OFFLOAD]:
            return what, self.engine.state
        if counts == Counter(self.policies):
            return what, "the plan"
        return what, unfused or "gradient checkpointing was switched off"

    def switch(self, on: bool) -> None:
        """Recompute layers as planned, or no layer as a whole."""
        for module, planned in self.flags:
            module.gradient_checkpointing = on and planned

    def uninstall(self) -> None:
        """Give every layer back what it had, and the host memory to the system."""
        while self._before:
            module, name, value = self._before.pop()
            if value is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
        if self.engine is not None:
            self.engine.release()

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an instance's attribute and remember what was there."""
        self._before.append((module, name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value


def policies_of(plan: Plan, family: FamilySpec, layers: Iterable[nn.Module], fused: bool) -> tuple[Policy, ...]:
    """Return a plan's policies for these layers.

    Args:
        fused: whether the layers recompute parts of themselves (`layers`).
    Raises:
        ConfigError: the plan was made for another number of layers.
        UnsupportedError: a policy that these layers can't follow.
    """
    layers = list(layers)
    policies = plan.by_layer(len(layers))
    if not fused and Policy.RECOMPUTE_NORMS in policies:
        raise UnsupportedError(
            f"'{Policy.RECOMPUTE_NORMS}' needs fused layers, which this model does not have",
            f"train on CUDA with layers='auto', or use '{Policy.RECOMPUTE_MLP}' or '{Policy.RECOMPUTE_LAYER}'",
        )
    if plan.mlp_rows and not (fused and all(is_tiled_kind(family.blocks(layer)) for layer in layers)):
        raise UnsupportedError(
            "an MLP in tiles of rows needs fused layers of attention and one gated MLP, which this model does not have",
            "leave memory.feed_forward out (experts and gated delta nets are computed as a whole)",
        )
    for layer, policy in zip(layers, policies, strict=True):
        if policy in WHOLE_LAYER and not hasattr(layer, "gradient_checkpointing"):
            raise UnsupportedError(
                f"{type(layer).__name__} can't be recomputed by transformers' gradient checkpointing", "use Plan.keep()"
            )
        if policy is Policy.RECOMPUTE_MLP:
            path = family.feed_forward(layer)
            if path is None:
                raise UnsupportedError(
                    f"{type(layer).__name__} has no MLP to recompute", f"use '{Policy.RECOMPUTE_LAYER}'"
                )
            if has_own_forward(layer.get_submodule(path)):
                raise UnsupportedError(
                    f"the forward of {type(layer).__name__}.{path} was replaced by something else",
                    f"use '{Policy.RECOMPUTE_LAYER}', or take that hook off",
                )
    return policies


def install(model: Any, layers: Iterable[nn.Module], plan: Plan, fused: bool = False) -> Installed:
    """Make each decoder layer of a causal LM follow the plan's policy for it.

    transformers' own switch is overruled: turned on by a trainer, it brings the plan's policies back; turned off, no
    layer is recomputed as a whole.

    Raises:
        ConfigError, UnsupportedError: as `policies_of`, before anything was changed.
    """
    layers, family = list(layers), family_of(model.config)
    policies = policies_of(plan, family, layers, fused)
    offloaded = [index for index, policy in enumerate(policies) if policy is Policy.OFFLOAD]
    engine = OffloadEngine(offloaded[-1], plan.buffers) if offloaded else None
    installed = Installed(layers, policies, engine, mlp_rows=plan.mlp_rows)
    whole = any(policy in WHOLE_LAYER for policy in policies)
    by_layer = dict(zip(layers, policies, strict=True))
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            policy = by_layer.get(module, Policy.RECOMPUTE_LAYER if whole else Policy.KEEP)  # the backbone has one, too
            installed.flags.append((module, policy in WHOLE_LAYER))
            installed.put(module, "gradient_checkpointing", policy in WHOLE_LAYER)
            installed.put(module, "_gradient_checkpointing_func", functools.partial(_recomputed, module))
    for index, (layer, policy) in enumerate(by_layer.items()):
        installed.put(layer, POLICY, policy)
        if plan.mlp_rows:
            installed.put(layer, MLP_ROWS, plan.mlp_rows)
        if policy is Policy.OFFLOAD:
            assert engine is not None
            installed.put(layer, "_gradient_checkpointing_func", functools.partial(_offloaded, layer, engine, index))
        elif policy is Policy.RECOMPUTE_MLP:
            path = family.feed_forward(layer)
            assert path is not None
            mlp: Any = layer.get_submodule(path)  # which a fused layer doesn't call, unless it goes transformers' way
            installed.put(mlp, "forward", types.MethodType(_checkpointed_forward, mlp))
    installed.put(model, INSTALLED, installed)
    installed.put(model, "_set_gradient_checkpointing", types.MethodType(_switched, model))
    return installed


def has_own_forward(module: Any) -> bool:
    """Tell whether somebody gave an instance a forward of its own; a plan's goes with the plan and is none."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not _checkpointed_forward


def _again(layer: Any) -> dict[str, Any]:
    """Return what a layer is told besides when it is recomputed."""
    return {"output_wanted": False} if getattr(type(layer), OUTPUT_NOT_WANTED, False) else {}


def _recomputed(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward in training, so that all it leaves for the backward pass is its input."""
    return checkpoint(_Twice(module, forward, _again(module)), *args, use_reentrant=False, **kwargs)


def _offloaded(layer: Any, engine: OffloadEngine, index: int, forward: Callable[..., Any], *args: Any) -> Any:
    """Run a layer's forward in training, so that its input waits for the backward pass in host memory."""
    return engine.checkpoint(index, _again(layer), _Twice(layer, forward, {}), *args)


class _Twice:
    """A forward that is run twice, `again` with more told. PEFT would use the adapters that are on then: others than
    the first time's are refused, since gradients would be wrong."""

    def __init__(self, module: Any, forward: Callable[..., Any], again: dict[str, Any]) -> None:
        self._module, self._forward, self._again = module, forward, again
        self._first: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = [
            (each.active_adapters, each.disable_adapters, each.merged)
            for each in self._module.modules()
            if "lora_A" in each._modules
        ]
        if self._first is None:
            self._first = now
            return self._forward(*args, **kwargs)
        if self._first != now:
            raise TrainingError(
                "adapters were switched between a forward and its backward, which computes layers again",
                "run the backward of every forward before adapters are switched",
            )
        return self._forward(*args, **kwargs, **self._again)


def _checkpointed_forward(mlp: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an MLP's forward as its class has it, and again in the backward pass of training.

    A method of the instance, so that a copy of the model gets a copy of it.
    """
    forward = functools.partial(type(mlp).forward, mlp)
    if not (mlp.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return _recomputed(mlp, forward, *args, **kwargs)


def _switched(model: Any, enable: bool = True, **_: Any) -> None:
    """Switch the plan: in the place of the method that transformers' `gradient_checkpointing_enable` and `_disable`
    end in, by whatever names this version has for them."""
    getattr(model, INSTALLED).switch(enable)
