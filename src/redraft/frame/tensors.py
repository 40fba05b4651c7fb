"""Write a safetensors file from parts: its own writer wants every tensor whole in memory, and a copy of it in bytes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.frame import atomic

_HEADER_LIMIT = 100_000_000  # safetensors refuses longer headers


def write_tensors(
    path: Path, columns: Mapping[str, tuple[str, Sequence[NDArray[Any]]]], record: str | None = None
) -> tuple[int, str]:
    """Write tensors whose rows come in parts, fsynced and visible only when complete; bytes and SHA-256 of the file.

    Args:
        path: file to write.
        columns: by name, the dtype as safetensors names it, and the parts one after another along the first dimension,
            at least one, as numbers of that width; memory-mapped ones are read as they are written.
        record: text of the one metadata key `redraft`.
    """
    header: dict[str, Any] = {} if record is None else {"__metadata__": {"redraft": record}}
    order = sorted(columns, key=lambda name: (-columns[name][1][0].itemsize, name))  # aligned: wide types first
    end = 0
    for name in order:
        kind, parts = columns[name]
        size = sum(part.nbytes for part in parts)
        shape = [sum(map(len, parts)), *parts[0].shape[1:]]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) < _HEADER_LIMIT
    digest = hashlib.sha256()
    with atomic.opened(path) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            digest.update(data)
            file.write(data)
        for part in (part for name in order for part in columns[name][1] if part.size):
            whole = np.ascontiguousarray(part).data
            digest.update(whole)
            file.write(whole)
    return 8 + len(text) + end, digest.hexdigest()
