"""Mistakes in scripts that a stranger made with malice: names, arguments and orders of calls of Unsloth's and TRL's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import PeftModel
from trl import SFTConfig

import pronghorn
from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.chat_templates import get_chat_template, standardize_sharegpt
from support.mistakes import TEMPLATE, check_script

ROWS = Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 8)
KTO_ROW = {"prompt": "a", "completion": "b", "label": True}
CHATS = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8)
ALPACA = Dataset.from_list([{"instruction": "Say it", "input": "now", "output": "a cat."}] * 8)


def load(model: Path, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(model), max_seq_length=128, **options)


def lora(model: Path, **options: Any) -> Any:
    return FastLanguageModel.get_peft_model(load(model)[0], **{"r": 4, **options})


def trainer(model: Any, rows: Any = ROWS, config: dict[str, Any] | None = None, **options: Any) -> Any:
    args = {"packing": True, "max_length": 128, "max_steps": 1, "bf16": False, "report_to": "none"}
    return SFTTrainer(
        model=model, train_dataset=rows, args=SFTConfig(**{"output_dir": "out", **args, **(config or {})}), **options
    )


def with_template(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def changed(model: Any, method: str, *args: Any) -> Any:
    """Call a method of a model by its path, and return the model."""
    operator.attrgetter(method)(model)(*args)
    return model


def adapters_late(model: Path) -> None:
    base, tokenizer = load(model)
    late = trainer(base, processing_class=tokenizer)
    FastLanguageModel.get_peft_model(base, r=4)
    late.train()


def loaded_by_peft(model: Path) -> Any:
    lora(model).save_pretrained("adapter")
    return PeftModel.from_pretrained(load(model)[0], "adapter")


SCRIPTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "an argument misspelt": (lambda m: load(m, max_seq_len=64), "max_seq_len", "did you mean max_seq_length?"),
    "no name": (lambda m: FastLanguageModel.from_pretrained(None), "model_name None", "a hub name"),  # type: ignore[arg-type]
    "a rank in quotes": (lambda m: lora(m, r="16"), "r = '16' is not a number", "r=16"),
    "dropout of everything": (lambda m: lora(m, lora_dropout=1.0), "lora_dropout = 1.0", "0.05"),
    "a bias unknown": (lambda m: lora(m, bias="some"), "bias = 'some'", "'lora_only'"),
    "LLaMA-Factory's name for it": (lambda m: lora(m, lora_rank=8), "lora_rank", "as r"),
    "a norm": (lambda m: lora(m, target_modules=["norm"]), "'norm' is not a linear", "q_proj"),
    "without the MLPs": (lambda m: lora(m, finetune_mlp_modules=False), "finetune_mlp_modules", "target_modules"),
    "both of from_pretrained's": (
        lambda m: FastLanguageModel.get_peft_model(load(m)),
        "got a tuple, no model",
        "model, tokenizer =",
    ),
    "both for inference": (lambda m: FastLanguageModel.for_inference(load(m)), "got a tuple", "model, tokenizer ="),
    "adapters after the trainer": (adapters_late, "after the trainer was made", "before SFTTrainer"),
    "after a merge": (
        lambda m: trainer(lora(m).merge_and_unload()).train(),
        "no weight of the model",
        "get_peft_model",
    ),
    "an adapter as PEFT loads it": (
        lambda m: trainer(loaded_by_peft(m)).train(),
        "its adapter is frozen",
        "is_trainable=True",
    ),
    "an adapter that is merged": (
        lambda m: trainer(changed(lora(m), "merge_adapter")).train(),
        "merged into the model's weights",
        "unmerge_adapter()",
    ),
    "adapters that are off": (
        lambda m: trainer(changed(lora(m), "base_model.disable_adapter_layers")).train(),
        "its adapters are switched off",
        "enable_adapter_layers()",
    ),
    "no adapter left": (
        lambda m: trainer(changed(lora(m), "delete_adapter", "default")),
        "the model's adapters were deleted",
        "model.unload()",
    ),
    "a model to resume from": (
        lambda m: trainer(lora(m)).train(resume_from_checkpoint=str(m)),
        "not a checkpoint to resume from",
        "True for its newest; delete one that is not whole",
    ),
    "adapters and peft_config": (lambda m: trainer(lora(m), peft_config=object()), "peft_config", "leave peft_config"),
    "a rate in quotes": (lambda m: trainer(lora(m), config={"learning_rate": "2e-4"}), "'2e-4'", "as a number"),
    "a tensor of data": (lambda m: trainer(lora(m), torch.ones(4, 4)), "is a Tensor", "load_dataset("),
    "a null": (
        lambda m: trainer(lora(m), Dataset.from_list([{"text": "a"}, {"text": None}])),
        "row 2: text",
        "filter(",
    ),
    "the assistant's turns of texts": (
        lambda m: trainer(lora(m), config={"assistant_only_loss": True}),
        "assistant_only_loss, and rows are no conversations",
        "the completions alone are trained anyway",
    ),
    "the assistant's turns by a template without marks": (
        lambda m: trainer(lora(m), CHATS, {"assistant_only_loss": True}, tokenizer=with_template(load(m)[1])),
        "doesn't mark the assistant's turns",
        "train_on_responses_only(",
    ),
    "no clipping": (
        lambda m: trainer(lora(m), config={"max_grad_norm": None}),
        "max_grad_norm is None",
        "or write 0",
    ),
    "the best of several sets": (
        lambda m: trainer(
            lora(m),
            config={"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True},
            eval_dataset={"new": ROWS, "old": ROWS},
        ),
        "metric_for_best_model = 'loss'",
        "'eval_new_loss', 'eval_old_loss'",
    ),
    "offloading without a GPU": (
        lambda m: trainer(lora(m), config={"activation_offloading": True, "use_cpu": True}),
        "activation_offloading on the CPU",
        "leave it out",
    ),
    "no turn": (
        lambda m: trainer(lora(m), Dataset.from_list([{"messages": []}, {"messages": []}])),
        "row 1: messages is empty",
        "filter(",
    ),
    "texts called prompt": (
        lambda m: trainer(lora(m), Dataset.from_list([{"prompt": "a"}]), {"dataset_text_field": "prompt"}),
        "dataset_text_field = 'prompt'",
        "rename_column",
    ),
    "pairs": (
        lambda m: trainer(lora(m), Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])),
        "preference pairs",
        "pronghorn docs preference-training",
    ),
    "answers of which some are bad": (
        lambda m: trainer(lora(m), Dataset.from_list([KTO_ROW, KTO_ROW | {"label": False}])),
        "KTO's rows",
        'filter(lambda row: row["label"])',
    ),
    "Alpaca's columns": (lambda m: trainer(lora(m), ALPACA), "no known format", "+ row['input']"),
    "a system message beside a question": (
        lambda m: trainer(lora(m), Dataset.from_list([{"system_prompt": "s", "question": "q", "response": "r"}])),
        "no known format",
        "'prompt': row['system_prompt'] + '\\n' + row['question']",
    ),
    "a function for batches": (
        lambda m: trainer(lora(m), ALPACA, formatting_func=lambda rows: [rows["instruction"]]),
        "returns a list",
        "batched=True",
    ),
    "responses of a model": (
        lambda m: pronghorn.train_on_responses_only(load(m)[0], "a", "b"),
        "got a LlamaForCausalLM",
        "SFTTrainer",
    ),
    "a template of another family": (
        lambda m: get_chat_template(load(m)[1], "chatml"),
        "chat_template chatml needs special tokens that the tokenizer lacks: <|im_start|>, <|im_end|>",
        "in scripts by tokenizer.add_tokens",
    ),
    "a template of one's own": (
        lambda m: get_chat_template(load(m)[1], ("{{ x }}", "</s>")),  # type: ignore[arg-type]
        "tuple",
        "tokenizer.chat_template = TEXT",
    ),
    "turns of a customer": (
        lambda m: standardize_sharegpt(Dataset.from_list([{"conversations": [{"from": "customer", "value": "a"}]}])),
        "from 'customer'",
        "aliases_for_user",
    ),
    "every split": (lambda m: standardize_sharegpt(DatasetDict(train=ROWS)), "a DatasetDict", 'split="train"'),
    "Unsloth's GGUF": (
        lambda m: load(m)[0].save_pretrained_gguf("g", load(m)[1], quantization_method="fast_quantized"),
        "'fast_quantized'",
        "q8_0",
    ),
    "a GGUF to the hub": (lambda m: load(m)[0].push_to_hub_gguf("a/b"), "push_to_hub_gguf", "hf upload"),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_stranger_s_script_is_answered(
    script: tuple[Callable[[Path], Any], str, str], tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_script(script, stories, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FastLlamaModel", "FastLanguageModel"),
        ("SFTConfig", "from trl import"),
        ("LoraConfig", "from peft import"),
        ("DataCollatorForCompletionOnlyLM", "leave it out"),
        ("get_chat_template", "pronghorn.chat_templates"),
    ],
)
def test_names_of_others_are_answered(name: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        getattr(pronghorn, name)


def test_remedies_for_scripts_help(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = load(stories)
    again = FastLanguageModel.get_peft_model(FastLanguageModel.get_peft_model(model, r=4).merge_and_unload(), r=4)
    joined = ALPACA.map(lambda row: {"prompt": row["instruction"] + "\n" + row["input"], "completion": row["output"]})
    config = {"output_dir": str(tmp_path), "logging_steps": 1}
    done = trainer(again, joined, config, processing_class=tokenizer)
    done.train()
    assert done.state.log_history[0]["loss"] > 0
    turns = [{"from": "customer", "value": "Who?"}, {"from": "gpt", "value": "A cat."}]
    rows = standardize_sharegpt(Dataset.from_list([{"conversations": turns}]), aliases_for_user=["customer"])
    assert [turn["role"] for turn in rows[0]["conversations"]] == ["user", "assistant"]
