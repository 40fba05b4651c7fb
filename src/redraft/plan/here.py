"""The machine that a plan is held against."""

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from redraft.bench.machine import DRIVERS
from redraft.frame.store import store_root

_HASHED = 8 << 20


@dataclass(frozen=True)
class Here:
    """A machine."""

    store: Path
    disk_free: int
    """Bytes free at the store."""
    ram: int
    """Bytes in all."""
    gpus: tuple[int, ...]
    """Bytes of each GPU that this process sees."""
    md5: float
    """Bytes a second of one core, for DVC's hashes."""
    sha256: float
    """Likewise, for the checksums of shards."""


def here() -> Here:
    """This machine."""
    store = store_root()
    there = next(folder for folder in (store, *store.parents) if folder.is_dir())
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Here(store, shutil.disk_usage(there).free, ram, _gpus(), _rate("md5"), _rate("sha256"))


def _gpus() -> tuple[int, ...]:
    """Torch, slow to import, is asked only where there is a driver."""
    if not any(path.exists() for path in DRIVERS):
        return ()
    import torch

    return tuple(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))


def _rate(name: str) -> float:
    block = bytes(_HASHED)
    began = time.perf_counter()
    hashlib.new(name, block, usedforsecurity=False)
    return _HASHED / (time.perf_counter() - began)
