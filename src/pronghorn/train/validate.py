"""What the packed trainer is asked for and can't do: refused before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.compute
import torch
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import PeftModel
from trl import SFTConfig

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.models.attach import attached
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import check_model
from pronghorn.optimizers import check_optimizer
from pronghorn.text import short
from pronghorn.train import prepared_rows

_OF_CONFIG = {"max_seq_length": "max_length"}
"""Arguments that TRL's trainer once took, and the fields of SFTConfig that they became under another name."""

_NOT_EVALUATED = ("mean_token_accuracy", "entropy", "num_tokens", "aux_loss")
"""What TRL's evaluations tell beside the loss."""


def by_name(given: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments behind `model` and `args`, those given by place under the names that TRL's trainer has for
    them.

    Raises:
        ConfigError: more than it has, or one that is given both ways.
    """
    from trl import SFTTrainer

    names = [*inspect.signature(SFTTrainer).parameters][2:]
    if len(given) > len(names):
        raise ConfigError(f"{2 + len(given)} arguments by place, and SFTTrainer has {2 + len(names)}", "name them")
    placed = dict(zip(names, given, strict=False))
    if twice := sorted(placed.keys() & kwargs.keys()):
        place = 3 + names.index(twice[0])
        raise ConfigError(f"SFTTrainer was given {twice[0]} twice: as argument {place}, and by name", "leave one out")
    return {**placed, **kwargs}


def check_old_arguments(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a model that is none, and what is SFTConfig's: scripts of Unsloth give it to the trainer, as earlier
    versions of TRL took it."""
    if isinstance(model, str):
        raise UnsupportedError(
            f"model {model!r} given by name", "load it with FastLanguageModel.from_pretrained and pass the model"
        )
    if isinstance(model, tuple):
        check_model(model, "SFTTrainer")
    check_one_model(kwargs.get("model_init"))
    if moved := [name for name in kwargs if name in {*_OF_CONFIG, *(field.name for field in fields(SFTConfig))}]:
        written = ", ".join(f"{_OF_CONFIG.get(name, name)}=..." for name in moved)
        raise ConfigError(f"{', '.join(moved)} given to SFTTrainer", f"give args=SFTConfig({written}) from trl")


def check_one_model(model_init: Any) -> None:
    """Refuse what makes another model for each training (`hyperparameter_search`): rows are made for this one."""
    if model_init is not None:
        raise UnsupportedError(
            "model_init, which makes another model than the trainer was made for",
            "search in a loop of your own, with a model and a trainer for each trial",
        )


def check_tokens(trainer: Any) -> None:
    """Refuse documents with tokens that the model has no embedding of, pad by one that it has, and check lengths."""
    for name in ("train_dataset", "eval_dataset"):
        given = getattr(trainer, name)
        for dataset in given.values() if isinstance(given, dict) else [given]:
            check_ids(name, dataset, trainer.processing_class, trainer.model)
            documents = getattr(dataset, "documents", dataset)
            prepared_rows.check_lengths(name, documents, trainer.args.max_length, trainer.model)
    trainer.data_collator.pad_token_id = padding_token(trainer.data_collator.pad_token_id, trainer.model)


def padding_token(asked: int | None, model: Any) -> int:
    """Return the token that pads: 0 where none is `asked` for, or the model has no embedding of it. Nothing attends to
    it."""
    return asked if asked is not None and asked < _embedded(model) else 0


def _embedded(model: Any) -> int:
    rows: int = base_causal_lm(model).get_input_embeddings().weight.shape[0]
    return rows


def check_ids(name: str, dataset: Any, tokenizer: Any, model: Any) -> None:
    """Refuse documents with tokens that the model has no embedding of. Only where the tokenizer has such are they
    looked through."""
    rows = _embedded(model)
    documents = getattr(dataset, "documents", dataset)
    if not isinstance(documents, Dataset) or not hasattr(tokenizer, "get_vocab"):
        return
    if max(tokenizer.get_vocab().values(), default=0) < rows:
        return
    for table in documents.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        highest = pyarrow.compute.max(pyarrow.compute.list_flatten(table["input_ids"])).as_py()
        if highest is not None and highest >= rows:
            token = tokenizer.decode([highest]).strip()
            raise DataError(
                f"{name} holds the token {token!r} of id {highest:,}, and the model has embeddings of {rows:,} tokens",
                "take the model's own tokenizer, as it was published; tokens that it lacks are added by "
                "adapter.new_tokens; in scripts by model.resize_token_embeddings(len(tokenizer)) before "
                "get_peft_model, whose modules_to_save trains them",
            )


def check_row_length(asked: int | None, limit: int | None) -> int:
    """Return the tokens of a row: what the config asks for, within what the model was loaded for."""
    if asked is not None and asked < 1:
        raise ConfigError(f"max_length {asked} is below 1", "give the tokens of a row, or None for max_seq_length")
    if asked is None and limit is None:
        raise ConfigError("packing without a row length", "set max_length in SFTConfig")
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            f"max_length {asked} > {limit}, the model's max_seq_length",
            "raise max_seq_length in from_pretrained or lower max_length",
        )
    return int(asked or limit or 0)


def check_adapters(model: Any, asked: Any, packs: bool) -> None:
    """Refuse a `peft_config` beside adapters, one that is a table, and virtual tokens before packed rows."""
    if isinstance(asked, dict):
        raise ConfigError("peft_config is a dict", "give peft.LoraConfig(**SETTINGS), or call get_peft_model")
    if isinstance(model, PeftModel) and asked is not None:
        raise ConfigError("peft_config for a model that has an adapter already", "leave peft_config out")
    config = model.active_peft_config if isinstance(model, PeftModel) else asked
    if packs and getattr(config, "is_prompt_learning", False):
        raise UnsupportedError(
            f"{config.peft_type.value} puts virtual tokens before the prompt, and packed rows have no place for them",
            "set packing=False in SFTConfig, or train a LoRA adapter",
        )


def check_attached(model: Any) -> None:
    """Refuse rows of several documents where the model was detached after its trainer was made: transformers can't read
    them."""
    if attached(model) is None:
        raise ConfigError(
            "the model was detached after its trainer was made, whose rows have several documents",
            "detach after training, or call pronghorn.attach(model) again",
        )


def check_documents(name: str, documents: Any, most: int) -> None:
    """Refuse a data set of which TRL kept nothing: it drops documents without a label within `max_length`; streamed
    ones have no length. Of one token nothing is trained: none comes before it."""
    if most == 1 or (hasattr(documents, "__len__") and len(documents) == 0):
        raise DataError(
            f"no document of the {name} data set has a token to train among its first {most}",
            "raise max_length, or shorten the prompts",
        )


def check_trained_dtypes(dtypes: Iterable[torch.dtype]) -> None:
    """Refuse full fine-tuning of 16-bit weights."""
    for dtype in dtypes:
        if dtype in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"every weight is trained in {dtype}, in which updates at usual learning rates are rounded away",
                "load the model in float32 (full_finetuning=True does) and set bf16=True to compute in 16 bits",
            )


def check_no_fsdp(args: Any) -> None:
    """Refuse sharded training, after which nothing could be saved: by TrainingArguments, or by accelerate's launcher or
    plugin, which both leave it in the environment."""
    if getattr(args, "fsdp", None) or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise UnsupportedError(
            "FSDP is switched on (TrainingArguments' fsdp, or accelerate's configuration), which isn't served",
            "switch it off: torchrun gives each GPU a copy, launch.strategy: sharded in a recipe a part of the model",
        )


def use_one_gpu(args: Any) -> str | None:
    """Train on the first of several GPUs that this one process sees: transformers' `nn.DataParallel` can't go on with
    packed rows. Return what to tell about it, or None where there was nothing to do."""
    count = args.n_gpu
    if count <= 1:
        return None
    args._n_gpu = 1  # as transformers itself does for a model on several devices
    use_all = f"torchrun --nproc-per-node {count} SCRIPT.py"
    return f"one process sees {count} GPUs and trains on the first; to use all: {use_all}"


def check_arguments(args: Any, kwargs: dict[str, Any], packs_train: bool, packs_eval: bool) -> None:
    """Refuse arguments of SFTConfig and SFTTrainer that the packed loss or the collator would pass over."""
    check_no_fsdp(args)
    for field in fields(args):
        value = getattr(args, field.name)
        if isinstance(field.default, int | float) and isinstance(value, str):
            raise ConfigError(f"{field.name} = {value!r} is a text", "write it as a number, without quotes")
        if value is None and field.name in ("learning_rate", "max_grad_norm", "weight_decay"):
            raise ConfigError(f"{field.name} is None", f"leave it out, which means {field.default}, or write 0")
    if args.activation_offloading and args.device.type == "cpu":
        raise ConfigError("activation_offloading on the CPU, where activations are already", "leave it out")
    evaluated, best = kwargs.get("eval_dataset"), str(args.metric_for_best_model or "").removeprefix("eval_")
    if best and isinstance(evaluated, dict) and not any(best.startswith(f"{name}_") for name in evaluated):
        raise ConfigError(
            f"metric_for_best_model = {best!r}, and each data set of eval_dataset has its own",
            f"name one: {', '.join(repr(f'eval_{name}_loss') for name in evaluated)}",
        )
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (value := getattr(args, name)) < 1:
            raise ConfigError(f"{name} = {value} is below 1", "give the rows of a step: 1 is the least")
        if value != int(value):
            raise ConfigError(f"{name} = {value} is not a whole number", f"write e.g. {name}={round(value)}")
    if (path := args.chat_template_path) and Path(path).is_file() != path.endswith((".jinja", ".j2")):
        raise ConfigError(
            f"chat_template_path = {path!r} is {'no .jinja file' if Path(path).is_file() else 'not there'}",
            "give a .jinja file, or the name of a model whose tokenizer has the template",
        )
    if not isinstance(kwargs.get("callbacks") or [], list | tuple):
        raise ConfigError(f"callbacks is a {type(kwargs['callbacks']).__name__}", "give a list: callbacks=[…]")
    if args.learning_rate < 0:
        raise ConfigError(f"learning_rate = {args.learning_rate} is below 0", "2e-4 is common for LoRA")
    if kwargs.get("optimizers", (None,))[0] is None and kwargs.get("optimizer_cls_and_kwargs") is None:
        check_optimizer(str(getattr(args.optim, "value", args.optim)), args.device.type)
    if packs_eval and kwargs.get("compute_metrics") is not None:
        raise UnsupportedError("compute_metrics over packed rows, which have no logits", "set eval_packing=False")
    if collator := kwargs.get("data_collator"):
        name = getattr(collator, "__name__", type(collator).__name__)
        raise UnsupportedError(
            f"data_collator = {name}: the trainer packs and pads by itself", "leave data_collator out"
        )
    best = str(args.metric_for_best_model)
    if best.removeprefix("eval_") in _NOT_EVALUATED and kwargs.get("compute_metrics") is None:
        raise UnsupportedError(
            f"metric_for_best_model = {best!r}, which evaluations don't measure here",
            "use 'loss', or give compute_metrics and set eval_packing=False",
        )
    unserved = [
        ("loss_type", args.loss_type, "nll"),
        ("label_smoothing_factor", args.label_smoothing_factor, 0),
        ("use_liger_kernel", args.use_liger_kernel, False),
        ("compute_loss_func", kwargs.get("compute_loss_func"), None),
        ("auto_find_batch_size", args.auto_find_batch_size, False),  # memory that runs out is survived in another way
    ]
    if packs_train or packs_eval:
        unserved.append(("packing_strategy", args.packing_strategy, "bfd"))
        prepared = (args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
        unserved.append(("skip_prepare_dataset", prepared, False))
    for name, value, served in unserved:
        if value != served:
            raise UnsupportedError(
                f"{name} = {short(value)} is not served by Pronghorn's SFTTrainer",
                f"leave {name} at {served!r}, or use TRL's own SFTTrainer with an attached model",
            )
