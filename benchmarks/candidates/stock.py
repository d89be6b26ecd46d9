"""Build transformers and PEFT as strong as a careful user could, and the same with Liger's kernels.

Attention is flash varlen, whose metadata is made once and passed in, without a mask; layers are compiled if asked.
`sdpa` leaves attention to transformers, which builds a dense block mask: what most scripts get.
"""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate
from typing import Any, Literal

from benchmarks.candidates.base import Built, Candidate, PaddedBatches, Spec, base_tensors, device, weights_dtype
from benchmarks.workload import Row

Attention = Literal["varlen", "sdpa", "flex_attention"]
ATTENTION_NAME = "bench_varlen"


def prepare() -> None:
    import peft  # noqa: F401
    import transformers  # noqa: F401


def prepare_fla() -> None:
    """Let Qwen3.5's layers use fla-core's kernels, which transformers itself fetches from the hub.

    fla-core refuses its backward on Hopper with Triton from 3.4.0 to below 3.7.1 for wrong results. That guard is off
    here: the benchmark's own gate judges the results.
    """
    prepare()
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    def convolve(x: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
        bounds = kwargs.get("cu_seq_lens_q")
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=bounds)[0].transpose(
            1, 2
        )

    def rule(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        heads = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
        return chunk_gated_delta_rule(q, k, v, **kwargs)

    chunk_o.TRITON_ABOVE_3_7_1 = True
    for modeling in (modeling_qwen3_5, modeling_qwen3_5_moe):
        modeling.causal_conv1d_fn = convolve
        modeling.torch_chunk_gated_delta_rule = rule


def prepare_liger() -> None:
    prepare()
    import liger_kernel.transformers  # noqa: F401


def build(
    spec: Spec, attention: Attention = "varlen", compiled: bool = False, liger: bool = False, padded: bool | None = None
) -> Built:
    """Build it with packed rows, or `padded`: by default for gpt-oss, whose packed documents would see each other."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from pronghorn.models.families import recompute_layers

    sinks = spec.config["model_type"] == "gpt_oss"
    padded = sinks if padded is None else padded
    varlen = attention == "varlen" and device().type == "cuda" and not sinks
    name = ATTENTION_NAME if varlen else "flex_attention" if attention == "flex_attention" else "sdpa"
    name = "eager" if sinks and name == "sdpa" else name  # SDPA has no sinks
    if varlen:
        register_varlen(spec.longest)
    model: Any = AutoModelForCausalLM.from_pretrained(
        spec.checkpoint,
        dtype=weights_dtype(spec.method),
        attn_implementation=name,
        device_map={"": device()},
        **_quantization(spec),
    )
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    model.config.use_cache = False
    recompute_layers(model, spec.recompute != "off")
    layers = model.base_model.layers
    if spec.method != "full":
        model = get_peft_model(model, LoraConfig(**spec.adapters, task_type="CAUSAL_LM"))
    if compiled:
        import torch

        torch._dynamo.config.recompile_limit = 2 * len(layers)  # they share one code object
        for layer in layers:
            layer.compile(dynamic=False)
    notes = ["attention: " + ("flash varlen, metadata passed in" if varlen else f"{name} under transformers' own mask")]
    notes += ["decoder layers compiled one by one"] if compiled else []
    notes += ["recomputes: it knows nothing else"] if spec.recompute in ("offload", "auto") else []
    model.train()
    if padded:
        why = "packed documents of gpt-oss would see each other" if sinks else "as TRL's batches are by default"
        notes.append(f"padded: {why}")
        return Built(PaddedBatches(model), PaddedBatches.make_batch, notes)
    return Built(model, functools.partial(_make_batch, spec, varlen), notes)


def _make_batch(spec: Spec, varlen: bool, row: Row) -> dict[str, Any]:
    import torch

    batch = base_tensors(row) | {"use_cache": False}
    if varlen:
        batch["attention_mask"] = varlen_mask(row, spec.documents)
        if "linear_attention" in (spec.config.get("layer_types") or ()):
            batch["cu_seq_lens_q"] = torch.tensor([0, *accumulate(row.lengths)], device=device())
    return batch


def varlen_mask(row: Row, documents: int) -> Any:
    """Return a row's `cu_seqlens` int32 [1, 1, 1, documents + 1]: one shape for all rows, so layers compile once.

    transformers hands a mask of four dimensions on as it is, and makes none of its own.
    """
    import torch

    bounds = [0, *accumulate(row.lengths)]
    bounds += bounds[-1:] * (documents + 1 - len(bounds))
    return torch.tensor(bounds, dtype=torch.int32, device=device()).view(1, 1, 1, -1)


def register_varlen(longest: int) -> None:
    """Register torch's public varlen attention, which reads `cu_seqlens` from the mask's place."""
    import torch
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    tells_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # before torch 2.12 it needs no telling

    def attention(
        module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, sliding_window: Any = None, **kwargs: Any
    ) -> tuple[Any, None]:
        bounds = mask.view(-1)
        if torch.is_autocast_enabled("cuda"):  # RoPE is in float32 then; transformers' own flash attention rounds, too
            q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
        q_THD, k_THD, v_THD = (x.transpose(1, 2).squeeze(0) for x in (q, k, v))
        window = sliding_window - 1 if sliding_window is not None and sliding_window < longest else -1
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if tells_groups else {}
        out: Any = varlen_attn(
            q_THD, k_THD, v_THD, bounds, bounds, longest, longest, scale=scaling, window_size=(window, 0), **grouped
        )
        return out.unsqueeze(0), None

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def _quantization(spec: Spec) -> dict[str, Any]:
    if spec.method != "qlora":
        return {}
    from transformers import BitsAndBytesConfig

    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=weights_dtype(spec.method))}


_LIGER = {"liger_kernel": "liger-kernel"}
STOCK = (
    Candidate("hf", {}, prepare, build),
    Candidate("hf-compile", {}, prepare, functools.partial(build, compiled=True), needs_gpu=True),
    Candidate("hf-fla", {"fla": "fla-core"}, prepare_fla, build, needs_gpu=True),
    Candidate("hf-sdpa", {}, prepare, functools.partial(build, attention="sdpa")),
    Candidate("hf-flex", {}, prepare, functools.partial(build, attention="flex_attention"), needs_gpu=True),
    Candidate("hf-padded", {}, prepare, functools.partial(build, attention="sdpa", padded=True)),
    Candidate("liger", _LIGER, prepare_liger, functools.partial(build, liger=True), needs_gpu=True),
    Candidate(
        "liger-sdpa", _LIGER, prepare_liger, functools.partial(build, attention="sdpa", liger=True), needs_gpu=True
    ),
)
