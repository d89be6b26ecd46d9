"""`FastLanguageModel`: the interface fine-tuning scripts already know."""

from __future__ import annotations

import difflib
import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from pronghorn.compute_names import ComputeName
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.folder import full_disk, refuse_filled, whole_folder
from pronghorn.export.gguf import check_quantisations, left_out, read_tokenizer, write_gguf
from pronghorn.export.hub import push_folder
from pronghorn.export.licences import copy_licences
from pronghorn.export.merge import dtype_before_gguf, save_merged
from pronghorn.export.towers import keep_names
from pronghorn.loading.load import default_device, find_model, resolve_dtype, row_length
from pronghorn.memory.plan import Checkpointing, Plan
from pronghorn.memory.recompute import INSTALLED, install
from pronghorn.models.attach import attach, attached
from pronghorn.models.attach_options import Attention, Experimental
from pronghorn.models.families import base_causal_lm, decoder_layers, recompute_layers
from pronghorn.models.lora import add_lora, check_model
from pronghorn.unsloth_names import answer_methods, refuse_arguments

P = ParamSpec("P")
R = TypeVar("R")


def _asked_by_name(method: Callable[P, R]) -> Callable[P, R]:
    """Refuse calls that lack an argument by its name, and by that of the unknown one that was probably meant for it."""
    parameters = inspect.signature(method).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]

    @functools.wraps(method)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        missing = [name for name in needed[len(given) :] if name not in named]
        if missing:
            raise _lacking(method.__name__, missing[0], [name for name in named if name not in parameters])
        return method(*given, **named)

    return checked


def _lacking(where: str, missing: str, unknown: list[str]) -> ConfigError:
    """Return the refusal of a call without `missing`, whose arguments `unknown` the method doesn't have."""
    meant = difflib.get_close_matches(missing, unknown, n=1, cutoff=0.5)
    problem = f"{where} needs {missing}" + (f", and does not take {', '.join(unknown)}" if unknown else "")
    return ConfigError(problem, f"write {missing}=... " + (f"instead of {meant[0]}=..." if meant else "in the call"))


class FastLanguageModel:
    """Load and adapt models, switch between training and inference, and save. All methods are static. Models are
    transformers' and PEFT's own."""

    @staticmethod
    @_asked_by_name
    def from_pretrained(
        model_name: str,
        max_seq_length: int | None = None,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = False,
        packing: bool = True,
        use_gradient_checkpointing: Checkpointing = "auto",
        *,
        full_finetuning: bool = False,
        attention: Attention = "auto",
        compute: ComputeName = "dtype",
        experts_in_16bit: bool = False,
        dropout: bool = True,
        trust_remote_code: bool = False,
        token: str | None = None,
        revision: str | None = None,
        **unsupported: Any,
    ) -> tuple[Any, Any]:
        """Load a causal LM and its tokenizer.

        Args:
            model_name: local folder (a saved adapter's too), hub name, or `.gguf` file.
            max_seq_length: tokens of a packed row; None: 2,048, or the model's positions if these are fewer.
            dtype: None chooses by device (bfloat16, float16 on GPUs before Ampere, float32 on the CPU).
            load_in_4bit: NF4 through bitsandbytes, experts too unless `experts_in_16bit`.
            packing: attach the packed path, so that documents of a packed row are isolated.
            use_gradient_checkpointing: False keeps activations; True recomputes layers; "offload" and "unsloth"
                recompute them, while their inputs wait in host memory; "auto" recomputes until `pronghorn.SFTTrainer`
                knows the batch, and then on CUDA keeps what fits.
            full_finetuning: train every weight. Weights are kept in float32 (the trainer computes in 16 bits).
            attention, compute: as in `pronghorn.attach`.
            dropout: False trains without the dropout of the model's configuration, which fused layers don't have.
            trust_remote_code: run Python code that comes with the checkpoint.
            token, revision: for the hub.
        Returns:
            (model, tokenizer); `model.max_seq_length` gives trainers the row length.
        Raises:
            ValueError: arguments that contradict each other, or files that are missing or damaged.
            NotImplementedError: a model or an argument that isn't supported, by name.
        """
        _refuse(unsupported, FastLanguageModel.from_pretrained)
        _check_flags(
            load_in_4bit=load_in_4bit,
            packing=packing,
            full_finetuning=full_finetuning,
            experts_in_16bit=experts_in_16bit,
            dropout=dropout,
            trust_remote_code=trust_remote_code,
        )
        plan = Plan.asked(use_gradient_checkpointing)
        if compute != "dtype" and (full_finetuning or not packing):
            raise ConfigError(
                f"compute = {compute!r} with " + ("full_finetuning" if full_finetuning else "packing=False"),
                "leave compute out: 8-bit products are for frozen weights and packed rows",
            )
        if full_finetuning and load_in_4bit:
            raise ConfigError("full_finetuning with load_in_4bit: 4-bit weights can't be trained", "choose one")
        if full_finetuning and resolve_dtype(dtype, torch.device("cpu")) is not torch.float32:  # None is float32 there
            raise ConfigError(
                f"full_finetuning with dtype {dtype}: 16-bit weights hardly move at usual learning rates",
                "leave dtype out (weights are kept in float32) and set bf16=True in SFTConfig to compute in 16 bits",
            )
        device = default_device()
        weights_dtype = resolve_dtype(torch.float32 if full_finetuning else dtype, device)
        found = find_model(
            model_name,
            max_seq_length=max_seq_length,
            load_in_4bit=load_in_4bit,
            experts_in_16bit=experts_in_16bit,
            dropout=dropout,
            trust_remote_code=trust_remote_code,
            token=token,
            revision=revision,
        )
        if full_finetuning and found.is_quantised:
            raise ConfigError(
                f"full_finetuning, but {model_name} has its weights in few bits, which can't be trained",
                "leave full_finetuning out, and train an adapter (get_peft_model), or use the 16-bit checkpoint",
            )
        if full_finetuning and found.is_adapter:
            raise ConfigError(
                f"full_finetuning, but {model_name} is a saved adapter",
                "merge it first (save_pretrained_merged), or leave full_finetuning out to train it on",
            )
        tokenizer = found.tokenizer()
        model = found.model(weights_dtype, device)
        if packing:
            attach(model, plan, attention=attention, compute=compute)
        else:
            _set_recompute(model, use_gradient_checkpointing)
        model.hub_revision = revision  # for the adapter's configuration
        model.full_finetuning = full_finetuning  # for get_peft_model, which it contradicts
        return _finish(model, row_length(model.config, max_seq_length)), tokenizer

    @staticmethod
    @_asked_by_name
    def get_peft_model(
        model: Any,
        r: int = 16,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        target_modules: Sequence[str] | str | None = None,
        bias: str = "none",
        use_rslora: bool = False,
        use_gradient_checkpointing: Checkpointing | None = None,
        random_state: int = 3407,
        *,
        target_parameters: Sequence[str] | None = None,
        modules_to_save: Sequence[str] | None = None,
        rank_pattern: dict[str, int] | None = None,
        alpha_pattern: dict[str, int] | None = None,
        use_dora: bool = False,
        adapter_dtype: torch.dtype | str | None = None,
        **unsupported: Any,
    ) -> Any:
        """Add LoRA adapters with PEFT; the arguments are those of `peft.LoraConfig`.

        `target_modules=None` adapts the family's linears: its `lora_targets`, or all that its file names. In a model
        that no file knows, it adapts all linears that a text reaches.
        `use_gradient_checkpointing=None` keeps what `from_pretrained` was given. `random_state` seeds the adapters
        only. `adapter_dtype` is float32 (None) or bfloat16: of the adapters and, with torch's optimisers, their states.

        Raises:
            ValueError: a model with an adapter, or ranks, names or numbers that make no sense.
            NotImplementedError: an argument that isn't supported, by name.
        """
        if unsupported.get("max_seq_length") == getattr(model, "max_seq_length", None):
            unsupported.pop("max_seq_length", None)
        _refuse(unsupported, FastLanguageModel.get_peft_model)
        check_model(model, "get_peft_model")
        if getattr(model, "full_finetuning", False):
            raise ConfigError(
                "get_peft_model after full_finetuning=True: every weight is trained, or adapters alone are",
                "leave get_peft_model out to train every weight, or full_finetuning to train adapters",
            )
        _check_flags(use_rslora=use_rslora, use_dora=use_dora)
        if use_gradient_checkpointing is not None:
            _set_recompute(model, use_gradient_checkpointing)
        adapted = add_lora(
            model,
            r=r,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=target_modules,
            target_parameters=target_parameters,
            bias=bias,
            use_rslora=use_rslora,
            rank_pattern=rank_pattern,
            alpha_pattern=alpha_pattern,
            use_dora=use_dora,
            modules_to_save=modules_to_save,
            random_state=random_state,
            revision=getattr(model, "hub_revision", None),
            adapter_dtype=adapter_dtype,
        )
        handle = attached(adapted)
        if handle is not None:
            handle.adopt_adapters()
        return _finish(adapted, getattr(model, "max_seq_length", None))

    @staticmethod
    @_asked_by_name
    def for_training(model: Any, use_gradient_checkpointing: Checkpointing | None = None) -> Any:
        """Switch to training: dropout is on. `use_gradient_checkpointing=None` leaves that as it is."""
        check_model(model, "for_training")
        if use_gradient_checkpointing is not None:
            _set_recompute(model, use_gradient_checkpointing)
        return model.train()

    @staticmethod
    @_asked_by_name
    def for_inference(model: Any) -> Any:
        """Switch to inference: dropout is off. Layers recompute in training only, so `generate()` has its cache."""
        check_model(model, "for_inference")
        return model.eval()

    @staticmethod
    @_asked_by_name
    def save_pretrained_merged(
        model: Any,
        save_directory: str | Path,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        **unsupported: Any,
    ) -> Path:
        """Merge the adapter into 16-bit weights and save a plain checkpoint; its reloaded logits are checked.

        `save_method="lora"` saves the adapter alone, and the tokenizer, as `save_pretrained` does.

        Raises:
            NotImplementedError: another `save_method`, or an argument that isn't supported (`push_to_hub`, `token`).
        """
        _refuse(unsupported, FastLanguageModel.save_pretrained_merged)
        _check_tokenizer(tokenizer, "save_method")
        if save_method == "lora":
            if not hasattr(model, "peft_config"):
                raise ConfigError("save_method 'lora' for a model without an adapter", "use 'merged_16bit'")
            if base_causal_lm(model) is model and not getattr(model, "_hf_peft_config_loaded", False):
                # PEFT, or a trainer's peft_config, wrapped it later: saved by itself, it is a base of strange names
                raise ConfigError(
                    "save_method 'lora' of a model that PEFT wrapped after it was loaded",
                    "trainer.model.save_pretrained(FOLDER), with the model that PEFT returned",
                )
            with full_disk(Path(save_directory)):
                model.save_pretrained(save_directory)
                if tokenizer is not None:
                    tokenizer.save_pretrained(save_directory)
            return Path(save_directory)
        if save_method != "merged_16bit":
            raise UnsupportedError(
                f"save_method {save_method!r} is not supported",
                "use 'merged_16bit', or 'lora' for the adapter",
            )
        return save_merged(model, tokenizer, save_directory)

    @staticmethod
    @_asked_by_name
    def save_pretrained_gguf(
        model: Any,
        save_directory: str | Path,
        tokenizer: Any = None,
        quantization_method: str | list[str] = "q8_0",
        **unsupported: Any,
    ) -> list[Path]:
        """Merge the adapter and write GGUF files for llama.cpp, one for each method, into a new folder.

        For a model with towers only the language model is written, and a warning names the towers.

        Args:
            quantization_method: one or several of `export.gguf.QUANTISATIONS`.
        Returns:
            The files.
        Raises:
            ConfigError: an unknown method, no tokenizer, or something is in the folder.
            NotImplementedError: a model or tokenizer that isn't written as GGUF, or an argument that isn't supported.
        """
        _refuse(unsupported, FastLanguageModel.save_pretrained_gguf)
        _check_tokenizer(tokenizer, "quantization_method")
        methods = list(quantization_method) if isinstance(quantization_method, (list, tuple)) else [quantization_method]
        if not methods or not all(isinstance(method, str) for method in methods):
            raise ConfigError(f"quantization_method = {quantization_method!r} names none", "use 'q8_0', or a list")
        if tokenizer is None:
            raise ConfigError("a GGUF file holds the tokenizer, and none is given", "give it as the second argument")
        methods = [method.lower() for method in methods]  # scripts write Q8_0, too
        check_quantisations(methods)
        read_tokenizer(tokenizer)
        refuse_filled(Path(save_directory))
        if (told := left_out(model)) is not None:
            warnings.warn(told, stacklevel=2)
        with whole_folder(Path(save_directory)) as folder, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            merged = save_merged(model, tokenizer, Path(scratch) / "merged", dtype=dtype_before_gguf(model))
            copy_licences(merged, folder)
            names = [write_gguf(merged, folder / f"model-{method}.gguf", method).name for method in methods]
        return [Path(save_directory) / name for name in names]

    @staticmethod
    @_asked_by_name
    def push_to_hub_merged(
        model: Any,
        repo: str,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        token: str | None = None,
        private: bool = True,
        commit_message: str = "Export by Pronghorn",
        **unsupported: Any,
    ) -> str:
        """Save as `save_pretrained_merged` does, into a temporary folder, and push that to a repository of the hub.

        Returns:
            The repository's address.
        Raises:
            ConfigError, ServerError: as `export.hub.push_folder`.
            NotImplementedError: as `save_pretrained_merged`.
        """
        _refuse(unsupported, FastLanguageModel.push_to_hub_merged)
        with tempfile.TemporaryDirectory(prefix="pronghorn-push-") as scratch:
            folder = FastLanguageModel.save_pretrained_merged(model, Path(scratch) / "model", tokenizer, save_method)
            return push_folder(folder, repo, token=token, private=private, message=commit_message)


FastModel = FastLanguageModel
"""Unsloth's name for any family."""


def _finish(model: Any, max_seq_length: int | None) -> Any:
    """Give this instance what scripts expect on it; plain attributes, never saved."""
    keep_names(model)
    model.max_seq_length = max_seq_length
    answer_methods(model)
    model.save_pretrained_merged = functools.partial(FastLanguageModel.save_pretrained_merged, model)
    model.push_to_hub_merged = functools.partial(FastLanguageModel.push_to_hub_merged, model)
    model.save_pretrained_gguf = functools.partial(FastLanguageModel.save_pretrained_gguf, model)
    return model


def _set_recompute(model: Any, value: Checkpointing) -> None:
    """Keep, recompute or offload: through the plan of an attached model, so that trainers know it was decided."""
    plan, handle, base = Plan.asked(value), attached(model), base_causal_lm(model)
    if handle is None:
        if installed := getattr(base, INSTALLED, None):
            installed.uninstall()
        if plan == Plan.offload():
            install(base, decoder_layers(base), plan)
        else:
            recompute_layers(base, plan != Plan.keep())
    else:
        handle.replan(plan)


def _check_flags(**flags: Any) -> None:
    """Refuse a text where True or False is meant: "no" would be taken as True."""
    for name, value in flags.items():
        if isinstance(value, str):
            raise ConfigError(f"{name} = {value!r} is a text", "write True or False, without quotes")


def _check_tokenizer(tokenizer: Any, method: str) -> None:
    """Refuse a text in the tokenizer's place, which is the second argument."""
    if isinstance(tokenizer, str):
        raise ConfigError(
            f"tokenizer = {tokenizer!r} is a text", f"give the tokenizer second, then {method}={tokenizer!r}"
        )


def _refuse(arguments: dict[str, Any], method: Callable[..., Any]) -> None:
    """Refuse arguments by name, unless they ask for nothing (False, None, 0)."""
    where = method.__name__
    if switches := sorted(arguments.keys() & {field.name for field in fields(Experimental)}):
        raise UnsupportedError(
            f"{where} does not take {', '.join(switches)}, which only measurements need",
            f"leave it out, or call pronghorn.attach(model, experimental={{'{switches[0]}': ...}})",
        )
    refuse_arguments(arguments, where, inspect.signature(method).parameters)
