"""Scripts of Unsloth run with their imports changed, and what they name that is not here is answered."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import pronghorn
from pronghorn import FastLanguageModel, FastModel, SFTTrainer
from pronghorn.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only
from pronghorn.errors import ConfigError, DataError, PronghornError, UnsupportedError
from support.forked import forked
from support.templates import with_template

TURNS = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A cat sat."}]
NOTEBOOK = """
from unsloth import FastLanguageModel, is_bfloat16_supported
import torch
max_seq_length = 256
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = MODEL, max_seq_length = max_seq_length, dtype = None, load_in_4bit = False, load_in_16bit = True,
    device_map = "auto", full_finetuning = False, use_exact_model_name = True, low_cpu_mem_usage = True,
)
model = FastLanguageModel.get_peft_model(
    model, r = 16, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = 16, lora_dropout = 0, bias = "none", use_gradient_checkpointing = "unsloth", random_state = 3407,
    use_rslora = False, loftq_config = None, max_seq_length = max_seq_length, ensure_weight_tying = True,
)
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only
tokenizer = get_chat_template(tokenizer, chat_template = "llama-3.1")
def formatting_prompts_func(examples):
    convos = examples["conversations"]
    texts = [tokenizer.apply_chat_template(c, tokenize = False, add_generation_prompt = False) for c in convos]
    return {"text": texts}
from datasets import load_dataset
dataset = load_dataset("json", data_files = "rows.json", split = "train")
dataset = standardize_sharegpt(dataset)
dataset = dataset.map(formatting_prompts_func, batched = True)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset,
    args = SFTConfig(
        dataset_text_field = "text", max_length = max_seq_length, packing = False,
        per_device_train_batch_size = 2, gradient_accumulation_steps = 2, warmup_steps = 1, max_steps = 2,
        learning_rate = 2e-4, logging_steps = 1, optim = "adamw_torch", weight_decay = 0.01,
        lr_scheduler_type = "linear", seed = 3407, output_dir = "outputs", report_to = "none",
        fp16 = False, bf16 = is_bfloat16_supported(),
    ),
)
trainer = train_on_responses_only(
    trainer,
    instruction_part = "<|start_header_id|>user<|end_header_id|>\\n\\n",
    response_part = "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
)
trainer_stats = trainer.train()
FastLanguageModel.for_inference(model)
messages = [{"role": "user", "content": "Who?"}]
inputs = tokenizer.apply_chat_template(messages, tokenize = True, add_generation_prompt = True, return_tensors = "pt")
inputs = inputs["input_ids"] if not isinstance(inputs, torch.Tensor) else inputs
outputs = model.generate(input_ids = inputs, max_new_tokens = 4, use_cache = True)
model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model.save_pretrained_merged("merged", tokenizer, save_method = "merged_16bit", safe_serialization = True)
"""
ALPACA = """
from unsloth import FastLanguageModel
import torch
length = 256
options = dict(max_seq_length = length, dtype = None, load_in_4bit = True)
model, tokenizer = FastLanguageModel.from_pretrained(model_name = MODEL, **options)
model = FastLanguageModel.get_peft_model(
    model, r = 16, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = 16, lora_dropout = 0, bias = "none", use_gradient_checkpointing = "unsloth", random_state = 3407,
    use_rslora = False, loftq_config = None,
)
prompt = "Task: {} Input: {} Answer: {}"
def texts_of(rows):
    triples = zip(rows["instruction"], rows["input"], rows["output"])
    return {"text": [prompt.format(*triple) + tokenizer.eos_token for triple in triples]}
from datasets import load_dataset
dataset = load_dataset("json", data_files = "alpaca.json", split = "train").map(texts_of, batched = True)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset,
    args = SFTConfig(
        dataset_text_field = "text", max_length = length, dataset_num_proc = 2, packing = False,
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, warmup_steps = 1, max_steps = 3,
        learning_rate = 2e-4, logging_steps = 1, optim = "adamw_8bit", weight_decay = 0.001,
        lr_scheduler_type = "linear", seed = 3407, output_dir = "outputs", report_to = "none", bf16 = False,
    ),
)
stats = trainer.train()
print(stats.metrics["train_runtime"])
FastLanguageModel.for_inference(model)
inputs = tokenizer([prompt.format("Go on", "1, 1", "")], return_tensors = "pt").to(model.device)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens = 8, use_cache = True)))
from transformers import TextStreamer
model.generate(**inputs, streamer = TextStreamer(tokenizer), max_new_tokens = 8)
asked = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Go on: 1, 1, 2"}], tokenize = True, add_generation_prompt = True,
    return_tensors = "pt", return_dict = True,
)
streamer = TextStreamer(tokenizer, skip_prompt = True)
model.generate(**asked, streamer = streamer, max_new_tokens = 8, temperature = 1.5, min_p = 0.1, do_sample = True)
model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model, tokenizer = FastLanguageModel.from_pretrained(model_name = "lora_model", **options)
FastLanguageModel.for_inference(model)
model.save_pretrained_merged("model", tokenizer, save_method = "merged_16bit")
model.save_pretrained_merged("model_lora", tokenizer, save_method = "lora")
model.save_pretrained_gguf("model_gguf", tokenizer)
model.save_pretrained_gguf("model_f16", tokenizer, quantization_method = "f16")
"""
"""The notebook for texts: Alpaca's prompt, a base in 4 bits, answers as they come, and every way to save."""
PAGE = (Path(__file__).parents[1] / "docs/migrate.md").read_text()
DIFF = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
CHANGES = [(old[1:], new[1:]) for old, new in zip(DIFF[::2], DIFF[1::2], strict=True)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Path:
    """Return stories260k with Llama 3's special tokens."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = with_template("llama-3", stories)
    model = AutoModelForCausalLM.from_pretrained(stories)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_notebook_s_script_runs_with_the_lines_of_the_page_changed(llama: Path, tmp_path: Path) -> None:
    script = NOTEBOOK.replace("MODEL", repr(str(llama)))
    assert len(CHANGES) <= 3
    for old, new in CHANGES:
        assert old in script.splitlines() and DIFF[0].startswith("-")
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(script)
    Dataset.from_list([{"conversations": TURNS}] * 8).to_json(tmp_path / "rows.json")
    done = forked(tmp_path, functools.partial(runpy.run_path, "script.py", run_name="__main__"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "lora_model/adapter_model.safetensors").is_file()
    assert (tmp_path / "merged/model.safetensors").is_file()


@pytest.mark.slow
def test_the_notebook_for_texts_runs_with_its_imports_changed(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("gguf")
    script = ALPACA.replace("MODEL", repr(str(llama)))
    changes = {
        "from unsloth import FastLanguageModel": "from pronghorn import FastLanguageModel, SFTTrainer",
        "from trl import SFTTrainer, SFTConfig": "from trl import SFTConfig",
    }
    for old, new in changes.items():
        assert old in script.splitlines()
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(script)
    rows = [{"instruction": "Say it", "input": "", "output": f"A cat sat by {number} trees."} for number in range(40)]
    Dataset.from_list(rows).to_json(tmp_path / "alpaca.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    for file in ("lora_model/adapter_model.safetensors", "model/model.safetensors", "model_lora/adapter_config.json"):
        assert (tmp_path / file).is_file(), file
    assert list((tmp_path / "model_gguf").glob("*.gguf")) and list((tmp_path / "model_f16").glob("*.gguf"))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"load_in_8bit": True}, "load_in_4bit=True"),
        ({"local_files_only": True}, "HF_HUB_OFFLINE=1"),
        ({"device_map": "balanced"}, "torchrun"),
        ({"fast_inference": True, "max_lora_rank": 32}, "vLLM"),
        ({"attn_implementation": "flash_attention_2"}, "attention="),
        ({"num_labels": 1}, "TRL alone"),  # `attach` refuses it
    ],
)
def test_an_argument_of_unsloth_s_is_answered(argument: dict[str, Any], says: str, stories: Path) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(says)) as error:
        FastLanguageModel.from_pretrained(str(stories), max_seq_length=128, **argument)
    assert all(name in error.value.problem for name in argument)


def test_names_that_are_not_here_are_answered_at_the_import() -> None:
    for name, says in (
        ("PatchDPOTrainer", "leave it out"),
        ("FastVisionModel", "on text"),
        ("unsloth_train", "train()"),
        ("UnslothTrainingArguments", "embedding_learning_rate"),
    ):
        with pytest.raises(ImportError, match=says):
            getattr(pronghorn, name)
    with pytest.raises(ImportError, match=r"dataset\.map"):
        from pronghorn.chat_templates import to_sharegpt  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        pronghorn.nobody  # noqa: B018


def test_methods_that_are_not_here_are_answered(stories: Path) -> None:
    model, _ = FastModel.from_pretrained(str(stories), max_seq_length=128)
    with pytest.raises(UnsupportedError, match=r"model\.generate"):
        model.fast_generate("Who?")
    with pytest.raises(UnsupportedError, match="hf upload"):
        FastLanguageModel.save_pretrained_merged(model, "merged", push_to_hub=True)


def test_templates_by_unsloth_s_names(stories: Path) -> None:
    tokenizer = with_template("llama-3", stories)
    assert get_chat_template(tokenizer, "llama-3.1") is tokenizer and tokenizer.eos_token == "<|eot_id|>"
    for other in ("zephyr", "qwen3-instruct"):
        with pytest.raises(ConfigError, match="leave the call out"):
            get_chat_template(tokenizer, other)
    with pytest.raises(ConfigError, match="standardize_sharegpt"):
        get_chat_template(tokenizer, "llama-3.1", mapping={"role": "from", "content": "value"})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"system_message": "Be brief."}, r"data\.system_prompt"),
        ({"chat_templat": "llama-3"}, r"did you mean chat_template\?"),
        ({"map_eos_token": False}, "generation stops at the token that ends turns"),
        ({"mapping": {"role": "role", "content": "content", "user": "human"}}, "standardize_sharegpt"),
    ],
)
def test_a_template_s_options_are_not_passed_over(options: dict[str, Any], told: str, stories: Path) -> None:
    tokenizer = with_template("chatml", stories)
    with pytest.raises(PronghornError, match=told):
        get_chat_template(tokenizer, **options)
    usual = {"mapping": {"role": "role"}, "map_eos_token": True, "system_message": None}
    assert get_chat_template(tokenizer, "chatml", **usual) is tokenizer


def test_templates_follow_the_options_of_their_originals(stories: Path) -> None:
    turns = [{"role": "user", "content": "Who?"}]
    asked = functools.partial(get_chat_template(with_template("gpt-oss", stories), "gptoss").apply_chat_template, turns)
    assert "Reasoning: high\n" in asked(tokenize=False, reasoning_effort="high")
    assert "Reasoning: medium\n" in asked(tokenize=False)
    asked = functools.partial(get_chat_template(with_template("qwen-3", stories), "qwen3").apply_chat_template, turns)
    prompt = asked(tokenize=False, add_generation_prompt=True)
    assert asked(tokenize=False, add_generation_prompt=True, enable_thinking=True) == prompt
    quiet = asked(tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert quiet == prompt + "<think>\n\n</think>\n\n" and asked(tokenize=False, enable_thinking=False) in prompt


def test_a_reloaded_adapter_stops_where_its_template_ends_turns(llama: Path, tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(llama), max_seq_length=128)
    before, end = model.generation_config.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")
    model = FastLanguageModel.get_peft_model(model, r=4)
    model.save_pretrained(tmp_path / "lora")
    get_chat_template(tokenizer, "llama-3").save_pretrained(tmp_path / "lora")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "lora"), max_seq_length=128)
    assert end not in before and again.generation_config.eos_token_id == [end, *before]


def test_options_of_turns_and_responses_are_answered() -> None:
    rows = Dataset.from_list([{"conversations": TURNS}])
    assert standardize_sharegpt(rows, num_proc=2, batch_size=1000).num_rows == 1
    with pytest.raises(UnsupportedError, match=r"did you mean aliases_for_user\?"):
        standardize_sharegpt(rows, aliases_of_user=["customer"])
    with pytest.raises(UnsupportedError, match=r"data\.loss_on: last"):
        train_on_responses_only(None, "a", "b", last_response_only=True)
    with pytest.raises(ConfigError, match="give the SFTTrainer"):
        train_on_responses_only(None, "a", "b", num_proc=1, force_match=True, last_response_only=False)


@pytest.mark.parametrize("name", ["llama-31", "llama-3.2", "llama-3.3"])
def test_the_later_llamas_have_the_template_of_llama_3_1(name: str, stories: Path) -> None:
    tokenizer = get_chat_template(with_template("llama-3", stories), name)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False)
    assert text.startswith(f"{tokenizer.bos_token}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date")


def test_turns_become_messages() -> None:
    dataset = standardize_sharegpt(Dataset.from_list([{"conversations": TURNS}]))
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat sat."}]
    assert dataset[0]["conversations"] == messages and standardize_sharegpt(dataset) is dataset
    with pytest.raises(DataError, match="leave standardize_sharegpt out"):
        standardize_sharegpt(Dataset.from_list([{"text": "a"}]))


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("keys", [("role", "content"), ("role", "value"), ("from", "value")])
def test_sharegpt_s_roles_become_messages_under_any_keys(column: str, keys: tuple[str, str]) -> None:
    turns = [dict(zip(keys, turn, strict=True)) for turn in (("human", "Who?"), ("gpt", "A cat."), ("input", "So?"))]
    fine = [dict(zip(keys, ("system", "Be brief."), strict=True))]
    rows = standardize_sharegpt(Dataset.from_list([{column: fine}, {column: turns}]))
    roles = [(turn["role"], turn["content"]) for turn in rows[1][column]]
    assert roles == [("user", "Who?"), ("assistant", "A cat."), ("user", "So?")]
    with pytest.raises(DataError, match="narrator"):
        standardize_sharegpt(
            Dataset.from_list([{column: turns}, {column: [dict(zip(keys, ("narrator", "x"), strict=True))]}])
        )


def test_what_stands_beside_a_message_stays() -> None:
    turns = [{"role": "human", "content": "Who?", "name": "Ann"}, {"role": "gpt", "content": "A cat.", "name": None}]
    [row] = standardize_sharegpt(Dataset.from_list([{"messages": turns}]))
    assert row["messages"][0] == {"role": "user", "content": "Who?", "name": "Ann"}


def test_adapters_after_full_fine_tuning_are_refused(stories: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=128, full_finetuning=True)
    with pytest.raises(ConfigError, match="every weight is trained, or adapters alone"):
        FastLanguageModel.get_peft_model(model, r=4)


@pytest.mark.parametrize("argument", [{"max_seq_length": 128}, {"dataset_text_field": "text"}, {"packing": True}])
def test_the_trainer_s_old_arguments_lead_to_its_config(argument: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"give args=SFTConfig\("):
        SFTTrainer(model=None, train_dataset=None, **argument)


def test_a_collator_is_refused_in_a_line(stories: Path) -> None:
    from transformers import DataCollatorForSeq2Seq
    from trl import SFTConfig

    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=128)
    args = SFTConfig("out", packing=True, max_length=128, report_to="none", bf16=False)
    with pytest.raises(UnsupportedError, match="leave data_collator out") as error:
        SFTTrainer(model, args, tokenizer=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer))
    assert len(str(error.value)) < 120
