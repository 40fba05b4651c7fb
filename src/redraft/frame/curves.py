"""Curves as CSV: the points that DVC, the report and MLflow draw."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from redraft.frame import atomic
from redraft.frame.errors import RedraftError


def write_curve(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Write rows as CSV, empty where a row lacks what another has; no rows give a file with the header `step,loss`.

    Raises:
        RedraftError: a value that is not a finite number.
    """
    for row in rows:
        wrong = [f"{key} {value}" for key, value in row.items() if not math.isfinite(value)]
        if wrong:
            raise RedraftError(
                "A curve has a value that is not a number.",
                where=f"{path}: step {row.get('step')}",
                expected="finite numbers",
                found=", ".join(wrong),
            )
    names = dict.fromkeys(key for row in rows for key in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names) or ["step", "loss"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{value:.6g}" for key, value in row.items()} for row in rows)
    atomic.write_text(path, text.getvalue())


def read_curve(path: Path) -> list[dict[str, float]]:
    """Read what `write_curve` wrote."""
    with path.open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
