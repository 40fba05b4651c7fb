"""Where bytes lie that DVC does not keep, and the fingerprints that name them.

`.store` in the main workspace, also in a temporary run: journals, MLflow's database, saved trainings, server logs. The
big ones, hidden states and trainings, move with `$REDRAFT_STORE`.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def home() -> Path:
    """`.store` in the main workspace, also in a temporary run."""
    return Path(os.environ.get("DVC_ROOT", ".")).resolve() / ".store"


def store_root() -> Path:
    """`$REDRAFT_STORE`, else `.store` under `$DVC_ROOT` (the main workspace, also in temporary runs), else here."""
    return Path(os.environ.get("REDRAFT_STORE") or Path(os.environ.get("DVC_ROOT", ".")) / ".store").resolve()


def fingerprint(identity: dict[str, Any]) -> str:
    """SHA-256, 16 hex digits, of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
