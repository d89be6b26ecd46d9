"""Short convolutions by documents, in the place of transformers' where that would refuse or ignore bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.layers import short_conv
from pronghorn.models.attach import attach
from support.causal_lms import tiny

LENGTHS = (1, 2, 7, 1, 4)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
    """transformers' function, which sees no documents."""
    size = weight.shape[1]
    y = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=size - 1, groups=len(weight))[..., : x.shape[2]]
    return y if activation is None else torch.nn.functional.silu(y)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("options", [{}, {"biased": True}, {"biased": True, "activation": "silu"}], ids=str)
def test_each_document_is_convolved_by_itself(size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, sum(LENGTHS), 6, dtype=torch.float64).transpose(1, 2)
    weight, bias = torch.randn(6, size, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), torch.tensor(LENGTHS))[None]
    activation, dy, found = options.get("activation"), torch.randn(x.shape, dtype=torch.float64), []
    for packed in (True, False):
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        given = leaves[1], leaves[2] if "biased" in options else None, activation
        if packed:
            y = short_conv.convolve(plain, leaves[0], *given, seq_idx=ids)
        else:
            y = torch.cat([plain(part, *given) for part in leaves[0].split(LENGTHS, 2)], 2)
        wanted = leaves if "biased" in options else leaves[:2]
        found.append([y, *torch.autograd.grad(y, wanted, dy)])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_other_calls_go_transformers_way() -> None:
    def called(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    x, weight, ids = torch.randn(2, 4, 5), torch.randn(4, 3), torch.zeros(1, 5, dtype=torch.int32)
    assert short_conv.convolve(called, x, weight, seq_idx=None) == ((x, weight, None, None), {"seq_idx": None})
    assert short_conv.convolve(called, x, weight, seq_idx=ids)[1] == {"seq_idx": ids}  # of two rows
    assert short_conv.convolve(called, x[:1], weight, None, "relu", seq_idx=ids)[0][3] == "relu"


def convolutions(model: Any) -> list[type]:
    return [type(module) for module in model.modules() if type(module).__name__ == "Lfm2ShortConv"]


def test_attach_changes_instances_and_detach_gives_them_back() -> None:
    model = tiny("lfm2")
    before = convolutions(model)
    handle = attach(model)
    assert len(before) == 2 and not set(before) & set(convolutions(model))
    handle.detach()
    assert convolutions(model) == before


@pytest.mark.parametrize("told", [True, None], ids=["by a package", "not known"])
def test_what_can_take_bounds_is_left_alone(told: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_new_implementation` is a name inside transformers: without it nothing is changed."""
    from transformers.models.lfm2 import modeling_lfm2

    is_new_implementation = told

    def known(*args: Any, **kwargs: Any) -> bool | None:
        return is_new_implementation

    def unknown(*args: Any, **kwargs: Any) -> None:
        return None

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", unknown if told is None else known)
    model = tiny("lfm2")
    before = convolutions(model)
    attach(model)
    assert convolutions(model) == before
