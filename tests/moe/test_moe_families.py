"""Families with experts, and gpt-oss' sinks and windows: packed equals one document at a time, through `attach`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.candidates import CANDIDATES
from benchmarks.candidates.base import PaddedBatches, Spec, set_adapters, trainable
from benchmarks.counts import matmul_parameters
from benchmarks.gate import judge, measure
from benchmarks.reference import compute_reference
from benchmarks.workload import Row, make_rows
from pronghorn.attention import explicit
from pronghorn.data.packing import Document
from pronghorn.diagnose.shapes import SHAPES, checkpoint_of, shape_of
from pronghorn.errors import ConfigError
from pronghorn.models.attach import attach
from pronghorn.models.families import base_causal_lm, recompute_layers
from pronghorn.parity.reference import accumulate, layerwise_upcast
from support.documents import DRAWS, LENGTHS, MOST_DRAWS, ROW, attach_options, gradients, one_document_at_a_time
from support.tiny import MOE_FAMILIES, packed_row, tiny_model
from support.tolerance import ThreeWay, assert_three_way

BACKENDS = [("per_document", "once"), ("masked", "once"), ("auto", "per_layer")]


def compare(model: Any, device: str, dtype: torch.dtype, draws: int = 1, most: int = 1, **options: Any) -> None:
    """Loss, logits and every gradient, sinks' and routers' too. The plain path goes one document at a time as well:
    gpt-oss leaks between packed documents in transformers."""
    errors = ThreeWay()

    def draw(seed: int) -> None:
        batch, passes = packed_row(LENGTHS, ROW, seed=seed), []
        for precision, where in ((torch.float64, "cpu"), (dtype, device)):
            alone = copy.deepcopy(model).to(where, precision)
            logits, loss = one_document_at_a_time(alone, {name: value.to(where) for name, value in batch.items()})
            loss.backward()
            passes.append((logits, loss, gradients(alone)))
        (exact_logits, exact_loss, exact), (plain_logits, plain_loss, plain) = passes
        ours = copy.deepcopy(model).to(device, dtype)
        attach(ours, **options)
        on_device = {name: value.to(device) for name, value in batch.items()}
        loss = ours(**on_device).loss
        loss.backward()
        with torch.no_grad():
            logits = ours(**{k: v for k, v in on_device.items() if k != "labels"}).logits[0]
        errors.add("loss", loss, plain_loss, exact_loss)
        errors.add("logits", logits, plain_logits, exact_logits)
        for name, grad in gradients(ours).items():
            errors.add(f"gradient of {name}", grad, plain[name], exact[name])

    errors.judge(draw, draws, most)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("attention,metadata", BACKENDS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_packed_equals_one_document_at_a_time(family: str, attention: str, metadata: str, nan_memory: None) -> None:
    compare(tiny_model(family), "cpu", torch.float32, **attach_options(attention, metadata))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_fused(family: str, nan_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    compare(model, "cpu", torch.float32, layers="fused")
    handle = attach(model, layers="fused")
    taken = {path.part: path for path in handle.report}["decoder layers"]
    assert taken.path == "attention and norms fused, experts apart"
    calls = []
    plain = explicit.forward
    monkeypatch.setattr(explicit, "forward", lambda *args: calls.append(args) or plain(*args))
    model(**packed_row(LENGTHS, ROW))
    assert len(calls) == sum(hasattr(layer, "self_attn") for layer in model.model.layers)


def test_sinks_change_the_answer() -> None:
    """What the comparison above would miss if sinks were too small to matter, or were not read."""
    batch = packed_row(LENGTHS, ROW)
    batch.pop("labels")
    model = tiny_model("gpt_oss")
    attach(model)
    with torch.no_grad():
        with_sinks = model(**batch).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        assert (model(**batch).logits - with_sinks).abs().max() > 1e-2


def test_transformers_leaks_between_documents() -> None:
    """Why gpt-oss is compared with documents alone, and not with transformers' own packing."""
    batch = packed_row(LENGTHS, ROW)
    stock = tiny_model("gpt_oss")
    alone, _ = one_document_at_a_time(stock, batch)
    packed = stock(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    with pytest.raises(AssertionError, match="logits"):
        assert_three_way("logits", packed, alone, alone)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_nan_neighbours(family: str) -> None:
    """A document among NaN computes what it does among numbers."""
    model = tiny_model(family).eval()
    attach(model, attention="per_document")
    batch = packed_row(LENGTHS, ROW)
    inputs = {name: batch[name] for name in ("position_ids", "packed")}
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    poisoned = embeddings.clone()
    start, end = 1, 41  # the second document
    poisoned[:, :start], poisoned[:, end:] = float("nan"), float("nan")
    with torch.no_grad():
        clean = model(inputs_embeds=embeddings, **inputs).logits[0, start:end]
        among_nans = model(inputs_embeds=poisoned, **inputs).logits[0, start:end]
    torch.testing.assert_close(among_nans, clean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_unpacked_batches_of_gpt_oss(padded: bool) -> None:
    """Padded on either side or not at all, longer than the window: as transformers' eager attention, gradients too."""
    ids = torch.randint(3, 131, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 12:], mask[2, :9] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    stock, ours = tiny_model("gpt_oss"), tiny_model("gpt_oss")
    attach(ours)
    found = []
    for model in (stock, ours):
        out = model(**batch)
        out.loss.backward()
        found.append([out.logits[mask.bool()], *gradients(model).values()])
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_generate(family: str) -> None:
    """Greedy, from padded prompts, past every window."""
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model = tiny_model(family).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    stock = model.generate(input_ids=ids, attention_mask=mask, **options)
    handle = attach(model)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **options), stock)
    handle.detach()
    assert model.config._attn_implementation == ("eager" if family == "gpt_oss" else "sdpa")


def test_sinks_leave_the_rest_of_a_static_cache_out() -> None:
    """Without padding transformers makes no mask of a prompt, and its cache has room for more keys."""
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(1))
    model = tiny_model("gpt_oss").eval()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"cache_implementation": "static", "return_dict_in_generate": True, "output_logits": True}
    stock = model.generate(input_ids=ids, **options)
    attach(model)
    found = model.generate(input_ids=ids, **options)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(stock.logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_recompute_changes_nothing(layers: Any) -> None:
    batch = packed_row(LENGTHS, ROW)
    found = []
    for recompute in (False, True):
        model = tiny_model("gpt_oss")
        attach(model, layers=layers)
        recompute_layers(model, recompute)
        model(**batch).loss.backward()
        found.append(gradients(model))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def bench_spec(shape: str, row: Row, folder: Path, **changes: Any) -> Spec:
    checkpoint = checkpoint_of(shape, folder, seed=0)
    return Spec("hf", str(checkpoint), "lora", "off", 192, max(row.lengths), len(row.lengths), seed=0, **changes)


@pytest.mark.parametrize(
    ("shape", "experts"), [("tiny-moe@2", "frozen"), ("tiny-moe@1", "lora"), ("tiny-gpt-oss@2", "frozen")]
)
def test_bench_gate(shape: str, experts: Any, tmp_path: Path) -> None:
    """Sound candidates pass: packed, and padded where transformers can't pack."""
    row = make_rows(192, "lognormal", 1.0, 512, seed=0)[0]
    spec = bench_spec(shape, row, tmp_path, experts=experts)
    reference = compute_reference(spec, row, tmp_path)
    for candidate in ("pronghorn", "hf"):
        built = CANDIDATES[candidate].build(spec)
        set_adapters(built.model, spec.seed)
        optimizer = torch.optim.AdamW(trainable(built.model).values(), lr=1e-5)
        found = judge(measure(built, spec, row, reference, optimizer, lambda: None), reference)
        assert found["green"], (candidate, found["reasons"])
        assert found["trained_tensors"] == len(reference.names)
        assert isinstance(built.model, PaddedBatches) == (candidate == "hf" and "oss" in shape)
    assert any("experts" in name for name in reference.names) == (experts == "lora")


def test_reference_widens_experts_with_adapters() -> None:
    """PEFT parametrises experts' weights in every forward; they are widened and stay the model's parameters."""
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = tiny_model("gpt_oss").to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
    set_adapters(model, 0)
    names = sorted(name for name, _ in model.named_parameters())
    ids = list(range(3, 30))
    with layerwise_upcast(base_causal_lm(model)) as upcast:
        upcast(torch.float32)
        passed = accumulate(model, [Document(ids, [-100, *ids[1:]])], 26)
    assert passed[0].losses.dtype is torch.float32
    assert sorted(name for name, _ in model.named_parameters()) == names
    assert all(p.grad is not None for p in trainable(model).values())


def test_padded_batches_hold_every_document_once() -> None:
    row = Row(tuple(range(100, 160)), tuple(range(100, 160)), (5, 20, 1, 3, 4, 2, 6, 7, 12)).supervised_where(
        lambda document: document != 8
    )
    (share, batch), *rest = PaddedBatches.make_batch(row)["batches"]
    assert share == 1.0 and not rest  # the ninth document has no label
    assert batch["input_ids"].shape == (8, 20)
    kept = batch["input_ids"][batch["attention_mask"].bool()].tolist()
    assert kept == list(row.input_ids[:48]) and (batch["labels"] != -100).sum() == 48


def test_shapes_of_fewer_layers() -> None:
    assert shape_of("gpt-oss-20b@4") == SHAPES["gpt-oss-20b"] | {"num_hidden_layers": 4}
    assert shape_of("no-such-shape@4") is None
    for layers in ("0", "49", "x", ""):
        with pytest.raises(ConfigError, match="use 1 to 48"):
            shape_of(f"Qwen3-30B-A3B@{layers}")


@pytest.mark.parametrize(
    ("shape", "experts", "active"),
    [("gpt-oss-20b", 19116933120, 4), ("Qwen3-30B-A3B", 28991029248, 8), ("OLMoE-1B-7B", 6442450944, 8)],
)
def test_active_weights_are_counted(shape: str, experts: int, active: int) -> None:
    """Against the published numbers of weights in experts (gpt-oss' with their biases)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for name, p in meta.named_parameters() if ".experts." in name) == experts
    layers, width, inner = config.num_hidden_layers, config.hidden_size, getattr(config, "moe_intermediate_size", 0)
    dense = sum(module.weight.numel() for module in meta.modules() if isinstance(module, torch.nn.Linear))
    routers = sum(p.numel() for name, p in meta.named_parameters() if name.endswith(("gate.weight", "router.weight")))
    visited = layers * active * 3 * width * (inner or config.intermediate_size)
    assert matmul_parameters(shape) == dense + routers + visited


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("attention", ["auto", "flash", "masked"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_on_the_gpu(family: str, attention: str, dtype: torch.dtype, nan_memory: None) -> None:
    if dtype is torch.float32 and attention == "flash":
        pytest.skip("flash has no float32")
    model = tiny_model(family, num_experts_per_tok=8)  # 16 bits choose other experts now and then
    model.load_state_dict({k: v.to(dtype).float() for k, v in model.state_dict().items()})  # no rounding of weights
    compare(model, "cuda", dtype, DRAWS, MOST_DRAWS, **attach_options(attention))
