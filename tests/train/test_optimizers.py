"""Optimisers by name, adapters' dtype, and float32 that is float32."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trl import SFTConfig

from pronghorn import FastLanguageModel
from pronghorn.config import Recipe
from pronghorn.errors import ConfigError, PronghornError, RunStopped
from pronghorn.memory.estimate import resting_bytes
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.lora import add_lora
from pronghorn.optimizers import OPTIMIZERS, check_optimizer
from pronghorn.train.control import RunControl
from pronghorn.train.gradients import MOST_SKIPPED, GradientWatch
from pronghorn.train.run import run
from pronghorn.train.trainer import SFTTrainer
from support.documents import LENGTHS, ROW, gradients
from support.resumed import same_run
from support.runs import QUIET, Make, stop_at
from support.tiny import packed_row, tiny_model

HERE = [name for name, optimizer in OPTIMIZERS.items() if optimizer.package != "torchao"]


def wide_model(**options: Any) -> Any:
    """A tiny model whose adapters have enough elements for 8-bit states."""
    model = tiny_model("llama", hidden_size=1024, num_hidden_layers=2, intermediate_size=1024)
    return add_lora(model, r=16, **options).train()


@pytest.mark.parametrize("name", [name for name in HERE if not OPTIMIZERS[name].paged])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_the_states_that_there_are(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = wide_model(adapter_dtype=dtype, target_modules=["gate_proj", "up_proj", "down_proj"])
    trained = [p for p in model.parameters() if p.requires_grad]
    args = SFTConfig(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to="none")
    kind, options = SFTTrainer.get_optimizer_cls_and_kwargs(args)
    optimizer = kind(trained, **options)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = [state for parameter in trained for state in optimizer.state[parameter].items()]
    # the table of 8-bit codes is one, which each state holds, and a step's number is one number
    real = sum(value.nbytes for key, value in states if torch.is_tensor(value) and "qmap" not in key and value.dim())
    attach(model, Plan.keep())
    counted = resting_bytes(dims_of(model), setup_of(model, 512, optimizer=name))
    assert counted["optimizer"] == pytest.approx(real, rel=0.02)
    assert counted["gradients"] == sum(parameter.nbytes for parameter in trained)


def test_states_that_are_paged_are_in_nobodys_way() -> None:
    model = wide_model()
    counted = [
        resting_bytes(dims_of(model), setup_of(model, 512, optimizer=name))["optimizer"]
        for name in ("adamw_torch_fused", "paged_adamw_32bit", "paged_adamw_8bit")
    ]
    assert counted[0] > 0 and counted[1:] == [0, 0]


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_a_run_with_another_optimiser_goes_on_to_the_same_bits(
    name: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train": {"optimizer": name, "learning_rate": 1e-3}, "adapter": {"r": 64}}
    whole = run(make("whole", **changes), QUIET)
    assert whole.stopped == "max_steps"
    with monkeypatch.context() as patch:
        patch.setattr(RunControl, "on_step_begin", lambda self, args, state, *rest, **_: stop_at(self, state, 5))
        with pytest.raises(RunStopped) as stopped:
            run(make("run", **changes), QUIET)
    assert stopped.value.signal == signal.SIGTERM
    assert run(make("run", **changes), QUIET).resumed_at == [5]
    same_run(tmp_path / "whole", tmp_path / "run")


def test_a_missing_package_is_told_before_anything_loads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the optimiser adamw_torch_4bit needs torchao") as told:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        check_optimizer("adamw_torch_4bit")
    assert "pip install torchao" in told.value.remedy
    check_optimizer("adamw_torch_fused")


def test_adapters_have_the_dtype_that_was_asked_for(make: Make, stories: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, dtype="bfloat16")
    model = FastLanguageModel.get_peft_model(model, r=4, adapter_dtype="bf16")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    run(make("run", precision={"adapters": "bfloat16"}, train={"max_steps": 2}), QUIET)
    saved = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r"adapters in torch\.float16"):
        add_lora(tiny_model("llama"), adapter_dtype=torch.float16)


def test_what_can_not_work_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    recipe.write_text(
        "model: {name: a, max_seq_length: 8}\n"
        f"data: {{train: {tmp_path}/rows.jsonl}}\ntrain: {{output: {tmp_path}/x}}\n"
    )
    for overrides, problem in (
        (["precision.adapters=float16"], "precision.adapters"),
        (["precision.adapters=bf16", "adapter.method=full"], "with adapter.method: full, which has none"),
        (["train.optimizer=adam9"], "train.optimizer"),
    ):
        with pytest.raises(PronghornError, match=problem):
            Recipe.load(recipe, overrides)
    assert Recipe.load(recipe, ["precision.adapters=bf16"]).precision.adapters == "bfloat16"


def test_overflow_after_overflow_ends(scaled_watch: Any) -> None:
    for _ in range(MOST_SKIPPED - 1):
        scaled_watch(float("inf"))
    scaled_watch(1.0)  # begins anew
    for _ in range(MOST_SKIPPED - 1):
        scaled_watch(float("nan"))
    with pytest.raises(PronghornError, match="gradients overflowed float16 in 32 steps in a row"):
        scaled_watch(float("inf"))


@pytest.fixture
def scaled_watch() -> Any:
    """A watch under loss scaling, called with a gradient."""
    watch, model = GradientWatch(), torch.nn.Linear(2, 2)
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()), scaler=object())

    def step(value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        watch.on_pre_optimizer_step(None, SimpleNamespace(global_step=0), None, model=model, optimizer=optimizer)

    return step


def test_float32_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are within 1e-5 of float64's, where bfloat16's are not."""
    batch, found = packed_row(LENGTHS, ROW), {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = add_lora(tiny_model("llama"), r=4).to(dtype).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
        attach(model, Plan.keep(), layers="stock" if dtype is torch.float64 else "fused")
        loss = model(**batch).loss
        loss.backward()
        found[dtype] = loss.item(), {name: grad.double() for name, grad in gradients(model).items()}
    exact, right = found.pop(torch.float64)
    errors = {
        dtype: max(abs(loss / exact - 1), *((grads[name] - right[name]).norm() / right[name].norm() for name in right))
        for dtype, (loss, grads) in found.items()
    }
    assert errors[torch.float32] < 1e-5 < 1e-3 < errors[torch.bfloat16]
