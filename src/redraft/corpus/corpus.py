"""Tokenised corpora on disk: one safetensors file per split.

`input_ids` int32 [T], `loss_mask` uint8 [T], `offsets` int64 [D+1]; the one metadata key `redraft` holds sample ids
and the hashes of file, tokenizer and template, the maximum length and V.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from redraft.corpus.chat import Sample, chat_template, template_hash, tokenize
from redraft.corpus.jsonl import read_chats
from redraft.corpus.tokenizer import require_markers, tokenizer_hash
from redraft.frame import atomic
from redraft.frame.errors import RedraftError, some
from redraft.frame.files import open_tensors
from redraft.frame.profile import CorpusParams


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

    def part(self, indices: Sequence[int]) -> "Corpus":
        """The documents of `indices`, as a corpus of their own."""
        documents = [self.document(index) for index in indices]
        lengths = torch.tensor([0, *(len(ids) for ids, _ in documents)])
        return Corpus(
            torch.cat([ids for ids, _ in documents]),
            torch.cat([mask for _, mask in documents]),
            lengths.cumsum(0),
            [self.samples[index] for index in indices],
            [self.sources[index] for index in indices],
            {**self.identity, "part": list(indices)},
        )


def gather(samples: dict[str, Sample], identity: dict[str, Any], max_dropped: float) -> tuple[Corpus, dict[str, int]]:
    """Join tokenised samples, leaving out those without a supervised token; also how many were dropped, by reason.

    Raises:
        RedraftError: nothing is left, or the dropped share passes `max_dropped`.
    """
    kept = {name: sample for name, sample in samples.items() if sample.dropped is None}
    kinds = [sample.dropped.split(":")[0] for sample in samples.values() if sample.dropped is not None]
    dropped = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    if not kept or len(kinds) > max_dropped * len(samples):
        raise RedraftError(
            "Too many samples have no supervised token.",
            where=identity["file"],
            expected=f"at most {max_dropped:.0%} dropped",
            found=f"{len(kinds)} of {len(samples)}: {dropped}; {told_dropped(samples)}",
            cause="`truncated`: corpus.max_length cuts the answer off; `no answer`: no assistant turn, run `redraft "
            "regenerate` on prompts; `boundary`: the template's header is not followed by a token boundary; "
            "`template`: the chat template does not render the chat",
        )
    offsets = torch.tensor([0, *(len(sample.ids) for sample in kept.values())]).cumsum(0)
    ids = torch.tensor([token for sample in kept.values() for token in sample.ids], dtype=torch.int32)
    mask = torch.tensor([flag for sample in kept.values() for flag in sample.mask], dtype=torch.uint8)
    content = hashlib.sha256()
    for tensor in (offsets, ids, mask):
        content.update(tensor.numpy().tobytes())
    sources = [sample.source for sample in kept.values()]
    return Corpus(ids, mask, offsets, list(kept), sources, {**identity, "content": content.hexdigest()}), dropped


def told_dropped(samples: dict[str, Sample]) -> str:
    """The first samples that were dropped, each with its reason."""
    return some([f"{name} ({sample.dropped})" for name, sample in samples.items() if sample.dropped], 3)


def write_corpus(path: Path, corpus: Corpus) -> None:
    """Write one split."""
    tensors = {name: getattr(corpus, name) for name in ("input_ids", "loss_mask", "offsets")}
    fields = {"samples": corpus.samples, "sources": corpus.sources, "identity": corpus.identity}
    record = json.dumps(fields, sort_keys=True)
    atomic.write_bytes(path, save(tensors, {"redraft": record}))


def read_corpus(path: Path) -> Corpus:
    """Read one split.

    Raises:
        RedraftError: no such file, or not one that `write_corpus` wrote.
    """
    with open_tensors(path) as file:
        record = (file.metadata() or {}).get("redraft")
        names = ("input_ids", "loss_mask", "offsets")
        if record is None or not set(names) <= set(file.keys()):
            raise RedraftError(
                "This is no tokenised corpus.", where=path, expected=", ".join(names), found=some(sorted(file.keys()))
            )
        return Corpus(*map(file.get_tensor, names), **json.loads(record))


def tokenize_file(
    path: Path, tokenizer: Any, params: CorpusParams, *, optional: bool = False
) -> tuple[Corpus, dict[str, Any]]:
    """Tokenise a JSONL file of chats; also its counts: samples, tokens, supervised tokens, dropped by reason.

    Args:
        path: JSONL, see `redraft.corpus.jsonl.read_chats`.
        tokenizer: the target's.
        params: longest sample and largest share of dropped ones.
        optional: a file that is not there gives an empty corpus.

    Raises:
        RedraftError: as `read_chats` and `gather`.
    """
    name, _ = chat_template(tokenizer)
    identity = {
        "file": path.name,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        **({"template_name": name} if name else {}),
        "max_length": params.max_length,
        "max_samples": params.max_samples,
    }
    if optional and not path.exists():
        nothing = torch.zeros(0)
        return Corpus(nothing.int(), nothing.byte(), torch.zeros(1, dtype=torch.int64), [], [], identity), {
            "samples": 0
        }
    require_markers(tokenizer)
    identity["sha256"] = hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
    samples = {}
    chats = read_chats(path)
    count = min(len(chats), params.max_samples or len(chats))
    for chat in (chats[place * len(chats) // count] for place in range(count)):
        samples[chat["id"]] = tokenize(tokenizer, chat["messages"], params.max_length)
        samples[chat["id"]].source = chat.get("source", "")
    corpus, dropped = gather(samples, identity, params.max_dropped)
    if dropped:
        print(f"note: {path}: {sum(dropped.values())} of {len(samples)} chats are left out: {told_dropped(samples)}")
    counts = {
        "samples": len(corpus),
        "tokens": len(corpus.input_ids),
        "supervised": int(corpus.loss_mask.sum()),
        "dropped": sum(dropped.values()),
        **{f"dropped_{reason.replace(' ', '_')}": number for reason, number in dropped.items()},
    }
    return corpus, counts
