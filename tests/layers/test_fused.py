"""The fast path of decoder layers against transformers and PEFT: every family, gradients of adapters and inputs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from huggingface_hub import save_torch_model
from peft import LoraConfig
from safetensors.torch import load_file, save_model

from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import UnsupportedError
from pronghorn.layers.build import LayerBuilder
from pronghorn.layers.decoder import is_fused
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from support.documents import DRAWS, LENGTHS, ROW, gradients, one_document_at_a_time
from support.fused import BIASED, WIDE, compare, loss_and_gradients, path_of_layers, with_adapters
from support.tiny import FAMILIES, packed_row, tiny_model
from support.tolerance import ThreeWay

"""Of a tiny model whose down has A below its weight."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, nan_memory: None) -> None:
    compare(with_adapters(tiny_model(family)), packed_row(LENGTHS, ROW))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_fine_tuning(family: str, nan_memory: None) -> None:
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(2)]
    compare(tiny_model(family), *batches)
    compare(tiny_model(family, tie_word_embeddings=True, attention_bias=True), *batches)


def test_masters_in_float32_under_autocast() -> None:
    """Weights are rounded for the products only: their gradients are float32."""
    model = tiny_model("llama")
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(DRAWS)]
    compare(model, *batches, dtype=torch.bfloat16, masters=True)
    attach(model, layers="fused")
    with torch.autocast("cpu", torch.bfloat16):
        model(**batches[0]).loss.backward()
    assert {grad.dtype for grad in gradients(model).values()} == {torch.float32}


@pytest.mark.parametrize("plan", [Plan.keep(), Plan.recompute()])
def test_copies_of_weights_go_with_what_the_backward_needs(plan: Plan) -> None:
    """In 16 bits, of float32 masters: gone after a forward that recomputes, and after a backward, though the loss is
    held."""
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    attach(model, plan, layers="fused")
    shapes = {tuple(layer.mlp.down_proj.weight.shape) for layer in model.model.layers}

    def copies() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sum(each.dtype is torch.bfloat16 and tuple(each.shape) in shapes for each in tensors)

    before = copies()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    assert copies() - before == (0 if plan == Plan.recompute() else len(model.model.layers))
    loss.backward()
    assert copies() == before and loss.grad_fn is not None


SUBSETS: dict[str, dict[str, Any]] = {
    "q alone": {"target_modules": ["q_proj"]},
    "v and up": {"target_modules": ["v_proj", "up_proj"]},
    "k and gate": {"target_modules": ["k_proj", "gate_proj"]},
    "o and down": {"target_modules": ["o_proj", "down_proj"]},
    "odd rank": {"r": 3, "lora_alpha": 5},
    "rank 70": {"r": 70, "lora_alpha": 70},
    "rsLoRA": {"use_rslora": True, "r": 3},
}


@pytest.mark.parametrize("options", SUBSETS.values(), ids=SUBSETS)
def test_adapters_on_some_linears(options: dict[str, Any]) -> None:
    compare(with_adapters(tiny_model("llama"), **options), packed_row(LENGTHS, ROW))


def test_adapters_of_different_ranks() -> None:
    from peft import LoraConfig, get_peft_model

    smaller = {"q_proj": 4, "up_proj": 2}
    config = LoraConfig(
        r=8,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "gate_proj", "up_proj"],
        rank_pattern=smaller,
        alpha_pattern=smaller,
        init_lora_weights=False,
    )
    compare(get_peft_model(tiny_model("llama"), config), packed_row(LENGTHS, ROW))


@pytest.mark.gpu
@pytest.mark.parametrize("options", SUBSETS.values(), ids=SUBSETS)
def test_adapters_on_some_linears_on_a_gpu(options: dict[str, Any], nan_memory: None) -> None:
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(DRAWS)]
    compare(with_adapters(tiny_model("llama", **WIDE), **options), *batches, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, WIDE])
def test_biases_and_tied_embeddings(changes: dict[str, Any]) -> None:
    compare(with_adapters(tiny_model("llama", **changes)), packed_row(LENGTHS, ROW))


@pytest.mark.parametrize("lengths", [[1, 1, 1, 9], [63], [5] * 12])
def test_odd_rows(lengths: list[int]) -> None:
    compare(with_adapters(tiny_model("qwen3")), packed_row(lengths, sum(lengths) + 3, seed=4))


@pytest.mark.parametrize("recompute", [True, False])
def test_recompute_changes_nothing(recompute: bool) -> None:
    from pronghorn.memory.plan import Plan

    model, batch = with_adapters(tiny_model("gemma3_text")), packed_row(LENGTHS, ROW)
    attach(model, Plan.keep(), layers="fused")
    loss, grads = loss_and_gradients(model, batch)
    attach(model, Plan.recompute() if recompute else Plan.keep(), layers="fused")
    again, same = loss_and_gradients(model, batch)
    assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_policies_change_what_is_kept_only(family: str, device: str) -> None:
    """Norms' results, or gate and up too, computed again by the same kernels: the same bits, fewer bytes kept. A layer
    that would be recomputed as a whole, if that weren't switched off, keeps everything."""
    from pronghorn.memory.plan import Policy

    model = with_adapters(tiny_model(family)).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    batch = {name: value.to(device) for name, value in packed_row(LENGTHS, ROW).items()}
    attach(model, layers="fused", graph="off", attention="per_document" if device == "cpu" else "auto")
    kept: dict[Policy, int] = {}
    found = []
    for policy in (Policy.KEEP, Policy.RECOMPUTE_NORMS, Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER):
        for layer in model.get_base_model().model.layers:
            layer._pronghorn_policy = policy
            assert not layer.gradient_checkpointing
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(**batch).loss
        kept[policy] = sum(sizes.values())
        loss.backward()
        found.append((loss.item(), {name: grad.clone() for name, grad in gradients(model).items()}))
    config = model.get_base_model().config
    element, layers = next(model.parameters()).element_size(), config.num_hidden_layers
    normed, gate_up = (n * ROW * layers * element for n in (2 * config.hidden_size, 2 * config.intermediate_size))
    assert kept[Policy.KEEP] - kept[Policy.RECOMPUTE_NORMS] == normed
    assert kept[Policy.RECOMPUTE_NORMS] - kept[Policy.RECOMPUTE_MLP] == gate_up
    assert kept[Policy.RECOMPUTE_LAYER] == kept[Policy.KEEP]
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(grads[name], grad) for name, grad in found[0][1].items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_retained_graph_gives_the_same_again(device: str) -> None:
    """gate·up is overwritten in a last backward only."""
    model = with_adapters(tiny_model("llama")).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    attach(model, layers="fused", graph="off")
    loss = model(**{name: value.to(device) for name, value in packed_row(LENGTHS, ROW).items()}).loss
    found = []
    for retain in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        found.append({name: grad.clone() for name, grad in gradients(model).items()})
    for again in found[1:]:
        assert all(torch.equal(again[name], grad) for name, grad in found[0].items())


@pytest.mark.parametrize(("family", "layers"), [("llama", "fused"), ("gemma4_text", "fused"), ("gpt_oss", "stock")])
def test_a_second_derivative_is_refused(family: str, layers: Any) -> None:
    """A penalty on gradients was left out, without a word, where it came through what is computed here."""
    model, batch = with_adapters(tiny_model(family)), packed_row(LENGTHS, ROW)
    attach(model, layers=layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ids = batch["input_ids"][:, :9]
    for loss in (model(**batch).loss, model(input_ids=ids, labels=ids).loss):
        with pytest.raises(UnsupportedError, match="second derivatives"):
            torch.autograd.grad(loss, trained, create_graph=True)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_an_update_between_forward_and_backward_is_an_error(layers: Any, full: bool) -> None:
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    model = model if full else with_adapters(model)
    attach(model, layers=layers)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    first, second = model(**batch).loss, model(**batch).loss
    second.backward()
    optimizer.step()
    model(**batch)  # which reads the adapters anew
    with pytest.raises(RuntimeError, match=r"updated between|modified by an inplace"):
        first.backward()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_update_of_any_weight_is_noticed(family: str, full: bool) -> None:
    """Each alone, of layers that are fused as a whole and of attention that is."""
    model, batch = tiny_model(family), packed_row(LENGTHS, ROW)
    model = model if full else with_adapters(model)
    attach(model, layers="fused")
    weights = [p for name, p in model.named_parameters() if "layers.1." in name and p.requires_grad]
    for weight in weights:
        loss = model(**batch).loss
        with torch.no_grad():
            weight.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"updated between|modified by an inplace"):
            loss.backward()
    assert len(weights) > 7


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "forward"]


@pytest.mark.matrix(8)
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", ["mlp", "self_attn.q_proj", "mlp.up_proj.lora_A.default", "input_layernorm"])
def test_hooks_on_what_a_layer_calls_run(where: str, kind: str) -> None:
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    handle = attach(model, layers="fused")
    expected, grads = loss_and_gradients(model, batch)
    called: list[int] = []
    module = model.get_base_model().model.layers[1].get_submodule(where)
    if kind == "forward":
        plain = module.forward
        module.forward = lambda *args: called.append(1) or plain(*args)
    else:
        taken = getattr(module, kind)(lambda *_: called.append(1))
    loss, same = loss_and_gradients(model, batch)
    assert called and loss == pytest.approx(expected, rel=1e-6)
    assert [is_fused(layer) for layer in model.get_base_model().model.layers] == [True, False, True]
    torch.testing.assert_close(same, grads)
    assert path_of_layers(handle)[1] == "modules inside the layers carry hooks, or a forward of their own"
    called.clear()
    if kind == "forward":
        del module.forward
    else:
        taken.remove()
    assert loss_and_gradients(model, batch)[0] == expected and not called
    assert path_of_layers(handle)[0] == "fused"


def test_hidden_states_that_were_asked_for_leave_layers_fused() -> None:
    """transformers' hooks stay where they were put by the first call that asked."""
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    backbone, found = model.get_base_model().model, {}
    for layers in ("stock", "fused"):
        attach(model, layers=layers)
        for asked in ("output_hidden_states", "output_attentions"):
            found[layers, asked] = backbone(**batch, **{asked: True})
    states = [found[layers, "output_hidden_states"].hidden_states for layers in ("stock", "fused")]
    torch.testing.assert_close(*states)
    assert len(states[0]) == 4 and found["fused", "output_attentions"].attentions == ()
    assert all(is_fused(layer) for layer in backbone.layers)


def test_a_layer_called_by_hand() -> None:
    """By transformers' order of arguments, or by keywords only."""
    model, batch = tiny_model("qwen3"), packed_row(LENGTHS, ROW)
    layer, found = model.model.layers[0], []
    x, packed = model.model.embed_tokens(batch["input_ids"]), batch["packed"]
    turns = model.model.rotary_emb(x, batch["position_ids"])
    for layers in ("stock", "fused"):
        attach(model, layers=layers)
        found += [
            layer(x, None, batch["position_ids"], None, False, turns, packed=packed),
            layer(hidden_states=x, position_embeddings=turns, packed=packed),
            layer(x.mT.contiguous().mT, position_embeddings=turns, packed=packed),
        ]
    for y in found[1:]:
        torch.testing.assert_close(y, found[0])


@pytest.mark.parametrize("name", ["post_attention_layernorm", "q_norm"])
def test_norms_that_peft_wrapped(name: str) -> None:
    model, batch = with_adapters(tiny_model("qwen3"), modules_to_save=[name]), packed_row(LENGTHS, ROW)
    handle = attach(model, layers="stock")
    expected, grads = loss_and_gradients(model, batch)
    handle = attach(model, layers="fused")
    loss, same = loss_and_gradients(model, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(same, grads)
    assert path_of_layers(handle)[1] == "ModulesToSaveWrapper has no kernel"


def test_an_adapter_on_linears_that_another_trains_whole() -> None:
    """PEFT puts the second one's A and B into the wrapper of the first one's copies, which passes their names on."""
    torch.manual_seed(0)  # some draws of such large adapters round so far that no gradient is close
    model = with_adapters(tiny_model("llama"), target_modules=["q_proj"], modules_to_save=["gate_proj", "down_proj"])
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    batch, found = packed_row(LENGTHS, ROW), []
    for layers in ("stock", "fused"):
        attach(model, layers=layers)
        for adapter in ("second", "default", "second"):
            model.set_adapter(adapter)
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            # the second's A and B in the first one's copies are trained, too, and read by nobody
            found.append((loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    for expected, ours in zip(found[:3], found[3:], strict=True):
        assert ours[0] == pytest.approx(expected[0], rel=1e-6)
        torch.testing.assert_close(ours[1], expected[1], rtol=1e-4, atol=1e-5)


def test_products_are_in_autocast_s_dtype() -> None:
    model, batch = tiny_model("llama"), packed_row(LENGTHS, ROW)
    attach(model, layers="fused")
    kept: list[torch.Tensor] = []
    keep = lambda tensor: kept.append(tensor) or tensor  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.model(**batch)
    wide = 2 * model.config.intermediate_size
    assert {tensor.dtype for tensor in kept if tensor.shape[-1] == wide} == {torch.bfloat16}


@pytest.mark.parametrize("trained", ["layernorm", "q_norm", "layers.1.input_layernorm", "bias"])
def test_small_parts_that_are_trained_alone(trained: str) -> None:
    """In float64, but for transformers' norms, which are in float32."""
    model = tiny_model("qwen3", attention_bias=True).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    batch, found = packed_row(LENGTHS, ROW), {}
    for layers in ("stock", "fused"):
        attach(model, layers=layers)
        found[layers] = loss_and_gradients(model, batch)
    assert found["fused"][0] == pytest.approx(found["stock"][0], rel=1e-7)
    torch.testing.assert_close(found["fused"][1], found["stock"][1], rtol=1e-5, atol=1e-7)


def test_a_norm_that_was_replaced_is_noticed() -> None:
    model, batch = with_adapters(tiny_model("qwen3")), packed_row(LENGTHS, ROW)
    layer = model.get_base_model().model.layers[0]
    for norm in (layer.input_layernorm, layer.self_attn.q_norm):
        found = []
        for layers in ("fused", "stock", "fused"):
            attach(model, layers=layers)
            if layers == "stock":
                norm.weight = torch.nn.Parameter(norm.weight * 2)
            found.append(loss_and_gradients(model, batch)[0])
        assert found[0] != found[1] == pytest.approx(found[2], rel=1e-6)


def test_detach_gives_the_modules_back() -> None:
    model = with_adapters(tiny_model("qwen3"))
    base = model.get_base_model()
    classes = {name: type(module) for name, module in base.named_modules()}
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = attach(model, layers="fused")
    batch = packed_row(LENGTHS, ROW)
    loss_and_gradients(model, batch)
    assert type(base.model.layers[0]) is not classes["model.layers.0"]
    assert type(base.model.layers[0]).__name__ == "Qwen3DecoderLayer"
    handle.detach()
    assert {name: type(module) for name, module in base.named_modules()} == classes
    assert not [name for name, module in base.named_modules() if "_pronghorn_run" in module.__dict__]
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("copied", ["input_layernorm", "self_attn"])
def test_detach_gives_back_what_peft_copied_since(copied: str) -> None:
    model = tiny_model("qwen3")
    handle = attach(model, layers="fused")
    adapted = add_lora(model, target_modules=["up_proj"], modules_to_save=[copied])
    loss_and_gradients(adapted, packed_row(LENGTHS, ROW))
    handle.detach()
    files = {type(module).forward.__code__.co_filename for module in adapted.modules()}
    assert not [file for file in files if "pronghorn" in Path(file).parts]
    assert not [name for name, each in adapted.named_modules() if any("pronghorn" in kept for kept in each.__dict__)]


def test_saving_gives_the_same_bytes(tmp_path: Any) -> None:
    """Merged storage is the parameters' own affair: files of an attached, stepped model are those of a plain one."""
    plain = with_adapters(tiny_model("llama", **WIDE))
    ours = copy.deepcopy(plain)
    attach(ours, layers="fused")
    ours(**packed_row(LENGTHS, ROW)).loss.backward()
    for name, model in (("plain", plain), ("ours", ours)):
        model.save_pretrained(tmp_path / name)
        model.get_base_model().save_pretrained(tmp_path / name / "base")
    for file in ("adapter_model.safetensors", "base/model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()


def by_accelerate(model: Any, folder: Path) -> None:
    Accelerator(cpu=True).save_model(model, folder)


def by_huggingface_hub(model: Any, folder: Path) -> None:
    save_torch_model(model, folder)


def by_safetensors(model: Any, folder: Path) -> None:
    save_model(model, str(folder / "model.safetensors"))


@pytest.mark.parametrize("save", [by_accelerate, by_huggingface_hub, by_safetensors])
def test_whoever_saves_state_dict_saves_every_weight(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """Merged weights are slices of one storage, of which accelerate would save one, and others none."""
    model = with_adapters(tiny_model("llama", **WIDE))
    attach(model, layers="fused")
    model(**packed_row(LENGTHS, ROW)).loss.backward()
    save(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(saved[name], parameter) for name, parameter in model.named_parameters())


def test_a_checkpoint_of_accelerate_s_is_loaded_again(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, batch = with_adapters(tiny_model("llama", **WIDE)), packed_row(LENGTHS, ROW)
    attach(model, layers="fused")
    prepared = accelerator.prepare(model)
    before = loss_and_gradients(prepared, batch)
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    accelerator.load_state(str(tmp_path))
    after = loss_and_gradients(prepared, batch)
    assert after[0] == before[0] and all(torch.equal(after[1][name], grad) for name, grad in before[1].items())


def test_state_dict_gives_merged_weights_where_they_lie() -> None:
    model = with_adapters(tiny_model("llama", **WIDE))
    attach(model, layers="fused")
    model(**packed_row(LENGTHS, ROW)).loss.backward()
    with torch.inference_mode():
        state, kept = model.state_dict(), model.state_dict(keep_vars=True)
    assert not any(map(torch.is_inference, state.values()))
    for name, parameter in model.named_parameters():
        assert kept[name] is parameter and state[name].data_ptr() == parameter.data_ptr()
        assert state[name].untyped_storage().nbytes() == parameter.nbytes


def test_a_wide_input_s_adapter_lies_below_the_weight() -> None:
    """Down: its weight's storage has room for A, unless the rank is odd."""
    batch = packed_row(LENGTHS, ROW)
    for rank, below in ((8, 8), (16, 16), (3, 0)):
        model = with_adapters(tiny_model("llama", **WIDE), r=rank)
        attach(model, layers="fused")
        loss_and_gradients(model, batch)
        mlp = model.get_base_model().model.layers[0].mlp
        rows, columns = mlp.down_proj.base_layer.weight.shape
        assert columns >= 2 * rows
        assert mlp.down_proj.base_layer.weight.untyped_storage().nbytes() == 4 * (rows + below) * columns
        up, gate = (getattr(mlp, name).base_layer.weight.untyped_storage() for name in ("up_proj", "gate_proj"))
        assert up.data_ptr() == gate.data_ptr() and up.nbytes() == 4 * 2 * rows * columns


def test_frozen_weights_are_merged() -> None:
    """Those that are trained stay apart: under autocast a forward copies them, and saving would copy each slice."""
    for trained in (False, True):
        model = tiny_model("llama").requires_grad_(trained)
        attach(model, layers="fused").merge_weights()
        up, gate = (getattr(model.model.layers[0].mlp, name).weight for name in ("up_proj", "gate_proj"))
        assert (up.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()) is not trained


def test_weights_merged_with_room_for_adapters_stay() -> None:
    model = tiny_model("llama", **WIDE)
    handle = attach(model, layers="fused")
    adapted = with_adapters(model)
    handle.merge_weights()
    before = {name: parameter.data_ptr() for name, parameter in adapted.named_parameters()}
    adapted(**packed_row(LENGTHS, ROW))
    assert {name: parameter.data_ptr() for name, parameter in adapted.named_parameters()} == before


def test_nothing_is_put_together_for_layers_that_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerBuilder, "_reason", lambda *_: "head_dim 80 is not a power of two")
    model = with_adapters(tiny_model("llama"))
    attach(model, layers="fused").merge_weights()
    model(**packed_row(LENGTHS, ROW))
    up, gate = (getattr(model.get_base_model().model.layers[0].mlp, name) for name in ("up_proj", "gate_proj"))
    places = [each.base_layer.weight.untyped_storage().data_ptr() for each in (up, gate)]
    assert len(set(places)) == 2


def test_weights_that_were_moved_are_merged_again() -> None:
    model, batch = with_adapters(tiny_model("llama", **WIDE)), packed_row(LENGTHS, ROW)
    attach(model, layers="fused")
    loss, grads = loss_and_gradients(model, batch)
    model.double()
    model.float()  # every weight in a storage of its own again
    copied = copy.deepcopy(model)
    for each in (model, copied):
        again, same = loss_and_gradients(each, batch)
        assert again == loss and all(torch.equal(grads[name], same[name]) for name in grads)
    base = copied.get_base_model().model.layers[1]
    with torch.no_grad():
        base.self_attn.k_proj.base_layer.weight.mul_(2)
        base.mlp.gate_proj.base_layer.weight = torch.nn.Parameter(base.mlp.gate_proj.base_layer.weight * 2, False)
    changed, _ = loss_and_gradients(copied, batch)
    handle = attach(copied, layers="stock")
    assert changed != loss and changed == pytest.approx(loss_and_gradients(copied, batch)[0], rel=1e-6)
    handle.detach()


def test_all_weights_of_a_layer_are_moved_where_one_is() -> None:
    """Merged again when adapters came that lie below a weight; else no weight is moved."""
    model, batch = tiny_model("llama", **WIDE).requires_grad_(False), packed_row(LENGTHS, ROW)
    whole = {name: weight.clone() for name, weight in model.named_parameters()}

    def places() -> dict[str, int]:
        """Of the linears' weights."""
        found = {name.replace(".base_layer", ""): p.data_ptr() for name, p in model.named_parameters()}
        return {name: place for name, place in found.items() if "_proj.weight" in name}

    loaded = places()
    attach(model, layers="fused").merge_weights()
    attached = places()
    assert all(attached[name] != loaded[name] for name in attached)
    attention = model.model.layers[1].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    assert k.data_ptr() == q.data_ptr() + q.nbytes
    attach(model, layers="fused").merge_weights()
    assert places() == attached
    adapted = with_adapters(model)
    handle = attach(adapted, layers="fused")
    handle.merge_weights()
    grown = places()
    assert all(grown[name] != attached[name] for name in grown)
    adapted(**batch).loss.backward()
    assert places() == grown
    handle.detach()
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in adapted.parameters())
    for name, weight in adapted.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, whole[name.replace(".base_layer", "")])


@pytest.mark.parametrize("state", ["disabled", "merged", "dropout", "dora", "two", "weights trained"])
def test_what_the_fused_layers_do_not_serve(state: str) -> None:
    """PEFT's own way then, to the same loss; the report says so (an adapter that is off is simply not added)."""
    options: dict[str, Any] = {"dropout": {"lora_dropout": 0.5}}.get(state, {})
    model, batch = with_adapters(tiny_model("llama"), **options), packed_row(LENGTHS, ROW)
    if state == "dora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).train()
    if state == "two":
        model.add_adapter("second", model.peft_config["default"])
        model.base_model.set_adapter(["default", "second"])
    if state == "weights trained":
        model.get_base_model().model.layers[1].self_attn.k_proj.base_layer.weight.requires_grad_()
    if state == "merged":
        model.merge_adapter()
    if state == "disabled":
        model.base_model.disable_adapter_layers()
    found = []
    for layers in ("stock", "fused"):
        handle = attach(model, layers=layers)
        torch.manual_seed(0)
        found.append(model(**batch).loss)
    assert found[0].item() == pytest.approx(found[1].item(), rel=1e-5)
    reasons = {
        "dropout": "LoRA dropout",
        "dora": "an adapter that is not plain LoRA",
        "two": "2 adapters are active at once",
        "weights trained": "the linears differ in dtype, device or bias, or only some are trained",
    }
    assert path_of_layers(handle)[0 if state in ("disabled", "merged") else 1] == reasons.get(state, "fused")


def test_a_change_after_the_first_step_is_noticed() -> None:
    model, batch = with_adapters(tiny_model("llama")), packed_row(LENGTHS, ROW)
    handle = attach(model, layers="fused")
    alone, _ = loss_and_gradients(model, batch)
    model.add_adapter("second", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.constant_(parameter, 0.1)
    model.base_model.set_adapter(["default", "second"])
    both = model(**batch).loss.item()
    assert path_of_layers(handle)[1] == "2 adapters are active at once"
    model.base_model.set_adapter("default")
    assert model(**batch).loss.item() == alone != both
    attach(model, layers="stock")
    model.base_model.set_adapter(["default", "second"])
    assert model(**batch).loss.item() == pytest.approx(both, rel=1e-6)


def test_switching_adapters_copies_no_merged_weights() -> None:
    """They would be there twice until the backward of the forward before."""
    model, batch = with_adapters(tiny_model("llama", **BIASED)), packed_row(LENGTHS, ROW)
    model.add_adapter("second", model.peft_config["default"])
    attach(model, layers="fused")
    layer, places = model.get_base_model().model.layers[1], []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        model(**batch)
        linears = [*layer.self_attn.children(), *layer.mlp.children()]
        places.append([p.data_ptr() for each in linears for p in getattr(each, "base_layer", each).parameters()])
    kept = {tuple(same) for same in zip(*places, strict=True) if len(set(same)) == 1}
    assert len(kept) == 14  # weights and biases of seven linears, down's too, below whose weight the first A lies


def test_a_reference_pass_by_another_adapter_moves_nothing_and_builds_nothing_anew() -> None:
    """As in each step of preference training: between a forward and its backward the other adapter is on."""
    model, batch = with_adapters(tiny_model("llama", **WIDE)), packed_row(LENGTHS, ROW)
    model.add_adapter("ref", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_B.ref" in name:
            torch.nn.init.constant_(parameter, 0.1)
    handle, found = attach(model, layers="stock"), []
    for layers in ("stock", "fused"):
        handle = attach(model, layers=layers)
        for _ in range(3):
            model.zero_grad()
            loss = model(**batch).loss
            model.set_adapter("ref")
            with torch.no_grad():
                reference = model(**batch).loss.item()
            model.set_adapter("default")
            loss.backward()
            found.append((loss.item(), reference, gradients(model)))
    assert {build.number for build in handle.layers._builds} == {1, 2}
    assert handle.layers._builds[0].runs[model.get_base_model().model.layers[0]].blocks[1].linears[1].ranks[0] > 0
    for loss, reference, own in found[1:]:
        assert (loss, reference) == pytest.approx(found[0][:2], rel=1e-6) and loss != reference
        for name, right in found[0][2].items():
            torch.testing.assert_close(own[name], right, rtol=1e-4, atol=1e-6)


def test_another_adapter_gets_the_room_below_when_the_first_is_deleted() -> None:
    model, batch = with_adapters(tiny_model("llama", **WIDE)), packed_row(LENGTHS, ROW)
    model.add_adapter("second", model.peft_config["default"])
    handle = attach(model, layers="fused")
    layer = model.get_base_model().model.layers[0]
    below = []
    for step in ("first", "second", "alone"):
        if step == "second":
            model.set_adapter("second")
        if step == "alone":
            model.delete_adapter("default")
        model(**batch)
        down = handle.layers._builds[0].runs[layer].blocks[1].linears[1]
        below.append(down.a.untyped_storage().data_ptr() == down.source.storage.untyped_storage().data_ptr())
    assert below == [True, False, True]


def test_adapters_switched_off_one_by_one_leave_nothing_behind() -> None:
    """The same ranks in another place: the blocks of B that were filled before must be zero again."""
    model, batch = with_adapters(tiny_model("llama"), target_modules=["q_proj", "v_proj"]), packed_row(LENGTHS, ROW)
    found: dict[Any, list[float]] = {}
    for layers in ("fused", "stock"):
        attach(model, layers=layers)
        found[layers] = []
        for only in ("q_proj", "v_proj", "q_proj"):
            for name, module in model.named_modules():
                if hasattr(module, "lora_A"):
                    module.enable_adapters(name.endswith(only))
            found[layers].append(model(**batch).loss.item())
    assert found["fused"] == pytest.approx(found["stock"], rel=1e-6)
    assert found["stock"][0] != found["stock"][1]


def four_bit_pair(folder: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A 4-bit model with adapters, and a float64 one on the CPU with the weights that its 4 bits stand for."""
    from pronghorn.loading.load import load_model

    tiny_model("llama", **WIDE).save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    quantised, _ = load_model(str(folder), max_seq_length=ROW, dtype=dtype, load_in_4bit=True, device=device)
    exact = tiny_model("llama", **WIDE)
    modules = dict(quantised.named_modules())
    for name, parameter in exact.named_parameters():
        module = modules[name.rpartition(".")[0]]
        if type(module).__name__ == "Linear4bit":
            from bitsandbytes.functional import dequantize_4bit

            parameter.data = dequantize_4bit(module.weight.data, module.weight.quant_state).cpu().double()
        else:
            parameter.data = module.weight.data.cpu().double()
    return with_adapters(quantised), with_adapters(exact.double())


def compare_four_bit(folder: Path, device: str, dtype: torch.dtype, plan: Plan) -> None:
    quantised, exact = four_bit_pair(folder, device, dtype)
    errors = ThreeWay()
    for seed in range(DRAWS):
        batch = packed_row(LENGTHS, ROW, seed=seed)
        exact.zero_grad()
        _, exact_loss = one_document_at_a_time(exact, batch)
        exact_loss.backward()
        found = {}
        for layers in ("stock", "fused"):
            handle = attach(quantised, plan if layers == "fused" else Plan.keep(), layers=layers)
            assert path_of_layers(handle)[0] == ("fused" if layers == "fused" else "transformers and PEFT")
            on_device = {name: value.to(device) for name, value in batch.items()}
            quantised.zero_grad()
            loss = quantised(**on_device).loss
            loss.backward()
            found[layers] = loss, {name: grad.clone() for name, grad in gradients(quantised).items()}
        errors.add("loss", found["fused"][0], found["stock"][0], exact_loss)
        for (name, wanted), grad in zip(gradients(exact).items(), found["fused"][1].values(), strict=True):
            errors.add(f"gradient of {name}", grad, found["stock"][1][name], wanted)
    errors.check()


WHOLE_AND_TILED = pytest.mark.parametrize("plan", [Plan.keep(), Plan(mlp_rows=37)], ids=["whole", "tiled"])


@WHOLE_AND_TILED
def test_four_bit_weights(tmp_path: Path, plan: Plan) -> None:
    compare_four_bit(tmp_path, "cpu", torch.float32, plan)


@pytest.mark.gpu
@WHOLE_AND_TILED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_four_bit_weights_on_a_gpu(tmp_path: Path, dtype: torch.dtype, plan: Plan) -> None:
    compare_four_bit(tmp_path, "cuda", dtype, plan)


def test_padded_batches_and_generation_take_transformers_way() -> None:
    model = with_adapters(tiny_model("qwen2")).eval()
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[0] * 3 + [1] * 6, [1] * 9])}
    with torch.no_grad():
        expected = model(**padded).logits, model.generate(**padded, max_new_tokens=4, do_sample=False, pad_token_id=0)
        attach(model, layers="fused")
        found = model(**padded).logits, model.generate(**padded, max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_a_gpu(family: str, dtype: torch.dtype, nan_memory: None) -> None:
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(DRAWS)]
    compare(with_adapters(tiny_model(family, **WIDE)), *batches, device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_fine_tuning_on_a_gpu(family: str, dtype: torch.dtype, nan_memory: None) -> None:
    batches = [packed_row(LENGTHS, ROW, seed=seed) for seed in range(DRAWS)]
    compare(tiny_model(family), *batches, device="cuda", dtype=dtype, masters=True)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["off", "on"])
def test_no_synchronisation(graph: Any) -> None:
    """A fused step never makes the host wait."""
    model = with_adapters(tiny_model("qwen3")).to("cuda", torch.bfloat16)
    attach(model, layers="fused", graph=graph)
    batch = {name: value.to("cuda") for name, value in packed_row(LENGTHS, ROW).items()}
    model(**batch).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
