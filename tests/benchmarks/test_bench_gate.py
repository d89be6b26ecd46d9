"""The gate lets a sound candidate through and catches planted defects, each by the check that is there for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.candidates import CANDIDATES
from benchmarks.candidates.base import Built, Spec, set_adapters, trainable
from benchmarks.gate import judge, measure
from benchmarks.reference import Reference, compute_reference
from benchmarks.workload import Row, make_rows
from pronghorn.data.batch import PackedBatch
from pronghorn.diagnose.shapes import SHAPES, checkpoint_of

TOKENS = 256
Plant = Callable[[Built], None]


@pytest.fixture(scope="module")
def row() -> Row:
    row = make_rows(TOKENS, "lognormal", 0.7, SHAPES["tiny"]["vocab_size"], seed=3)[0]
    assert len(row.lengths) > 2
    return row


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, row: Row) -> Spec:
    checkpoint = checkpoint_of("tiny", tmp_path_factory.mktemp("checkpoints"), seed=0)
    return Spec("hf", str(checkpoint), "lora", "off", TOKENS, max(row.lengths), len(row.lengths), seed=0)


@pytest.fixture(scope="module")
def reference(spec: Spec, row: Row, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return compute_reference(spec, row, tmp_path_factory.mktemp("reference"))


def verdict(
    spec: Spec, row: Row, reference: Reference, plant: Plant | None = None, rate: float = 1e-5
) -> dict[str, Any]:
    """The gate's verdict over a candidate with a defect planted into it."""
    built = CANDIDATES[spec.candidate].build(spec)
    set_adapters(built.model, spec.seed)
    if plant is not None:
        plant(built)
    optimizer = torch.optim.AdamW(trainable(built.model).values(), lr=rate)
    return judge(measure(built, spec, row, reference, optimizer, lambda: None), reference)


def change_batches(built: Built, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    sound = built.make_batch
    built.make_batch = lambda row: change(sound(row))


@pytest.mark.parametrize("candidate", ["pronghorn", "hf"])
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_sound_candidates_pass(spec: Spec, row: Row, reference: Reference, candidate: str, recompute: Any) -> None:
    found = verdict(replace(spec, candidate=candidate, recompute=recompute), row, reference)
    assert found["green"], found["reasons"]
    assert found["trained_tensors"] == len(reference.names) == 2 * 7 * 2  # layers, linears, A and B
    assert found["isolation"] is not None


@pytest.mark.parametrize("ablation", [{"packing_metadata": "per_layer"}, {"packing_metadata": "per_layer_mask"}])
def test_ablations_pass(spec: Spec, row: Row, reference: Reference, ablation: dict[str, str]) -> None:
    found = verdict(replace(spec, candidate="pronghorn", switches=ablation), row, reference)
    assert found["green"], found["reasons"]


def test_full_fine_tuning_passes(spec: Spec, row: Row, tmp_path: Path) -> None:
    spec = replace(spec, method="full")
    reference = compute_reference(spec, row, tmp_path)
    found = verdict(replace(spec, candidate="pronghorn"), row, reference)
    assert found["green"], found["reasons"]
    assert "model.embed_tokens.weight" in reference.names and "model.norm.weight" in reference.names


def test_qlora_passes(spec: Spec, row: Row, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    spec = replace(spec, method="qlora")
    found = verdict(replace(spec, candidate="pronghorn"), row, compute_reference(spec, row, tmp_path))
    assert found["green"], found["reasons"]


def test_layers_widened_one_by_one_are_float32(
    spec: Spec, row: Row, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights kept in bf16 have the reference of the same weights in float32, and the plain path has bf16's error."""
    monkeypatch.setattr("benchmarks.candidates.stock.weights_dtype", lambda method: torch.bfloat16)
    widened = compute_reference(spec, row, tmp_path)
    assert widened.loss == pytest.approx(reference.loss, rel=1e-6)
    assert widened.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    assert reference.plain_error < 1e-6 and 1e-3 < widened.plain_error < 0.1
    found = verdict(replace(spec, candidate="pronghorn"), row, widened)  # loads float32
    assert found["gradient_error"] < 1e-5


def leaking_mask(built: Built) -> None:
    """Every document sees all before it; positions, labels and lengths stay right."""

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"packed": PackedBatch.build([TOKENS], tokens=TOKENS, labels=batch["labels"][0])}

    change_batches(built, change)


def test_a_leaking_mask(spec: Spec, row: Row, reference: Reference) -> None:
    found = verdict(replace(spec, candidate="pronghorn"), row, reference, leaking_mask)
    assert not found["green"]
    for reason in ("documents are not isolated", "gradient is off by", "loss of document"):
        assert any(reason in line for line in found["reasons"]), (reason, found["reasons"])
    assert not any("moved" in line or "no gradient" in line for line in found["reasons"])


def test_a_cache_that_leaks(spec: Spec, row: Row, reference: Reference) -> None:
    """transformers leaks by itself when a packed batch comes with use_cache."""
    found = verdict(spec, row, reference, lambda built: change_batches(built, lambda b: b | {"use_cache": True}))
    assert any("documents are not isolated" in line for line in found["reasons"])


def test_positions_shifted_inside_documents(spec: Spec, row: Row, reference: Reference) -> None:
    """RoPE is relative, so a whole document may shift; here only its first token stays where it was."""

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        position_ids = batch["position_ids"]
        return batch | {"position_ids": position_ids + (position_ids > 0)}

    found = verdict(replace(spec, candidate="pronghorn"), row, reference, lambda built: change_batches(built, change))
    assert any("gradient is off, the first" in line for line in found["reasons"])
    assert not any("isolated" in line for line in found["reasons"])


def test_queries_turned_one_position_further_than_keys(
    spec: Spec, row: Row, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    right = modeling_llama.apply_rotary_pos_emb

    def shifted(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        further = cos.roll(-1, dims=-2), sin.roll(-1, dims=-2)
        return right(q, k, *further, *args, **kwargs)[0], right(q, k, cos, sin, *args, **kwargs)[1]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", shifted)
    found = verdict(spec, row, reference)
    assert any("k_proj" in line and "gradient is off, the first by 0.3" in line for line in found["reasons"])
    assert found["loss"] == pytest.approx(reference.loss, rel=1e-5)  # which alone would have let it through


@pytest.mark.parametrize("gradient", [torch.zeros_like, lambda g: g * torch.inf])
def test_a_dead_adapter(spec: Spec, row: Row, reference: Reference, gradient: Callable[[Any], Any]) -> None:
    name = "model.layers.1.mlp.up_proj.lora_A.weight"

    def plant(built: Built) -> None:
        trainable(built.model)[name].register_hook(gradient)

    reasons = verdict(spec, row, reference, plant)["reasons"]
    assert f"{name}: no gradient, a zero or one that is not finite" in reasons


def test_an_adapter_that_is_not_trained(spec: Spec, row: Row, reference: Reference) -> None:
    name = "model.layers.1.mlp.up_proj.lora_A.weight"
    reasons = verdict(spec, row, reference, lambda b: trainable(b.model)[name].requires_grad_(False))["reasons"]
    assert f"{name}: not trained" in reasons


def test_a_dropped_label_shift(spec: Spec, row: Row, reference: Reference) -> None:
    """The model shifts labels itself: shifted back before, each token learns to predict itself."""

    def plant(built: Built) -> None:
        change_batches(built, lambda batch: batch | {"labels": batch["labels"].roll(1, dims=-1)})

    reasons = verdict(spec, row, reference, plant)["reasons"]
    assert any(line.startswith("gradient is off by 4") for line in reasons), reasons


def test_a_scaled_loss(spec: Spec, row: Row, reference: Reference) -> None:
    """Mean over one label too many: directions are right, so loss and norm must say it."""

    def plant(built: Built) -> None:
        sound = built.model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = sound(*args, **kwargs)
            outputs.loss = outputs.loss * (row.n_labels / (row.n_labels + 1))
            return outputs

        built.model.forward = forward

    reasons = verdict(spec, row, reference, plant)["reasons"]
    assert any(line.startswith("loss is off") for line in reasons)
    assert any(line.startswith("gradient norm is off") for line in reasons)


def test_weights_that_do_not_move(spec: Spec, row: Row, reference: Reference) -> None:
    found = verdict(spec, row, reference, rate=0.0)
    assert len(found["reasons"]) == 1 and found["reasons"][0].endswith("and 24 more: not moved by a step")


@pytest.mark.parametrize(("whole", "tensor", "green"), [(0.15, 0.32, True), (0.17, 0.32, False), (0.15, 0.34, False)])
def test_bf16_may_round_as_much_as_the_plain_path(whole: float, tensor: float, green: bool) -> None:
    reference = Reference(2.0, 1.0, (2.0,), ("w",), plain_error=0.1, plain_errors={"w": 0.2}, gradients="")
    found = {"dtype": "bfloat16", "loss": 2.001, "grad_norm": 1.01, "document_losses": {}, "isolation": None}
    found |= {"gradient_error": whole, "gradient_errors": {"w": tensor}, "trained": ["w"], "dead": [], "unmoved": []}
    assert judge({**found, "cosines": {"w": 0.5}}, reference)["green"] == green


@pytest.mark.parametrize(
    ("plain", "cosine", "green"),
    [(0.002, 0.99, True), (0.002, 0.97, False), (0.002, math.nan, False), (0.1, 0.3, True)],
)
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_8_bits_keep_a_gradients_direction_where_bf16s_error_leaves_one(
    dtype: str, plain: float, cosine: float, green: bool
) -> None:
    reference = Reference(2.0, 1.0, (2.0,), ("w",), plain_error=plain, plain_errors={"w": plain}, gradients="")
    found = {"dtype": dtype, "loss": 2.001, "grad_norm": 1.01, "document_losses": {}, "isolation": None}
    found |= {"gradient_error": 0.02, "gradient_errors": {"w": 0.02}, "trained": ["w"], "dead": [], "unmoved": []}
    verdict = judge({**found, "cosines": {"w": cosine}}, reference)
    assert verdict["green"] == green and (green or "cosine to float32's is below 0.98" in verdict["reasons"][0])


@pytest.mark.parametrize(("dtype", "green"), [("fp8", False), ("fp8_both", True)])
def test_a_forward_in_16_bits_has_their_loss(dtype: str, green: bool) -> None:
    reference = Reference(2.0, 1.0, (2.0,), ("w",), plain_error=0.002, plain_errors={"w": 0.002}, gradients="")
    found = {
        "dtype": dtype,
        "loss": 2.01,
        "grad_norm": 1.0,
        "document_losses": {},
        "isolation": None,
        "cosines": {"w": 0.99},
    }
    found |= {"gradient_error": 0.02, "gradient_errors": {"w": 0.02}, "trained": ["w"], "dead": [], "unmoved": []}
    assert judge(found, reference)["green"] is green


def test_nan_fails_every_comparison(spec: Spec, row: Row, reference: Reference) -> None:
    def plant(built: Built) -> None:
        with torch.no_grad():
            built.model.get_input_embeddings().weight.fill_(torch.nan)

    reasons = verdict(spec, row, reference, plant)["reasons"]
    for start in ("loss is off by nan", "gradient norm is off by nan", "gradient is off by nan", "loss of document 0"):
        assert any(line.startswith(start) for line in reasons), (start, reasons)
    assert any("not isolated" in line for line in reasons)
