"""Which model a target folder is: what a person, a hub and a server call it."""

import re
from dataclasses import dataclass
from pathlib import Path

from redraft.preflight.facts import object_or_reason
from redraft.target.folder import TARGET_RECORD, weights_folder

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{7,64})$")
"""The end of a path in the hub's cache."""


@dataclass(frozen=True)
class Source:
    """A model by its names."""

    name: str
    """For people: a hub id, or the name of the folder with the weights."""
    model: str
    """For `--model-path`: a hub id, or the folder with the weights."""
    revision: str | None = None
    """Commit of a hub id."""


def source_of(folder: Path) -> Source:
    """The model in a target folder: by its `target.json`, which the target stage writes, else by the folder itself.

    Raises:
        RedraftError: weights that are gone.
    """
    record = object_or_reason(folder / TARGET_RECORD)
    given = record if isinstance(record, dict) else {}
    name, revision = str(given.get("source") or ""), given.get("revision")
    if "@" in name:
        name, _, revision = name.partition("@")
    if name.startswith(("wheel:", "fit:")):
        return Source(name, str(folder))
    if revision and name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        return Source(name, name, str(revision))
    weights = weights_folder(folder) if given else folder
    weights = folder if weights.resolve() == folder.resolve() else weights
    if cached := _SNAPSHOT.search(weights.resolve().as_posix()):
        hub = f"{cached[1]}/{cached[2]}"
        return Source(hub, hub, cached[3])
    return Source(weights.resolve().name, str(weights))
