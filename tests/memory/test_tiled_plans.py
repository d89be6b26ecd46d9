"""Plans with MLPs in tiles of rows: what is kept to the byte, when they are chosen, how long a row they allow."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from typer.testing import CliRunner

from pronghorn.attention import explicit
from pronghorn.cli.main import app
from pronghorn.data.batch import Collator, PackedBatch
from pronghorn.diagnose.shapes import SHAPES, write_checkpoint
from pronghorn.errors import UnsupportedError
from pronghorn.kernels import fp8_blocks, glu, residual, rms_norm, rope
from pronghorn.kernels.quantise import RowCodes
from pronghorn.memory.devices import device_spec
from pronghorn.memory.estimate import GIB, LayerBytes, MemoryModel, ModelDims, TrainSetup
from pronghorn.memory.plan import TILE_ROWS, Plan, Policy
from pronghorn.memory.planner import PlanDoesNotFit, plan
from pronghorn.memory.step_time import step_times
from pronghorn.memory.tiles import tiled_times
from pronghorn.models.attach import attach
from pronghorn.models.auto_plan import dims_of, setup_of
from pronghorn.models.lora import add_lora
from pronghorn.precision import fp8, int8
from support.saved import TOKENS, saved_bytes
from support.shapes import dims_of_shape
from support.tiny import in_4_bits, tiny_model

LEAST = (Policy.OFFLOAD,)


def dims(name: str = "Llama-3.1-8B") -> ModelDims:
    return dims_of_shape(name)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "olmo2", "granite"])
def test_a_layer_saves_what_the_formula_says(family: str, policy: Policy, dtype: torch.dtype) -> None:
    """Exactly: a model of three layers against one of two."""
    found, work = [], None
    for count in (2, 3):
        model = add_lora(tiny_model(family, num_hidden_layers=count).to(dtype), r=4)
        attach(model, Plan((policy,), mlp_rows=16), layers="fused")
        found.append(saved_bytes(model, PackedBatch.build([TOKENS], tokens=TOKENS), None))
        work = replace(setup_of(model, TOKENS), mlp_rows=16)
    assert work is not None
    layer = dims_of(model).layers[0]
    assert layer.attention is not None
    expected = LayerBytes.of(layer, work).stored[policy] - 4 * TOKENS * layer.attention.heads  # no log-sum-exp here
    assert found[1] - found[0] == expected


class Peak(TorchDispatchMode):
    """The most bytes that storages made under it hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.alive = 0, WeakIdKeyDictionary(ref_type=weakref.ref)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in (args, result))
        old = {x.untyped_storage().data_ptr() for x in given}
        self.alive.update({x.untyped_storage(): None for x in made if x.untyped_storage().data_ptr() not in old})
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in self.alive))
        return result


@pytest.fixture
def allocates_like_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what kernels compute be made up, in as much memory as they take: their references on the CPU take more."""

    def norm(x: Any, weight: Any, eps: float, offset: float, dtype: Any = None, out: Any = None, **_: Any) -> Any:
        y = torch.empty_like(x, dtype=dtype or x.dtype) if out is None else out
        return y.fill_(0.01), torch.ones(*x.shape[:-1], 1)

    def norm_grad(dy: Any, x: Any, weight: Any, rstd: Any, offset: float, *more: Any, **_: Any) -> Any:
        out = more[2] if len(more) > 2 and more[2] is not None else torch.empty_like(x)
        return out.fill_(0.01), None

    def attend(q: Any, k: Any, v: Any, *_: Any) -> Any:
        return q.new_ones(q.shape), (torch.ones(q.shape[1], q.shape[0]),)

    def attend_grad(d: Any, q: Any, k: Any, *_: Any) -> Any:
        return q.new_ones(len(q), q.shape[1] + 2 * k.shape[1], q.shape[2]), None

    def multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, dtype: Any, exact: bool) -> Any:
        return torch.full((len(a), len(b)), 0.01, dtype=dtype)

    for module, name, made in (
        (rms_norm, "forward", norm),
        (rms_norm, "backward", norm_grad),
        (rope, "forward", lambda qkv, cos, sin, heads: heads.split(qkv)),
        (rope, "backward_", lambda grad, *_: (grad.flatten(1), None, None)),
        (glu, "forward_with_low_rank_", lambda gate_up, *_: gate_up.new_ones(len(gate_up), gate_up.shape[1] // 2)),
        (glu, "backward_", lambda da, gate_up, *_: gate_up),
        (residual, "add_", lambda y, *_: y.fill_(0.1)),
        (explicit, "forward", attend),
        (explicit, "backward", attend_grad),
        (fp8, "quantise_rows", lambda x, *_: RowCodes.like(x)),
        (fp8, "scaled_product", multiply),
        (int8, "quantise_rotated", lambda x, *_: RowCodes.like(x)),
        (int8, "int8_product", lambda a, a_scales, b, b_scales, dtype: multiply(a, a_scales, b, b_scales, dtype, True)),
        (int8, "write_rotated", lambda weight, factors, scales, out, *_: out.zero_()),
        (fp8_blocks, "write_out", lambda codes, scales, out, *_: out.zero_()),
        (fp8, "write_codes", lambda weight, inverse, out, across: out.view(torch.uint8).zero_()),
    ):
        monkeypatch.setattr(module, name, made)


def peaks(
    family: str,
    policy: Policy,
    rows: int,
    compute: str,
    codes: Any = "auto",
    tokens: int = 4096,
    sizes: tuple[int, int] = (128, 640),
    nf4: bool = False,
    packed: bool = False,
) -> tuple[int, int]:
    """Return the peak of a step's activations and what the formula says; 8 bits are over 16, NF4, or stored FP8."""
    hidden, width = sizes
    made = {"hidden_size": hidden, "intermediate_size": width, "vocab_size": 64, "max_position_embeddings": tokens}
    model = tiny_model(family, **made)
    model = model if compute == "dtype" else model.bfloat16()
    for linear in (each for each in model.model.layers.modules() if packed and isinstance(each, nn.Linear)):
        linear.weight = nn.Parameter(fp8.as_codes(linear.weight, linear.weight.device), requires_grad=False)
    model = add_lora(in_4_bits(model) if nf4 else model, r=8)
    attach(model, Plan((policy,), mlp_rows=rows), layers="fused", compute=compute, codes=codes)
    ids = [i % 64 for i in range(tokens)]
    # where all are supervised the last layer needs no second dy, which is the peak where layers keep nothing
    unsupervised = 512 if policy is Policy.RECOMPUTE_LAYER and rows < tokens else 0
    labels = [-100] * unsupervised + ids[unsupervised:]
    batch = Collator(tokens, pad_token_id=0)([{"input_ids": ids, "labels": labels, "lengths": [tokens]}])
    model(**batch).loss.backward()  # weights are merged
    model.zero_grad()
    with Peak() as seen:
        model(**batch).loss.backward()
    work = replace(setup_of(model, tokens, accumulates=False), fused=True, graph=False, mlp_rows=rows)
    layers = dims_of(model)
    kinds = MemoryModel.of(layers, work).peak((policy,) * len(layers.layers))
    # the batch itself was there
    return seen.bytes, kinds["activations"] + kinds["working"] + kinds["batch"] - 40 * tokens


@pytest.mark.matrix(4)
@pytest.mark.usefixtures("allocates_like_kernels")
@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_LAYER])
def test_a_step_peaks_where_the_formula_says(policy: Policy, rows: int) -> None:
    """In attention with tiles of 64 rows, in the MLP with one of all."""
    seen, expected = peaks("llama", policy, rows, "dtype")
    assert seen == pytest.approx(expected, rel=0.02)


@pytest.mark.matrix(6)
@pytest.mark.usefixtures("allocates_like_kernels")
@pytest.mark.parametrize("rows", [0, 4096])
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_NORMS])
@pytest.mark.parametrize(
    ("family", "compute", "codes"),
    [
        ("llama", "fp8", "kept"),
        ("llama", "fp8", "written"),
        ("llama", "fp8_both", "auto"),
        ("gemma3_text", "fp8_both", "auto"),
    ],
)
def test_a_step_in_8_bits_peaks_where_codes_of_gate_and_up_are_made(
    family: str, compute: str, codes: str, policy: Policy, rows: int
) -> None:
    """Beside the activation, with tiles or without, with and without a norm after."""
    seen, expected = peaks(family, policy, rows, compute, codes)
    assert seen == pytest.approx(expected, rel=0.01)


@pytest.mark.matrix(4)
@pytest.mark.usefixtures("allocates_like_kernels")
@pytest.mark.parametrize("rows", [0, 4096])
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP])
@pytest.mark.parametrize("nf4", [False, True])
def test_a_step_in_integers_peaks_where_a_product_makes_codes(nf4: bool, policy: Policy, rows: int) -> None:
    """Of a gradient, when the activation is gone."""
    seen, expected = peaks("gemma3_text", policy, rows, "int8", nf4=nf4)
    assert seen == pytest.approx(expected, rel=0.02)


@pytest.mark.usefixtures("allocates_like_kernels")
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP])
def test_a_weight_that_is_written_out_is_gone_before_a_norm_is_made_again(policy: Policy) -> None:
    """As many tokens as columns, as of 70B: a norm's result is a tenth of what the MLP's backward needs then."""
    pytest.importorskip("bitsandbytes")
    seen, expected = peaks("llama", policy, 0, "fp8_both", tokens=512, sizes=(512, 1792), nf4=True)
    adapters = 512 * 1792 / 4  # their gradients, and cast copies
    assert expected < seen < expected + adapters


@pytest.mark.usefixtures("allocates_like_kernels")
@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP])
def test_integers_of_stored_fp8_are_made_beside_its_16_bits(policy: Policy) -> None:
    seen, expected = peaks("llama", policy, 0, "int8", tokens=512, sizes=(512, 1792), packed=True)
    assert seen == pytest.approx(expected, rel=0.02)


def longest(model: ModelDims, rows: int, budget: int) -> int:
    """Return the most tokens, in thousands, whose inputs all are offloaded."""
    for thousands in range(1, 2000):
        step = MemoryModel.of(model, TrainSetup(1000 * thousands, accumulates=False, mlp_rows=rows))
        if step.process(step.peak(LEAST * len(model.layers))) > budget:
            return thousands - 1
    raise AssertionError("no end")


def test_a_row_of_half_a_million_tokens_of_8b_is_planned_within_80_gib() -> None:
    """What issue 29 asks for: 500,000 with tiles, 340,000 without."""
    model = dims()
    assert longest(model, 0, 80 * GIB) >= 340 and longest(model, TILE_ROWS, 80 * GIB) >= 500


def test_tiles_are_chosen_only_where_nothing_else_fits() -> None:
    model, device = dims(), device_spec("h100")
    setup = TrainSetup(400_000, accumulates=False)
    whole = plan(model, setup, device, 80 * GIB)
    assert whole.mlp_rows == 0 and Policy.OFFLOAD in whole.policies
    tiled = plan(model, replace(setup, tokens=500_000), device, 80 * GIB)
    assert tiled.mlp_rows == TILE_ROWS and not tiled.graph and tiled.predicted["process"] <= 80 * GIB
    for asked in (Plan.offload(), Plan.recompute()):  # which say nothing of tiles
        with pytest.raises(PlanDoesNotFit, match=r"memory\.feed_forward: tiled needs \d+\.\d GiB"):
            plan(model, replace(setup, tokens=500_000), device, 80 * GIB, asked=asked)
    with pytest.raises(PlanDoesNotFit, match="the smallest plan needs 1"):
        plan(model, replace(setup, tokens=1_500_000), device, 80 * GIB)


def test_tiles_that_are_asked_for_are_planned_under_every_switch() -> None:
    model, device = dims("Llama-3.2-1B"), device_spec("h100")
    setup = TrainSetup(8192)
    switches: tuple[Any, ...] = (False, True, "offload", "auto")
    for switch in switches:
        made = plan(model, setup, device, asked=Plan.asked(switch, feed_forward="tiled"))
        assert made.mlp_rows == TILE_ROWS
        assert set(made.policies) == set(Plan.asked(switch).policies if switch != "auto" else (Policy.KEEP,))
    kept, whole = (
        plan(model, setup, device, asked=Plan.asked(False, feed_forward=way)).predicted for way in ("tiled", "auto")
    )
    assert kept["activations"] < 0.6 * whole["activations"] and kept["step_ms"] > whole["step_ms"]


def test_layers_without_tiles_are_planned_as_a_whole_and_refused_by_name() -> None:
    experts, device = dims("gpt-oss-20b"), device_spec("h100")
    for model, setup in ((experts, TrainSetup(8192)), (dims("Llama-3.2-1B"), TrainSetup(8192, fused=False))):
        with pytest.raises(UnsupportedError, match="tiles of rows need packed rows, fused layers"):
            plan(model, setup, device, asked=Plan(mlp_rows=TILE_ROWS))
        with pytest.raises(PlanDoesNotFit):
            plan(model, setup, device, 2**30)


def test_a_recomputed_layer_computes_gate_and_up_once_more_either_way() -> None:
    times = step_times(dims(), TrainSetup(32_768), device_spec("h100"))
    tiled = tiled_times(times)
    layers = (Policy.RECOMPUTE_LAYER,) * 32
    assert tiled.step(layers) == pytest.approx(times.step(layers))
    assert tiled.step((Policy.KEEP,) * 32) > times.step((Policy.KEEP,) * 32)


@pytest.mark.parametrize("way", ["auto", "tiled"])
def test_a_recipe_asks_for_tiles(way: str, tmp_path: Path) -> None:
    write_checkpoint(SHAPES["tiny"], tmp_path / "model", seed=0)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: {tmp_path}/model, max_seq_length: 64}}\ndata: {{train: {tmp_path}/data.jsonl}}\n"
        f"memory: {{feed_forward: {way}}}\ntrain: {{output: {tmp_path}/out}}\n"
    )
    shown = CliRunner().invoke(app, ["plan", str(recipe), "--device", "h100", "--json"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["plan"]["mlp_rows"] == (TILE_ROWS if way == "tiled" else 0)
    text = CliRunner().invoke(app, ["plan", str(recipe), "--device", "h100"], catch_exceptions=False).output
    assert ("MLPs in tiles of 16,384 rows" in text) == ("feed_forward: tiled" in text) == (way == "tiled")
