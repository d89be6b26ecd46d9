"""LoRA linears of generic families that train by one function: what PEFT's compute, and where PEFT's are called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from pronghorn import attach
from pronghorn.errors import UnsupportedError
from pronghorn.layers import lora_linear
from pronghorn.layers.lora_linear import lora_linears, use_one_function
from pronghorn.layers.subclass import restore
from pronghorn.models.attach import attached
from pronghorn.models.attach_options import AttachOptions
from pronghorn.models.lora import add_lora
from support.generic import generic_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Result = dict[str, Tensor]


class Two(nn.Module):
    """One linear behind another, so that one's input has a gradient."""

    def __init__(self, bias: bool, inner: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, inner, bias), nn.Linear(inner, 36, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).transpose(0, -2).transpose(0, -2))


def adapted(bias: bool = True, **changes: Any) -> Any:
    """Make it with adapters that do something."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["first", "second"], **changes})
    model: Any = get_peft_model(Two(bias), config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def step(model: Any, x: Tensor, **kwargs: Any) -> Result:
    """Return the output and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x, **kwargs)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **grads}


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which function linears go through."""
    calls: list[str] = []
    for name, owner, attribute in (
        ("ours", lora_linear._LoRALinear, "apply"),
        ("PEFT's", Linear, "forward"),
    ):
        before = getattr(owner, attribute)

        def note(*args: Any, _name: str = name, _before: Any = before, **kwargs: Any) -> Any:
            calls.append(_name)
            return _before(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, note)
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 7, 40), (1, 1, 40), (5, 40), (2, 0, 40), (2, 65, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_in_float64_it_is_what_peft_computes(
    bias: bool, shape: tuple[int, ...], device: str, nan_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(bias).double().to(device)
    x = torch.randn(shape, dtype=torch.float64, device=device)
    expected = step(model, x)
    calls = called(monkeypatch)
    use_one_function(model)
    found = step(model, x)
    assert calls == ["ours"] * 2 and found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits_it_is_as_near_as_peft(
    dtype: torch.dtype, autocast: bool, device: str, nan_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base in 16 bits, adapters in float32, as they are trained."""
    x = torch.randn(4, 33, 40)
    exact_model = adapted()
    for name, parameter in exact_model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype).float()
    exact = step(exact_model, x.to(dtype).float())
    model = exact_model.to(device)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    x = x.to(device, torch.float32 if autocast else dtype)

    def run() -> Result:
        with torch.autocast(device, dtype, enabled=autocast):
            return {name: value.cpu() for name, value in step(model, x).items()}

    plain = run()
    calls = called(monkeypatch)
    use_one_function(model)
    found = run()
    assert calls == ["ours"] * 2
    for name, value in exact.items():
        assert found[name].dtype is plain[name].dtype, name
        off, allowed = (found[name] - value).norm(), (plain[name] - value).norm()
        assert off <= 2 * allowed + torch.finfo(dtype).eps * value.norm(), name


@pytest.mark.parametrize("frozen", ["x", "lora_A", "lora_B"])
def test_what_wants_no_gradient_gets_none(frozen: str) -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    expected = {**step(model, torch.ones(3, 40))}
    use_one_function(model)
    found = step(model, torch.ones(3, 40))
    assert found.keys() == expected.keys() and not any(frozen in name for name in found if name != "x")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    model.zero_grad()
    model(torch.ones(3, 40)).sum().backward()  # x itself is data


def with_hook(model: Any) -> None:
    model.base_model.model.first.lora_A["default"].register_forward_hook(lambda *_: None)
    model.base_model.model.second.base_layer.register_full_backward_hook(lambda *_: None)


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def merged(model: Any) -> None:
    model.merge_adapter()


def second_adapter(model: Any) -> None:
    model.add_adapter("other", LoraConfig(r=2, target_modules=["first", "second"]))
    model.base_model.set_adapter(["default", "other"])


def evaluating(model: Any) -> None:
    model.eval()


def full(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            parameter.requires_grad_(True)


def own_forward(model: Any) -> None:
    for linear in (model.base_model.model.first, model.base_model.model.second):
        linear.base_layer.forward = linear.base_layer.forward


LEFT_TO_PEFT: list[tuple[dict[str, Any], Callable[[Any], None]]] = [
    ({}, with_hook), ({}, disabled), ({}, merged), ({}, second_adapter), ({}, evaluating), ({}, full),
    ({}, own_forward), ({"lora_dropout": 0.5}, lambda model: None), ({"use_dora": True}, lambda model: None),
    ({"lora_bias": True}, lambda model: None),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change"), LEFT_TO_PEFT)
def test_what_is_not_plain_lora_in_training_is_peft_s(
    config: dict[str, Any], change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(**config)
    use_one_function(model)
    change(model)
    calls = called(monkeypatch)
    torch.manual_seed(1)
    found = model(torch.ones(3, 40))
    assert set(calls) == {"PEFT's"}
    restore(model)
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(3, 40)), found)


def test_another_adapter_and_another_scale_are_read_at_once() -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=8, target_modules=["first"]))
    plain = copy.deepcopy(model)
    use_one_function(model)
    x = torch.randn(3, 40)
    for each in (model, plain):
        nn.init.ones_(each.base_model.model.first.lora_B["other"].weight)
    for change in (
        lambda m: m.set_adapter("other"),
        lambda m: m.base_model.model.first.set_scale("other", 3.0),
        lambda m: m.set_adapter("default"),
        lambda m: m.base_model.model.first.base_layer.weight.data.mul_(2),
    ):
        change(model)
        change(plain)
        expected, found = step(plain, x), step(model, x)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)


def test_what_it_gives_may_be_written_in_place() -> None:
    """As Llama 4's layers do."""
    model, x = adapted(), torch.randn(2, 3, 40)
    expected = step(model, x)
    use_one_function(model)
    y = model(x.requires_grad_())
    y[:, 1] *= 2
    y.mul_(0.5)
    assert torch.allclose(y[:, 1], expected["y"][:, 1], atol=1e-6)
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_second_derivatives_are_refused() -> None:
    model = adapted()
    use_one_function(model)
    x = torch.ones(3, 40, requires_grad=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_compute_the_same(reentrant: bool) -> None:
    model, x = adapted(), torch.randn(3, 40)
    use_one_function(model)
    expected = step(model, x)
    inner = model.base_model.model
    forward = inner.forward
    inner.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant)
    found = step(model, x)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_copy_is_its_own_and_adapters_merge() -> None:
    model = adapted()
    use_one_function(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.base_model.model.first.lora_B["default"].weight.zero_()
    assert not torch.equal(model(torch.ones(2, 40)), other(torch.ones(2, 40)))
    assert len(lora_linears(other)) == 2
    merged_weights = model.merge_and_unload()
    assert type(merged_weights.first) is nn.Linear and not lora_linears(merged_weights)


# --- attached models of generic families


@pytest.mark.parametrize("added", ["before", "after"])
@pytest.mark.parametrize("model_type", ["starcoder2", "bloom"])
def test_attach_uses_it_and_detach_takes_it_off(model_type: str, added: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = generic_model(model_type)
    base = model
    assert not lora_linears(attach(add_lora(generic_model(model_type), r=2)).model)  # on the CPU
    monkeypatch.setattr(AttachOptions, "fuses_lora", lambda self, model: self.layers == "auto")
    if added == "before":
        model = add_lora(model, r=2)
        handle = attach(model)
    else:
        handle = attach(model)
        model = add_lora(model, r=2)
        handle.adopt_adapters()
    count = len(lora_linears(model))
    assert count > 0 and f"{count} linear" in {line.part: line.why for line in handle.report}["LoRA"]
    ids = torch.arange(3, 23)[None]
    model.train()
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    attached(model).detach()  # type: ignore[union-attr]
    assert not lora_linears(model) and attached(base) is None
    model.zero_grad()
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    attach(model, layers="stock")
    assert not lora_linears(model)
