"""Documents of hidden states, read by memory map and packed into rows for training."""

import bisect
import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError
from redraft.frame.files import open_tensors, read_object
from redraft.frame.store import store_root
from redraft.hidden.shards import PER_TOKEN, check_present


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
        self.manifest = read_object(manifest)
        for name, value in identity.items():
            if self.manifest.get(name) != value:
                raise RedraftError(
                    "The hidden states were extracted from something else.",
                    where=f"{manifest}: {name}",
                    expected=value,
                    found=self.manifest.get(name),
                    fix="rerun the extract stage",
                )
        folder = store_root() / self.manifest["fingerprint"]
        self._open, self._files = ExitStack(), list[Any]()
        self.documents: list[Document] = []
        for number, entry in enumerate(self.manifest["splits"][split]):
            path = folder / entry["file"]
            check_present(path, entry["bytes"])
            self._files.append(self._open.enter_context(open_tensors(path)))
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
