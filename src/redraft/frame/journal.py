"""The record of a stage's run, one JSON line at a time in `.store/journal/`: what MLflow is told, and told again.

First line: stage, key and id of the pipeline run, params, tags, fingerprint, time. Then curve rows, numbers, headline
figures, inputs and files (copies in a folder beside it) as they come, and at last a status. MLflow is filled from it:
nothing is lost when a tracking server is missing, `redraft publish` sends it. A journal is found by its first line and
its last; what lies between is read only to be sent.
"""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from redraft.frame.store import fingerprint, home

Row = dict[str, float]
RUNNING, FINISHED, FAILED, KILLED = "RUNNING", "FINISHED", "FAILED", "KILLED"
LAST_STAGE = "report"
"""With it a pipeline run ends."""
NOT_DECISIVE = ("gate", "resume")
"""Params that say whether a run goes on, not what it makes."""
TAIL_BYTES = 8192
"""Longer than a line with a status."""


@dataclass(frozen=True)
class State:
    """How a run stands."""

    status: str
    time: int = 0
    """When it came to that, ms since 1970."""
    error: str = ""


def journals() -> list[Path]:
    """Every journal of this workspace, oldest first."""
    return sorted((home() / "journal").glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def first(path: Path) -> dict[str, Any] | None:
    """The first line of a journal; None where it is torn."""
    with path.open("rb") as file:
        line = _parse(file.readline())
    return line if "stage" in line else None


def lines(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The lines of a journal after byte `start`, each with the byte where it ends; torn ones are left out."""
    with path.open("rb") as file:
        file.seek(start)
        for raw in file:
            start += len(raw)
            if line := _parse(raw):
                yield line, start


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that is torn or still being written is left out."""
    return [line for line, _ in lines(path)]


def state(path: Path) -> State:
    """How the run of a journal stands: what its last line says, else whether its process lives."""
    last = _last(path)
    if "status" in last:
        return State(last["status"], last["time"], last.get("error", ""))
    lock = FileLock(path.with_suffix(".lock"))
    if not _take(lock):
        return State(RUNNING)
    lock.release()
    return State(KILLED, path.stat().st_mtime_ns // 10**6, "its process ended without a word")


def run_of(header: dict[str, Any]) -> str:
    """The id of the pipeline run that a journal belongs to; earlier releases had one for each key."""
    return header.get("run") or fingerprint({"home": str(home()), "key": header.get("key")})


def _parse(raw: bytes) -> dict[str, Any]:
    if raw.endswith(b"\n"):
        with suppress(ValueError):
            line = json.loads(raw)
            return line if isinstance(line, dict) else {}
    return {}


def _last(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        tail = file.read()
    return _parse((tail.splitlines(keepends=True) or [b""])[-1])


@dataclass
class Journal:
    """A journal that is being written; its lock is held until the run ends or its process dies."""

    path: Path
    lock: BaseFileLock
    last: dict[str, float] = field(default_factory=dict)
    """By curve, the step of the last row: a resumed training computes some rows again."""

    @classmethod
    def start(cls, header: dict[str, Any]) -> "Journal":
        """A new journal; or the one that a killed run of the same stage left, if it had the same fingerprint."""
        folder = home() / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        members = _pipeline_run(header)
        for path, begun in reversed(members):
            if begun["stage"] != header["stage"] or not _may_go_on(begun, header):
                continue
            lock = FileLock(path.with_suffix(".lock"))
            if not _take(lock, patience=0.2):  # who asks whether a run lives holds its lock for a moment
                continue
            if _last(path).get("status", KILLED) == KILLED:
                return cls._again(path, lock)
            lock.release()
        run = members[-1][1]["run"] if members else uuid.uuid4().hex
        path = folder / f"{header['stage']}-{uuid.uuid4().hex[:12]}.jsonl"
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
        journal = cls(path, lock)
        journal.write({**header, "run": run})
        return journal

    @classmethod
    def _again(cls, path: Path, lock: BaseFileLock) -> "Journal":
        with path.open("ab+") as file:
            file.seek(-1, 2)
            if file.read() != b"\n":
                file.write(b"\n")
        rows = [line for line in read(path) if "curve" in line]
        return cls(path, lock, {row["curve"]: row["row"]["step"] for row in rows})

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "time": int(1000 * time.time())}) + "\n")

    def row(self, curve: str, row: Row) -> None:
        """Append a curve's row, unless it or a later one is there."""
        if row["step"] > self.last.get(curve, -1):
            self.last[curve] = row["step"]
            self.write({"curve": curve, "row": row})


def _pipeline_run(header: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """The journals of the pipeline run that a stage with this header belongs to, oldest first; none if it begins one.

    That is the newest of the same key, params and user, unless it has ended, or has this stage already.
    """
    alike = [(path, begun) for path in journals() if (begun := first(path)) and "run" in begun and _same(begun, header)]
    members = [(path, begun) for path, begun in alike if begun["run"] == alike[-1][1]["run"]]
    for path, begun in members:
        if begun["stage"] in (LAST_STAGE, header["stage"]) and state(path).status == FINISHED:
            return []
    return members


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two headers are of one user's pipeline runs with the same key and params but for how to resume."""

    def decisive(header: dict[str, Any]) -> tuple[object, ...]:
        params = {name: value for name, value in header.get("params", {}).items() if name not in NOT_DECISIVE}
        return header.get("key"), header.get("tags", {}).get("mlflow.user"), json.dumps(params, sort_keys=True)

    return decisive(one) == decisive(two)


def _may_go_on(begun: dict[str, Any], header: dict[str, Any]) -> bool:
    """Whether the figures of `header` would go on where those of `begun` ended: else the curve of a fault goes on."""
    never = header.get("params", {}).get("resume") == "never"
    return not never and begun.get("fingerprint") == header.get("fingerprint")


def _take(lock: BaseFileLock, patience: float = 0) -> bool:
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        return False
    return True
