"""`pronghorn docs`: the pages that remedies and recipes name, without a browser or the repository."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from pronghorn.cli.console import Console
from pronghorn.cli.shipped import choose, pages

_WIDEST = 110
_LINK = re.compile(r"\[([^\]\n]*)\]\(([\w-]+)\.md(?:#[^)]*)?\)")
"""A link to another page."""


def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="[PAGE]", help="Name of the page. Without it, all pages are listed.")
    ] = None,
) -> None:
    """Show a page of the documentation, or list all pages.

    In a file or a pipe the page is plain Markdown.

    [bold]Examples[/]

      pronghorn docs

      pronghorn docs finetune

      pronghorn docs recipe | grep warmup
    """
    console = Console(highlight=False)
    found = pages()
    if page is None:
        width = max(map(len, found))
        for name, text in found.items():
            title = text.splitlines()[0].removeprefix("# ")
            console.print(f"{name:{width}}  {title}", markup=False, overflow="ellipsis", no_wrap=True)
        console.print("Read one: pronghorn docs PAGE", markup=False)
        return
    text = choose(found, page.removeprefix("docs/").removesuffix(".md"), "page", "pronghorn docs lists the pages")
    if not console.is_terminal:
        typer.echo(text, nl=False)
        return
    from rich.markdown import Markdown

    linked = _LINK.sub(r"\1 (`pronghorn docs \2`)", text)
    console.print(Markdown(linked, hyperlinks=False), width=min(console.width, _WIDEST))
