"""Write an artefact under a temporary name, then rename: a stage that dies leaves nothing half-written."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def sync_file(path: Path) -> None:
    """Wait until `path` is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path | str) -> Iterator[BinaryIO]:
    """Yield an open file that becomes `path`, fsynced, when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        sync_file(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` to `path`, fsynced, visible only when complete."""
    with opened(path) as file:
        file.write(data)


def write_text(path: Path | str, text: str) -> None:
    """Write UTF-8 `text` to `path` as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON with a final newline; keys keep their order, NaN is refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def folder(path: Path | str, *, sync: bool = True) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `path` when the block ends without an error.

    Without `sync` the files may not survive a loss of power; a process that dies leaves nothing half-written anyway.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*") if sync else ():
            sync_file(file)
        if path.exists():
            shutil.rmtree(path)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
