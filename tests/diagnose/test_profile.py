"""Where a step's time goes: exact sums on made traces, planted costs on real steps."""

from __future__ import annotations

import json
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from pronghorn.chunks import chunks_of
from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.batch import Collator
from pronghorn.diagnose.profile import find_sites, parts_of, profile, unfused_reason
from pronghorn.diagnose.profile_report import Advice, Profile, Sync, advise, headlines, read_profile, write_report
from pronghorn.diagnose.profile_times import account_for
from pronghorn.diagnose.profile_trace import ENGINE, Cause, cause, spans
from pronghorn.errors import DataError, TrainingError
from pronghorn.kernels import gated_delta
from pronghorn.models.attach import attach
from pronghorn.moe.experts import _Product
from pronghorn.ranges import in_part
from support import delta_checks
from support.run_records import HOSTILE
from support.tiny import tiny_model

QUIET = Console(quiet=True)
MODEL = ("pronghorn:model", "pronghorn:backbone", "pronghorn:layer")
RANKS = frozenset({4, 8, 12})


class Made:
    """A trace made by hand, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0

    def host(self, name: str, start: float, end: float, thread: int = 1, **args: Any) -> dict[str, Any]:
        category = "user_annotation" if name.startswith("pronghorn:") else "cpu_op"
        category = "cuda_runtime" if name.startswith("cuda") else "python_function" if "): " in name else category
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": args}
        self.events.append(event)
        return event

    def nest(self, names: tuple[str, ...], start: float, end: float, thread: int = 1, **args: Any) -> dict[str, Any]:
        """Spans in one another, outermost first; the last gets the arguments and is returned."""
        for i, name in enumerate(names[:-1]):
            self.host(name, start + i / 100, end - i / 100, thread)
        return self.host(names[-1], start + len(names) / 100, end - len(names) / 100, thread, **args)

    def link(self, forward: dict[str, Any], backward: dict[str, Any]) -> None:
        self._number += 1
        for phase, event in (("s", forward), ("f", backward)):
            place = {"ph": phase, "cat": "fwdbwd", "id": self._number, "tid": event["tid"], "ts": event["ts"]}
            self.events.append(place)

    def device(self, name: str, start: float, end: float, stream: int, launched: tuple[str, ...] = ()) -> None:
        self._number += 1
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        if launched:
            self.nest((*launched, "cudaLaunchKernel"), start - 5, start - 4, correlation=self._number)
        args = {"device": 0, "stream": stream, "correlation": self._number}
        self.events.append(
            {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": stream, "args": args}
        )


def found_cause(made: Made, event: dict[str, Any]) -> tuple[Cause, bool]:
    return cause(next(span for span in spans(made.events) if span.start == event["ts"]), RANKS)


def test_every_microsecond_of_a_device_has_one_cause() -> None:
    made = Made()
    made.host("pronghorn:step", 0, 1000)
    made.device("gemm", 100, 300, 7, (*MODEL, "pronghorn:feed-forward", "aten::mm"))
    made.device("norm", 250, 280, 9, (*MODEL, "pronghorn:norm", "aten::mul"))  # wholly beside the product
    made.device("Memcpy HtoD (Pinned -> Device)", 250, 400, 8)  # 50 beside the product, 80 alone, 20 beside the next
    made.device("norm", 380, 410, 9, (*MODEL, "pronghorn:norm", "aten::mul"))
    made.device("Memcpy DtoH (Device -> Pinned)", 600, 650, 7)
    made.device("ncclKernel_AllReduce", 640, 660, 20)
    made.host("cudaStreamSynchronize", 610, 655)
    made.host("pronghorn:data", 700, 900)
    found = account_for(made.events, RANKS)
    ms = {row.cause: (round(row.ms * 1e3, 6), round(row.hidden_ms * 1e3, 6), row.count) for row in found.rows}
    assert ms == {
        Cause.GEMM: (200, 0, 1),
        Cause.NORM: (30, 30, 2),
        Cause.TO_DEVICE: (80, 70, 1),
        Cause.TO_HOST: (50, 0, 1),
        Cause.COMMUNICATION: (10, 10, 1),
        Cause.DATA: (200, 0, 0),
        Cause.IDLE: (430, 0, 0),
    }
    assert found.step_ms == 1 and found.explained == 1 and found.launches == 3
    assert sum(row.ms for row in found.rows) == pytest.approx(1)


def test_idle_time_after_a_synchronisation_and_behind_work() -> None:
    made = Made()
    for start in (0, 500):
        made.host("pronghorn:step", start, start + 500)
    made.device("gemm", 0.5, 100, 7, ("aten::mm",))
    made.host("cudaStreamSynchronize", 50, 101)  # the device runs dry in it
    made.device("gemm", 200, 600, 7, ("aten::mm",))
    made.host("pronghorn:data", 300, 480)  # while the device works
    made.device("gemm", 700, 1000, 7, ("aten::mm",))
    found = account_for(made.events, RANKS)
    ms = {row.cause: (row.ms * 2e3, row.hidden_ms * 2e3) for row in found.rows}
    assert ms[Cause.AFTER_SYNC] == pytest.approx((100, 0)) and ms[Cause.IDLE] == pytest.approx((100.5, 0))
    assert ms[Cause.DATA] == pytest.approx((0, 180))
    assert found.step_ms == 0.5 and found.steps == 2
    shapes = found.timeline["GPU 0 stream 7"]
    assert [shape[:2] for shape in shapes] == [(0, 0.1), (0.2, 0.5)]  # the last 500 microseconds


def test_a_processor_s_time_is_that_of_the_innermost_operation() -> None:
    made = Made()
    made.host("pronghorn:step", 0, 1000)
    made.host("pronghorn:data", 0, 300)
    made.host("aten::cat", 100, 200)
    made.host("pronghorn:model", 300, 800)
    made.host("pronghorn:backbone", 310, 700)
    made.host("aten::linear", 400, 600)
    made.host("aten::mm", 450, 550, **{"Input Dims": [[32, 64], [64, 64]]})
    made.host("aten::nll_loss", 700, 790)
    found = account_for(made.events, RANKS)
    ms = {row.cause: row.ms * 1e3 for row in found.rows}
    assert ms == pytest.approx({Cause.DATA: 300, Cause.GEMM: 200, Cause.LOSS: 90, Cause.HOST: 410})
    assert {(k.name, k.count) for k in found.kernels if k.cause == Cause.GEMM} == {("aten::linear", 1), ("aten::mm", 1)}


@pytest.mark.parametrize(
    ("names", "shapes", "expected"),
    [
        (("pronghorn:feed-forward", "aten::mm"), [[512, 64], [64, 172]], Cause.GEMM),
        (("pronghorn:feed-forward", "aten::mm"), [[512, 64], [64, 12]], Cause.LORA),
        (("pronghorn:attention", "aten::addmm_"), [[512, 64], [512, 4], [4, 64]], Cause.LORA),
        (("pronghorn:attention", "aten::_foreach_copy_"), [], Cause.LORA),
        (("pronghorn:attention", "pronghorn:lora", "aten::mul"), [[1, 512, 64]], Cause.LORA),
        (("pronghorn:attention", "pronghorn:lora", "pronghorn:dense", "aten::mm"), [[512, 4], [4, 4]], Cause.GEMM),
        (("pronghorn:attention", "aten::scaled_dot_product_attention", "aten::mm"), [], Cause.ATTENTION),
        (("pronghorn:attention", "aten::bmm"), [[8, 64, 8], [8, 8, 64]], Cause.ATTENTION),
        (("pronghorn:attention", "_Attention", "pronghorn:scores", "aten::empty"), [], Cause.ATTENTION),
        (("pronghorn:attention", "_Attention"), [], Cause.NORM),
        (("pronghorn:feed-forward", "_Experts", "aten::_grouped_mm"), [[512, 64], [8, 64, 24]], Cause.GEMM),
        (("pronghorn:feed-forward", "_Experts", "pronghorn:products", "aten::empty"), [], Cause.GEMM),
        (("pronghorn:feed-forward", "_Experts", "pronghorn:adapters", "aten::empty"), [], Cause.LORA),
        (("pronghorn:attention", "aten::contiguous", "aten::copy_"), [[1, 8, 512, 8]], Cause.ON_DEVICE),
        (("pronghorn:norm", "aten::copy_"), [], Cause.NORM),
        (("aten::add",), [], Cause.ELEMENTWISE),
    ],
)
def test_causes_of_operations(names: tuple[str, ...], shapes: Any, expected: Cause) -> None:
    made = Made()
    forward = made.nest((*MODEL, *names), 0, 10, **{"Input Dims": shapes})
    assert found_cause(made, forward) == (expected, False)
    if names[-1] not in ("_Attention", "aten::_foreach_copy_"):  # the same, launched by the backward thread
        node = made.nest((f"{ENGINE}: XBackward0", "XBackward0"), 20, 30, 2)
        made.link(forward, node)
        inner = made.host(names[-1], 22, 28, 2, **{"Input Dims": shapes})
        assert found_cause(made, inner) == (expected, False)


def test_causes_outside_the_layers() -> None:
    made = Made()
    for i, (names, expected) in enumerate(
        [
            (("pronghorn:model", "aten::mm"), (Cause.LOSS, False)),
            (("pronghorn:model", "pronghorn:backbone", "pronghorn:embedding", "aten::embedding"), (Cause.OTHER, False)),
            (("pronghorn:optimiser", "Optimizer.step#AdamW.step", "aten::_fused_adamw_"), (Cause.OPTIMISER, False)),
            (("pronghorn:optimiser", "aten::_foreach_norm"), (Cause.OPTIMISER, False)),
            (("pronghorn:step", "pronghorn:data", "aten::cat"), (Cause.DATA, False)),
            (("pronghorn:step", "pronghorn:backward", f"{ENGINE}: X", "aten::add"), (Cause.ELEMENTWISE, False)),
            (
                ("pronghorn:step", "pronghorn:backward", f"{ENGINE}: X", "c10d::allreduce_"),
                (Cause.COMMUNICATION, False),
            ),
            (("pronghorn:step", "pronghorn:backward", "aten::ones_like"), (Cause.UNEXPLAINED, False)),
            (
                (f"{ENGINE}: X", "XBackward0", "pronghorn:layer", "pronghorn:feed-forward", "aten::silu"),
                (Cause.NORM, True),
            ),
        ]
    ):
        assert found_cause(made, made.nest(names, 20 * i, 20 * i + 10)) == expected


def test_attention_s_backward_in_a_fused_layer_is_no_recomputation() -> None:
    made = Made()
    forward = made.nest((*MODEL, "pronghorn:attention", "_Attention"), 0, 10)
    node = made.nest((f"{ENGINE}: _AttentionBackward", "_AttentionBackward"), 20, 90, 2)
    made.link(forward, node)
    for at, names, dims, expected in (
        (30, ("pronghorn:scores", "aten::copy_"), [], Cause.ATTENTION),
        (40, ("aten::mm",), [[64, 512], [512, 64]], Cause.GEMM),
        (50, ("aten::mm",), [[4, 512], [512, 64]], Cause.LORA),
        (60, ("aten::empty_like",), [], Cause.NORM),
        (70, ("pronghorn:products", "aten::empty"), [], Cause.GEMM),
    ):
        assert found_cause(made, made.nest(names, at, at + 5, 2, **{"Input Dims": dims})) == (expected, False)


def test_synchronisations_have_their_line() -> None:
    made = Made()
    made.nest(("pronghorn/x.py(1): f", "cudaDeviceSynchronize"), 1, 3)  # before the step
    made.host("pronghorn:step", 5, 100)
    made.nest(
        ("transformers/trainer.py(90): log", "torch/_tensor.py(5): x", "aten::item", "cudaStreamSynchronize"), 10, 20
    )
    made.nest(("pronghorn/train/gradients.py(77): judge", "torch/cuda/streams.py(1): synchronize"), 30, 41)
    made.host("cudaEventSynchronize", 31, 40)
    made.nest((f"{ENGINE}: IndexBackward0", "aten::nonzero", "cudaStreamSynchronize"), 50, 60, 2)
    made.nest(("pronghorn:wait", "cudaDeviceSynchronize"), 90, 95)  # the profiler's own
    made.nest(("pronghorn/x.py(1): f", "cudaDeviceSynchronize"), 120, 130)  # after the step
    found = find_sites(made.events, [FrameSummary("/lib/transformers/trainer.py", 93, "log")])
    assert [(sync.call, sync.site, sync.count) for sync in found] == [  # the longest first
        ("aten::nonzero", "backward pass, in IndexBackward0", 1),
        ("aten::item", "transformers/trainer.py:93 in log", 1),
        ("cudaEventSynchronize", "pronghorn/train/gradients.py:77 ff. in judge", 1),
    ]


@pytest.fixture
def recipe(stories: Path, shared: Path, tmp_path: Path) -> Any:
    def make(**changes: dict[str, Any]) -> Path:
        rows = (shared / "data/gsm8k/test.jsonl").read_text().splitlines()
        (tmp_path / "train.jsonl").write_text("\n".join(rows[:60]))
        table: dict[str, dict[str, Any]] = {
            "model": {"name": str(stories), "max_seq_length": 512},
            "adapter": {"r": 4},
            "data": {
                "train": str(tmp_path / "train.jsonl"),
                "columns": {"prompt": "question", "completion": "answer"},
                "overflow": "drop",
            },
            "train": {"output": str(tmp_path / "run"), "eval_steps": None, "save_steps": 1},
            "memory": {"gradient_checkpointing": False},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({key: {**table.get(key, {}), **changes.get(key, {})} for key in {*table, *changes}}))
        return path

    return make


def sums_are_right(found: Profile) -> None:
    assert sum(row.ms for row in found.rows) == pytest.approx(found.step_ms, rel=0.05)
    assert found.explained >= 0.95 and found.plain_ms > 0
    assert all(row.ms >= 0 and row.hidden_ms >= 0 for row in found.rows)


def test_real_steps_are_explained_and_leave_nothing(recipe: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    path = recipe()
    started = time.perf_counter()
    found = profile(Recipe.load(path), QUIET, steps=2, warmup=1)
    assert 2 * found.step_ms < (time.perf_counter() - started) * 1e3
    sums_are_right(found)
    inside = {Cause.GEMM, Cause.ATTENTION, Cause.LORA, Cause.NORM, Cause.ELEMENTWISE, Cause.LOSS, Cause.OPTIMISER}
    assert {row.cause for row in found.rows if row.ms > 0} >= inside | {Cause.DATA, Cause.LOGGING, Cause.HOST}
    assert found.recomputed_ms == 0 and found.launches == 0 and not found.syncs
    # two forward and four backward for each of 35 linears; the first layer's q, k and v need no gradient of their input
    products = {k.cause: k.count for k in found.kernels if k.name == "aten::mm"}
    assert products[Cause.LORA] == 35 * 6 - 3 and 66 <= products[Cause.GEMM] <= 70
    assert sorted(tmp_path.iterdir()) == sorted([*before, path, tmp_path / "train.jsonl"])


@pytest.fixture
def fusible(stories: Path, tmp_path: Path) -> dict[str, Any]:
    """The model section of a recipe: three Qwen3 layers whose head size the kernels serve."""
    return saved("qwen3", stories, tmp_path / "model")


def saved(family: str, stories: Path, folder: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"name": str(folder)}


def test_parts_are_recorded_while_a_profiler_runs_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of experts and attention by hand are launched by kernels of our own, within no operation of torch's."""
    opened: list[str] = []

    @in_part("scores")
    def attention() -> None:
        opened.append("called")

    def products() -> None:
        x, offsets = torch.ones(16, 64), torch.tensor([7, 16], dtype=torch.int32)
        weight, a, b = torch.ones(2, 64, 24), torch.ones(2, 4, 64), torch.ones(2, 24, 4)
        product = _Product(weight, a, b, torch.float32, 1.0, offsets, "loop", None)
        y, narrow = product.multiply(x)
        product.gradients((True, True, True), (x, None), (y, None), narrow, torch.ones(16, 4))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attention()
        products()
    names = [event.name for event in profiler.events() if event.name.startswith("pronghorn:")]
    expected = ["scores", "products", "adapters", "products", "adapters", "adapters"]
    assert names == [f"pronghorn:{name}" for name in expected]
    monkeypatch.setattr("torch.autograd.profiler.record_function", None)  # would be called, and fail
    attention()
    products()
    assert opened == ["called", "called"]


def test_the_delta_rule_has_attention_s_range() -> None:
    given, do = delta_checks.case((5, 3), (2, 2, 16, 16), torch.float32, 1.0, 0)
    chunks = chunks_of((5, 3), 2, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _, saved = gated_delta.forward(*given, chunks, 1.0)
        gated_delta.backward(do, *given, saved, chunks, 1.0)
    names = [event.name for event in profiler.events() if event.name.startswith("pronghorn:")]
    assert names == ["pronghorn:scores"] * 2


def test_modules_are_named_by_the_family_s_spec() -> None:
    model = tiny_model("gemma3_text")
    parts = parts_of(model)
    names = {name: parts[module] for name, module in model.named_modules() if module in parts}
    in_layer = {name: part for name, part in names.items() if name.startswith("model.layers.0")}
    prefix = "model.layers.0."
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    assert in_layer == {
        "model.layers.0": "layer",
        f"{prefix}self_attn": "attention",
        f"{prefix}mlp": "feed-forward",
        **{f"{prefix}{name}": "norm" for name in (*norms, "self_attn.q_norm", "self_attn.k_norm")},
    }
    assert names["model.embed_tokens"] == "embedding" and names["model.norm"] == "norm" and names["model"] == "backbone"


def test_experts_with_adapters(recipe: Any, stories: Path, tmp_path: Path) -> None:
    """Their gate is not a product, and only products with a rank are LoRA's."""
    adapter = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "lora_dropout": 0.0}
    model = saved("qwen3_moe", stories, tmp_path / "model")
    found = profile(Recipe.load(recipe(model=model, adapter=adapter)), QUIET, steps=1, warmup=1)
    sums_are_right(found)
    causes = {name: {k.cause for k in found.kernels if k.name == name} for name in ("aten::silu", "aten::mm")}
    assert causes["aten::silu"] == {Cause.NORM} and causes["aten::mm"] >= {Cause.GEMM, Cause.LORA}
    of_experts = [k for k in found.kernels if k.name == "aten::mm" and k.cause == Cause.LORA]
    assert of_experts[0].count > 3 * 4 * 6, "those of attention's linears alone"


def test_fused_layers(recipe: Any, fusible: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.train.build.attach", partial(attach, layers="fused"))
    found = profile(Recipe.load(recipe(model=fusible)), QUIET, steps=1, warmup=1)
    sums_are_right(found)
    assert [path["path"] for path in found.paths if path["part"] == "decoder layers"] == ["fused"]
    count = {(k.name, k.cause): k.count for k in found.kernels}
    # in each of three layers four merged products, forward and backward; the first needs no gradient of its input
    assert count["aten::mm", Cause.GEMM] == 3 * 8 - 1
    # x Aᵀ and dA of each merged product, dB of each linear; s · dy B
    assert count["aten::mm", Cause.LORA] == 3 * (4 + 4 + 7) and count["aten::addmm", Cause.LORA] == 3 * 4
    assert not any(
        count.get((name, cause)) for name in ("aten::silu", "aten::cat") for cause in (Cause.GEMM, Cause.LORA)
    )
    assert count["aten::cat", Cause.ATTENTION] >= 3 * 2  # forward and backward
    assert found.recomputed_ms == 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"enabled": False, "rows_per_step": 3}},
        {"adapter": {"method": "full"}, "train": {"gradient_accumulation_steps": 2}},
        {"memory": {"gradient_checkpointing": True}, "packing": {"rows_per_step": 2}},
    ],
    ids=["padded", "full, accumulated", "recompute"],
)
def test_other_recipes(recipe: Any, changes: dict[str, Any]) -> None:
    found = profile(Recipe.load(recipe(**changes)), QUIET, steps=1, warmup=1)
    sums_are_right(found)
    assert (found.ms(Cause.LORA) > 0) == ("adapter" not in changes)
    assert (found.recomputed_ms > 0.1 * found.step_ms) == ("memory" in changes)
    assert any("second time" in each.cost for each in found.advice) == ("memory" in changes)


@pytest.mark.slow
def test_a_slow_collator_is_named_first(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collate = Collator.__call__

    def slow(self: Collator, rows: Any) -> Any:
        time.sleep(0.3)
        return collate(self, rows)

    monkeypatch.setattr(Collator, "__call__", slow)
    found = profile(Recipe.load(recipe()), QUIET, steps=2, warmup=1)
    sums_are_right(found)
    assert found.ms(Cause.DATA) == pytest.approx(300, rel=0.2)
    assert found.plain_ms > 300 and found.advice[0].cost == "the step waits for data" and found.advice[0].ms >= 290


def test_an_error_in_training_takes_everything_away(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Collator.__call__, []

    def broken(self: Collator, rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 5:
            raise TrainingError("planted", "none")
        return original(self, rows)

    monkeypatch.setattr(Collator, "__call__", broken)
    with pytest.raises(TrainingError, match="planted"):
        profile(Recipe.load(recipe()), QUIET, steps=2, warmup=1)
    assert not torch.autograd._profiler_enabled()


def test_advice_on_a_device() -> None:
    made = Made()
    made.host("pronghorn:step", 0, 1000)
    made.device("gemm", 100, 300, 7, (*MODEL, "pronghorn:feed-forward", "aten::mm"))
    made.device("norm", 400, 520, 7, (*MODEL, "pronghorn:norm", "aten::mul"))
    made.device("Memcpy HtoD (Pageable -> Device)", 600, 650, 7)
    found = account_for(made.events, RANKS)
    found.plain_ms = 1.0
    advice = advise(found, "LoRA dropout")
    assert [each.cost for each in advice] == [
        "the host can't launch as fast as the device computes",
        "decoder layers are not fused",
        "copies to the device are not hidden",
    ]
    assert [each.ms for each in advice] == pytest.approx([0.63, 0.06, 0.05])
    found.plain_ms = 0.38  # without the profiler the host is hardly late
    assert [each.ms for each in advise(found, None)] == pytest.approx([0.05])
    idle = next(line for line in headlines(found) if line[0] == "Device idle")
    assert idle == ("Device idle", "2.6%", "at most; 0.6 ms under the profiler")


def test_advice_on_what_an_h200_recorded(tmp_path: Path) -> None:
    """The profiler slowed its host, so that the step waited for data 36 ms: what the plain step has room for counts."""
    recorded = Path(__file__).parents[2] / "benchmarks/results/reports/profile-llama-3.2-1b.json"
    table = json.loads(recorded.read_text())
    del table["commit"]
    (tmp_path / "profile.json").write_text(json.dumps({**table, "timeline": {}}))
    found = read_profile(tmp_path / "profile.json")
    assert found.plain_ms == pytest.approx(191.9, abs=0.1) and found.idle_ms == pytest.approx(52.3, abs=0.1)
    assert [(each.cost, round(each.ms)) for each in advise(found, None)] == [
        ("the host can't launch as fast as the device computes", 35),
        ("the step waits for data", 17),
    ]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href"}  # needs nothing but itself


def test_the_page_of_hostile_names_is_inert(tmp_path: Path) -> None:
    made = Made()
    made.host("pronghorn:step", 0, 1000)
    for i in range(25):
        made.device(f"{i}{HOSTILE}", 10 + 30 * i, 30 + 30 * i, 7, (*MODEL, "pronghorn:feed-forward", "aten::mm"))
    found = account_for(made.events, RANKS)
    found.plain_ms, found.device, found.versions = 1.0, HOSTILE, {"torch": HOSTILE}
    found.recipe = {"model": {"name": HOSTILE, "max_seq_length": 64}}
    found.syncs, found.paths = [Sync(HOSTILE, HOSTILE, 1, 1.0)], [{"part": HOSTILE, "path": HOSTILE, "why": HOSTILE}]
    found.advice = [Advice(1.0, HOSTILE, HOSTILE)]
    text = write_report(found, tmp_path / "page.html", found).read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert not {"script", "img", "iframe", "object", "link"} & set(page.tags) and page.tags.count("details") == 1
    assert "5 more</summary>" in text and "default-src 'none'" in text


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fused_layers_are_not_advised(family: str) -> None:
    model = tiny_model(family)
    assert unfused_reason(attach(model, layers="fused").decisions()) is None
    assert unfused_reason(attach(model, layers="stock").decisions()) == "asked for"


def test_layers_that_are_fused_in_part_are_advised() -> None:
    """Their path's text has the word "fused" in it."""
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    handle = attach(get_peft_model(tiny_model("qwen3"), config), layers="fused")
    assert unfused_reason(handle.decisions()) == "LoRA dropout"


def test_command(recipe: Any, tmp_path: Path) -> None:
    first, second, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "page.html"
    common = ["profile", str(recipe()), "--steps", "1", "--warmup", "1"]

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*common, *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})

    result = invoke("--json", str(first), "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "not explained" in result.stdout or "Explained: 100.0%" in result.stdout
    assert "LoRA" in result.stdout and "1. " in result.stdout
    assert not (tmp_path / "run").exists()
    stored = read_profile(first)
    sums_are_right(stored)
    assert stored.schema == "pronghorn-profile-v1" and stored.recipe["train"]["output"] == str(tmp_path / "run")
    parsed = Page()
    parsed.feed(page.read_text())
    drawn = sum(len(shapes) for shapes in stored.timeline.values())
    assert {"table", "section"} <= set(parsed.tags) and parsed.tags.count("i") == drawn > 10

    result = invoke("memory.gradient_checkpointing=true", "--against", str(first), "--json", str(second))
    assert result.exit_code == 0 and "difference" in result.stdout
    assert read_profile(second).recomputed_ms > 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("attention "))
    mine, its = read_profile(second).ms(Cause.ATTENTION), stored.ms(Cause.ATTENTION)
    assert row.split()[1:] == [f"{mine:.2f}", f"{its:.2f}", f"{mine - its:+.2f}"]

    second.write_text(json.dumps({"schema": "pronghorn-profile-v1", "steps": 1}))
    refused = invoke("--against", str(second))
    assert refused.exit_code == 1 and "is not whole: step_ms: Field required" in refused.stderr
    second.write_text(json.dumps({"schema": "pronghorn-profile-v0"}))
    for option in ("--against", "--json"):
        refused = invoke(option, str(second))
        assert refused.exit_code == 1 and "schema 'pronghorn-profile-v0'" in refused.stderr
    assert json.loads(second.read_text()) == {"schema": "pronghorn-profile-v0"}
    for option, place, why in (("--json", page / "x.json", "be written"), ("--html", first, "is not an HTML page")):
        refused = invoke(option, str(place))
        assert refused.exit_code == 1 and why in refused.stderr and "Profiling" not in refused.stderr
    with pytest.raises(DataError, match="not valid JSON"):
        read_profile(page)


@pytest.mark.gpu
def test_planted_costs_on_a_gpu(recipe: Any, fusible: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clean = profile(Recipe.load(recipe(model=fusible)), QUIET, steps=2, warmup=3)
    sums_are_right(clean)
    assert [path["path"] for path in clean.paths if path["part"] == "decoder layers"] == ["fused"]
    computing = (Cause.GEMM, Cause.ATTENTION, Cause.LORA, Cause.NORM, Cause.LOSS, Cause.OPTIMISER)
    assert clean.launches > 0 and all(clean.ms(cause) > 0 for cause in computing)
    assert not any("test_profile.py" in sync.site for sync in clean.syncs)

    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    forward = Qwen3DecoderLayer.forward

    def planted(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states.sum().item()
        return forward(self, hidden_states, *args, **kwargs)

    line = planted.__code__.co_firstlineno + 1
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", planted)
    unfused = Recipe.load(recipe(model=fusible))
    found = profile(unfused, QUIET, steps=2, warmup=3)
    sums_are_right(found)
    sync = next(sync for sync in found.syncs if "test_profile.py" in sync.site)
    assert sync.count == 3 and sync.call == "aten::item" and f"test_profile.py:{line} in planted" in sync.site
    assert [path["path"] for path in found.paths if path["part"] == "decoder layers"] != ["fused"]
