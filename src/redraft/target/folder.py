"""The folder of a target: its record, where its weights lie, and what is in them."""

import hashlib
from functools import cache
from pathlib import Path

from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.weights import INDEX, weight_files

TARGET_RECORD = "target.json"
_BLOCK, _BLOCKS = 2**20, 64
"""Bytes of a block, and how many of them stand for a longer file."""


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
    """By file, size in bytes and SHA-256 of what decides a target: the files of weights, their index, `config.json`.

    Of a file above 64 MiB as much is hashed, in evenly spread blocks: a merge or a fine-tuning changes every one of
    them, and a terabyte takes seconds. Times do not count: a copy is the same target.
    """
    files = [*weight_files(weights), weights / "config.json", weights / INDEX]
    stats = {file: file.stat() for file in files if file.is_file()}
    return {file.name: [stat.st_size, _sampled(file, stat.st_size, stat.st_mtime_ns)] for file, stat in stats.items()}


@cache
def _sampled(file: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, or of `_BLOCKS` blocks, its first and last among them; `changed` is for the cache alone."""
    digest = hashlib.sha256()
    stride = max(_BLOCK, (size - _BLOCK) / (_BLOCKS - 1))
    with file.open("rb") as opened:
        for number in range(_BLOCKS):
            opened.seek(int(number * stride))
            digest.update(opened.read(_BLOCK))
    return digest.hexdigest()
