"""What models are judged by calls transformers' own functions, whatever packages are installed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from pronghorn.models.lora import add_lora
from pronghorn.parity.own_code import _unwrapped, own_code, replaced
from support.generic import generic_model
from support.tiny import DELTA_FAMILIES, FAMILIES, MOE_FAMILIES, tiny_model

FLA = {
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule.py": """
def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
    raise RuntimeError("fla-core refuses")
""",
}

PROGRAM = """
import torch
from pronghorn.parity.own_code import _unwrapped, own_code, replaced
from support.tiny import tiny_model
torch.set_num_threads(1)  # as in tests
ids, found = torch.arange(3, 43)[None], {}
for family in FAMILIES:
    model = tiny_model(family).eval()
    assert not replaced(model)  # own_code deals with these
    for _ in range(2):
        try:
            model(ids)
        except RuntimeError as error:
            print(error)
        with torch.no_grad(), own_code(model):
            found[family] = model(ids).logits
torch.save(found, "OUT")
"""


def test_a_package_in_the_place_of_transformers_functions_is_not_called(tmp_path: Path) -> None:
    for name, text in FLA.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    out, families = tmp_path / "logits.pt", sorted(DELTA_FAMILIES)
    program = PROGRAM.replace("FAMILIES", repr(families)).replace("OUT", str(out))
    folders = [str(tmp_path), str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["fla-core refuses"] * 2 * len(families), done.stderr
    found = torch.load(out)
    for family in families:
        with torch.no_grad():
            expected = tiny_model(family).eval()(torch.arange(3, 43)[None]).logits
        torch.testing.assert_close(found[family], expected, rtol=0, atol=0)


def test_classes_come_back() -> None:
    model = tiny_model("qwen3_5_text")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="inside"), own_code(model):
        assert [type(module) for module in model.modules()] != before
        raise ValueError("inside")
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("family", sorted(DELTA_FAMILIES))
def test_a_model_in_float64_computes_the_delta_rule_in_float64(family: str) -> None:
    """A chunk at a time and token by token are the same numbers then, and not only to float32's rounding."""
    net = next(each for each in tiny_model(family).double().modules() if type(each).__name__.endswith("GatedDeltaNet"))
    members = _unwrapped(type(net))["forward"].__globals__
    rules = [members[name] for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 4, 16, dtype=torch.float64, generator=generator) for _ in range(3))
    g, beta = -torch.rand(1, 70, 4, generator=generator), torch.rand(1, 70, 4, generator=generator)
    options = {"g": g.double(), "beta": beta.double(), "initial_state": None, "output_final_state": False}
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        given = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        chunks, tokens = (
            rule(q.to(dtype), k.to(dtype), v.to(dtype), use_qk_l2norm_in_kernel=True, **given)[0] for rule in rules
        )
        assert chunks.dtype is tokens.dtype is dtype
        assert 0 < (chunks - tokens).abs().max() < most


class LlamaMLP(modeling_llama.LlamaMLP):
    """Liger's way: another class under the same name."""


@pytest.mark.parametrize("wrapped", [None, "functools.wraps", "torch's decorator"])
@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (modeling_llama.LlamaRMSNorm, "forward", "LlamaRMSNorm.forward"),
        (modeling_llama, "LlamaMLP", "LlamaMLP"),
        (modeling_llama, "apply_rotary_pos_emb", "apply_rotary_pos_emb"),
        (LoraLinear, "forward", "Linear.forward"),
        (torch.nn.Linear, "forward", "Linear.forward"),
        (torch.nn.functional, "silu", "torch.nn.functional.silu"),
    ],
)
def test_what_another_package_puts_there_is_named(
    owner: Any, name: str, told: str, wrapped: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(owner, name)
    other: Any = LlamaMLP if isinstance(own, type) else lambda *args, **kwargs: own(*args, **kwargs)
    if wrapped is not None and other is not LlamaMLP:
        other = functools.wraps(own)(other) if wrapped == "functools.wraps" else torch.no_grad()(other)
    monkeypatch.setattr(owner, name, other)
    model = add_lora(tiny_model("llama"), r=4).get_base_model()
    assert replaced(model) == [f"{told} ({__name__})"]


def test_an_attention_under_a_known_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **kwargs: None)
    assert replaced(tiny_model("llama")) == [f"attention 'sdpa' ({__name__})"]


def test_hooks_of_all_modules_are_named() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: output)
    try:
        assert replaced(tiny_model("llama")) == ["hooks of all modules"]
    finally:
        handle.remove()


@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES, "gpt_neox", "gpt2"])
def test_what_is_as_it_was_written_is_not(family: str) -> None:
    model = tiny_model(family) if family in FAMILIES | MOE_FAMILIES else generic_model(family)
    assert replaced(add_lora(model, r=4).get_base_model()) == []
