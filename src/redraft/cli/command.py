"""The command line: what the commands share, and how they end."""

import argparse
import os
import sys
from importlib.metadata import version

from redraft.cli import corpus, drafter, mapping, project, runs
from redraft.frame.errors import RedraftError, explained


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="redraft", description="Carry an EAGLE-3 drafter to a new target.")
    parser.add_argument("--version", action="version", version=f"redraft {version('redraft')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (project, corpus, mapping, drafter, runs):
        group.add_to(commands)
    return parser


def main() -> None:
    """Run the command line; a RedraftError ends it with its message and exit code 1."""
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except (RedraftError, OSError) as error:
        if os.environ.get("REDRAFT_DEBUG") == "1":
            raise
        sys.exit(f"error: {explained(error)}")
    except KeyboardInterrupt:
        sys.exit(130)
