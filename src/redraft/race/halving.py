"""Who goes on after a rung, and what the race says in the end: pure functions of a ranking and of who is tied.

The best that starts from the donor and the best from scratch always go on: which of the two wins is the race's
question, and a fresh drafter is behind at first even where it wins.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

Tied = Callable[[str, str], bool]


def go_on(ranked: Sequence[str], scratch: Collection[str], tied: Tied) -> list[str]:
    """The better half of `ranked` (best first), at least two, and one more that is tied with the one above it.

    Args:
        ranked: names, best first.
        scratch: those that start from nothing; the best of both kinds stays.
        tied: whether no difference is seen between two.
    """
    keep = max(2, math.ceil(len(ranked) / 2))
    kept = list(ranked[:keep])
    for kind in (True, False):
        best = next((name for name in ranked if (name in scratch) == kind), None)
        if best is not None and best not in kept:
            kept[-1] = best
    for above, name in pairwise(ranked):
        if name not in kept and above in kept:
            if tied(name, above):
                kept.append(name)
            break
    return [name for name in ranked if name in kept]


def leaders(ranked: Sequence[str], tied: Tied) -> list[str]:
    """The first, and all that no difference is seen to."""
    return [name for name in ranked if name == ranked[0] or tied(name, ranked[0])]


@dataclass(frozen=True)
class Early:
    """What the smallest budget said, held against the end."""

    right: bool | None
    """None: it saw no difference where the end does."""
    told: str


def early(first: Sequence[str], last: Sequence[str], budget: str) -> Early:
    """Would the answer at the first budget have been right?

    Args:
        first: leaders at the first budget.
        last: leaders at the last one.
        budget: the first one, for example `10 %`.
    """
    said = ", ".join(f"`{name}`" for name in first)
    best = ", ".join(f"`{name}`" for name in last)
    if not set(first) & set(last):
        return Early(False, f"The answer at {budget} of the tokens would have been wrong: it was {said}.")
    if set(first) <= set(last):
        if len(last) == 1:
            return Early(True, f"The answer at {budget} of the tokens would have been right: {said} as well.")
        if len(first) == 1:
            told = f"The answer at {budget} of the tokens, {said}, would have cost nothing that is seen: "
            return Early(True, f"{told}in the end no difference is seen between {best}.")
        return Early(True, f"At {budget} of the tokens no difference was seen either, between {said}.")
    return Early(
        None,
        f"At {budget} of the tokens no difference was seen between {said}: it would not have named {best}.",
    )
