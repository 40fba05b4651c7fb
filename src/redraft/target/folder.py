"""The folder of a target: its record, where its weights lie, and what is in them."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.weights import INDEX, weight_files

TARGET_RECORD = "target.json"
_BLOCK, _BLOCKS = 2**20, 64
"""Bytes of a block, and how many of them stand for a longer file."""
_PAGE, _MOST_HEADER, _THREADS = 4096, 100_000_000, 8
"""Bytes of a tensor that are always looked at, and of the longest header that safetensors takes; files at once."""


def weights_folder(target: Path) -> Path:
    """The folder with the safetensors files of a target folder (the folder itself if it has no record).

    Raises:
        RedraftError: the folder is gone, or its files hold something else than at the target stage.
    """
    record = target / TARGET_RECORD
    if not record.is_file():
        return target
    written = read_object(record)
    weights = target / written.get("weights", ".")
    if not weights.is_dir():
        raise RedraftError(
            "The target's weights are gone.",
            where=record,
            expected=weights,
            fix=f"bring the folder back; or set target.source in the profile and {rerun('target')}",
        )
    known = written.get("files")
    if known is not None and known != (found := contents(weights)):
        changed = [name for name in sorted(known.keys() | found.keys()) if known.get(name) != found.get(name)]
        raise RedraftError(
            "The target's weights changed after the target stage.",
            where=weights,
            found=some(changed),
            cause="files were written in place; DVC does not see weights that lie outside the project",
            fix=rerun("target"),
        )
    return weights


def contents(weights: Path) -> dict[str, list[int | str]]:
    """By file, what decides a target: size in bytes and SHA-256 of the files of weights, their index, `config.json`.

    Of a file above 64 MiB the hash is of a sample: the whole safetensors header, 64 MiB in blocks spread evenly, and
    the middle page of every tensor, so that no tensor is left out; 600 GB take seconds. A merge or a fine-tuning
    changes nearly every value of the tensors that it touches; an edit of a few rows can be missed. Therefore the hub's
    own hash of such a file stands beside the sample where it is known (`_hub_hash`). It costs nothing and tells any two
    revisions apart, but is a claim: weights written in place, through the links of the hub's cache, keep the old one,
    which the sample notices.

    Times do not count, and a copy is the same target, with one exception: a plain copy of a hub snapshot has lost the
    hub's hashes, so with files above 64 MiB it is another target, and the states are extracted anew. To hash it whole
    would take minutes each time, and to leave the hub's hashes out could take one revision for another in silence.
    `hf download --local-dir` keeps them.
    """
    files = [file for file in (*weight_files(weights), weights / "config.json", weights / INDEX) if file.is_file()]
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing and reading both let other threads run
        return dict(zip((file.name for file in files), pool.map(_known, files), strict=True))


def _known(file: Path) -> list[int | str]:
    stat = file.stat()
    claimed = _hub_hash(file, stat.st_mtime) if stat.st_size > _BLOCK * _BLOCKS else None
    return [stat.st_size, _sampled(file, stat.st_size, stat.st_mtime_ns), *([claimed] if claimed else [])]


def _hub_hash(file: Path, changed: float) -> str | None:
    """The hash by which the hub knows a file (SHA-256 for large ones), as its own tools wrote it beside the file.

    In the hub's cache a file is a link to `blobs/<hash>`; for a `--local-dir` download it stands in a record (commit,
    hash, time) that counts until the file is written again, as for the hub's library.
    """
    link = file.readlink() if file.is_symlink() else None
    if link is not None and link.parent.name == "blobs":
        return link.name
    record = file.parent / ".cache/huggingface/download" / f"{file.name}.metadata"
    with suppress(OSError, ValueError):
        _, known, when = record.read_text().split()
        return known if changed - 1 <= float(when) else None
    return None


@cache
def _sampled(file: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, or of the places that stand for it; `changed` is for the cache alone."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for start, length in sorted({*_spread(size), *(_of_header(opened, size) if size > _BLOCK * _BLOCKS else ())}):
            opened.seek(start)
            digest.update(opened.read(length))
    return digest.hexdigest()


def _spread(size: int) -> Iterator[tuple[int, int]]:
    """Start and length of `_BLOCKS` blocks, the first and the last of a file among them; all of a short file."""
    stride = max(_BLOCK, (size - _BLOCK) / (_BLOCKS - 1))
    return ((int(number * stride), _BLOCK) for number in range(_BLOCKS))


def _of_header(opened: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of a safetensors header and of the middle page of every tensor; nothing of another file."""
    length = 8 + int.from_bytes(opened.read(8), "little")
    if length > min(size, _MOST_HEADER):
        return
    yield 0, length
    with suppress(ValueError, TypeError, KeyError, AttributeError):  # what is no header is refused by its readers
        for name, entry in json.loads(opened.read(length - 8)).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield max(length, length + (start + end - _PAGE) // 2), _PAGE
