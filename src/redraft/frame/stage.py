"""What every stage script shares: read params, run, write metrics and timing, track, and end on one clear error."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redraft.frame import atomic, track
from redraft.frame.errors import RedraftError, explained
from redraft.frame.journal import Row
from redraft.frame.launch import is_main, launch
from redraft.frame.params import Config, load_config
from redraft.frame.track import StageRun


@dataclass
class Result:
    """What a stage reports besides its artefacts."""

    metrics: dict[str, Any] | None = None
    """Written to `metrics/<stage>.json`: nothing in it is a time."""
    timing: dict[str, Any] = field(default_factory=dict)
    """Written to `metrics/<stage>_timing.json`, with the stage's own `seconds`."""
    curves: dict[str, list[Row]] = field(default_factory=dict)
    """By name; each row has `step` and values."""
    headline: dict[str, float] = field(default_factory=dict)
    """The few figures by which runs are compared."""
    tags: dict[str, str] = field(default_factory=dict)
    """Words by which runs are found."""
    refused: RedraftError | None = None
    """Fails the stage after its figures are written: they are whole, and below what was asked."""


_current: list[StageRun] = []


def log(curve: str, row: Row) -> None:
    """Tell a row of a curve while the stage runs, for those who watch."""
    for tracked in _current:
        tracked.log(curve, row)


def run(
    name: str,
    body: Callable[[Config], Result],
    world: Callable[[Config], tuple[int, str]] = lambda config: (1, ""),
    *,
    recorded: bool = True,
) -> None:
    """Run the stage `name`; a RedraftError or an OSError ends it with exit code 1, a message and no traceback.

    Args:
        name: of the stage.
        body: what it does.
        world: gives processes and launcher, see `redraft.frame.launch`; rank 0 alone writes and tracks.
        recorded: whether there is something to keep: a stage that always runs would give every `dvc repro` a run.
    """
    try:
        config = load_config()
        if not recorded:
            body(config)
            return
        launch(*world(config))
        with track.stage_run(name, config) as tracked:
            _current[:] = [tracked]
            began = time.perf_counter()  # after MLflow was loaded and told
            result = body(config)
            if not is_main():
                return
            seconds = {"seconds": round(time.perf_counter() - began, 1), **result.timing}
            if result.metrics is not None:
                atomic.write_json(Path("metrics") / f"{name}.json", result.metrics)
            atomic.write_json(Path("metrics") / f"{name}_timing.json", seconds)
            tracked.publish(result.metrics or {}, seconds, result.curves, result.headline, result.tags)
            if result.refused:
                raise result.refused
    except (RedraftError, OSError) as error:
        if os.environ.get("REDRAFT_DEBUG") == "1":
            raise
        sys.exit(f"{name}: {explained(error)}")
    except KeyboardInterrupt:
        sys.exit(130)
