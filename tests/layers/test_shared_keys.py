"""Layers that share keys and values, or have inputs of their own, or values that are keys (Gemma 4)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pronghorn.attention import efficient, explicit
from pronghorn.data.batch import PackedBatch
from pronghorn.diagnose.profile import inner_dimensions, parts_of
from pronghorn.errors import UnsupportedError
from pronghorn.layers.decoder import is_fused
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from pronghorn.models.families import looks_tokens_up
from support.documents import LENGTHS, ROW, gradients, one_document_at_a_time
from support.fused import compare, loss_and_gradients, with_adapters
from support.generic import generic_model
from support.tiny import packed_row, tiny_model

KINDS = ["gemma4_text", "gemma4_unified_text", "gemma4_text with experts"]
PATTERN = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
MIXED = [Policy.KEEP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD, Policy.RECOMPUTE_MLP, Policy.OFFLOAD]
PLANS = {policy.value: (policy,) for policy in Policy} | {"mixed": MIXED, "the other way round": MIXED[::-1]}


def close(model: Any, loss: torch.Tensor, exact: Any, exact_loss: torch.Tensor) -> None:
    """Compare a loss and every gradient with one document at a time."""
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-7)
    wanted = gradients(exact)
    for name, grad in gradients(model).items():
        error = (grad.double() - wanted[name]).norm() / wanted[name].norm()
        assert error < 3e-5, f"{name}: {error:.1e}"


@pytest.mark.matrix(14)
@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_gives_the_gradients_of_one_document_at_a_time(
    kind: str, plan: str, adapters: bool, nan_memory: None
) -> None:
    model, batch = tiny_model(kind), packed_row(LENGTHS, ROW)
    model = with_adapters(model) if adapters else model
    exact = copy.deepcopy(model).double()
    _, exact_loss = one_document_at_a_time(exact, batch)
    exact_loss.backward()
    count = len(list(model.get_decoder().layers))
    policies = PLANS[plan] if len(PLANS[plan]) == 1 else PLANS[plan][:count]
    if kind == KINDS[-1]:  # norms aren't recomputed beside experts
        policies = tuple(Policy.KEEP if policy is Policy.RECOMPUTE_NORMS else policy for policy in policies)
    attach(model, Plan(tuple(policies)), layers="fused")
    loss = model(**batch).loss
    assert all(map(is_fused, model.get_decoder().layers))
    loss.backward()
    close(model, loss.detach(), exact, exact_loss.detach())


@pytest.mark.matrix(2)
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits(kind: str, masters: bool, nan_memory: None) -> None:
    """As near to float64 as transformers and PEFT: float32 masters under autocast, and adapters over bfloat16."""
    model = tiny_model(kind) if masters else with_adapters(tiny_model(kind))
    model.load_state_dict({name: x.bfloat16().float() for name, x in model.state_dict().items()})
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(4)]
    compare(model, *batches, dtype=torch.bfloat16, masters=masters)


@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_recomputing_reads_the_keys_and_values_of_the_first_forward(layers: Any) -> None:
    """Not those that a layer computed again: the same bits, also under transformers' own gradient checkpointing."""
    model, batch = tiny_model("gemma4_text"), packed_row(LENGTHS, ROW)
    attach(model, Plan.keep(), layers=layers)
    loss, grads = loss_and_gradients(model, batch)
    handle = attach(model, Plan.recompute(), layers=layers)
    again, same = loss_and_gradients(model, batch)
    assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads)
    handle.replan(None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, same = loss_and_gradients(model, batch)
    assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads)


@pytest.mark.parametrize("layer", range(5))
def test_a_layer_that_is_called_shares_with_layers_that_are_computed(layer: int) -> None:
    """Somebody hooked its attention: the others give and read k and v as transformers lays them out."""
    model, batch = tiny_model("gemma4_text"), packed_row(LENGTHS, ROW)
    exact = copy.deepcopy(model).double()
    _, exact_loss = one_document_at_a_time(exact, batch)
    exact_loss.backward()
    for part in (model.model.layers[layer].self_attn, model.model.layers[layer].per_layer_input_gate):
        part.register_forward_hook(lambda *_: None)
    attach(model, Plan.recompute(), layers="fused")
    loss = model(**batch).loss
    assert [is_fused(each) for each in model.model.layers] == [number != layer for number in range(5)]
    loss.backward()
    close(model, loss.detach(), exact, exact_loss.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_document_computes_does_not_depend_on_its_neighbours(kind: str) -> None:
    model = tiny_model(kind).eval()
    attach(model, layers="fused")
    batch, other = packed_row(LENGTHS, ROW), packed_row(LENGTHS, ROW, seed=1)
    own = slice(1, 41)  # the second document
    other["input_ids"][:, own] = batch["input_ids"][:, own]
    with torch.no_grad():
        found = [
            model(**{name: x for name, x in each.items() if name != "labels"}).logits[0, own] for each in (batch, other)
        ]
    assert torch.equal(*found)


def test_a_leak_in_a_layer_that_reads_another_layer_s_keys_is_seen() -> None:
    """The comparisons above can fail."""
    model, batch = tiny_model("gemma4_text"), packed_row(LENGTHS, ROW)
    attach(model, layers="fused")
    right = model(**batch).loss
    choose, whole = explicit.Options.choose, PackedBatch.build([ROW], tokens=ROW)
    block = model.model.layers[-1].__dict__["_pronghorn_run"].blocks[0]
    block.backend = "per_document"  # what is chosen for other layers isn't its own then
    block.options = lambda query, packed: choose(block.backend, query, whole, block.scale, block.window)
    assert not torch.allclose(model(**batch).loss, right, rtol=1e-4)


def test_bidirectional_attention_is_refused_and_that_of_images_is_not() -> None:
    """Tokens of images would see each other; text stays causal."""
    attach(tiny_model("gemma4_text", use_bidirectional_attention="vision"))
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention = 'all'"):
        attach(tiny_model("gemma4_text", use_bidirectional_attention="all"))


def test_layers_that_read_other_embeddings_are_known_by_them() -> None:
    assert looks_tokens_up(tiny_model("gemma4_text").model)
    assert not looks_tokens_up(tiny_model("gemma4_unified_text").model)


def test_heads_of_512_go_document_by_document_on_the_cpu() -> None:
    model, batch = tiny_model("gemma4_unified_text", global_head_dim=512), packed_row(LENGTHS, ROW)
    exact = copy.deepcopy(model).double()
    _, exact_loss = one_document_at_a_time(exact, batch)
    handle = attach(model, layers="fused")
    report = {line.part: line.path for line in handle.report}
    assert report["packed attention, heads of 16"] == report["packed attention, heads of 512"] == "per_document"
    torch.testing.assert_close(model(**batch).loss.double(), exact_loss, rtol=1e-5, atol=1e-7)


def test_repeated_heads_and_their_gradients() -> None:
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
    repeated = efficient.repeated(x, 6)
    assert all(torch.equal(repeated[:, head], x[:, head // 3]) for head in range(6))
    grad = torch.randn_like(repeated)
    torch.testing.assert_close(efficient.summed(grad, 2), torch.autograd.grad(repeated, x, grad)[0])
    assert torch.equal(efficient.repeated(x[:, :1], 6), x[:, :1].repeat(1, 6, 1))
    assert efficient.repeated(x, 2) is x and efficient.summed(grad, 6) is grad


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (16, 1)])
def test_heads_of_512_on_a_gpu(heads: tuple[int, int], nan_memory: None) -> None:
    """As near to float64 as SDPA document by document, in twice its distance; one-token documents and a tail."""
    from pronghorn.attention.masked import per_document_attention

    lengths = [1, 300, 1, 64, 130, 1, 15]
    packed = PackedBatch.build(lengths, tokens=sum(lengths), device=torch.device("cuda"))
    sizes = [(sum(lengths), count, 512) for count in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    d_out = torch.randn_like(q)
    scale = 512**-0.5
    options = explicit.Options.choose("auto", q, packed, scale, None)
    assert options.way == "efficient"
    out, state = explicit.forward(q, k, v, options)
    grads = explicit.backward(d_out, q, k, v, out, list(state), options)[0].split([heads[0], heads[1], heads[1]], 1)

    def reference(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = per_document_attention(*leaves, packed, scale, None)
        return [y.detach(), *torch.autograd.grad(y, leaves, d_out.to(dtype))]

    exact, plain = reference(torch.float64), reference(torch.bfloat16)
    for mine, theirs, right in zip((out, *grads), plain, exact, strict=True):
        limit = 2 * (theirs.double() - right).norm() + 1e-5 * right.norm()
        assert (mine.double() - right).norm() <= limit
    windowed = explicit.Options.choose("auto", q, packed, scale, 16)
    assert windowed.way == "per_document"


@pytest.mark.parametrize("kind", KINDS)
def test_profile_names_the_parts_of_blocks_that_are_spread_over_their_layer(kind: str) -> None:
    model = with_adapters(tiny_model(kind))
    handle = attach(model, layers="fused")
    assert inner_dimensions(handle) >= {8, 16}
    parts = parts_of(handle.model)
    layer = handle.model.model.layers[0]
    assert parts[layer] == "layer" and parts[layer.self_attn] == "attention" and parts[layer.mlp] == "feed-forward"
    others = [getattr(layer, name, None) for name in ("experts", "per_layer_input_gate")]
    assert {parts[module] for module in others if module is not None} <= {"feed-forward", "lora"}


@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_logits_of_the_last_rows_are_those_of_all_rows(layers: str) -> None:
    """transformers leaves rows out before the layers that share keys, and attention has no mask to tell which."""
    model = tiny_model("gemma4_text").eval()
    ids = packed_row(LENGTHS, ROW)["input_ids"][:, :14]
    exact = model(input_ids=ids).logits
    attach(model, layers=layers)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    packed = model(input_ids=ids, position_ids=positions).logits
    for rows in (1, 4):
        given = {"input_ids": ids, "logits_to_keep": rows}
        torch.testing.assert_close(model(**given).logits, exact[:, -rows:], rtol=1e-5, atol=1e-5)
        masked = model(**given, attention_mask=torch.ones_like(ids)).logits  # as TRL's DPO and GRPO ask
        torch.testing.assert_close(masked, exact[:, -rows:], rtol=1e-5, atol=1e-5)
        found = model(**given, position_ids=positions).logits
        torch.testing.assert_close(found, packed[:, -rows:], rtol=1e-5, atol=1e-5)


def test_a_static_cache_generates_what_a_dynamic_one_does() -> None:
    model, ids = tiny_model("gemma4_text").eval(), packed_row(LENGTHS, ROW)["input_ids"][:, :14]
    attach(model, layers="fused")
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    given |= {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    logits = [torch.stack(model.generate(**given, cache_implementation=kind).logits) for kind in ("dynamic", "static")]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", ["packed", "padded"])
@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text"])
def test_reentrant_checkpointing_which_loses_their_gradients_is_refused(model_type: str, batch: str) -> None:
    """As transformers alone loses them; with nothing to learn, and under a plan, there is nothing to lose."""
    if model_type == "gemma4_text":
        model = tiny_model(model_type)
    else:
        sizes = {"num_key_value_heads": 2, "head_dim": 16, "num_kv_shared_layers": 2, "laurel_rank": 8}
        sizes |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 131, "num_hidden_layers": 5}
        layers = {"layer_types": PATTERN, "activation_sparsity_pattern": [0.0] * 5, "sliding_window": 8}
        model = generic_model(model_type, **sizes, **layers)
    ids = torch.arange(3, 40)[None]
    row = packed_row([20], 32) if batch == "packed" else {"input_ids": ids, "labels": ids, "use_cache": False}
    attach(model)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            with pytest.raises(UnsupportedError, match=r"layers share keys and values.*'use_reentrant': False"):
                model(**row)
            with torch.no_grad():
                model(**row)
        else:
            model(**row).loss.backward()
    attach(model, Plan((Policy.RECOMPUTE_LAYER,)))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model(**row).loss.backward()
