"""Every causal LM class of transformers, tiny: what docs/families.md says of it is what training it comes to.

`python tests/families/test_every_family.py` writes the page's table anew.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from support.causal_lms import Outcome, causal_lms, judge
from support.pages import DOCS, as_table, table_rows, with_section

PAGE, ROOT = DOCS / "families.md", DOCS.parent
HEADING = "Every causal language model"
COLUMNS = ["model type", "class", "trains", "how, or why not"]
KINDS = ("fused", "proven generic", "unpacked only", "refused", "not run")
COMMITTED = {row[0].strip("`"): row for row in table_rows(PAGE.read_text(), HEADING)[1:]}


def line(outcome: Outcome) -> list[str]:
    """Write an outcome as a row of the table, without numbers that differ between machines."""
    why = re.sub(r" \(relative error [^)]*\)", "", " ".join(outcome.why.split()))
    why = re.sub(r"\(RuntimeError: The size of tensor[^)]*\)", "(RuntimeError)", why).replace("|", "/")
    return [f"`{outcome.model_type}`", outcome.name, outcome.kind, why]


def counted(kinds: list[str]) -> str:
    """Write how many classes come to what."""
    return f"{len(kinds)} classes: {'; '.join(f'{kinds.count(kind)} {kind}' for kind in KINDS)}."


def test_the_table_has_every_class_and_enough_of_them_are_run() -> None:
    if f"transformers=={version('transformers')}\n" in (ROOT / "constraints.txt").read_text():
        assert COMMITTED.keys() == causal_lms().keys()
    else:  # another version has more or fewer
        assert len(COMMITTED.keys() & causal_lms().keys()) >= 150
    kinds = [row[2] for row in COMMITTED.values()]
    assert kinds == sorted(kinds, key=KINDS.index) and set(kinds) <= set(KINDS)
    assert f"\n{counted(kinds)}\n" in PAGE.read_text()
    assert sum(kind in ("fused", "proven generic", "unpacked only") for kind in kinds) >= 150


@pytest.mark.matrix(7)
@pytest.mark.parametrize("model_type", sorted(COMMITTED))
def test_a_class_trains_as_the_table_says(model_type: str) -> None:
    if model_type not in causal_lms():
        pytest.skip("this transformers hasn't it")
    assert line(judge(model_type)) == COMMITTED[model_type]


if __name__ == "__main__":
    outcomes = []
    for kind in causal_lms():
        outcomes.append(judge(kind))
        print(*line(outcomes[-1]), file=sys.stderr)
    outcomes.sort(key=lambda each: (KINDS.index(each.kind), each.model_type))
    body = f"{counted([each.kind for each in outcomes])}\n\n{as_table([COLUMNS, *map(line, outcomes)])}"
    PAGE.write_text(with_section(PAGE.read_text(), HEADING, body))
