"""Padded batches of a model with fused layers: computed without their padding, to what plain transformers gives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers.trainer_pt_utils import LabelSmoother
from trl import DPOConfig, DPOTrainer

from pronghorn import attach
from pronghorn.data.batch import TILE_ROWS
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attached
from pronghorn.models.lora import add_lora
from pronghorn.models.unpadded import UNPADDED
from pronghorn.parity.distance import distance
from pronghorn.parity.own_code import own_code
from support.tiny import MOE_FAMILIES, tiny_model

LENGTHS, LENGTH = (21, 7, 1), 21
FAMILIES = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text", "gemma4_text", "glm4_moe", "phi3"]


def adapted(model_type: str = "llama", **changes: Any) -> Any:
    """Make a model with adapters that do something."""
    model = add_lora(tiny_model(model_type, **changes), r=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def batch(model: Any, side: str = "right") -> dict[str, Tensor]:
    """Sequences padded at one side or at both; whatever is padding is not a label, and nothing is predicted from it."""
    ids = torch.randint(3, model.config.vocab_size, (len(LENGTHS), LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        begin = {"right": 0, "left": LENGTH - length, "both": (LENGTH - length) // 2}[side]
        mask[row, begin : begin + length] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[range(len(LENGTHS)), mask.argmax(1)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Seen:
    """Notes the shape of the tokens that a backbone computes."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        backbone = attached(model).model.base_model  # type: ignore[union-attr]
        self._hook = backbone.register_forward_hook(self._note, with_kwargs=True)  # one inside would change the way

    def _note(self, backbone: Any, args: Any, kwargs: Any, output: Any) -> None:
        hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        self.shapes.append(tuple((kwargs["position_ids"] if UNPADDED in kwargs else hidden).shape[:2]))

    def taken(self) -> list[tuple[int, ...]]:
        self._hook.remove()
        return self.shapes


def run(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), out.logits.detach()[given["attention_mask"].bool()], gradients


def compare(model: Any, given: dict[str, Tensor], plan: Plan | None = None, padded: bool = False) -> None:
    """Compare a step with the detached model's."""
    attach(model, plan, layers="fused")
    seen = Seen(model)
    ours = run(model, given)
    shapes = set(seen.taken())
    attached(model).detach()  # type: ignore[union-attr]
    plain = run(model, given)
    tokens = -(-sum(LENGTHS) // TILE_ROWS) * TILE_ROWS
    assert shapes == ({(len(LENGTHS), LENGTH)} if padded else {(1, tokens)})
    assert abs(ours[0] - plain[0]) < 2e-6 * plain[0]
    assert (ours[1] - plain[1]).norm() < 1e-5 * plain[1].norm()
    assert ours[2].keys() == plain[2].keys()
    for name, gradient in ours[2].items():
        assert (gradient - plain[2][name]).norm() <= 2e-4 * plain[2][name].norm() + 1e-8, name


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_is_plain_transformers(model_type: str, side: str) -> None:
    model = adapted(model_type)
    compare(model, batch(model, side))


def routed(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Return the losses of a step that asks for routers' logits, these logits, and the gradients."""
    model.zero_grad()
    out = model(**given, output_router_logits=True)
    (out.loss + (out.aux_loss if "aux_loss" in out else 0)).backward()
    real = given["attention_mask"].flatten().bool()  # transformers 5.17 gives no logits of some families
    logits = [each[real] for each in getattr(out, "router_logits", None) or ()]
    return [out.loss, *logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", MOE_FAMILIES)
def test_routers_logits_are_in_their_places(model_type: str, side: str) -> None:
    """TRL's trainers ask for them in the policy's forward and not in the reference's: rounded alike, these two are
    one at first."""
    model = tiny_model(model_type, num_hidden_layers=2)
    given = batch(model, side)
    attach(model, layers="fused")
    assert UNPADDED in seen_keywords(model.model, lambda: model(**given, output_router_logits=True))
    for ours, plain in zip(*both_ways(model, lambda model: routed(model, given)), strict=True):
        assert (ours - plain).norm() <= 2e-4 * plain.norm() + 1e-8


@pytest.mark.parametrize("policy", list(Policy))
def test_layers_follow_their_plan(policy: Policy) -> None:
    model = adapted(num_hidden_layers=3)
    compare(model, batch(model), Plan((policy,) * 3))


def test_positions_that_are_given_are_taken() -> None:
    model = adapted()
    given = batch(model, "left")
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    compare(model, given)


def test_embeddings_that_are_given_have_their_gradients() -> None:
    model, found = adapted(), []
    given = batch(model)
    embeds = model.get_input_embeddings()(given.pop("input_ids")).detach()
    for fused in (True, False):
        attach(model, layers="fused") if fused else attached(model).detach()  # type: ignore[union-attr]
        own = embeds.clone().requires_grad_()
        model(inputs_embeds=own, **given).loss.backward()
        found.append(own.grad)
    assert not found[0][given["attention_mask"] == 0].any()
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


def test_a_batch_without_a_mask_has_no_padding() -> None:
    model = adapted()
    ids, found = batch(model)["input_ids"], []
    for fused in (True, False):
        attach(model, layers="fused") if fused else attached(model).detach()  # type: ignore[union-attr]
        found.append(model(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


def graphed(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model's graphs, as on a GPU."""
    with monkeypatch.context() as as_on_cuda:
        as_on_cuda.setattr(Tensor, "is_cuda", property(lambda tensor: True))
        return attach(model, layers="fused", graph="on").graphs


def test_rows_have_few_lengths_while_graphs_of_them_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph serves one number of tokens. The layers see padding behind, which changes nothing of the rest."""
    model = adapted(max_position_embeddings=512)
    graphs = graphed(model, monkeypatch)
    ids = torch.randint(3, model.config.vocab_size, (4, 200), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1:, 150:] = 0
    given["labels"] = ids.masked_fill(given["attention_mask"] == 0, -100)
    found = []
    for refused in ("rank", None):
        graphs._refused = refused
        for way in (nullcontext(), torch.no_grad()):
            seen = Seen(model)
            with way:
                model(**given, use_cache=False)
            found += seen.taken()
        found.append(run(model, given))
    assert found[:2] == [(1, 704)] * 2 and found[3:5] == [(1, 768), (1, 704)], "650 tokens, in evaluation as ever"
    (loss, logits, gradients), (same, ours, alike) = found[2], found[5]
    assert abs(loss - same) < 1e-6 * loss and (logits - ours).norm() < 1e-5 * logits.norm()
    assert all((alike[name] - right).norm() <= 1e-4 * right.norm() + 1e-8 for name, right in gradients.items())


@contextmanager
def autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


def kept(tensor: Tensor) -> Tensor:
    return tensor


def test_only_forwards_that_a_graph_may_serve_have_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would be filled up for nothing, and checkpointing around a model needs the same tokens twice."""
    model = adapted(num_hidden_layers=1)
    graphs = graphed(model, monkeypatch)
    ids = torch.randint(3, model.config.vocab_size, (4, 135), generator=torch.Generator().manual_seed(0))
    before = torch.ones(1)

    def tokens(way: Any) -> int:
        seen = Seen(model)
        with way:
            model(input_ids=ids, use_cache=False)
        [(_, count)] = seen.taken()
        return count

    assert tokens(nullcontext()) == 640
    assert [tokens(way) for way in (torch.no_grad(), saved_tensors_hooks(kept, kept), autocast())] == [576] * 3
    graphs.waits = weakref.ref(before)
    assert tokens(nullcontext()) == 576, "its predecessor's backward comes later"
    del before
    assert tokens(nullcontext()) == 640
    for limit, count in ((136, 640), (135, 576)):
        monkeypatch.setattr(graphs, "_longest", lambda limit=limit: limit)
        assert tokens(nullcontext()) == count
    monkeypatch.undo()
    graphs.paused = True
    assert tokens(nullcontext()) == 576


def test_forwards_that_ask_for_routers_logits_have_no_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph has these."""
    model = adapted("qwen3_moe", num_hidden_layers=1, output_router_logits=False)
    graphed(model, monkeypatch)
    ids = torch.randint(3, model.config.vocab_size, (4, 135), generator=torch.Generator().manual_seed(0))
    found = []
    for asked in (None, True):
        seen = Seen(model)
        model(input_ids=ids, use_cache=False, output_router_logits=asked)
        found += [count for _, count in seen.taken()]
    assert found == [640, 576]


@pytest.mark.gpu
def test_checkpointing_around_a_model_recomputes_the_same_rows() -> None:
    """Whatever the forward before was."""
    model = adapted(num_hidden_layers=2, head_dim=32).to("cuda", torch.bfloat16)
    ids = torch.randint(3, model.config.vocab_size, (4, 135), generator=torch.Generator().manual_seed(0)).cuda()
    attach(model, layers="fused", graph="on")
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        checkpoint(lambda: model(input_ids=ids, labels=ids).loss, use_reentrant=False).backward()


@pytest.mark.gpu
def test_padded_batches_replay_graphs() -> None:
    """Where each forward has its backward before the next: else the others go without."""
    model = adapted(num_hidden_layers=2, head_dim=32).to("cuda", torch.bfloat16)
    given = [{name: x.to("cuda") for name, x in batch(model, side).items()} for side in ("right", "left")]
    attach(model, layers="fused", graph="off")
    plain = [run(model, each) for each in given]
    handle = attach(model, layers="fused", graph="on")
    assert handle.graphs is not None
    for each, (loss, logits, right) in zip(given * 2, plain * 2, strict=True):
        ours = run(model, each)
        assert torch.equal(ours[0], loss) and torch.equal(ours[1], logits)
        assert all(torch.equal(ours[2][name], grad) for name, grad in right.items())
    assert handle.graphs.replays >= 8, "four forwards and backwards"
    model.zero_grad()
    losses = [model(**each).loss for each in given]
    for loss in losses:
        loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            right = plain[0][2][name] + plain[1][2][name]
            assert (parameter.grad - right).norm() <= 1e-2 * right.norm(), name


@pytest.mark.gpu
def test_a_reference_pass_by_another_adapter_keeps_the_graph() -> None:
    """As in each step of DPO, whose reference has the policy's rank: one graph is captured, and serves all steps."""
    model = add_lora(tiny_model("llama", num_hidden_layers=2, head_dim=32, intermediate_size=136), r=8)
    model.add_adapter("ref", model.peft_config["default"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    model = model.to("cuda", torch.bfloat16)
    given = {name: x.to("cuda") for name, x in batch(model).items()}
    found: list[Any] = []
    for graph in ("off", "on"):
        handle = attach(model, layers="fused", graph=graph)
        for _ in range(3):
            model.zero_grad()
            loss = model(**given, use_cache=False).loss
            model.set_adapter("ref")
            with torch.no_grad():
                reference = model(**given, use_cache=False).loss
            model.set_adapter("default")
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append((loss.item(), reference.item(), gradients))
    assert handle.graphs is not None and len(handle.graphs._captured) == 1 and handle.graphs.replays >= 6
    for loss, reference, gradients in found[1:]:
        assert (loss, reference) == found[0][:2]
        assert all(torch.equal(gradients[name], right) for name, right in found[0][2].items())


def test_several_forwards_may_come_before_their_backward() -> None:
    """And reference passes between, as preference training has them."""
    model, found = adapted(), []
    given = [batch(model, side) for side in ("right", "left")]
    for fused in (True, False):
        attach(model, Plan((Policy.OFFLOAD,) * 3), layers="fused") if fused else attached(model).detach()  # type: ignore[union-attr]
        model.zero_grad()
        first = model(**given[0], use_cache=False).loss
        with torch.no_grad(), model.disable_adapter():
            reference = model.eval()(**given[1], use_cache=False).loss
        (first - model.train()(**given[1]).loss + reference).backward()
        found.append([reference, *(p.grad for p in model.parameters() if p.grad is not None)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


# ---- what stays padded ----


def look(module: Any, args: Any, output: Any) -> None:
    """Look, as somebody's hook."""


def with_noise(model: Any, given: dict[str, Tensor]) -> None:
    """Or with another hook of the embeddings."""
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out + torch.arange(LENGTH)[:, None])


def with_a_hook_inside(model: Any, given: dict[str, Tensor]) -> None:
    model.base_model.model.model.layers[1].mlp.down_proj.register_forward_hook(look)


def with_a_layer_that_is_wrapped(model: Any, given: dict[str, Tensor]) -> None:
    layer = model.base_model.model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def with_padding_to_learn(model: Any, given: dict[str, Tensor]) -> None:
    given["labels"] = given["input_ids"]


def with_a_hole(model: Any, given: dict[str, Tensor]) -> None:
    given["attention_mask"][0, 3] = 0


def without_a_token(model: Any, given: dict[str, Tensor]) -> None:
    given["attention_mask"][2] = 0


def predicted_from_padding(model: Any, given: dict[str, Tensor]) -> None:
    given |= batch(model, "left")
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)


def with_hidden_states(model: Any, given: dict[str, Tensor]) -> None:
    model.config.output_hidden_states = True


def with_far_positions_at_padding(model: Any, given: dict[str, Tensor]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = model.config
    config.rope_parameters, config.max_position_embeddings = rope, TILE_ROWS
    model.base_model.model.model.rotary_emb = type(model.base_model.model.model.rotary_emb)(config)
    given["position_ids"] = torch.arange(LENGTH)[None].where(given["attention_mask"] == 1, torch.tensor(2 * TILE_ROWS))


def with_another_tensor(model: Any, given: dict[str, Tensor]) -> None:
    given["mm_token_type_ids"] = torch.zeros_like(given["input_ids"])


@pytest.mark.parametrize(
    "change",
    [
        with_noise,
        with_a_hook_inside,
        with_a_layer_that_is_wrapped,
        with_a_hole,
        without_a_token,
        predicted_from_padding,
        with_padding_to_learn,
        with_far_positions_at_padding,
        with_hidden_states,
        with_another_tensor,
    ],
)
def test_what_needs_the_padded_batch_has_it(change: Callable[[Any, dict[str, Tensor]], None]) -> None:
    model = adapted()
    given = batch(model)
    change(model, given)
    compare(model, given, padded=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_trainer_s_label_smoothing_is_plain_transformers(side: str) -> None:
    """Its labels don't come to the model. Before a sequence that is padded on the left, its loss reads padding."""
    model, found = adapted(), []
    given = batch(model, side)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    given = {**given, "labels": None, "num_items_in_batch": torch.tensor(29)}
    for fused in (True, False):
        attach(model, layers="fused") if fused else attached(model).detach()  # type: ignore[union-attr]
        if fused:
            assert (UNPADDED in seen_keywords(model.base_model.model.model, lambda: model(**given))) == (
                side == "right"
            )
        loss = LabelSmoother(epsilon=0.1)(model(**given), labels, shift_labels=True)
        found.append((loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])))
    for ours, plain in zip(*found, strict=True):
        assert (ours - plain).norm() <= 2e-5 * plain.norm() + 1e-8


def test_an_adapter_that_sees_the_whole_batch_has_the_padded_one() -> None:
    """Past the causal LM, too, where TRL's fused head calls the backbone."""
    if not hasattr(peft, "LilyConfig"):
        pytest.skip("this PEFT has no Lily")
    model = get_peft_model(tiny_model("llama"), peft.LilyConfig(r=2, target_modules=["q_proj"]))
    given = batch(model)
    labels, backbone = given.pop("labels"), model.get_base_model().model
    attach(model, layers="fused")
    assert UNPADDED not in seen_keywords(backbone, lambda: model(labels=labels, **given))
    assert UNPADDED not in seen_keywords(backbone, lambda: backbone(**given))


def test_a_cache_that_is_asked_for_is_there() -> None:
    model = adapted().eval()
    given = batch(model)
    attach(model, layers="fused")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert model(**given).past_key_values is not None
            assert model(**given, use_cache=False).past_key_values is None
    assert model.train()(**given, use_cache=True).past_key_values is not None
    assert model(**given).past_key_values is None


def test_a_teacher_whose_configuration_wants_no_cache_computes_no_padding() -> None:
    """TRL's GKD, GOLD and IWOPD call it without `use_cache`; `generate()` doesn't read the configuration."""
    model = tiny_model("llama").eval()
    given = batch(model)
    attach(model, layers="fused")
    assert UNPADDED not in seen_keywords(model.model, lambda: model(**given))
    model.config.use_cache = False
    assert UNPADDED in seen_keywords(model.model, lambda: model(**given))
    caches = seen_keywords(model.model, lambda: model.generate(given["input_ids"][:1], max_new_tokens=2))
    assert {"past_key_values", "cache"} & set(caches)


def both_ways(model: Any, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return what a call gives of an attached and of a detached model."""
    attach(model, layers="fused")
    ours = call(model)
    attached(model).detach()  # type: ignore[union-attr]
    return ours, call(model)


def test_labels_by_place_are_seen() -> None:
    model = tiny_model("llama")
    given = batch(model, "left")
    ids, mask = given["input_ids"], given["attention_mask"]
    torch.testing.assert_close(*both_ways(model, lambda model: model(ids, mask, None, None, None, ids).loss))


@pytest.mark.parametrize("positions", [[*range(9), *range(20, 32)], [1] * LENGTH], ids=["jump", "stay"])
def test_positions_without_a_mask_begin_documents_as_in_transformers(positions: list[int]) -> None:
    model = adapted()
    ids, places = batch(model)["input_ids"], torch.tensor([positions])
    call = lambda model: model(input_ids=ids, position_ids=places, use_cache=False).logits  # noqa: E731
    torch.testing.assert_close(*both_ways(model, call), rtol=1e-4, atol=1e-5)


def test_tuples_are_given_where_the_configuration_says_so() -> None:
    model = tiny_model("llama")
    given, model.config.return_dict = batch(model), False
    real = given.pop("labels") != -100
    torch.testing.assert_close(*both_ways(model, lambda model: model.model(**given)[0][real]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma4_text"])
def test_the_last_logits_alone_are_right(model_type: str) -> None:
    model = adapted(model_type).eval()
    given = batch(model, "left")
    given.pop("labels")
    call = lambda model: model(**given, logits_to_keep=1, use_cache=False).logits  # noqa: E731
    torch.testing.assert_close(*both_ways(model, call), rtol=1e-4, atol=1e-5)


def test_attention_that_was_changed_is_transformers() -> None:
    model = tiny_model("llama")
    given = batch(model)
    attach(model, layers="fused")
    model.set_attn_implementation("eager")
    ours = model(**given).loss
    attached(model).detach()  # type: ignore[union-attr]
    torch.testing.assert_close(ours, model(**given).loss)


def test_a_compiled_model_breaks_no_graph() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    given = batch(model)
    attach(model, layers="fused")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given).loss, model(**given).loss)


def test_a_traced_model_is_right_for_other_masks() -> None:
    model = tiny_model("llama", num_hidden_layers=1).eval().requires_grad_(False)
    ids = batch(model)["input_ids"]
    masks = [batch(model, side)["attention_mask"] for side in ("right", "left")]
    attach(model, layers="fused")

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return result

    traced = torch.jit.trace(logits, (ids, masks[0]), check_trace=False)
    real = masks[1].bool()
    torch.testing.assert_close(traced(ids, masks[1])[real], logits(ids, masks[1])[real], rtol=1e-4, atol=1e-5)


def test_the_report_tells_of_hooks() -> None:
    model = tiny_model("llama")
    handle = attach(model, layers="fused")
    said = lambda: {each.part: each.path for each in handle.report}["padded batches in training"]  # noqa: E731
    assert said() == "without their padding"
    hook = model.model.layers[0].register_forward_hook(look)
    assert said() == "padded, transformers' layers"
    hook.remove()
    assert said() == "without their padding"


def test_a_replica_goes_transformers_way() -> None:
    """Its layers are no fused ones of its own: nn.DataParallel copies attributes."""
    model = tiny_model("llama")
    given = batch(model)
    attach(model, layers="fused")
    replica = model._replicate_for_data_parallel()
    replica._modules["model"] = model.model._replicate_for_data_parallel()
    assert UNPADDED in seen_keywords(model.model, lambda: model(**given))
    assert UNPADDED not in seen_keywords(replica.model, lambda: replica(**given))


def seen_keywords(backbone: Any, call: Callable[[], Any]) -> set[str]:
    """Return the keywords that a backbone's forward has in a call."""
    seen: set[str] = set()
    hook = backbone.register_forward_hook(lambda module, args, kwargs, output: seen.update(kwargs), with_kwargs=True)
    call()
    hook.remove()
    return seen


def test_nothing_is_still_nothing() -> None:
    model = tiny_model("llama")
    attach(model, layers="fused")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(attention_mask=torch.ones(2, 3))


# ---- what goes without its padding, too ----


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_masks_are_of_any_dtype(dtype: torch.dtype) -> None:
    model = adapted()
    given = batch(model)
    compare(model, given | {"attention_mask": given["attention_mask"].to(dtype)})


def test_trainers_tell_how_many_labels_there_are() -> None:
    model = adapted()
    compare(model, batch(model) | {"num_items_in_batch": torch.tensor(11)})


def test_a_loss_function_is_given_its_own_keywords() -> None:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model = tiny_model("llama")
    model.loss_function = loss
    compare(model, batch(model))


def test_hooks_of_the_backbone_see_the_batch_as_it_came() -> None:
    model = tiny_model("llama")
    given, seen = batch(model), list[Any]()
    look = lambda module, args, output: seen.append(output.last_hidden_state.shape)  # noqa: E731
    model.model.register_forward_hook(look)
    attach(model, layers="fused")
    model.model.register_forward_hook(look)
    assert UNPADDED in seen_keywords(model.model, lambda: model(**given))
    assert seen == [(len(LENGTHS), LENGTH, 64)] * 2


def test_labels_are_not_kept() -> None:
    model = tiny_model("llama")
    given = batch(model)
    attach(model, layers="fused")
    before = set(model.model.__dict__)
    model(**given)
    with pytest.raises(ValueError, match="exactly one"):
        model(labels=given["labels"])
    assert set(model.model.__dict__) == before


def test_dynamic_rope_beyond_its_limit_stays_padded() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for limit in (TILE_ROWS - 1, TILE_ROWS):
        model = adapted(max_position_embeddings=limit, rope_parameters=rope)
        compare(model, batch(model), padded=limit < TILE_ROWS)


@pytest.mark.parametrize("way", ["far positions", "padding before"])
def test_queries_that_are_scaled_by_positions_beyond_the_row_stay_padded(way: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.4}
    for first_scaled in (TILE_ROWS - 1, TILE_ROWS):  # rows of a tile have scaled queries, or have none
        model = adapted("ministral3", rope_parameters=rope | {"original_max_position_embeddings": first_scaled})
        given = batch(model)
        if way == "far positions":
            given["position_ids"] = torch.arange(LENGTH).expand(len(LENGTHS), -1) + TILE_ROWS
        else:
            empty = {"input_ids": 0, "attention_mask": 0, "labels": -100}
            given = {name: pad(value, (TILE_ROWS, 0), value=empty[name]) for name, value in given.items()}
        attach(model, layers="fused")
        seen = Seen(model)
        ours = run(model, given)
        padded = {tuple(given["input_ids"].shape)}
        assert set(seen.taken()) == (padded if first_scaled == TILE_ROWS else {(1, TILE_ROWS)})
        attached(model).detach()  # type: ignore[union-attr]
        plain = run(model, given)
        torch.testing.assert_close(ours[:2], plain[:2])
        torch.testing.assert_close(ours[2], plain[2], rtol=1e-4, atol=1e-6)


def test_virtual_tokens_come_first() -> None:
    model, found = tiny_model("llama"), []
    attach(model, layers="fused")
    prompted = get_peft_model(model, PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
    given = batch(model)
    for fused in (True, False):
        if not fused:
            attached(model).detach()  # type: ignore[union-attr]
        prompted.zero_grad()
        prompted(**given).loss.backward()
        found.append(next(p.grad.clone() for p in prompted.parameters() if p.grad is not None))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_detach_leaves_no_hook() -> None:
    model = adapted()
    backbone = attach(model, layers="fused").model.base_model
    assert backbone._forward_hooks and backbone._forward_pre_hooks
    attached(model).detach()  # type: ignore[union-attr]
    assert not backbone._forward_hooks and not backbone._forward_pre_hooks


def test_trl_s_dpo_learns_alike(tmp_path: Path) -> None:
    rows = Dataset.from_list(
        [{"prompt": f"Is {n} even?", "chosen": " yes" * (1 + n % 3), "rejected": " no" * (1 + n % 5)} for n in range(8)]
    )
    found = []
    for fused in (True, False):
        model = adapted(vocab_size=300)
        if fused:
            attach(model, layers="fused")
        args = DPOConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            report_to="none", save_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True, max_length=64,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = DPOTrainer(model, args=args, processing_class=byte_tokenizer(64), train_dataset=rows)
        seen = Seen(model) if fused else None
        trainer.train()
        assert seen is None or all(shape[0] == 1 for shape in seen.taken())
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1], rel=1e-4) and found[0][0] != found[0][-1]


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_on_a_gpu_is_as_near_float32_as_plain_transformers(model_type: str, side: str, nan_memory: None) -> None:
    found = []
    for dtype, fused in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        model = adapted(model_type).to("cuda", dtype)
        given = {name: each.cuda() for name, each in batch(model, side).items()}
        if fused:
            attach(model, layers="fused")
            seen = Seen(model)
            found.append(run(model, given))
            continue
        if attached(model) is not None:
            attached(model).detach()  # type: ignore[union-attr]
        with own_code(model):
            found.append(run(model, given))
    assert all(shape[0] == 1 for shape in seen.taken())
    ours, plain, exact = found
    logits = distance("logits", ours[1], plain[1], exact[1])
    assert logits.excess <= 1, logits
    # of all gradients together: of single ones chance decides whose is nearer
    ours_g, plain_g, exact_g = (torch.cat([each[2][name].double().flatten() for name in exact[2]]) for each in found)
    assert (ours_g - exact_g).norm() <= 2 * (plain_g - exact_g).norm() + 1e-3 * exact_g.norm()
