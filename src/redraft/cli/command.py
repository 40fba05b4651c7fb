"""The command line: what the commands share, and how they end."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from redraft.cli import corpus, diff, drafter, mapping, plan, project, race, register, runs, store, verify
from redraft.frame.errors import RedraftError, explained


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="redraft", description="Carry an EAGLE-3 drafter to a new target.")
    parser.add_argument("--version", action="version", version=f"redraft {version('redraft')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (project, plan, corpus, mapping, drafter, runs, register, diff, race, store, verify):
        group.add_to(commands)
    return parser


def main() -> None:
    """Run the command line; a RedraftError ends it with its message and exit code 1."""
    arguments = _parser().parse_args()
    try:
        with _reader_may_leave():
            arguments.run(arguments)
    except (RedraftError, OSError) as error:
        if os.environ.get("REDRAFT_DEBUG") == "1":
            raise
        sys.exit(f"error: {explained(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End as other commands do, with 141, when whoever reads the output has gone (`redraft lint | head`).

    What is left is written here, since at the interpreter's end it would fail with a message of its own.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
