"""The store of hidden states: a pool of shards for each way of making them, shared by all corpora.

`<store>/hidden/<fingerprint>/`, the fingerprint that of what decides a state besides the token ids: weights, aux
layers, format, engine and release, and `FORMAT`. A document is known by its ids; a split by its documents. So a line
more in a corpus is one document to make, and packing, shard sizes and file names decide nothing.
"""

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from redraft.corpus.corpus import Corpus
from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.progress import note
from redraft.frame.store import fingerprint, store_root, workspace
from redraft.hidden.formats import scored_positions
from redraft.hidden.shards import Shard, read_entry, require_whole

FORMAT = 1
"""Of the states in a shard: raised by hand when the same ids would give others. tests/test_pool.py pins some."""
DIAGNOSTIC = "diagnostic-"
"""Name of the shards that are no documents of a split begins so."""
Place = tuple[str, int]
"""Name of a shard, and place of a document in it."""


def document_key(ids: Tensor, scored: Tensor | None = None) -> str:
    """32 hex digits over the ids int32 [T] of a document, and over the places that are scored, if they decide."""
    digest = hashlib.sha256(ids.int().contiguous().numpy().tobytes())
    if scored is not None:
        digest.update(scored.bool().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def documents_of(corpus: Corpus, law: str) -> list[tuple[str, Tensor | None]]:
    """Of every document its key, and where the target is scored in it (bool [T]) if `law` keeps nothing else."""
    found = []
    for index in range(len(corpus)):
        ids, mask = corpus.document(index)
        scored = scored_positions(mask) if law == "scored" else None
        found.append((document_key(ids, scored), scored))
    return found


def split_fingerprint(states: str, keys: Sequence[str]) -> str:
    """Fingerprint of a split: of its pool, and of its documents in their order."""
    return fingerprint({"states": states, "documents": list(keys)})


@dataclass(frozen=True)
class Pool:
    """Shards of one way of making states."""

    facts: dict[str, Any]
    """What decides them; see the module."""

    @property
    def name(self) -> str:
        """Fingerprint of the facts."""
        return fingerprint(self.facts)

    @property
    def folder(self) -> Path:
        """Where the shards lie."""
        return store_root() / "hidden" / self.name

    @contextmanager
    def held(self, wait: bool = True) -> Iterator[None]:
        """For one process at a time; what another one that was killed left half-written is removed.

        Raises:
            RedraftError: another one has it, without `wait`.
        """
        if self.folder.is_dir() and not os.access(self.folder, os.W_OK):
            yield  # of a store that may only be read, what is there can be used
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise RedraftError(
                    "Another process makes hidden states here.", where=self.folder, fix="wait for it, or end it"
                ) from None
            note(f"waiting for another process that makes the hidden states in {self.folder}")
            lock.acquire()
        try:
            for partial in self.folder.glob(".*.partial"):
                partial.unlink()
            for tensors in self.folder.glob("*.safetensors"):
                if not tensors.with_suffix(".json").is_file():  # killed between a shard and its entry
                    tensors.unlink()
            if not (self.folder / "facts.json").is_file():
                atomic.write_json(self.folder / "facts.json", self.facts)
            yield
        finally:
            lock.release()

    def shards(self) -> dict[str, Shard]:
        """By name, the shards whose entry is there; their bytes are not looked at."""
        entries = (read_entry(path) for path in sorted(self.folder.glob("*.json")) if path.stem != "facts")
        return {entry.name: entry for entry in entries if entry}

    def is_whole(self, shard: Shard) -> bool:
        """Whether a shard is there with its bytes; tells of one that is not."""
        try:
            require_whole(self.folder, shard)
        except (RedraftError, OSError) as error:  # OSError: a bad sector
            note(f"hidden states: shard {shard.name} is made again: {str(error).splitlines()[0]}")
            return False
        return True

    def places(self, wanted: Iterable[str], first: Collection[str] = ()) -> tuple[dict[str, Place], list[Shard]]:
        """Where the documents `wanted` lie, by key, and the shards with some of them that are damaged.

        Of several shards with a document those of the names `first` are preferred.
        """
        asked, found, broken = set(wanted), dict[str, Place](), list[Shard]()
        for shard in sorted(self.shards().values(), key=lambda shard: shard.name not in first):
            if shard.name.startswith(DIAGNOSTIC) or asked.isdisjoint(shard.documents):
                continue
            if self.is_whole(shard):
                for place, key in enumerate(shard.documents):
                    found.setdefault(key, (shard.name, place))
            else:
                broken.append(shard)
        return found, broken

    def record(self, split: str) -> dict[str, Any]:
        """What was kept of a split that was made, by its fingerprint; empty if none was."""
        path = self.folder / "splits" / f"{split}.json"
        return read_object(path) if path.is_file() else {}

    def forget(self, split: str) -> None:
        """Remove the record of a split."""
        (self.folder / "splits" / f"{split}.json").unlink(missing_ok=True)

    def is_checked(self, name: str) -> bool:
        """Whether samples of a shard, or of others of its extraction, were extracted again, and were the same."""
        return (self.folder / f"{name}.checked").is_file()

    def checked(self, names: Iterable[str]) -> None:
        """Say so."""
        for name in names:
            (self.folder / f"{name}.checked").touch()

    def users(self) -> dict[str, list[str]]:
        """By id of the other workspaces that use this store, the names of their shards."""
        found = {path.stem: path for path in sorted((self.folder / "users").glob("*.json"))}
        return {name: read_object(path)["shards"] for name, path in found.items() if name != workspace()}

    def keep(self, split: str, record: dict[str, Any]) -> None:
        """Keep the record of a split: it was made, and rechecked."""
        atomic.write_json(self.folder / "splits" / f"{split}.json", record)


def groups(lengths: dict[str, int], token_bytes: int, limit: int) -> list[list[str]]:
    """Documents by the shard that they will lie in, the longest first: what needs the most memory fails first.

    Args:
        lengths: tokens by key.
        token_bytes: of states a token.
        limit: bytes of a shard; a document that is longer has one of its own.
    """
    found: list[list[str]] = []
    room = 0
    for key in sorted(lengths, key=lambda key: (-lengths[key], key)):
        size = lengths[key] * token_bytes
        if size > room:
            found.append([])
            room = limit
        found[-1].append(key)
        room -= size
    return found


def require_room(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        RedraftError: fewer than `needed` bytes are free at `folder`.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RedraftError(
            "The disk has no room for the hidden states.",
            where=folder,
            expected=f"{needed:,} bytes free ({needed / 1e9:,.1f} GB)",
            found=f"{free:,} bytes free ({free / 1e9:,.1f} GB)",
            fix="set REDRAFT_STORE to a larger disk; extract.format fp8 and extract.law top64 take less; redraft plan "
            "tells how much; redraft store rm frees what is stale",
        )
