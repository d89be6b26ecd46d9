"""Full fine-tuning by accelerate's FSDP2 with compiled layers of transformers: what `benchmarks.ranks` is beside."""

from __future__ import annotations

import time
from typing import Any


def train(given: Any, rank: int, processes: int, warm: float, recompute: bool) -> dict[str, Any]:
    """Train as one of several processes, a packed row a step; return losses, rate and peak. A share of the steps at the
    start, `warm`, doesn't count.

    Made as a careful user would make it: float32 masters, bf16 compute and gathers, float32 reductions, each layer a
    unit, compiled layers, flash varlen attention whose metadata is passed in, fused AdamW.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from benchmarks.candidates.base import base_tensors
    from benchmarks.candidates.stock import ATTENTION_NAME, register_varlen, varlen_mask
    from benchmarks.records import build
    from benchmarks.workload import ROWS, make_rows
    from pronghorn.models.families import base_causal_lm, recompute_layers

    cuda = torch.cuda.is_available()
    model: Any = build(given.model, given.method)
    layers = base_causal_lm(model).model.layers
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[type(layers[0]).__name__],
    )  # fmt: skip
    accelerator = Accelerator(cpu=not cuda, mixed_precision="bf16", fsdp_plugin=plugin)
    drawn = range(-(-given.steps * processes // ROWS))
    rows = [x for seed in drawn for x in make_rows(given.tokens, given.lengths, 1.0, model.config.vocab_size, seed)]
    rows = rows[rank::processes][: given.steps]
    recompute_layers(model, recompute)
    if cuda:
        register_varlen(given.tokens)
        model.set_attn_implementation(ATTENTION_NAME)
        torch._dynamo.config.recompile_limit = 2 * len(layers)  # they share one code object
        for layer in layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    model, optimizer = accelerator.prepare(model, optimizer)
    documents = max(len(row.bounds) for row in rows)
    batches = [base_tensors(row) | ({"attention_mask": varlen_mask(row, documents)} if cuda else {}) for row in rows]
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, started = [], 0.0
    first = int(warm * given.steps)
    for step, batch in enumerate(batches):
        if step == first:
            if cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    steps = given.steps - first
    found = {"losses": [float(loss) for loss in losses], "seconds": seconds, "steps": steps}
    found |= {"tokens_per_s": given.tokens * steps / seconds, "recompute": recompute}
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if cuda else {})
