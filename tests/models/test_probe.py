"""Models of unknown families: the probe finds documents that mix, and names the layer; what is clean trains right."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import pronghorn
from pronghorn.data.batch import Collator
from pronghorn.errors import UnsupportedError
from pronghorn.families import generic
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.families import decoder_layers
from pronghorn.models.generic import Way
from pronghorn.models.lora import add_lora
from pronghorn.models.padded_probe import require_padded
from pronghorn.models.probe import Leak, probe
from support import causal_lms
from support.generic import SMALL, generic_model

CLEAN = ("gpt_neox", "gpt2", "opt", "phi", "cohere", "starcoder2", "gemma2", "falcon", "qwen2_moe")
LENGTHS = [5, 30, 1, 17]
ROUTED = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}


def tiny(model_type: str) -> Any:
    dropout = {name: 0.0 for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout")}
    dropout |= {"hidden_dropout": 0.0}
    return generic_model(model_type, **dropout, **(ROUTED if model_type == "qwen2_moe" else {}))


def batch(lengths: list[int], seed: int = 0) -> dict[str, Any]:
    ids = torch.randint(3, SMALL["vocab_size"], (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Collator(max(64, sum(lengths)), 0)([{"input_ids": ids.tolist(), "labels": ids.tolist(), "lengths": lengths}])


@pytest.mark.parametrize("model_type", ["falcon", "starcoder2"])
def test_a_backbone_called_past_its_causal_lm_keeps_documents_apart(model_type: str) -> None:
    """As TRL's fused head calls it, for its own losses. Falcon's own forward lets documents mix."""
    model, row = tiny(model_type), batch(LENGTHS)
    given = row["input_ids"][:, : sum(LENGTHS)], row["position_ids"][:, : sum(LENGTHS)]
    alone = [model.base_model(ids, use_cache=False).last_hidden_state for ids in given[0].split(LENGTHS, 1)]
    handle = pronghorn.attach(model)
    for each in (model, copy.deepcopy(model)):
        packed = each.base_model(input_ids=given[0], position_ids=given[1]).last_hidden_state
        torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
        one = each.base_model(given[0][:, 1:31], use_cache=False).last_hidden_state
        torch.testing.assert_close(one, model.base_model(given[0][:, 1:31]).last_hidden_state)
    handle.detach()
    assert not model.base_model._forward_pre_hooks


def test_a_backbone_whose_documents_mix_is_refused_past_its_causal_lm() -> None:
    model, row = tiny("bloom"), batch(LENGTHS)
    pronghorn.attach(model)
    with pytest.raises(UnsupportedError, match="bloom can't be trained on packed rows here: documents mix in layer 0"):
        model.base_model(input_ids=row["input_ids"], position_ids=row["position_ids"])


@pytest.mark.parametrize("model_type", CLEAN)
def test_packed_equals_alone_for_the_loss_and_every_gradient(model_type: str) -> None:
    stock = tiny(model_type)
    packed_batch, supervised = batch(LENGTHS), sum(LENGTHS) - len(LENGTHS)
    ids = packed_batch["input_ids"][0]
    losses, start = [], 0
    for length in LENGTHS:
        logits = stock(input_ids=ids[None, start : start + length], use_cache=False).logits[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, ids[start + 1 : start + length], reduction="sum"))
        start += length
    exact = torch.stack(losses).sum() / supervised
    exact.backward()
    right = {name: p.grad for name, p in stock.named_parameters()}
    stock.zero_grad(set_to_none=True)
    handle = pronghorn.attach(stock)
    loss = stock(**packed_batch).loss
    loss.backward()
    assert handle.isolation is not None
    assert handle.isolation.clean
    torch.testing.assert_close(loss, exact)
    for name, parameter in stock.named_parameters():
        if right[name] is not None:
            torch.testing.assert_close(parameter.grad, right[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", ["gemma2", "starcoder2"])
def test_padded_batches_after_a_packed_one_are_transformers(model_type: str, side: str) -> None:
    """Attention stays ours then; padding that looks at no key must not become NaN."""
    stock = tiny(model_type).eval()
    ids, mask = torch.arange(3, 43).reshape(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, slice(0, 7) if side == "left" else slice(13, 20)] = 0
    with torch.no_grad():
        right = stock(input_ids=ids, attention_mask=mask).logits
        pronghorn.attach(stock)
        stock(**batch(LENGTHS))
        mine = stock(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(mine[mask.bool()], right[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2"])
def test_the_loss_comes_first_as_transformers_gives_it(model_type: str) -> None:
    model, ids = tiny(model_type), torch.arange(3, 23)[None]
    right = model(input_ids=ids, labels=ids, use_cache=False, return_dict=False)
    pronghorn.attach(model)
    mine = model(input_ids=ids, labels=ids, use_cache=False, return_dict=False)
    assert [each.shape for each in mine] == [each.shape for each in right]
    torch.testing.assert_close(mine[0], right[0])
    torch.testing.assert_close(model(input_ids=ids, labels=ids)[0], right[0])
    loss = model(**batch(LENGTHS)).loss
    assert model(**batch(LENGTHS), return_dict=False) == (loss,) and model(**batch(LENGTHS))[0] == loss


def test_the_first_packed_batch_may_come_in_inference_mode() -> None:
    model = generic_model("starcoder2")
    pronghorn.attach(model)
    with torch.inference_mode():
        evaluated = model(**batch(LENGTHS)).loss
    trained = model(**batch(LENGTHS)).loss
    trained.backward()
    assert trained.item() == pytest.approx(evaluated.item(), rel=1e-5)


def test_padded_batches_after_a_packed_one_keep_attention_s_dropout() -> None:
    model = generic_model("gemma2", attention_dropout=0.5)
    ids = torch.arange(3, 43).reshape(2, 20)

    def logits() -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            out: torch.Tensor = model(input_ids=ids).logits
        return out

    right = logits()
    pronghorn.attach(model)
    model(**batch(LENGTHS))
    torch.testing.assert_close(logits(), right, rtol=1e-4, atol=1e-5)


def test_the_probe_changes_neither_weights_nor_gradients_nor_random_state() -> None:
    model = add_lora(generic_model("gpt_neox"), r=4, lora_dropout=0.1)
    pronghorn.attach(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    model.base_model.model.get_output_embeddings().eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    before = torch.get_rng_state()
    assert probe(model).clean
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert {name for name, p in model.named_parameters() if p.grad is not None} == gradients.keys()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def _mean_so_far(states: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
    return 1e-3 * states.cumsum(1) / steps


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_state_that_is_not_reset_is_found_and_its_layer_named(layer: int) -> None:
    model = generic_model("gpt_neox")
    mlp = decoder_layers(model)[layer].mlp
    own = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: own(self, x) + _mean_so_far(x), mlp)
    pronghorn.attach(model)
    with pytest.raises(UnsupportedError, match=rf"documents mix in layer {layer} \(GPTNeoXMLP\).*packing.enabled: fal"):
        model(**batch(LENGTHS))


def test_a_convolution_that_reaches_into_the_document_before_is_found() -> None:
    model = generic_model("starcoder2")
    attention = decoder_layers(model)[1].self_attn
    own = type(attention).forward

    def convolved(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shifted = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return own(self, hidden_states + 0.1 * shifted, *args, **kwargs)

    attention.forward = types.MethodType(convolved, attention)
    pronghorn.attach(model)
    found = probe(model)
    assert isinstance(found.problem, Leak)
    assert (found.problem.layer, found.problem.mixer) == (1, "Starcoder2Attention")


def test_attention_without_the_documents_mask_in_one_layer_is_found() -> None:
    model = generic_model("gpt_neox")
    attention = decoder_layers(model)[2].attention
    own = type(attention).forward

    def unmasked(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("packed", None)
        return own(self, hidden_states, None, **kwargs)

    attention.forward = types.MethodType(unmasked, attention)
    pronghorn.attach(model)
    found = probe(model)
    assert isinstance(found.problem, Leak)
    assert (found.problem.layer, found.problem.mixer) == (2, "GPTNeoXAttention")


def test_a_leak_without_values_is_found_by_its_gradient() -> None:
    class _Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad + 1e-6 * grad.sum(1, keepdim=True)

    model = generic_model("gpt_neox")
    mlp = decoder_layers(model)[1].mlp
    own = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: own(self, _Straight.apply(x)), mlp)
    pronghorn.attach(model)
    found = probe(model)
    assert isinstance(found.problem, Leak)
    assert found.problem.layer == 1
    assert "gradient" in found.problem.how


def test_a_state_space_model_is_refused_packed_and_runs_one_document_a_row() -> None:
    model = generic_model("mamba2")
    handle = pronghorn.attach(model)
    with pytest.raises(UnsupportedError, match=r"mamba2 can't be trained on packed rows.*layer 0 \(Mamba2Mixer\)"):
        model(**batch(LENGTHS))
    one = batch([17])
    ids = one["input_ids"][0, :17]
    handle.detach()
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        right = nn.functional.cross_entropy(logits, ids[1:])
        pronghorn.attach(model)
        torch.testing.assert_close(model(**one).loss, right)


def test_a_window_is_crossed_where_it_fits_and_named_where_it_does_not() -> None:
    short, long = generic_model("starcoder2"), generic_model("starcoder2", sliding_window=400)
    for model in (short, long):
        pronghorn.attach(model)
    assert not probe(short).not_crossed
    found = probe(long)
    assert found.clean
    assert "not crossed: sliding_window 400" in str(found)
    assert not probe(long, lengths=(401, 3)).not_crossed


@pytest.mark.parametrize(
    ("model_type", "limit", "way"),
    [("llama4_text", "attention_chunk_size", Way.MASK), ("cohere2", "sliding_window", Way.BOUNDS)],
)
def test_limits_that_the_probe_does_not_cross_hold(model_type: str, limit: str, way: Way) -> None:
    """Chunks are in transformers' mask alone; windows are told with each call."""
    config = causal_lms.small_config(model_type)
    setattr(config, limit, 200)
    model = causal_lms.generic(config)
    pronghorn.attach(model)
    found = probe(model)
    assert found.clean and found.way is way and f"{limit} 200" in found.not_crossed
    packed = batch([230, 5, 410])
    if way is Way.MASK and not generic.chunks_follow_documents():  # transformers 5.17's masks
        with pytest.raises(UnsupportedError, match=r"longer than attention_chunk_size = 200"):
            model(**packed)
        return
    with torch.no_grad():
        logits = model(**{name: value for name, value in packed.items() if name != "labels"}).logits[0]
        for start, end in ((0, 230), (230, 235), (235, 645)):
            alone = model(input_ids=packed["input_ids"][:, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(logits[start:end], alone, rtol=1e-3, atol=1e-3)


def test_chunks_that_are_counted_from_the_row_s_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.17: a document that begins inside a chunk of the row is cut where it isn't alone."""
    from transformers import masking_utils

    config = causal_lms.small_config("llama4_text")
    config.attention_chunk_size = 200
    model = causal_lms.generic(config)
    pronghorn.attach(model)
    sound = masking_utils.create_chunked_causal_mask

    def of_the_row(**given: Any) -> Any:
        """Two masks, of the row's chunks and of the documents."""
        mask = sound(**given | {"position_ids": None})
        ids = given["position_ids"].eq(0).cumsum(1)[0]
        return mask & (ids[:, None] == ids) if mask is not None else ids[:, None] == ids

    generic.chunks_follow_documents.cache_clear()
    monkeypatch.setattr(masking_utils, "create_chunked_causal_mask", of_the_row)
    try:
        assert not generic.chunks_follow_documents()
        with pytest.raises(UnsupportedError, match=r"row of 645 tokens is longer than attention_chunk_size = 200"):
            model(**batch([230, 5, 410]))
    finally:
        generic.chunks_follow_documents.cache_clear()


def test_rows_in_which_queries_are_scaled_by_their_place_are_refused() -> None:
    """Llama 4's layers without RoPE count a row's tokens, further than the probe's row goes."""
    config = causal_lms.small_config("llama4_text")
    config.attention_chunk_size, config.floor_scale, config.attn_scale = 512, 300, 0.5
    config.no_rope_layers = [1, 0, 1]
    config.layer_types = ["chunked_attention", "full_attention", "chunked_attention"]
    model = causal_lms.generic(config)
    lengths = [100, 99, 100]
    row = batch(lengths)
    alone = [model(input_ids=ids, use_cache=False).logits[0] for ids in row["input_ids"][:, :299].split(lengths, 1)]
    pronghorn.attach(model)
    packed = model(**{name: value for name, value in row.items() if name != "labels"}).logits[0]
    torch.testing.assert_close(packed[:299], torch.cat(alone), rtol=1e-3, atol=1e-3)
    with pytest.raises(UnsupportedError, match=r"documents of 301 tokens.* beyond 299 .*take rows of 299 tokens"):
        model(**batch([100, 101, 100]))
    assert model(**batch([350])).loss.isfinite()  # by itself it is in its own place


def test_a_row_s_tail_does_not_count_in_the_routers_auxiliary_loss() -> None:
    balanced = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = generic_model("qwen2_moe", **ROUTED, **balanced)
    pronghorn.attach(model)
    found = []
    for tail in (0, 43):
        ids = torch.randint(
            3, SMALL["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)
        ).tolist()
        out = model(**Collator(sum(LENGTHS) + tail, 0)([{"input_ids": ids, "labels": ids, "lengths": LENGTHS}]))
        out.loss.backward()
        found.append([out.loss, out.aux_loss, *(layer.mlp.gate.weight.grad for layer in model.model.layers)])
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0])


def test_a_forward_that_fails_is_an_error_with_its_cause() -> None:
    model = generic_model("gpt_neox")
    pronghorn.attach(model)
    layer = decoder_layers(model)[0]

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    layer.forward = types.MethodType(broken, layer)
    with pytest.raises(UnsupportedError, match=r"its forward fails \(RuntimeError: no such kernel\)"):
        model(**batch(LENGTHS))


@pytest.mark.parametrize(("model_type", "window"), [("gpt_neox", {}), ("starcoder2", {"sliding_window": 159})])
def test_the_probe_costs_eleven_short_forwards(model_type: str, window: dict[str, int]) -> None:
    model = generic_model(model_type, **window)
    pronghorn.attach(model)
    tokens: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    found = probe(model)
    hook.remove()
    assert found.clean
    assert len(tokens) == 6 + len(found.lengths)
    assert sum(tokens) == 7 * sum(found.lengths) <= 7 * 233


@pytest.mark.parametrize("policy", [Policy.RECOMPUTE_LAYER, Policy.OFFLOAD])
def test_the_probe_runs_under_the_policy_that_training_has(policy: Policy) -> None:
    model = generic_model("starcoder2")
    pronghorn.attach(model, Plan((policy,)))
    assert probe(model).clean


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_probe_runs_under_transformers_checkpointing(reentrant: bool) -> None:
    model = generic_model("gemma2")
    pronghorn.attach(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert probe(model).clean
    assert model.is_gradient_checkpointing


class _DefaultIsAGPU(TorchFunctionMode):
    """Refuse what torch refuses under `torch.set_default_device("cuda")`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randint and kwargs.get("generator") is not None and "device" not in kwargs:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return func(*args, **(kwargs or {}))


def test_the_probes_run_where_torch_s_default_device_is_a_gpu() -> None:
    model = add_lora(tiny("starcoder2")).train()
    pronghorn.attach(model)
    with _DefaultIsAGPU():
        assert str(probe(model)).startswith("no mixing")
        require_padded(model)


def test_weights_that_are_no_numbers_are_named_and_not_called_clean() -> None:
    model = generic_model("gpt_neox")
    decoder_layers(model)[1].mlp.dense_4h_to_h.weight.data[0, 0] = float("nan")
    pronghorn.attach(model)
    assert "not finite" in str(probe(model))


def test_pictures_are_refused() -> None:
    model = generic_model("gpt_neox")
    pronghorn.attach(model)
    with pytest.raises(UnsupportedError, match="pixel_values: training is text only for now"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), pixel_values=torch.zeros(1, 3, 8, 8))


def test_detach_gives_the_model_back() -> None:
    model = generic_model("gpt_neox")
    own, attention = type(model), model.config._attn_implementation
    handle = pronghorn.attach(model)
    assert probe(model).way is Way.BOUNDS
    handle.detach()
    assert type(model) is own
    assert model.config._attn_implementation == attention
    assert not [name for name in model.__dict__ if name.startswith("_pronghorn")]


def test_lora_adapts_what_a_text_reaches_and_no_router() -> None:
    assert add_lora(generic_model("gpt2"), r=2).peft_config["default"].target_modules == {"c_attn", "c_fc", "c_proj"}
    model = generic_model("qwen2_moe", **ROUTED)
    adapted = {name for name, _ in add_lora(model, r=2).named_modules() if name.endswith("lora_A")}
    assert any("q_proj" in name for name in adapted)
    assert not [name for name in adapted if "gate." in name or "shared_expert_gate" in name or "lm_head" in name]
