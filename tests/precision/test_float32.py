"""float32 is float32 in every product: against float64, in every kernel's source, and in what is set in the process."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pronghorn
from pronghorn.errors import ConfigError
from pronghorn.models.attach import attach
from pronghorn.precision.float32 import narrowed, tf32_products
from pronghorn.train.run import run
from support.runs import QUIET, Make
from support.tiny import packed_row, tiny_model

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def precision_again() -> Iterator[None]:
    """What a test sets is of the process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def step(model: Any, device: str) -> list[Tensor]:
    """Return a step's loss and gradients, in float64 on the CPU."""
    model = attach(model.to(device), **({"layers": "fused"} if device == "cuda" else {})).model
    batch = {name: value.to(device) for name, value in packed_row([20, 1, 30], 64).items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [x.detach().double().cpu() for x in (loss, *(p.grad for p in model.parameters()))]


def error(found: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest error of a tensor, relative in L2."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, reference, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_float32_is_within_1e_5_of_float64_where_bfloat16_is_not(family: str, device: str) -> None:
    model = tiny_model(family)
    reference = step(copy.deepcopy(model).double(), "cpu")
    assert error(step(copy.deepcopy(model), device), reference) < 1e-5
    assert error(step(copy.deepcopy(model).bfloat16(), device), reference) > 1e-3


@pytest.mark.gpu
def test_tf32_is_not_within_1e_5() -> None:
    model = tiny_model("llama")
    reference = step(copy.deepcopy(model).double(), "cpu")
    with tf32_products():
        assert error(step(copy.deepcopy(model), "cuda"), reference) > 1e-5
    assert error(step(copy.deepcopy(model), "cuda"), reference) < 1e-5


def test_every_kernel_s_product_names_ieee() -> None:
    """Triton's default for float32 operands is tf32."""
    products = []
    for path in Path(pronghorn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.dot", "tl.dot_scaled"):
                named = {word.arg: ast.unparse(word.value) for word in node.keywords}
                products.append((f"{path.name}:{node.lineno}", named.get("input_precision")))
    assert len(products) > 10, "the kernels were not found"
    assert not [where for where, precision in products if precision != "'ieee'"]


def test_tf32_is_set_for_a_run_and_taken_back(precision_again: None) -> None:
    cuda = torch.device("cuda", 0)
    for before in ("none", "ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = before
        with pytest.raises(KeyError), tf32_products():
            assert narrowed(cuda) == "tf32" and torch.backends.cuda.matmul.allow_tf32
            raise KeyError
        assert torch.backends.cuda.matmul.fp32_precision == before


def test_the_report_says_where_the_process_narrows_float32(precision_again: None) -> None:
    handle = attach(tiny_model("llama"))
    assert narrowed(CPU) is None and not [path for path in handle.report if path.part == "products in float32"]
    torch.set_float32_matmul_precision("high")
    assert [path.path for path in handle.report if path.part == "products in float32"] == ["tf32"]


def test_a_run_leaves_the_process_s_precision_alone_and_tells_it(
    make: Make, tmp_path: Path, precision_again: None
) -> None:
    torch.set_float32_matmul_precision("high")
    record = run(make("run", train={"max_steps": 1}), QUIET)
    assert torch.get_float32_matmul_precision() == "high"
    assert [path["path"] for path in record.paths if path["part"] == "products in float32"] == ["tf32"]


def test_tf32_is_refused_on_the_cpu_before_the_model_loads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.train.run.find", lambda *_: pytest.fail("the model was looked for"))
    with pytest.raises(ConfigError, match=r"precision.tf32: true on cpu"):
        run(make("run", precision={"tf32": True}), QUIET)
