"""verify of models that route tokens to experts: near-ties are no fault, and a single token's fault is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.diagnose.verify_checks import verify
from pronghorn.diagnose.verify_report import Name, Report
from pronghorn.diagnose.verify_routing import Guides
from pronghorn.diagnose.verify_subject import Subject
from pronghorn.models import experts as computed
from pronghorn.models.experts import expert_modules, weights
from pronghorn.moe.route import route
from pronghorn.parity.routing import Gaps, Guide, by_document, judged, merged
from support.tiny import MOE_FAMILIES, tiny_model
from support.verified import only_cause, planted, subjects

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
TOKEN = 17


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Subject]:
    return subjects(tmp_path_factory.mktemp)


def with_near_ties(subject: Subject) -> Subject:
    """Two experts of each layer that every token scores alike, but for one spacing of one weight."""

    def tied(model: Any) -> Any:
        for layer in model.get_base_model().model.layers:
            router = layer.mlp.gate.weight.data
            router[1] = router[0]
            router[1, 0] *= 1 + 2 * torch.finfo(router.dtype).eps
        return model

    return replace(subject, build=lambda: tied(subject.build()), reload=lambda folder: tied(subject.reload(folder)))


def checked(report: Report) -> dict[str, Any]:
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gemma4_text with experts"])
def test_near_ties_are_no_fault(subject_of: Any, family: str) -> None:
    """Where tokens go elsewhere in the references, nothing after that can be compared, and limits are wide."""
    subject = subject_of(family, dtype=torch.bfloat16, experts=EXPERTS)
    if family == "qwen3_moe":
        subject = with_near_ties(subject)
    report = verify(subject)
    assert report.ok and report.causes == [], [check for check in report.checks if not check.ok]
    found = checked(report)
    if family == "qwen3_moe":
        assert not found[Name.CHOICES].detail.startswith("0 ") and found[Name.CHOICES].detail.endswith(
            "within rounding"
        )
    assert found[Name.LOGITS].limit < 0.1, "no token of plain went elsewhere"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_sound_models_pass_on_the_gpu(subject_of: Any, family: str, dtype: torch.dtype) -> None:
    report = verify(subject_of(family, dtype=dtype, device="cuda", experts=EXPERTS))
    assert report.ok and report.causes == [], [check for check in report.checks if not check.ok]
    assert not checked(report)[Name.OUTPUTS].detail.startswith("not checked")


def inside(model: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, Any, Any]]) -> None:
    """Change what the first layer's experts compute with, where nobody sees it from outside."""
    sound, first = computed.experts, next(expert_modules(model))

    def faulty(x: Tensor, top_k_weights: Tensor, routing: Any, layer: Any, way: Any) -> Tensor:
        if layer.gate_up.data_ptr() == weights(first)[0].data_ptr() and len(x) > TOKEN:
            x, top_k_weights, routing = change(x, top_k_weights, routing)
        return sound(x, top_k_weights, routing, layer, way)

    monkeypatch.setattr(computed, "experts", faulty)


def forgets(x: Tensor, w: Tensor, routing: Any) -> tuple[Any, Any, Any]:
    """One token, by the expert that weighs least."""
    kept = torch.ones_like(w)
    kept[TOKEN, w[TOKEN].argmin()] = 0
    return x, w * kept, routing


def sends_elsewhere(x: Tensor, w: Tensor, routing: Any) -> tuple[Any, Any, Any]:
    index = routing.choice.clone()
    index[TOKEN, 0] = next(e for e in range(8) if e not in index[TOKEN])
    return x, w, route(index, 8)


def loses_a_gradient(x: Tensor, w: Tensor, routing: Any) -> tuple[Any, Any, Any]:
    lost = (torch.arange(len(x)) == TOKEN)[:, None].to(x)
    return x * (1 - lost) + (x * lost).detach(), w, routing


def loses_the_routers_gradient(x: Tensor, w: Tensor, routing: Any) -> tuple[Any, Any, Any]:
    return x, w.detach(), routing


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (forgets, "output"),
        (sends_elsewhere, "output"),
        (loses_a_gradient, "input's gradient"),
        (loses_the_routers_gradient, "weights' gradient"),
    ],
)
def test_one_token_of_one_expert(subject_of: Any, monkeypatch: pytest.MonkeyPatch, change: Any, what: str) -> None:
    """Of which whole tensors in bfloat16 tell nothing."""
    subject = subject_of("olmoe", dtype=torch.bfloat16, experts=EXPERTS)
    report = planted(subject, lambda model: inside(model, monkeypatch, change))
    of_token = "" if what == "weights' gradient" else f" (token {TOKEN})"
    only_cause(report, f"what experts give to a token: {what} of model.layers.0.mlp.experts{of_token}")


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.float32)])
def test_a_token_sent_to_the_wrong_expert(subject_of: Any, family: str, dtype: torch.dtype) -> None:
    """By the router itself: with its choice the references agree in all else."""

    def plant(model: Any) -> None:
        def send(module: Any, given: tuple[Any, ...], out: tuple[Tensor, ...]) -> Any:
            scores, top_weights, index = out
            index = index.clone()
            if len(index) > TOKEN:
                index[TOKEN, 0] = scores[TOKEN].argmin()
            return scores, top_weights, index

        layer = model.get_base_model().model.layers[0].mlp
        (layer.router if family == "gpt_oss" else layer.gate).register_forward_hook(send)

    report = planted(subject_of(family, dtype=dtype), plant)
    [choices] = [check for check in report.checks if check.name is Name.CHOICES]
    assert not choices.ok and "model.layers.0.mlp.experts" in choices.detail, report.checks


def test_documents_of_a_row_and_what_is_not_known() -> None:
    index = torch.arange(12).view(6, 2)
    every = by_document({"e": index}, {3: 2, 5: 3}, 6, None)
    assert torch.equal(every["e"][3], index[:2]) and torch.equal(every["e"][5], index[2:5])
    some = by_document({"e": index[[1, 4]]}, {3: 2, 5: 3}, 6, torch.tensor([1, 4]))
    assert some["e"][3].tolist() == [[-1, -1], [2, 3]] and some["e"][5].tolist() == [[-1, -1], [-1, -1], [8, 9]]
    both = merged(some, every)
    assert both is not None and all(torch.equal(both["e"][n], every["e"][n]) for n in (3, 5))
    turned = {"e": {3: every["e"][3].flip(1)}}
    assert merged(every, turned) is not None, "the order of a token's experts means nothing"
    assert merged(every, {"e": {3: every["e"][3] + 1}}) is None
    apart = Guides.of({"ours": every, "logits": {"e": {3: every["e"][3] + 1}}, "alone": some})
    assert list(apart.apart) == ["logits"] and apart.logits() is apart.apart["logits"]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "gemma4_text with experts"])
def test_a_guided_router_chooses_what_it_is_given(family: str) -> None:
    """With weights of its own scores; in GLM-4.5 of groups, too, that it left out."""
    model, ids, seen = tiny_model(family), torch.arange(3, 12)[None], []
    module = list(expert_modules(model))[-1]
    module.register_forward_hook(lambda module, given, out: seen.append(given), prepend=True)
    model(input_ids=ids)
    own, weighed = seen[0][1], seen[0][2]
    name = next(name for name, each in model.named_modules() if each is module)
    others = (own + 3) % 8
    for wanted in (own, others):
        guide = Guide({name: {4: wanted}})
        guide.begin(4)
        with guide.guiding(model):
            model(input_ids=ids)
        assert torch.equal(seen[-1][1], wanted) and not guide.gaps.unguided
        [short] = [each for (layer, _), each in guide.gaps.short.items()][-1:]
        assert bool((short[4] <= 0).all() if wanted is own else (short[4] > 0).any())
    assert seen[1][2].equal(weighed) and not seen[2][2].equal(weighed)
    model(input_ids=ids)
    assert torch.equal(seen[-1][1], own)


def test_choices_are_judged_by_what_rounding_does_to_gaps() -> None:
    exact, plain = torch.tensor([[3.0, 2.0, 1.99], [3.0, 1.0, 0.0]]), torch.tensor([[3.0, 1.995, 2.0], [3.0, 1.0, 0.0]])

    def gaps(scores: Tensor, short: list[float]) -> Gaps:
        return Gaps({("e", 0): {2: torch.tensor(short)}}, {("e", 0): {2: scores}}, {("e", 0): 2})

    [near] = judged(gaps(plain, []), gaps(exact, [0.01, -1.0]))
    assert near.excess < 1 and near.others == 1 and (near.document, near.token) == (2, 0)
    [far] = judged(gaps(plain, []), gaps(exact, [0.01, 1.0]))
    assert far.excess > 10 and (far.document, far.token) == (2, 1)
