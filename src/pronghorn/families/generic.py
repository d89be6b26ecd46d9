"""Describe a model of which no file of this package knows anything but what its configuration and module tree say.

Its layers run as transformers' own. Whether the documents of a packed row stay apart in them is not looked up here but
proven on the loaded model, before the first step (`models.probe`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pronghorn.errors import UnsupportedError
from pronghorn.families.spec import FamilySpec


def generic_spec(config: Any) -> FamilySpec:
    """Make the description of a model type that has no file in `families`.

    Raises:
        UnsupportedError: transformers has no causal LM of this type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise UnsupportedError(
            f"transformers has no causal language model of the model type {config.model_type!r}",
            "give a model that AutoModelForCausalLM loads without remote code",
        )
    capped = getattr(config, "attn_logit_softcapping", None)
    return FamilySpec(
        model_type=config.model_type,
        members=name if isinstance(name, str) else name[0],
        blocks=lambda layer: (),
        source=f"transformers.models.{config.model_type}",
        embeddings="",
        head="",
        load_attention="eager" if capped else None,  # SDPA has no soft-cap
        generic=True,
    )


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def decoder_layers(model: nn.Module, config: Any) -> nn.ModuleList:
    """Find a model's decoder layers: of the lists of as many modules as the configuration has layers, the largest.

    Raises:
        UnsupportedError: the model holds no list of modules.
    """
    count = getattr(text_config(config), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UnsupportedError(f"{type(model).__name__} has no list of decoder layers", "train it without Pronghorn")
    return max([each for each in lists if len(each) == count] or lists, key=_parameters)


def expert_counts(layer: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the paths and sizes of what in a decoder layer may be a list of experts: modules in a list, or one
    parameter of three dimensions."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            yield path, len(module)
        elif not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() == 3 and len(parameter) > 1:
                    yield path, len(parameter)


def routes(layers: Iterable[nn.Module]) -> bool:
    """Tell whether tokens may go to experts in some layer: by `expert_counts`, or by a module's name (DBRX's experts
    lie in one matrix). Their products' shapes, and so their roundings, depend on all tokens of a batch."""
    layers = list(layers)
    named = any("expert" in path for layer in layers for path, _ in layer.named_modules())
    return named or any(True for layer in layers for _ in expert_counts(layer))


TOLD = ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern")
"""Limits that attention modules tell their function with each call, so that it holds whatever mask there is."""
COMPUTED = ("mamba_chunk_size", "chunk_size", "max_inference_chunksize")
"""Chunks that states are computed by, which limit nothing."""
CHOSEN = ("index_topk",)
"""What names begin with that say how many tokens an indexer chooses for each query: its choice comes as a mask."""


def limits_to_cross(config: Any) -> dict[str, int]:
    """List the windows and chunks of tokens that a configuration names, and how many tokens its indexers choose."""
    numbers = {name: value for name, value in text_config(config).to_dict().items() if type(value) is int and value > 1}
    words = ("window", "chunk", *CHOSEN)
    return {name: n for name, n in numbers.items() if any(word in name for word in words) and "layer" not in name}


def scales_queries_from(config: Any) -> int | None:
    """Return how many tokens of a row come before the first whose queries are scaled by its place, or None.

    Llama 4's layers without RoPE scale queries at every `floor_scale` tokens, and transformers counts those of the row,
    whatever `position_ids` say: documents are scaled as alone only where none is.
    """
    floor: int | None = getattr(config, "floor_scale", None)
    if not floor or not getattr(config, "attn_temperature_tuning", False) or all(config.no_rope_layers):
        return None
    return floor - 1


@functools.cache
def chunks_follow_documents() -> bool:
    """Tell whether the chunks of transformers' masks begin anew with each document of a packed row. Older versions
    (5.17) count them from the row's start, and cut documents elsewhere than alone.

    A mask of two documents is asked for, of 1 and 2 tokens, in chunks of 2: the last token must see the one before it.
    """
    from transformers import PreTrainedConfig

    config: Any = PreTrainedConfig()
    config.attention_chunk_size, config._attn_implementation = 2, "sdpa"
    try:
        from transformers.masking_utils import create_chunked_causal_mask

        mask = create_chunked_causal_mask(
            config=config,
            inputs_embeds=torch.zeros(1, 3, 1, device="cpu"),
            attention_mask=None,
            past_key_values=None,
            position_ids=torch.tensor([[0, 0, 1]], device="cpu"),
        )
    except (ImportError, TypeError):  # a version that makes its masks otherwise: nothing is known of them
        return False
    return mask is not None and bool(mask[0, 0, 2, 1])


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
