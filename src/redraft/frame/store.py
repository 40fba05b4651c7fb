"""Where bytes lie that DVC does not keep, and the fingerprints that name them.

`.store` in the main workspace, also in a temporary run: journals, MLflow's database, saved trainings, server logs. The
big ones, hidden states and trainings, move with `$REDRAFT_STORE`.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from redraft.frame import atomic

HEAD_BYTES = 64 * 1024


def home() -> Path:
    """`.store` in the main workspace, also in a temporary run."""
    return Path(os.environ.get("DVC_ROOT", ".")).resolve() / ".store"


def store_root() -> Path:
    """`$REDRAFT_STORE`, else `.store`, under `$DVC_ROOT` (the main workspace, also in temporary runs), else here."""
    root = Path(os.environ.get("DVC_ROOT", "."))
    return (root / Path(os.environ.get("REDRAFT_STORE") or ".store").expanduser()).resolve()


def fingerprint(identity: dict[str, Any]) -> str:
    """SHA-256, 16 hex digits, of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def files_fingerprint(folders: Iterable[Path]) -> str:
    """Of the names, sizes and first 64 KiB of all files but hidden, compiled and unreadable ones.

    Milliseconds, and enough for code and for manifests, which hold the hashes of what is larger.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.suffix == ".pyc" or any(part.startswith(".") for part in name.parts):
                continue
            with suppress(OSError), path.open("rb") as file:
                head = file.read(HEAD_BYTES)
                digest.update(repr((folder.name, str(name), path.stat().st_size, head)).encode())
    return digest.hexdigest()[:16]


def workspace() -> str:
    """An id of this workspace, made once: what two people run on one server stays apart."""
    path = home() / "workspace"
    if not path.is_file():
        atomic.write_text(path, uuid.uuid4().hex)
    return path.read_text()
