"""Find a model's family, and take families from outside the package."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from pronghorn.errors import ConfigError, PronghornError, UnsupportedError
from pronghorn.families.gemma3 import GEMMA3
from pronghorn.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from pronghorn.families.generic import generic_spec
from pronghorn.families.glm4_moe import GLM4_MOE
from pronghorn.families.gpt_oss import GPT_OSS
from pronghorn.families.granite import GRANITE
from pronghorn.families.llama import LLAMA
from pronghorn.families.ministral import MINISTRAL
from pronghorn.families.ministral3 import MINISTRAL3
from pronghorn.families.mistral import MISTRAL
from pronghorn.families.mixtral import MIXTRAL
from pronghorn.families.olmo2 import OLMO2
from pronghorn.families.olmo3 import OLMO3
from pronghorn.families.olmoe import OLMOE
from pronghorn.families.phi3 import PHI3
from pronghorn.families.qwen2 import QWEN2
from pronghorn.families.qwen3 import QWEN3
from pronghorn.families.qwen3_5 import QWEN3_5
from pronghorn.families.qwen3_5_moe import QWEN3_5_MOE
from pronghorn.families.qwen3_moe import QWEN3_MOE
from pronghorn.families.qwen3_next import QWEN3_NEXT
from pronghorn.families.seed_oss import SEED_OSS
from pronghorn.families.smollm3 import SMOLLM3
from pronghorn.families.spec import FamilySpec

FAMILIES: dict[str, FamilySpec] = {
    spec.model_type: spec
    for spec in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_5, GEMMA3, GEMMA4, GEMMA4_UNIFIED, PHI3, SMOLLM3, OLMO2, OLMO3),
        *(MINISTRAL, MINISTRAL3, GRANITE, SEED_OSS),
        *(GPT_OSS, QWEN3_MOE, QWEN3_5_MOE, QWEN3_NEXT, MIXTRAL, OLMOE, GLM4_MOE),
    )
}


def register_family(spec: FamilySpec) -> None:
    """Serve models of another family from now on, in this process.

    Raises:
        ConfigError: another spec has this model type already.
    """
    if FAMILIES.get(spec.model_type, spec) != spec:
        raise ConfigError(
            f"model type {spec.model_type!r} is registered already ({FAMILIES[spec.model_type].members})",
            "give the family a model_type of its own",
        )
    FAMILIES[spec.model_type] = spec


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules by name; they register families from outside the package.

    Raises:
        ConfigError: a module that is missing or fails while it is imported.
    """
    for module in modules:
        try:
            import_module(module)
        except PronghornError:
            raise
        except Exception as error:  # whatever the module does
            raise ConfigError(
                f"model.plugins: {module!r} can't be imported ({type(error).__name__}: {error})",
                "install it, or add its folder to PYTHONPATH",
            ) from error


def family_of(config: Any) -> FamilySpec:
    """Find the family of a model's configuration; one without a file of its own is generic (`families.generic`).

    Raises:
        UnsupportedError: transformers has no causal LM of its model type, or it asks for something that packed
            attention can't isolate.
    """
    spec = FAMILIES.get(config.model_type)
    if spec is None:
        spec = generic_spec(config)
    served: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False, None), **spec.refused_options}
    if not spec.generic:  # whose attention has no such kernels
        served |= {"attention_dropout": (0, None), "attn_logit_softcapping": (None,)}
    for name, values in served.items():
        value = getattr(config, name, None)
        if value not in values:
            raise UnsupportedError(
                f"config.{name} = {value!r} is not served by packed attention",
                f"set config.{name} to {values[0]!r} if the model allows it",
            )
    return spec
