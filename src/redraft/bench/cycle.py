"""Model of a speculative cycle: what a drafter gains, from the time of a plain step, of a cycle, and acceptance.

A cycle is one draft and verify round with K drafted tokens. It yields L tokens on average (the accept length, bonus
token included) and takes t(K); plain decoding takes t0 a token. So speculation gives L / t(K) tokens a second against
1 / t0, and pays exactly if L > t(K) / t0, the break-even accept length. The worked case, in which nobody had computed
that: 82 tokens/s plain, verify 30 ms = 97 % of a cycle: break-even 2.54, so accept length 2.0 gives 64.7 tokens/s.
Times are in milliseconds throughout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from redraft.acceptance import length_of_shares


def break_even(cycle_ms: float, step_ms: float) -> float:
    """The accept length at which a cycle of `cycle_ms` costs what plain decoding of as many tokens does."""
    return cycle_ms / step_ms


def tokens_per_second(accept_length: float, cycle_ms: float) -> float:
    """Output tokens a second of one stream."""
    return 1000 * accept_length / cycle_ms


def needed_cycle(accept_length: float, step_ms: float) -> float:
    """The longest cycle, ms, at which this accept length breaks even."""
    return accept_length * step_ms


@dataclass(frozen=True)
class CycleTime:
    """t(K) = fixed + per_step * K, ms: one verify forward, and a further drafted and verified token."""

    fixed: float
    per_step: float

    @classmethod
    def fit(cls, measured: Mapping[int, float]) -> "CycleTime":
        """Least squares over cycle times by number of draft steps, at least two of them; no part is below 0."""
        steps, times = np.array(list(measured)), np.array(list(measured.values()))
        slope, fixed = np.polyfit(steps, times, 1)
        if slope < 0:  # noise: no draft is free
            return cls(float(times.mean()), 0.0)
        if fixed < 0:  # nor is a verify
            return cls(0.0, float((steps @ times) / (steps @ steps)))
        return cls(float(fixed), float(slope))

    def at(self, spec_steps: int) -> float:
        """t(K)."""
        return self.fixed + self.per_step * spec_steps


@dataclass(frozen=True)
class Prediction:
    """What one number of draft steps would give."""

    spec_steps: int
    accept_length: float
    cycle_ms: float
    tokens_per_second: float
    ratio: float
    """Over plain decoding."""


def predict(accepted_at: Sequence[float], time: CycleTime, step_ms: float, spec_steps: int) -> Prediction:
    """Predict decoding with `spec_steps` drafts."""
    length, cycle = length_of_shares(accepted_at, spec_steps), time.at(spec_steps)
    return Prediction(spec_steps, length, cycle, tokens_per_second(length, cycle), length / break_even(cycle, step_ms))


def best_steps(accepted_at: Sequence[float], time: CycleTime, step_ms: float, most: int) -> Prediction:
    """The number of draft steps, at most `most`, that is predicted fastest."""
    every = [predict(accepted_at, time, step_ms, steps) for steps in range(1, most + 1)]
    return max(every, key=lambda each: each.tokens_per_second)
