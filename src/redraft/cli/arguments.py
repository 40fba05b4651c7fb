"""What several commands ask for, and what they require."""

import argparse
from pathlib import Path
from typing import TypeAlias

from redraft.frame.errors import RedraftError

PLACE = "a checkpoint folder, a safetensors file, ORG/NAME@COMMIT, or artifacts/vocab"
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(commands: Commands, name: str, help: str, example: str) -> argparse.ArgumentParser:  # noqa: A002
    """A command whose `--help` ends with one example."""
    return commands.add_parser(
        name,
        help=help,
        description=f"{help[:1].upper()}{help[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def require_new(output: Path) -> None:
    """Refuse to overwrite."""
    if output.exists():
        raise RedraftError("The output is there already.", where=output, fix="remove it, or give another --output")
