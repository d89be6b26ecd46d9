"""The model families Pronghorn serves, and where their parts live.

A family is listed once its packed forward and gradients are shown to equal one document at a time
(tests/parity/test_parity.py, tests/moe/test_moe_families.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pronghorn.data.batch import LONGEST_TAIL
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.families import generic
from pronghorn.families.registry import FAMILIES, family_of
from pronghorn.families.spec import Attention, FamilySpec, GatedMLP
from pronghorn.memory.plan import POLICY, Policy

check_config = family_of


def check_subject(model: nn.Module) -> None:
    """Refuse what is not a transformers causal LM: packed rows would give a classifier one answer for all documents.

    Raises:
        UnsupportedError: another head, a model without one, or PEFT's mixed adapters.
    """
    if any(kind.__name__ == "PeftMixedModel" for kind in type(model).__mro__):
        raise UnsupportedError("PeftMixedModel is not supported", "use get_peft_model without mixed=True")
    base: Any = base_causal_lm(model)
    names = {kind.__name__ for kind in type(base).__mro__}
    if not any(name.endswith("ForCausalLM") for name in names) and not names & _causal_lm_names(base):
        raise UnsupportedError(
            f"{type(base).__name__} is not a causal language model, and packed rows are made for these",
            "load it by FastLanguageModel (of one with towers, the language model), or train it by transformers alone",
        )


def _causal_lm_names(base: Any) -> set[str]:
    """Return the names of transformers' causal LMs of the model's type: older ones are called e.g. GPT2LMHeadModel."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(
        str(getattr(getattr(base, "config", None), "model_type", None)), ()
    )
    return {name} if isinstance(name, str) else set(name)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a causal LM, under PEFT's wrapper or not."""
    base = base_causal_lm(model)
    return generic.decoder_layers(base, base.config) if check_config(base.config).generic else base.base_model.layers


def set_attention(model: Any, name: str) -> None:
    """Let every attention of a causal LM look its function up under this name."""
    model.set_attn_implementation(name)
    for module in model.modules():
        if "config" in module.__dict__:  # of a layer that PEFT copied, a copy
            module.config._attn_implementation = name


def set_experts(model: Any, name: str | None) -> None:
    """Let all experts of a causal LM look their function up under this name."""
    model.set_experts_implementation(name)
    for module in model.modules():
        if "config" in module.__dict__ and module.config is not model.config:  # of experts that PEFT copied, a copy
            module.config._experts_implementation = model.config._experts_implementation


def has_experts(config: Any) -> bool:
    """Tell whether layers of this model route tokens to experts."""
    return bool(getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0))


def expert_counts(config: Any) -> list[int]:
    """List how many experts a layer has, by each of the names that configurations have for it."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return [count for name in names if (count := getattr(config, name, None)) is not None]


def balances_experts(config: Any, asked: bool | None = None) -> bool:
    """Tell whether a batch's loss is to hold the routers' auxiliary loss: as the call asks, else as the configuration.

    Granite 4's dense models have their siblings' configuration, for which TRL asks, and no router; Llama's and other
    dense ones may have its key in their `config.json`, which transformers doesn't read there.
    """
    wanted = getattr(config, "output_router_logits", False) if asked is None else asked
    told = expert_counts(config)
    family = FAMILIES.get(config.model_type)
    known = family is not None and family.source.startswith("transformers.")  # which count experts by these names
    return bool(wanted and (any(told) or not (told or known)))


def settle_balance(config: Any, kwargs: dict[str, Any]) -> bool:
    """Return what `balances_experts` tells of a call, and let its keywords say the same."""
    balanced = balances_experts(config, kwargs.get("output_router_logits"))
    if kwargs.get("output_router_logits", getattr(config, "output_router_logits", False)) != balanced:
        kwargs["output_router_logits"] = balanced
    return balanced


def is_causal(config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a forward's tokens see none after them: as its `is_causal` says, else the configuration's."""
    asked = kwargs.get("is_causal")
    return bool(getattr(config, "is_causal", True) if asked is None else asked)


def rope_limit(config: Any) -> int | None:
    """Return the tokens up to which RoPE's frequencies are always the same, or None where they always are.

    Beyond them they depend on a batch's longest position.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each kind of layer
    most = getattr(config, "max_position_embeddings", 0)
    limits = [most for kind in kinds if "dynamic" in str(kind.get("rope_type"))]
    limits += [
        kind.get("original_max_position_embeddings", most) for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def position_limits(config: Any) -> list[int]:
    """Return the lengths that no document of a row may exceed, as far as a configuration names any."""
    limits = [rope_limit(config), getattr(config, "max_position_embeddings", None)]
    return [limit for limit in limits if limit and limit > 0]


def longest_tail(config: Any) -> int:
    """Return the most padding that may lie as a document of its own behind a row's others."""
    return min([LONGEST_TAIL, *position_limits(config)])


def base_causal_lm(model: Any) -> Any:
    """Return the transformers causal LM inside a PEFT or data-parallel wrapper (or the model itself).

    Raises:
        ConfigError: a PEFT model whose adapters were all deleted.
    """
    if hasattr(model, "module") and not hasattr(model, "config"):
        model = model.module
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    if not model.peft_config:  # PEFT itself fails on such a model
        raise ConfigError(
            "the model's adapters were deleted (delete_adapter)",
            "go on with the base, which model.unload() returns, or add an adapter: model.add_adapter(NAME, CONFIG)",
        )
    return model.get_base_model()


def head_dims(model: Any) -> list[int]:
    """Return the sizes of a causal LM's attention heads, the smallest first: layers may differ."""
    family = check_config(model.config)
    blocks = ((layer, block) for layer in model.base_model.layers for block in family.blocks(layer))
    mixers = (layer.get_submodule(block.module) for layer, block in blocks if isinstance(block.kind, Attention))
    # somebody may have wrapped the module
    return sorted({next(part.head_dim for part in mixer.modules() if hasattr(part, "head_dim")) for mixer in mixers})


def mixer_of(layer: nn.Module, path: str) -> nn.Module:
    """Return a decoder layer's module by the family's path.

    Raises:
        UnsupportedError: it has none there: somebody put another module around the layer, or in its place.
    """
    try:
        return layer.get_submodule(path)
    except AttributeError:
        raise UnsupportedError(
            f"a decoder layer is a {type(layer).__name__}, which has no {path}",
            "leave the layers in their list: a hook (register_forward_hook) sees and changes what one gives",
        ) from None


def check_windows(backbone: Any) -> None:
    """Refuse attention whose modules hold another window than the configuration: transformers' flash follows the
    modules, its SDPA's masks the configuration, and padded batches these. SmolLM3's modules hold none, whatever
    `layer_types` say, unless `use_sliding_window` is true.

    Raises:
        UnsupportedError: names both windows, or a layer that isn't the family's.
    """
    config = backbone.config
    family, said = check_config(config), getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)  # None: a window is every layer's
    for index, layer in enumerate(backbone.layers):
        masked = kinds is None or [*kinds[index : index + 1]] == ["sliding_attention"]  # PEFT may add layers
        for block in family.blocks(layer):
            if not isinstance(block.kind, Attention):
                continue
            module = mixer_of(layer, block.module)
            held = getattr(module, "sliding_window", None)
            if held != said and (held is not None or (masked and hasattr(module, "sliding_window"))):
                problem = f"{type(module).__name__}.sliding_window is {held}, and the configuration's {said}"
                if kinds is not None and getattr(config, "use_sliding_window", None) is False:
                    raise UnsupportedError(
                        f"{problem}, beside use_sliding_window = False",
                        "copy the model's folder and set use_sliding_window to true in its config.json, or "
                        "sliding_window to null and each of layer_types to full_attention",
                    )
                raise UnsupportedError(
                    problem,
                    "set the configuration's before loading, which gives both: "
                    "config = AutoConfig.from_pretrained(...), config.sliding_window = ..., "
                    "from_pretrained(..., config=config)",
                )


def check_described(base: Any, family: FamilySpec) -> None:
    """Refuse a family from outside the package whose blocks name modules that aren't there, or leave weights out: a
    norm that no block names would not be computed.

    Raises:
        ConfigError: names the layer's class, and the path or the weight.
    """
    if family.generic or family.source.startswith("transformers."):
        return
    for layer in decoder_layers(base):
        blocks, name = family.blocks(layer), type(layer).__name__
        ends = [path for block in blocks for path in (*block.norms, block.dropout) if path is not None]
        parts = [part for block in blocks for part in (block.module, *block.linears)]
        parts += [block.path(block.kind.activation) for block in blocks if isinstance(block.kind, GatedMLP)]
        for path in (*parts, *ends):
            try:
                layer.get_submodule(path)
            except AttributeError as error:
                raise ConfigError(
                    f"the family {family.model_type!r} names {path!r}, which {name} has not", "correct its blocks"
                ) from error
        named = tuple(f"{path}." if path else "" for path in (*(block.module for block in blocks), *ends))
        left = [weight for weight, _ in layer.named_parameters() if not weight.startswith(named)]
        if left:
            raise ConfigError(
                f"the family {family.model_type!r} names no block or norm that holds {left[0]!r} of {name}",
                "name it in its blocks: what they don't name is not computed",
            )


def looks_tokens_up(backbone: Any) -> bool:
    """Tell whether a backbone has other embeddings besides its tokens', so that these alone don't make its output."""
    apart = backbone.layers, backbone.get_input_embeddings()
    others = (module for child in backbone.children() if child not in apart for module in child.modules())
    return any(isinstance(module, nn.Embedding) for module in others)


def recomputes_layers(model: nn.Module) -> bool:
    """Tell whether decoder layers, or parts of them, are recomputed in the backward pass (gradient checkpointing)."""
    parts = (Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP)
    return any(
        getattr(module, "gradient_checkpointing", False) or module.__dict__.get(POLICY) in parts
        for module in model.modules()
    )


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Leave transformers' gradient checkpointing out while the block runs."""
    recomputing = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in recomputing:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in recomputing:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def recompute_layers(model: Any, on: bool) -> None:
    """Switch gradient checkpointing, non-reentrant, by whichever name this transformers has for it."""
    if on == recomputes_layers(model):
        return
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        # transformers hooks the embeddings to require gradients, which only reentrant checkpointing needs, adds one
        # more at every call and leaves them behind: keep as many as there were.
        hooked = bool(getattr(model, "_require_grads_hooks", None))
        model.disable_input_require_grads()
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
        if not hooked:
            model.disable_input_require_grads()
    else:
        getattr(model, f"{name}_checkpointing_disable")()
