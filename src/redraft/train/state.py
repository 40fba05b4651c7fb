"""State of a training that survives its process, in the store, outside of what DVC removes before a stage runs.

`<store>/train/<title>/<fingerprint>/` holds `identity.json` and one folder `step-<n>` with what Accelerate saves
(weights, optimizer, random states), `progress.json`, the best weights so far, and last `manifest.json` with size and
SHA-256 of each file. Written under another name, then renamed; the fingerprint is that of everything which decides the
result.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame import atomic
from redraft.frame.device import resolve
from redraft.frame.errors import RedraftError
from redraft.frame.params import flatten
from redraft.frame.profile import FitParams
from redraft.frame.store import fingerprint, store_root
from redraft.hidden.rows import HiddenStates
from redraft.train.measure import Heldout

Weights = dict[str, Tensor]
BEST = "best.safetensors"
PROGRESS = "progress.json"
IDENTITY = "identity.json"
MANIFEST = "manifest.json"


@dataclass
class Progress:
    """Where a training stands; JSON but for the best weights."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Heldout] = field(default_factory=list)
    window: dict[str, list[float]] = field(default_factory=dict)
    """Sums since the curve's last row."""
    best: int = 0
    """Index of the best evaluation; the first is that of the initial weights."""

    @property
    def kept(self) -> Heldout:
        """The best evaluation."""
        return self.evaluations[self.best]


CODE = (
    "drafter/model.py",
    "hidden/formats.py",
    "hidden/rows.py",
    *(f"train/{name}.py" for name in ("attention", "batches", "loop", "measure", "step", "update", "walk")),
)
"""Files of the package that decide what a training makes."""


def identity(
    accelerator: Accelerator, checkpoint: Checkpoint, train: HiddenStates, params: FitParams
) -> dict[str, Any]:
    """Everything that decides the weights: two trainings that agree in it may share a state."""
    package = Path(__file__).parents[1]
    sources = {name: torch.frombuffer(bytearray((package / name).read_bytes()), dtype=torch.uint8) for name in CODE}
    return {
        "params": {**params.model_dump(exclude={"save_steps"}), "precision": resolve(params.precision)},
        "mapping": checkpoint.mapping.hash,
        "initial": weights_hash(checkpoint.drafter.state_dict()),
        "hidden": train.fingerprint,
        "processes": accelerator.num_processes,
        "distributed": str(accelerator.distributed_type.value),
        "device": accelerator.device.type,
        "torch": torch.__version__,
        "code": weights_hash(sources),
    }


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
    def alone(self) -> Iterator[None]:
        """Hold the state for one training at a time.

        Raises:
            RedraftError: another process runs this very training.
        """
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
        """The newest step to go on from, by `resume`: `auto`, `never` or `must`; and why there is none.

        Raises:
            RedraftError: `must` without a state of this very training.
        """
        steps = sorted(self.folder.glob("step-*")) if resume != "never" else []
        if steps:
            return steps[-1], None
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
        try:
            before = flatten(json.loads(others[-1].read_text()))
        except (OSError, ValueError, AttributeError):
            return f"what {others[-1]} said, which cannot be read"
        now = flatten(json.loads(json.dumps(self.identity)))
        names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        return ", ".join(f"{name} (was {before.get(name)}, now {now.get(name)})" for name in names)

    def save(
        self,
        progress: Progress,
        best: Weights | None,
        fill: Callable[[Path], None],
        main: bool,
        agreed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Save a step; called on every process.

        Args:
            progress: where the training stands.
            best: the best weights so far; None, the initial ones.
            fill: writes to a folder what every process has a share in.
            main: whether this process writes the rest.
            agreed: a block at whose end all processes wait for each other, see `redraft.train.processes`.

        Raises:
            RedraftError: it could not be written; the step before is whole.
        """
        done = self.folder / f"step-{progress.step:09d}"
        partial = self.folder / f".{done.name}.partial"
        with agreed(), self._writing():
            if main:
                for left in self.folder.glob(".step-*"):
                    shutil.rmtree(left)
                partial.mkdir(parents=True)
                atomic.write_json(self.folder / IDENTITY, self.identity)
        with self._writing():
            fill(partial)  # under FSDP processes wait for each other in here, so this is no block of `agreed`
        with agreed():
            pass
        with agreed(), self._writing():
            if main:
                if best is not None:
                    save_file(best, partial / BEST)
                (partial / PROGRESS).write_text(json.dumps(progress, default=vars, allow_nan=False))
                _seal(partial)
                if done.exists():
                    shutil.rmtree(done)
                partial.replace(done)
                for old in self.folder.glob("step-*"):
                    if old != done:
                        shutil.rmtree(old)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's writer raises RuntimeError
            raise RedraftError(
                "The state of the training cannot be saved.",
                where=getattr(error, "filename", None) or self.folder,
                found=str(error).splitlines()[0],
                cause="no space left, or no right to write there",
                fix="make room, or move the store with REDRAFT_STORE; the state saved before is whole, so the same "
                "command goes on from it",
            ) from error

    def discard(self) -> None:
        """Remove the state: what it was for is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(folder: Path) -> None:
    """Write the manifest of a folder that is complete, everything on disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        atomic.sync_file(file)
    entries = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    atomic.write_json(folder / MANIFEST, entries)


def check_whole(folder: Path) -> None:
    """Compare every file of a saved step with its manifest.

    Raises:
        RedraftError: naming the first file that is missing, cut, or another's.
    """
    for name, entry in _read_json(folder, MANIFEST).items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            found = "no such file" if size is None else f"{size} bytes"
            raise _damaged(path, f"{entry['bytes']} bytes", found)
        if _sha256(path) != entry["sha256"]:
            raise _damaged(path, f"SHA-256 {entry['sha256']}", "other bytes of the same size")


def load(folder: Path) -> tuple[Progress, Weights | None]:
    """What `State.save` wrote besides what every process has a share in; see `check_whole`.

    Raises:
        RedraftError: a file that it needs is missing or of another step.
    """
    fields = _read_json(folder, PROGRESS)
    fields["evaluations"] = [Heldout(**row) for row in fields["evaluations"]]
    progress = Progress(**fields)
    if folder.name != f"step-{progress.step:09d}":
        raise _damaged(folder / PROGRESS, f"that of {folder.name}", f"that of step {progress.step}")
    if progress.best and not (folder / BEST).is_file():
        raise _damaged(folder / BEST, f"the weights of step {progress.kept.step}", "no such file")
    return progress, load_file(folder / BEST) if progress.best else None


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise _damaged(folder / name, "a file that every saved step has", "no such file") from error
    except ValueError as error:
        raise _damaged(folder / name, "JSON", error) from error


def _damaged(path: Path, expected: str, found: object) -> RedraftError:
    return RedraftError(
        "The saved state of a training is damaged.",
        where=path,
        expected=expected,
        found=found,
        cause="something else than redraft removed, cut or replaced the file",
        fix=f"put the file back; or remove {path.parent}, or set resume: never, and the training begins anew",
    )
