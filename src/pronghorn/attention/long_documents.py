"""Long documents of a packed row through cuDNN's attention, each by itself; the others stay with `kernels.attention`.

    O = softmax(s · Q Kᵀ + causal mask) V        for a document of many tokens

Forward and backward of one layer of 32/8 heads at 8,192 tokens took on a H200 (ms, torch 2.11, cuDNN 9.19)

    documents of     head size 128: tiles, cuDNN     head size 64: tiles, cuDNN
    1,024                    1.03   1.14                     not measured
    2,048                    1.67   1.42                     1.016  .952
    8,192                    6.00   3.63                     3.63   2.42

cuDNN plans for every new length anew, for 0.1 s of the host's time (the first one for a second), so documents are
padded to few lengths, by 6 % at most. Its dq varies from run to run, so deterministic mode keeps to tiles. (torch's
varlen op over cuDNN gave wrong gradients in torch 2.11.) Source: `aten::_scaled_dot_product_cudnn_attention` and its
own backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pronghorn.data.batch import round_up
from pronghorn.device import HOPPER, has_cudnn_attention

LEAST_TOKENS = 4096
"""Of a document that cuDNN takes. At 2,048 it gains 6 to 15 %, which a new length's plan costs for a hundred steps."""
HEAD_DIMS = (64, 128)
"""That it was measured at."""

Bounds = list[tuple[int, int]]
"""[start, end) of each long document, in rows."""


def least_tokens(query: Tensor) -> int | None:
    """Return from how many tokens on documents of queries like this [..., D] go through cuDNN; None where none do."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    wished = torch.backends.cudnn.enabled and torch.backends.cuda.cudnn_sdp_enabled()
    if torch.are_deterministic_algorithms_enabled() or not (wished and has_cudnn_attention()):
        return None
    if torch.cuda.get_device_capability(query.device) != HOPPER:  # measured there only
        return None
    return LEAST_TOKENS if query.shape[-1] in HEAD_DIMS and not torch.cuda.is_current_stream_capturing() else None


def padded_length(length: int) -> int:
    """Return the length that a document is computed at: one of at most 16 between a power of two and the next."""
    return round_up(length, max(128, (1 << length.bit_length() - 1) // 16))


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, documents: Bounds, scale: float) -> tuple[Tensor, ...]:
    """Write these documents' rows of out [T, H, D]; returns three tensors a document for `backward`.

    Args:
        q: fp16 or bf16 [T, H, D]; k, v: [T, H_kv, D], of any strides but for the last.
    """
    state: list[Tensor] = []
    for start, end in documents:
        result, *kept = _attention(*(_alone(x, start, end) for x in (q, k, v)), scale=scale)
        out[start:end] = result[0, :, : end - start].transpose(0, 1)
        state += kept
    return tuple(state)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: list[Tensor], grads: Tensor, documents: Bounds,
    scale: float,
) -> None:  # fmt: skip
    """Write these documents' rows of grads [T, H + 2·H_kv, D]: dq, dk and dv side by side."""
    parts = grads.split([q.shape[1], k.shape[1], k.shape[1]], 1)
    for number, (start, end) in enumerate(documents):
        alone = (_alone(x, start, end) for x in (d_out, q, k, v, out))
        found = _gradients(*alone, *state[3 * number : 3 * number + 3], scale=scale)
        for part, grad in zip(parts, found, strict=True):
            part[start:end] = grad[0, :, : end - start].transpose(0, 1)


def _alone(x: Tensor, start: int, end: int) -> Tensor:
    """Take one document of x [T, H, D] as [1, H, L', D]: a view, or a zero-filled copy where it is padded.

    Real queries come before the zeros and don't see them. Gradients of the added rows of `out` are zero, and so is what
    these rows add to dk and dv.
    """
    rows, more = x[start:end], padded_length(end - start) - (end - start)
    return (pad(rows, (0, 0, 0, 0, 0, more)) if more else rows).transpose(0, 1)[None]


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, ...]:
    """Return (out [1, H, L, D], log-sum-exp, two tensors of dropout's state that the backward wants)."""
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return out, lse, seed, offset


def _gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv), like q, k and v."""
    longest = (q.shape[2],) * 2
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse, seed, offset, None, None, None, *longest, 0.0, True, scale=scale
    )
