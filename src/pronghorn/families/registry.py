"""Find a model's family, and take families from outside the package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from pronghorn.errors import ConfigError, PronghornError, UnsupportedError
from pronghorn.families.generic import generic_spec
from pronghorn.families.spec import FamilySpec

DROPOUTS = ("attention_dropout", "residual_dropout")
"""Fields of configurations that say what layers drop in training. Fused layers drop nothing."""


def _described() -> Iterator[FamilySpec]:
    """Yield the families that files beside this one describe."""
    for file in iter_modules([str(Path(__file__).parent)]):
        if file.name != "registry":
            values = vars(import_module(f"pronghorn.families.{file.name}")).values()
            yield from (value for value in values if isinstance(value, FamilySpec))


FAMILIES: dict[str, FamilySpec] = {spec.model_type: spec for spec in _described()}


def register_family(spec: FamilySpec) -> None:
    """Support models of another family from now on, in this process.

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


def dropout_of(config: Any) -> str | None:
    """Say what dropout keeps a configuration's layers from being fused; None if that is nothing, or no file knows them
    anyway."""
    spec = FAMILIES.get(config.model_type)
    if spec is None or not spec.serves(config):
        return None
    return ", ".join(f"{name} = {value}" for name in DROPOUTS if (value := getattr(config, name, None))) or None


def without_dropout(config: Any) -> None:
    """Let layers that are made of a configuration drop nothing in training."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def why_generic(config: Any) -> str:
    """Say why a generic family's layers are transformers' own."""
    dropout = dropout_of(config)
    if dropout is None:
        return f"no family file knows {config.model_type}"
    return (
        f"config.{dropout}, and fused layers have no dropout; they are fused without it (model.dropout: false, "
        "dropout=False in scripts)"
    )


def family_of(config: Any) -> FamilySpec:
    """Find the family of a model's configuration; one without a file of its own is generic (`families.generic`), and so
    are layers with dropout.

    Raises:
        UnsupportedError: transformers has no causal LM of its model type, or it asks for something that packed
            attention can't isolate.
    """
    spec = FAMILIES.get(config.model_type)
    if spec is None or not spec.serves(config):
        spec = generic_spec(config)
    elif dropout_of(config):
        spec = replace(spec, generic=True, blocks=lambda layer: ())
    served: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False, None), "is_causal": (True, None)}
    served |= spec.refused_options
    if not spec.generic:  # whose attention has no such kernels
        served |= {"attn_logit_softcapping": (None,)}
    for name, values in served.items():
        value = getattr(config, name, None)
        if value not in values:
            raise UnsupportedError(
                f"config.{name} = {value!r} is not served by packed attention",
                f"copy the model's folder and set {name} to {json.dumps(values[0])} in its config.json, if the model "
                "allows it: its layers read it when they are made",
            )
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        part, scaled = kind.get("partial_rotary_factor"), kind.get("rope_type", "default")
        # an unscaled RoPE turns all of a head whatever is said; a scaled one of a part fails in transformers' layers
        if (
            part not in (None, 1)
            and scaled not in ("default", "proportional")
            and not spec.generic | spec.partial_rotary
        ):
            raise UnsupportedError(
                f"RoPE {scaled!r} with partial_rotary_factor {part}: transformers' {spec.model_type} turns whole heads",
                "leave partial_rotary_factor out of config.rope_parameters",
            )
    return spec
