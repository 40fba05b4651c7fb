"""The files of a drafter: which of them hold its weights, and what redraft wrote beside them. Without torch."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open

from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object

WEIGHTS = "model.safetensors"
RECORD = "redraft.json"
"""How a drafter came about, in its folder."""
VOCAB_RECORD = "vocab.json"
"""Likewise of a vocabulary artefact."""
HEADER_LIMIT = 100_000_000
"""Bytes; safetensors refuses longer headers."""
CAUSE = "an incomplete download, or not a file of weights"


def read_record(folder: Path) -> dict[str, Any]:
    """`redraft.json` of a drafter; empty for one that redraft did not write.

    Raises:
        RedraftError: no object in it, or a NaN, which redraft never writes.
    """
    found = read_object(folder / RECORD) if (folder / RECORD).is_file() else {}
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise RedraftError("A number in the drafter's record is none.", where=folder / RECORD, found=error) from error
    return found


def weight_files(folder: Path) -> list[Path]:
    """One safetensors file, the shards of an index, or `pytorch_model.bin`.

    Raises:
        RedraftError: no weights, old and new format side by side, or a shard that is absent.
    """
    new, old = sorted(folder.glob("*.safetensors")), sorted(folder.glob("pytorch_model*.bin"))
    if bool(new) == bool(old):
        raise RedraftError(
            "The drafter's weights cannot be told." if new else "The drafter has no weights.",
            where=folder,
            expected="safetensors files or pytorch_model.bin, not both",
            found=[path.name for path in (*new, *old)] or sorted(path.name for path in folder.iterdir())[:10],
            fix="move the older ones away" if new else None,
        )
    index = folder / ("model.safetensors.index.json" if new else "pytorch_model.bin.index.json")
    if not index.is_file():
        return new or old
    named = indexed(index)
    absent = [name for name in named if not (folder / name).is_file()]
    if absent:
        raise RedraftError("A shard of the drafter is absent.", where=index, expected=absent, cause=CAUSE)
    return [folder / name for name in named]


def indexed(index: Path) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        RedraftError: it names none, or files elsewhere.
    """
    table = read_object(index).get("weight_map")
    names = list(table.values()) if isinstance(table, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise RedraftError(
            "The index of the weights cannot be used.",
            where=index,
            expected='"weight_map": {tensor: a file beside the index}',
            found=sorted(map(repr, names))[:3] or "no such table",
        )
    return sorted(set(names))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} stands twice in the header")
    return dict(pairs)


def check_header(path: Path) -> None:
    """Refuse a name that stands twice, which safetensors 0.8 lets pass; all else it refuses itself.

    Raises:
        ValueError: naming it.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size <= min(HEADER_LIMIT, path.stat().st_size):  # nothing is read by an unchecked length
            json.loads(file.read(size), object_pairs_hook=_once)


def written_hash(metadata: dict[str, str] | None) -> str | None:
    """The hash of the mapping that redraft writes into the metadata of the weights."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # metadata of another writer
        found = json.loads((metadata or {})["redraft"])["mapping"]
        return found if isinstance(found, str) else None
    return None


def mapping_hashes(folder: Path, files: Sequence[Path]) -> list[str]:
    """Hashes of the mapping that was written with these weights: `redraft.json`, `vocab.json`, metadata of the files.

    Files that cannot be read tell nothing here.

    Raises:
        RedraftError: no object in a record.
    """
    records = [read_object(folder / name) for name in (RECORD, VOCAB_RECORD) if (folder / name).is_file()]
    hashes = [str(record["mapping"]) for record in records if record.get("mapping") is not None]
    for path in files:
        with suppress(Exception), safe_open(path, "np") as file:  # pickles have no header
            hashes += [each for each in [written_hash(file.metadata())] if each]
    return sorted(set(hashes))
