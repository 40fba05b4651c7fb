"""Build a draft vocabulary from token frequencies.

Only supervised tokens count. Special and byte tokens are forced in, then ids by count (higher first, ties by lower
id), then the lowest unused ids that the tokenizer can decode. Slots ascend by target id, so the artefact does not
depend on the order of samples.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.vocab.mapping import Ids, Mapping

_BLOCK = 1 << 22
"""Tokens that are counted at once: a corpus is read by memory map and need not fit the memory."""


@dataclass(frozen=True)
class Vocabulary:
    """A built mapping and how it came about."""

    mapping: Mapping
    forced: int
    """Ids that are in because they are special or bytes."""
    padded: int
    """Ids that are in although they were never seen, forced ones aside."""
    outside: tuple[int, ...] = ()
    """Ids of the tokenizer that the target has no row for, and that are left out."""


@dataclass(frozen=True)
class Order:
    """In which order ids are taken into a vocabulary."""

    ids: Ids
    """int64 [U], the forced ones first; the first N of them are the vocabulary of N slots."""
    forced: int
    outside: tuple[int, ...]
    """As in `Vocabulary`."""


def count_tokens(ids: NDArray[np.integer], mask: NDArray[np.integer], vocab_size: int) -> Ids:
    """Occurrences of each id at supervised positions, int64 [V].

    Args:
        ids: [T] token ids.
        mask: [T], nonzero where a token is supervised.
        vocab_size: V.

    Raises:
        RedraftError: an id outside the target vocabulary, supervised or not: the target could not read it.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise RedraftError(
            "The corpus holds ids that the target does not have.",
            where="corpus",
            expected=f"0 to {vocab_size - 1}",
            found=f"{ids.min()} to {ids.max()}",
            cause="another tokenizer, or an added token that the target has no row for",
        )
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(ids), _BLOCK):
        block = slice(start, start + _BLOCK)
        counts += np.bincount(ids[block][mask[block].astype(bool)], minlength=vocab_size)
    return counts


def build(counts: Ids, size: int, *, forced: Iterable[int] = (), decodable: Iterable[int]) -> Vocabulary:
    """Choose `size` ids.

    Args:
        counts: int64 [V], occurrences of each id.
        size: N, from 1 to V.
        forced: ids that must be in; those without a row in the target are left out.
        decodable: ids that the tokenizer knows; only these are used as padding, likewise.

    Raises:
        RedraftError: `size` out of range, more forced ids than slots, or too few ids to choose from.
    """
    vocab_size, order = len(counts), rank(counts, forced=forced, decodable=decodable)
    if not 0 < size <= vocab_size or order.forced > size:
        raise RedraftError(
            "The draft vocabulary cannot have this size.",
            where="vocab.slots in the profile",
            expected=f"{max(1, order.forced)} ({order.forced} forced ids) to {vocab_size}",
            found=size,
        )
    if len(order.ids) < size:
        raise RedraftError(
            "The tokenizer has fewer ids than the draft vocabulary has slots.",
            where="vocab.slots in the profile",
            expected=f"at most {len(order.ids)}",
            found=size,
        )
    padded = int((counts[order.ids[order.forced : size]] == 0).sum())
    return Vocabulary(Mapping(np.sort(order.ids[:size]), vocab_size), order.forced, padded, order.outside)


def rank(counts: Ids, *, forced: Iterable[int] = (), decodable: Iterable[int]) -> Order:
    """The ids in the order in which vocabularies of growing size take them; arguments as of `build`."""
    vocab_size = len(counts)
    wanted, usual = np.unique(np.fromiter(forced, np.int64)), np.fromiter(decodable, np.int64)
    must = wanted[wanted < vocab_size]
    outside = np.union1d(wanted, usual)
    known = np.zeros(vocab_size, bool)
    known[usual[usual < vocab_size]] = True
    usable = known | (counts > 0)
    usable[must] = False
    candidates = np.flatnonzero(usable)
    ranked = candidates[np.lexsort((candidates, -counts[candidates]))]
    return Order(np.concatenate([must, ranked]), len(must), tuple(outside[outside >= vocab_size].tolist()))


def coverage(mapping: Mapping, counts: Ids) -> float:
    """Share of counted tokens whose id is in the draft vocabulary; 0 for no tokens."""
    total = int(counts.sum())
    return float(counts[mapping.ids].sum() / total) if total else 0.0


def coverage_by_source(
    mapping: Mapping, ids: NDArray[np.integer], mask: NDArray[np.integer], offsets: Ids, sources: list[str]
) -> dict[str, float]:
    """`coverage` of the documents of every source, in alphabetical order.

    Args:
        mapping: the draft vocabulary.
        ids: [T] token ids.
        mask: [T], nonzero where a token is supervised.
        offsets: int64 [D+1], where documents begin; none is empty.
        sources: of each document.
    """
    known = sorted(set(sources))
    number = {source: place for place, source in enumerate(known)}
    group = np.array([number[source] for source in sources], np.int64)
    sums = np.zeros((2, len(known)))
    first = 0
    while first < len(group):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _BLOCK, "right")) - 1)
        block = slice(int(offsets[first]), int(offsets[last]))
        counted = mask[block].astype(bool)
        starts = offsets[first:last] - offsets[first]
        for row, flags in enumerate((counted & mapping.t2d[ids[block]], counted)):
            sums[row] += np.bincount(group[first:last], np.add.reduceat(flags, starts, dtype=np.int64), len(known))
        first = last
    return {
        source: float(sums[0, place] / sums[1, place]) if sums[1, place] else 0.0 for source, place in number.items()
    }


def write_vocab(folder: Path, vocabulary: Vocabulary, counts: dict[str, Ids], provenance: dict[str, object]) -> None:
    """Write `mapping.safetensors` (d2t, t2d), `vocab.json` (provenance, hash) and `counts_<split>.npy` (int64 [V])."""
    mapping = vocabulary.mapping
    with atomic.folder(folder) as partial:
        (partial / "mapping.safetensors").write_bytes(save({"d2t": mapping.d2t, "t2d": mapping.t2d}))
        for split, values in counts.items():
            np.save(partial / f"counts_{split}.npy", values)
        record = {**provenance, "slots": len(mapping), "vocab_size": mapping.vocab_size, "mapping": mapping.hash}
        atomic.write_json(partial / "vocab.json", record)


def read_vocab(folder: Path) -> Mapping:
    """Read the mapping of a vocabulary artefact.

    Raises:
        RedraftError: files that cannot be read, or another mapping than `vocab.json` names.
    """
    record, path = read_object(folder / "vocab.json"), folder / "mapping.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RedraftError("The vocabulary cannot be read.", where=path, found=error) from error
    lacking = sorted({"d2t", "t2d"} - tensors.keys()) + sorted({"vocab_size", "mapping"} - record.keys())
    if lacking:
        raise RedraftError("This is no vocabulary of redraft.", where=folder, expected=", ".join(lacking))
    mapping = Mapping.from_offsets(tensors["d2t"], tensors["t2d"], record["vocab_size"], str(folder))
    if mapping.hash != record["mapping"]:
        raise RedraftError("The vocabulary was changed.", where=folder, expected=record["mapping"], found=mapping.hash)
    return mapping
