"""Build Pronghorn itself, with its switches turned for ablations; or fed padded batches, as in TRL's trainers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from benchmarks.candidates import stock
from benchmarks.candidates.base import Built, Candidate, PaddedBatches, Spec, autocast_dtype, device, weights_dtype
from benchmarks.workload import Row

SWITCHES = {
    "packing_metadata": ("once", "per_layer", "per_layer_mask"),
    "layers": ("auto", "fused", "stock"),
    "graph": ("auto", "on", "off"),
    "moe_routing": ("once", "loop"),
    "attention": ("auto", "tiled", "flash", "per_document", "masked"),
    "offload_buffers": ("2", "1"),
    "compute": ("dtype", "fp8", "fp8_both", "fp8_exact", "int8"),
    "written_out": ("auto", "each", "once"),
}
"""Arguments of `attach`, its experimental switches, and one of its plan, that an ablation may set."""
EXPERIMENTAL = "packing_metadata", "moe_routing", "written_out"


def prepare() -> None:
    stock.prepare()  # Pronghorn imports these at first use
    from pronghorn import FastLanguageModel  # noqa: F401


def build(spec: Spec, padded: bool = False) -> Built:
    """Build it for packed rows, or for the batches that trainers make who pad."""
    from pronghorn.data.batch import Collator
    from pronghorn.loading.load import load_model
    from pronghorn.memory.plan import Plan
    from pronghorn.models.attach import attach
    from pronghorn.models.auto_plan import plan_for, refusal
    from pronghorn.models.lora import add_lora

    model, _ = load_model(
        spec.checkpoint,
        max_seq_length=spec.tokens,
        dtype=weights_dtype(spec.method),
        load_in_4bit=spec.method == "qlora",
        device=device(),
    )
    switches: dict[str, Any] = dict(spec.switches)
    experimental: dict[str, Any] = {name: switches.pop(name) for name in EXPERIMENTAL if name in switches}
    if switches.get("attention") == "masked":
        experimental["masked_attention"] = bool(switches.pop("attention"))
    buffers = int(switches.pop("offload_buffers", "2"))
    asked: Any = {"off": False, "on": True}.get(spec.recompute, spec.recompute)
    plan = replace(Plan.asked(asked), buffers=buffers)
    if spec.method != "full":
        model = add_lora(model, **spec.adapters)
    handle = attach(model, plan, **switches, experimental=experimental)
    if plan.undecided and device().type == "cuda" and refusal(model, handle.fuses) is None:  # as our trainer does
        handle = handle.replan(plan_for(model, spec.tokens, autocast=autocast_dtype(spec.method), accumulates=False))
    collator = Collator(spec.tokens, pad_token_id=0)

    def make_batch(row: Row) -> dict[str, Any]:
        return {name: value.to(device()) for name, value in collator([vars(row)]).items()}

    def describe() -> list[str]:
        return [f"{path.part}: {path.path} ({path.why})" for path in handle.paths(autocast_dtype(spec.method))]

    if padded:
        return Built(PaddedBatches(model.train()), PaddedBatches.make_batch, describe=describe)
    return Built(model.train(), make_batch, describe=describe)


PRONGHORN = Candidate("pronghorn", {}, prepare, build)
PADDED = Candidate("pronghorn-padded", {}, prepare, functools.partial(build, padded=True))
