"""The `pronghorn` command."""
