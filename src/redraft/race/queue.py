"""DVC's own queue, driven by its commands: put in, started, watched, and cleared of what is ours when we are stopped.

An experiment that succeeded is a git ref under the commit it began from, which is cheap to look for; `dvc queue status`
takes half a second of a core, so it is asked when a ref changed, and now and then.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from redraft.frame.errors import RedraftError
from redraft.race.contenders import Settings

LOOK_SECONDS, ASK_SECONDS = 1.0, 15.0
MOST_MISSED = 3
"""Looks in which a task may be in no list."""
LAST_LINES = 8
_TASK = re.compile(r"^([0-9a-f]{7})\s+(.*?)\s+(Queued|Running|Failed|Success)\s*$", re.M)


@dataclass(frozen=True)
class Task:
    """A line of `dvc queue status`."""

    name: str
    """Of the experiment; DVC's own id of the task where nobody named it."""
    status: str
    """Queued, Running, Failed (or killed) or Success."""


def tasks(text: str) -> list[Task]:
    """What `dvc queue status` prints."""
    found = []
    for number, middle, status in _TASK.findall(text):
        name = middle.split()[0] if middle else ""
        found.append(Task(number if not name or ":" in name else name, status))  # 10:15 AM: it has no name
    return found


def _said(command: Sequence[str], what: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as fault:
        # files, not pipes: a worker that `dvc queue start` leaves behind would hold a pipe open until nothing is queued
        try:
            done = subprocess.run(
                command, env={**os.environ, "PATH": path}, stdout=out, stderr=fault, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise RedraftError(what, where=" ".join(command), found=error.strerror) from error
        for file in (out, fault):
            file.seek(0)
        said, told = out.read(), fault.read()
    if done.returncode:
        raise RedraftError(what, where=" ".join(command), found=(told.strip() or said.strip()).removeprefix("ERROR: "))
    return said


def git(*arguments: str) -> str:
    """What git says."""
    return _said(["git", *arguments], "git does not do what the race needs.").strip()


def dvc(*arguments: str) -> str:
    """What DVC says."""
    return _said(["dvc", *arguments], "DVC does not do what the race needs.")


class Queue:
    """The queue of this workspace, for experiments whose names begin with `prefix`; all else in it is not touched."""

    def __init__(self, prefix: str, jobs: int) -> None:
        """`jobs`: experiments at a time."""
        self.prefix, self.jobs = prefix, jobs
        head = git("rev-parse", "HEAD")
        self.refs = f"refs/exps/{head[:2]}/{head[2:]}/"

    def done(self) -> dict[str, str]:
        """Commits of the experiments that succeeded, by name."""
        lines = git("for-each-ref", "--format=%(objectname) %(refname)", self.refs).splitlines()
        found = {ref.removeprefix(self.refs): commit for commit, ref in (line.split(" ", 1) for line in lines)}
        return {name: commit for name, commit in found.items() if name.startswith(self.prefix)}

    def _mine(self, *statuses: str) -> list[str]:
        names = [task.name for task in tasks(dvc("queue", "status")) if task.status in statuses]
        return [name for name in dict.fromkeys(names) if name.startswith(self.prefix)]

    def require_free(self) -> None:
        """Refuse a queue with tasks of others: starting it would run them, and they would take our time.

        Raises:
            RedraftError: naming them.
        """
        others = [
            task.name
            for task in tasks(dvc("queue", "status"))
            if task.status in ("Queued", "Running") and not task.name.startswith(self.prefix)
        ]
        if others:
            raise RedraftError(
                "DVC's queue holds tasks that are not of this race; to start it would run them as well.",
                where="dvc queue status",
                expected="no task that is queued or running",
                found=", ".join(others),
                fix="let them run (`dvc queue start`) to their end, or `dvc queue remove` them; then race",
            )

    def put(self, name: str, settings: Settings) -> None:
        """Queue the stage `train` and what it needs; a task of this name that failed before is forgotten."""
        if name in self._mine("Failed"):
            dvc("queue", "remove", name)
        changes = [part for key, value in settings for part in ("-S", f"{key}={value}")]
        dvc("exp", "run", "--queue", "--name", name, *changes, "train")

    def drop_queued(self) -> None:
        """Remove what we left in the queue when we were killed."""
        if left := self._mine("Queued"):
            dvc("queue", "remove", *left)

    def start(self) -> None:
        """See that workers are there."""
        dvc("queue", "start", "--jobs", str(self.jobs))

    def ended(self, names: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Each of `names` as it ends, with its commit, or None if it failed; starts workers where none is left.

        A task that a worker takes is for a moment neither queued nor running: only one that is missed again has ended.
        """
        left, seen, asked = list(names), "", -ASK_SECONDS
        missed: Counter[str] = Counter()
        while left:
            refs, now = git("for-each-ref", "refs/exps"), time.monotonic()
            if refs == seen and not missed and now - asked < ASK_SECONDS:
                time.sleep(LOOK_SECONDS)
                continue
            listed, done = tasks(dvc("queue", "status")), self.done()
            seen, asked = refs, now
            alive = {task.name for task in listed if task.status in ("Queued", "Running")}
            missed = Counter({name: missed[name] + 1 for name in left if name not in done and name not in alive})
            for name in list(left):
                if name in done or missed[name] > MOST_MISSED:
                    left.remove(name)
                    del missed[name]
                    yield name, done.get(name)
            if left and not any(task.status == "Running" for task in listed):
                self.start()
            if missed:
                time.sleep(LOOK_SECONDS)

    def forget(self) -> None:
        """Take the tasks that succeeded off DVC's list, which is long enough; the experiments stay."""
        if over := self._mine("Success"):
            dvc("queue", "remove", *over)

    def log(self, name: str) -> list[str]:
        """The last lines that a failed task wrote."""
        try:
            lines = dvc("queue", "logs", name).splitlines()
        except RedraftError as error:
            return str(error).splitlines()
        return [line for line in dict.fromkeys(lines) if line.strip()][-LAST_LINES:]

    def stop(self) -> None:
        """Remove what we queued and end what runs of it, stage and all; what has succeeded stays."""
        self.drop_queued()
        for name in self._mine("Running"):
            dvc("queue", "kill", name)
        for process in psutil.process_iter():  # a stage that did not hear it
            try:
                if process.environ().get("DVC_EXP_NAME", "").startswith(self.prefix):
                    process.terminate()
            except psutil.Error:
                continue


def read(commit: str, path: str) -> dict[str, Any]:
    """A JSON file that an experiment has in git."""
    return dict(json.loads(git("show", f"{commit}:{path}")))


def read_cached(commit: str, path: str) -> dict[str, Any]:
    """A JSON file that an experiment has in DVC's cache."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        dvc("get", ".", path, "--rev", commit, "--out", str(out), "--quiet")
        return dict(json.loads(out.read_text()))
