"""Tokenised corpora on disk: one safetensors file per split, read by memory map.

`input_ids` int32 [T], `loss_mask` uint8 [T], `offsets` int64 [D+1]; `names` uint8, the sample ids as a JSON list, and
`source` int32 [D], an index in the list of sources. The one metadata key `redraft` holds the sources, and the hashes of
files, tokenizer, template and tokens by which consumers know the corpus.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from redraft.corpus.parts import Arrays
from redraft.frame.errors import RedraftError, some
from redraft.frame.files import open_tensors
from redraft.frame.tensors import write_tensors

TOKENS = ("input_ids", "loss_mask", "offsets")
_TYPES = {"input_ids": "I32", "loss_mask": "U8", "offsets": "I64", "names": "U8", "source": "I32"}


@dataclass
class Corpus:
    """Token ids and loss mask of D documents, T tokens in all."""

    input_ids: Tensor
    """int32 [T]."""
    loss_mask: Tensor
    """uint8 [T]; 1 where a token belongs to an answer."""
    offsets: Tensor
    """int64 [D+1]."""
    samples: list[str]
    """Ids of the documents."""
    sources: list[str]
    """Where each document came from, as the corpus file says; empty text if it does not."""
    identity: dict[str, Any]
    """Hashes and limits by which consumers know it."""

    def __len__(self) -> int:
        return len(self.samples)

    def document(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of one document."""
        start, end = self.offsets[index : index + 2].tolist()
        return self.input_ids[start:end], self.loss_mask[start:end]

    def by_source(self) -> dict[str, list[int]]:
        """Indices of the documents of every source, in alphabetical order."""
        found: dict[str, list[int]] = {}
        for index, source in enumerate(self.sources):
            found.setdefault(source, []).append(index)
        return dict(sorted(found.items()))

    def prompt(self, index: int) -> list[int]:
        """The ids before the first answer of a document."""
        ids, mask = self.document(index)
        return ids[: int(mask.argmax())].tolist()

    def part(self, documents: range) -> "Corpus":
        """Documents that follow each other, as a corpus of their own that shares its tokens with this one."""
        first, last = documents.start, documents.stop
        start, end = int(self.offsets[first]), int(self.offsets[last])
        return Corpus(
            self.input_ids[start:end],
            self.loss_mask[start:end],
            self.offsets[first : last + 1] - start,
            self.samples[first:last],
            self.sources[first:last],
            {**self.identity, "part": [first, last]},
        )


def write_corpus(path: Path, corpus: Corpus) -> None:
    """Write one split."""
    arrays = {name: getattr(corpus, name).numpy() for name in TOKENS}
    write_arrays(path, [arrays], corpus.samples, corpus.sources, corpus.identity)


def write_arrays(
    path: Path, parts: Sequence[Arrays], samples: list[str], sources: list[str], identity: dict[str, Any]
) -> None:
    """Write one split whose tokens come in parts, with the hash of its tokens in its identity.

    Args:
        path: file to write.
        parts: each with `input_ids`, `loss_mask` and its own `offsets`, from 0; memory-mapped ones are read as they are
            written.
        samples: ids of all documents.
        sources: of all documents.
        identity: what else names the corpus.
    """
    known = sorted(set(sources))
    number = {source: index for index, source in enumerate(known)}
    names = np.frombuffer(json.dumps(samples, ensure_ascii=False).encode(), np.uint8)
    columns: dict[str, list[NDArray[Any]]] = {
        **{name: [part[name] for part in parts] for name in ("input_ids", "loss_mask")},
        "offsets": _joined([part["offsets"] for part in parts]),
        "names": [names],
        "source": [np.array([number[source] for source in sources], np.int32)],
    }
    content = hashlib.sha256()
    for name in ("offsets", "input_ids", "loss_mask"):
        for each in columns[name]:
            content.update(np.ascontiguousarray(each).data)
    identity = {**identity, "content": content.hexdigest()}
    typed = {name: (_TYPES[name], parts) for name, parts in columns.items()}
    write_tensors(path, typed, json.dumps({"sources": known, "identity": identity}, sort_keys=True))


def _joined(parts: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Offsets of parts one after another."""
    joined, base = [np.zeros(1, np.int64)], 0
    for offsets in parts:
        joined.append(offsets[1:].astype(np.int64) + base)
        base += int(offsets[-1])
    return joined


def read_corpus(path: Path) -> Corpus:
    """Read one split; its tensors are memory-mapped.

    Raises:
        RedraftError: no such file, or not one that `write_corpus` wrote.
    """
    with open_tensors(path) as file:
        record = (file.metadata() or {}).get("redraft")
        if record is None or not _TYPES.keys() <= set(file.keys()):
            raise RedraftError(
                "This is no tokenised corpus.", where=path, expected=", ".join(_TYPES), found=some(sorted(file.keys()))
            )
        tokens = {name: file.get_tensor(name) for name in TOKENS}
        told = json.loads(record)
        samples = json.loads(file.get_tensor("names").numpy().tobytes())
        sources = [told["sources"][number] for number in file.get_tensor("source").tolist()]
        return Corpus(**tokens, samples=samples, sources=sources, identity=told["identity"])
