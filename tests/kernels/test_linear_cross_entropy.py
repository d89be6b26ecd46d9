"""The head's loss in chunks against plain autograd: every gradient, where the head is trained, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pronghorn.kernels import linear_cross_entropy as module
from support.tolerance import assert_three_way

WIDTH, IGNORED = 24, -100


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """In the dtype of the hidden states, as under autocast."""
    logits = hidden @ weight.to(hidden.dtype).t()
    return cross_entropy(logits.float() if logits.dtype is not torch.float64 else logits, targets) * 0.25


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return module.linear_cross_entropy(hidden, weight, targets, len(hidden), IGNORED) * 0.25


def gradients(loss_of: Any, dtypes: tuple[torch.dtype, torch.dtype], *arguments: Tensor) -> list[Tensor]:
    hidden, weight = (x.to(dtype, copy=True).requires_grad_() for x, dtype in zip(arguments, dtypes, strict=False))
    loss_of(hidden, weight, arguments[2]).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == dtypes
    return [hidden.grad, weight.grad]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [128, 131])
@pytest.mark.parametrize("rows", [1, 256, 700])
def test_a_trained_head(device: str, vocab: int, rows: int, monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 256)  # 700 rows are three chunks
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).bfloat16().float()
    weight = torch.randn(vocab, WIDTH, generator=generator)
    given = [x.to(device) for x in (hidden, weight, torch.randint(vocab, (rows,), generator=generator))]
    exact = gradients(plain, (torch.float64, torch.float64), *given)
    for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        found = zip(("dh", "dw"), gradients(ours, dtypes, *given), gradients(plain, dtypes, *given), exact, strict=True)
        for name, mine, theirs, wanted in found:
            assert_three_way(f"{name} {dtypes}", mine, theirs, wanted)


def test_what_lies_between_rows_of_logits_is_finite(nan_memory: None) -> None:
    """With bfloat16 and an odd slice a CPU with AMX multiplies what lies beyond it by zero: NaN would spread."""
    logits = module._logits(torch.randn(3, WIDTH), torch.randn(131, WIDTH))
    assert logits.stride(0) == 136 and logits.as_strided((3, 136), (136, 1)).isfinite().all()


def test_without_rows_the_head_has_no_gradient(nan_memory: None) -> None:
    hidden, weight = torch.empty(0, WIDTH, requires_grad=True), torch.randn(8, WIDTH, requires_grad=True)
    loss = module.linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.long), 1, IGNORED)
    loss.backward()
    assert loss.item() == 0 and weight.grad is not None and weight.grad.eq(0).all()


def test_an_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's would be as large as the head, in float32."""
    hidden, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(8, WIDTH, requires_grad=True)
    targets = torch.tensor([1, 7, 0])
    expected = ours(hidden, weight, targets)
    monkeypatch.setattr(module, "_add_product", None)
    with torch.no_grad():
        assert torch.equal(ours(hidden, weight, targets), expected)
