"""Only a family's file knows the names of a model: of its modules, linears and classes, and its model type."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pronghorn.families.registry import FAMILIES

SOURCE = Path(__file__).parents[2] / "src" / "pronghorn"
TESTS = Path(__file__).parents[1]
MODULES = r"\w+_proj|self_attn|mlp|embed_tokens|lm_head|act_fn"
CLASSES = (
    r"(?:Llama|Mi[sx]tral|Ministral3?|Qwen\d|Gemma\d|GptOss|Olmoe|Olmo\d|Phi3|SmolLM3|Granite|SeedOss|Glm4)"
    r"(?:Moe)?[A-Z]\w+|\w*RMSNorm|\w*Linear4bit"
)
NAMES = re.compile(rf"(?<![\w-])(?:{MODULES}|{CLASSES})(?![\w-])")

EXCEPTIONS = {
    "chat_templates.py": "names of chat templates, Unsloth's and ours",
    "config/sections.py": "examples in keys' descriptions",
    "data/template.py": "names of chat templates, which recipes give",
    "diagnose/shapes.py": "sizes of known models, as data",
    "export/merge.py": "names not taken out yet",
    "layers/linears.py": "bitsandbytes' class Linear4bit",
    "export/gguf.py": "llama.cpp's names",
    "loading/gguf.py": "GGUF's own names of architectures and tensors",
    "loading/gguf_tokenizer.py": "GGUF's own names of tokenizers",
    "recipes/axolotl.py": "names of chat templates, Axolotl's and ours",
    "recipes/llama_factory.py": "names of chat templates, LLaMA-Factory's and ours",
}
"""Files that may hold such names, and why."""


def names_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for a family's names in source text; docstrings may hold them."""
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = [node.value] if node.value in FAMILIES else NAMES.findall(node.value)
        elif isinstance(node, ast.Attribute):
            words = NAMES.findall(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            words = NAMES.findall(node.arg)
        else:
            continue
        yield from ((node.lineno, word) for word in words)


@functools.cache
def names_in_files() -> dict[str, list[tuple[int, str]]]:
    """Return what `names_in` finds in each file."""
    return {
        file.relative_to(SOURCE).as_posix(): list(names_in(file.read_text()))
        for file in sorted(SOURCE.rglob("*.py"))
        if "families" not in file.relative_to(SOURCE).parts[:-1]
    }


def test_names_of_a_model_stand_in_its_family_s_file_only() -> None:
    assert {file: names for file, names in names_in_files().items() if names and file not in EXCEPTIONS} == {}


def test_every_exception_is_needed() -> None:
    assert [file for file in EXCEPTIONS if not names_in_files()[file]] == []


@pytest.mark.parametrize(
    "line",
    [
        'x = "q_proj"',
        "layer.self_attn",
        "f(lm_head=1)",
        'f"{layer}.mlp"',
        'kind == "gpt_oss"',
        'name.endswith("RMSNorm")',
        'formula == "GptOssExperts._apply_gate"',
    ],
)
def test_the_search_sees_a_name(line: str) -> None:
    assert [number for number, _ in names_in(f'"""About q_proj."""\n{line}')] == [2]


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """pytest imports them by their name alone, and refuses to collect the second."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_names_of_computes_are_listed_once() -> None:
    """What a recipe, a command and a script take is made of one list."""
    listing = [path.name for path in SOURCE.rglob("*.py") if '"fp8_exact"' in path.read_text(encoding="utf-8")]
    assert listing == ["compute_names.py"]


def test_no_file_is_longer_than_400_lines() -> None:
    assert {path.name for path in SOURCE.rglob("*.py") if path.read_text(encoding="utf-8").count("\n") > 400} == set()


def test_templates_of_pages_come_with_the_wheel() -> None:
    """A page that is moved without its name there works here, and not where it is installed."""
    data = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    named = {SOURCE.parent.joinpath(*package.split("."), name) for package, names in data.items() for name in names}
    assert {*SOURCE.rglob("*.j2")} == {path for path in named if path.suffix == ".j2"}
