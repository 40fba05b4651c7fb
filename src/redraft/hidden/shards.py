"""Hidden states on disk: byte-bounded safetensors shards beside DVC, named by a manifest that DVC tracks.

Shards live in `<store>/<fingerprint>/`; the store is `$REDRAFT_STORE`, by default `.store` in the main workspace, so
experiments share shards and nothing hashes terabytes. Tensors of a shard, T tokens of D documents one after another:
`offsets` int64 [D+1], `input_ids` int32 [T], `loss_mask` uint8 [T], `aux` bf16 [T, 3H] (inputs of the aux layers, low
to high), `final` bf16 [T, H] (after the final norm), `greedy` int32 [T] (the target's argmax for the next token).
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from redraft.frame import atomic
from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError

MANIFEST = "manifest.json"
PER_TOKEN = ("input_ids", "loss_mask", "aux", "final", "greedy")
_HEADER_LIMIT = 100_000_000  # safetensors refuses longer headers


@dataclass
class ShardWriter:
    """Collects documents and writes a shard whenever the next one would pass `limit` bytes."""

    folder: Path
    name: str
    limit: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    _pending: list[tuple[str, dict[str, Tensor]]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, sample: str, document: dict[str, Tensor]) -> None:
        """Append one document; every tensor has its tokens as first dimension.

        Raises:
            RedraftError: lengths differ, or a value is not finite.
        """
        lengths = {name: len(tensor) for name, tensor in document.items()}
        if len(set(lengths.values())) != 1:
            raise RedraftError("The tensors of a sample differ in length.", where=sample, found=lengths)
        for name, tensor in document.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise RedraftError("A hidden state is not finite.", where=f"{sample}: {name}")
        size = sum(tensor.nbytes for tensor in document.values())
        if self._pending and self._bytes + size > self.limit:
            self.flush()
        self._pending.append((sample, document))
        self._bytes += size

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        documents = [document for _, document in self._pending]
        tensors = {name: torch.cat([document[name] for document in documents]) for name in documents[0]}
        lengths = torch.tensor([0, *(len(document["input_ids"]) for document in documents)])
        tensors["offsets"] = lengths.cumsum(0)
        self.shards.append(
            write_shard(self.folder / f"{self.name}-{len(self.shards):05d}.safetensors", tensors)
            | {"samples": [sample for sample, _ in self._pending]}
        )
        self._pending, self._bytes = [], 0


def write_shard(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write one shard and return its entry in the manifest: `file`, `bytes`, `sha256`, `tokens`."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    assert int.from_bytes(data[:8], "little") < _HEADER_LIMIT
    atomic.write_bytes(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return {"file": path.name, "bytes": len(data), "sha256": digest, "tokens": len(tensors["input_ids"])}


def check_present(path: Path, size: int) -> None:
    """Raise a RedraftError unless `path` exists with `size` bytes."""
    found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
    if found != f"{size} bytes":
        raise RedraftError(
            "A shard of hidden states is not in the store.",
            where=path,
            expected=f"{size} bytes",
            found=found,
            cause="the store was cleaned or moved; the manifest came from DVC's cache",
            fix=f"set REDRAFT_STORE to where it is; or write it again: {rerun('extract')}",
        )
