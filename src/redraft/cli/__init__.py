"""The `redraft` command."""

from redraft.cli.command import main

__all__ = ["main"]
