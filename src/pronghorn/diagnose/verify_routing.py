"""The references of a model that routes tokens to experts, and the checks of what routers choose and experts give.

Scores of two experts that differ by less than rounding make two sound passes go apart. So such a model's references are
run after it, built anew, and are given its choices, which are judged by exact scores; what follows from a choice is
then compared as in any other model, and plain's error, which limits are made of, holds no token that went elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from pronghorn.diagnose.verify_reference import Passes, Run
from pronghorn.diagnose.verify_report import Cause, Check, Finding, Name
from pronghorn.parity.distance import listed
from pronghorn.parity.expert_outputs import TokenError, excesses
from pronghorn.parity.routing import Routes, judged, merged
from pronghorn.text import counted

Pair = tuple[Passes, Passes]
"""Plain and exact."""


@dataclass(frozen=True)
class Guides:
    """What the references' routers are to choose."""

    main: Routes = field(default_factory=dict)
    apart: dict[str, Routes] = field(default_factory=dict)
    """Of passes of the attached model that chose otherwise than the one with gradients: other shapes round so."""

    @classmethod
    def of(cls, routes: dict[str, Routes]) -> Guides:
        """Make them of what the attached model's passes chose, by their names."""
        main, apart = routes.get("ours", {}), {}
        for name in ("loss", "logits", "alone"):
            both = merged(main, routes.get(name, {}))
            if both is None:
                apart[name] = routes[name]
            else:
                main = both
        return cls(main, apart)

    def logits(self) -> Routes:
        """Return those of the packed rows' logits."""
        return self.apart.get("logits", self.main)


@dataclass(frozen=True)
class References:
    """The passes that each check judges by: one pair, unless tokens went elsewhere in some pass."""

    gradients: Pair
    loss: Pair
    logits: Pair
    alone: Pair
    """Of documents by themselves."""
    unquantised: Pair | None
    """Without 8 bits, where there are some."""
    rounded: Callable[[Callable[[str], None]], list[dict[str, Tensor]]]

    @classmethod
    def run(
        cls, run: Run, wide: torch.dtype, say: Callable[[str], None], in_8_bits: bool, guides: Guides
    ) -> References:
        """Run them on a model that isn't attached."""
        main = run.references(wide, say, routes=guides.main)
        unquantised = run.references(wide, say, quantised=False, routes=guides.main) if in_8_bits else None
        pairs = {"loss": main, "logits": main}
        with torch.no_grad():
            for name, routes in guides.apart.items():
                say(f"again, with what routers choose in other shapes ({name})")
                pairs[name] = run.references(wide, say, routes=routes)
        alone = pairs.get("alone", pairs["logits"])
        return cls(main, pairs["loss"], pairs["logits"], alone, unquantised, partial(run.rounded, routes=guides.main))

    def pairs(self) -> list[Pair]:
        """Return the passes with the model's choices, each pair once."""
        pairs = [self.gradients, self.loss, self.logits, self.alone]
        return [pair for at, pair in enumerate(pairs) if all(pair is not earlier for earlier in pairs[:at])]


def choices(references: References) -> Check:
    """Check that every token goes to the experts that exact scores choose, or that rounding may choose."""
    pairs = references.pairs()
    found = [each for plain, exact in pairs for each in judged(plain.gaps, exact.gaps)]
    unknown = sorted({name for _, exact in pairs for name in exact.gaps.unguided})
    worst = max(found, key=lambda each: each.excess, default=None)
    wrong = [each for each in found if not each.excess <= 1]
    others = sum(each.others for each in found)
    detail = f"{counted(others, 'choice')} that exact scores don't make, {'all ' if others else ''}within rounding"
    if unknown:
        detail += f"; not compared, for no topk over their scores was found: {listed(unknown)}"
    if wrong and worst:
        layers = listed(list(dict.fromkeys(each.name for each in wrong)))
        detail = f"{layers}; worst token {worst.token} of document {worst.document}"
    about = Finding(Cause.WRONG_EXPERT, detail)
    return Check(Name.CHOICES, not wrong, worst.excess if worst else 0.0, 1.0, detail, about)


def outputs(found: list[TokenError]) -> Check:
    """Check what experts give to each token, and its gradients."""
    over = excesses(found)
    wrong = [each for each, excess in zip(found, over, strict=True) if not excess <= 1]
    value, detail = max(over, default=0.0), "not checked: these experts are transformers' own"
    if found:
        worst = found[over.index(value)]
        detail = f"worst {worst.what} of {worst.name}, token {worst.token}: {worst.error:.1e} of its terms"
    if wrong:
        detail = listed([f"{each.what} of {each.name} (token {each.token})" for each in wrong])
    return Check(Name.OUTPUTS, not wrong, value, 1.0, detail, Finding(Cause.EXPERT_OUTPUT, detail))
