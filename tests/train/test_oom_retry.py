"""A step that runs out of memory is repeated with less kept, and the run ends with the very weights of one that
didn't: every sample counted once, the same dropout."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor
from trl import SFTConfig

from pronghorn.cli.train import summary
from pronghorn.config.recipe import Recipe
from pronghorn.device import is_out_of_memory
from pronghorn.errors import ConfigError, TrainingError, UnsupportedError
from pronghorn.memory.devices import device_spec
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.planner import plan
from pronghorn.models import auto_plan, causal_lm
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import add_lora
from pronghorn.records.record import RunRecord
from pronghorn.train import prepared_model
from pronghorn.train.oom_retry import OomRetry, OutOfMemory, _forget, _tighter_plan, tighten
from pronghorn.train.prepared_model import TighterPlans
from pronghorn.train.run import run
from support.generic import generic_model
from support.processes import WORLD, together
from support.tiny import packed_row, tiny_model

STEPS, WINDOW = 2, 3
KEEP = Plan.keep()
GPU_ROW = 4096
POINTS = ["forward 0", "forward 2", "loss", "backward 2", "backward 0"]
WHEN = [(1, 1), (1, 3), (2, 2)]


def policies(model: Any) -> tuple[Policy, ...]:
    handle = attached(model)
    assert handle is not None and handle.plan is not None
    return handle.plan.policies


def build(method: str, plan: Plan | None = KEEP, **sizes: int) -> Any:
    model = tiny_model("llama", **sizes)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"]))
    attach(model, plan)
    return model


ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Failing:
    """Raises an error at one point of a micro-batch (counted from 1), and again of as many as follow."""

    def __init__(self, point: str, micro_batch: int, times: int = 1, error: Exception = ERROR) -> None:
        self.point, self.at, self.left, self.error = point, micro_batch, times, error
        self.forwards = 0

    @contextmanager
    def in_(self, model: Any) -> Iterator[None]:
        base: Any = attached(model).model  # type: ignore[union-attr]
        where, _, layer = self.point.partition(" ")
        hooks = [base.register_forward_pre_hook(self._count)]
        if where != "loss":
            hook = self.fire if where == "forward" else self._watch_backward
            hooks.append(base.model.layers[int(layer)].register_forward_hook(hook))
        plain = causal_lm.packed_lm_loss
        with pytest.MonkeyPatch.context() as patch:
            if where == "loss":
                patch.setattr(causal_lm, "packed_lm_loss", lambda *a, **k: self.fire() or plain(*a, **k))
            yield
        for each in hooks:
            each.remove()

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def fire(self, *_: Any) -> None:
        if self.forwards >= self.at and self.left:
            self.left -= 1
            raise self.error

    def _watch_backward(self, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(self.fire)


def train(
    model: Any, failing: Failing | None = None, tell: Callable[[OutOfMemory], None] | None = None, **options: Any
) -> tuple[list[float], list[OutOfMemory]]:
    """A plain loop of STEPS steps of WINDOW rows: losses of the rows, and what was survived."""
    events: list[OutOfMemory] = []
    guard = OomRetry(tell or events.append, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []

    def micro_batch(batch: dict[str, Any]) -> Tensor:
        loss = model(**batch, num_items_in_batch=60).loss
        loss.backward()
        return loss.detach()

    torch.manual_seed(7)
    with failing.in_(model) if failing else nullcontext():
        for step in range(STEPS):
            for i in range(WINDOW):
                batch = packed_row([1, 9 + i, 8], 24, seed=10 * step + i)
                losses.append(guard.run(model, step + 1, i == WINDOW - 1, batch, micro_batch).item())
            optimizer.step()
            model.zero_grad()
    assert failing is None or failing.left == 0
    return losses, events


@cache
def undisturbed(method: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build(method)
    return train(model)[0], model.state_dict()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("when", WHEN, ids=str)
@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_lost_or_counted_twice(method: str, when: tuple[int, int], point: str) -> None:
    step, micro_batch = when
    losses, weights = undisturbed(method)
    model = build(method)
    found, events = train(model, Failing(point, WINDOW * (step - 1) + micro_batch))
    assert found == losses
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [(event.step, event.micro_batch) for event in events] == [when]
    assert policies(model) == (Policy.RECOMPUTE_MLP,)


def test_what_the_failed_forward_held_is_given_back() -> None:
    model = build("full")
    held: list[Any] = []
    alive: list[bool] = []
    hook = (
        attached(model)
        .model.model.layers[0]
        .register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, output: held.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        )
    )
    failing = Failing("backward 2", 2)
    train(model, failing, tell=lambda event: alive.extend(each() is not None for each in held))
    hook.remove()
    assert alive == [False, False] and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("chained", [True, False])
def test_what_an_error_before_the_error_held_is_given_back(chained: bool) -> None:
    held: list[Any] = []

    def fails() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise ERROR

    def ends() -> None:
        try:
            fails()
        except RuntimeError as first:
            raise RuntimeError("CUDA error: out of memory") from (first if chained else None)

    with pytest.raises(RuntimeError) as raised:
        ends()
    assert held[0]() is not None
    _forget(raised.value)
    assert held[0]() is None


@pytest.mark.slow
def test_three_times_are_survived_and_the_fourth_names_a_plan() -> None:
    def other(plan: Plan) -> Plan:
        return Plan.recompute() if policies(model) == (Policy.KEEP,) else Plan.keep()

    model = build("lora")
    events: list[OutOfMemory] = []
    with pytest.raises(TrainingError, match=r"step 2 ran out of memory, after 3 times .* with the plan 'keep' or"):
        train(model, Failing("forward 1", 4, times=4), tell=events.append, tighter=other)
    assert len(events) == 3
    model = build("lora")
    assert train(model, Failing("forward 1", 4, times=3), tighter=other)[0] == undisturbed("lora")[0]


def test_layers_that_the_trainers_arguments_recompute_are_offloaded() -> None:
    model = build("full", None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert train(model, Failing("loss", 2))[0] == undisturbed("full")[0]
    assert policies(model) == (Policy.OFFLOAD,)


def test_where_no_plan_keeps_less_the_run_ends() -> None:
    model = build("full", Plan.offload())
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(TrainingError, match="step 1 ran out of memory: no plan keeps less: train with fewer") as raised:
        train(model, Failing("loss", 2, error=error))
    assert raised.value.__cause__ is error  # where it came from is told


def test_a_model_that_can_not_follow_the_plan_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharded(*_: Any) -> None:
        raise ConfigError("the model is sharded", "choose the plan before")

    model = build("full")
    monkeypatch.setattr(type(attached(model)), "replan", sharded)
    with pytest.raises(TrainingError, match=r"step 1 ran out of memory: start again, .* the plan 'recompute the MLP'"):
        train(model, Failing("loss", 2))


def test_a_plan_that_is_not_served_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def replan(self: Any, plan: Plan) -> Any:
        if plan.policies == (Policy.RECOMPUTE_MLP,):
            raise UnsupportedError("not of this model", "another")
        return plain(self, plan)

    model = build("full")
    plain = type(attached(model)).replan  # type: ignore[union-attr]
    monkeypatch.setattr(type(attached(model)), "replan", replan)
    assert train(model, Failing("loss", 2))[0] == undisturbed("full")[0]
    assert policies(model) == (Policy.RECOMPUTE_LAYER,)


def test_other_errors_pass() -> None:
    model = build("full")
    with pytest.raises(RuntimeError, match="shapes"):
        train(model, Failing("forward 1", 2, error=RuntimeError("shapes don't fit")))
    assert policies(model) == (Policy.KEEP,)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (TrainingError("step 3 ran out of memory", "use less"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_an_error_raised_while_memory_ran_out_counts() -> None:
    try:
        try:
            raise ERROR
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_out_of_memory(error)


def test_tighter_is_the_next_policy_of_each_layer() -> None:
    plan = Plan((Policy.KEEP, Policy.RECOMPUTE_MLP, Policy.OFFLOAD), buffers=2, predicted={"step": 1.0})
    tighter = tighten(plan)
    assert tighter == Plan((Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD), buffers=2)
    assert tighten(Plan((Policy.RECOMPUTE_NORMS,))) == Plan((Policy.RECOMPUTE_MLP,))
    assert tighten(Plan((Policy.OFFLOAD,))) is None


# ---- whole runs ----


@pytest.fixture
def recipe(stories: Path, shared: Path, tmp_path: Path) -> Iterator[Callable[..., Recipe]]:
    """Recipes of deterministic runs with dropout and accumulation into `tmp_path / name`."""
    rows = (shared / "data/gsm8k/test.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:60]))
    data = {"train": tmp_path / "train.jsonl", "columns": {"prompt": "question", "completion": "answer"}}

    def make(name: str, method: str = "lora", dtype: str = "float32", **train: Any) -> Recipe:
        settings = {"output": tmp_path / name, "max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        return Recipe.model_validate(
            {
                "model": {"name": str(stories), "max_seq_length": 256},
                "adapter": {"method": method} | ({"r": 4, "lora_dropout": 0.1} if method == "lora" else {}),
                "data": data | {"overflow": "drop"},
                "train": settings | {"warmup_steps": 0, "save_steps": 1, "deterministic": True} | train,
                "memory": {"gradient_checkpointing": False},
                "precision": {"dtype": dtype},
                "report": {"html": False},
            }
        )

    yield make
    torch.use_deterministic_algorithms(False)  # it is of the process: other tests shall not get it
    torch.backends.cudnn.deterministic = False


def fail_backward(patch: pytest.MonkeyPatch, micro_batch: int) -> None:
    """Memory runs out at the end of that backward of the trainer, when all of its gradients are added."""
    plain, calls = Accelerator.backward, []

    def backward(self: Any, loss: Tensor, **kwargs: Any) -> None:
        plain(self, loss, **kwargs)
        calls.append(None)
        if len(calls) == micro_batch:
            raise ERROR

    patch.setattr(Accelerator, "backward", backward)


def outcome(recipe: Recipe) -> tuple[RunRecord, str]:
    printed = io.StringIO()
    return run(recipe, Console(file=printed, width=200)), printed.getvalue()


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("method", "dtype"), [("lora", "float32"), ("full", "bfloat16")])
def test_a_run_survives_and_says_so(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, method: str, dtype: str
) -> None:
    calm, _ = outcome(recipe("calm", method, dtype))
    fail_backward(monkeypatch, 4)
    record, printed = outcome(recipe("short of memory", method, dtype))
    told = "step 2 ran out of memory and is repeated; layers from here on: recompute the MLP"
    assert told in printed and calm.out_of_memory == []
    assert record.out_of_memory == [
        {
            "step": 2,
            "micro_batch": 2,
            "used_bytes": None,
            "total_bytes": None,
            "plan": "recompute the MLP",
            "process": 0,
            "restarted": False,
        }
    ]
    for name in ("step", "loss", "grad_norm", "tokens", "labelled"):
        assert [step[name] for step in record.steps] == [step[name] for step in calm.steps], name
    ours, theirs = (Path(each.recipe["train"]["output"]) for each in (record, calm))
    weights = [path.relative_to(ours) for path in ours.glob("*/*.safetensors")]
    assert len(weights) == 3 and all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in weights)
    assert RunRecord.read(ours).out_of_memory == record.out_of_memory
    assert [path["path"] for path in record.paths if path["part"] == "activations"] == ["recompute the MLP"]
    console = Console(file=io.StringIO(), width=200)
    console.print(summary(record, ours))
    assert "1 × (survived, at step 2)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_goes_on_with_the_plan_that_was_made_again(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, _ = outcome(recipe("calm"))
    fail_backward(monkeypatch, 4)
    less = Plan((Policy.RECOMPUTE_LAYER,), predicted={"process": 2.0})
    monkeypatch.setattr(prepared_model, "smaller_plan", lambda model, tokens, ran_out, **how: tokens == 256 and less)
    record, printed = outcome(recipe("short of memory"))
    assert "is repeated; layers from here on: recompute the layer" in printed
    assert [step["loss"] for step in record.steps] == [step["loss"] for step in calm.steps]


def test_the_optimiser_is_not_repeated(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    plain = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise ERROR
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(
        TrainingError, match=r"step 2 .* in the optimiser, which may have updated .* from the last check"
    ):
        outcome(recipe("run"))
    assert len(calls) == 2


# ---- several processes ----


def launch(stories: Path, folder: Path, times: int, device: str) -> tuple[int, str]:
    """Exit status and standard error of two processes, of which the second runs out of memory so many times."""
    script = Path(__file__).parents[1] / "support" / "short_of_memory.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(script), str(stories), str(folder), "1", str(times), device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # 300 s: a process that waits for one that is gone would do so for half an hour
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


STOPPED = "pronghorn.errors.TrainingError: step 2 ran out of memory, after 3 times that were survived"


@pytest.mark.slow
def test_one_process_of_two_stops_both(stories: Path, tmp_path: Path) -> None:
    status, told = launch(stories, tmp_path, 9, "cpu")
    assert status != 0
    for rank in (0, 1):
        assert f"[rank{rank}]: {STOPPED}: " in told, told


@pytest.mark.slow
def test_one_process_of_two_repeats_alone_and_the_other_follows(stories: Path, tmp_path: Path) -> None:
    reports = {}
    for times in (0, 1):
        folder = tmp_path / str(times)
        folder.mkdir()
        status, told = launch(stories, folder, times, "cpu")
        assert status == 0, told
        assert ("step 2 ran out of memory" in told) == bool(times)
        reports[times] = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert reports[0][0]["plan"] is None, "transformers decided"
    assert reports[1][0]["plan"] == reports[1][1]["plan"] and set(reports[1][0]["plan"]) == {"recompute the MLP"}
    assert reports[1][0]["losses"] == pytest.approx(reports[0][0]["losses"], rel=1e-6)


def two_trainings(rank: int, folder: Path) -> None:
    """Of which process 1 runs out of memory in the first."""
    told = []
    for training in range(2):
        model = build("lora")
        events: list[OutOfMemory] = []
        guard = OomRetry(events.append)
        guard.begin(waits_for_others=False)
        dist.barrier()  # on a busy machine the first one may begin when the other has failed already
        failing = Failing("loss", 1) if rank == 1 and training == 0 else None

        def micro_batch(batch: dict[str, Any], model: Any = model) -> Tensor:
            loss = model(**batch).loss
            loss.backward()
            return loss.detach()

        with failing.in_(model) if failing else nullcontext():
            for step in (1, 2):
                guard.run(model, step, True, packed_row([1, 9, 8], 24, seed=step), micro_batch)
                dist.barrier()
        told.append(([(event.step, event.process) for event in events], policies(model)))
    torch.save(told, folder / f"{rank}.pt")


def test_the_other_process_follows_is_told_and_begins_anew(tmp_path: Path) -> None:
    together(two_trainings, tmp_path)
    for rank in range(WORLD):
        first, second = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert first == ([(1, 1)], (Policy.RECOMPUTE_MLP,))
        assert second == ([], (Policy.KEEP,)), "what an earlier training survived is of no concern"


# ---- GPUs ----


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_gpu_of_two_stops_both(stories: Path, tmp_path: Path) -> None:
    """The launcher ends the other, which waits on the device."""
    status, told = launch(stories, tmp_path, 9, "cuda")
    assert status != 0
    assert STOPPED in told, told


def on_gpu(plan: Plan) -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "head_dim": 64}
    model = build("lora", None, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=GPU_ROW, **sizes)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model.to("cuda")
    attach(model, plan)
    return model


def gpu_losses(model: Any, events: list[OutOfMemory]) -> tuple[list[float], int]:
    """Losses of two steps of two rows, and the most bytes that the allocator took."""
    guard = OomRetry(events.append)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(7)
    losses = []

    def micro_batch(batch: dict[str, Any]) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    for i in range(4):
        batch = {k: v.to("cuda") for k, v in packed_row([1000 - i] * 4, GPU_ROW, seed=i).items()}
        losses.append(guard.run(model, 1 + i // 2, i % 2 == 1, batch, micro_batch).item())
        if i % 2:
            model.zero_grad()
    return losses, torch.cuda.max_memory_reserved()


@pytest.mark.gpu
def test_memory_that_does_run_out() -> None:
    """Under LoRA's dropout, so that no layer is fused and no graph captured."""
    gpu_losses(on_gpu(Plan.recompute()), [])  # a process's first: cuBLAS's workspaces stay, kernels compile
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved()  # tests' before this one, and those workspaces
    model = on_gpu(Plan.recompute())
    expected, least = gpu_losses(model, [])
    model = on_gpu(Plan.keep())
    _, most = gpu_losses(model, [])
    told = f"others {in_mib(others)}, least {in_mib(least)}, most {in_mib(most)} MiB"
    assert most - others > 1.5 * (least - others), told
    device = torch.cuda.current_device()
    del model
    model = on_gpu(Plan.keep())
    gc.collect()
    torch.cuda.empty_cache()
    events: list[OutOfMemory] = []
    limit = (least + most) / 2 / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(limit, device)
    try:
        losses, reserved = gpu_losses(model, events)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    told += (
        f"; under the limit {in_mib(reserved)}, {[(event, event.used_bytes, event.total_bytes) for event in events]}"
    )
    assert losses == pytest.approx(expected, rel=1e-3), told
    assert events and events[0].step == 1 and events[0].micro_batch == 1, told
    used, total = events[0].used_bytes, events[0].total_bytes
    assert used is not None and total is not None, told
    # growing segments may pass the limit by a part of a page: what is asked for counts, what is mapped are whole pages
    allowed = total + (LARGE_PAGE if segments_grow() else 0)
    assert 0.5 * total < used <= allowed, told
    assert reserved <= allowed and policies(model) != (Policy.KEEP,), told


LARGE_PAGE = 20 * 2**20
"""What torch's growing segments are mapped by, of tensors over a MiB."""


def segments_grow() -> bool:
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


def in_mib(size: int) -> int:
    return size // 2**20


def test_a_plan_that_was_made_is_made_again_for_a_little_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: what runs out again, plans that were asked for, and processes that must agree keep much less."""
    model = build("lora", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    arguments = SFTConfig(
        output_dir="nowhere", packing=True, max_length=4096, per_device_train_batch_size=2, bf16=False
    )
    card, room = device_spec("h200"), [2**40]
    monkeypatch.setattr(auto_plan, "cuda_device_spec", lambda device: card)
    monkeypatch.setattr(auto_plan, "available", lambda device: room[0])
    setup = auto_plan.setup_of(model, 2 * 4096, None, accumulates=False)
    made = plan(auto_plan.dims_of(model), setup, card)
    assert set(made.policies) == {Policy.KEEP}
    tighter = TighterPlans(model, arguments, padded=not arguments.packing, autocast=None)
    again = tighter(made)
    assert again is not None and again.predicted["process"] <= 0.96 * made.predicted["process"]
    assert Policy.OFFLOAD not in again.policies and again.predicted["step_ms"] < 1.1 * made.predicted["step_ms"]
    assert tighter(again) == tighten(again) != again
    assert tighter(Plan.keep()) == tighten(Plan.keep()), "asked for"
    room[0] = int(0.9 * made.predicted["process"])
    less = TighterPlans(model, arguments, padded=not arguments.packing, autocast=None)(made)
    assert less is not None and less.predicted["process"] <= room[0], "another process took some"
    room[0] = 1
    assert TighterPlans(model, arguments, padded=not arguments.packing, autocast=None)(made) == tighten(made), (
        "nothing fits"
    )
    room[0] = 2**40
    monkeypatch.setattr(prepared_model, "processes", lambda: 2)
    assert TighterPlans(model, arguments, padded=not arguments.packing, autocast=None)(made) == tighten(made)


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        (Plan.asked("auto"), Policy.KEEP),
        (Plan.asked("auto", budget_bytes=2**30), Policy.RECOMPUTE_LAYER),
        (Plan.asked("auto", feed_forward="tiled"), Policy.RECOMPUTE_LAYER),
        (Plan.asked(True), Policy.RECOMPUTE_LAYER),
    ],
)
def test_what_no_plan_is_made_for_keeps_everything_until_memory_runs_out(
    asked: Plan, resolved: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generic family on one GPU: nobody knows what its layers keep."""
    model = add_lora(generic_model("starcoder2"), r=2)
    handle = attach(model, replace(asked, mlp_rows=0))
    assert handle.plan is not None
    handle.plan = replace(handle.plan, mlp_rows=asked.mlp_rows)
    monkeypatch.setattr(type(handle.model), "device", torch.device("cuda"))
    made = auto_plan.resolve(handle, 2, 64, packs=False, autocast=None, accumulates=False)
    assert made is not None and made is handle.plan and made.policies == (resolved,)
    if resolved is Policy.KEEP:
        assert not base_causal_lm(model).is_gradient_checkpointing
        again, followed = _tighter_plan(model, TighterPlans(model, SFTConfig("nowhere", bf16=False), True, None))
        assert again == handle.plan and followed and policies(model) == (Policy.RECOMPUTE_LAYER,)
        assert base_causal_lm(model).is_gradient_checkpointing
