"""Wall time of the parts of an optimizer step, so that a user sees what binds."""

import statistics
import time

import torch


class Laps:
    """Times the steps that it is told to; a GPU has to be waited for, so not all of them."""

    def __init__(self) -> None:
        self.on = False
        self.last = 0.0
        self.sums: dict[str, float] = {}
        """Milliseconds of this step by part."""
        self.rows: list[dict[str, float]] = []
        """The same of each step that was timed."""

    def begin(self, on: bool) -> None:
        """Start a step, timed or not."""
        self.on, self.last, self.sums = on, time.perf_counter(), {}

    def __call__(self, part: str) -> None:
        """Add the milliseconds since the last call to `part`."""
        if self.on:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.sums[part] = self.sums.get(part, 0.0) + 1e3 * (now - self.last)
            self.last = now

    def end(self) -> None:
        """Keep the step."""
        if self.on:
            self.rows.append(self.sums)

    def medians(self) -> dict[str, float]:
        """Milliseconds of a step by part."""
        names = self.rows[0] if self.rows else ()
        return {name: round(statistics.median(row[name] for row in self.rows), 1) for name in names}
