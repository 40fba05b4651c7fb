"""Two contenders on the same held-out documents: their ratio, with an interval that knows that they are the same.

With m = accepted drafts over rounds, the accept length is L = 1 + m. A contender's influence of chat c is
u_c = (accepted_c - m rounds_c) / (rounds L), the linearised ratio estimator of ln L (Cochran 1977, 6.11); of two
contenders the influences are subtracted chat by chat, so what is hard for both cancels. The interval is Student's t
over chats. It tells how other documents would answer, not how another seed would.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from redraft.acceptance import length_of_shares
from redraft.frame.errors import RedraftError


@dataclass(frozen=True)
class Walk:
    """What walking the held-out documents found of one contender."""

    heldout: str
    """Fingerprint of the documents and of the target that read them."""
    slots: int
    spec_steps: int
    rounds: NDArray[np.float64]
    """[chats]."""
    accepted: NDArray[np.float64]
    """[chats]."""

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Walk":
        """The weights kept, of `artifacts/walks.json`."""
        chat = np.array(told["chats"], dtype=np.int64)
        rounds, accepted = (
            np.bincount(chat, column).astype(np.float64) for column in np.array(told["kept"], dtype=np.float64).T
        )
        return cls(told["heldout"], told["slots"], told["spec_steps"], rounds, accepted)

    @property
    def length(self) -> float:
        """Accept length, bonus token included; NaN without a round."""
        return length_of_shares([float(self.accepted.sum() / self.rounds.sum())], 1) if self.rounds.sum() else math.nan

    def influence(self) -> NDArray[np.float64]:
        """[chats], by which each chat moves ln L."""
        return (self.accepted - (self.length - 1) * self.rounds) / (self.rounds.sum() * self.length)


@dataclass(frozen=True)
class Ratio:
    """One contender over another, with a 95 % interval: low and high are NaN with fewer than two chats."""

    value: float
    low: float
    high: float

    @property
    def tied(self) -> bool:
        """Whether no difference is seen."""
        return not (self.low > 1 or self.high < 1)


def ratio(one: Walk, other: Walk, factor: float = 1.0) -> Ratio:
    """Accept length of `one` over that of `other`, times `factor` (the other's cycle over its own, for tokens/s).

    Raises:
        RedraftError: they walked other documents, or other numbers of drafts without a factor that says what one costs.
    """
    if one.heldout != other.heldout or len(one.rounds) != len(other.rounds):
        raise RedraftError(
            "The contenders were measured on different held-out documents.",
            where="artifacts/walks.json",
            expected=other.heldout,
            found=one.heldout,
            fix="race with settings that leave target, corpus and data as they are",
        )
    centre = math.log(one.length / other.length * factor)
    chats = int(((one.rounds > 0) | (other.rounds > 0)).sum())
    if chats < 2:
        return Ratio(math.exp(centre), math.nan, math.nan)
    difference = one.influence() - other.influence()
    error = math.sqrt(float((difference**2).sum()) * chats / (chats - 1))
    half = float(student.ppf(0.975, chats - 1)) * error
    return Ratio(math.exp(centre), math.exp(centre - half), math.exp(centre + half))
