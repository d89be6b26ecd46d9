"""What begins and ends an assistant's answers in tokenised documents, and the labels that follow from it.

An answer begins behind a response marker and ends with the tokenizer's EOS token, or before an instruction marker or
another role's turn: a tool's result, a system message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.data.template import special_tokens
from pronghorn.errors import ConfigError

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Marker:
    """One spelling of a part: `ids` between the white space `lead`, which may be in the token before, and `tail`, which
    may be in one token with what comes after. It `begins` a response or ends one; what ends one is trained if `said`:
    the assistant writes it."""

    ids: Ids
    lead: str
    tail: str
    begins: bool
    said: bool = False


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of a tokenizer, those of most tokens first, and its `control` tokens."""

    all: tuple[Marker, ...]
    control: frozenset[int]

    @classmethod
    def of(
        cls, instructions: Iterable[str], responses: Iterable[str], tokenizer: Any, ends: Iterable[str] = ()
    ) -> Markers:
        """Return the markers of all spellings of instruction and response parts, and of what ends a response as its
        last words.

        Raises:
            ConfigError: a part that is empty, or an instruction part with the tokens of a response part.
        """
        markers: dict[Ids, Marker] = {}
        kinds = (("instruction", instructions), ("response", responses), ("end", ends))
        for kind, part in [(kind, part) for kind, parts in kinds for part in parts]:
            for ids, around in _spellings(part, tokenizer, kind).items():
                marker = markers.setdefault(ids, Marker(ids, *around, kind == "response", kind == "end"))
                if kind == "response" and around == ("", ""):  # the whole part of one may be another's less its tail
                    markers[ids] = replace(marker, lead="", tail="")
                if kind == "response" and not marker.begins:
                    raise ConfigError(
                        f"instruction_part and response_part {part!r} have the same tokens",
                        "give what begins a user's turn and what begins an assistant's",
                    )
        control: Any = tokenizer.convert_tokens_to_ids(sorted(special_tokens(tokenizer)))
        return cls(tuple(sorted(markers.values(), key=lambda marker: -len(marker.ids))), frozenset(control))

    def openings(self) -> dict[int, set[int]]:
        """Return the control tokens that open an assistant's turn, each with what may follow it there: the beginnings
        of the role's name. With anything else it opens another role's turn."""
        opened: dict[int, set[int]] = {}
        for first, second in (marker.ids[:2] for marker in self.all if marker.begins and len(marker.ids) > 1):
            if first in self.control and second not in self.control:
                opened.setdefault(first, set()).add(second)
        return opened


def response_labels(ids: Sequence[int], markers: Markers, tokenizer: Any) -> list[int]:
    """Return one document's labels: `ids` from a response marker to the next instruction marker or the turn of another
    role (a tool, the system), -100 elsewhere.

    Another role's turn begins with a control token, which stands behind EOS or opens an assistant's turns, too. Where
    several markers match, the one of most tokens counts. Neither the first token nor one that a marker shares with the
    text after it is supervised.
    """
    openings, firsts = markers.openings(), {marker.ids[0] for marker in markers.all}
    eos, labels = tokenizer.eos_token_id, [IGNORE_INDEX] * len(ids)
    at, answering, ended = 0, False, False
    while at < len(ids):
        for marker in markers.all if ids[at] in firsts else ():
            if tuple(ids[at : at + len(marker.ids)]) == marker.ids and _after(marker.lead, ids[:at], tokenizer):
                end = _past(marker.tail, ids, at + len(marker.ids), tokenizer)
                if end is not None:
                    if marker.said and answering and labels[at - 1] != IGNORE_INDEX:
                        labels[at:end] = ids[at:end]
                    at, answering, ended = end, marker.begins, False
                    break
        else:
            if ids[at] == eos:
                ended = True
            elif ids[at] in markers.control:
                own = openings.get(ids[at])
                answering = answering and not ended and (own is None or at + 1 == len(ids) or ids[at + 1] in own)
            elif ended and str(tokenizer.decode([ids[at]])).strip():
                ended = False
            if answering:
                labels[at] = ids[at]
            at += 1
    return labels


def _after(lead: str, before: Sequence[int], tokenizer: Any) -> bool:
    """Tell whether the text before ends with `lead`; nothing before but special tokens will do too."""
    if not lead or all(token in tokenizer.all_special_ids for token in before):
        return True
    return str(tokenizer.decode(list(before[-1 - len(lead) :]))).endswith(lead)


def _past(tail: str, ids: Sequence[int], at: int, tokenizer: Any) -> int | None:
    """Return the position where the tokens from `at` on have spelled `tail`, or None if they spell something else."""
    for end in range(at, min(at + len(tail), len(ids)) + 1):
        text = str(tokenizer.decode(list(ids[at:end]))) if end > at else ""
        if text.startswith(tail):
            return end
        if not tail.startswith(text):
            return None
    return None


def _spellings(part: str, tokenizer: Any, name: str) -> dict[Ids, tuple[str, str]]:
    """Return the token ids of a marker, each with the white space that must come before and after it.

    Many tokenizers spell a marker otherwise at a text's beginning than after other text: SentencePiece has "▁###" after
    a space and "###" after a newline. A newline that begins the part may be one token with what stands before it, and
    one that ends it with the newline that a turn begins with.

    A space that ends the part may be one token with the word that follows, so a spelling without it counts too.
    """
    if not isinstance(part, str) or not part.strip():
        raise ConfigError(f"{name}_part is {part!r}", f"give the text that begins each {name}")

    def ids(text: str) -> Ids:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    lead = part[: len(part) - len(part.lstrip())]
    tail = part[len(part.rstrip()) :]
    bodies = [(part, ("", "")), (part.rstrip(" "), ("", ""))]
    bodies += [(part.lstrip(), (lead, "")), (part.strip(" ").lstrip(), (lead, ""))]
    if tail.strip(" "):
        bodies += [(part.rstrip(), ("", tail)), (part.strip(), (lead, tail))]
    spellings: dict[Ids, tuple[str, str]] = {}
    for body, around in bodies:
        spellings.setdefault(ids(body), around)
        for before in ("\n", " ", "a", "."):
            whole, alone = ids(before + body), ids(before)
            if whole[: len(alone)] == alone:
                spellings.setdefault(whole[len(alone) :], around)
    spellings.pop((), None)
    return spellings
