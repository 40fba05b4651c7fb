"""Accept length and its kin, from the drafts accepted in each verify step. Computed here alone.

A verify step drafts K tokens and accepts the first a of them that are right, then adds the target's own token (the
bonus). accept length = 1 + sum(a) / steps, from 1 to K + 1, pooled over requests; accept rate = accepted / drafted.
A last step that the answer's end cut short is left out where the engine tells which it was; SGLang counts it, in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.frame.errors import RedraftError


@dataclass(frozen=True)
class Steps:
    """The verify steps of one answer."""

    verify: int = 0
    """How many, one that the answer's end cut short included."""
    right: int = 0
    """Drafts that were right in all of them; in a step that was cut short, what the cut left out as well."""
    histogram: list[int] | None = None
    """[K + 1], all of them by right drafts; None if the engine tells only the sums (SGLang before 0.5.9)."""
    order: list[int] | None = None
    """Right drafts of each in turn, one that was cut short left out; None if the engine does not tell."""

    @classmethod
    def in_turn(cls, order: Sequence[int], spec_steps: int, cut: int | None = None) -> "Steps":
        """Of an engine that tells each step: `order` of the whole ones, `cut` right drafts in one that was cut."""
        every = [*order] if cut is None else [*order, cut]
        return cls(len(every), sum(every), [every.count(number) for number in range(spec_steps + 1)], [*order])

    def whole(self) -> list[int] | None:
        """`histogram` without a step that was cut short, if the engine tells which it was."""
        if self.histogram is None or self.order is None:
            return self.histogram
        return [self.order.count(number) for number in range(len(self.histogram))]


@dataclass
class Acceptance:
    """How often exactly a drafts were accepted in one verify step."""

    spec_steps: int
    """K, drafted tokens per verify step (of a tree: its depth)."""
    histogram: list[int] = field(default_factory=list)
    """[K + 1], index a."""
    untold: tuple[int, int] = (0, 0)
    """Verify steps and accepted drafts of an engine that does not tell how they are spread (SGLang before 0.5.9)."""

    def __post_init__(self) -> None:
        self.histogram = self.histogram or [0] * (self.spec_steps + 1)

    def add(self, steps: Steps) -> None:
        """Count the verify steps of one answer."""
        whole = steps.whole()
        if whole is None:
            self.untold = (self.untold[0] + steps.verify, self.untold[1] + steps.right)
        else:
            self.histogram = [count + more for count, more in zip(self.histogram, whole, strict=True)]

    @property
    def verify_steps(self) -> int:
        """Verify steps counted."""
        return sum(self.histogram) + self.untold[0]

    @property
    def accepted(self) -> int:
        """Drafts accepted in them."""
        return sum(count * number for number, count in enumerate(self.histogram)) + self.untold[1]

    @property
    def length(self) -> float:
        """The accept length.

        Raises:
            RedraftError: no verify step was counted, which is not the same as accepting nothing.
        """
        if not self.verify_steps:
            raise RedraftError(
                "No verify step was counted.",
                where="acceptance",
                cause="the engine did not speculate or reported no counters, or every answer ended within one step",
            )
        return 1 + self.accepted / self.verify_steps

    @property
    def shares(self) -> list[float]:
        """[K], of the verify steps, those that accepted at least k drafts, k from 1; empty if untold or none."""
        steps = self.verify_steps
        if self.untold[0] or not steps:
            return []
        return [sum(self.histogram[k:]) / steps for k in range(1, self.spec_steps + 1)]

    def metrics(self) -> dict[str, Any]:
        """`verify_steps`, `accept_length`, `accept_rate`, and per draft position k (from 1) `accepted_at_k`.

        `accepted_at_k` is the share of verify steps in which at least k drafts were accepted; absent if untold.

        Raises:
            RedraftError: see `length`.
        """
        return {
            "verify_steps": self.verify_steps,
            "accept_length": round(self.length, 4),
            "accept_rate": round(self.accepted / (self.verify_steps * self.spec_steps), 4),
            **{f"accepted_at_{k}": round(share, 4) for k, share in enumerate(self.shares, 1)},
        }


def length_of_shares(accepted_at: Sequence[float], spec_steps: int) -> float:
    """Accept length with `spec_steps` drafts, from the share of verify steps that accepted at least k drafts, k from 1.

    The share at position k does not depend on how many drafts follow it. Past the last position known, each further one
    keeps the last ratio of two neighbours.
    """
    shares = list(accepted_at[:spec_steps])
    ratio = shares[-1] / shares[-2] if len(shares) > 1 and shares[-2] else (shares[-1] if shares else 0.0)
    while len(shares) < spec_steps:
        shares.append(shares[-1] * ratio if shares else 0.0)
    return 1 + sum(shares)
