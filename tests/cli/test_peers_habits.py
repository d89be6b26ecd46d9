"""What users of Unsloth, Axolotl, LLaMA-Factory and TRL type, write and give by habit, in a fourth round: flags of each
command, keys and values of recipes, paths, rows, and arguments of scripts. Each answer names the value and leads on;
see also test_habits.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback
from trl import SFTConfig
from typer.testing import CliRunner

import pronghorn
from pronghorn import FastLanguageModel, SFTTrainer, train_on_responses_only
from pronghorn.chat_templates import get_chat_template, standardize_sharegpt
from pronghorn.cli.main import app
from support.mistakes import (
    ASSISTANT,
    GOOD,
    USER,
    Mistake,
    answered,
    call,
    chat,
    check_script,
    data,
    key,
    row,
    text,
)

RECIPE = "model: {name: model, max_seq_length: 128}\ndata: {train: train.jsonl}\ntrain: {output: out}\n"
DPO = {"prompt": "a", "chosen": "b", "rejected": "c"}


def flag(flags: str, written: str) -> Mistake:
    """Another tool's option of `train`, and the change or the sentence that the answer must have."""
    return call(f"No such option: {flags.split()[0].split('=')[0]}", written, "train", "recipe.yaml", *flags.split())


def option(command: str, problem: str, remedy: str, **files: str) -> Mistake:
    """Another command's option or argument."""
    return call(problem, remedy, *command.split(), **files)


def other(section: str, name: str, value: Any, remedy: str) -> Mistake:
    """A key of another tool."""
    return key(section, name, value, f"unknown key {section}.{name}", remedy)


def top(name: str, remedy: str) -> Mistake:
    """A section of another tool."""
    return text(f"{RECIPE}{name}: {{a: 1}}\n", f"unknown key {name}", remedy)


def value(section: str, name: str, given: Any, remedy: str) -> Mistake:
    """A value of another tool."""
    return key(section, name, given, f"{section}.{name} = {given!r}", remedy)


def nowhere(path: str, remedy: str, **files: str) -> Mistake:
    """Data that don't exist under this name."""
    return Mistake(f"{path} does not exist", remedy, f"data.train={path}", files=dict(files))


MISTAKES = {
    # flags of training
    "a switch before a change": flag("--bf16 train.max_steps=3", "precision.dtype=bfloat16"),
    "half precision": flag("--fp16", "precision.dtype=float16"),
    "four bits": flag("--load_in_4bit", "model.load_in_4bit=true"),
    "four bits of torchtune's": flag("--use-4bit", "model.load_in_4bit=true"),
    "packing": flag("--packing", "leave it out"),
    "recomputing": flag("--gradient_checkpointing train.max_steps=3", "memory.gradient_checkpointing=true"),
    "a data set's name": flag("--dataset_name a/b", "data.train=NAME"),
    "a model's letter": flag("-m a/b", "model.name=NAME"),
    "a recipe's letter": flag("-c recipe.yaml", "without an option"),
    "PEFT": flag("--use_peft", "adapter.method is lora"),
    "accelerate's processes": flag("--num_processes 2", "--gpus counts them"),
    "torchrun's processes": flag("--nproc_per_node=2", "--gpus counts them"),
    "a launcher": flag("--launcher accelerate", "a process for each GPU"),
    "a device": flag("--device cuda:1", "CUDA_VISIBLE_DEVICES"),
    "an evaluation": flag("--eval", "data.eval=5%"),
    "to train": flag("--do_train", "pronghorn train trains"),
    "a stage": flag("--stage dpo", "pronghorn docs preference-training"),
    "a merge": flag("--merge", "pronghorn export RUN"),
    "wandb by a switch": flag("--wandb", "train.report_to=wandb"),
    "yes to all": flag("--yes", "--overwrite"),
    "two recipes": option(
        "train recipe.yaml other.yaml", "'other.yaml' is not section.key=value", "one recipe a command"
    ),
    "a change without a recipe": option("train train.max_steps=3", "does not exist", "the recipe's path comes first"),
    # other commands
    "a commands' list of Axolotl's": option("fetch examples", "No such command 'fetch'", "init --recipe list"),
    "accelerate launch": option("accelerate launch a.py", "No such command 'accelerate'", "pronghorn train?"),
    "to serve": option("vllm-serve out", "No such command 'vllm-serve'", "pronghorn export?"),
    "to prepare data": option(
        "data prepare recipe.yaml", "No such command 'prepare'", "pronghorn data inspect RECIPE?"
    ),
    "an export's folder": option("export out --output-dir x", "No such option: --output-dir", "--output DIR"),
    "an export's repository": option("export out --repo-id a/b", "No such option: --repo-id", "--push OWNER/NAME"),
    "a token on the command line": option("export out --token x", "No such option: --token", "HF_TOKEN"),
    "a question's option": option("chat out --prompt hi", "No such option: --prompt", "| pronghorn chat RUN"),
    "a question behind the run": option("chat out hi", "unexpected extra argument", "| pronghorn chat RUN"),
    "a recipe for the doctor": option("doctor recipe.yaml", "unexpected extra argument", "pronghorn plan RECIPE"),
    "a recipe's name by an option": option("init -o a.yaml", "No such option: -o", "pronghorn init mine.yaml"),
    "a data set for init": option("init a.yaml --dataset train.jsonl", "No such option: --dataset", "--data FILE"),
    "data's address for init": option(
        "init a.yaml --data https://huggingface.co/datasets/a/b", "is an address", "here perhaps a/b"
    ),
    "a model that init can't find": option(
        "init a.yaml --model nothing/", "--model nothing/ does not exist", "hub name"
    ),
    "a model that nobody named": option(
        "init a.yaml --data train.jsonl", "SmolLM2-135M-Instruct is neither", "--model FOLDER"
    ),
    "a GPU without a name": option("plan recipe.yaml --device cuda:0", "'cuda:0' names no card", "leave --device out"),
    "a card before Volta": option("plan recipe.yaml --device P100", "p100 is older than Volta", "--device t4"),
    "a page of verify": option("verify recipe.yaml --html out.html", "No such option: --html", "--json prints"),
    "a memory's option": option("plan recipe.yaml --memory 24GB", "No such option: --memory", "--device 24GiB"),
    "a report of a recipe": option("report recipe.yaml", "recipe.yaml is a recipe, no run", "train.output"),
    "a conversion of nothing": option("convert no.yml", "no.yml does not exist", "Axolotl or LLaMA-Factory"),
    "a page that is not there": option("docs finetuning", "no page is called 'finetuning'", "did you mean finetune?"),
    # keys
    "a key of another section": other("train", "max_seq_length", 64, "model.max_seq_length?"),
    "a strategy of saving": other("train", "save_strategy", "epoch", "train.save_steps saves"),
    "a strategy of evaluation": other("train", "eval_strategy", "steps", "train.eval_steps measures"),
    "patience": other("train", "early_stopping_patience", 3, "train.patience?"),
    "the best model's metric": other("train", "metric_for_best_model", "loss", "train.load_best"),
    "DDP's switch": other("train", "ddp_find_unused_parameters", False, "leave it out"),
    "a batch found": other("train", "auto_find_batch_size", True, "repeated with less kept"),
    "to write over": other("train", "overwrite_output_dir", True, "--overwrite"),
    "a CPU by a key": other("train", "use_cpu", True, "CUDA_VISIBLE_DEVICES="),
    "a token in the recipe": other("train", "hub_token", "x", "HF_TOKEN"),
    "another loss": other("train", "loss_type", "dft", "cross-entropy"),
    "answers alone, in TRL's words": other("train", "assistant_only_loss", True, "data.loss_on?"),
    "answers alone, in Unsloth's words": other("data", "train_on_responses_only", True, "data.loss_on?"),
    "a text's column": other("data", "dataset_text_field", "text", "data.columns?"),
    "sources' ratio": other("data", "mix_strategy", "concat", "a weight"),
    "an end token": other("data", "add_eos", True, "pronghorn data inspect"),
    "a template of prompts": other("data", "prompt_template", "a", "data.chat_template?"),
    "tools in the recipe": other("data", "tools", "a", "stand in the rows"),
    "trained roles": other("data", "roles_to_train", ["assistant"], '"train": false'),
    "validation": other("data", "validation", "a", "data.eval?"),
    "QLoRA as a switch": other("adapter", "use_qlora", True, "model.load_in_4bit?"),
    "linear targets": other("adapter", "lora_target_linear", True, "all-linear is the default"),
    "PEFT's task": other("adapter", "task_type", "CAUSAL_LM", "leave it out"),
    "layers by number": other("adapter", "layers_to_transform", [0], "adapter.target_modules"),
    "an adapter beside a model": other("model", "adapter", "out", "a saved adapter's folder"),
    "a path of a model": other("model", "path", "model", "model.name?"),
    "a padding token": other("model", "pad_token", "<pad>", "need no padding"),
    "flash attention": other("model", "use_flash_attention_2", True, "packing.attention?"),
    "every weight": other("model", "full_finetuning", True, "adapter.method?"),
    "bitsandbytes' type": other("model", "bnb_4bit_quant_type", "nf4", "model.load_in_4bit?"),
    "an offload": other("memory", "cpu_offload", True, "gradient_checkpointing: offload"),
    "vLLM's share": other("memory", "gpu_memory_utilization", 0.9, "memory.budget?"),
    "8 bits by a switch": other("precision", "fp8", True, "precision.compute?"),
    "integers by a switch": other("precision", "int8", True, "precision.compute?"),
    "processes": other("launch", "num_processes", 2, "launch.gpus?"),
    "tensors in parallel": other("launch", "tensor_parallel", 2, "launch.strategy: sharded"),
    "wandb's project": other("report", "wandb_project", "a", "WANDB_PROJECT"),
    "an optimiser's section": top("optimizer", "train.optimizer?"),
    "a task's section": top("task", "leave it out"),
    "a quantisation's section": top("quantization", "model.load_in_4bit?"),
    "a hub's section": top("hub", "pronghorn export RUN --push"),
    "a merge's section": top("merge", "pronghorn export RUN"),
    # values
    "who is trained": value("data", "loss_on", "assistant", "data.loss_on: completion"),
    "OpenAI's format": value("data", "format", "openai", "data.format: messages"),
    "Axolotl's completion": value("data", "format", "completion", "text for whole texts"),
    "preferences as a format": value("data", "format", "dpo", "pronghorn docs preference-training"),
    "a template in capitals": key(
        "data", "chat_template", "chatML", "'chatML' is neither a built-in", "did you mean chatml?"
    ),
    "a newer Llama's template": key(
        "data", "chat_template", "llama-3.3", "'llama-3.3' is neither a built-in", "did you mean llama-3.1?"
    ),
    "FSDP": value("launch", "strategy", "fsdp", "launch.strategy: sharded"),
    "DDP": value("launch", "strategy", "ddp", "launch.strategy: copies"),
    "all GPUs in a recipe": value("launch", "gpus", "all", "leave it out"),
    "SDPA": value("packing", "attention", "sdpa", "leave it out"),
    "a dtype of 8 bits": value("precision", "dtype", "fp8", "precision.compute: fp8"),
    "a dtype of integers": value("precision", "dtype", "int8", "precision.compute: int8"),
    "recomputing it all": value("memory", "gradient_checkpointing", "full", "set it to true"),
    "every tracker": key("train", "report_to", "all", "'tensorboard', 'wandb' or 'trackio'", "set train.report_to ("),
    "a list for a table": key("data", "columns", ["prompt"], "data.columns = ['prompt']", "{prompt: question"),
    "weights by paths": key("data", "train", {"train.jsonl": 1.0}, "unknown key", "{path: train.jsonl, weight: …}"),
    # paths
    "a file's case": nowhere("Train.jsonl", "did you mean train.jsonl?"),
    "a file's suffix": nowhere("train", "did you mean train.jsonl?"),
    "a split behind a name": nowhere("a/b:train", "{path: a/b, split: train}"),
    "a configuration behind a name": nowhere("a/b/main", "{path: a/b, config: main}"),
    "a path of Windows": nowhere("C:\\a.jsonl", "/mnt/c"),
    "a split's name": Mistake("validation does not exist", "split: validation}", "data.eval=validation"),
    # rows
    "an OpenAI developer": chat(
        [{"role": "developer", "content": "a"}, USER, ASSISTANT], "'developer'", "system for this"
    ),
    "Gemini's role": chat([USER, {"role": "model", "content": "a"}], "'model'", "assistant for this one"),
    "a role by a number": chat([{"role": 0, "content": "a"}, ASSISTANT], "role int 0", "one of system, user"),
    "roles as keys": chat([{"user": "a"}, {"assistant": "b"}], "keys 'user'", "write a message as"),
    "a text for a content": chat(
        [{"role": "user", "text": "a"}, ASSISTANT], "keys 'role', 'text'", "write a message as"
    ),
    "system beside messages": row({"system": "a", "messages": [USER, ASSISTANT]}, "'system' beside", "put it first"),
    "KTO's rows": row({"prompt": "a", "completion": "b", "label": True}, "'label' beside", "KTOTrainer"),
    "LLaMA-Factory's KTO rows": row(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "kto_tag": False},
        "'kto_tag' beside",
        "keep those whose kto_tag is true",
    ),
    "provenance of FineTome's": row(
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "score": 1.0},
        "'score' beside 'conversations'",
        "data.format to sharegpt",
    ),
    "Axolotl's segments": row(
        {"segments": [{"label": True, "text": "a"}]}, "'segments' are no known", "write each row"
    ),
    "every split in a file": data(
        "a.json", json.dumps({"train": [DPO], "test": []}), "dict instead of a list", "under 'train', alone"
    ),
    # a model's configuration
    "no heads": Mistake(
        "num_attention_heads 0 is not an integer from 1",
        "download the model again",
        prepare=lambda f: _configured(f, num_attention_heads=0),
    ),
    "no head size": Mistake(
        "head_dim 0 is not an integer from 1", "download", prepare=lambda f: _configured(f, head_dim=0)
    ),
    "a padding token beyond the vocabulary": Mistake(
        "pad_token_id 99999 is outside the vocabulary of 512",
        "fix config.json",
        prepare=lambda folder: _configured(folder, pad_token_id=99_999),
    ),
}


def _configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_peer_s_habit_is_answered(
    mistake: Mistake, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(mistake, tmp_path, stories, monkeypatch)


ROWS = Dataset.from_list([{"prompt": "One day", "completion": " a cat sat."}] * 4)
TEXTS = Dataset.from_list([{"text": "One day a cat sat."}] * 4)


def load(model: Path, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(model), **{"max_seq_length": 128, **options})


def lora(model: Path, **options: Any) -> Any:
    return FastLanguageModel.get_peft_model(load(model)[0], **{"r": 4, **options})


def trainer(model: Path, rows: Any = ROWS, config: dict[str, Any] | None = None, **options: Any) -> Any:
    args = {"output_dir": "out", "packing": True, "max_length": 128, "bf16": False, "report_to": "none"}
    return SFTTrainer(model=lora(model), train_dataset=rows, args=SFTConfig(**args | (config or {})), **options)


SCRIPTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "TRL's name for a length": (lambda m: load(m, max_length=64), "max_length", "did you mean max_seq_length?"),
    "recomputing in quotes": (lambda m: load(m, use_gradient_checkpointing="true"), "'true'", "True, False, 'auto'"),
    "transformers' attention": (lambda m: load(m, attention="sdpa"), "attention 'sdpa'", "auto, tiled, flash"),
    "a compute unknown": (lambda m: load(m, compute="int4"), "compute 'int4'", "dtype, fp8"),
    "a dtype cut short": (lambda m: load(m, dtype="bf"), "dtype 'bf'", "float32, bfloat16"),
    "a length below 0": (lambda m: load(m, max_seq_length=-1), "max_seq_length -1", "a packed row"),
    "a seed": (lambda m: lora(m, seed=3), "does not support seed", "give it as random_state"),
    "linears between commas": (lambda m: lora(m, target_modules="q_proj,v_proj"), "'q_proj,v_proj'", "q_proj, k_proj"),
    "no linears": (lambda m: lora(m, target_modules=[]), "names no module", "q_proj, k_proj"),
    "an alpha in quotes": (lambda m: lora(m, lora_alpha="16"), "lora_alpha = '16'", "lora_alpha=16"),
    "an alpha of 0": (lambda m: lora(m, lora_alpha=0), "lora_alpha = 0", "lora_alpha / r"),
    "dropout below 0": (lambda m: lora(m, lora_dropout=-0.1), "lora_dropout = -0.1", "e.g. 0.05"),
    "a bias in other words": (lambda m: lora(m, bias="no"), "bias = 'no'", "'none', 'all'"),
    "ranks in a list": (
        lambda m: lora(m, rank_pattern=["q_proj"]),
        "rank_pattern = ['q_proj']",
        "rank_pattern={NAME: 32}",
    ),
    "ranks of nothing": (lambda m: lora(m, rank_pattern={"x": 8}), "'x' matches no module", "name a module"),
    "adapters in float16": (lambda m: lora(m, adapter_dtype="fp16"), "adapter_dtype 'fp16'", "bfloat16"),
    "a tokenizer for a model": (
        lambda m: FastLanguageModel.get_peft_model(load(m)[1]),
        "get_peft_model got a TokenizersBackend",
        "the loaded model",
    ),
    "a name for a model": (
        lambda m: FastLanguageModel.for_training(str(m)),
        "for_training got a str",
        "the loaded model",
    ),
    "both for a trainer": (
        lambda m: SFTTrainer(model=load(m), train_dataset=ROWS),
        "SFTTrainer got a tuple",
        "model, tokenizer =",
    ),
    "a tokenizer for a config": (
        lambda m: SFTTrainer(lora(m), load(m)[1], train_dataset=ROWS),
        "args is a TokenizersBackend",
        "trl.SFTConfig",
    ),
    "noise beside the config": (
        lambda m: trainer(m, neftune_noise_alpha=5),
        "neftune_noise_alpha given to SFTTrainer",
        "SFTConfig(neftune_noise_alpha=...)",
    ),
    "processes beside the config": (
        lambda m: trainer(m, dataset_num_proc=2),
        "dataset_num_proc given to SFTTrainer",
        "SFTConfig(dataset_num_proc=...)",
    ),
    "steps beside the config": (
        lambda m: trainer(m, max_steps=60, learning_rate=2e-4),
        "max_steps, learning_rate given",
        "SFTConfig(max_steps=..., learning_rate=...)",
    ),
    "a path to evaluate on": (lambda m: trainer(m, eval_dataset="a.jsonl"), "eval_dataset is a str", "load_dataset("),
    "one callback": (
        lambda m: trainer(m, callbacks=EarlyStoppingCallback()),
        "callbacks is a EarlyStoppingCallback",
        "callbacks=[…]",
    ),
    "PEFT's settings in a dict": (
        lambda m: SFTTrainer(load(m)[0], SFTConfig("o", bf16=False, max_length=64), train_dataset=ROWS, peft_config={}),
        "peft_config is a dict",
        "peft.LoraConfig(**",
    ),
    "a column of another name": (
        lambda m: trainer(m, TEXTS, {"dataset_text_field": "content"}),
        "columns text, and no 'content'",
        "dataset_text_field='text'",
    ),
    "half a batch": (
        lambda m: trainer(m, config={"per_device_train_batch_size": 2.5}),
        "per_device_train_batch_size = 2.5",
        "per_device_train_batch_size=2",
    ),
    "another loss": (lambda m: trainer(m, config={"loss_type": "dft"}), "loss_type = 'dft'", "leave loss_type"),
    "Liger": (lambda m: trainer(m, config={"use_liger_kernel": True}), "use_liger_kernel", "leave use_liger_kernel"),
    "rows cut where they fall": (
        lambda m: trainer(m, config={"packing_strategy": "wrapped"}),
        "packing_strategy = 'wrapped'",
        "leave packing_strategy",
    ),
    "metrics of logits": (
        lambda m: trainer(m, compute_metrics=lambda given: {}),
        "compute_metrics over packed rows",
        "eval_packing=False",
    ),
    "a stream": (lambda m: trainer(m, ROWS.to_iterable_dataset()), "train_dataset is streamed", "streaming=False"),
    "torch's data": (
        lambda m: trainer(m, torch.utils.data.TensorDataset(torch.ones(2, 2))),
        "is a TensorDataset",
        "load_dataset(",
    ),
    "a method for a tokenizer": (
        lambda m: lora(m).save_pretrained_merged("merged", "merged_16bit"),
        "tokenizer = 'merged_16bit'",
        "save_method='merged_16bit'",
    ),
    "a quantisation for a tokenizer": (
        lambda m: lora(m).save_pretrained_gguf("gguf", "f16"),
        "tokenizer = 'f16'",
        "quantization_method='f16'",
    ),
    "a quantisation unknown": (
        lambda m: lora(m).save_pretrained_gguf("gguf", load(m)[1], "int4"),
        "quantisation 'int4'",
        "q8_0",
    ),
    "a merge in 4 bits": (
        lambda m: lora(m).save_pretrained_merged("merged", load(m)[1], save_method="merged_4bit"),
        "'merged_4bit'",
        "merged_16bit",
    ),
    "a template and its tokenizer": (
        lambda m: get_chat_template("chatml", load(m)[1]),
        "get_chat_template(str, TokenizersBackend)",
        "the tokenizer and a template's name",
    ),
    "a template of long ago": (lambda m: get_chat_template(load(m)[1], "vicuna"), "'vicuna'", "use one of chatml"),
    "a list to standardise": (lambda m: standardize_sharegpt([{}]), "got a list", "load_dataset("),
    "responses under other marks": (
        lambda m: train_on_responses_only(trainer(m, TEXTS), "<|user|>", "<|assistant|>"),
        "no response_part",
        "print one",
    ),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_peer_s_script_is_answered(
    script: tuple[Callable[[Path], Any], str, str], tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_script(script, stories, tmp_path, monkeypatch)


def test_there_are_many_of_them() -> None:
    assert len(MISTAKES) >= 100 and len(SCRIPTS) >= 40


@pytest.mark.parametrize("name", ["FastSentenceTransformer", "FastBaseModel"])
def test_other_classes_of_unsloth_s_are_answered(name: str) -> None:
    with pytest.raises(ImportError, match=r"sentence-transformers|FastLanguageModel"):
        getattr(pronghorn, name)


@pytest.mark.parametrize(
    "change",
    [
        "train={path: train.jsonl}",  # a table for a list of one
        "train=train.jsonl",
        "columns={text: prompt}",  # the prompt as a text
    ],
)
def test_what_is_meant_is_taken(change: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text(GOOD * 3)
    Path("recipe.yaml").write_text(RECIPE)
    done = CliRunner().invoke(app, ["data", "inspect", "recipe.yaml", f"model.name={stories}", f"data.{change}"])
    assert done.exit_code == 0 and "One day" in done.output, done.output
