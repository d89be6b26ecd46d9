"""attach changes one instance, outside its parameters, and detach undoes it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.llama import modeling_llama

from pronghorn import FastLanguageModel
from pronghorn.attention.packed import implementation
from pronghorn.data.batch import PackedBatch
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models import loss as loss_module
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import recompute_layers, recomputes_layers, rope_limit
from pronghorn.models.metadata import CACHES, stock_batch
from support.composites import write_composite
from support.documents import attach_options, compare, one_document_at_a_time
from support.fused import BIASED, WIDE, count_attachments, with_adapters
from support.generic import generic_model
from support.tiny import FAMILIES, VOCAB, packed_row, tiny_model
from support.traces import trace

LENGTHS = [1, 11, 1, 20, 9]
MASKED = {"masked_attention": True}
ROW = 48


def lora(model: Any, seed: int = 0) -> Any:
    """The model with adapters whose B is perturbed, so that they matter."""
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def reference_logits(model: Any, batch: dict[str, Any]) -> Tensor:
    """Logits of each document run on its own: [T, V]."""
    with torch.no_grad():
        return torch.cat([model(batch["input_ids"][:, a:b]).logits[0] for a, b in batch["packed"].segments])


def test_attach_is_idempotent() -> None:
    model = tiny_model("llama")
    handle = attach(model)
    before = trace(model)
    assert attach(model) is handle
    assert attach(model, attention="auto", experimental={"packing_metadata": "once"}) is handle
    assert trace(model) == before
    assert attached(model) is handle


def test_other_options_replace_the_handle_and_detach_still_restores() -> None:
    model = tiny_model("llama")
    before = trace(model)
    first = attach(model)
    second = attach(model, experimental=MASKED)
    assert second is not first and attached(model) is second
    first.detach()  # no longer in charge: does nothing
    assert attached(model) is second
    second.detach()
    assert trace(model) == before


@pytest.mark.matrix(23)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [None, Plan.keep(), Plan.recompute()])
@pytest.mark.parametrize("recomputing", [False, True])
def test_detach_restores(family: str, plan: Plan | None, recomputing: bool) -> None:
    model = tiny_model(family)
    recompute_layers(model, True)
    recompute_layers(model, recomputing)
    before = trace(model)
    handle = attach(model, plan)
    if plan is not None:
        assert recomputes_layers(model) == (plan == Plan.recompute())
    model(**packed_row(LENGTHS, ROW)).loss.backward()
    handle.detach()
    assert trace(model) == before
    assert attached(model) is None
    handle.detach()  # a second time does nothing
    assert trace(model) == before


def test_detach_restores_inside_a_peft_model() -> None:
    model = lora(tiny_model("qwen3"))
    before = trace(model)
    handle = attach(model)
    assert attached(model) is handle and handle.model is model.get_base_model()
    handle.detach()
    assert trace(model) == before


@pytest.mark.parametrize("before_implementation", ["eager", "sdpa"])
def test_detach_restores_the_attention_implementation(before_implementation: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(before_implementation)
    handle = attach(model)
    assert model.config._attn_implementation.startswith("pronghorn_")
    handle.detach()
    assert model.config._attn_implementation == before_implementation
    assert model.model.config._attn_implementation == before_implementation


def test_the_implementation_names_do_not_hold_flash() -> None:
    for backend in ("auto", "tiled", "flash", "per_document", "masked"):
        assert "flash" not in implementation(backend, "once")  # transformers tests names for that substring


def test_transformers_sees_the_same_class_name_and_signature() -> None:
    plain, changed = tiny_model("llama"), tiny_model("llama")
    attach(changed)
    assert inspect.signature(type(changed).forward) == inspect.signature(type(plain).forward)
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(changed), attribute) == getattr(type(plain), attribute)
    assert isinstance(changed, type(plain))
    assert changed.accepts_loss_kwargs is plain.accepts_loss_kwargs if hasattr(plain, "accepts_loss_kwargs") else True
    assert changed.can_generate() and repr(changed) == repr(plain)
    assert list(changed.state_dict()) == list(plain.state_dict())


def unpacked_step(model: Any) -> None:
    """One optimiser step on a plain padded batch, which runs the same kernels attached or not."""
    ids = torch.arange(20).reshape(2, 10) * 5 % VOCAB
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("step", [False, True])
def test_saved_files_are_byte_for_byte_those_of_an_unattached_model(tmp_path: Path, adapted: bool, step: bool) -> None:
    wrap: Callable[[Any], Any] = lora if adapted else lambda model: model
    plain, changed = wrap(tiny_model("llama")), wrap(tiny_model("llama"))
    attach(changed)
    for model, name in ((plain, "plain"), (changed, "attached")):
        if step:
            unpacked_step(model)
        model.save_pretrained(tmp_path / name)
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert files(tmp_path / "plain") == files(tmp_path / "attached")
    assert any(name.endswith(".safetensors") for name in files(tmp_path / "plain"))


@pytest.mark.parametrize("adapted", [False, True])
def test_saved_after_a_packed_step_holds_the_trained_weights_and_nothing_else(tmp_path: Path, adapted: bool) -> None:
    wrap: Callable[[Any], Any] = lora if adapted else lambda model: model
    changed = wrap(tiny_model("gemma3_text"))
    attach(changed, Plan.recompute())
    start = {name: value.clone() for name, value in changed.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in changed.parameters() if p.requires_grad], lr=1e-2)
    changed(**packed_row(LENGTHS, ROW)).loss.backward()
    optimizer.step()
    assert any(not torch.equal(value, start[name]) for name, value in changed.state_dict().items())
    plain = wrap(tiny_model("gemma3_text"))
    plain.load_state_dict(changed.state_dict())
    changed.save_pretrained(tmp_path / "attached")
    plain.save_pretrained(tmp_path / "plain")
    assert files(tmp_path / "plain") == files(tmp_path / "attached")


class Count:
    """Counts what is built: batches, and dense masks (each distinct object)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.builds = 0
        self.masks: list[Tensor] = []
        build, dense_mask = PackedBatch.build.__func__, PackedBatch.dense_mask

        def counted_build(cls: type[PackedBatch], *args: Any, **kwargs: Any) -> PackedBatch:
            self.builds += 1
            return build(cls, *args, **kwargs)

        def counted_mask(packed: PackedBatch, *args: Any, **kwargs: Any) -> Tensor:
            mask = dense_mask(packed, *args, **kwargs)
            self.masks.append(mask)
            return mask

        monkeypatch.setattr(PackedBatch, "build", classmethod(counted_build))
        monkeypatch.setattr(PackedBatch, "dense_mask", counted_mask)

    @property
    def distinct_masks(self) -> int:
        return len({id(mask) for mask in self.masks})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["auto", "masked"])
@pytest.mark.parametrize("metadata", ["packed", "position_ids", "cu_seq_lens"])
def test_metadata_is_built_once_per_batch(
    monkeypatch: pytest.MonkeyPatch, metadata: str, attention: Any, recompute: bool
) -> None:
    model = tiny_model("llama")
    attach(model, Plan.recompute() if recompute else Plan.keep(), **attach_options(attention))
    count = Count(monkeypatch)
    batch = packed_row(LENGTHS, ROW)
    if metadata != "packed":
        count.builds = 0
        packed = batch.pop("packed")
        if metadata == "cu_seq_lens":
            bounds = torch.tensor([0, *[end for _, end in packed.segments]], dtype=torch.int32)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 20, "max_length_k": 20}
    model(**batch).loss.backward()
    assert count.builds == 1
    layers = 3 * (2 if recompute else 1)
    assert (len(count.masks), count.distinct_masks) == ((layers, 1) if attention == "masked" else (0, 0))


def test_one_mask_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3_text", layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    attach(model, experimental=MASKED)
    count = Count(monkeypatch)
    model(**packed_row(LENGTHS, ROW)).loss.backward()
    assert (len(count.masks), count.distinct_masks) == (3, 2)


def test_the_ablations_rebuild_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    count = Count(monkeypatch)
    attach(model, experimental={"packing_metadata": "per_layer"})
    model(**batch)
    assert count.builds == 3
    attach(model, experimental={"packing_metadata": "per_layer_mask"})
    model(**batch)
    assert (count.builds, count.distinct_masks) == (3, 3)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_ablations_give_the_same_loss_and_gradients(family: str) -> None:
    losses, gradients = [], []
    for attention, metadata in (
        ("auto", "once"),
        ("per_document", "once"),
        ("masked", "once"),
        ("auto", "per_layer"),
        ("auto", "per_layer_mask"),
    ):
        model = tiny_model(family)
        attach(model, **attach_options(attention, metadata))
        loss = model(**packed_row(LENGTHS, ROW)).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-6)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-6)


TINY_EXPERTS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("llama", "is_causal", False),
        ("gemma3_text", "use_bidirectional_attention", True),
    ],
)
def test_configs_that_cannot_be_isolated_are_refused(family: str, option: str, value: Any) -> None:
    model = tiny_model(family)
    setattr(model.config, option, value)
    with pytest.raises(UnsupportedError, match=f"{option} = {value}"):
        attach(model)
    assert attached(model) is None


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_attention_in_both_directions_is_for_rows_that_are_not_packed(family: str, layers: Any) -> None:
    """transformers' `is_causal`, in a call or in the configuration, makes an encoder of a decoder."""
    model, batch = tiny_model(family).eval(), packed_row([9, 5], 16)
    asked = {"input_ids": batch["input_ids"][:, :9], "use_cache": False}
    with torch.no_grad():
        expected = model(**asked, is_causal=False).logits
        assert not torch.allclose(model(**asked).logits, expected, atol=0.1)
        attach(model, layers=layers)
        torch.testing.assert_close(model(**asked, is_causal=False).logits, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(UnsupportedError, match="is_causal = False"):
            model(**batch, is_causal=False)
        model.config.is_causal = False
        torch.testing.assert_close(model(**asked).logits, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(UnsupportedError, match="is_causal = False"):
            model(**batch)


def test_a_generic_model_takes_no_packed_row_in_both_directions() -> None:
    """A row of one document, whose padded tail it would see, comes past the probe."""
    model = generic_model("gpt2")
    attach(model)
    with pytest.raises(UnsupportedError, match="is_causal = False"):
        model(**packed_row([14], 16), is_causal=False)


def test_rope_of_a_part_of_each_head() -> None:
    """Where it is scaled, transformers' Llama makes frequencies for the part alone, and fails; GLM's rotates it."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    model, batch = tiny_model("llama", rope_parameters=rope), packed_row([9, 5], 16)
    with pytest.raises(RuntimeError, match="must match"):
        model(batch["input_ids"])
    with pytest.raises(UnsupportedError, match=r"'linear' with partial_rotary_factor 0\.5: transformers' llama"):
        attach(model, layers="fused")
    compare(tiny_model("glm4_moe", rope_parameters=rope), batch, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "eager"}, "attention 'eager' is unknown: use one of auto, tiled, flash, per_document$"),
        ({"attention": "flex_attention"}, "attention 'flex_attention' is unknown"),
        ({"experimental": {"packing_metadata": "twice"}}, "packing_metadata 'twice' is unknown"),
        ({"experimental": {"speed": 2}}, "experimental 'speed' is unknown: use one of packing_metadata, moe_routing, "),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    before = trace(model)
    with pytest.raises(ConfigError, match=message):
        attach(model, **options)
    assert trace(model) == before


def test_plans_that_layers_cannot_follow_are_refused() -> None:
    model = tiny_model("llama")
    before = trace(model)
    with pytest.raises(UnsupportedError, match="needs fused layers"):
        attach(model, Plan(policies=(Policy.RECOMPUTE_NORMS,)), layers="stock")
    with pytest.raises(ConfigError, match="2 policies for a model of 3 layers"):
        attach(model, Plan(policies=(Policy.KEEP, Policy.KEEP)))
    assert trace(model) == before


def test_a_failed_second_attach_leaves_the_first() -> None:
    model = tiny_model("llama")
    handle = attach(model)
    with pytest.raises(UnsupportedError):
        attach(model, Plan(policies=(Policy.RECOMPUTE_NORMS,)), experimental=MASKED)
    assert attached(model) is handle


def test_a_model_whose_weights_could_not_be_merged_for_memory_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    before, places = trace(model), storages(model)

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("for merged weights")

    handle = attach(model, Plan.recompute(), layers="fused")
    monkeypatch.setattr("pronghorn.layers.decoder.merge_weights", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        model(**packed_row(LENGTHS, ROW))
    handle.detach()
    assert trace(model) == before and storages(model) == places


def storages(model: Any) -> dict[str, int]:
    """Where each parameter's storage lies."""
    return {name: parameter.untyped_storage().data_ptr() for name, parameter in model.named_parameters()}


def bits(model: Any) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("changed", ["", "adapters added", "copied"])
def test_detach_gives_weights_storages_of_their_own(changed: str) -> None:
    """Merged products of several linears and their biases, and a weight with LoRA's A below it."""
    model: Any = tiny_model("qwen2", **{**BIASED, **WIDE})
    parameters, weights, count = dict(model.named_parameters()), bits(model), len(set(storages(model).values()))
    adapted = model if changed == "adapters added" else with_adapters(model, r=8)
    attach(model, layers="fused")
    model(**packed_row(LENGTHS, ROW))
    if changed == "adapters added":  # PEFT wraps the linears whose weights were merged
        adapted = with_adapters(model, r=8)
        model(**packed_row(LENGTHS, ROW))
    if changed == "copied":
        model = adapted = copy.deepcopy(adapted)
        model(**packed_row(LENGTHS, ROW))
    handle = attached(model)
    places = storages(adapted)
    assert handle is not None and len(set(places.values())) < len(places)
    handle.detach()
    places = storages(adapted)
    assert len(set(places.values())) == len(places) and all(
        parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in adapted.parameters()
    )
    base = adapted.unload()
    assert bits(base) == weights and len(set(storages(base).values())) == count
    if changed != "copied":
        assert all(parameter is parameters[name] for name, parameter in base.named_parameters())


def test_another_plan_attaches_nothing_anew_and_moves_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(tiny_model("llama", **WIDE), r=8)
    counts = count_attachments(monkeypatch)
    handle = attach(model, Plan.recompute(), layers="fused")
    model(**packed_row(LENGTHS, ROW))
    places, build = storages(model), handle.layers._builds[0]  # type: ignore[union-attr]
    for plan in (Plan.keep(), None, Plan.offload()):
        assert handle.replan(plan) is attached(model) is handle and handle.plan == plan
        model(**packed_row(LENGTHS, ROW))
    assert attach(model, Plan.keep(), layers="fused") is handle and handle.plan == Plan.keep()
    with handle.trying(Plan.recompute()):
        assert handle.plan == Plan.recompute() and recomputes_layers(model)
    assert handle.plan == Plan.keep() and not recomputes_layers(model)
    assert counts == {"attached": 1, "merged": 1} and storages(model) == places
    assert handle.layers is not None and handle.layers._builds == [build]


def test_a_plan_that_layers_cannot_follow_leaves_the_one_before() -> None:
    model = tiny_model("llama")
    handle = attach(model, Plan.recompute())
    with pytest.raises(UnsupportedError, match="needs fused layers"):
        handle.replan(Plan(policies=(Policy.RECOMPUTE_NORMS,)))
    assert handle.plan == Plan.recompute() and recomputes_layers(model)


def test_other_options_keep_the_plan() -> None:
    model = tiny_model("llama")
    attach(model, Plan.recompute())
    assert attach(model, experimental=MASKED).plan == Plan.recompute()
    assert recomputes_layers(model)


def test_a_hook_on_the_head_runs() -> None:
    model, batch, called = tiny_model("llama"), packed_row(LENGTHS, ROW), []
    attach(model)
    loss = model(**batch).loss
    model.lm_head.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(model(**batch).loss, loss)
    assert called


def test_chunks_of_a_head_with_dropout_are_recomputed_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["lm_head"], lora_dropout=0.5)).train()
    batch, found = packed_row([400, 112], 512), []
    attach(model)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)
    for recompute in (True, False):
        if not recompute:
            monkeypatch.setattr(loss_module, "checkpoint", lambda function, *args, **_: function(*args))
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch).loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*found)


def test_the_head_s_product_is_in_autocast_s_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model("llama"), []
    attach(model)
    monkeypatch.setattr(loss_module, "linear_cross_entropy", lambda h, *rest: seen.append(h.dtype) or h.sum())
    with torch.autocast("cpu", torch.bfloat16):
        model(**packed_row([40, 13], 64))
    assert seen == [torch.bfloat16]


def wrapped_as_by_trl(model: Any) -> None:
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.forward = MethodType(forward, model)


def wrapped_as_by_accelerate(model: Any) -> None:
    under_autocast = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(under_autocast), model)


WRAPPERS = pytest.mark.parametrize("wrap", [wrapped_as_by_trl, wrapped_as_by_accelerate])
OF_BOTH_KINDS = pytest.mark.parametrize("family", ["llama", "gpt_neox"])


@WRAPPERS
@OF_BOTH_KINDS
def test_a_forward_that_was_wrapped_before_attach_is_refused(family: str, wrap: Callable[[Any], None]) -> None:
    """Packed rows would go to transformers' own, which computes all logits."""
    model = tiny_model(family) if family in FAMILIES else generic_model(family)
    wrap(model)
    with pytest.raises(ConfigError, match=r"forward of this .* was wrapped before .*attach it before the first"):
        attach(model)
    assert attached(model) is None
    del model.forward
    attach(model)
    wrap(model)
    attach(model, attention="per_document").detach()
    attach(model)
    assert model(**packed_row(LENGTHS, ROW)).logits is None


@WRAPPERS
@OF_BOTH_KINDS
def test_a_forward_that_was_wrapped_after_attach_outlives_it(family: str, wrap: Callable[[Any], None]) -> None:
    model, ids = tiny_model(family) if family in FAMILIES else generic_model(family), torch.arange(5, 25)[None]
    before = model(input_ids=ids, labels=ids).loss
    handle = attach(model)
    wrap(model)
    handle.detach()
    assert torch.equal(model(input_ids=ids, labels=ids).loss, before)
    model.generate(input_ids=ids, max_new_tokens=2)


def sees_the_whole_row(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as packages patch it in, by a function of their own."""
    batch, length, _ = hidden_states.shape
    linears = self.q_proj, self.k_proj, self.v_proj
    q, k, v = (each(hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2) for each in linears)
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


class Around(torch.nn.Module):
    """What somebody put a decoder layer into."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("first", [False, True], ids=["before attach", "after"])
@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_a_module_around_a_layer_is_refused(layers: Any, first: bool) -> None:
    model = tiny_model("llama")
    if first:
        attach(model, layers=layers)
    model.model.layers[1] = Around(model.model.layers[1])
    with pytest.raises(UnsupportedError, match=r"a decoder layer is a Around, which has no self_attn: .*a hook"):
        if not first:
            attach(model, layers=layers)
        model(**packed_row(LENGTHS, ROW))


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "functools.wraps"])
@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_attention_that_somebody_patched_in_is_refused_for_several_documents(
    layers: Any, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows nothing of documents, and nothing else would tell."""
    own = modeling_llama.LlamaAttention.forward
    patch = functools.wraps(own)(sees_the_whole_row) if hidden else sees_the_whole_row
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", patch)
    model = tiny_model("llama")
    attach(model, layers=layers)
    model(**packed_row([ROW - 5], ROW))  # one document, whatever follows
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"LlamaAttention's forward is .*test_attach's .*see each other"):
            model(**packed_row(LENGTHS, ROW))
    model(**packed_row([ROW - 5], ROW))


@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_attention_around_transformers_own_is_called(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, called = modeling_llama.LlamaAttention.forward, []
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self.layer_idx)
        return own(self, *args, **kwargs)

    attach(model, layers=layers)
    expected = model(**batch).loss
    attached(model).detach()
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    attach(model, layers=layers)
    for _ in range(2):
        torch.testing.assert_close(model(**batch).loss, expected)
    assert called == [0, 1, 2] * 2


def test_a_loss_function_of_one_s_own_is_called() -> None:
    """transformers lets a model have another than its cross-entropy; it is given all logits."""
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)

    def own(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: int, **_: Any) -> Tensor:
        assert logits.shape == (*labels.shape, vocab_size)
        return logits.float().square().sum() / num_items_in_batch

    model.loss_function = own
    handle = attach(model)
    out = model(**batch, num_items_in_batch=7)
    assert out.loss.item() == pytest.approx(out.logits.square().sum().item() / 7)
    assert {line.part: line.path for line in handle.report}["loss"] == "the model's own loss_function, of all logits"


@pytest.mark.parametrize("option", ["shift_labels", "ignore_index"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_options_of_transformers_loss_are_heeded(family: str, packed: bool, option: str) -> None:
    model = tiny_model(family) if family in FAMILIES else generic_model(family)
    row = packed_row([ROW], ROW)
    given = {"input_ids": row["input_ids"], "labels": row["labels"]}
    given[option] = row["labels"].roll(-2) if option == "shift_labels" else row["labels"][0, -1].item()
    given["labels"] = row["labels"].clamp(min=0)
    right, other = model(**given).loss, model(input_ids=row["input_ids"], labels=given["labels"]).loss
    attach(model)
    given |= {name: row[name] for name in ("packed", "position_ids") if packed}
    assert right.item() == pytest.approx(model(**given).loss.item(), rel=1e-5) != other.item()


def test_a_handle_stays_the_model_s_when_it_plans_anew() -> None:
    model = tiny_model("llama")
    before = trace(model)
    handle = attach(model, experimental=MASKED)
    assert handle.replan(Plan.recompute()) is attached(model) is handle
    assert {line.part: line.path for line in handle.report}["activations"] == "recompute the layer"
    other = attach(model, Plan.keep())
    with pytest.raises(ConfigError, match="attachment that was replaced: use what attach returned last"):
        handle.replan(None)
    assert other.replan(None) is attached(model) is other and other.plan is None
    other.detach()
    assert trace(model) == before


def test_a_model_that_moved_is_attached_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    handle = attach(model, Plan.recompute())
    assert attach(model) is handle
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))  # as after model.cuda()
    moved = attach(model)
    assert moved is not handle and attach(model) is moved
    assert moved.plan == Plan.recompute() and moved.fuses and not handle.fuses


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without flash")
def test_flash_on_the_cpu_is_refused_with_the_reason() -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="device cpu has no flash varlen kernel: use attention='auto'"):
        attach(model, attention="flash").report  # noqa: B018
    with pytest.raises(UnsupportedError, match="device cpu has no flash varlen kernel"):
        model(**packed_row(LENGTHS, ROW))


def test_an_implementation_set_after_attach_cannot_leak() -> None:
    model = tiny_model("llama")
    attach(model)
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match="'eager' can't isolate"):
        model(**packed_row([5, 12], 17))


@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_a_layer_of_another_model_is_noticed(layers: Any) -> None:
    """It came with a configuration of its own, whose attention isolates nothing. Attached again, the model has it."""
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    handle = attach(model, layers=layers)
    model(**batch)
    model.model.layers[1] = tiny_model("llama", seed=1).model.layers[1]
    with pytest.raises(UnsupportedError, match="LlamaAttention of another model, whose attention is 'sdpa': detach"):
        model(**batch)
    handle.detach()
    with torch.no_grad():
        _, expected = one_document_at_a_time(model, batch)
        attach(model, layers=layers)
        assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_of_another_row_is_refused() -> None:
    model = tiny_model("llama")
    attach(model)
    batch = packed_row(LENGTHS, ROW)
    with pytest.raises(DataError, match="describes 48 tokens but the row has 50"):
        model(**{**packed_row([25, 25], 50), "packed": batch["packed"]})
    with pytest.raises(DataError, match="sum to 47"):
        bounds = torch.tensor([0, 20, 47], dtype=torch.int32)
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], cu_seq_lens_q=bounds)
    with pytest.raises(DataError, match="packed batch came without position_ids"):
        model(input_ids=batch["input_ids"], packed=batch["packed"])
    with pytest.raises(DataError, match="cu_seq_lens_q came without position_ids"):
        model(input_ids=batch["input_ids"], cu_seq_lens_q=batch["packed"].cu_seqlens)


@pytest.mark.parametrize("name", CACHES)
def test_a_packed_batch_with_a_cache_is_refused(name: str) -> None:
    from transformers import DynamicCache

    model = tiny_model("llama")
    attach(model)
    with pytest.raises(DataError, match=r"a packed batch came with (past_key_values|cache): generate"):
        model(**packed_row(LENGTHS, ROW), **{name: DynamicCache(config=model.config)})


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_packed_documents_have_no_place_for_virtual_tokens(kind: str) -> None:
    batch = packed_row(LENGTHS, ROW)
    stock = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    model = tiny_model("llama")
    attach(model)
    model = get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    for given in (batch, stock) if kind == "PrefixTuningConfig" else (batch,):  # PEFT drops positions before a prompt
        with pytest.raises(DataError, match=r"virtual tokens .* are trained without packing"):
            model(**given)
    alone = {name: batch[name][:, : LENGTHS[0]] for name in stock}
    assert model(**alone).logits.isfinite().all()


@pytest.mark.parametrize("name", CACHES)
def test_one_token_after_a_cache_is_no_packed_batch(name: str) -> None:
    """Its mask is longer than it, and its position isn't the first."""
    given = {"position_ids": torch.tensor([[7], [2]]), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    assert stock_batch({**given, name: object()}) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_documents_that_would_change_the_others_rope_are_refused(kind: str) -> None:
    """transformers chooses such frequencies by a batch's longest position: up to the original length all are alike."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    model = tiny_model("llama", max_position_embeddings=64 if kind == "longrope" else 16, rope_parameters=rope)
    compare(model, packed_row([16, 5], 24), "cpu", torch.float32)
    attach(model)
    with pytest.raises(UnsupportedError, match="tail of 17 tokens, and beyond 16") as refused:
        model(**packed_row([17, 5], 22))
    assert "rows of 16 tokens" in refused.value.remedy
    with pytest.raises(UnsupportedError, match="tail of 17 tokens"):
        model(**packed_row([5], 22))
    assert model(**packed_row([17], 22)).loss.isfinite()  # changes no other document
    generic = generic_model("stablelm", max_position_embeddings=model.config.max_position_embeddings)
    generic.config.rope_parameters = rope
    attach(generic)
    with pytest.raises(UnsupportedError, match="tail of 17 tokens"):
        generic(**packed_row([17, 5], 22))


@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_dynamic_rope_forgets_a_longer_document(family: str, layers: Any) -> None:
    """After one, transformers has its frequencies back for a document shorter than the limit, and not for one as long
    as that: a model that has seen no longer one gives the right answer, which no earlier batch has a part in."""
    rope: Any = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    rope = {"full_attention": rope, "sliding_attention": rope} if family == "gemma3_text" else rope
    model = tiny_model(family, max_position_embeddings=16, rope_parameters=rope)
    plain, longer = copy.deepcopy(model), packed_row([40], 40)
    attach(model, layers=layers)
    for lengths in ([15, 5], [16, 5], [17]):
        batch = packed_row(lengths, sum(lengths))
        with torch.no_grad():
            model(**longer)
            if lengths == [17]:  # alone in its row: here both go by the longer one
                plain(longer["input_ids"])
            _, expected = one_document_at_a_time(plain, batch)
            torch.testing.assert_close(model(**batch).loss, expected.float())


def test_the_shortest_limit_of_rope_counts() -> None:
    """Where each kind of layer has parameters of its own."""
    kinds = {"full": {"rope_type": "dynamic"}, "sliding": {"rope_type": "default"}}
    config = SimpleNamespace(max_position_embeddings=64, rope_parameters=kinds)
    assert rope_limit(config) == 64
    kinds["sliding"] = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    assert rope_limit(config) == 16


def test_packed_position_ids_isolate_rows_too() -> None:
    model = tiny_model("llama").eval()
    ids = torch.arange(16).reshape(2, 8) * 7 % VOCAB
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    with torch.no_grad():
        parts = [model(ids[:1, :3]), model(ids[:1, 3:]), model(ids[1:])]
        expected = torch.cat([part.logits[0] for part in parts])
        attach(model)
        logits = model(input_ids=ids, position_ids=position_ids).logits.flatten(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "glm4"])
def test_packed_positions_that_all_rows_share(family: str) -> None:
    model = (tiny_model(family) if family in FAMILIES else generic_model(family)).eval()
    ids = torch.arange(24).reshape(3, 8) * 7 % VOCAB
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        expected = torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], 1)
        for layers in ("stock",) if family == "glm4" else ("stock", "fused"):
            attach(model, layers=layers)
            logits = model(input_ids=ids, position_ids=position_ids).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_attention_s_weights_that_are_not_there_are_warned_of() -> None:
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    attach(model)
    for asked in (batch, {"input_ids": batch["input_ids"]}):
        with pytest.warns(UserWarning, match="an attached model's attention has no weights to give"):
            assert model(**asked, output_attentions=True).attentions in ((), None)


def test_capped_scores_keep_their_dropout_in_padded_batches() -> None:
    """After a packed batch, as before it."""
    model = generic_model("gemma2", attention_dropout=0.5, attn_implementation="eager")
    ids, mask = torch.arange(3, 33).reshape(2, 15), torch.ones(2, 15, dtype=torch.int64)
    mask[0, :6] = 0
    torch.manual_seed(1)
    expected = model(input_ids=ids, attention_mask=mask).logits
    attach(model)
    model.eval()(**packed_row(LENGTHS, ROW))
    torch.manual_seed(1)
    torch.testing.assert_close(model.train()(input_ids=ids, attention_mask=mask).logits[mask > 0], expected[mask > 0])


@pytest.mark.parametrize(
    "position_ids",
    [[[0, 1, 2, 0, 1], [5, 6, 7, 8, 9]], [[0, 1, 0, 1, 2], [3, 4, 0, 1, 2]], [[4, 5, 0, 1, 2], [0, 1, 0, 1, 2]]],
)
def test_a_packed_row_that_starts_inside_a_document_is_refused(position_ids: list[list[int]]) -> None:
    model = tiny_model("llama")
    attach(model)
    with pytest.raises(DataError, match="start each row with a new document"):
        model(input_ids=torch.ones(2, 5, dtype=torch.int64), position_ids=torch.tensor(position_ids))


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_without_a_label_adds_nothing_to_a_step(packed: bool) -> None:
    """Divided by the labels of the step's others; where there are none at all it is 0 packed, and 0/0 padded, as
    transformers has it: its trainers, and ours, leave such documents out beforehand."""
    model = tiny_model("llama")
    attach(model, layers="fused")
    batch = packed_row([9, 5], 16) if packed else {"input_ids": torch.arange(16).view(2, 8)}
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    loss = model(**batch, num_items_in_batch=torch.tensor(7)).loss
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)
    assert model(**batch).loss.isnan() != packed


def test_packed_positions_with_a_padding_mask_are_refused() -> None:
    """transformers' path would let the documents see each other."""
    model = tiny_model("llama")
    attach(model)
    batch = packed_row(LENGTHS, ROW)
    mask = torch.ones_like(batch["input_ids"])
    with pytest.raises(DataError, match="leave attention_mask out of packed batches"):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask)
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    for padding in (0, 1):  # positions of a padded batch, by either convention
        position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, padding)
        assert model(input_ids=ids, position_ids=position_ids, attention_mask=mask).logits.isfinite().all()


def test_masks_that_transformers_was_given_ready_made() -> None:
    """One for each kind of layer, with positions beside them: no packed batch."""
    model = tiny_model("gemma3_text").eval()
    ids, look = torch.arange(3, 15)[None], torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    masks = {kind: look for kind in ("full_attention", "sliding_attention")}
    with torch.no_grad():
        before = model(input_ids=ids, position_ids=torch.arange(12)[None], attention_mask=masks).logits
        attach(model)
        after = model(input_ids=ids, position_ids=torch.arange(12)[None], attention_mask=masks).logits
    assert torch.equal(before, after)


def test_two_models_do_not_disturb_each_other() -> None:
    batch = packed_row(LENGTHS, ROW)
    alone = []
    for metadata in ("once", "per_layer_mask"):
        model = tiny_model("llama", seed=3)
        attach(model, experimental={"packing_metadata": metadata})
        alone.append(model(**batch).loss.item())
    first, second, plain = (tiny_model("llama", seed=3) for _ in range(3))
    one, two = attach(first), attach(second, **attach_options("masked", "per_layer_mask"))
    assert [first(**batch).loss.item(), second(**batch).loss.item()] == alone
    assert attached(plain) is None and not plain.model._forward_pre_hooks
    one.detach()
    assert second(**batch).loss.item() == alone[1]
    assert attached(second) is two and attached(first) is None
    assert type(first) is type(plain)


def test_a_deepcopy_is_attached_and_independent() -> None:
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    before = trace(model)
    handle = attach(model)
    twin = copy.deepcopy(model)
    loss = model(**batch).loss
    assert twin(**batch).loss.item() == loss.item()
    loss.backward()
    assert all(parameter.grad is None for parameter in twin.parameters())
    other = attached(twin)
    assert other is not None and other is not handle and other.model is twin
    other.detach()
    assert attached(model) is handle and attached(twin) is None
    assert not twin.model._forward_pre_hooks and type(twin) is handle.original_class
    assert model(**batch).loss.item() == loss.item()
    handle.detach()
    assert trace(model) == before


def test_generate_is_unchanged(stories: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(stories, padding_side="left")
    prompts = tokenizer(["Once upon a time, there was", "Lily"], padding=True, return_tensors="pt")
    prompts.pop("token_type_ids", None)
    assert (prompts["attention_mask"] == 0).any()
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    before = model.generate(**prompts, **options)
    attach(model)
    after = model.generate(**prompts, **options)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))


def test_continuous_batching_is_unchanged(stories: Path) -> None:
    """As TRL's GRPO generates with `use_transformers_continuous_batching`."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="sdpa")
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, block_size=16)
    options = {"max_new_tokens": 5, "continuous_batching_config": small, "warmup": False}
    prompts = [[1, 5, 9], [1, 7]]
    before = [answer.generated_tokens for answer in model.generate_batch(prompts, **options).values()]
    attach(model)
    implementation_now = model.config._attn_implementation
    after = [answer.generated_tokens for answer in model.generate_batch(prompts, **options).values()]
    assert len(before) == 2 and after == before
    assert model.config._attn_implementation == implementation_now != "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_unchanged(family: str, side: str) -> None:
    model = tiny_model(family).eval()
    ids = torch.arange(3, 33).reshape(2, 15) % VOCAB
    mask = torch.ones_like(ids)
    mask[0, slice(0, 6) if side == "left" else slice(9, 15)] = 0
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask, labels=ids)
        attach(model)
        after = model(input_ids=ids, attention_mask=mask, labels=ids)
    assert torch.equal(before.logits, after.logits) and before.loss == after.loss


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_without_labels(family: str) -> None:
    model, batch = tiny_model(family).eval(), packed_row(LENGTHS, ROW)
    expected = reference_logits(model, batch)
    attach(model)
    labels = batch.pop("labels")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits[0], expected, rtol=1e-4, atol=1e-4)
        as_tuple = model(**batch, labels=labels, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[0].shape == ()


def test_the_report_tells_every_path() -> None:
    model = tiny_model("llama")
    report = {line.part: (line.path, line.why) for line in attach(model, Plan.recompute()).report}
    assert report["packed attention"] == ("per_document", "device cpu has no flash varlen kernel")
    assert report["packing metadata"][0] == "once"
    assert report["activations"][0] == "recompute the layer"
    assert all(path and why for path, why in report.values())


@pytest.mark.parametrize("kind", ["AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModel"])
def test_only_causal_language_models_are_attached(kind: str) -> None:
    """Packed rows would give a classifier one answer for all documents."""
    import transformers

    other = getattr(transformers, kind).from_config(tiny_model("llama").config)
    with pytest.raises(UnsupportedError, match="is not a causal language model"):
        attach(other)


@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "qwen2_5_vl"])
def test_a_model_with_towers_is_refused_with_a_way_that_loads_it(kind: str, tmp_path: Path) -> None:
    """AutoModelForCausalLM knows none of these."""
    whole = write_composite(tmp_path, kind)
    with pytest.raises(UnsupportedError, match=r"is not a causal language model.*load it by FastLanguageModel"):
        attach(whole)
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64, dtype=torch.float32)
    assert attached(model) is not None


def test_mixed_adapters_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    mixed = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]), mixed=True)
    with pytest.raises(UnsupportedError, match="PeftMixedModel is not supported"):
        attach(mixed)


MIXING: dict[str, tuple[str, dict[str, Any]]] = {
    "aLoRA": ("LoraConfig", {"target_modules": ["q_proj"], "alora_invocation_tokens": [7]}),
    "a Lily adapter": ("LilyConfig", {"target_modules": ["q_proj"]}),
    "a ShadowPEFT adapter": ("ShadowConfig", {}),
}


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_adapters_by_which_documents_see_each_other_are_refused(family: str, kind: str) -> None:
    name, options = MIXING[kind]
    made = getattr(peft, name, None)
    if made is None or not options.keys() <= inspect.signature(made).parameters.keys():
        pytest.skip(f"this PEFT has no {kind}")
    model = tiny_model(family) if family in FAMILIES else generic_model(family)
    attach(model)
    model, batch = get_peft_model(model, made(task_type="CAUSAL_LM", **options)), packed_row(LENGTHS, ROW)
    stock = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    for given in (batch, stock):
        with pytest.raises(UnsupportedError, match=f"a packed row of .* documents, .* for {kind}, w"):
            model(**given)
    backbone = model.get_base_model().base_model  # which TRL's fused head calls
    with pytest.raises(UnsupportedError, match=f"a packed row of .* documents, .* for {kind}, w"):
        backbone(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    alone = {name: batch[name][:, : LENGTHS[0]] for name in ("input_ids", "labels")}
    assert model(**alone).logits.isfinite().all()  # no packed row: as transformers and PEFT compute it


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_that_are_made_of_an_attached_one_s_class_are_plain(family: str, tmp_path: Path) -> None:
    """And can be attached: a reference model for preference training, say."""
    model = generic_model(family) if family == "gpt2" else tiny_model(family)
    plain, batch = type(model), packed_row(LENGTHS, ROW)
    handle = attach(model, layers="stock" if family == "gpt2" else "fused")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for made in (loaded, type(model)(copy.deepcopy(model.config))):
        assert type(made) is plain and attached(made) is None
        assert not [
            kept for module in made.modules() for kept in type(module).__mro__ if "pronghorn" in kept.__module__
        ]
        with torch.no_grad():
            made.load_state_dict(model.state_dict())
            other = attach(made, layers=handle.options.layers)
            assert made.eval()(**batch).loss.item() == model.eval()(**batch).loss.item()
        other.detach()
        assert type(made) is plain


def test_an_attached_model_is_copied_but_not_pickled(tmp_path: Path) -> None:
    model = tiny_model("llama")
    handle = attach(model)
    assert type(copy.deepcopy(model)) is type(model) is type(copy.copy(model))
    with pytest.raises(UnsupportedError, match=r"can't be pickled .*detach it first"):
        torch.save(model, tmp_path / "model.pt")
    handle.detach()
    torch.save(model, tmp_path / "model.pt")


@pytest.mark.slow
def test_compiled_experts_are_refused_with_the_true_reason() -> None:
    model = tiny_model("qwen3_moe")
    attach(model)
    with pytest.raises(UnsupportedError, match=r"torch\.compile can't trace Pronghorn's experts"):
        torch.compile(model, backend="eager")(**packed_row([20, 12], 32))


@pytest.mark.parametrize("layers", [["attention"] * 3, ["mamba", "attention", "mamba"]], ids=["fused", "generic"])
def test_models_without_routers_balance_none(layers: list[str]) -> None:
    """Granite 4's dense models have their siblings' configuration: TRL asks it for the routers' logits."""
    ids = torch.randint(3, VOCAB, (1, 20))
    model = tiny_model("granitemoehybrid", layer_types=layers)
    attach(model)
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss]
    losses.append(model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True).loss)
    model.config.output_router_logits = True
    losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
    if layers[0] == "attention":
        losses += [model(**packed_row([20], 20), output_router_logits=asked).loss for asked in (False, None, True)]
        assert losses[3] == losses[4] == losses[5]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("kind", ["fused", "experts", "generic"])
def test_torch_func_is_refused_by_name(kind: str) -> None:
    """Where layers are transformers' own, it works."""
    model = generic_model("gpt2") if kind == "generic" else tiny_model("qwen3_moe" if kind == "experts" else "llama")
    attach(model, layers="fused" if kind == "fused" else "stock")
    ids = torch.arange(3, 12)[None]
    trained = {name: p.detach() for name, p in model.named_parameters() if "norm" in name or "ln_f" in name}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "labels": ids}).loss

    with pytest.raises(UnsupportedError, match=r"torch\.func .* detach the model first"):
        torch.func.grad(loss)(trained)
    attached(model).detach()  # type: ignore[union-attr]
    assert torch.func.grad(loss)(trained).keys() == trained.keys()
