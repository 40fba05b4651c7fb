"""The record of a stage's run, one JSON line at a time in `.store/journal/`: what MLflow is told, and told again.

First line: stage, params, profile, tags, time. Then curve rows, numbers and headline figures as they come, and at last
a status. MLflow is filled from it, so nothing is lost when a tracking server is missing: `redraft publish` sends it.
"""

import json
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, float]
KILLED = "KILLED"


def home() -> Path:
    """`.store` in the main workspace, also in a temporary run."""
    return Path(os.environ.get("DVC_ROOT", ".")).resolve() / ".store"


def journals() -> list[Path]:
    """Every journal of this workspace, oldest first."""
    return sorted((home() / "journal").glob("*.jsonl"), key=lambda path: (path.stat().st_mtime, path.name))


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal: one that is being written is left out."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass
class Journal:
    """A journal that is being written."""

    path: Path
    last: dict[str, float] = field(default_factory=dict)
    """By curve, the step of the last row: a resumed training computes some rows again."""

    @classmethod
    def start(cls, header: dict[str, Any]) -> "Journal":
        """A new journal; or the one that a killed run of the same stage with the same params left."""
        folder = home() / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"{header['stage']}-*.jsonl")):
            lines = read(path)
            ended = [line["status"] for line in lines if "status" in line]
            same = lines and all(lines[0].get(name) == header[name] for name in ("stage", "key", "params"))
            if same and (not ended or ended[-1] == KILLED) and not _alive(lines[0].get("pid")):
                rows = [line for line in lines if "curve" in line]
                return cls(path, {row["curve"]: row["row"]["step"] for row in rows})
        journal = cls(folder / f"{header['stage']}-{uuid.uuid4().hex[:12]}.jsonl")
        journal.write({**header, "pid": os.getpid()})
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


def _alive(process: int | None) -> bool:
    if process is None or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
