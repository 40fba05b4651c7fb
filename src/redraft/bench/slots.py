"""How many slots? What the draft head costs by its number of rows N, and what other N would give.

A larger vocabulary lets more drafts be right and makes every draft dearer: each of the K steps of a cycle multiplies one
hidden state by N rows and takes the largest. Torch is imported where something is measured alone: the report predicts
without it.
"""

from collections.abc import Mapping

from redraft.bench.cycle import CycleTime


def head_cost(head_ms: Mapping[str, float], slots: int) -> float:
    """Time of one head of `slots` rows, ms: on the line a + b N through the measured ones, no part below 0.

    Args:
        head_ms: of a bench, ms by N; at least one. Of a single N the time is taken as proportional to N.
        slots: N.
    """
    measured = {int(size): ms for size, ms in head_ms.items()}
    if len(measured) == 1:
        ((size, ms),) = measured.items()
        return ms * slots / size
    return CycleTime.fit(measured).at(slots)


def cycle_with(cycle_ms: float, spec_steps: int, head_ms: Mapping[str, float], slots: int, other_slots: int) -> float:
    """A cycle of `cycle_ms` with K = `spec_steps` drafts and a head of `slots` rows, were it one of `other_slots`, ms."""
    return cycle_ms + spec_steps * (head_cost(head_ms, other_slots) - head_cost(head_ms, slots))
