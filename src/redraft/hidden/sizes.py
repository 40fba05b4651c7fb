"""Bytes of hidden states a token; without torch, so that `redraft plan` answers at once."""

import math

TOP = 64
"""Logits kept of a token under `top64`; fewer where the vocabulary has fewer."""


def token_bytes(hidden: int, aux: int, kept: str, law: str, scored: float = 1.0) -> int:
    """Bytes of states a token, ids and offsets not counted.

    Args:
        hidden: H.
        aux: L.
        kept: `extract.format`.
        law: `extract.law`.
        scored: share of the tokens that `scored_positions` marks.
    """
    state = 2 * hidden if kept == "bf16" else hidden + 4
    of_law = {"states": state, "scored": 1 + math.ceil(scored * state), "top64": TOP * (4 + 2)}
    return aux * state + of_law[law]
