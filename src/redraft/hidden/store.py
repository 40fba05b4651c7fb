"""Hidden states on disk: byte-bounded safetensors shards beside DVC, named by a manifest that DVC tracks.

Shards live in `<store>/<fingerprint>/`; the store is `$REDRAFT_STORE`, by default `.store` in the main workspace, so
experiments share shards and nothing hashes terabytes. Tensors of a shard, T tokens of D documents one after another:
`offsets` int64 [D+1], `input_ids` int32 [T], `loss_mask` uint8 [T], `aux` bf16 [T, 3H] (inputs of the aux layers, low
to high), `final` bf16 [T, H] (after the final norm), `greedy` int32 [T] (the target's argmax for the next token).
"""

import bisect
import hashlib
import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from redraft import atomic
from redraft.errors import RedraftError

MANIFEST = "manifest.json"
PER_TOKEN = ("input_ids", "loss_mask", "aux", "final", "greedy")
_HEADER_LIMIT = 100_000_000  # safetensors refuses longer headers


def store_root() -> Path:
    """`$REDRAFT_STORE`, else `.store` under `$DVC_ROOT` (the main workspace, also in temporary runs), else here."""
    return Path(os.environ.get("REDRAFT_STORE") or Path(os.environ.get("DVC_ROOT", ".")) / ".store").resolve()


def fingerprint(identity: dict[str, Any]) -> str:
    """SHA-256, 16 hex digits, of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


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


@dataclass(frozen=True)
class Document:
    """Where one document lies: tokens `start` to `end` of a shard."""

    shard: int
    start: int
    end: int


class HiddenStates:
    """Documents of one split, read by memory map."""

    def __init__(self, manifest: Path, split: str, **identity: Any) -> None:
        """Check the manifest and that every shard of `split` is present with its size, and index its documents.

        Args:
            manifest: path of the manifest.
            split: name of a split.
            identity: fields of the manifest that must have these values, for example `target` and `aux_layers`.

        Raises:
            RedraftError: a field differs, or a shard is missing or has another size.
        """
        self.manifest = json.loads(manifest.read_text())
        for name, value in identity.items():
            if self.manifest[name] != value:
                raise RedraftError(
                    "The hidden states were extracted from something else.",
                    where=f"{manifest}: {name}",
                    expected=value,
                    found=self.manifest[name],
                    fix="rerun the extract stage",
                )
        folder = store_root() / self.manifest["fingerprint"]
        self._files: list[Any] = []
        self.documents: list[Document] = []
        for number, entry in enumerate(self.manifest["splits"][split]):
            path = folder / entry["file"]
            check_present(path, entry["bytes"])
            self._files.append(safe_open(path, "pt").__enter__())
            offsets = self._files[-1].get_tensor("offsets").tolist()
            pairs = itertools.pairwise(offsets)
            self.documents += [Document(number, start, end) for start, end in pairs]

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(self.length, range(len(self))))

    def length(self, index: int) -> int:
        """Tokens of a document."""
        return self.documents[index].end - self.documents[index].start

    def read(self, index: int) -> dict[str, Tensor]:
        """The per-token tensors of a document."""
        document = self.documents[index]
        file = self._files[document.shard]
        return {name: file.get_slice(name)[document.start : document.end] for name in PER_TOKEN}


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
            fix="`dvc repro --force --single-item extract` writes it again, or set REDRAFT_STORE",
        )


def pack(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Pack documents into rows of at most `row_tokens` tokens, best fit by falling length; none is split.

    Raises:
        RedraftError: a document is longer than a row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if lengths[index] > row_tokens:
            raise RedraftError(
                "A document is longer than a packed row.",
                where="row_tokens in the profile",
                expected=f"at least {lengths[index]}",
                found=row_tokens,
            )
        place = bisect.bisect_left(free, (lengths[index], -1))
        space, row = free.pop(place) if place < len(free) else (row_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(free, (space - lengths[index], row))
    return rows


class PackedRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of packed documents.

    An item holds the per-token tensors, each [S, ...] padded with zeros to `row_tokens`, `documents` int64 [S]
    (1, 2, ... by document, 0 for padding) and `positions` int64 [S] (from 0 in each document).
    """

    def __init__(self, states: HiddenStates, row_tokens: int) -> None:
        self.states = states
        self.row_tokens = row_tokens
        self.rows = pack([states.length(index) for index in range(len(states))], row_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def filled(self, index: int) -> int:
        """Tokens of a row that are not padding."""
        return sum(map(self.states.length, self.rows[index]))

    def empty(self) -> dict[str, Tensor]:
        """A row of padding alone."""
        return {name: torch.zeros_like(tensor) for name, tensor in self[0].items()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = [self.states.read(document) for document in self.rows[index]]
        lengths = [len(part["input_ids"]) for part in parts]
        pad = self.row_tokens - sum(lengths)
        row = {}
        for name in PER_TOKEN:
            joined = torch.cat([part[name] for part in parts])
            row[name] = torch.cat([joined, joined.new_zeros(pad, *joined.shape[1:])])
        numbers = [torch.full((length,), number) for number, length in enumerate(lengths, 1)]
        row["documents"] = torch.cat([*numbers, torch.zeros(pad, dtype=torch.int64)])
        row["positions"] = torch.cat([*map(torch.arange, lengths), torch.zeros(pad, dtype=torch.int64)])
        return row
