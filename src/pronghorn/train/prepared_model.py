"""What the trainer does to a model before it trains: attach it where it will be, and decide what its layers keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from pronghorn.device import processes
from pronghorn.errors import ConfigError
from pronghorn.memory.plan import Plan
from pronghorn.models.adapter_files import CONVERTED, begins_by_chance
from pronghorn.models.attach import Handle, attach, attached
from pronghorn.models.auto_plan import How, resolve, smaller_plan
from pronghorn.text import counted, does
from pronghorn.train.oom_retry import tighten
from pronghorn.train.saved_adapters import trained_beside
from pronghorn.train.validate import check_one_model


def attached_on_its_device(model: Any, args: Any) -> Handle:
    """Return the model's handle, made after the trainer's device has it: attach looks where it is."""
    stays = args.place_model_on_device is False or getattr(args, "deepspeed", None)
    stays = stays or getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    moves = not stays and args.device.type == "cuda" and model.device.type == "cpu"
    if moves:
        model.to(args.device)
    handle = attached(model)
    if handle is None or not moves:
        return handle or attach(model)
    return attach(model, **vars(handle.options))  # on the CPU it had no fused layers


def let_the_plan_decide(args: Any) -> None:
    """Switch transformers' checkpointing off, which SFTConfig's default asks for, and which would recompute regardless.

    Raises:
        ConfigError: TRL's selective checkpointing is asked for, of which TRL would say that it needs the other.
    """
    if (args.gradient_checkpointing_kwargs or {}).get("selective"):
        raise ConfigError(
            "gradient_checkpointing_kwargs = {'selective': True}, and the model's memory plan decides what layers keep",
            "leave it out; from_pretrained's use_gradient_checkpointing says how the plan is made",
        )
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # transformers 5.23 renamed it
        if hasattr(args, name):
            setattr(args, name, False)


def settled(accelerator: Any, handle: Handle, padded: bool) -> dict[str, Any]:
    """Return what a plan has to know of training besides its arguments: whether batches are padded, autocast's dtype.

    Autocast to bfloat16 is switched off where the model is in it already: fused layers compute the same without, and
    CUDA graphs don't run under it.
    """
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    asked = named.get(accelerator.mixed_precision)  # of SFTConfig, or else of accelerate's configuration
    fused = not padded and handle.layers is not None and handle.layers.reason(None) is None
    own = (p for name, p in handle.model.named_parameters() if ".lora_" not in name and p.is_floating_point())
    if asked is torch.bfloat16 and fused and all(p.dtype is asked for p in own):
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
        asked = None
    return {"padded": padded, "autocast": asked}


def resolve_plan(handle: Handle, args: Any, padded: bool, autocast: torch.dtype | None) -> Plan | None:
    """Return the attached model's plan, made now where `auto` waited for these arguments.

    Args:
        padded: whether batches are, instead of packed rows.
        autocast: its dtype, or None.
    Raises:
        PlanDoesNotFit: with what would.
    """
    rows, row_tokens = args.per_device_train_batch_size, args.max_length or 0
    return resolve(handle, rows, row_tokens, packs=not padded, **_how(args, autocast))


def unround_adapters(model: Any, trained: Mapping[Any, Tensor], quantised: bool) -> None:
    """Give trained parameters their values back, where TRL rounded the adapters of a quantised base to bfloat16.

    Args:
        model: the trainer's.
        trained: what was trained before TRL had the model, with its values; its own, fresh adapters become float32.
        quantised: whether the base is.
    """
    for name, parameter in model.named_parameters():
        if parameter in trained:
            if parameter.dtype != trained[parameter].dtype:
                parameter.data = trained[parameter].to(parameter.device)
        elif parameter.requires_grad and ".lora_" in name and quantised:
            parameter.data = parameter.data.float()


def told_of_saving(model: Any) -> Iterator[str]:
    """Yield what to know before a model's adapter is saved."""
    configs = getattr(model, "peft_config", {}).values()
    init = next((init for c in configs if (init := begins_by_chance(getattr(c, "init_lora_weights", None)))), None)
    if init is not None:
        yield f"init_lora_weights = {init!r}: what save_pretrained leaves fits this base in memory alone; {CONVERTED}"
    if beside := trained_beside(model):
        yield (
            f"{counted(len(beside), 'weight')} of the base {does(len(beside), 'are')} trained beside the adapter "
            f"({beside[0]} ...): checkpoints and save_pretrained leave them out. Name their modules in "
            "modules_to_save, which PEFT saves, or merge in the end (save_pretrained_merged)"
        )


def check_trains(model: Any, args: Any, model_init: Any = None) -> None:
    """Refuse to train a model of which no weight is trained, adapters that take no part, adapters that came into the
    model after its trainer was made, which would save no adapter, to end with the best checkpoint where checkpoints
    hold a part of what is trained, and to train another model, as `model_init` says."""
    check_one_model(model_init)
    adapted = isinstance(model, PeftModel) or getattr(model, "_hf_peft_config_loaded", False)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.merged for layer in layers):
        raise ConfigError(
            "the adapter is merged into the model's weights (merge_adapter), where nothing trains it",
            "call model.unmerge_adapter() first",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if layers and all(layer.disable_adapters for layer in layers):
            raise ConfigError(
                "no weight of the model is trained: its adapters are switched off (disable_adapter_layers)",
                "call model.base_model.enable_adapter_layers() first",
            )
        if adapted:
            raise ConfigError(
                "no weight of the model is trained: its adapter is frozen, as PEFT loads it",
                "load it by FastLanguageModel.from_pretrained(FOLDER), or by PEFT with is_trainable=True",
            )
        raise ConfigError(
            "no weight of the model is trained",
            "add adapters by FastLanguageModel.get_peft_model (merge_and_unload takes them away), or load the model "
            "with full_finetuning=True",
        )
    if not adapted and any(".lora_" in name for name, _ in model.named_parameters()):
        raise ConfigError("adapters were added after the trainer was made", "call get_peft_model before SFTTrainer")
    if args.load_best_model_at_end and (beside := trained_beside(model)):
        raise ConfigError(
            f"load_best_model_at_end, and checkpoints lack {counted(len(beside), 'weight')} of the base that "
            f"{does(len(beside), 'are')} trained beside the adapter ({beside[0]} ...)",
            "name their modules in modules_to_save, which PEFT saves, freeze them, or leave load_best_model_at_end out",
        )


class TighterPlans:
    """Chooses what a trainer goes on with after a plan ran out of memory.

    A plan that was made is made again for a little less (`smaller_plan`). After that, of plans that were asked for, and
    where processes must agree, every layer keeps much less (`tighten`).

    Args:
        model: the trainer's, attached or not.
        args: the trainer's arguments.
        padded, autocast: as of its plan (`resolve_plan`).
    """

    def __init__(self, model: Any, args: Any, padded: bool, autocast: torch.dtype | None) -> None:
        self._model, self._args, self._padded, self._autocast = model, args, padded, autocast
        self._made: Plan | None = None

    def __call__(self, ran_out: Plan) -> Plan | None:
        """Return the next plan; None if nothing keeps less."""
        handle, made = attached(self._model), None
        if handle is not None and ran_out is not self._made and processes() == 1:
            rows, row_tokens = self._args.per_device_train_batch_size, self._args.max_length or 0
            how = _how(self._args, self._autocast)
            how["padded"] = rows if self._padded else 0
            made = smaller_plan(handle.model, rows * row_tokens, ran_out, **how)
        self._made = made
        return tighten(ran_out) if made is None else made


def _how(args: Any, autocast: torch.dtype | None) -> How:
    """Say how the trainer's arguments train, for a plan."""
    return {
        "autocast": autocast,
        "accumulates": args.gradient_accumulation_steps > 1,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
    }
