"""Which model a target folder is: what a person, a hub and a server call it."""

from dataclasses import dataclass
from pathlib import Path

from redraft.preflight.facts import object_or_reason
from redraft.target.folder import TARGET_RECORD, weights_folder
from redraft.target.hub import snapshot_of


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
    name, revision = str(given.get("source") or ""), given.get("commit") or given.get("revision")
    if "@" in name:
        name, _, named = name.partition("@")
        revision = revision or named
    if name.startswith(("wheel:", "fit:")):
        return Source(name, str(folder))
    if revision and name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        return Source(name, name, str(revision))
    weights = weights_folder(folder) if given else folder
    weights = folder if weights.resolve() == folder.resolve() else weights
    if cached := snapshot_of(weights):
        return Source(cached[0], *cached)
    return Source(weights.resolve().name, str(weights))
