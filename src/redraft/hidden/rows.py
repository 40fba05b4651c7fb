"""Documents of hidden states, read by memory map and packed into rows for training."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.corpus.corpus import Corpus
from redraft.frame.advice import rerun
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.store import store_root
from redraft.hidden.formats import unpacked
from redraft.hidden.pool import FORMAT, documents_of, split_fingerprint
from redraft.hidden.reading import ShardFile
from redraft.hidden.shards import Shard, require_all_whole


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest at `path`, as `redraft.hidden.extract.extract` made it.

    Raises:
        RedraftError: it cannot be read, or is that of another version.
    """
    manifest = read_object(path)
    if manifest.get("redraft") != FORMAT:
        raise RedraftError(
            "The hidden states are those of another version of redraft.",
            where=path,
            expected=f"format {FORMAT}",
            found=manifest.get("redraft", "none"),
            fix=rerun("extract"),
        )
    return manifest


class HiddenStates:
    """The documents of one split in the order of its corpus: states by memory map, ids and masks from the corpus."""

    def __init__(self, manifest: dict[str, Any], split: str, corpus: Corpus, **identity: Any) -> None:
        """Check that the manifest is of this corpus, and that every shard of `split` is there with its bytes.

        Args:
            manifest: see `read_manifest`.
            split: name of a split.
            corpus: of this split.
            identity: fields of the manifest that must have these values, for example `target` and `aux_layers`.

        Raises:
            RedraftError: a field or the corpus differs, or a shard is missing or damaged.
        """
        self.manifest, self.corpus = manifest, corpus
        told = manifest["splits"][split]
        keys = [key for key, _ in documents_of(corpus, manifest["law"])]
        self.fingerprint: str = told["fingerprint"]
        """Of what decides the states of this split."""
        wanted = {**identity, f"splits.{split}.fingerprint": split_fingerprint(manifest["states"], keys)}
        found = {**manifest, f"splits.{split}.fingerprint": self.fingerprint}
        for name, value in wanted.items():
            if found.get(name) != value:
                raise RedraftError(
                    "The hidden states were extracted from something else.",
                    where=f"hidden states of {split}: {name}",
                    expected=value,
                    found=found.get(name),
                    cause="target, aux layers or corpus changed after they were extracted",
                    fix=rerun("extract"),
                )
        folder = store_root() / "hidden" / manifest["states"]
        used = {number for number, _ in told["places"]}
        shards = {number: Shard(documents=(), **manifest["shards"][number]) for number in sorted(used)}
        require_all_whole(folder, shards.values())
        self._files = {number: ShardFile(shard.file(folder)) for number, shard in shards.items()}
        self._places: list[tuple[int, int]] = told["places"]
        self._lengths: list[int] = corpus.offsets.diff().tolist()

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self._lengths)

    def length(self, index: int) -> int:
        """Tokens of a document."""
        return self._lengths[index]

    def sample(self, index: int) -> str:
        """Id of a document's sample in the corpus."""
        return self.corpus.samples[index]

    def mask(self, index: int) -> Tensor:
        """The loss mask of a document, uint8 [T]."""
        return self.corpus.document(index)[1]

    def read(self, index: int) -> dict[str, Tensor]:
        """The tensors of a document that `Batch` holds, T tokens each."""
        ids, mask = self.corpus.document(index)
        number, place = self._places[index]
        return {"input_ids": ids, "loss_mask": mask, **unpacked(self._files[number].read(place), mask)}


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


@dataclass
class Batch:
    """B rows of S tokens, each of packed documents one after another; zeros where no document is.

    The target's law is told by `final` or by `top_ids` and `top_logits`; the other is None.
    """

    input_ids: Tensor
    """int [B, S]."""
    loss_mask: Tensor
    """[B, S], nonzero at answer tokens."""
    aux: Tensor
    """[B, S, 3H], inputs of the aux layers, low to high."""
    greedy: Tensor
    """int [B, S], the target's argmax for the next token."""
    documents: Tensor
    """int64 [B, S], 1, 2, ... by document of the row, 0 for padding."""
    positions: Tensor
    """int64 [B, S], from 0 in each document."""
    final: Tensor | None = None
    """[B, S, H], after the target's final norm; anything where no target is scored."""
    top_ids: Tensor | None = None
    """int32 [B, S, 64], ids of the largest logits of the full vocabulary."""
    top_logits: Tensor | None = None
    """[B, S, 64], these logits up to a constant of each token, largest first."""

    @classmethod
    def row(cls, documents: Sequence[dict[str, Tensor]], row_tokens: int = 0) -> "Batch":
        """One row of `documents`, each the per-token tensors of `HiddenStates.read`, padded to `row_tokens`."""
        lengths = [len(document["input_ids"]) for document in documents]
        counted = [
            {"documents": torch.full((length,), number), "positions": torch.arange(length)}
            for number, length in enumerate(lengths, 1)
        ]
        row = {name: torch.cat([each[name] for each in documents]) for name in documents[0]}
        device = row["input_ids"].device
        row |= {name: torch.cat([each[name] for each in counted]).to(device) for name in counted[0]}
        pad = max(0, row_tokens - sum(lengths))
        return cls(**{name: torch.cat([t, t.new_zeros(pad, *t.shape[1:])])[None] for name, t in row.items()})

    @classmethod
    def stack(cls, rows: Sequence["Batch"]) -> "Batch":
        """Batches of equal S one below the other."""
        return cls(**{name: torch.cat([row.tensors[name] for row in rows]) for name in rows[0].tensors})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """A batch of every tensor changed."""
        return Batch(**{name: change(tensor) for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Batch":
        """The same on `device`."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def cast(self, dtype: torch.dtype) -> "Batch":
        """The same with `aux` and `final` in `dtype`."""
        return replace(self, aux=self.aux.to(dtype), final=None if self.final is None else self.final.to(dtype))


class PackedRows:
    """Rows of packed documents; an item is a `Batch` of one row of `row_tokens` tokens."""

    def __init__(self, states: HiddenStates, row_tokens: int) -> None:
        self.states = states
        self.row_tokens = row_tokens
        self.rows = pack([states.length(index) for index in range(len(states))], row_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def filled(self, index: int) -> int:
        """Tokens of a row that are not padding."""
        return sum(map(self.states.length, self.rows[index]))

    def samples(self, index: int) -> list[str]:
        """Ids of the samples in a row."""
        return [self.states.sample(document) for document in self.rows[index]]

    def empty(self) -> Batch:
        """A row of padding alone."""
        return self[0].each(torch.zeros_like)

    def __getitem__(self, index: int) -> Batch:
        return Batch.row([self.states.read(document) for document in self.rows[index]], self.row_tokens)
