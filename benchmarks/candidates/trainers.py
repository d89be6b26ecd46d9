"""Train as a user's script would, from the start of the process to the saved adapter, and write when what was done.

    python -P benchmarks/candidates/trainers.py NAME ARGUMENTS.json RESULT.json      (`benchmarks.end_to_end` runs it)

A candidate's library alone is imported, by the function of its name. All get the same rows, epochs, learning rate and
LoRA, and as many tokens an update: those that pack by rows of `tokens`, the others by as many documents as fill one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

MARKS: dict[str, float] = {}
"""Moments by the clock on the wall."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def targets(given: dict[str, Any]) -> Any:
    """Return the linears that get adapters: those asked for, or all of a layer, attention's where it has experts."""
    if given["targets"]:
        return "all-linear" if given["targets"] == ["all-linear"] else given["targets"]
    config = json.loads((Path(given["model"]) / "config.json").read_text(encoding="utf-8"))
    routed = config.get("num_experts") or config.get("num_local_experts")
    return TARGETS[:4] if routed else TARGETS


def read_rows(file: str) -> list[dict[str, str]]:
    """Read prompts and completions: GSM8K's questions, or instructions with their inputs."""
    text = Path(file).read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    found = []
    for row in rows:
        prompt = row.get("question") or "\n".join(filter(None, (row.get("instruction"), row.get("input"))))
        found.append({"prompt": prompt + "\n", "completion": row.get("answer") or row.get("output") or ""})
    return [row for row in found if row["completion"]]


def read_pairs(file: str) -> list[dict[str, str]]:
    """Read prompts with a better and a worse completion."""
    rows = json.loads(Path(file).read_text(encoding="utf-8"))
    prompts = ["\n".join(filter(None, (row["instruction"], row.get("input")))) + "\n" for row in rows]
    return [
        {"prompt": prompt, "chosen": row["chosen"], "rejected": row["rejected"]}
        for prompt, row in zip(prompts, rows, strict=True)
    ]


def config_of(given: dict[str, Any], packs: bool, **more: Any) -> dict[str, Any]:
    """Return what all tell TRL's `SFTConfig`."""
    import torch

    batch = 1 if packs else given["documents"]
    return {
        "output_dir": given["folder"] + "/out", "max_length": given["tokens"], "packing": packs,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": given["micro_batches"],
        "num_train_epochs": given["epochs"], "max_steps": given["steps"],
        "learning_rate": given["learning_rate"], "lr_scheduler_type": "linear",
        "warmup_steps": 10, "logging_steps": 10, "logging_first_step": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "seed": 3407, "use_cpu": not torch.cuda.is_available(), **more,
    }  # fmt: skip


def finish(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Train and save; return what is known then."""
    import torch
    from transformers import TrainerCallback

    class First(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if "first step" not in MARKS:
                torch.cuda.synchronize() if torch.cuda.is_available() else None
                MARKS["first step"] = time.time()

    trainer.add_callback(First())
    MARKS["loaded"] = time.time()
    trainer.train()
    MARKS["trained"] = time.time()
    trainer.model.save_pretrained(given["folder"] + "/adapter")
    MARKS["saved"] = time.time()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": trainer.state.global_step, "losses": losses, "peak_bytes": peak}


def trl(given: dict[str, Any], in_4_bits: bool = False, **more: Any) -> dict[str, Any]:
    """TRL's trainer: padded batches, recomputing, as it comes; in NF4 by bitsandbytes, as TRL's QLoRA guide does."""
    import torch
    import trl as library
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    MARKS["imported"] = time.time()
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    device = "cuda" if cuda else "cpu"
    model: Any
    if in_4_bits:
        asked = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        model = AutoModelForCausalLM.from_pretrained(
            given["model"], dtype=dtype, quantization_config=asked, device_map={"": device}
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype).to(device)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=targets(given), task_type="CAUSAL_LM")
    config = library.SFTConfig(**config_of(given, packs=False, bf16=cuda, **more))
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    rows = Dataset.from_list(read_rows(given["train"]))
    trainer = library.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, peft_config=lora)
    return finish(trainer, given)


def unsloth(
    given: dict[str, Any], packs: bool = False, checkpointing: Any = "unsloth", in_4_bits: bool = False
) -> dict[str, Any]:
    """Unsloth's model with TRL's trainer as it changes that, as its notebooks do."""
    library = importlib.import_module("unsloth")
    import trl as trainers
    from datasets import Dataset

    MARKS["imported"] = time.time()
    model, tokenizer = library.FastLanguageModel.from_pretrained(
        given["model"], max_seq_length=given["tokens"], load_in_4bit=in_4_bits, local_files_only=True
    )
    model = library.FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=targets(given), random_state=3407,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip
    config = trainers.SFTConfig(**config_of(given, packs))
    rows = Dataset.from_list(read_rows(given["train"]))
    return finish(trainers.SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=config), given)


def pronghorn(
    given: dict[str, Any],
    in_4_bits: bool = False,
    compute: Any = "dtype",
    checkpointing: Any = "auto",
    packs: bool = True,
) -> dict[str, Any]:
    """Pronghorn's model and trainer, packed rows, `auto`; or what a script of TRL's asks for, unpacked and bf16."""
    import torch
    import trl as trainers
    from datasets import Dataset

    from pronghorn import FastLanguageModel, SFTTrainer
    from pronghorn.models.attach import attached

    MARKS["imported"] = time.time()
    model, tokenizer = FastLanguageModel.from_pretrained(
        given["model"], max_seq_length=given["tokens"], load_in_4bit=in_4_bits, compute=compute,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, target_modules=targets(given))
    bf16 = torch.cuda.is_available() and not packs
    config = trainers.SFTConfig(**config_of(given, packs=packs, bf16=bf16))
    rows = Dataset.from_list(read_rows(given["train"]))
    trainer = SFTTrainer(model, config, train_dataset=rows, tokenizer=tokenizer)
    found = finish(trainer, given)
    handle: Any = attached(trainer.model)
    report = {path.part: f"{path.path} ({path.why})" for path in handle.report}
    return found | {"paths": report, "graph_replays": handle.graphs.replays if handle.graphs else 0}


def begin_alike(model: Any) -> None:
    """Draw the matrices A of the trained adapter anew, the same in every candidate, so that losses can be compared.

    B is zero, so that the reference model stays what it is.
    """
    import torch

    draws = torch.Generator().manual_seed(3407)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A.default." in name:
                bound = parameter.shape[1] ** -0.5
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=draws))


def dpo(given: dict[str, Any], ours: bool, float32: bool = False, **more: Any) -> dict[str, Any]:
    """TRL's DPO of TRL's model, as it comes or in float32, or of Pronghorn's, which is in bf16 by itself."""
    import torch
    import trl as library
    from datasets import Dataset

    if ours:
        from pronghorn import FastLanguageModel
        from pronghorn.models.attach import attached
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    MARKS["imported"] = time.time()
    cuda, alike = torch.cuda.is_available(), {"r": 16, "lora_alpha": 32, "target_modules": targets(given)}
    config = library.DPOConfig(
        given["folder"] + "/out", per_device_train_batch_size=given["documents"], max_length=given["tokens"],
        num_train_epochs=given["epochs"], max_steps=given["steps"], learning_rate=given["learning_rate"],
        warmup_steps=10, logging_steps=10, logging_first_step=True, save_strategy="no", report_to="none",
        disable_tqdm=True, seed=3407, use_cpu=not cuda, bf16=cuda and not ours and not float32,
        **more,
    )  # fmt: skip
    rows = Dataset.from_list(read_pairs(given["pairs"]))
    if ours:
        model, tokenizer = FastLanguageModel.from_pretrained(
            given["model"], max_seq_length=given["tokens"], use_gradient_checkpointing=False
        )
        model = FastLanguageModel.get_peft_model(model, **alike)
        trainer = library.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)
        begin_alike(trainer.model)
        found = finish(trainer, given)
        handle: Any = attached(model)
        report = {path.part: f"{path.path} ({path.why})" for path in handle.report}
        return found | {"paths": report, "graph_replays": handle.graphs.replays if handle.graphs else 0}
    dtype = torch.bfloat16 if cuda and not float32 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype)
    lora = LoraConfig(**alike, task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    trainer = library.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=lora)
    begin_alike(trainer.model)
    return finish(trainer, given)


def evaluate(given: dict[str, Any]) -> dict[str, Any]:
    """Return the mean loss a completion's token of held-out rows, one at a time, by transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32).to(device)
    tokenizer: Any = AutoTokenizer.from_pretrained(given["model"])
    model: Any = PeftModel.from_pretrained(base, given["folder"] + "/adapter").eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in read_rows(given["held_out"])[: given["held_out_rows"]]:
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = (prompt + tokenizer(row["completion"], add_special_tokens=False)["input_ids"])[: given["tokens"]]
            if len(ids) > len(prompt):
                labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt) :]], device=device)
                loss = model(input_ids=torch.tensor([ids], device=device), labels=labels).loss
                total, count = total + float(loss) * (len(ids) - len(prompt)), count + len(ids) - len(prompt)
    return {"held_out_loss": total / count, "held_out_tokens": count}


CANDIDATES: dict[str, Any] = {
    "trl": (trl, {}),
    "trl-best": (trl, {"gradient_checkpointing": False}),
    "trl-liger": (trl, {"gradient_checkpointing": False, "use_liger_kernel": True}),
    "trl-nf4": (trl, {"in_4_bits": True}),
    "trl-nf4-liger": (trl, {"in_4_bits": True, "gradient_checkpointing": False, "use_liger_kernel": True}),
    "unsloth": (unsloth, {}),
    "unsloth-best": (unsloth, {"packs": True, "checkpointing": False}),
    "unsloth-nf4": (unsloth, {"in_4_bits": True}),
    "pronghorn": (pronghorn, {}),
    "pronghorn-unpacked": (pronghorn, {"packs": False}),
    "pronghorn-offload": (pronghorn, {"checkpointing": "offload"}),
    "pronghorn-nf4": (pronghorn, {"in_4_bits": True}),
    "pronghorn-fp8": (pronghorn, {"compute": "fp8"}),
    "pronghorn-nf4-fp8": (pronghorn, {"in_4_bits": True, "compute": "fp8"}),
    "dpo-trl": (dpo, {"ours": False}),
    "dpo-trl-best": (dpo, {"ours": False, "gradient_checkpointing": False}),
    "dpo-trl-float32": (dpo, {"ours": False, "float32": True, "gradient_checkpointing": False}),
    "dpo-pronghorn": (dpo, {"ours": True, "gradient_checkpointing": False}),
    "evaluate": (evaluate, {}),
}
"""The function of each and its own arguments."""
MODULES = {"unsloth": "unsloth", "liger": "liger_kernel", "nf4": "bitsandbytes"}
"""Modules that a candidate needs besides TRL, by a part of its name; without them it is skipped."""


def main(name: str, arguments: str, result: str) -> None:
    """Run one candidate."""
    given = json.loads(Path(arguments).read_text(encoding="utf-8"))
    function, more = CANDIDATES[name]
    found = function(given, **more)
    found["marks_s"] = {mark: moment - given["began"] for mark, moment in MARKS.items()}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
