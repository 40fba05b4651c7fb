"""How many slots? What the vocabularies of other sizes would cover: one sort for all of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from redraft.vocab.build import Order
from redraft.vocab.mapping import Ids

LADDER = tuple(1 << power for power in range(10, 17))
"""Sizes that are looked at, 1024 to 65,536."""


def ladder(chosen: int, least: int, most: int) -> list[int]:
    """Sizes, ascending: of `LADDER` those from `least` to `most`, `most` if that is below its end, and `chosen`."""
    sizes = {size for size in (*LADDER, most) if max(1, least) <= size <= min(most, LADDER[-1])}
    return sorted(sizes | {chosen})


def drafted(mask: NDArray[np.integer], offsets: Ids) -> NDArray[np.uint8]:
    """uint8 [T], of the mask the tokens that are drafted: all of an answer but its first, which the prefill gives.

    Args:
        mask: [T], nonzero where a token is supervised.
        offsets: int64 [D+1], where documents begin.
    """
    supervised = (mask != 0).astype(np.uint8)
    found = supervised.copy()
    found[1:] &= supervised[:-1]
    found[offsets[:-1]] = False
    return found


def by_slots(order: Order, train: Ids, heldout: Ids, drafts: Ids, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """By size, as a string, what the vocabulary of that size covers.

    `coverage_train`, `coverage_heldout`: see `redraft.vocab.build.coverage`. `ceiling_heldout`: of the held-out tokens
    that are drafted; more drafts cannot be right. `seen_heldout`: of the same tokens those whose id training shows too.

    Args:
        order: of `redraft.vocab.build.rank` over `train`.
        train: int64 [V], supervised tokens of the training split.
        heldout: likewise.
        drafts: of `heldout` what `drafted` says.
        sizes: of vocabularies that `redraft.vocab.build.build` would make.
    """
    parts = {
        "coverage_train": (train, train),
        "coverage_heldout": (heldout, heldout),
        "ceiling_heldout": (drafts, drafts),
        "seen_heldout": (drafts * (train > 0), drafts),
    }
    shares = {name: np.cumsum(values[order.ids]) / max(1, whole.sum()) for name, (values, whole) in parts.items()}
    return {str(size): {name: float(share[size - 1]) for name, share in shares.items()} for size in sizes}
