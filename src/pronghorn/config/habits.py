"""Keys and values that people know from other tools, and what a recipe has for them."""

from __future__ import annotations

_CALLED = {
    "adapter": "lora peft",
    "adapter.method": "finetuning_type full_finetuning",
    "adapter.r": "lora_r lora_rank rank",
    "adapter.target_modules": "lora_target lora_target_modules",
    "data.chat_template": "template prompt_template",
    "data.columns": "field_messages dataset_text_field text_field text_column input_key output_key",
    "data.eval": "val_size val_set_size test_size eval_dataset validation test",
    "data.loss_on": "train_on_inputs train_on_responses_only assistant_only_loss completion_only_loss",
    "data.overflow": "truncation",
    "data.system_prompt": "system_message system",
    "data.train": "data datasets dataset train_dataset",
    "data.train.weight": "weights",
    "data.workers": "num_proc dataset_num_proc preprocessing_num_workers",
    "launch.gpus": "num_processes nproc nproc_per_node",
    "launch.strategy": "deepspeed deepspeed_config fsdp",
    "memory.budget": "max_memory gpu_memory_utilization",
    "memory.gradient_checkpointing": "gradient_checkpointing use_gradient_checkpointing",
    "model.load_in_4bit": "load_in_4bit quantization quantization_bit bits bnb_4bit_quant_type use_qlora qlora",
    "model.max_seq_length": "max_seq_len max_length sequence_len cutoff_len",
    "model.name": "model base_model model_name_or_path",
    "packing.attention": "attn_implementation flash_attention use_flash_attention_2",
    "packing.enabled": "packing packing_strategy sample_packing",
    "packing.rows_per_step": "batch_size micro_batch_size train_batch_size per_device_train_batch_size",
    "precision.compute": "fp8 int8",
    "precision.dtype": "bf16 fp16 torch_dtype",
    "train.epochs": "num_epochs num_train_epochs",
    "train.eval_steps": "evals_per_epoch",
    "train.keep_checkpoints": "save_total_limit",
    "train.learning_rate": "lr",
    "train.load_best": "load_best_model_at_end",
    "train.lr_scheduler": "lr_scheduler_type",
    "train.max_steps": "steps",
    "train.optimizer": "optim optimiser optimizer",
    "train.output": "output output_dir",
    "train.patience": "early_stopping_patience",
    "train.report_to": "wandb logging",
    "train.save_steps": "saves_per_epoch",
    "train.seed": "seed",
}
ALIASES = {name: key for key, names in _CALLED.items() for name in names.split()}
"""What other libraries call a key."""
_TOLD = {
    "adam_beta1 adam_beta2": "leave it out: the optimiser's own is used",
    "add_eos add_bos": "leave it out: pronghorn data inspect shows how documents begin and end",
    "hub hub_model_id push_to_hub": "pronghorn export RUN --push OWNER/NAME pushes what a run trained",
    "hub_token token": "leave it out: HF_TOKEN in the environment is read",
    "inference generation": "leave it out: pronghorn chat RUN asks what was trained",
    "lora_plus loraplus_lr_ratio loraplus_lr_embedding": (
        "leave it out: both of an adapter's matrices learn at train.learning_rate"
    ),
    "merge save export": "leave it out: pronghorn export RUN, after training",
    "mix_strategy ratio probs mixture": "each source in data.train has a weight",
    "model_type tokenizer_type": "leave it out: the model's own files tell it",
    "offload cpu_offload optimizer_offload": (
        "memory.gradient_checkpointing: offload keeps the layers' inputs in host memory"
    ),
    "pad_token special_tokens": "leave it out: packed rows need no padding; see adapter.new_tokens",
    "task trainer stage": "leave it out: rows of answers or texts are recognised",
    "task_type peft_type": "leave it out: adapters are LoRA's, of a causal language model",
    "tokenizer tokenizer_name": "leave it out: the model's own is used; data.chat_template sets another template",
    "torch_compile use_liger use_liger_kernel": "leave it out: layers are fused already",
    "version label_names ddp_timeout ddp_find_unused_parameters remove_unused_columns dataloader_pin_memory "
    "ignore_data_skip disable_tqdm do_train do_eval save_only_model save_safetensors": (
        "leave it out: nothing here needs it"
    ),
    "wandb_project wandb_entity project": "WANDB_PROJECT in the environment names it",
    "dataloader_num_workers": "leave it out: rows are tokenised before training",
    "device_map": "leave it out: launch.gpus and launch.strategy say what goes where",
    "group_by_length": "leave it out: packing fills rows whatever the lengths",
    "load_in_16bit": "leave it out: weights are in 16 bits unless load_in_4bit is set",
    "logging_dir": "leave it out: figures for train.report_to go into train.output",
    "per_device_eval_batch_size": "leave it out: held-out rows are packed, too",
    "resume_from_checkpoint": "leave it out: the same command goes on with an unfinished run",
    "revision": "hf download OWNER/NAME --revision REVISION --local-dir FOLDER, and give the folder as model.name",
    "rope_scaling": "set it in the model's config.json",
    "shuffle": "leave it out: rows are shuffled by data.seed",
    "streaming": "leave it out: JSON lines and Parquet are read piece by piece, and need not fit into memory",
    "run_name": "leave it out: a run is called as its train.output",
    "auto_find_batch_size": "leave it out: a step that runs out of memory is repeated with less kept",
    "eval_strategy": "leave it out: train.eval_steps measures every so many steps; before and after it is done anyway",
    "save_strategy": "leave it out: train.save_steps saves every so many steps; stopping and the end save anyway",
    "metric_for_best_model": "leave it out: train.load_best goes by the held-out loss",
    "overwrite_output_dir": "leave it out: pronghorn train RECIPE --overwrite begins anew",
    "use_cpu": "leave it out: CUDA_VISIBLE_DEVICES= in the environment hides the GPUs",
    "cache_dir": "leave it out: HF_HOME in the environment says where models and data are kept",
    "attention_dropout": "leave it out: layers drop what the checkpoint says, nothing with model.dropout: false",
    "layers_to_transform": "leave it out, or name whole module paths in adapter.target_modules",
    "lora_target_linear": "leave it out: adapter.target_modules: all-linear is the default",
    "loss_type": "leave it out: the loss is the cross-entropy of supervised tokens",
    "dataset_dir": "leave it out: data.train names files by their paths",
    "overwrite_cache": "leave it out: data that changed are tokenised anew",
    "tools": "leave it out: tools stand in the rows, beside their messages (pronghorn docs finetune)",
    "images": "leave it out: training is text only",
    "role_mapping": "rename the roles in the data; human, gpt and observation are known",
    "roles_to_train": 'leave it out: the assistant is trained; "train": false leaves one of its turns out',
    "tensor_parallel": "leave it out: launch.strategy: sharded gives each GPU a part of each layer",
    "gpu": "leave it out: launch.gpus counts GPUs, CUDA_VISIBLE_DEVICES in the environment chooses them",
}
NO_KEYS = {name: told for names, told in _TOLD.items() for name in names.split()}
"""Keys of other libraries that no key of a recipe stands for, and what to do."""
IN_SECTION = {
    "model.path": "did you mean model.name?",
    "model.adapter": "leave it out: model.name takes a saved adapter's folder, whose base it finds",
    "model.type": "leave it out: the model's own files tell it",
    "adapter.type": "did you mean adapter.method?",
    "adapter.enabled": "did you mean adapter.method? full trains every weight",
    "data.packing": "did you mean packing.enabled?",
    "data.train.type": "did you mean format, of the same source?",
    "data.train.name": "did you mean config, of a hub set?",
    "packing.strategy": "leave it out: rows are fair samples of the documents, and full",
}
"""What keys of other libraries mean in one section."""
_WRITTEN = {
    "adapter.method": {
        "qlora": "set adapter.method: lora and model.load_in_4bit: true",
        "dora": "set adapter.method: lora and adapter.use_dora: true",
    },
    "data.format": {
        "chatml openai chat chat_template conversational": (
            "set data.format: messages, or leave it out: it is recognised"
        ),
        "completion": "set data.format: text for whole texts, prompt_completion for pairs",
        "instruct instruction dolly": "set data.format: alpaca, or leave it out: it is recognised",
        "preference dpo kto pairs": "train on preferences by TRL's trainers: pronghorn docs preference-training",
    },
    "data.loss_on": {"assistant answer answers response responses output": "set data.loss_on: completion"},
    "launch.gpus": {"all": "leave it out: all are used"},
    "launch.strategy": {
        "ddp": "set launch.strategy: copies: each GPU holds the whole model",
        "fsdp fsdp2 zero2 zero3 deepspeed": "set launch.strategy: sharded: each GPU holds a part of each layer",
    },
    "memory.gradient_checkpointing": {"full all selective": "set it to true (recompute every layer), auto or offload"},
    "packing.attention": {
        "sdpa eager xformers flex_attention": (
            "leave it out: auto takes the fastest of auto, tiled, flash and per_document"
        ),
    },
    "precision.compute": {"bf16 fp16": "leave it out: it is the default"},
    "precision.dtype": {
        "mixed amp": "leave it out, or set bfloat16",
        "fp8 float8": "leave it out, and set precision.compute: fp8, which multiplies input gradients in 8 bits",
        "int8": "leave it out, and set precision.compute: int8, which multiplies frozen weights in 8-bit integers",
    },
}
INSTEAD = {
    ("adapter.init_lora_weights", "loftq"): (
        "its adapters fit only the quantised weights that LoftQ makes itself, which neither a server nor a merge has",
        "with load_in_4bit leave it out (adapters of all linears make up for what NF4 loses); without, use pissa",
    ),
    ("train.optimizer", "muon"): (
        "transformers has no Muon by name",
        "use adamw_torch_fused; a script may give SFTTrainer optimizer_cls_and_kwargs=(torch.optim.Muon, {…}), which "
        "takes 2-D weights alone, as LoRA's are",
    ),
    **{
        (key, value): ("", remedy)
        for key, remedies in _WRITTEN.items()
        for values, remedy in remedies.items()
        for value in values.split()
    },
}
"""What is wrong with values that people know from elsewhere, and what to write."""
