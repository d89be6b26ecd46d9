"""Write a LoRA adapter as a GGUF file, which llama.cpp applies to its base (`--lora`).

llama.cpp adds alpha / r · B A x, with one alpha for all; what else scales an adapter is multiplied into its B.

Source: llama.cpp, convert_lora_to_gguf.py's file format and src/llama-adapter.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.export.adapter_layouts import active_adapter
from pronghorn.export.gguf import gguf_package, written_family
from pronghorn.export.gguf_tensors import changed, parts_of
from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.spec import Experts, GatedMLP
from pronghorn.layers.linears import adapter_of, variant_of
from pronghorn.loading.gguf import name_table
from pronghorn.models.adapter_files import changes_base
from pronghorn.models.experts import low_rank_factors, wrappers
from pronghorn.models.families import base_causal_lm

INSTEAD = "export it merged (--to gguf)"
_NOT_READ = (
    ("modules_to_save", "modules that were trained whole"),
    ("trainable_token_indices", "rows of new tokens"),
    ("use_dora", "DoRA"),
    ("lora_bias", "biases of adapters"),
    ("layer_replication", "repeated layers"),
)
"""Fields of PEFT's configuration that name what llama.cpp doesn't read in an adapter."""


def write_gguf_lora(model: Any, file: str | Path) -> Path:
    """Write the active adapter of a PEFT model, in float32.

    Args:
        model: left untouched.
        file: the file to write; an earlier one is replaced.
    Raises:
        ConfigError: the model has no adapter.
        UnsupportedError: a family that isn't written as GGUF, or an adapter with something that llama.cpp doesn't
            apply; names it, and says to merge.
    """
    gguf = gguf_package()
    name = active_adapter(model)
    config = model.peft_config[name]
    _check(config)
    base, file, alpha = base_causal_lm(model), Path(file), float(config.lora_alpha)
    family, form = written_family(base.config)
    writer = gguf.GGUFWriter(str(file), form.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    table = name_table(form.architecture, base.config.num_hidden_layers)
    experts = {*wrappers(model)}
    for path, own_a, own_b in _experts(base, name, form, family.experts, experts):
        named = table.get_name(path)
        if named is None:
            raise UnsupportedError(f"the adapter of {path} can't be written as GGUF", INSTEAD)
        writer.add_tensor(f"{named}.weight.lora_a", own_a.contiguous().numpy())
        writer.add_tensor(f"{named}.weight.lora_b", (own_b / alpha).contiguous().numpy())
    for path, module in base.named_modules():
        of_embeddings = name in getattr(module, "lora_embedding_A", ())
        if module in experts or not (of_embeddings or name in getattr(module, "lora_A", ())):
            continue
        adapter = None if of_embeddings else adapter_of(module)
        if adapter is None:
            raise UnsupportedError(f"the adapter of {path} can't be written as GGUF", INSTEAD)
        if (variant := variant_of(module, name)) is not None:
            raise UnsupportedError(
                f"llama.cpp applies W + s·B·A alone, and the adapter of {path} is {variant}", INSTEAD
            )
        b: Tensor = adapter.b.detach().float().cpu() * (adapter.scale * len(adapter.a) / alpha)
        a: Tensor = adapter.a.detach().float().cpu()
        # B makes the rows of a part, A reads its columns
        for part in parts_of(f"{path}.weight", table, base.config, family, form):
            if part.name == "output.weight" and base.config.tie_word_embeddings:
                why = "the head is tied, and the base's file has none"
                raise UnsupportedError(f"the adapter of {path} has no place in llama.cpp: {why}", INSTEAD)
            writer.add_tensor(f"{part.name}.lora_a", changed(Part(columns=part.columns), a).numpy())
            writer.add_tensor(f"{part.name}.lora_b", changed(Part(rows=part.rows), b).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _experts(
    base: Any, adapter: str, form: Gguf, kind: Experts, wanted: Collection[Any]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (path of experts' linears, A [E, r, in], B [E, out, r] times scale and r) of all experts' adapters."""
    for path, module in base.named_modules():
        if module not in wanted or adapter not in module.lora_A:
            continue
        experts = path.removesuffix(".base_layer")
        a, b = (factor.detach().float().cpu() for factor in low_rank_factors(module, adapter))
        b = b * (module.scaling[adapter] * a.shape[1])
        name = f"{experts}.{module.parameter_name}"
        parts = form.split(name, base.config)
        if name not in parts:  # made of the experts' matrices, [E, in, out]
            yield from ((own.removesuffix(".weight"), a, take(b.mT)) for own, take in parts.items())
        elif module.parameter_name == kind.gate_up:
            halves = zip(GatedMLP().gate_up, b.chunk(2, dim=1), strict=True)
            yield from ((f"{experts}.{own}", a, half) for own, half in halves)
        else:
            yield name, a, b


def _check(config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UnsupportedError(f"llama.cpp applies LoRA alone, not {kind}", INSTEAD)
    if config.bias != "none":
        raise UnsupportedError(f"llama.cpp doesn't read trained biases (bias: {config.bias})", INSTEAD)
    if changes_base(config):
        what = f"doesn't take an adapter's beginning out of the base (init_lora_weights: {config.init_lora_weights})"
        raise UnsupportedError(f"llama.cpp {what}", INSTEAD)
    for field, what in _NOT_READ:
        if getattr(config, field, None):
            raise UnsupportedError(f"llama.cpp doesn't read {what} in an adapter ({field})", INSTEAD)
