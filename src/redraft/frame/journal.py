"""The record of a stage's run, one JSON line at a time in `.store/journal/`: what MLflow is told, and told again.

First line: stage, key of the pipeline run, params, tags, time. Then curve rows, numbers and headline figures as they
come, and at last a status. MLflow is filled from it, so nothing is lost when a tracking server is missing: `redraft
publish` sends it.
"""

import json
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from redraft.frame.store import home

Row = dict[str, float]
KILLED = "KILLED"
NOT_DECISIVE = ("gate", "resume")
"""Params that say whether a run goes on, not what it makes."""


def journals() -> list[Path]:
    """Every journal of this workspace, oldest first."""
    return sorted((home() / "journal").glob("*.jsonl"), key=lambda path: (path.stat().st_mtime, path.name))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that is torn or still being written is left out."""
    lines = []
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


@dataclass
class Journal:
    """A journal that is being written; its lock is held until the run ends or its process dies."""

    path: Path
    lock: BaseFileLock
    last: dict[str, float] = field(default_factory=dict)
    """By curve, the step of the last row: a resumed training computes some rows again."""

    @classmethod
    def start(cls, header: dict[str, Any]) -> "Journal":
        """A new journal; or the one that a killed run of the same stage with the same params left."""
        folder = home() / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        for path in reversed(journals()):
            lines = read(path)
            if not lines or not _same(lines[0], header):
                continue
            ended = [line["status"] for line in lines if "status" in line]
            lock = FileLock(path.with_suffix(".lock"))
            if (ended and ended[-1] != KILLED) or not _take(lock):
                continue
            if not path.read_text().endswith("\n"):
                with path.open("a") as file:
                    file.write("\n")
            rows = [line for line in lines if "curve" in line]
            return cls(path, lock, {row["curve"]: row["row"]["step"] for row in rows})
        path = folder / f"{header['stage']}-{uuid.uuid4().hex[:12]}.jsonl"
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
        journal = cls(path, lock)
        journal.write(header)
        return journal

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "time": int(1000 * time.time())}) + "\n")

    def row(self, curve: str, row: Row) -> None:
        """Append a curve's row, unless it or a later one is there."""
        if row["step"] > self.last.get(curve, -1):
            self.last[curve] = row["step"]
            self.write({"curve": curve, "row": row})


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two headers are of one run: same stage, pipeline run and params but for how it is to be resumed."""

    def decisive(header: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in header.get("params", {}).items() if name not in NOT_DECISIVE}

    return one.get("stage") == two["stage"] and one.get("key") == two["key"] and decisive(one) == decisive(two)


def _take(lock: BaseFileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True
