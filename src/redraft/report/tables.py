"""Markdown tables."""

from collections.abc import Sequence
from typing import Any


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are set to the right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in [header, ruler, *rows])
