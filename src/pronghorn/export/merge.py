"""Merge a LoRA adapter into its base model and save the whole as a plain 16-bit checkpoint.

    W' = W + (alpha / r) · B A        computed in float32, rounded once to the checkpoint's dtype (`export.rounding`)

The training model is only read, and one shard of what is written lies in memory at a time. What was saved is loaded
again and its logits compared with the adapted model's: a merge that forgot the adapter, or put it in the wrong place,
is an error and leaves no folder behind.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import ConfigError, TrainingError, UnsupportedError
from pronghorn.export.folder import refuse_filled, save_tokenizer, whole_folder, write_index
from pronghorn.export.licences import copy_licences
from pronghorn.export.merged_weights import check_merges, dense_weight, merged_bias, merged_experts, merged_linear
from pronghorn.export.original import Original, composite_of
from pronghorn.export.rounding import round_merged
from pronghorn.kernels.packed import PackedTensor
from pronghorn.loading.skeleton import tied_names
from pronghorn.models.attach import plain_class
from pronghorn.models.families import base_causal_lm, has_experts
from pronghorn.models.passes import in_evaluation
from pronghorn.parallel.state import refuse_sharded
from pronghorn.parity.distance import MERGED_LOGITS, relative_error
from pronghorn.precision.loader import StoredTensor, load

_ROOM = 2**30
"""Bytes beside the weights that a forward of a few tokens takes, with room."""


def save_merged(
    model: Any, tokenizer: Any, folder: str | Path, *, dtype: torch.dtype | None = None, max_shard_size: str = "5GB"
) -> Path:
    """Save `model`, a PEFT model with LoRA adapters (or a plain model), as one merged checkpoint.

    Args:
        model: left untouched.
        tokenizer: saved beside the weights; None saves none.
        folder: where to; must be empty, or not be there.
        dtype: of the checkpoint; None means the base's own 16-bit dtype, bfloat16 if that is float32 or 4-bit.
        max_shard_size: as in `save_pretrained`.
    Returns:
        The folder.
    Raises:
        ConfigError: something is there, it is the current folder or a disk's, or PEFT's `merge_adapter` was called.
        UnsupportedError: an adapter that is not plain LoRA on linears, embeddings and experts, processes share the
            weights, or transformers' own class of the merged model doesn't work.
        TrainingError: the reloaded checkpoint's logits differ from the adapted model's, or the disk is full.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    target = Path(folder)
    refuse_filled(target)
    current, disk = target.resolve() == Path.cwd(), os.path.ismount(target.resolve())
    if current or disk:  # no other folder can take its place
        what = "the current folder" if current else "where a disk is mounted"
        raise ConfigError(f"{target} is {what}", "give the merged model a folder of its own, in it")
    base = base_causal_lm(model)
    refuse_sharded(base, "merging")
    if any(getattr(module, "merged", False) for module in base.modules()):
        # it would be added once more, and comparing with the base model would take it out of the training model
        raise ConfigError(
            "the adapter is merged into the model's weights already", "call model.unmerge_adapter() first"
        )
    if hasattr(model, "peft_config") and not any(isinstance(module, BaseTunerLayer) for module in base.modules()):
        raise ConfigError(
            "no layer of the model has an adapter to merge",
            "after merge_and_unload() save the model that it returned; of virtual tokens save_pretrained the adapter",
        )
    dtype = dtype or checkpoint_dtype(base)
    with whole_folder(target) as writing:
        write_model(base, dtype, writing, max_shard_size)
        if tokenizer is not None:
            save_tokenizer(tokenizer, writing)
        _check(model, writing, dtype)
    return target


def checkpoint_dtype(base: Any) -> torch.dtype:
    """Return what a merged checkpoint is rounded to: the base's own 16-bit dtype, or bfloat16."""
    own: torch.dtype = base.get_input_embeddings().weight.dtype
    return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16


def dtype_before_gguf(model: Any) -> torch.dtype | None:
    """Return in what a model is merged for a GGUF file: float32 weights are rounded once, by the file; None for the
    default."""
    return torch.float32 if model.dtype is torch.float32 else None


@torch.no_grad()
def write_model(
    base: Any,
    dtype: torch.dtype,
    folder: Path,
    max_shard_size: str,
    values: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:
    """Write the folder that `save_pretrained` would write of the merged model, one shard in memory at a time, and the
    base's licence files; of a model out of one with towers, among these.

    Args:
        values: what returns a parameter's values, where it hasn't them itself.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers.utils import logging

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise UnsupportedError(
            "this transformers has no core_model_loading.revert_weight_conversion, which names the weights of files",
            "use a transformers that Pronghorn is tested with, or save the adapter with save_pretrained",
        ) from error
    stored = {tensor.name: tensor for tensor in merged_tensors(base, dtype, values, unbiased=True)}
    plain = _plain_model(base, dtype, stored)
    composite = composite_of(base)
    original = None if composite is None else Original(composite, base)
    if original is None:
        plain.save_pretrained(folder, state_dict={})  # all but the weights
    else:
        original.write_files(plain, dtype, folder)
    copy_licences(base, folder)
    towers = {} if original is None else original.towers
    as_files = functools.partial(revert_weight_conversion, plain) if original is None else original.named
    expected = plain.state_dict()
    assert stored.keys() == expected.keys(), f"{stored.keys() ^ expected.keys()}"
    for name in tied_names(plain):
        del expected[name]
    as_saved = as_files(expected)
    # what is renamed or split together (a layer's experts) lies in one module, or in modules that files join
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in expected.items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = tensor
    module_of: dict[str, str] = {}
    for module in [*modules]:
        names = as_files(modules[module])
        first = next((module_of[name] for name in names if name in module_of), module)
        if first != module:
            modules[first] |= modules.pop(module)
        module_of |= dict.fromkeys(names, first)
    made = {name: tensor.shape for own in modules.values() for name, tensor in as_files(own).items()}
    if made != {name: tensor.shape for name, tensor in as_saved.items()}:
        # but not in this model: read all, and rename then
        modules, module_of = {"": expected}, dict.fromkeys(as_saved, "")
    in_order = [modules[module] for module in dict.fromkeys(module_of[name] for name in as_saved)]
    read = (dict(load((stored[name] for name in own), expected=own)) for own in in_order)
    sizes = {name: tensor.clone() for name, tensor in as_saved.items()}  # a view counts the bytes of all it views
    sizes |= {name: torch.empty(tower.shape, dtype=tower.dtype, device="meta") for name, tower in towers.items()}
    beside = sum(sizes[name].numel() for name in towers)
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    unwritten: dict[str, Tensor] = {}
    for file, names in logging.tqdm(split.filename_to_tensors.items(), desc="Writing merged shards"):
        while not unwritten.keys() >= set(names) - towers.keys():
            unwritten |= as_files(next(read))
        shard = {
            name: original.tower(name) if original and name in towers else unwritten.pop(name).contiguous()
            for name in names
        }
        save_file(_without_shared_memory(shard), folder / file, metadata={"format": "pt"})
        del shard  # before the next is read
    write_index(folder, split, total_parameters=plain.num_parameters() + beside)


def _without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with a copy of each that lies where an earlier one does: PEFT's repeated layers share frozen
    weights, and safetensors writes none that are shared."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        separate[name] = tensor.clone() if tensor.numel() and tensor.data_ptr() in addresses else tensor
        addresses.add(tensor.data_ptr())
    return separate


def _plain_model(base: Any, dtype: torch.dtype, stored: dict[str, StoredTensor]) -> Any:
    """Return a model of the base's own class on the meta device, configured as the merged checkpoint is."""
    config = type(base.config).from_dict(base.config.to_dict())
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    # `modules_to_save` trains a copy of a tied head or embedding: tying them again would drop one of the two
    tied = base.all_tied_weights_keys.items() if getattr(config, "tie_word_embeddings", False) else ()
    if not all(torch.equal(stored[name].read(), stored[other].read()) for name, other in tied):
        config.tie_word_embeddings = False
    with torch.device("meta"):
        plain = plain_class(base)(config).to(dtype)
    plain.tie_weights()
    plain.generation_config = base.generation_config
    return plain


def merged_tensors(
    base: Any, dtype: torch.dtype, values: Callable[[Tensor], Tensor] = Tensor.detach, *, unbiased: bool = False
) -> Iterator[StoredTensor]:
    """Yield the base's weights under their plain names and in its order, with adapters merged, in `dtype`. Each is
    computed, to the CPU, when it is read; that may be at any time, and more than once.

    Args:
        values: of a parameter without an adapter.
        unbiased: round what adapters changed by `export.rounding`, as checkpoints are written; otherwise to the
            nearest.
    Raises:
        UnsupportedError: an adapter or weight that can't be merged.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    def stored(name: str, shape: Sequence[int], compute: Callable[[], Tensor], of: torch.dtype = dtype) -> StoredTensor:
        def rows(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                tensor = compute().to(of)
                if isinstance(tensor, PackedTensor):
                    tensor = tensor.dequantise()
                tensor = tensor.cpu()  # after the dtype: a GPU's float32 takes no host memory
            return tensor[start:stop] if shape else tensor

        return StoredTensor(name, tuple(shape), of, "merged weights", rows)

    def rounded(name: str, plain: Tensor, merged: Tensor) -> Tensor:
        changed = unbiased and dtype.itemsize == 2 and merged is not plain
        return round_merged(plain, merged, dtype, name) if changed else merged

    def linear_weights(
        module: Any, prefix: str, merged: Callable[[], Tensor], bias: Callable[[], Tensor] | None = None
    ) -> Iterator[StoredTensor]:
        if not module.weight.is_floating_point() and getattr(module.weight, "quant_state", None) is None:
            raise UnsupportedError(
                f"{type(module).__name__} holds {module.weight.dtype} weights, which can't be merged",
                "save the adapter with save_pretrained, or load the model in 16 or 4 bits",
            )
        yield stored(f"{prefix}weight", (module.out_features, module.in_features), merged)
        if module.bias is not None:
            yield stored(f"{prefix}bias", module.bias.shape, bias or module.bias.detach)

    def visit(module: Any, prefix: str) -> Iterator[StoredTensor]:
        if isinstance(module, ModulesToSaveWrapper):
            active = [] if module.disable_adapters else module.active_adapters  # those that have a copy
            yield from visit(module.modules_to_save[active[0]] if active else module.original_module, prefix)
        elif hasattr(module, "token_adapter"):  # some rows of an embedding or head were trained
            adapter = module.token_adapter
            active = [] if adapter.disable_adapters else adapter.active_adapters
            inner = adapter.get_base_layer()
            if getattr(inner, "bias", None) is not None:  # no plain model computes as this one
                raise UnsupportedError(
                    f"{prefix.removesuffix('.')} has a bias, which PEFT leaves out where rows of a head are trained",
                    "train embeddings and head whole (modules_to_save)",
                )
            yield stored(f"{prefix}weight", inner.weight.shape, lambda: adapter.get_merged_weights(active))
        elif hasattr(module, "parameter_name"):  # an adapter of experts or router, around them or another adapter
            adapted = f"{prefix}{module.parameter_name}"
            for tensor in visit(module.base_layer, prefix):
                if tensor.name == adapted:
                    yield stored(adapted, tensor.shape, lambda: rounded(adapted, *merged_experts(module)))
                else:
                    yield tensor
        elif isinstance(module, BaseTunerLayer):
            layer: Any = module
            check_merges(layer, prefix.removesuffix("."))
            inner, weight, bias = layer.get_base_layer(), f"{prefix}weight", functools.partial(merged_bias, layer)

            def merged() -> Tensor:
                return rounded(weight, *merged_linear(layer))

            if isinstance(inner, torch.nn.Linear):
                yield from linear_weights(inner, prefix, merged, bias)
            else:  # embeddings, and GPT-2's linears
                yield stored(weight, inner.weight.shape, merged)
                if getattr(inner, "bias", None) is not None:
                    yield stored(f"{prefix}bias", inner.bias.shape, bias)
        elif type(module).__name__ == "Linear4bit":
            yield from linear_weights(module, prefix, lambda: dense_weight(module))
        else:
            persistent = {n: b for n, b in module.named_buffers(recurse=False) if n in module.state_dict()}
            for name, tensor in [*module.named_parameters(recurse=False), *persistent.items()]:
                of = dtype if tensor.is_floating_point() else tensor.dtype
                yield stored(f"{prefix}{name}", tensor.shape, functools.partial(values, tensor), of)
            for name, child in module.named_children():
                yield from visit(child, f"{prefix}{name}.")

    yield from visit(base, "")


def place_beside(device: torch.device, size: int) -> torch.device:
    """Return where weights of `size` bytes are loaded beside the adapted model: its device, or the CPU if that has no
    room."""
    if device.type != "cuda":
        return device
    torch.cuda.empty_cache()
    return device if size + _ROOM <= torch.cuda.mem_get_info(device)[0] else torch.device("cpu")


@torch.no_grad()
def _check(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Load what was saved and compare its logits with the adapted model's on a fixed batch of tokens."""
    from transformers import AutoModelForCausalLM

    base = base_causal_lm(model)
    tokens = torch.arange(32, device=base.device)[None] * 7 % base.config.vocab_size
    tokens[0, -4:] = base.config.vocab_size - 1 - torch.arange(4, device=base.device)  # where new tokens are
    with in_evaluation(model):
        # a cache is for attention's layers, and a model may have none
        adapted = model(input_ids=tokens, use_cache=False).logits.float()
        plain = None
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                plain = model(input_ids=tokens, use_cache=False).logits.float()
    if not adapted.isfinite().all():
        raise TrainingError(
            "the adapted model's own logits hold NaN or infinity, before anything is merged",
            "load an adapter or checkpoint from before the training broke, or train again with a lower learning rate",
        )
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    composite = composite_of(base)
    loader = AutoModelForCausalLM if composite is None else type(composite.whole)
    options = {"trust_remote_code": False} if composite is None else {}
    # a forgotten adapter that was trained at all is far beyond it; the adapted model's own products are in its dtype
    limit = max(MERGED_LOGITS[each].limit(0.0) for each in {dtype, base.dtype} & MERGED_LOGITS.keys())
    # Products in 16 bits are off by as much as rounded weights: where both are too much, a float32 model's is computed
    # again in float32, which takes twice the memory.
    for computed in dict.fromkeys((dtype, torch.promote_types(dtype, base.dtype))):
        place = place_beside(base.device, stored * computed.itemsize // dtype.itemsize)
        reloaded = loader.from_pretrained(folder, dtype=computed, device_map={"": place}, **options).eval()
        try:
            merged = reloaded(input_ids=tokens.to(place), use_cache=False).logits.to(adapted)
        except (AttributeError, TypeError) as problem:  # Llama 4 with its tower in transformers 5.24
            failing = type(reloaded).__name__
            raise UnsupportedError(
                f"the merged model can't be checked: transformers' {failing} fails by itself ({problem})",
                "save the adapter (save_pretrained), and merge it with another version of transformers",
            ) from problem
        if has_experts(base.config):  # rounding sends a token or two to other experts: only the median token counts
            size = adapted.norm(dim=-1).clamp_min(torch.finfo(adapted.dtype).tiny)  # 0 after a padding token's zeros
            error = ((merged - adapted).norm(dim=-1) / size).median().item()
        else:
            error = relative_error(merged, adapted)
        if error <= limit:
            break
    if not error <= limit:
        raise TrainingError(
            f"the merged checkpoint's logits differ from the adapted model's by {error:.2e} (limit {limit:.0e})",
            "keep the adapter (save_pretrained) and report this: the merge is wrong",
        )
    if plain is not None:
        # How far the merge went from the base model (0) to the adapted one (1). Rounding hardly lies along that
        # direction, so this sees adapters whose whole effect is well below `limit`.
        direction = adapted - plain
        # With experts it is the median token's, too: one that the adapter sends elsewhere outweighs all others.
        width = direction.shape[-1] if has_experts(base.config) else direction.numel()
        toward, whole, went = (each.reshape(-1, width) for each in (direction, adapted, merged - plain))
        learned = (toward.norm(dim=-1) / whole.norm(dim=-1).clamp_min(1e-30)).median().item()
        share = ((went * toward).sum(-1) / toward.square().sum(-1).clamp_min(1e-30)).median().item()
        if learned > limit / 10 and not 0.5 < share < 1.5:
            raise TrainingError(
                f"the merged checkpoint holds {share:.0%} of what the adapter changes in the logits",
                "keep the adapter (save_pretrained) and report this: the merge is wrong",
            )
