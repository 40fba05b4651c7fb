"""What the store holds of hidden states, what of it a manifest names, and what nothing names any more."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.progress import progress
from redraft.frame.store import store_root, workspace
from redraft.hidden.pool import FORMAT, Pool
from redraft.hidden.shards import Shard, read_entry, remove_shard, require_whole, tensors_file


@dataclass(frozen=True)
class Holding:
    """A pool, and who names its shards."""

    pool: Pool
    users: dict[str, set[str]] = field(default_factory=dict)
    """By name of a shard, who names it in a manifest: `workspace`, or a branch, tag or experiment."""

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """By name."""
        return self.pool.shards()

    @property
    def used_by(self) -> list[str]:
        """Everyone who names one of its shards."""
        return sorted(set().union(*self.users.values())) if self.users else []

    @property
    def stale(self) -> list[Shard]:
        """Shards that nobody names."""
        return [shard for name, shard in self.shards.items() if name not in self.users]

    @property
    def bytes(self) -> int:
        """Of all files, what a killed process left half-written among them."""
        return sum(path.stat().st_size for path in self.pool.folder.rglob("*") if path.is_file())

    def damaged(self) -> list[RedraftError]:
        """Compare the bytes of every shard anew; what is wrong."""
        found = [
            RedraftError("The entry of a shard cannot be read.", where=path)
            for path in sorted(self.pool.folder.glob("*.json"))
            if path.stem != "facts" and read_entry(path) is None
        ]
        for shard in progress(self.shards.values(), f"verify {self.pool.name}", "shard"):
            with suppress(OSError):  # of a store that may only be read
                (self.pool.folder / f"{shard.name}.whole").unlink(missing_ok=True)
            try:
                require_whole(self.pool.folder, shard)
            except RedraftError as error:
                found.append(error)
        return found

    def remove(self, names: Iterable[str]) -> int:
        """Remove shards, and with the last one all the rest; the bytes that are free then.

        Raises:
            RedraftError: a process is making states here.
        """
        before = self.bytes
        with self.pool.held(wait=False):
            for name in names:
                remove_shard(self.pool.folder, name)
            if any(self.pool.folder.glob("*.safetensors")):
                return before - self.bytes
            for path in sorted(self.pool.folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            self.pool.folder.rmdir()
        return before


def holdings(manifests: Mapping[str, list[dict[str, Any]]]) -> list[Holding]:
    """What the store holds, by the fingerprint of the pool.

    Args:
        manifests: by who has them, see `redraft.hidden.extract.extract`.
    """
    users: dict[str, dict[str, set[str]]] = {}
    for who, listed in manifests.items():
        for manifest in listed:
            for name in names_of(manifest) if manifest.get("redraft") == FORMAT else []:  # others lie elsewhere
                users.setdefault(manifest["states"], {}).setdefault(name, set()).add(who)
    found = []
    for path in sorted((store_root() / "hidden").glob("*/facts.json")):
        pool = Pool(read_object(path))
        if pool.name == path.parent.name:  # the folder of another store's layout is none of ours
            mine = users.setdefault(pool.name, {})
            for workspace, names in pool.users().items():
                for name in names:
                    mine.setdefault(name, set()).add(f"workspace {workspace[:8]}")
            found.append(Holding(pool, mine))
    return found


def names_of(manifest: dict[str, Any]) -> list[str]:
    """Names of all shards that a manifest needs."""
    return [shard["name"] for shard in _named(manifest)]


def absent(manifest: dict[str, Any]) -> list[str]:
    """Names of the shards of a manifest that the store does not have with their bytes."""
    found = []
    for each in _named(manifest):
        file = tensors_file(_folder(manifest), each["name"])
        if not file.is_file() or file.stat().st_size != each["bytes"]:
            found.append(each["name"])
    return found


def use(manifest: dict[str, Any]) -> None:
    """Say that this workspace uses the shards of its manifest: other workspaces may share the store."""
    path, names = _folder(manifest) / "users" / f"{workspace()}.json", {"shards": sorted(names_of(manifest))}
    if not path.is_file() or read_object(path) != names:
        with suppress(OSError):  # a store that may only be read loses nothing
            atomic.write_json(path, names)


def _named(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [*manifest["shards"], *filter(None, [manifest.get("diagnostic")])]


def _folder(manifest: dict[str, Any]) -> Path:
    return store_root() / "hidden" / str(manifest["states"])
