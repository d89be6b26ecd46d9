"""What Unsloth's scripts name and Pronghorn does otherwise: arguments that ask for what happens anyway, and answers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pronghorn.errors import PronghornError, UnsupportedError


class ElsewhereError(PronghornError, ImportError):
    """A name that Unsloth's scripts import and that is not here, with what to write."""


_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "load_in_16bit": (True,),
    "device_map": ("auto", "sequential", "cuda", "cuda:0", {"": 0}, {"": "cuda"}),
    "fix_tokenizer": (True,),
    "task_type": ("CAUSAL_LM",),
    "init_lora_weights": (True,),
    "finetune_language_layers": (True,),
    "finetune_attention_modules": (True,),
    "finetune_mlp_modules": (True,),
    "disable_log_stats": (True,),
    "maximum_memory_usage": (0.75, 0.9),
    "use_exact_model_name": (True,),
    "low_cpu_mem_usage": (True,),
    "safe_serialization": (True,),
    "ensure_weight_tying": (True,),
}
"""Arguments with the values that ask for what happens anyway."""
_PARTS = ("finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules")
"""Parts of a model, which False leaves out."""
_ASKING = {**dict.fromkeys(_PARTS, False), "init_lora_weights": False, "layers_to_transform": 0}
"""Arguments that ask for something by a value that looks like nothing: B that isn't zero, the first layer alone."""
_INSTEAD = {
    "attn_implementation": "choose by attention='tiled' or 'flash', or leave it out",
    "cache_dir": "set HF_HOME in the environment",
    "device_map": "leave it out: the model goes to this process's GPU; pronghorn train or torchrun use several",
    "fast_inference": "leave it out: model.generate() is transformers' own; vLLM serves the merged folder",
    "finetune_vision_layers": "set it to False: training is text only",
    "gpu_memory_utilization": "leave it out: it is vLLM's",
    "layers_pattern": "leave it out, or name whole module paths in target_modules",
    "layers_to_transform": "leave it out, or name whole module paths in target_modules",
    "init_lora_weights": "leave it out, or train by a recipe, whose adapter.init_lora_weights takes pissa, olora, …",
    "loftq_config": "leave it out: LoftQ's adapters fit only the quantised weights that it makes itself",
    "lora_r": "give it as r",
    "lora_rank": "give it as r",
    "num_labels": "train AutoModelForSequenceClassification by transformers or TRL alone",
    "peft_config": "give its settings by their names: r=…, lora_alpha=…, target_modules=…",
    "quantization_config": "load_in_4bit=True quantises to NF4; leave it out",
    "torch_dtype": "give it as dtype",
    "load_in_8bit": "load_in_4bit=True, or leave it out for 16 bits",
    "load_in_fp8": "compute='fp8' multiplies input gradients in 8 bits, 'int8' and 'fp8_both' both; weights stay in 16",
    "last_response_only": "in a recipe data.loss_on: last trains the last answer alone",
    "return_function": "leave it out: the trainer that comes back has the new labels",
    "system_message": "put a system message before each conversation's first, or data.system_prompt into a recipe",
    "local_files_only": "set HF_HUB_OFFLINE=1 in the environment, or give the model's folder",
    "max_lora_rank": "leave it out: it is vLLM's",
    "push_to_hub": "save to a folder, then `hf upload OWNER/NAME FOLDER`",
    "random_state": "give it to get_peft_model",
    "seed": "give it as random_state",
    "rope_scaling": "set it in the model's config.json",
    **dict.fromkeys(_PARTS, "leave it out, and name the linears to adapt in target_modules"),
    "temporary_location": "leave it out: shards are written to the folder one by one",
    "token": "save to a folder, then `hf upload OWNER/NAME FOLDER`",
}
_TRLS = ("SFTConfig", *(f"{method}{part}" for method in ("DPO", "GRPO", "KTO") for part in ("Trainer", "Config")))
_TEMPLATES = ("get_chat_template", "standardize_sharegpt", "standardize_data_formats")
_NAMES = {
    "FastVisionModel": "train on text with FastLanguageModel: it loads the language model of one with towers",
    "PatchDPOTrainer": "leave it out: TRL's DPOTrainer takes the model as it is",
    "PatchFastRL": "leave it out: TRL's GRPOTrainer takes the model as it is",
    "FastSentenceTransformer": "train embeddings by sentence-transformers",
    "FastBaseModel": "use FastLanguageModel: it loads every family served",
    "UnslothTrainer": "use pronghorn.SFTTrainer",
    "UnslothTrainingArguments": "use trl.SFTConfig; for embedding_learning_rate give SFTTrainer "
    "optimizers=(OPTIMIZER, None), whose parameter groups have learning rates of their own",
    "UnslothVisionDataCollator": "leave it out: training is text only",
    "add_new_tokens": "tokenizer.add_tokens and model.resize_token_embeddings, or adapter.new_tokens in a recipe",
    "apply_chat_template": "give rows with a `messages` column to SFTTrainer: it applies the tokenizer's template",
    "create_formatting_function": "give rows with a `messages` column to SFTTrainer",
    "CHAT_TEMPLATES": "get_chat_template(tokenizer, NAME) gives a built-in one",
    "DataCollatorForCompletionOnlyLM": "leave it out: of prompt and completion the answer alone is trained; "
    "train_on_responses_only does it for texts",
    "PatchKTOTrainer": "leave it out: TRL's KTOTrainer takes the model as it is",
    "RawTextDataLoader": "give rows with a `text` column to SFTTrainer",
    "UnslothDPOTrainer": "use TRL's DPOTrainer: pronghorn docs preference-training",
    "UnslothGRPOTrainer": "use TRL's GRPOTrainer: pronghorn docs preference-training",
    "create_ollama_modelfile": "pronghorn export RUN --to ollama",
    "save_to_gguf": "model.save_pretrained_gguf(FOLDER, tokenizer)",
    "unsloth_generate": "call model.generate(...)",
    "vLLMSamplingParams": "leave it out: model.generate() is transformers' own",
    **{name: f"from trl import {name}" for name in _TRLS},
    **{name: f"from peft import {name}" for name in ("LoraConfig", "PeftModel", "AutoPeftModelForCausalLM")},
    **{name: f"from pronghorn.chat_templates import {name}" for name in _TEMPLATES},
    "TextStreamer": "from transformers import TextStreamer",
    "to_sharegpt": "make a `messages` column by dataset.map",
    "unsloth_train": "call trainer.train()",
}
_METHODS = {
    "push_to_hub_gguf": "model.save_pretrained_gguf(FOLDER, tokenizer), then `hf upload OWNER/NAME FOLDER`",
    "fast_generate": "model.generate(...) after FastLanguageModel.for_inference(model)",
    "load_lora": "FastLanguageModel.from_pretrained(FOLDER) loads a saved adapter with its base",
    "save_lora": "model.save_pretrained(FOLDER)",
    "save_pretrained_torchao": "model.save_pretrained_merged(FOLDER, tokenizer), then torchao's own quantize_",
}


def refuse_arguments(arguments: Mapping[str, Any], where: str, known: Iterable[str] = ()) -> None:
    """Refuse arguments by name, unless they ask for nothing (False, None, 0) or for what happens anyway; of one that is
    a misspelt `known` one that is named.

    Raises:
        UnsupportedError: with what to write instead.
    """
    asked = sorted(
        name
        for name, value in arguments.items()
        if (value or (name in _ASKING and value == _ASKING[name])) and value not in _AS_IT_IS.get(name, ())
    )
    if asked:
        near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.75) for name in asked}
        meant = {name: f"did you mean {close[0]}?" for name, close in near.items() if close}
        remedies = dict.fromkeys((meant | _INSTEAD).get(name, "leave it out") for name in asked)
        raise UnsupportedError(f"{where} does not support {', '.join(asked)} yet", "; ".join(remedies))


def elsewhere(name: str) -> None:
    """Raise ElsewhereError for a name of Unsloth's (or TRL's, PEFT's) that is not here; others pass."""
    if name in _NAMES:
        raise ElsewhereError(f"{name} is not Pronghorn's", _NAMES[name])
    if re.fullmatch(r"Fast(Text|Llama|Mistral|Qwen|Gemma|Granite|Cohere)\w*Model", name):
        raise ElsewhereError(f"{name} is not Pronghorn's", "use FastLanguageModel: it loads every family served")


def answer_methods(model: Any) -> None:
    """Give the model Unsloth's methods that it lacks, each of which says what to call."""
    for name, instead in _METHODS.items():
        if not hasattr(model, name):
            setattr(model, name, _Answer(name, instead))


class _Answer:
    """A method of Unsloth's models that is not here."""

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raise what to call instead."""
        raise UnsupportedError(f"model.{self.name} is Unsloth's", self.instead)
