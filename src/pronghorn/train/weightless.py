"""The model that a recipe would train, attached as on a GPU, without weights: what plans are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.errors import UnsupportedError
from pronghorn.families.registry import why_generic
from pronghorn.loading.limits import check_range
from pronghorn.loading.load import FoundModel
from pronghorn.loading.packed_checkpoint import PackedSkeleton, format_of
from pronghorn.loading.share import SharedLoading
from pronghorn.memory.workload import NF4_BYTES, TrainSetup
from pronghorn.models.attach import Handle, attach
from pronghorn.models.auto_plan import setup_of
from pronghorn.models.families import check_config, has_experts
from pronghorn.models.generic import PACKING
from pronghorn.models.tied_copies import tie_copies
from pronghorn.optimizers import ON_PARTS
from pronghorn.train.padding_free import why_padded


def skeleton(config: Any) -> Any:
    """Make the model of a configuration on the meta device, without weights.

    Raises:
        UnsupportedError: an unknown family.
    """
    from transformers import AutoModelForCausalLM

    check_config(config)
    if format_of(config) is not None:
        return PackedSkeleton.of(config).model
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


class _Weightless(FoundModel):
    """Load a model that was found without its weights."""

    def model(self, dtype: torch.dtype, device: torch.device, share: SharedLoading | None = None) -> Any:
        """Return the model on the meta device."""
        if self.base is None:
            check_range(self.config, dtype)
            return skeleton(self.config).to(dtype)
        from peft import PeftConfig, get_peft_model

        config = PeftConfig.from_pretrained(str(self.name))
        config.inference_mode = False
        base = _Weightless(**vars(self.base)).model(dtype, device)
        adapted = get_peft_model(base, config, low_cpu_mem_usage=True)
        tie_copies(adapted, config)
        return adapted


def weightless(recipe: Recipe, found_model: FoundModel) -> Handle:
    """Attach the model that training would train, as on a GPU, without weights.

    New tokens are left out: they weigh next to nothing.
    """
    from pronghorn.train.build import asked_plan, attach_options, check_saved_adapter, load

    if (found_model.base or found_model).config is None:
        problem = f"{found_model.name}: a GGUF file is read whole only"
        raise UnsupportedError(problem, "plan for the folder it was made from")
    if found_model.is_generic:
        config = (found_model.base or found_model).config
        raise UnsupportedError(
            f"no plan is made of {config.model_type}: {why_generic(config)}; what transformers' own layers keep isn't "
            "known (pronghorn docs families)",
            "train a few steps with train.max_steps=3, whose report tells the peak, or `pronghorn profile`; "
            "memory.gradient_checkpointing: true takes the least memory",
        )
    check_saved_adapter(recipe, found_model)
    adapter = recipe.adapter.model_copy(update={"new_tokens": []})
    recipe = recipe.model_copy(update={"adapter": adapter})
    # loading attaches for this machine, which may have no products in 8 bits or fused layers; the plan is for another
    precision = recipe.precision.model_copy(update={"compute": "dtype"})
    memory = recipe.memory.model_copy(update={"feed_forward": "auto"})
    here = recipe.model_copy(update={"precision": precision, "memory": memory})
    model, _ = load(here, _Weightless(**vars(found_model)), None, Console(quiet=True))
    return attach(model, asked_plan(recipe), layers="fused", **attach_options(recipe))


def unshared_reason(recipe: Recipe) -> str:
    """Say why processes can't share the layers in this training; empty where they can, but for the products' dtype."""
    if recipe.precision.compute == "int8":
        return "precision.compute: int8 multiplies weights that one process holds whole"
    if recipe.adapter.method == "lora":
        return ""
    if recipe.train.optimizer not in ON_PARTS:
        return f"train.optimizer {recipe.train.optimizer} needs whole weights"
    return "scaled losses in float16 need whole gradients" if recipe.precision.dtype == "float16" else ""


def work_of(recipe: Recipe, handle: Handle, autocast: torch.dtype | None) -> TrainSetup:
    """Describe how the recipe trains the model."""
    rows, most = recipe.packing.rows_per_step, recipe.model.max_seq_length
    # whether a generic family's documents must be padded is only known of its weights
    pads = PACKING in handle.model.__dict__ or why_padded(handle.model, recipe.train.neftune_noise_alpha, most)
    work = setup_of(
        handle.model,
        most * rows,
        autocast,
        padded=rows if pads and not recipe.packing.enabled else 0,
        accumulates=recipe.train.gradient_accumulation_steps > 1,
        optimizer=recipe.train.optimizer,
    )
    config, asked = handle.model.config, recipe.model
    quantised = hasattr(config, "quantization_config")
    # loading quantises experts, too, unless the checkpoint is quantised already; in 4 bits they don't multiply in 8
    if asked.load_in_4bit and not quantised and not asked.experts_in_16bit and has_experts(config):
        work = replace(work, expert_bytes=NF4_BYTES, fp8_experts=False)
    method = "qlora" if asked.load_in_4bit or quantised else work.method
    return replace(work, method=method, unshared=unshared_reason(recipe))
