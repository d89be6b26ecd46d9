"""From a recipe to what trains: the model with its adapter, attached, and the trainer."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from rich.console import Console
from rich.markup import escape
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig

from pronghorn.config.checks import share_of_step, unused
from pronghorn.config.recipe import Recipe
from pronghorn.config.values import ALL_LINEAR
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import processes
from pronghorn.environment import world_size
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.towers import keep_names
from pronghorn.loading.load import FoundModel, default_device, resolve_dtype
from pronghorn.loading.new_tokens import grow_embeddings, trainable_tokens
from pronghorn.loading.share import SharedLoading, share_layers
from pronghorn.memory.devices import parse_bytes
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import Handle, attach
from pronghorn.models.lora import add_lora, cast_adapters, resolve_adapter_dtype
from pronghorn.precision.compute import Compute
from pronghorn.train.documents import find, prepare, tokenizer_for
from pronghorn.train.group import check_backend, check_gpus_apart, check_one_dtype
from pronghorn.train.strategy import Strategy, strategy
from pronghorn.train.trainer import SFTTrainer

NEVER = 10**9
"""save_steps of a run that saves by minutes only."""


def build(recipe: Recipe, console: Console, callbacks: list[TrainerCallback]) -> tuple[SFTTrainer, Handle]:
    """Make the trainer that `run` would train with, for a look at its steps: no journal, held-out data or record.

    Raises as `run` before anything is trained.
    """
    found = find(recipe)
    tokenizer = tokenizer_for(recipe, found)
    documents = prepare(recipe, "train", tokenizer, console)
    console.print(f"[bold]Loading[/] {escape(recipe.model.name)}")
    model, handle = load(recipe, found, tokenizer, console)
    return make_trainer(recipe, model, tokenizer, documents.dataset, None, callbacks), handle


def load(recipe: Recipe, found: FoundModel, tokenizer: Any, console: Console) -> tuple[Any, Handle]:
    """Load the model with its adapter, attach it, and return it with the handle that tells the paths taken."""
    device = default_device()
    dtype = resolve_dtype(recipe.precision.dtype, device)
    adapter, full = recipe.adapter, recipe.adapter.method == "full"
    if adapter.modules_to_save and dtype is torch.float16:
        raise ConfigError(
            "adapter.modules_to_save in float16: loss scaling needs float32 copies, and these keep the model's dtype",
            "set precision.dtype: bfloat16 or float32",
        )
    check_saved_adapter(recipe, found)
    for told in unused(recipe):
        console.print(f"[yellow]{escape(told)}[/]", highlight=False)
    # full fine-tuning keeps float32 masters and computes in `dtype`
    held = strategy(recipe, found, processes(), device)
    shared = held.strategy is Strategy.SHARDED
    if recipe.launch.strategy == "sharded" and not shared:
        console.print("[yellow]launch.strategy: sharded is not used: one process has nobody to share with[/]")
    compute = Compute.of(recipe.precision.compute)
    share = SharedLoading(device, trained=full, compute=compute) if shared and _unread(recipe, found) else None
    # a device holds its part of the layers, never all of them
    on_host = shared and share is None and not found.is_quantised
    model = found.model(torch.float32 if full else dtype, torch.device("cpu") if on_host else device, share)
    if found.is_adapter:
        console.print("The saved adapter is trained on; the recipe's adapter section is not used.")
        adapter_dtype = resolve_adapter_dtype(recipe.precision.adapter_dtype)
        if adapter_dtype is not None:
            cast_adapters(model, adapter_dtype)
    elif not full:
        if adapter.new_tokens:
            grow_embeddings(model, tokenizer, adapter.new_tokens, adapter.random_state)
        model = add_lora(
            model,
            **adapter.model_dump(exclude={"method", "new_tokens", "target_modules"}),
            target_modules=None if adapter.target_modules == [ALL_LINEAR] else adapter.target_modules,
            trainable_token_indices=trainable_tokens(model, tokenizer, adapter.new_tokens, adapter.modules_to_save),
            adapter_dtype=recipe.precision.adapter_dtype,
        )
    keep_names(model)
    if shared:
        console.print(
            f"Each of {processes()} processes holds a part of every layer's weights (launch.strategy: sharded)"
        )
        share_layers(model, device, compute, held.copy_trained)
    return model, attach(model, asked_plan(recipe), **attach_options(recipe))


def check_saved_adapter(recipe: Recipe, found: FoundModel) -> None:
    """Refuse (ConfigError) to add tokens to a saved adapter, or to train every weight of it."""
    if found.is_adapter and recipe.adapter.new_tokens:
        raise ConfigError(
            f"adapter.new_tokens, but {recipe.model.name} is a saved adapter, which has the tokens it was trained with",
            "leave new_tokens out, or begin from the base model",
        )
    if found.is_adapter and recipe.adapter.method == "full":
        raise ConfigError(
            f"adapter.method: full, but {recipe.model.name} is a saved adapter",
            "merge it first (save_pretrained_merged), or set adapter.method: lora to train it on",
        )


def _unread(recipe: Recipe, found: FoundModel) -> bool:
    """Tell whether training begins without reading layers' weights, and trains all or none of them."""
    adapter = recipe.adapter
    if found.is_adapter or adapter.use_dora or adapter.modules_to_save:
        return False
    plain = adapter.bias == "none" and adapter.init_lora_weights in (True, False, "gaussian")
    return plain or adapter.method == "full"


def asked_plan(recipe: Recipe) -> Plan:
    """Return the plan that a recipe asks for."""
    memory = recipe.memory
    budget = None if memory.budget is None else parse_bytes(memory.budget, "memory.budget")
    return Plan.asked(memory.gradient_checkpointing, budget, memory.feed_forward)


def attach_options(recipe: Recipe) -> dict[str, Any]:
    """Return what `attach` is told of a recipe's packed path."""
    return {
        "attention": recipe.packing.attention,
        "graph": recipe.packing.graph,
        "compute": recipe.precision.compute,
    }


def of_one_process(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe of what each of so many processes computes, which holds all of the model.

    Raises:
        ConfigError: as `share_of_step`.
    """
    rows, micro_batches = share_of_step(recipe, processes)
    packing = recipe.packing.model_copy(update={"rows_per_step": rows})
    train = recipe.train.model_copy(update={"gradient_accumulation_steps": micro_batches})
    launch = recipe.launch.model_copy(update={"strategy": Strategy.COPIES.value})
    return recipe.model_copy(update={"packing": packing, "train": train, "launch": launch})


_NOT_SERVED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "another parallelism",
}
"""What `accelerate launch` asks for by its configuration, by the variables that it sets. FSDP is `validate`'s."""


def training_arguments(recipe: Recipe) -> SFTConfig:
    """Make the trainer's arguments of a recipe, which joins the processes that torchrun started.

    Raises:
        ConfigError: the rows of a step can't be shared by these processes, or two have one GPU.
        UnsupportedError: GPUs without NCCL, or what isn't served in accelerate's configuration.
    """
    for name, what in _NOT_SERVED.items():
        if parse_flag_from_env(name):
            raise UnsupportedError(
                f"{what} is switched on in accelerate's configuration ({name}), which isn't served",
                "switch it off; launch.strategy: sharded shares a model's layers among GPUs",
            )
    processes, timeout = world_size(), timedelta(minutes=recipe.launch.timeout_minutes)
    if processes > 1:  # here, as transformers sets no limit on CPUs, and whoever asks for the device joins the others
        check_backend(processes)
        joined = PartialState(cpu=not torch.cuda.is_available(), timeout=timeout)
        check_gpus_apart(joined.device)
        check_one_dtype(recipe)
    train, device, autocast = recipe.train, default_device(), autocast_dtype(recipe)
    rows, micro_batches = share_of_step(recipe, processes)
    args = SFTConfig(
        output_dir=str(train.output),
        packing=recipe.packing.enabled,
        max_length=recipe.model.max_seq_length,
        # documents fit already: TRL's truncation would write them all once more, beside the token cache
        dataset_kwargs=None if recipe.packing.enabled else {"skip_prepare_dataset": True},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=micro_batches,
        max_steps=train.max_steps or -1,
        num_train_epochs=train.epochs,
        optim=train.optimizer,
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps if train.warmup_ratio is None else train.warmup_ratio,
        lr_scheduler_type=train.lr_scheduler,
        lr_scheduler_kwargs=dict(train.lr_scheduler_kwargs),
        neftune_noise_alpha=train.neftune_noise_alpha,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # a non-finite loss is the gradient watch's to stop, not to be averaged away
        save_strategy="steps",  # which also saves the last step, whatever save_steps is
        save_steps=train.save_steps or NEVER,
        eval_strategy="steps" if train.eval_steps else "no",
        eval_steps=train.eval_steps,
        metric_for_best_model="loss" if train.eval_steps else None,
        greater_is_better=False,
        seed=train.seed,
        data_seed=recipe.data.seed,
        full_determinism=train.deterministic,
        bf16=autocast is torch.bfloat16,
        fp16=autocast is torch.float16,
        gradient_checkpointing=False,  # the plan decides
        use_cpu=device.type == "cpu",
        ddp_timeout=int(timeout.total_seconds()),
        report_to=list(train.report_to) or "none",
        disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},
    )
    # otherwise ACCELERATE_MIXED_PRECISION decides, which accelerate's launcher sets and the recipe knows nothing of
    args.mixed_precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return args


def make_trainer(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    documents: Any,
    heldout: PackedRows | None,
    callbacks: list[TrainerCallback],
    args: SFTConfig | None = None,
) -> SFTTrainer:
    """Make the trainer of a loaded model, with the recipe's settings (`args` if they are made already)."""
    train = recipe.train
    trainer = SFTTrainer(
        model,
        args or training_arguments(recipe),
        train_dataset=documents.select_columns(["input_ids", "labels"]),
        eval_dataset=heldout if train.eval_steps else None,
        tokenizer=tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.keep = train.keep_checkpoints
    if isinstance(train.logging_steps, float):  # which transformers would compare with a checkpoint's number of steps
        trainer.args.logging_steps = math.ceil(train.logging_steps * planned_steps(trainer))
    return trainer


def planned_steps(trainer: SFTTrainer) -> int:
    """Count the optimiser steps of the whole run, as the trainer does."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    each = max(-(-len(trainer.get_train_dataloader()) // args.gradient_accumulation_steps), 1)
    return math.ceil(args.num_train_epochs * each)


def autocast_dtype(recipe: Recipe) -> torch.dtype | None:
    """Return the dtype of autocast, if any.

    LoRA computes in its base's own dtype, float32 masters compute in 16 bits, and float16 always needs autocast for its
    loss scaling.
    """
    dtype = resolve_dtype(recipe.precision.dtype, default_device())
    full = recipe.adapter.method == "full"
    return dtype if dtype is torch.float16 or (full and dtype is torch.bfloat16) else None


def check_device(recipe: Recipe, device: str, console: Console) -> None:
    """Refuse what this kind of device can't do at all, and say what it passes over."""
    if device == "cuda":
        return
    if recipe.packing.graph == "on":
        raise ConfigError("packing.graph: on without a CUDA device", "leave packing.graph out: auto uses one on GPUs")
    if recipe.memory.feed_forward == "tiled":
        raise ConfigError(
            "memory.feed_forward: tiled without a CUDA device: tiles are fused layers'", "leave memory.feed_forward out"
        )
    if recipe.precision.compute != "dtype":
        raise ConfigError(
            f"precision.compute: {recipe.precision.compute} without a CUDA device", "leave precision.compute out here"
        )
    if recipe.memory.gradient_checkpointing in ("offload", "unsloth"):
        asked = f"memory.gradient_checkpointing: {recipe.memory.gradient_checkpointing}"
        console.print(f"[yellow]{asked} moves inputs to host memory, where they are already: layers are recomputed[/]")
    if recipe.memory.budget is not None:
        console.print(f"[yellow]memory.budget {recipe.memory.budget} is of GPU memory: nothing limits this CPU run[/]")
