"""One shard of hidden states on disk: a safetensors file, and beside it an entry that says what is in it.

A shard is there when its entry is, which is written last. Tensors of a shard, T tokens of D documents one after
another: `offsets` int64 [D+1], `greedy` int32 [T] (the target's argmax for the next token), and by the format of
`redraft.hidden.formats` the aux states [T, 3H] (inputs of the aux layers, low to high) and the target's law. Token ids
and loss masks are the corpus' and not in it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from redraft.frame import atomic
from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.progress import progress
from redraft.frame.tensors import write_tensors

_KINDS = {
    torch.bfloat16: ("BF16", torch.int16), torch.float8_e4m3fn: ("F8_E4M3", torch.uint8),
    torch.float32: ("F32", torch.float32), torch.int64: ("I64", torch.int64), torch.int32: ("I32", torch.int32),
    torch.uint8: ("U8", torch.uint8), torch.bool: ("BOOL", torch.uint8),
}  # fmt: skip
"""By dtype its name in a file, and numbers of the same width that numpy knows."""
_READ = 2**24


@dataclass(frozen=True)
class Shard:
    """What an entry says."""

    name: str
    """Of the file, without its ending: told by its documents alone, so that a shard made again has the same."""
    documents: tuple[str, ...]
    """Keys of its documents, in their order."""
    tokens: int
    bytes: int
    sha256: str

    def file(self, folder: Path) -> Path:
        """Where its tensors lie."""
        return tensors_file(folder, self.name)


def tensors_file(folder: Path, name: str) -> Path:
    """Where the tensors of the shard `name` lie."""
    return folder / f"{name}.safetensors"


def shard_name(documents: Sequence[str]) -> str:
    """16 hex digits over the keys of the documents."""
    return hashlib.sha256("\n".join(documents).encode()).hexdigest()[:16]


def write_shard(folder: Path, name: str, documents: Sequence[str], states: Sequence[dict[str, Tensor]]) -> Shard:
    """Write the states of documents, of the same names and dtypes each, and then the entry.

    Raises:
        RedraftError: a disk that is full, or a folder that may not be written to.
    """
    columns = {kind: [each[kind] for each in states] for kind in states[0]}
    lengths = [len(each["greedy"]) for each in states]
    columns["offsets"] = [torch.tensor([0, *lengths]).cumsum(0)]
    for kind, parts in list(columns.items()):
        own = [len(part) for part in parts]
        if kind != "offsets" and own != lengths:
            columns[f"{kind}_offsets"] = [torch.tensor([0, *own]).cumsum(0)]
    typed = {
        kind: (_KINDS[parts[0].dtype][0], [part.contiguous().view(_KINDS[part.dtype][1]).numpy() for part in parts])
        for kind, parts in columns.items()
    }
    path = tensors_file(folder, name)
    try:
        (folder / f"{name}.checked").unlink(missing_ok=True)
        size, digest = write_tensors(path, typed)
        shard = Shard(name, tuple(documents), sum(lengths), size, digest)
        atomic.write_text(folder / f"{name}.json", json.dumps(asdict(shard)) + "\n")
    except OSError as error:
        raise RedraftError(
            "The hidden states cannot be written.",
            where=path,
            found=error.strerror or error,
            cause="a disk that is full or has a quota, or a folder that may not be written to",
            fix="make room, or set REDRAFT_STORE to a larger disk; shards that are complete are kept, run it again",
        ) from error
    return shard


def read_entry(path: Path) -> Shard | None:
    """The entry of a shard, None if it cannot be read."""
    try:
        fields = read_object(path)
        return Shard(**{**fields, "documents": tuple(fields["documents"])})
    except (RedraftError, TypeError, KeyError):
        return None


def remove_shard(folder: Path, name: str) -> None:
    """Remove a shard, its entry first."""
    for ending in (".json", ".whole", ".checked", ".safetensors"):
        (folder / f"{name}{ending}").unlink(missing_ok=True)


def require_whole(folder: Path, shard: Shard) -> None:
    """Refuse a shard that is not there with its bytes; they are compared once for a file as it lies there.

    Raises:
        RedraftError: missing, of another size, or other bytes.
    """
    path = shard.file(folder)
    found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
    if found != f"{shard.bytes} bytes":
        raise RedraftError(
            "A shard of hidden states is not in the store.",
            where=path,
            expected=f"{shard.bytes} bytes",
            found=found,
            cause="the store was cleaned or moved; the manifest came from DVC's cache",
            fix="set REDRAFT_STORE to where it is; or write it again: redraft store rebuild",
        )
    # neither the time of writing nor the size tells of an edit that puts them back; the change of the inode does
    stat, mark = path.stat(), folder / f"{shard.name}.whole"
    stamp = f"{shard.sha256} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    if mark.is_file() and mark.read_text() == stamp:
        return
    if (digest := _sha256(path)) != shard.sha256:
        raise RedraftError(
            "A shard of hidden states holds other bytes than were written.",
            where=path,
            expected=f"sha256 {shard.sha256}",
            found=digest,
            cause="a damaged disk, or a file that was written over",
            fix=f"write it again: {rerun('extract')}",
        )
    try:
        mark.write_text(stamp)
    except OSError:  # a store that may only be read is compared every time
        return


def require_all_whole(folder: Path, shards: Iterable[Shard]) -> None:
    """`require_whole` of every shard, some at once; the ranks of a training begin at different ones.

    Raises:
        RedraftError: see `require_whole`.
    """
    listed = list(shards)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first = rank * len(listed) // world
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        checked = pool.map(lambda shard: require_whole(folder, shard), listed[first:] + listed[:first])
        for _ in progress(checked, "check shards", "shard", len(listed), shown=len(listed) > 8):
            pass


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ):
            digest.update(block)
    return digest.hexdigest()
