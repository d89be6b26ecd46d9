"""Save a language model that was loaded out of a model with towers so that it loads where the original did.

adapters       under the whole model's names, for its language model's linears only
whole models   the original's files: its towers' tensors byte for byte, its processor, the language model's anew
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.merge import write_model
from pronghorn.export.original import composite_of
from pronghorn.loading.composite import Composite, by_pattern
from pronghorn.models.adapter_files import CONFIG, WEIGHTS
from pronghorn.models.families import base_causal_lm

_PEFT = "base_model.model."
"""What PEFT puts before the base's names."""


def keep_names(model: Any) -> None:
    """Make `save_pretrained` of a model out of one with towers, or of its adapter, write what loads where the original
    did, and loading back from it (`load_adapter`, `load_state_dict`) read that. Other models are left as they are."""
    composite = composite_of(model)
    if composite is None:
        return
    if hasattr(model, "peft_config"):
        model.save_pretrained = partial(_save_adapter, model, composite)
        model.load_adapter = partial(type(model).load_adapter, model, key_mapping=composite.adapter_names)
    elif "save_pretrained" not in model.__dict__:
        model.save_pretrained = partial(_save_whole, model)
        model.register_load_state_dict_pre_hook(partial(_rename_loaded, composite))


def _save_adapter(model: Any, composite: Composite, save_directory: str | Path, **options: Any) -> None:
    """Save an adapter as PEFT does, then give its tensors and modules the whole model's names."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import load_file, save_file

    if not options.get("safe_serialization", True):
        what = "save_pretrained of a model with towers writes safetensors alone"
        raise UnsupportedError(what, "leave out safe_serialization=False")
    if options.get("save_embedding_layers", "auto") == "auto":  # PEFT would look for the vocabulary in the wrong place
        base = base_causal_lm(model)
        resized = base.config.vocab_size != composite.text_config().vocab_size
        adapted = isinstance(base.get_input_embeddings(), BaseTunerLayer)
        options["save_embedding_layers"] = resized or adapted
    type(model).save_pretrained(model, save_directory, **options)
    if not options.get("is_main_process", True):
        return
    for name, config in model.peft_config.items():
        folder = Path(save_directory) / ("" if name == "default" else name)
        if not (folder / WEIGHTS).is_file():
            continue
        tensors = load_file(folder / WEIGHTS)  # copied: the file they lie in is written anew
        named = {f"{_PEFT}{composite.outside(k.removeprefix(_PEFT))}": each.clone() for k, each in tensors.items()}
        save_file(named, folder / WEIGHTS, {"format": "pt"})
        table = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        table["target_modules"] = _targets(model, composite, name)
        table["modules_to_save"] = _whole_modules(model, composite, name)
        for field, kind in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            if getattr(config, field, None):
                table[field] = _patterns(model, composite, name, field, kind)
        (folder / CONFIG).write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _targets(model: Any, composite: Composite, adapter: str) -> Any:
    """Return what finds an adapter's linears in the whole model and in the causal LM, and none of a tower: the targets
    themselves if they do, a pattern for their names beside the towers', or else every linear's name in both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = model.peft_config[adapter].target_modules
    layers = {name: m for name, m in base_causal_lm(model).named_modules() if isinstance(m, BaseTunerLayer)}
    inside = {
        name
        for name, layer in layers.items()
        if not hasattr(layer, "parameter_name") and any(adapter in getattr(layer, f) for f in layer.adapter_layer_names)
    }
    wanted = {composite.outside(name) for name in inside}
    everything = [name for name, _ in composite.whole.named_modules()]
    choices = [targets]
    if targets and not isinstance(targets, str):
        beside = "|".join(re.escape(f"{tower}.") for tower in composite.towers)
        ends = "|".join(map(re.escape, sorted(targets)))
        choices = [sorted(targets), rf"(?!{beside})(?:.*\.)?(?:{ends})"]
    for choice in choices:
        if {name for name in everything if _is_target(choice, name)} == wanted:
            return choice
    return sorted(inside | wanted)


def _whole_modules(model: Any, composite: Composite, adapter: str) -> list[str] | None:
    """Return what finds the modules that an adapter trains whole in the whole model: their names in `modules_to_save`
    if these find none of a tower, or else all names there."""
    from peft.utils import ModulesToSaveWrapper

    wanted = model.peft_config[adapter].modules_to_save
    modules = base_causal_lm(model).named_modules()
    wrappers = {name: module for name, module in modules if isinstance(module, ModulesToSaveWrapper)}
    own = {composite.outside(name) for name, module in wrappers.items() if adapter in module.modules_to_save}
    everything = [name for name, _ in composite.whole.named_modules()]
    if not own or {name for name in everything if name.endswith(tuple(wanted))} == own:
        return None if wanted is None else sorted(wanted)
    return sorted(own)


def _patterns(model: Any, composite: Composite, adapter: str, field: str, kind: str) -> dict[str, Any]:
    """Return what gives each adapter its rank or alpha in the whole model and in the causal LM: the patterns themselves
    if they do, or else all names in both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = model.peft_config[adapter]
    patterns, default = dict(sorted(getattr(config, field).items())), getattr(config, kind)  # sorted, as in files
    numbers: dict[str, Any] = {}
    for path, module in base_causal_lm(model).named_modules():
        own = getattr(module, kind, {}) if isinstance(module, BaseTunerLayer) else {}
        if adapter in own:
            name = ".".join([path.replace(".base_layer", ""), *filter(None, [getattr(module, "parameter_name", None)])])
            numbers |= dict.fromkeys((name, composite.outside(name)), own[adapter])
    if all(by_pattern(patterns, name, default) == number for name, number in numbers.items()):
        return patterns
    return {name: number for name, number in numbers.items() if number != default}


def _is_target(targets: Any, name: str) -> bool:
    """Tell whether PEFT would take a module for a target."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(f".{name}".endswith(f".{target}") for target in targets or ())


def _save_whole(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    max_shard_size: str = "50GB",
    **unsupported: Any,
) -> None:
    """Save the language model's weights among the original's tensors and files."""
    asked = sorted(name for name, value in unsupported.items() if value and name != "safe_serialization")
    if asked:
        where = "save_pretrained of a model with towers"
        raise UnsupportedError(f"{where} does not support {', '.join(asked)}", "leave it out")
    if is_main_process:
        folder = Path(save_directory)
        if folder.resolve() == Path(model.name_or_path).resolve():
            raise ConfigError(f"{folder} holds the towers that are to be saved", "give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_model(model, model.dtype, folder, max_shard_size)


def _rename_loaded(composite: Composite, model: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    """Give a state dict with the names of the whole model's files the causal LM's, and leave out the towers'."""
    own = model.state_dict().keys()
    for key in [] if prefix else [key for key in state_dict if key not in own]:
        tensor = state_dict.pop(key)
        name = composite.inside(key)
        if name is not None:
            state_dict[name] = tensor
