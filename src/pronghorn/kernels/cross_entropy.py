"""Cross-entropy of a head's output, and its gradient in the place of the logits.

ℓ_t = log Σ_v exp z_tv − z_t,label        ∂ℓ_t/∂z_tv = softmax(z_t)_v − [v = label]        z = c·tanh(y/c) with a cap
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Losses of rows, and ∂ℓ/∂y written over the logits y.

    Args:
        logits: [M, V], rows of any stride; overwritten.
        targets: int64 [M]; a row of `ignore_index` has loss and gradient 0.
    Returns:
        float32 (float64) [M].
    """
    if logits.is_cuda:
        from pronghorn.kernels.cross_entropy_triton import cross_entropy_ as launch

        return launch(logits, targets, ignore_index, softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    losses = torch.nn.functional.cross_entropy(capped, targets, ignore_index=ignore_index, reduction="none")
    kept = targets != ignore_index
    grad = torch.softmax(capped, -1)
    grad[kept, targets[kept]] -= 1
    grad[~kept] = 0
    if softcap is not None:
        grad *= 1 - (capped / softcap).square()
    logits.copy_(grad)
    return losses
