"""Compare a server's model with what a run trained, and show a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape

from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.tables import plain_table
from pronghorn.errors import PronghornError
from pronghorn.export.compare import ROWS, compare
from pronghorn.export.comparison import Comparison
from pronghorn.export.engine import Engine
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.records.finished import is_export, recipe_of
from pronghorn.train.chat import load_chat
from pronghorn.train.documents import prepare


def compare_served(
    run: Path, engine: Engine, format: str, exact: bool = False, say: Callable[[str], None] = lambda text: None
) -> Comparison:
    """Compare an engine with what the run in a folder trained, on the run's held-out documents where it has some, or
    with the export that lies there.

    `format` and `exact` are those of `export.compare.compare`.

    Raises:
        ConfigError, DataError: no finished run, or one that can't be loaded.
        ServerError: the server fails or doesn't answer.
    """
    recipe = None if is_export(run) else recipe_of(run)
    say(f"loading {run}")
    session = load_chat(run)
    trained = session.models.get("trained") or session.models["model"]
    reference = TransformersEngine(trained, session.tokenizer, str(run), session.models.get("base"))
    rows = [] if recipe is None else heldout_rows(recipe, session.tokenizer, say)
    return compare(reference, engine, format=format, rows=rows, exact=exact, say=say)


def heldout_rows(recipe: Recipe, tokenizer: object, say: Callable[[str], None]) -> list[list[int]]:
    """Return token ids of the run's first held-out documents; none where it has none, or these are gone."""
    if recipe.data.eval is None:
        return []
    try:
        documents = prepare(recipe, "eval", tokenizer, Console(quiet=True)).dataset
    except PronghornError as error:
        say(f"no held-out rows ({error.problem}): answers to built-in conversations are scored instead")
        return []
    return [list(documents[index]["input_ids"]) for index in range(min(ROWS, len(documents)))]


def render(comparison: Comparison) -> RenderableType:
    """Return a comparison as a table, its causes, and what could not be compared."""
    table = plain_table()
    for column in ("compared", "", "result", "limit", ""):
        table.add_column(column, overflow="fold", no_wrap=column == "compared")
    marks = {True: "[green]same[/]", False: "[red]differs[/]", None: "[yellow]not compared[/]"}
    for check in comparison.checks:
        texts = (check.value, check.limit, check.detail)
        table.add_row(check.name.value, marks[check.ok], *map(escape, texts))
    if comparison.losses is not None:
        trained, served = comparison.losses
        detail = escape(f"nats a token; the trained model's is {trained:.4f}")
        table.add_row("loss", "", f"{served:.4f}", "", detail)
    lines = [f"{escape(comparison.engine)}  against  {escape(comparison.reference)}, limits of {comparison.format}"]
    if comparison.skipped and not comparison.conversations:
        lines.append(f"The trained template renders none of the {len(comparison.skipped)} built-in conversations")
    elif comparison.skipped:
        lines.append(f"The trained template doesn't render: {escape(', '.join(comparison.skipped))}")
    if comparison.positions:
        lines.append(f"Log-probabilities and loss are of {escape(comparison.scored_on)}")
    verdict = [f"[red]cause:[/] {escape(cause)}" for cause in comparison.causes]
    missing = ", ".join(comparison.not_compared)
    if not comparison.ok:
        verdict.append(
            "[bold red]The served model is not the trained one.[/]"
            if any(check.ok is False for check in comparison.checks)
            else "[bold red]Nothing could be compared.[/]"
        )
    elif missing:
        verdict.append(f"[bold]The same as far as it was compared;[/] not compared: {missing}.")
    else:
        verdict.append("[bold green]The served model is the trained one.[/]")
    return Group(*lines, table, *verdict)
