"""Curves as CSV: the points that DVC, the report and MLflow draw."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from redraft.frame import atomic


def write_curve(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Write rows with equal keys as CSV; no rows give a file with the header `step,loss`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["step", "loss"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{value:.6g}" for key, value in row.items()} for row in rows)
    atomic.write_text(path, text.getvalue())


def read_curve(path: Path) -> list[dict[str, float]]:
    """Read what `write_curve` wrote."""
    with path.open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
