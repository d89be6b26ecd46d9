"""A served model is compared with the trained one, and what is wrong with it is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.export.compare import compare
from pronghorn.export.comparison import LIMITS, Cause, Comparison, Limits, Name
from pronghorn.export.conversations import built_in
from pronghorn.export.engine import Completion
from pronghorn.export.engines.http import Server
from pronghorn.export.engines.openai import OpenAIServer
from pronghorn.export.engines.transformers import TransformersEngine
from support.served import Stub, serving, trained

CHAT_ONLY: frozenset[str] = frozenset()
LLAMA_CPP = frozenset({"apply-template", "tokens as prompts", "steps"})
VERBOSE = LLAMA_CPP | {"verbose"}
ECHOES = frozenset({"tokens as prompts", "echo"})


@pytest.fixture(scope="module")
def reference(answering_run: Path) -> TransformersEngine:
    return trained(answering_run)


@pytest.fixture(scope="module")
def rows(reference: TransformersEngine) -> list[list[int]]:
    """Held-out documents: a question, the answer, and the token that ends it."""
    tokenizer = reference.tokenizer
    text = "<s>[user]{}<s>[assistant]A cat sat on a mat.<s>"
    questions = ("Who was it?", "What is this?", "Why does it rain?")
    return [tokenizer(text.format(question), add_special_tokens=False)["input_ids"] for question in questions]


def served(reference: TransformersEngine, stub: Stub, **options: Any) -> Comparison:
    with serving(stub) as url:
        return compare(reference, OpenAIServer(Server(url)), **options)


def other(reference: TransformersEngine, **changes: Any) -> TransformersEngine:
    """Another server's engine: the same model, but for `changes`."""
    engine = copy.copy(reference)
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def state(comparison: Comparison) -> dict[Name, bool | None]:
    return {check.name: check.ok for check in comparison.checks}


def test_at_least_20_conversations_are_built_in() -> None:
    names = [named.name for named in built_in()]
    assert len(names) == len(set(names)) >= 20
    conversations = [named.conversation for named in built_in()]
    assert sum(bool(c.tools) for c in conversations) >= 3
    assert any("<think>" in message.content for c in conversations for message in c.messages)
    assert any(c.messages[0].role == "system" and not c.messages[0].content for c in conversations)
    assert all(c.messages[-1].role in ("user", "tool") for c in conversations)


def test_the_trained_model_itself_is_the_same(reference: TransformersEngine, rows: list[list[int]]) -> None:
    comparison = served(reference, Stub(reference), rows=rows)
    assert comparison.ok and not comparison.causes and not comparison.not_compared
    assert comparison.conversations >= 20 and comparison.mean is not None and comparison.mean < 1e-5
    assert comparison.same == 1 and comparison.positions == len(
        {tuple(row[:end]) for row in rows for end in range(2, len(row) + 1)}
    )
    assert json.loads(json.dumps(comparison.to_dict()))["ok"] is True
    with torch.no_grad():
        given = [(ids, reference.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)) for ids in rows]
    seen = {tuple(ids[: i + 1]): -row[i - 1, ids[i]].item() for ids, row in given for i in range(1, len(ids))}
    loss = sum(seen.values()) / len(seen)
    assert comparison.losses == pytest.approx((loss, loss), rel=1e-4)
    told = f"{loss:.4f} nats a token of the trained model, {loss:.4f} of this one"
    assert comparison.loss == f"Loss on {len(rows)} held-out documents, prompts too: {told}"


@pytest.mark.slow
def test_without_rows_the_trained_model_s_answers_are_scored(reference: TransformersEngine) -> None:
    comparison = served(reference, Stub(reference))
    assert comparison.ok and comparison.positions > 100 and "answers" in comparison.scored_on


@pytest.mark.slow
def test_conversations_that_the_trained_template_refuses_are_skipped_by_name(reference: TransformersEngine) -> None:
    tokenizer = copy.deepcopy(reference.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ tools | tojson }}", "{{ raise_exception('none') }}")
    comparison = served(other(reference, tokenizer=tokenizer), Stub(reference))
    assert {"tools", "tool call and its result"} <= set(comparison.skipped) and comparison.ok


def with_template(reference: TransformersEngine, old: str, new: str) -> TransformersEngine:
    tokenizer = copy.deepcopy(reference.tokenizer)
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return other(reference, tokenizer=tokenizer)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("serves", [Stub.serves, LLAMA_CPP], ids=["vllm", "llama.cpp"])
def test_another_template_is_named(
    reference: TransformersEngine, rows: list[list[int]], serves: frozenset[str]
) -> None:
    stub = Stub(with_template(reference, "'[' + m.role + ']'", "'<' + m.role + '>'"), serves)
    comparison = served(reference, stub, rows=rows)
    assert not comparison.ok and state(comparison)[Name.TOKENS] is False
    assert comparison.causes[0].startswith("template differs: one question is ")
    assert "<user>" in comparison.causes[0] and "[user]" in comparison.causes[0]
    assert state(comparison)[Name.LOGPROBS] is True, "the weights are right"


def test_a_doubled_bos_is_named(reference: TransformersEngine, rows: list[list[int]]) -> None:
    comparison = served(reference, Stub(reference, doubled_bos=True), rows=rows)
    assert not comparison.ok and comparison.causes == (Cause.BOS_DOUBLED.value,)


def test_a_missing_bos_is_named(reference: TransformersEngine, rows: list[list[int]]) -> None:
    comparison = served(reference, Stub(with_template(reference, "{{ bos_token }}", "")), rows=rows)
    assert not comparison.ok and comparison.causes == (Cause.BOS_MISSING.value.format("'<s>'"),)


@pytest.mark.slow
def test_a_bos_is_counted_where_no_token_ids_are_told(reference: TransformersEngine) -> None:
    comparison = served(reference, Stub(reference, CHAT_ONLY, doubled_bos=True))
    assert not comparison.ok and "tokens, in training" in comparison.causes[0]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("serves", [Stub.serves, CHAT_ONLY], ids=["vllm", "chat only"])
def test_a_missing_stop_token_is_named(
    reference: TransformersEngine, rows: list[list[int]], serves: frozenset[str]
) -> None:
    comparison = served(reference, Stub(other(reference, stops=frozenset()), serves), rows=rows)
    assert not comparison.ok and comparison.causes[0].startswith("stop token missing: after ")
    assert state(comparison)[Name.LOGPROBS] is (None if serves is CHAT_ONLY else True)


@pytest.mark.parametrize("serves", [Stub.serves, VERBOSE], ids=["vllm", "llama.cpp"])
def test_answers_are_compared_by_token_ids(
    reference: TransformersEngine, rows: list[list[int]], serves: frozenset[str]
) -> None:
    """Bytes that are no character are lost in a text, though the tokens are the same."""
    comparison = served(reference, Stub(reference, serves, broken=True), rows=rows)
    assert comparison.ok and state(comparison)[Name.ANSWERS] and state(comparison)[Name.STOPS], comparison
    texts_alone = served(reference, Stub(reference, serves - {"return_token_ids", "verbose"}, broken=True), rows=rows)
    assert state(texts_alone)[Name.ANSWERS] is False and state(texts_alone)[Name.STOPS] is not False


class SecondBest(TransformersEngine):
    """A model that begins its answers with its second choice."""

    def complete(self, token_ids: Any, max_tokens: int) -> Completion:
        second = int(self.distribution([*token_ids, 0])[-1].topk(2).indices[1])
        rest = super().complete([*token_ids, second], max_tokens - 1)
        return Completion(rest.text, rest.stopped, (second, *(rest.token_ids or ())), len(token_ids))


@pytest.mark.parametrize("serves", [Stub.serves, VERBOSE], ids=["vllm", "llama.cpp"])
def test_other_tokens_are_found_where_texts_are_alike(
    reference: TransformersEngine, rows: list[list[int]], serves: frozenset[str]
) -> None:
    stub = Stub(SecondBest(reference.model, reference.tokenizer), serves, broken=True)
    comparison = served(reference, stub, rows=rows)
    assert state(comparison)[Name.ANSWERS] is False and state(comparison)[Name.STOPS] is False
    assert state(comparison)[Name.LOGPROBS] is not False, "the weights are right"


def test_a_server_that_refuses_to_be_asked_for_token_ids_is_compared_by_texts(
    reference: TransformersEngine, rows: list[list[int]]
) -> None:
    knows = frozenset({"model", "messages", "tools", "tool_choice", "prompt", "max_tokens", "temperature"})
    stub = Stub(reference, knows=knows)
    comparison = served(reference, stub, rows=rows)
    assert state(comparison)[Name.ANSWERS] and state(comparison)[Name.STOPS], comparison
    asked = [body for path, body in stub.requests if path == "/v1/completions"]
    assert sum("return_tokens" in body for body in asked) == 0, "it was asked once, for an answer"


class Bare(TransformersEngine):
    """The model without its adapter."""

    def distribution(self, token_ids: Any) -> torch.Tensor:
        base = self.base_distribution(token_ids)
        assert base is not None
        return base


def bare(reference: TransformersEngine) -> TransformersEngine:
    return Bare(reference.model, reference.tokenizer, base=reference.model)


def test_a_base_without_the_adapter_is_named(reference: TransformersEngine, rows: list[list[int]]) -> None:
    comparison = served(reference, Stub(bare(reference)), rows=rows)
    assert not comparison.ok and comparison.causes == (Cause.BASE.value,)


def merged_onto_another_base(reference: TransformersEngine) -> TransformersEngine:
    model = copy.deepcopy(reference.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" not in name and weight.dim() == 2:
                weight += torch.randn(weight.shape, generator=generator) * weight.std() * 0.3
    return TransformersEngine(model, reference.tokenizer)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("serves", [Stub.serves, ECHOES, LLAMA_CPP], ids=["vllm", "echo", "llama.cpp"])
def test_a_merge_onto_another_base_is_named(
    reference: TransformersEngine, rows: list[list[int]], serves: frozenset[str]
) -> None:
    comparison = served(reference, Stub(merged_onto_another_base(reference), serves), rows=rows)
    assert not comparison.ok and Cause.WEIGHTS.value.format("merged") in comparison.causes
    assert state(comparison)[Name.TOKENS] in (True, None), "the template is right"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("serves", [ECHOES, LLAMA_CPP], ids=["echo", "llama.cpp"])
def test_servers_that_score_otherwise_are_scored_too(
    reference: TransformersEngine, rows: list[list[int]], serves: frozenset[str]
) -> None:
    comparison = served(reference, Stub(reference, serves), rows=rows)
    assert comparison.ok and comparison.mean is not None and comparison.mean < 1e-5 and comparison.same == 1
    assert (Name.TOKENS in comparison.not_compared) is (serves is ECHOES)


def test_positions_of_which_a_server_tells_nothing_are_left_out(
    reference: TransformersEngine, rows: list[list[int]]
) -> None:
    """Be it the first one; all others are compared."""
    row = rows[0]
    silent = {row[0], row[len(row) // 2]}
    with serving(Stub(reference, LLAMA_CPP)) as url:
        every = OpenAIServer(Server(url)).logprobs(row)
    with serving(Stub(reference, LLAMA_CPP, silent_after=frozenset(silent))) as url:
        told = OpenAIServer(Server(url)).logprobs(row)
    assert told == {at: scored for at, scored in every.items() if row[at - 1] not in silent}
    assert 1 in every and 0 < len(told) < len(every)
    stub = Stub(reference, LLAMA_CPP, silent_after=frozenset(row))
    with serving(stub) as url, pytest.raises(UnsupportedError, match="doesn't tell log-probabilities"):
        OpenAIServer(Server(url)).logprobs(row)


def test_what_could_not_be_compared_is_told(reference: TransformersEngine) -> None:
    """Ollama's interface: conversations and numbers of tokens."""
    comparison = served(reference, Stub(reference, CHAT_ONLY))
    assert comparison.ok and set(comparison.not_compared) == {Name.TOKENS, Name.LOGPROBS, Name.FIRST, Name.STOPS}
    details = {check.name: check.detail for check in comparison.checks}
    assert "numbers are equal" in details[Name.TOKENS] and all(details[name] for name in comparison.not_compared)


@pytest.mark.slow
def test_what_16_bits_cost_is_allowed_unless_the_server_computes_in_float32(
    reference: TransformersEngine, rows: list[list[int]]
) -> None:
    short = TransformersEngine(copy.deepcopy(reference.model).to(torch.bfloat16), reference.tokenizer)
    assert served(reference, Stub(short), rows=rows).ok
    exact = served(reference, Stub(short), rows=rows, format="adapter", exact=True)
    assert state(exact)[Name.LOGPROBS] is False and exact.causes == (Cause.WEIGHTS.value.format("adapter"),)


def test_a_base_is_named_even_within_a_format_s_limits(
    reference: TransformersEngine, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trained may change little; few bits allow much."""
    monkeypatch.setitem(LIMITS, "4bit", Limits(mean=100.0, tail=100.0, same=0.0))  # type: ignore[arg-type]
    comparison = served(reference, Stub(bare(reference)), rows=rows, format="4bit")
    assert state(comparison)[Name.LOGPROBS] is False and Cause.BASE.value in comparison.causes


def test_an_unknown_format_is_refused(reference: TransformersEngine) -> None:
    with pytest.raises(ConfigError, match="format 'q3' is unknown: use one of f32, f16"):
        compare(reference, reference, format="q3")


def test_limits_are_those_of_the_targets() -> None:
    f16, q8_0, merged = LIMITS["f16"], LIMITS["q8_0"], LIMITS["merged"]
    assert (f16.mean, f16.tail, f16.same) == (0.01, 0.1, 0.995)
    assert (q8_0.mean, q8_0.tail, q8_0.same) == (0.03, 0.3, 0.985)
    assert merged.mean == 0.02
