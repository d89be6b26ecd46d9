"""Compare a served or exported model with the one that was trained: token ids, log-probabilities, answers, stops.

The trained model runs in transformers. What is compared with it is an `Engine`: transformers, a server, llama.cpp. An
engine that has no way to tell something raises `NotServed`, and the comparison names what it could not compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pronghorn.data.template import clip
from pronghorn.errors import ConfigError, DataError
from pronghorn.export.compare_answers import ANSWER_TOKENS, ANSWERS, Answers, first_difference
from pronghorn.export.comparison import LIMITS, Cause, Check, Comparison, Limits, Name
from pronghorn.export.conversations import Named, built_in
from pronghorn.export.engine import Engine, NotServed, Refused, Scored
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.parity.distance import THREE_WAY
from pronghorn.text import counted

ROWS, ROW_TOKENS = 8, 512
"""Held-out documents that are scored, and tokens of each."""


def compare(
    reference: TransformersEngine,
    engine: Engine,
    *,
    format: str = "merged",
    rows: Sequence[Sequence[int]] = (),
    exact: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Compare an engine with the trained model.

    Args:
        format: what the engine's weights are stored as, one of LIMITS.
        rows: token ids of held-out documents; without any, conversations with the trained model's answers are scored.
        exact: the format's limits alone. If not, differences may also be twice (`THREE_WAY`) what the trained model
            itself is off by in 16 bits, which is more than most limits for small models.
        say: is told what is being compared.
    Raises:
        ConfigError: an unknown format.
    """
    if format not in LIMITS:
        raise ConfigError(f"format {format!r} is unknown", f"use one of {', '.join(LIMITS)}")
    rendered, skipped = rendered_conversations(reference)
    say(f"token ids of {counted(len(rendered), 'conversation')}")
    tokens, token_causes = _compare_tokens(reference, engine, rendered)
    chosen = rendered[:: max(len(rendered) // ANSWERS, 1)][:ANSWERS]
    say(f"answers to {counted(len(chosen), 'conversation')}")
    answers = Answers(reference, engine, chosen)
    texts = [list(row[:ROW_TOKENS]) for row in rows[:ROWS] if len(row) > 1] or answers.texts()
    held_out = f"{counted(len(texts), 'held-out document')}, prompts too"
    scored_on = held_out if rows else "conversations and the trained model's answers"
    say(f"log-probabilities of {counted(len(texts), 'text')}")
    scores, why = _score(reference, engine, texts, exact)
    limits = LIMITS[format]
    checks = [tokens, *_score_checks(scores, why, scores.widen(limits))]
    causes = list(token_causes)
    other_weights = any(check.ok is False for check in checks[1:])
    if other_weights:
        causes.append(Cause.BASE.value if scores.like_base else Cause.WEIGHTS.value.format(format))
    say("where generation stops")
    differing, unlike = answers.compare(limits.tail)
    stops, after = answers.compare_stops(texts, limits.tail)
    checks += [differing, stops]
    if after and not other_weights:
        causes.append(Cause.STOP.value.format(after))
    elif unlike and not causes:
        causes.append(Cause.ANSWERS.value.format(unlike))
    return Comparison(
        engine=engine.name,
        reference=reference.name,
        format=format,
        conversations=len(rendered),
        skipped=tuple(skipped),
        positions=len(scores.differences),
        scored_on=scored_on,
        mean=scores.mean,
        tail=scores.tail,
        same=scores.same,
        checks=tuple(checks),
        causes=tuple(causes),
        losses=scores.losses,
    )


Rendered = list[tuple[Named, list[int]]]


def rendered_conversations(reference: TransformersEngine) -> tuple[Rendered, list[str]]:
    """Render the built-in conversations with the trained model's template; those that it can't, by name."""
    rendered, skipped = [], []
    for named in built_in():
        try:
            ids = reference.tokenize(named.conversation)
        except DataError:
            skipped.append(named.name)
            continue
        if reference.positions is not None and len(ids) + ANSWER_TOKENS > reference.positions:
            skipped.append(f"{named.name} (longer than the model's {reference.positions} positions)")
        else:
            rendered.append((named, ids))
    return rendered, skipped


def _compare_tokens(reference: TransformersEngine, engine: Engine, rendered: Rendered) -> tuple[Check, list[str]]:
    """Compare the token ids of conversations, or how many they are where an engine doesn't tell them."""
    limit = "all equal"
    if not rendered:
        return Check(Name.TOKENS, None, "-", limit, "the trained model has no template that renders one"), []
    unlike: list[str] = []
    causes: dict[str, None] = {}
    counted = ""
    for named, expected in rendered:
        try:
            served: list[int] | None = None
            try:
                served = engine.tokenize(named.conversation)
                cause = None if served == expected else _why_tokens_differ(reference, named.name, expected, served)
            except NotServed as error:
                counted = error.problem
                count = engine.answer(named.conversation, 1).prompt_tokens
                if count is None:
                    return Check(Name.TOKENS, None, "-", limit, counted), []
                what = f"{named.name}: {count} tokens, in training {len(expected)}"
                cause = None if count == len(expected) else Cause.TEMPLATE.value.format(what)
        except NotServed as error:
            return Check(Name.TOKENS, None, "-", limit, error.problem), []
        except Refused as error:
            cause = Cause.TEMPLATE.value.format(f"{named.name} is refused ({error.problem})")
        if cause is not None:
            unlike.append(named.name)
            causes.setdefault(cause)
    if counted and not unlike:
        return Check(
            Name.TOKENS, None, f"{len(rendered)} counts equal", limit, f"{counted}; their numbers are equal"
        ), []
    value = f"{len(rendered) - len(unlike)} of {len(rendered)} equal"
    detail = f"unlike: {', '.join(unlike[:4])}{' …' if len(unlike) > 4 else ''}" if unlike else ""
    return Check(Name.TOKENS, not unlike, value, limit, detail), list(causes)[:3]


def _why_tokens_differ(reference: TransformersEngine, name: str, expected: list[int], served: list[int]) -> str:
    """Return the cause of other token ids."""
    tokenizer = reference.tokenizer
    bos = tokenizer.bos_token_id
    if bos is not None and served == [bos, *expected]:
        return (Cause.BOS_DOUBLED if expected[:1] == [bos] else Cause.BOS_ADDED).value
    if expected[:1] == [bos] and served == expected[1:]:
        return Cause.BOS_MISSING.value.format(repr(tokenizer.bos_token))
    ours, theirs = tokenizer.decode(expected), tokenizer.decode(served)
    if ours == theirs:
        return Cause.TOKENIZER.value.format(name)
    start = max(first_difference(ours, theirs) - 10, 0)
    return Cause.TEMPLATE.value.format(
        f"{name} is {clip(theirs[start:])} from character {start} on, in training {clip(ours[start:])}"
    )


@dataclass(frozen=True)
class _Scores:
    """Differences of log-probabilities, and whether first choices are the same."""

    differences: Sequence[float] = ()
    firsts: Sequence[bool] = ()
    like_base: bool = False
    rounding: _Scores | None = None
    """The trained model's own, with another rounding."""
    losses: tuple[float, float] | None = None
    """As `Comparison.losses`."""

    @property
    def mean(self) -> float | None:
        return sum(self.differences) / len(self.differences) if self.differences else None

    @property
    def tail(self) -> float | None:
        if not self.differences:
            return None
        ordered = sorted(self.differences)
        return ordered[min(math.ceil(0.999 * len(ordered)), len(ordered)) - 1]

    @property
    def same(self) -> float | None:
        return sum(self.firsts) / len(self.firsts) if self.firsts else None

    def widen(self, limits: Limits) -> Limits:
        """Return the limits, wider where the trained model's own rounding asks for it."""
        own, factor = self.rounding, THREE_WAY.factor
        if own is None or own.mean is None or own.tail is None or own.same is None:
            return limits
        return Limits(
            max(limits.mean, factor * own.mean),
            max(limits.tail, factor * own.tail),
            min(limits.same, 1 - factor * (1 - own.same)),
        )


def _score(
    reference: TransformersEngine, engine: Engine, texts: Sequence[list[int]], exact: bool
) -> tuple[_Scores, str]:
    """Compare what both say of each position; with why that can't be where it can't. What several texts begin with is
    one position: conversations share templates and system prompts."""
    differences: list[float] = []
    from_base: list[float] = []
    firsts: list[bool] = []
    own: list[float] = []
    own_firsts: list[bool] = []
    losses: list[tuple[float, float]] = []
    seen: set[tuple[int, ...]] = set()
    why = "" if texts else "there is no text to score"
    for ids in texts:
        try:
            scored = engine.logprobs(ids)
        except (NotServed, Refused) as error:
            why = error.problem
            break
        right, base = reference.distribution(ids), reference.base_distribution(ids)
        rounded = None if exact else reference.rounded_distribution(ids)
        for index, position in scored.items():
            upto = tuple(ids[: index + 1])
            if upto in seen:
                continue
            seen.add(upto)
            row = right[index - 1]
            differences.append(_difference(row, position))
            if position.token == ids[index] and position.token < len(row):
                losses.append((-row[position.token].item(), -position.logprob))
            if base is not None:
                from_base.append(_difference(base[index - 1], position))
            best = int(row.argmax())
            if rounded is not None and 0 <= position.token < len(row):
                own.append(abs(row[position.token] - rounded[index - 1, position.token]).item())
                own_firsts.append(int(rounded[index - 1].argmax()) == best)
            if position.first is not None or best == position.token:
                firsts.append(position.first == best)
    like_base = bool(from_base) and sum(from_base) < 0.5 * sum(differences)  # even within the limits
    means = None
    if losses and len(losses) == len(differences):  # an engine may have told its first choice alone
        trained, served = (math.fsum(side) / len(losses) for side in zip(*losses, strict=True))
        means = trained, served
    return _Scores(differences, firsts, like_base, _Scores(own, own_firsts), means), why


def _difference(row: Tensor, position: Scored) -> float:
    """Return how far a log-probability is off; infinite for a token that the trained model doesn't have."""
    if not 0 <= position.token < len(row):
        return math.inf
    difference = abs(row[position.token].item() - position.logprob)
    return difference if math.isfinite(difference) else math.inf


def _score_checks(scores: _Scores, why: str, limits: Limits) -> list[Check]:
    """Judge the differences by the format's limits."""
    limit = f"mean ≤ {limits.mean:.2g}, 99.9 % ≤ {limits.tail:.2g} nats"
    share = f"≥ {limits.same:.1%}"
    if scores.mean is None or scores.tail is None:
        return [Check(Name.LOGPROBS, None, "-", limit, why), Check(Name.FIRST, None, "-", share, why)]
    at = f"at {len(scores.differences):,} positions" + (f"; then {why}" if why else "")
    near = scores.mean <= limits.mean and scores.tail <= limits.tail and not scores.like_base
    checks = [Check(Name.LOGPROBS, near, f"mean {scores.mean:.2g}, 99.9 % {scores.tail:.2g}", limit, at)]
    if scores.same is None:
        return [*checks, Check(Name.FIRST, None, "-", share, "the engine doesn't tell its first choice")]
    return [*checks, Check(Name.FIRST, scores.same >= limits.same, f"{scores.same:.1%}", share)]
