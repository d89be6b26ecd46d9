"""What the guides name exists: formats are recognised as printed, and keys are keys of the recipe."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from pronghorn.config.recipe import Recipe
from pronghorn.data.formats import FORMATS, read_row, recognise

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {name: field.annotation.model_fields for name, field in Recipe.model_fields.items()}  # type: ignore[union-attr]
GUIDES = ("finetune", "fit-a-card", "check-numbers", "find-the-slow-part", "resume", "migrate", "after-training", "faq")
BLOCKS = re.findall(
    r"^`(\w+)`[^\n]*:\n\n```json\n(.*?)\n```", (DOCS / "finetune.md").read_text(), re.MULTILINE | re.DOTALL
)
EXAMPLES = [(name, row) for name, rows in BLOCKS for row in rows.split("\n")]
GUIDES += ("install", "troubleshooting", "limits", "preference-training", "several-gpus")


def test_every_format_has_two_example_rows() -> None:
    assert {name for name, _ in BLOCKS} == set(FORMATS)
    assert all(rows.count("\n") == 1 for _, rows in BLOCKS) and len(BLOCKS) == 8


@pytest.mark.parametrize(("name", "row"), EXAMPLES)
def test_an_example_row_is_recognised_and_read(name: str, row: str) -> None:
    value = json.loads(row)
    shape = recognise(value, "docs/finetune.md")
    assert shape.name == name
    read_row(shape, value, "docs/finetune.md", 1)


@pytest.mark.parametrize("page", GUIDES)
def test_the_keys_a_guide_names_are_in_the_recipe(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    named = re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)", text)
    named = [(section, key) for section, key in named if key not in ("jsonl", "html", "safetensors")]
    unknown = [f"{section}.{key}" for section, key in named if key not in SECTIONS[section]]
    assert not [key for key in unknown if key not in METHODS]


WALK = re.findall(r"`([\w.]+)` \((\S+\.py)\)", (DOCS / "walk.md").read_text())


@pytest.mark.parametrize(("name", "file"), WALK, ids=[name for name, _ in WALK])
def test_a_function_of_the_walk_is_defined_in_its_file(name: str, file: str) -> None:
    body: list[ast.stmt] = ast.parse((DOCS.parent / "src/pronghorn" / file).read_text()).body
    for part in name.split("."):
        named = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part]
        assert named, part
        body = named[-1].body


def test_every_line_of_the_walk_names_a_function() -> None:
    lines = re.findall(r"^\d+\. .*", (DOCS / "walk.md").read_text(), re.MULTILINE)
    assert 35 <= len(lines) <= 50 and [int(line.split(".")[0]) for line in lines] == list(range(1, len(lines) + 1))
    assert all(re.match(r"\d+\. `[\w.]+` \(\S+\.py\) ", line) for line in lines)


DECIDED = (DOCS / "design.md").read_text().partition("## Where is X decided")[2].partition("\n## ")[0]
PLACES = re.findall(r"`([\w/]+(?:\.py|/))`(?:, `(\w+)`)?", DECIDED)


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(place) for place in PLACES])
def test_what_decides_is_where_the_page_says(file: str, name: str) -> None:
    root = DOCS.parent if file.startswith("tests/") else DOCS.parent / "src/pronghorn"
    path = root / file
    assert path.exists()
    assert not name or re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE)


FOLDERS = "|".join(path.parent.name for path in (DOCS.parent / "src/pronghorn").glob("*/__init__.py"))
ELSEWHERE = {"models/gpt_oss.py", "data/dataset_info.json"}
"""Files of vLLM and LLaMA-Factory that pages name."""


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("*.md")))
def test_modules_that_a_page_names_are_there(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    named = {*re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[a-z]\w*(?:\.\w+)?(?![\w/*-])", text)} - ELSEWHERE
    gone = [name for name in named if not list((DOCS.parent / "src/pronghorn").glob(f"{name.removesuffix('.py')}*"))]
    assert not gone


METHODS = {"model.save_pretrained_gguf", "model.push_to_hub"}
"""Methods of a model, which read like keys."""


TOLD = re.findall(r"^\| (?!the error|---)(.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("error", TOLD)
def test_an_error_of_the_troubleshooting_page_is_raised_somewhere(error: str) -> None:
    """Its words stand in the source, in strings that may go on in another line."""
    for piece in filter(None, (piece.strip(" ,?") for piece in error.split("…"))):
        assert piece in SOURCE


SOURCE = "".join(
    re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in sorted((DOCS.parent / "src/pronghorn").rglob("*.py"))
)
