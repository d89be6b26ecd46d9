"""MLPs in tiles of rows: loss and gradients of whole ones, nothing of all rows as wide as the MLP, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from support.documents import DRAWS, LENGTHS, ROW
from support.fused import BIASED, WIDE, compare, loss_and_gradients, with_adapters
from support.tiny import packed_row, tiny_model
from support.traces import trace

PLANS = {
    "keep": Plan.keep(),
    "MLP": Plan((Policy.RECOMPUTE_MLP,)),
    "layer": Plan.recompute(),
    "offload": Plan.offload(),
}
FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "olmo2", "granite")
"""With and without norms before, after and of heads; gate and up in one linear; a multiplier."""


@pytest.mark.matrix(9)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_give_what_whole_mlps_give(family: str, plan: str, nan_memory: None) -> None:
    compare(with_adapters(tiny_model(family)), packed_row(LENGTHS, ROW), plan=replace(PLANS[plan], mlp_rows=37))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("rows", [1, 5, ROW - 1, ROW, ROW + 1, 16_384])
def test_any_number_of_rows_serves(rows: int) -> None:
    """Tiles of one row, a last tile of one row, one tile, one longer than the row."""
    plan = Plan((Policy.RECOMPUTE_LAYER,), mlp_rows=rows)
    compare(with_adapters(tiny_model("llama", **BIASED)), packed_row(LENGTHS, ROW), plan=plan)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_weights_that_are_trained_get_the_sum_over_tiles(family: str, nan_memory: None) -> None:
    compare(tiny_model(family, tie_word_embeddings=True), packed_row(LENGTHS, ROW), plan=Plan(mlp_rows=37))


def test_gradients_are_summed_in_float32_where_adapters_are_in_16_bits() -> None:
    """Ninety-six tiles that each were rounded to bfloat16 would be off by far more than the rounding of their sum."""
    model = with_adapters(tiny_model("llama", **WIDE)).to(torch.bfloat16)
    batch, found = packed_row(LENGTHS, ROW), {}
    for rows in (0, 1):
        attach(model, Plan((Policy.RECOMPUTE_LAYER,), mlp_rows=rows), layers="fused")
        found[rows] = loss_and_gradients(model, batch)[1]
    names = [name for name in found[0] if ".mlp." in name and "lora_A" in name]
    assert names and {found[1][name].dtype for name in names} == {torch.bfloat16}
    for name in names:
        whole, tiled = found[0][name].double(), found[1][name].double()
        assert (tiled - whole).norm() <= 2**-7 * whole.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_give_what_whole_mlps_give_on_a_gpu(family: str, dtype: torch.dtype, nan_memory: None) -> None:
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(DRAWS)]
    plan = replace(Plan.offload(), mlp_rows=37)
    compare(with_adapters(tiny_model(family, **WIDE)), *batches, device="cuda", dtype=dtype, plan=plan)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made under it."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_of_all_rows_is_as_wide_as_the_mlp(plan: str) -> None:
    model = with_adapters(tiny_model("llama", intermediate_size=512, vocab_size=64, max_position_embeddings=512))
    batch, found = packed_row([100, 156], 256), {}
    batch = {name: value % 64 if name == "input_ids" else value for name, value in batch.items()}
    batch["labels"] = torch.where(batch["labels"] >= 0, batch["labels"] % 64, batch["labels"])
    for rows in (0, 16):
        attach(model, replace(PLANS[plan], mlp_rows=rows), layers="fused", attention="per_document")
        model(**batch).loss.backward()  # weights are merged
        with Largest() as seen:
            model(**batch).loss.backward()
        found[rows] = seen.elements
    assert found[0] >= 256 * 1024 and found[16] < 256 * 512


def test_the_report_tells_the_tiles_and_a_plan_without_them_takes_them_off() -> None:
    model = with_adapters(tiny_model("llama"))
    handle = attach(model, replace(Plan.offload(), mlp_rows=48), layers="fused")
    [line] = [path.path for path in handle.report if path.part == "activations"]
    assert line.endswith("; MLPs in tiles of 48 rows")
    handle.replan(Plan.offload())
    assert "tiles" not in str(handle.report)
    layer = model.get_base_model().model.layers[0]
    assert not hasattr(layer, "_pronghorn_mlp_rows")


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", "stock"), ("qwen3_moe", "fused"), ("qwen3_5_text", "fused"), ("gemma4_text", "fused")],
)
def test_layers_without_tiles_are_refused_and_left_alone(family: str, layers: Any) -> None:
    """Those of transformers, experts, gated delta nets, shared keys with an input a layer."""
    model = tiny_model(family)
    before = trace(model)
    with pytest.raises(UnsupportedError, match="tiles of rows needs fused layers of attention and one gated MLP"):
        attach(model, Plan(mlp_rows=16), layers=layers)
    assert trace(model) == before


def test_rows_are_not_negative() -> None:
    with pytest.raises(ConfigError, match="mlp_rows = -1: use 16,384, or 0"):
        Plan(mlp_rows=-1)
