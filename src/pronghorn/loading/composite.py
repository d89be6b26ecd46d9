"""Checkpoints of a language model with towers (vision, audio): which of their tensors are the language model's.

    config.json's text_config  ->  the causal LM of its type, which is loaded, in that class's own names
    the checkpoint's tensors   ->  the language model's, renamed; all others stay in their files, unread

How a file's names become the composite's own is transformers' to say (its conversion mapping); where the language model
lies in the composite is read from the modules of both, on the meta device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pronghorn.errors import DataError, UnsupportedError
from pronghorn.families.registry import FAMILIES
from pronghorn.loading.packed_formats import ALSO_NAMED, FORMATS
from pronghorn.models.passes import short
from pronghorn.precision.loader import StoredTensor

_ENDS = {"bos_token_id", "eos_token_id", "tie_word_embeddings"}
"""Keys of a text_config that are meant where its class has no such fields."""
_REMEDY = "use a checkpoint of the language model alone"


@dataclass(frozen=True)
class Composite:
    """Where a causal LM lies in a model with towers, and under which names in its files."""

    config: Any
    """Of the whole model."""
    whole: Any
    """The whole model on the meta device."""
    names: dict[str, Any]
    """All its tensors."""
    outer: str
    """What the language model's names begin with in the whole model: `model.language_model.`"""
    inner: str
    """What the same names begin with in the causal LM: `model.`"""
    towers: tuple[str, ...]
    """Modules and parameters of the whole model that are no part of the language model, by their paths."""
    ignored: re.Pattern[str] | None
    """Finds tensors that checkpoints have and the classes don't (heads that predict several tokens)."""
    renamings: tuple[Any, ...]
    """transformers' rules from files' names to the whole model's."""

    @classmethod
    def of(cls, name: Any, config: Any) -> Composite | None:
        """Describe the model of a configuration; None where that is a language model's alone.

        Raises:
            UnsupportedError: its classes aren't transformers', or hold no causal LM of their own.
        """
        if "text_config" not in getattr(config, "sub_configs", {}):
            return None
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        whole, causal = _on_meta(name, config)
        names = whole.state_dict()
        outer, inner = _place(name, names, causal)
        own = set(causal.state_dict())
        outside = {f"{outer}{key.removeprefix(inner)}" if key.startswith(inner) else key for key in own}
        if not outside <= set(names):
            raise UnsupportedError(
                f"{name}: {type(whole).__name__} and {type(causal).__name__} name the language model's weights "
                f"differently ({min(outside - set(names))})",
                _REMEDY,
            )
        patterns = {each for model in (whole, causal) for each in model._keys_to_ignore_on_load_unexpected or ()}
        renamings = [rule for rule in get_model_conversion_mapping(whole) if isinstance(rule, WeightRenaming)]
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None
        towers = tuple(_towers(whole, outer, outside))
        return cls(config, whole, names, outer, inner, towers, ignored, tuple(renamings))

    def text_config(self) -> Any:
        """Return the language model's configuration, with what the whole model's says of it: a quantisation, and
        whether a head beside it is tied."""
        text = _text_config(self.config)
        if self.inner:
            text.tie_word_embeddings = bool(getattr(self.config, "tie_word_embeddings", text.tie_word_embeddings))
        stored = getattr(self.config, "quantization_config", None)
        if stored is not None:
            stored = stored if isinstance(stored, dict) else stored.to_dict()
            packed = stored.get("quant_method") in list(FORMATS)
            outer = (self.outer, self._outer_in_files())
            text.quantization_config = (
                {**stored, ALSO_NAMED: [_own_start(self.inner, each) for each in outer]}
                if packed
                else _renamed(stored, outer, self.inner)
            )
        text._name_or_path = self.config._name_or_path
        return text

    def name_in_whole(self, key: str) -> str:
        """Return the name that a tensor of a file has in the whole model, as far as no tensors are joined for it."""
        from transformers.core_model_loading import rename_source_key

        name, _ = rename_source_key(key, list(self.renamings), [], self.whole.base_model_prefix, self.names)
        return key if name not in self.names and key in self.names else name

    def outside(self, name: str) -> str:
        """Return the whole model's name of a causal LM's tensor."""
        return f"{self.outer}{name.removeprefix(self.inner)}" if name.startswith(self.inner) else name

    def inside(self, key: str) -> str | None:
        """Return the causal LM's name of a tensor of a file; None for those that aren't loaded.

        Raises:
            DataError: it is neither the language model's nor a tower's.
        """
        name = self.name_in_whole(key)
        in_language = name.startswith(self.outer)
        inside = f"{self.inner}{name.removeprefix(self.outer)}" if in_language else name
        if any(f"{name}.".startswith(f"{tower}.") for tower in self.towers):
            return None
        if self.ignored is not None and any(map(self.ignored.search, (key, name, inside))):
            return None
        if in_language or name in self.names:  # the head isn't below `outer`
            return inside
        raise DataError(
            f"the checkpoint holds {key}, which has no place in {type(self.whole).__name__}",
            "configuration and weights must be of one model",
        )

    def language(self, source: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Yield the language model's tensors of a whole checkpoint, by the causal LM's names; nothing is read."""
        for stored in source:
            name = self.inside(stored.name)
            if name is not None:
                yield replace(stored, name=name)

    @property
    def adapter_names(self) -> dict[str, str]:
        """Return the patterns, and what replaces them, by which PEFT reads an adapter of the whole model."""
        return {f"^{re.escape(self.outer)}": self.inner}

    def adapt(self, config: Any, base: Any) -> None:
        """Make the configuration of an adapter of the whole model, which PEFT alone may have trained, name the causal
        LM's modules, too: `language_model.*q_proj` finds none, and a rank or alpha by a full name would be passed over.
        """
        from peft.tuners.tuners_utils import check_target_module_exists

        if not hasattr(config, "target_modules"):
            return
        names = [name for name, _ in base.named_modules() if name]
        places = {name: self.outside(name) for name in names}
        whole = getattr(config, "modules_to_save", None) or []
        lost = [each for each in whole if not any(name.endswith(each) for name in names)]
        if found := [name for name in names if places[name].endswith(tuple(lost))]:
            config.modules_to_save = [*(each for each in whole if each not in lost), *found]
        inside = {name for name in names if check_target_module_exists(config, name)}
        outside = {name for name in names if check_target_module_exists(config, places[name])}
        if outside - inside:
            config.target_modules = inside | outside
            config.exclude_modules = None
            if hasattr(config, "layers_to_transform"):
                config.layers_to_transform = config.layers_pattern = None
        places |= {name: self.outside(name) for name, _ in base.named_parameters()}
        for field in ("rank_pattern", "alpha_pattern"):
            patterns = getattr(config, field, None) or {}
            wanted = {name: by_pattern(patterns, place, None) for name, place in places.items()}
            own = {n: v for n, v in wanted.items() if v is not None and v != by_pattern(patterns, n, None)}
            if own:
                setattr(config, field, {**own, **patterns})  # PEFT takes the first that matches

    def _outer_in_files(self) -> str:
        """Return what the language model's names begin with in files that transformers writes."""
        from transformers.core_model_loading import revert_weight_conversion

        name = next(name for name in self.names if name.startswith(self.outer) and name.endswith("norm.weight"))
        (key,) = revert_weight_conversion(self.whole, {name: self.names[name]})
        return key.removesuffix(name.removeprefix(self.outer))


def by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return what the first of an adapter's patterns that matches a module's name gives, as PEFT looks for it."""
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(tuple(patterns), name), default)


def _own_start(inner: str, outer: str) -> tuple[str, str]:
    """Return how names begin in the causal LM and in the whole: the head's, too, where the whole has the LM's names."""
    return ("", outer.removesuffix(inner)) if f".{outer}".endswith(f".{inner}") else (inner, outer)


def _renamed(value: Any, outer: tuple[str, ...], inner: str) -> Any:
    """Return a quantization_config in whose names and patterns of modules one of `outer` is replaced by `inner`."""
    if isinstance(value, dict):
        return {key: _renamed(item, outer, inner) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, outer, inner) for item in value]
    for prefix in outer if isinstance(value, str) else ():
        value = value.replace(prefix, inner).replace(re.escape(prefix), re.escape(inner))
    return value


def _on_meta(name: Any, config: Any) -> tuple[Any, Any]:
    """Make the whole model and the causal LM of its text_config on the meta device."""
    import transformers
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM._model_mapping
    architecture = (getattr(config, "architectures", None) or [None])[0]
    if architecture is None:
        raise UnsupportedError(
            f"{name}: transformers has no causal language model of the model type {config.model_type!r}, and the "
            "configuration names no architecture",
            _REMEDY,
        )
    kind = getattr(transformers, architecture, None)
    if kind is None or getattr(kind, "config_class", None) is not type(config):
        raise UnsupportedError(f"{name}: transformers has no {architecture} for its configuration", _REMEDY)
    text = _text_config(config)
    if type(text) not in kinds or kinds[type(text)].config_class is not type(text):
        raise UnsupportedError(
            f"{name}: transformers has no causal language model of the type {text.model_type!r}, the text_config of "
            f"{architecture}",
            "train a model whose text_config has a ForCausalLM class of its own",
        )
    try:
        with torch.device("meta"):
            return kind._from_config(config), kinds[type(text)]._from_config(text)
    except Exception as error:  # a package that isn't there, or whatever a class raises on a configuration
        raise UnsupportedError(
            f"{name}: {architecture} can't be made here ({type(error).__name__}: {short(error)})",
            f"install what it needs, or {_REMEDY}",
        ) from error


def _text_config(config: Any) -> Any:
    """Return a copy of the language model's configuration, as the family's that computes it on text."""
    from transformers import AutoConfig

    text = copy.deepcopy(config.get_text_config())
    family = next((spec for spec in FAMILIES.values() if text.model_type in spec.as_text_of), None)
    if family is None:
        return text
    fields = text.to_dict()
    rope = fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    known = type(AutoConfig.for_model(family.model_type))().to_dict().keys() - {"model_type", "transformers_version"}
    known &= type(text)().to_dict().keys() | _ENDS  # what else its config.json may hold it doesn't compute by
    return AutoConfig.for_model(family.model_type, **{key: fields[key] for key in known & fields.keys()})


def _place(name: Any, names: Collection[str], causal: Any) -> tuple[str, str]:
    """Return what the language model's names begin with in the whole model and in the causal LM: the one place where
    all of them are, with the head or without."""
    backbone = next(path for path, module in causal.named_children() if module is not causal.get_output_embeddings())
    for inner in ("", f"{backbone}."):
        own = [key.removeprefix(inner) for key in causal.state_dict() if key.startswith(inner)]
        places = [key.removesuffix(own[0]) for key in names if key.endswith(f".{own[0]}")]
        places = [outer for outer in places if all(f"{outer}{key}" in names for key in own)]
        if len(places) == 1:
            return places[0], inner
    raise UnsupportedError(f"{name}: no {type(causal).__name__} to be found in it", _REMEDY)


def _towers(whole: Any, outer: str, language: set[str]) -> Iterator[str]:
    """Yield the paths beside the language model and above it whose tensors aren't the language model's."""
    path, module = "", whole
    for step in outer.removesuffix(".").split("."):
        tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        for key, _ in (*module.named_children(), *tensors):
            if key != step and not any(f"{each}.".startswith(f"{path}{key}.") for each in language):
                yield f"{path}{key}"
        path, module = f"{path}{step}.", getattr(module, step)
