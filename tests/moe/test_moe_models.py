"""Experts of whole models against transformers' own eager experts and PEFT's folding: losses and every gradient."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from pronghorn.data.batch import Collator
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.models import experts
from pronghorn.models.attach import attach
from pronghorn.models.expert_gradients import count_tokens
from pronghorn.models.lora import add_lora
from pronghorn.train.gradients import gradient_flags, gradient_norms
from support.documents import one_document_at_a_time
from support.tiny import in_4_bits, packed_row, tiny_model
from support.tolerance import ThreeWay

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 5, "intermediate_size": 24, "swiglu_limit": 0.5},
}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tiny_moe(family: str, **changes: Any) -> Any:
    """A float32 model in training mode with transformers' eager experts, its weights spread enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_experts_implementation("eager")
    return model.train()


def with_expert_lora(model: Any, **options: Any) -> Any:
    """PEFT's own LoRA on attention and experts, B away from zero."""
    from peft import LoraConfig, get_peft_model

    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": TARGETS, **options}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(**given))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return adapted


def losses_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(3)).to(model.device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, missing
    return {"loss": loss.detach(), **found}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, wanted in theirs.items():
        torch.testing.assert_close(
            mine[name], wanted, rtol=2e-4, atol=2e-6 + 2e-5 * wanted.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("trained", ["everything", "expert lora", "attention lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_eager_experts(family: str, trained: str) -> None:
    model = tiny_moe(family)
    if trained != "everything":
        model = with_expert_lora(model, **({} if trained == "expert lora" else {"target_parameters": None}))
    other = copy.deepcopy(model)
    base = other if trained == "everything" else other.get_base_model()
    layers = experts.enable(base, "once")
    assert layers is not None and layers.refused is None
    assert base.config._experts_implementation == experts.NAME
    assert_same(losses_and_gradients(other), losses_and_gradients(model))


DOCUMENTS = [9, 1, 14, 6]
ATTACHED = ["mixtral", "qwen3_moe", "olmoe"]


@pytest.mark.parametrize("family", ATTACHED)
def test_attached_routes_once_or_by_a_loop_and_detaches(family: str, tmp_path: Path) -> None:
    plain, model = (with_expert_lora(tiny_moe(family)) for _ in range(2))
    batch = packed_row(DOCUMENTS, 40, vocab=61)
    found = {}
    for routing, path in (("loop", "transformers' eager"), ("once", "routed once, products by loop")):
        handle = attach(model, experimental={"moe_routing": routing})
        report = {line.part: line.path for line in handle.report}
        assert report["experts"] == path
        assert report.get("expert LoRA") == ("low-rank products beside the experts'" if routing == "once" else None)
        assert attach(model, experimental={"moe_routing": routing}) is handle
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found[routing] = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert_same(found["once"], found["loop"])
    model.save_pretrained(tmp_path / "attached")
    handle.detach()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert model.get_base_model().config._experts_implementation == "eager"
    plain.save_pretrained(tmp_path / "plain")
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "attached").iterdir()} == files
    assert "adapter_model.safetensors" in files


def test_several_adapters_are_folded_by_peft_and_said_so() -> None:
    from peft import LoraConfig

    model = with_expert_lora(tiny_moe("qwen3_moe"))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=TARGETS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                parameter.normal_(0, 0.1)
    model.base_model.set_adapter(["default", "second"])
    other = copy.deepcopy(model)
    handle = attach(other)
    line = next(line for line in handle.report if line.part == "expert LoRA")
    assert line.path == "folded into the weights by PEFT" and line.why == "several adapters are active at once"
    assert_same(losses_and_gradients(other), losses_and_gradients(model))


@pytest.mark.parametrize("first", ["attached", "adapted"])
@pytest.mark.parametrize("whole", ["experts", "mlp"])
def test_experts_that_peft_copied_to_train_them_whole(whole: str, first: str) -> None:
    """A copy has a configuration of its own, which names the experts' implementation."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=[whole])
    model, batch = tiny_moe("qwen3_moe"), packed_row([5, 20, 7], 40, vocab=61)
    if first == "attached":
        attach(model, layers="fused")
    torch.manual_seed(0)
    model = get_peft_model(model, config).train()
    handle = attach(model, layers="fused")
    mine = model(**batch).loss
    mine.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any(f"{whole}.modules_to_save.default" in name for name in found)
    of_experts = list(experts.expert_modules(model))
    assert len(of_experts) == 4 and {module.config._experts_implementation for module in of_experts} == {experts.NAME}
    handle.detach()
    assert {module.config._experts_implementation for module in of_experts} == {"eager"}
    model.zero_grad()
    _, expected = one_document_at_a_time(model, batch)
    expected.backward()
    assert mine.item() == pytest.approx(expected.item(), rel=1e-6)
    stock = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, stock, rtol=1e-4, atol=2e-6)


def test_threads_have_adapters_of_their_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generate at once: both are among the same experts before one leaves them."""
    model, computed, both = with_expert_lora(tiny_moe("qwen3_moe")).eval(), experts.experts, Barrier(2)
    attach(model)
    prompts = [torch.arange(3, 3 + length)[None] for length in (5, 9)]

    def waiting(*args: Any) -> Any:
        both.wait(timeout=60)
        out = computed(*args)
        both.wait(timeout=60)
        return out

    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for ids in prompts]
        monkeypatch.setattr(experts, "experts", waiting)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(torch.no_grad()(lambda ids: model(ids, use_cache=False).logits), prompts))
    torch.testing.assert_close(found, expected)


def test_an_adapter_put_on_after_attach_and_a_disabled_one() -> None:
    model = tiny_moe("mixtral")
    attach(model)
    late = with_expert_lora(model)
    early = with_expert_lora(tiny_moe("mixtral"))
    attach(early)
    assert_same(losses_and_gradients(late), losses_and_gradients(early))
    ids = torch.arange(3, 20)[None]
    with late.disable_adapter(), early.disable_adapter():
        base = tiny_moe("mixtral")(input_ids=ids).logits
        for adapted in (late, early):
            torch.testing.assert_close(adapted(input_ids=ids).logits, base)
    assert not torch.allclose(early(input_ids=ids).logits, base)


@pytest.mark.parametrize("weights", ["dense", "nf4"])
def test_a_forward_between_a_late_adapter_s_forward_and_backward(weights: str) -> None:
    """As reference and KL passes are in preference training."""
    found, batch = [], packed_row([5, 20, 7], 40, vocab=61)
    for late in (True, False):
        model = tiny_moe("mixtral")
        model = in_4_bits(model) if weights == "nf4" else model
        if late:
            attach(model)
        model = with_expert_lora(model)
        if not late:
            attach(model)
        loss = model(**batch).loss
        with torch.no_grad():
            reference = model(**batch).loss
        (loss - reference + model(**batch).loss).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


@pytest.mark.parametrize("family", ATTACHED)
def test_the_auxiliary_loss_is_the_familys_without_the_padded_tail(family: str) -> None:
    """Against transformers' own forward of one document with its own loss, which has no tail."""
    model = tiny_moe(family, output_router_logits=True, router_aux_loss_coef=0.5)
    other = copy.deepcopy(model)
    attach(model)
    batch = packed_row([23], 40, vocab=61)
    out = model(**batch)
    out.loss.backward()
    ids, labels = (batch[name][:, :23] for name in ("input_ids", "labels"))
    wanted = other(input_ids=ids, labels=labels)
    wanted.loss.backward()
    torch.testing.assert_close(out.aux_loss, wanted.aux_loss)
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (model, other)]
    assert_same(*({"loss": o.loss.detach(), **g} for o, g in zip((out, wanted), gradients, strict=True)))
    whole = model(**batch, num_items_in_batch=2 * batch["packed"].n_labels)
    torch.testing.assert_close(whole.loss * 2, out.loss)


def test_an_auxiliary_loss_without_experts_is_refused() -> None:
    model = tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2], output_router_logits=True)
    attach(model)
    with pytest.raises(UnsupportedError, match=r"no layer of it routes.*output_router_logits to false"):
        model(**packed_row([23], 40))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_hooks_on_experts_activations_are_not_passed_over(family: str) -> None:
    """It is computed, not called: hooked before attach, experts go transformers' way; after it, an error."""
    model, batch = tiny_model(family), packed_row([40, 13], 64)
    activation = next(experts.expert_modules(model)).act_fn

    def halved(*call: Any) -> torch.Tensor:
        return call[-1] * 0.5

    handle = attach(model)
    hook = activation.register_forward_hook(halved)
    with pytest.raises(UnsupportedError, match=r"since attach, the activation of .* carries hooks"):
        model(**batch)
    handle.detach()
    _, right = one_document_at_a_time(model, batch)
    hooked = attach(model)
    torch.testing.assert_close(model(**batch).loss, right.float())
    assert any("carries hooks" in path.why for path in hooked.report)
    hook.remove()


def test_a_loop_needs_experts_and_a_known_name() -> None:
    with pytest.raises(ConfigError, match="without experts"):
        attach(tiny_model("llama"), experimental={"moe_routing": "loop"})
    with pytest.raises(ConfigError, match="unknown"):
        attach(tiny_moe("mixtral"), experimental={"moe_routing": "twice"})


def test_experts_that_never_train_are_found_and_idle_ones_are_not_errors() -> None:
    model = with_expert_lora(tiny_moe("mixtral", num_local_experts=16), target_parameters=TARGETS)
    attach(model)
    with count_tokens(model) as routed:
        model(**packed_row([5], 5, vocab=61)).loss.backward()
    assert routed.untrained() == []
    assert routed.idle(), "five tokens can't reach sixteen experts"
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    assert gradient_flags(gradient_norms(trained, torch.device("cpu")))[0].all(), "the watch would call an adapter dead"
    first = model.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    seen = int(routed.counts[first].argmax())
    names = dict(model.named_parameters())
    a, b = (next(n for n in names if f"experts.lora_{x}" in n and "layers.0." in n) for x in "AB")
    names[a].grad.view(16, -1)[seen] = 0
    names[b].grad.view(-1, 16)[:, seen] = 0
    assert {(name, expert) for name, expert, _ in routed.untrained()} == {(a, seen), (b, seen)}


@pytest.mark.slow
def test_expert_lora_learns_what_attention_lora_can_not() -> None:
    """A next token that depends on the current one alone, by a table: rank 2 on attention is left far behind, with
    twice the steps too."""
    follows = torch.randperm(58, generator=torch.Generator().manual_seed(6)) + 3
    rows = [[start] for start in range(3, 61, 2)]
    for row in rows:
        for _ in range(3):
            row.append(int(follows[row[-1] - 3]))
    flat = [token for row in rows for token in row]
    given = {"input_ids": flat, "labels": flat, "lengths": [len(row) for row in rows]}
    batch = Collator(len(flat), pad_token_id=0)([given])
    losses = {}
    for name, targets, steps in (("experts", TARGETS, 80), ("attention", None, 160)):
        linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
        options = {"target_modules": linears, "target_parameters": targets}
        model = with_expert_lora(tiny_moe("qwen3_moe"), r=2, lora_alpha=4, **options)
        attach(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["experts"] < 0.7 * losses["attention"], losses


def check_16_bits(model: Any, device: str, autocast: torch.dtype | None) -> None:
    """One layer, so that both ways route alike: experts' gradients as near to float64 as transformers' and PEFT's."""
    exact = losses_and_gradients(copy.deepcopy(model).cpu().double())
    errors = ThreeWay()
    results = []
    for way in ("eager", experts.NAME):
        other = copy.deepcopy(model)
        if way == experts.NAME:
            experts.enable(other.get_base_model() if hasattr(other, "peft_config") else other, "once")
        with torch.autocast(device, autocast, enabled=autocast is not None):
            results.append(losses_and_gradients(other))
    for name, wanted in exact.items():
        plain, mine = (result[name] for result in results)
        assert mine.dtype == plain.dtype
        if "experts" in name or "router" in name or ".gate." in name:
            errors.add("gradients", *(part.cpu() / wanted.abs().max() for part in (mine, plain, wanted)))
    errors.check()


@pytest.mark.parametrize("trained", ["everything", "expert lora"])
def test_autocast_computes_in_bfloat16_and_gives_float32_gradients(trained: str) -> None:
    model = tiny_moe("qwen3_moe", num_hidden_layers=1)
    check_16_bits(model if trained == "everything" else with_expert_lora(model), "cpu", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
@pytest.mark.parametrize("trained", ["everything", "expert lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_on_a_gpu(family: str, trained: str, dtype: Any, nan_memory: None) -> None:
    autocast = torch.bfloat16 if dtype == "autocast" else None
    model = tiny_moe(family, num_hidden_layers=1).to("cuda", torch.float32 if autocast else dtype)
    check_16_bits(model if trained == "everything" else with_expert_lora(model, r=4), "cuda", autocast)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layers", ["stock", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_another_gpu_than_the_current_one(family: str, layers: Any, nan_memory: None) -> None:
    """Triton launches on the current device: the model's is made current for the forward."""
    found = []
    for device in ("cuda:0", "cuda:1"):
        model = with_expert_lora(tiny_moe(family)).to(device, torch.bfloat16)
        attach(model, layers=layers)
        with torch.cuda.device(0):
            batch = {name: value.to(device) for name, value in packed_row(DOCUMENTS, 40, vocab=61).items()}
            model(**batch).loss.backward()
        found.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_default_targets_are_those_of_the_layers_that_there_are(family: str, kind: str) -> None:
    model = add_lora(tiny_model(family, num_hidden_layers=2, layer_types=[kind] * 2))
    adapted = model.peft_config["default"].target_modules
    assert ("q_proj" in adapted, "out_proj" in adapted) == (kind == "full_attention", kind == "linear_attention")


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss"])
def test_a_dense_model_s_list_of_targets_adapts_attention(family: str) -> None:
    """Scripts give all seven linears, whatever the model; of other lists nothing is left out."""
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = add_lora(tiny_model(family), target_modules=seven)
    assert set(model.peft_config["default"].target_modules) == set(seven[:4])
    with pytest.raises(ConfigError, match="target module 'up_proj' is not in the model"):
        add_lora(tiny_model(family), target_modules=["q_proj", "up_proj"])
