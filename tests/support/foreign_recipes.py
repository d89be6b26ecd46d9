"""Example configurations of Axolotl and LLaMA-Factory, written anew from the keys that their pages document."""

from __future__ import annotations

_TAIL = """
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
saves_per_epoch: 1
evals_per_epoch: 4
weight_decay: 0.0
wandb_project:
wandb_entity:
bf16: auto
tf32: false
output_dir: ./outputs/out
"""

AXOLOTL = {
    "lora-8b": """
base_model: NousResearch/Meta-Llama-3-8B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
load_in_4bit: false
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
special_tokens:
  pad_token: <|end_of_text|>
""",
    "qlora": """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: aaditya/alpaca_subset_1
    type: alpaca
val_set_size: 0
sequence_len: 4096
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_steps: 10
special_tokens: {pad_token: <|end_of_text|>}
""",
    "fft-8b": """
base_model: NousResearch/Meta-Llama-3.1-8B
datasets:
  - {path: tatsu-lab/alpaca, type: alpaca}
val_set_size: 0.05
sequence_len: 8192
sample_packing: true
pad_to_sequence_len: true
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
gradient_checkpointing_kwargs: {use_reentrant: false}
warmup_ratio: 0.1
special_tokens: {pad_token: <|end_of_text|>}
""",
    "instruct-lora-8b": """
base_model: NousResearch/Meta-Llama-3-8B-Instruct
load_in_8bit: true
chat_template: llama3
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
    field_messages: messages
    message_property_mappings: {role: role, content: content}
    roles: {user: [user], assistant: [assistant]}
sequence_len: 4096
sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
warmup_ratio: 0.1
""",
    "llama-3.2-1b-lora": """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_ratio: 0.1
special_tokens: {pad_token: "<|end_of_text|>"}
""",
    "qwen3-qlora": """
base_model: Qwen/Qwen3-8B
strict: false
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
chat_template: qwen3
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
val_set_size: 0.0
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, down_proj, up_proj]
lora_mlp_kernel: true
lora_qkv_kernel: true
lora_o_kernel: true
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_4bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
""",
    "gemma-qlora": """
base_model: google/gemma-2-9b
load_in_4bit: true
adapter: qlora
chat_template: gemma
datasets:
  - path: cgato/SlimOrcaDedupCleaned
    type: chat_template
    drop_system_message: true
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
val_set_size: 0.0
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 1
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
""",
    "mistral-qlora": """
base_model: mistralai/Mistral-7B-v0.1
load_in_4bit: true
adapter: qlora
datasets:
  - {path: mhenrichsen/alpaca_2k_test, type: alpaca}
val_set_size: 0.1
sequence_len: 8192
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_target_modules: [gate_proj, down_proj, up_proj]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
loss_watchdog_threshold: 5.0
warmup_steps: 10
special_tokens:
""",
    "tiny-llama-pretrain": """
base_model: TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
max_steps: 200
pretraining_dataset:
  - {path: allenai/c4, name: en, type: completion}
val_set_size: 0.0
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
""",
    "chatml-dpo": """
base_model: NousResearch/Meta-Llama-3-8B-Instruct
rl: dpo
datasets:
  - {path: fozziethebeat/alpaca_messages_2k_dpo_test, type: chat_template.default}
sequence_len: 4096
adapter: lora
lora_r: 32
micro_batch_size: 2
learning_rate: 0.0002
""",
}
AXOLOTL = {name: text.lstrip() + _TAIL.lstrip() for name, text in AXOLOTL.items()}

_HEAD = """
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
"""
_REST = """
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""

LLAMA_FACTORY = {
    "lora_sft": """
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
learning_rate: 1.0e-4
val_size: 0.1
eval_strategy: steps
eval_steps: 500
""",
    "full_sft": """
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
learning_rate: 1.0e-5
""",
    "lora_pretrain": """
stage: pt
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: c4_demo
cutoff_len: 2048
max_samples: 1000
learning_rate: 1.0e-4
""",
    "qlora_sft_otfq": """
quantization_bit: 4
quantization_method: bnb
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
template: llama3
cutoff_len: 2048
learning_rate: 1.0e-4
""",
    "lora_sft_tools": """
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_alpha: 32
lora_dropout: 0.1
lora_target: q_proj,v_proj
dataset: chats
template: qwen
cutoff_len: 1024
packing: true
neat_packing: true
learning_rate: 2.0e-4
""",
    "loraplus": """
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
loraplus_lr_ratio: 16.0
dataset: identity
template: llama3
cutoff_len: 2048
learning_rate: 1.0e-4
""",
    "dora": """
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
use_rslora: true
flash_attn: fa2
enable_liger_kernel: true
dataset: identity
template: llama3
mask_history: true
learning_rate: 1.0e-4
""",
    "freeze": """
stage: sft
do_train: true
finetuning_type: freeze
freeze_trainable_layers: 8
dataset: identity
template: llama3
cutoff_len: 2048
learning_rate: 1.0e-4
""",
    "neftune": """
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
neftune_noise_alpha: 5
optim: adamw_torch
weight_decay: 0.01
max_grad_norm: 0.5
seed: 42
dataset: identity
eval_dataset: alpaca_en_demo
template: default
""",
    "lora_dpo": """
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
pref_loss: sigmoid
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
""",
}
LLAMA_FACTORY = {name: _HEAD.lstrip() + text.lstrip() + _REST.lstrip() for name, text in LLAMA_FACTORY.items()}

DATASET_INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca.json", "columns": {"prompt": "question", "response": "answer"}},
    "c4_demo": {"file_name": "c4.jsonl", "columns": {"prompt": "text"}},
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "turns"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "part": {"hf_hub_url": "a/c", "split": "test", "subset": "main", "num_samples": 100},
    "talks": {
        "file_name": "talks.jsonl",
        "formatting": "openai",
        "columns": {"messages": "talk"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "seen": {
        "hf_hub_url": "a/c",
        "folder": "b",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "images": "pictures"},
        "tags": {"role_tag": "speaker", "content_tag": "text"},
    },
    "dpo_en_demo": {"file_name": "dpo.json", "ranking": True, "formatting": "sharegpt"},
}
