"""What a remedy, a recipe's comment or a help page names is there for whoever has the wheel alone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.cli.shipped import pages, recipes
from release import build

ROOT = Path(__file__).parents[2]
COMMAND = r"pronghorn docs ([a-z][\w-]*)"
PATH = r"(?<!/blob/master/)\bdocs/([\w-]+)\.md"
NOT_PAGES = {"lists"}  # "pronghorn docs lists the pages"


def strings() -> Iterator[tuple[Path, bool, str]]:
    """Yield the strings of the source, one in several pieces as one, and whether each is a docstring."""
    for file in sorted((ROOT / "src/pronghorn").rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented) and node.body]
        docstrings = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, id(node) in docstrings, node.value


def named(text: str) -> set[str]:
    return {*re.findall(COMMAND, text), *re.findall(PATH, text)} - NOT_PAGES


def test_every_page_that_the_source_names_is_shipped() -> None:
    texts = [(file, docstring, text) for file, docstring, text in strings() if named(text)]
    assert len(texts) > 20
    for file, docstring, text in texts:
        assert named(text) <= pages().keys(), (file, text)
        assert docstring or not re.search(PATH, text), f"{file}: a user without the repository has no {text}"


def test_no_message_names_a_file_of_the_repository() -> None:
    for file, docstring, text in strings():
        assert docstring or not re.search(r"\b(?:recipes|benchmarks|examples|demo|tests)/[\w./-]+", text), (file, text)


def test_every_page_and_recipe_that_comments_of_recipes_name_is_shipped() -> None:
    for text in recipes().values():
        assert "pronghorn docs recipe" in text and named(text) <= pages().keys()
        assert "demo/" not in text and "recipes/" not in text


def test_the_links_of_the_package_lead_to_the_repository_s_folders() -> None:
    assert pages() == {file.stem: file.read_text("utf-8") for file in (ROOT / "docs").glob("*.md")}
    assert recipes() == {file.stem: file.read_text("utf-8") for file in (ROOT / "recipes").glob("*.yaml")}
    assert len(pages()) > 30 and len(recipes()) >= 4


@pytest.mark.slow
def test_the_wheel_and_the_sdist_hold_them(tmp_path: Path) -> None:
    sdist, wheel = build(tmp_path, offline=True)
    wanted = {f"pronghorn/docs/{name}.md" for name in pages()}
    wanted |= {f"pronghorn/recipes/shipped/{name}.yaml" for name in recipes()}
    assert wanted <= set(zipfile.ZipFile(wheel).namelist()) and sdist.is_file()  # the wheel is built from the sdist


def invoke(*words: str) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return done.output


def test_pages_are_listed_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = invoke("docs")
    assert all(f"\n{name} " in f"\n{listed}" for name in pages())
    for name in ("limits", "limits.md", "docs/limits.md"):
        assert invoke("docs", name) == pages()["limits"]
    monkeypatch.setattr("pronghorn.cli.docs.Console.is_terminal", True)
    shown = invoke("docs", "install")
    assert "```" not in shown and "## " not in shown and "pip install ." in shown
    assert "pronghorn docs recipe" in invoke("docs", "finetune")  # a link, as a command


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_shipped_recipe_is_copied_and_loads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.config.recipe import Recipe

    monkeypatch.chdir(tmp_path)
    for file in ("my-data.jsonl", "my-texts.jsonl"):
        Path(file).write_text("")
    invoke("init", "mine.yaml", "--recipe", name)
    assert Path("mine.yaml").read_text("utf-8") == recipes()[name]
    assert str(Recipe.load(Path("mine.yaml"), []).train.output) == f"runs/{name}"
    assert recipes()[name].splitlines()[0].removeprefix("# ") in invoke("init", "--recipe", "list")


def test_what_is_not_shipped_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, says in (
        (("docs", "finetuning"), "did you mean finetune?"),
        (("docs", "xyz"), "pronghorn docs lists the pages"),
        (("init", "--recipe", "gpu_lora"), "did you mean gpu-lora?"),
        (("init", "--recipe", "qqq"), "one of gpu-full, gpu-lora"),
        (("init", "--recipe", "gpu-lora", "--data", "a.jsonl"), "leave one of them out"),
    ):
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert done.exit_code == 1 and says in done.stderr, done.output


def test_comments_of_the_source_name_pages_that_are_there() -> None:
    for file in sorted((ROOT / "src/pronghorn").rglob("*.py")):
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline)
        comments = " ".join(token.string for token in tokens if token.type == tokenize.COMMENT)
        assert set(re.findall(PATH, comments)) <= pages().keys(), file
