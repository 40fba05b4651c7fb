"""State of a training that survives its process, in the store, outside of what DVC removes before a stage runs.

`<store>/train/<title>/<fingerprint>/` holds `identity.json` and one folder `step-<n>` with what Accelerate saves
(weights, optimizer, random states), `progress.json` and the best weights so far. Written under another name, then
renamed; the fingerprint is that of everything which decides the result.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.params import flatten
from redraft.frame.store import fingerprint, store_root

Weights = dict[str, Tensor]
BEST = "best.safetensors"
PROGRESS = "progress.json"
IDENTITY = "identity.json"


@dataclass
class Progress:
    """Where a training stands; JSON but for the best weights."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    window: dict[str, list[float]] = field(default_factory=dict)
    """Sums since the curve's last row."""
    best: int = 0
    """Index of the best evaluation; the first is that of the initial weights."""


def weights_hash(weights: Weights) -> str:
    """SHA-256 of names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class State:
    """The saved state of one training."""

    title: str
    identity: dict[str, Any]
    """Everything that decides the result."""

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._home / fingerprint(self.identity)

    @property
    def _home(self) -> Path:
        return store_root() / "train" / self.title.replace(" ", "-")

    @contextmanager
    def alone(self, main: bool) -> Iterator[None]:
        """Hold the state for one training at a time.

        Raises:
            RedraftError: another process runs this very training.
        """
        if not main:
            yield
            return
        self._home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder.with_suffix(".lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise RedraftError(
                "Another process runs this very training.",
                where=self.folder,
                fix="wait for it, or end it (after a kill -9 of the launcher, its processes may live on)",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def find(self, resume: str) -> tuple[Path | None, str | None]:
        """The newest complete step to go on from, by `resume`: `auto`, `never` or `must`; and why there is none.

        Raises:
            RedraftError: `must` without a state of this very training.
        """
        steps = sorted(self.folder.glob("step-*/" + PROGRESS)) if resume != "never" else []
        if steps:
            return steps[-1].parent, None
        changed = self._changed() if resume != "never" else None
        if resume == "must":
            raise RedraftError(
                "There is no state to resume from.",
                where=self.folder,
                found=f"a training that differs in {changed}" if changed else "none",
                fix="put back what differs, or set resume: auto",
            )
        return None, f"starts from nothing, since the state of before differs in {changed}" if changed else None

    def _changed(self) -> str | None:
        """What sets the newest other state apart, if there is one."""
        others = sorted(self._home.glob("*/" + IDENTITY), key=lambda path: path.stat().st_mtime)
        if not others:
            return None
        before = flatten(json.loads(others[-1].read_text()))
        now = flatten(json.loads(json.dumps(self.identity)))
        names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        return ", ".join(f"{name} (was {before.get(name)}, now {now.get(name)})" for name in names)

    def save(
        self,
        progress: Progress,
        best: Weights | None,
        fill: Callable[[Path], None],
        main: bool,
        wait: Callable[[], None],
    ) -> None:
        """Save a step; called on every process. `fill` writes the sharded part, `wait` is a barrier."""
        done = self.folder / f"step-{progress.step:09d}"
        partial = self.folder / f".{done.name}.partial"
        if main:
            for left in self.folder.glob(".step-*"):
                shutil.rmtree(left)
            partial.mkdir(parents=True)
            atomic.write_json(self.folder / IDENTITY, self.identity)
        wait()
        fill(partial)
        wait()
        if main:
            if best is not None:
                save_file(best, partial / BEST)
            for file in partial.rglob("*"):
                atomic.sync_file(file)
            atomic.write_json(partial / PROGRESS, vars(progress))
            if done.exists():
                shutil.rmtree(done)
            partial.replace(done)
            for old in self.folder.glob("step-*"):
                if old != done:
                    shutil.rmtree(old)
        wait()

    def discard(self) -> None:
        """Remove the state: what it was for is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def load(folder: Path) -> tuple[Progress, Weights | None]:
    """What `State.save` wrote besides the sharded part."""
    best = load_file(folder / BEST) if (folder / BEST).is_file() else None
    return Progress(**json.loads((folder / PROGRESS).read_text())), best
