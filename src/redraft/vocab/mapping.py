"""The mapping: which target id each slot of a draft vocabulary stands for. The only place where ids become slots.

On disk a mapping is `d2t` (int64 [N], offsets: target id of slot i is i + d2t[i]) and `t2d` (bool [V], true where an
id is in the draft vocabulary; a mask, not an inverse). This is the convention of SGLang and SpecForge.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from redraft.frame.errors import RedraftError

Ids = NDArray[np.int64]


def _refuse(what: str, where: str, bad: NDArray[np.bool_], ids: Ids, expected: object, cause: str) -> None:
    if bad.any():
        slots = np.flatnonzero(bad)
        first = ", ".join(f"slot {slot}: {ids[slot]}" for slot in slots[:5])
        raise RedraftError(what, where=where, expected=expected, found=f"{len(slots)} slot(s): {first}", cause=cause)


def fits(ids: Ids, vocab_size: int) -> bool:
    """Whether these can be the target ids of slots: distinct, and in [0, V)."""
    return bool(len(ids) and ids.min() >= 0 and ids.max() < vocab_size) and len(np.unique(ids)) == len(ids)


def readings(values: Ids, vocab_size: int, mask: NDArray[np.bool_] | None = None) -> dict[str, Ids]:
    """What a `d2t` can mean: target ids by reading, `offsets` (slot + value) and `ids` (the value), as far as they fit.

    Args:
        values: int64 [N].
        vocab_size: V.
        mask: `t2d`, bool [V]; a reading then has to name exactly its ids.
    """
    both = {"offsets": values + np.arange(len(values)), "ids": values}
    named = None if mask is None else np.flatnonzero(mask)
    return {
        name: ids
        for name, ids in both.items()
        if fits(ids, vocab_size) and (named is None or np.array_equal(np.sort(ids), named))
    }


def holds_ids(values: Ids, vocab_size: int, mask: NDArray[np.bool_] | None = None) -> bool:
    """Whether a `d2t` seems to hold ids where offsets belong: `t2d` decides if it is there.

    Else distinct values of which none is negative are taken for ids: offsets are equal where ids follow each other, and
    negative somewhere where ids do not ascend.
    """
    if mask is not None:
        return list(readings(values, vocab_size, mask)) == ["ids"]
    return len(values) > 2 and values.min() >= 0 and len(np.unique(values)) == len(values)


@dataclass(frozen=True)
class Mapping:
    """A draft vocabulary of N slots over a target vocabulary of V ids.

    Args:
        ids: int64 [N], the target id of every slot; distinct, in [0, V).
        vocab_size: V, the rows of the target's embedding (never the length of its tokenizer).

    Raises:
        RedraftError: an id out of range or in two slots.
    """

    ids: Ids
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or not 0 < len(ids) <= self.vocab_size:
            raise RedraftError(
                "A mapping has an impossible size.",
                where="mapping",
                expected=f"one dimension, 1 to {self.vocab_size} slots",
                found=f"shape {list(ids.shape)}",
            )
        outside = (ids < 0) | (ids >= self.vocab_size)
        cause = "offsets read as ids or ids read as offsets, or the mapping of another target"
        _refuse("Target ids are out of range.", "mapping", outside, ids, f"0 to {self.vocab_size - 1}", cause)
        _, first, counts = np.unique(ids, return_index=True, return_counts=True)
        if (counts > 1).any():
            repeated = np.ones(len(ids), bool)
            repeated[first] = False
            _refuse("Target ids stand in two slots.", "mapping", repeated, ids, "distinct ids", cause)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> Ids:
        """Offsets, int64 [N]."""
        return self.ids - np.arange(len(self.ids))

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """Mask over the target vocabulary, bool [V]."""
        mask = np.zeros(self.vocab_size, bool)
        mask[self.ids] = True
        return mask

    @cached_property
    def slots(self) -> Ids:
        """Slot of every target id, int64 [V]; -1 where the id is not in the draft vocabulary."""
        slots = np.full(self.vocab_size, -1, np.int64)
        slots[self.ids] = np.arange(len(self.ids))
        return slots

    @property
    def order(self) -> str:
        """`ascending` (by target id) or `other` (for example by frequency)."""
        return "ascending" if bool((np.diff(self.ids) > 0).all()) else "other"

    @property
    def prefix(self) -> bool:
        """Whether slot i is id i, for fewer slots than ids: all offsets are 0, which an empty table is as well."""
        return len(self.ids) < self.vocab_size and not self.d2t.any()

    @property
    def kind(self) -> str:
        """`full vocabulary`, `prefix vocabulary` or `reduced`."""
        if len(self.ids) == self.vocab_size:
            return "full vocabulary"
        return "prefix vocabulary" if self.prefix else "reduced"

    @property
    def misread(self) -> dict[str, Ids]:
        """What the slots stand for if the file was read the wrong way, by what is wrong; as far as that can be."""
        wrong = {
            "d2t holds ids, not offsets": readings(self.d2t, self.vocab_size).get("ids"),
            "d2t holds offsets, not ids": readings(self.ids, self.vocab_size).get("offsets"),
        }
        return {name: ids for name, ids in wrong.items() if ids is not None and (ids != self.ids).any()}

    @property
    def hash(self) -> str:
        """SHA-256 of V and the ids in slot order: the identity that every artefact carries."""
        return hashlib.sha256(f"{self.vocab_size}:".encode() + self.ids.astype("<i8").tobytes()).hexdigest()

    def require_hash(self, expected: str | None, where: object) -> None:
        """Refuse a mapping that is not the one a drafter was written with; None asks nothing.

        Raises:
            RedraftError: with both hashes.
        """
        if expected not in (None, self.hash):
            raise RedraftError(
                "The drafter's mapping is not the one it was written with.",
                where=where,
                expected=expected,
                found=self.hash,
                cause="d2t was replaced after training; the head still belongs to the old mapping",
            )

    def require_meant(self, hashes: Collection[str], where: object) -> None:
        """Refuse a prefix vocabulary that none of `hashes`, written with the head, vouches for.

        Raises:
            RedraftError: every offset is 0, as in a table that was never filled.
        """
        if self.prefix and self.hash not in hashes:
            raise RedraftError(
                "Every offset of d2t is 0: the slots would stand for the first ids.",
                where=where,
                expected="the mapping of the head",
                found=f"a prefix vocabulary, ids 0 to {len(self) - 1} of {self.vocab_size}",
                cause="an export that left d2t empty; nothing says which ids the head's rows are of",
                fix="bring the d2t of this head; if it was trained on the first ids: --prefix-vocabulary, or "
                "donor.prefix_vocabulary: true in the profile",
            )

    @classmethod
    def from_offsets(
        cls,
        d2t: ArrayLike,
        t2d: ArrayLike | None,
        vocab_size: int,
        where: str = "mapping",
        hashes: Collection[str] = (),
    ) -> "Mapping":
        """Decode what a checkpoint holds.

        Args:
            d2t: int64 or int32 [N], offsets.
            t2d: bool or 0/1 uint8 [V], or None.
            vocab_size: V.
            where: names the file in errors.
            hashes: of the mapping that was written with the head: what they name is no guess.

        Raises:
            RedraftError: wrong dtype or length, ids out of range or repeated, or a mask that does not agree.
        """
        offsets = np.asarray(d2t)
        if offsets.dtype not in (np.int64, np.int32) or offsets.ndim != 1:
            raise RedraftError(
                "d2t cannot be read.",
                where=where,
                expected="int64 or int32, one dimension",
                found=f"{offsets.dtype}, shape {list(offsets.shape)}",
                cause="the mapping was cast together with the weights",
            )
        offsets = offsets.astype(np.int64)
        ids = offsets + np.arange(len(offsets))
        told = fits(ids, vocab_size) and cls(ids, vocab_size).hash in hashes
        if t2d is None and not told and holds_ids(offsets, vocab_size):
            raise RedraftError(
                "d2t seems to hold ids rather than offsets.",
                where=where,
                expected="offsets: equal where ids follow each other, negative somewhere where they do not ascend",
                found=f"distinct values, none negative: {offsets[:5].tolist()} ...",
                cause="a mapping written as target ids",
                fix="subtract the slot from every value, or give t2d as well, which decides",
            )
        mapping = cls(ids, vocab_size)
        if t2d is not None:
            mapping._check_mask(np.asarray(t2d), where)
        return mapping

    def _check_mask(self, mask: NDArray[np.generic], where: str) -> None:
        if (
            mask.dtype not in (np.bool_, np.uint8)
            or mask.shape != (self.vocab_size,)
            or mask.view(np.uint8).max() > 1  # the raw byte: a bool of 2 reads as true without complaint
        ):
            raise RedraftError(
                "t2d cannot be read.",
                where=where,
                expected=f"bool (or uint8 of 0 and 1), [{self.vocab_size}]",
                found=f"{mask.dtype}, shape {list(mask.shape)}",
                cause="a mapping of another target, or an inverse map in place of the mask",
            )
        true = int(mask.sum())
        if true != len(self.ids):
            raise RedraftError(
                "d2t and t2d name different numbers of ids.", where=where, expected=f"{len(self.ids)} true", found=true
            )
        outside = ~mask.astype(bool)[self.ids]
        cause = "d2t holds ids rather than offsets, or the two come from different mappings"
        _refuse("d2t and t2d name different ids.", where, outside, self.ids, "every id true in t2d", cause)
