"""Text from outside never commands the terminal, hides in a page, or fills the screen."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import pytest
import rich.console
import yaml
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import pronghorn.cli
from pronghorn.cli.console import Console
from pronghorn.cli.errors import LONGEST
from pronghorn.cli.main import app
from pronghorn.cli.train import summary
from pronghorn.records.page import write_page
from pronghorn.text import clip, counted, does, short, visible
from support.run_records import record

ATTACKS = {
    "a window's title": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "a clipboard": ("\x1b]52;c;ZXZpbA==\x1b\\", r"\x1b]52;c;ZXZpbA==\x1b" + "\\"),
    "a cleared screen": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "C1 control": ("\x9b2J\x9d0;t\x9c", r"\x9b2J\x9d0;t\x9c"),
    "a direction override": ("a\u202egpj.exe\u2066b", r"a\u202egpj.exe\u2066b"),
    "a line written over": ("bad\rgood\x08\x0b\x0c\x7f", r"bad\rgood\x08\x0b\x0c\x7f"),
    "unseen characters": ("\ufeff\u200b\u2028\u00ad\U000e0041", r"\ufeff\u200b\u2028\xad\U000e0041"),
    "a name of no encoding": ("caf\udce9", r"caf\udce9"),
}
HOSTILE = "".join(attack for attack, _ in ATTACKS.values())
COMMANDS = set(HOSTILE) - {character for character in HOSTILE if character.isprintable()}


def console(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=400, **options)


def printed(to: Console) -> str:
    return to.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("attack,shown", ATTACKS.values(), ids=ATTACKS)
def test_what_commands_a_terminal_is_written_out(attack: str, shown: str) -> None:
    assert visible(attack) == shown
    assert visible(shown) == shown


def test_other_text_stays_as_it_is() -> None:
    for text in ("", "a\tb\n", "שלום עולם, мир, 日本語", "👩\u200d🚀 क्\u200dष", "a\u00a0b"):
        assert visible(text) == text


@pytest.mark.parametrize("attack,shown", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_writes_text_out_wherever_it_stands(attack: str, shown: str, terminal: bool) -> None:
    table = Table(title=attack)
    table.add_column(attack)
    table.add_row(attack)
    for renderable in (attack, table, Panel(attack, title=attack), ["a", attack], {"key": attack}):
        to = console(force_terminal=terminal, color_system=None)
        to.print(renderable, markup=False)
        assert not COMMANDS & set(printed(to)), renderable
        if isinstance(renderable, str | Table | Panel):
            assert shown in printed(to)
    to = console(force_terminal=terminal, color_system=None)
    for print_it in (to.rule, lambda text: to.print(Text(text)), lambda text: to.print(text, soft_wrap=True)):
        print_it(attack)
    with Progress(TextColumn("{task.description}", markup=False), console=to) as progress:
        progress.add_task(attack, total=1)
    left = printed(to).replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\r\x1b[2K", "")
    assert not COMMANDS & set(left), repr(left)


def test_our_own_colours_and_emoji_codes_stay() -> None:
    to = console(force_terminal=True, color_system="standard", highlight=False)
    to.print("[bold red]error:[/] :cat:")
    assert printed(to) == "\x1b[1;31merror:\x1b[0m :cat:\n"
    aligned = console()
    table = Table("name", "next")
    table.add_row("\x1b[2J", "x")
    table.add_row("other", "x")
    aligned.print(table)
    assert len({len(line) for line in printed(aligned).splitlines()}) == 1, "widths are those of what is shown"


def test_every_command_prints_with_our_console() -> None:
    """One that is rich's own would let text through."""
    folder = Path(pronghorn.cli.__file__).parent
    files = [path for path in folder.glob("*.py") if path.name != "console.py" and not path.name.startswith("bench")]
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("rich", "rich.console"):
                assert not {"Console", "print", "get_console"} & {name.name for name in node.names}, path.name
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), path.name


def run(folder: Path, recipe: dict[str, Any], *more: str) -> Any:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = {"COLUMNS": "500", "HF_HUB_OFFLINE": "1"}
    result = CliRunner().invoke(app, ["train", str(folder / "recipe.yaml"), *more], env=environment)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert not COMMANDS & set(result.output), repr(result.output)
    return result


def test_errors_about_files_models_and_templates_are_inert(tmp_path: Path, stories: Path) -> None:
    name = HOSTILE.replace("\udce9", "").replace("/", "")
    data, shown = tmp_path / f"{name}.jsonl", visible(name)
    data.write_text("no JSON\n")
    recipe: dict[str, Any] = {
        "model": {"name": str(stories), "max_seq_length": 64},
        "data": {"train": str(data)},
        "train": {"output": str(tmp_path / "out")},
        "report": {"html": False},
    }
    assert f"{shown}.jsonl line 1: not valid JSON" in run(tmp_path, recipe).stderr
    assert shown in run(tmp_path, recipe | {"model": {"name": f"./{name}", "max_seq_length": 64}}).stderr
    (tmp_path / "t.jinja").write_text("{{ raise_exception('\x1b]0;owned\x07 \u202e') }}")
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    result = run(tmp_path, recipe, f"data.chat_template={tmp_path / 't.jinja'}")
    assert r"\x1b]0;owned\x07 \u202e" in result.stderr


def test_an_error_is_not_longer_than_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.config.recipe import Recipe
    from pronghorn.errors import ConfigError

    def refuse(*_: Any) -> None:
        raise ConfigError("begins " + "x" * 2500 + " ends", "do " + "y" * 2500 + " this")

    monkeypatch.setattr(Recipe, "load", refuse)
    result = CliRunner().invoke(app, ["train", "any.yaml"])
    first, second = result.stderr.splitlines()
    assert first.startswith("error: begins xxx") and first.endswith("xxx ends") and "characters left out" in first
    assert second.startswith("remedy: do yyy") and second.endswith("yyy this")
    assert max(len(first), len(second)) < LONGEST + 100


def test_the_summary_of_a_run_is_inert() -> None:
    """Prompts and answers are anybody's, and so is the model's name."""
    sample = {"prompt": f"p{HOSTILE}", "before": f"b{HOSTILE}", "after": f"a{HOSTILE}"}
    to = console()
    to.print(summary(record(model=HOSTILE, samples=[sample]), Path(f"o{HOSTILE}")))
    assert not COMMANDS & set(printed(to))
    assert all(letter + ATTACKS["a window's title"][1] in printed(to) for letter in "pbao")
    plain = rich.console.Console(file=io.StringIO(), width=400)
    plain.print(summary(record(samples=[sample]), Path("o")))
    assert COMMANDS & set(plain.file.getvalue()), "rich's own console lets them through"  # type: ignore[attr-defined]


def test_an_encoding_without_a_character_ends_no_run() -> None:
    """Of a terminal or a log in Latin-1, or in ASCII."""
    for encoding, shown in (("latin-1", "café · ??"), ("ascii", "caf? ? ??"), ("utf-8", "café · 日本")):
        raw = io.BytesIO()
        to = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=40)
        to.print("café · 日本")
        to.file.flush()
        assert raw.getvalue().decode(encoding) == f"{shown}\n"


def test_pages_show_what_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("<p>{{ name }}</p>{{ count }}{{ chart }}{% for n in names %}{{ n }}{% endfor %}")
    from markupsafe import Markup

    values = {"name": f"{HOSTILE}<b>\n", "count": 3, "chart": Markup("<svg></svg>"), "names": [HOSTILE]}
    text = write_page(tmp_path / "page.html", tmp_path / "t.j2", **values).read_text(encoding="utf-8")
    assert not COMMANDS & set(text)
    assert text.count(r"\u202egpj.exe") == 2 and "&lt;b&gt;\n</p>3<svg></svg>" in text


def test_long_text_keeps_its_ends() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("a" * 600 + "b" * 600, 300) == "a" * 200 + " … (900 characters left out) … " + "b" * 100
    assert len(short("x" * 10_000)) < 120 and len(short([["y"] * 99] * 99)) < 500 and short(3) == "3"


def test_counted_nouns_and_their_verbs() -> None:
    assert counted(1, "row") == "1 row" and counted(0, "row") == "0 rows" and counted(1200, "batch") == "1,200 batches"
    assert counted(1, "document", "have") == "1 document has" and counted(2, "document", "have") == "2 documents have"
    assert [does(1, verb) for verb in ("are", "were", "lose")] == ["is", "was", "loses"] and does(3, "are") == "are"
