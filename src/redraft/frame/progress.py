"""Progress of long work: a bar with rate and time left on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

_Item = TypeVar("_Item")


def progress(
    items: Iterable[_Item], title: str, unit: str, total: int | None = None, initial: int = 0, shown: bool = True
) -> "tqdm[_Item]":
    """Wrap `items` in a progress bar on stderr; without a terminal it prints a whole line every 20 seconds."""
    terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=title,
        unit=unit,
        total=total,
        initial=initial,
        disable=not shown,
        dynamic_ncols=terminal,
        mininterval=0.2 if terminal else 20,
        maxinterval=1 if terminal else 20,
        leave=True,
        file=sys.stderr if terminal else _Lines(),
        ascii=not terminal or None,
    )


def counter(total: int, title: str, unit: str, initial: int = 0, shown: bool = True) -> "tqdm[Any]":
    """A bar that is told of its progress by `update`."""
    return progress((), title, unit, total, initial, shown)


def note(text: str) -> None:
    """Print a line on stderr, above a bar."""
    tqdm.write(text, file=sys.stderr)


class _Lines:
    """A stream that turns tqdm's carriage returns into lines, for logs."""

    def write(self, text: str) -> int:
        line = text.strip("\r\n\x1b[A ")
        if line:
            sys.stderr.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()
