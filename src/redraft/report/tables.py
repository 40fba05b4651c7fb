"""Markdown tables and the figures in them."""

from collections.abc import Sequence
from typing import Any

NONE = "–"
"""In place of a figure that was not, or cannot be, measured."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are set to the right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in [header, ruler, *rows])


def figure(value: float | None, form: str) -> str:
    """A figure in a format of Python; a dash for none."""
    return NONE if value is None else format(value, form)


def interval(value: float | None, half: float | None, form: str) -> str:
    """A figure with the half width of its interval, where there is one."""
    return figure(value, form) if value is None or half is None else f"{value:{form}} ± {half:{form}}"
