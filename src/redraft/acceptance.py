"""Accept length and its kin, from the drafts accepted in each verify step. Computed here alone.

A verify step drafts K tokens and accepts the first a of them that are right, then adds the target's own token (the
bonus). accept length = 1 + sum(a) / steps, from 1 to K + 1, pooled over requests; accept rate = accepted / drafted.
A last step that the answer's end cut short is left out where the engine tells which it was; SGLang counts it, in full.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from redraft.frame.errors import RedraftError


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

    def add(self, accepted: Iterable[int]) -> None:
        """Count verify steps by their accepted drafts."""
        for number in accepted:
            self.histogram[number] += 1

    def add_untold(self, steps: int, accepted: int) -> None:
        """Count verify steps of which only the sum of accepted drafts is known."""
        self.untold = (self.untold[0] + steps, self.untold[1] + accepted)

    @property
    def verify_steps(self) -> int:
        """Verify steps counted."""
        return sum(self.histogram) + self.untold[0]

    @property
    def accepted(self) -> int:
        """Drafts accepted in them."""
        return sum(count * number for number, count in enumerate(self.histogram)) + self.untold[1]

    def metrics(self) -> dict[str, Any]:
        """`verify_steps`, `accept_length`, `accept_rate`, and per draft position k (from 1) `accepted_at_k`.

        `accepted_at_k` is the share of verify steps in which at least k drafts were accepted; absent if untold.

        Raises:
            RedraftError: no verify step was counted, which is not the same as accepting nothing.
        """
        steps = self.verify_steps
        if not steps:
            raise RedraftError(
                "No verify step was counted.",
                where="acceptance",
                cause="the engine did not speculate, or reported no counters",
            )
        shares = {k: sum(self.histogram[k:]) / steps for k in range(1, self.spec_steps + 1) if not self.untold[0]}
        return {
            "verify_steps": steps,
            "accept_length": round(1 + self.accepted / steps, 4),
            "accept_rate": round(self.accepted / (steps * self.spec_steps), 4),
            **{f"accepted_at_{k}": round(share, 4) for k, share in shares.items()},
        }
