"""Compare answers, and where generation stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pronghorn.export.comparison import Check, Name
from pronghorn.export.conversations import Named
from pronghorn.export.engine import Completion, Engine, NotServed, Refused
from pronghorn.export.engines.transformers import TransformersEngine

ANSWERS, ANSWER_TOKENS = 8, 32
"""Conversations that are answered, and tokens of an answer, at most."""
STOPS = 4
"""Beginnings of answers after which generation must stop."""


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Return the first place at which two sequences differ, or where the shorter one ends."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


class Answers:
    """The trained model's answers to some conversations, and the engine's."""

    def __init__(self, reference: TransformersEngine, engine: Engine, asked: Sequence[tuple[Named, list[int]]]) -> None:
        self.reference, self.engine = reference, engine
        self.own = [(named, prompt, reference.complete(prompt, ANSWER_TOKENS)) for named, prompt in asked]
        self.went_on: dict[str, None] = {}
        """Conversations whose answer the engine didn't stop where the trained model did."""

    def texts(self) -> list[list[int]]:
        """Return prompts with the trained model's answers, stop tokens included."""
        return [[*prompt, *(own.token_ids or ())] for _, prompt, own in self.own]

    def compare(self, tie: float) -> tuple[Check, str]:
        """Compare greedy answers: their token ids, or texts where the engine tells no ids. Two tokens that the trained
        model likes equally well, within `tie`, are no difference."""
        limit = f"the same, but for ties within {tie:g} nats"
        same = ties = 0
        unlike: list[str] = []
        why: list[str] = []
        for named, prompt, own in self.own:
            try:
                served = self.engine.answer(named.conversation, ANSWER_TOKENS)
            except (NotServed, Refused) as error:
                why.append(f"{named.name}: {error.problem}")
                continue
            gap = self._gap(prompt, own, served)
            if gap == 0:
                same += 1
            elif gap <= tie:
                ties += 1
            else:
                unlike.append(named.name)
                if own.stopped and not served.stopped:
                    self.went_on.setdefault(named.name)
        count = same + ties + len(unlike)
        if not count:
            return Check(Name.ANSWERS, None, "-", limit, why[0] if why else "there is no conversation to answer"), ""
        value = f"{same} of {count} the same" + (f", {ties} ties" if ties else "")
        detail = "; ".join([f"unlike: {', '.join(unlike[:4])}"] * bool(unlike) + why[:2])
        return Check(Name.ANSWERS, not unlike, value, limit, detail), ", ".join(unlike[:4])

    def _gap(self, prompt: list[int], own: Completion, served: Completion) -> float:
        """Return by how much the trained model prefers its own token where answers part; 0 where they don't."""
        tokenizer, stops = self.reference.tokenizer, self.reference.stops
        ours = [token for token in own.token_ids or () if token not in stops]
        if served.token_ids is None:  # a text may have lost what a token says: part of a character, a special token
            text = tokenizer.decode(ours, skip_special_tokens=True)
            if own.stopped == served.stopped and text.strip() == served.text.strip():
                return 0.0
            theirs = list(tokenizer(served.text, add_special_tokens=False)["input_ids"])
        else:
            theirs = list(served.token_ids)
        theirs = theirs[:-1] if served.stopped and theirs and theirs[-1] in stops else theirs
        at = first_difference(ours, theirs)
        if at == len(ours) == len(theirs) and own.stopped == served.stopped:
            return 0.0
        row = self.reference.distribution([*prompt, *ours[:at], 0])[-1]
        best_stop = max((row[token].item() for token in stops if token < len(row)), default=-math.inf)
        mine = row[ours[at]].item() if at < len(ours) else best_stop
        other = best_stop
        if at < len(theirs):
            other = row[theirs[at]].item() if theirs[at] < len(row) else -math.inf
            if theirs[at] in stops:  # generated, and not taken for the end
                other = -math.inf
        return max(mine - other, 1e-9) if math.isfinite(other) else math.inf

    def compare_stops(self, rows: Sequence[list[int]], tie: float) -> tuple[Check, str]:
        """Let the engine go on after texts where the trained model clearly chooses a stop token."""
        limit, stops = "at once", self.reference.stops
        texts = [
            (named.name, [*prompt, *(token for token in own.token_ids or () if token not in stops)])
            for named, prompt, own in self.own
            if own.stopped
        ]
        for number, row in enumerate(rows, 1):
            texts += [(f"row {number}", row[:at]) for at, token in enumerate(row) if at and token in stops]
        ends = [(name, text) for name, text in texts if self._ends(text, tie)][:STOPS]
        if not ends:
            return Check(Name.STOPS, None, "-", limit, "the trained model ends none of these texts itself"), ""
        went_on: list[str] = []
        for name, text in ends:
            try:
                served = self.engine.complete(text, 4)
            except (NotServed, Refused) as error:
                return Check(Name.STOPS, None, "-", limit, error.problem), next(iter(self.went_on), "")
            ids = served.token_ids
            goes_on = bool(served.text.strip()) if ids is None else len(ids) > 1 or not stops.issuperset(ids)
            if not served.stopped or goes_on:
                went_on.append(name)
        value = f"{len(ends) - len(went_on)} of {len(ends)} stop"
        detail = f"goes on: {', '.join(went_on)}" if went_on else ""
        return Check(Name.STOPS, not went_on, value, limit, detail), went_on[0] if went_on else ""

    def _ends(self, text: list[int], tie: float) -> bool:
        """Tell whether the trained model ends a text here, and prefers that to going on by more than `tie`."""
        row = self.reference.distribution([*text, 0])[-1]
        first, second = row.topk(2).indices.tolist()
        return first in self.reference.stops and (row[first] - row[second]).item() > tie
