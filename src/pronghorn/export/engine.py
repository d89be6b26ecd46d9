"""What a comparison asks of a model that runs somewhere (`export.compare`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pronghorn.data.rows import Conversation
from pronghorn.errors import DataError, UnsupportedError


class NotServed(UnsupportedError):
    """Something that an engine has no way to tell."""


class Refused(DataError):
    """A conversation or prompt that an engine refuses."""


@dataclass(frozen=True)
class Scored:
    """What an engine says of one position."""

    token: int
    """The token that is scored: the text's own, or the engine's first choice where it tells no other."""
    logprob: float
    first: int | None
    """The engine's first choice; None if it is not the text's token, and not known."""


@dataclass(frozen=True)
class Completion:
    """What an engine generated, greedily."""

    text: str
    stopped: bool
    """Whether a stop token ended it, rather than its length."""
    token_ids: tuple[int, ...] | None = None
    """None where the engine tells the text only; a stop token may be the last."""
    prompt_tokens: int | None = None


class Engine(Protocol):
    """A model that runs somewhere. Each method raises NotServed for what can't be asked, Refused for what was."""

    name: str

    def tokenize(self, conversation: Conversation) -> list[int]:
        """Return the token ids that the model is given for a conversation, up to where its answer begins."""

    def logprobs(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Return what the engine says of positions of a text, by index, each given the tokens before it."""

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        """Continue a text greedily."""

    def answer(self, conversation: Conversation, max_tokens: int) -> Completion:
        """Answer a conversation greedily, through the engine's own template."""
