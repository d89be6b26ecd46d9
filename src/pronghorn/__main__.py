"""`python -m pronghorn` is the `pronghorn` command."""

from pronghorn.cli.main import app

app()
