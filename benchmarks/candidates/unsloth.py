"""Build Unsloth, set up as its own trainer would set it up; its import changes transformers.

Two things it needs to show its best: torch 2.11's `varlen_attn` takes grouped heads without the argument that Unsloth
looks for (torch 2.12 has it), without which it runs one attention call a document; and its packed attention, which its
trainer switches on.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from benchmarks.candidates.base import Built, Candidate, PaddedBatches, Spec, base_tensors, weights_dtype
from benchmarks.workload import Row

CHECKPOINTING: dict[str, bool | str] = {"off": False, "on": True, "offload": "unsloth", "auto": "unsloth"}


def prepare() -> None:
    from torch.nn.attention import varlen

    module: Any = varlen
    if "enable_gqa" not in inspect.signature(module.varlen_attn).parameters:
        module.varlen_attn = _with_gqa_argument(module.varlen_attn)
    if not hasattr(module, "_can_use_cudnn") and not hasattr(module, "_should_use_cudnn"):
        module._should_use_cudnn = lambda device_index: False  # as torch 2.13 answers on every GPU
    importlib.import_module("unsloth")


def _with_gqa_argument(given: Any) -> Any:
    """Add 2.12's argument to torch 2.11's function, which groups heads by their numbers and so needs no telling."""

    def varlen_attn(*args: Any, enable_gqa: bool = False, **kwargs: Any) -> Any:
        return given(*args, **kwargs)

    known = inspect.signature(given)
    argument = inspect.Parameter("enable_gqa", inspect.Parameter.KEYWORD_ONLY, default=False)
    varlen_attn.__signature__ = known.replace(  # type: ignore[attr-defined]  # callers look it up there
        parameters=[*known.parameters.values(), argument]
    )
    return varlen_attn


def build(spec: Spec) -> Built:
    FastLanguageModel = importlib.import_module("unsloth").FastLanguageModel
    checkpointing = CHECKPOINTING[spec.recompute]
    full = spec.method == "full"
    # Trained weights are asked for as its guide does: loaded in bf16 and kept in float32, as everybody's here.
    masters = {"full_finetuning": True, "float32_mixed_precision": True, "use_gradient_checkpointing": checkpointing}
    model, _ = FastLanguageModel.from_pretrained(
        spec.checkpoint,
        max_seq_length=spec.tokens,
        dtype=weights_dtype("lora"),
        load_in_4bit=spec.method == "qlora",
        local_files_only=True,
        **(masters if full else {}),
    )
    if not full:
        options = {**spec.adapters, "lora_dropout": 0, "bias": "none", "random_state": 0}
        model = FastLanguageModel.get_peft_model(model, **options, use_gradient_checkpointing=checkpointing)
    packs = spec.config["model_type"] != "gpt_oss"
    if packs:
        importlib.import_module("unsloth.utils.packing")._enable_hf_packed_attention()
    FastLanguageModel.for_training(model, use_gradient_checkpointing=bool(checkpointing))
    if packs:
        return Built(model, _make_batch, ["packed attention on, as its trainer does"], _describe if full else list)
    return Built(PaddedBatches(model), PaddedBatches.make_batch, ["padded: it refuses to pack gpt-oss"])


def _make_batch(row: Row) -> dict[str, Any]:
    import torch

    return base_tensors(row) | {"packed_seq_lengths": torch.tensor(row.lengths, dtype=torch.int32)}


def _describe() -> list[str]:
    """Tell how the layers whose weights it trains, transformers' own, attended to documents."""
    counts = importlib.import_module("unsloth.utils.hf_packed_attention").HF_PACKED_ATTENTION_STATS
    return ["calls of its packed attention: " + ", ".join(f"{way} {count}" for way, count in counts.items())]


UNSLOTH = Candidate("unsloth", {"unsloth": "unsloth", "unsloth_zoo": "unsloth"}, prepare, build, needs_gpu=True)
