"""Files that a server hands states over in: written by it, read once here, and removed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from redraft.frame.errors import RedraftError
from redraft.frame.store import store_root

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "redraft-states-"
GRACE_SECONDS = 2.0
"""From the free lock to the file, on a network file system."""
_POLL_SECONDS = 0.005


class TransferError(Exception):
    """A file that did not come, or not whole: asked again, the server may write it."""


@contextmanager
def transfer_folder(given: str | None, need: int) -> Iterator[Path]:
    """A folder of its own for the files in flight, removed at the end: in `given`, or in shared memory, or the store.

    Args:
        given: a folder that this process and the servers see.
        need: bytes of the files that can be in flight.

    Raises:
        RedraftError: `given` is no folder, or there is no room.
    """
    places = [Path(given)] if given else [SHARED_MEMORY, store_root()]
    if not given:
        store_root().mkdir(parents=True, exist_ok=True)
    free = {place: shutil.disk_usage(place).free for place in places if os.access(place, os.W_OK)}
    place = next((place for place, room in free.items() if room > need), None)
    if place is None:
        raise RedraftError(
            "There is no room for states in transfer.",
            where="extract.server.folder in the profile",
            expected=f"a folder with {need / 2**30:.1f} GiB",
            found=", ".join(f"{place}: {room / 2**30:.1f} GiB" for place, room in free.items())
            or f"no folder that can be written: {', '.join(map(str, places))}",
            fix="another folder, or a lower extract.server.concurrency",
        )
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    owner = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def _sweep(place: Path) -> None:
    """Remove what a process left that was killed: its folder has no owner who holds the lock."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - folder.stat().st_mtime > 60:  # or its owner is about to lock it
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def take_states(path: Path, seconds: float) -> dict[str, Tensor]:
    """Read `hidden_states` and `token_ids` of a file once its writer has let its lock go, and remove both.

    The server makes `PATH.lock` and holds it before it replies, writes the file after, and lets the lock go when the
    file is whole; reading before that gives half of it.

    Raises:
        TransferError: no lock, no file behind it, or one that is no safetensors file with these two, in `seconds`.
        RedraftError: it cannot be removed.
    """
    lock, end = path.with_name(path.name + ".lock"), time.monotonic() + seconds
    try:
        _await_lock(lock, end)
        grace = time.monotonic() + GRACE_SECONDS
        while not path.is_file():
            if time.monotonic() > grace:
                raise TransferError(f"{path}: its lock is free, and there is no file (is the folder full?)")
            time.sleep(_POLL_SECONDS)
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in ("hidden_states", "token_ids")}
    except (SafetensorError, OSError) as error:
        raise TransferError(f"{path}: {error}") from error
    finally:
        _remove(path, lock)


def _remove(path: Path, lock: Path) -> None:
    try:
        for each in (path, lock):
            each.unlink(missing_ok=True)
    except OSError as error:
        raise RedraftError(
            "A file of states cannot be removed, so the folder would fill.",
            where=path,
            found=error.strerror,
            cause="the server writes as another user",
            fix="run both as one user, or give the folder's group the right to write, without the sticky bit",
        ) from error


def _await_lock(lock: Path, end: float) -> None:
    """Hold and release the lock, shared; polled, since a server that hangs would never let it go."""
    told = "there is no such file"
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            handle = os.open(lock, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                told = "the server still holds it"
            finally:
                os.close(handle)
        time.sleep(_POLL_SECONDS)
    raise TransferError(f"{lock}: {told}")
