"""How states are kept in a shard."""

import torch
from torch import Tensor


def token_bytes(hidden: int, aux: int, kept: str, law: str) -> int:
    """Bytes of states a token."""
    return 2 * hidden * (aux + 1)


def packed(
    states: dict[str, Tensor], kept: str, law: str, head: Tensor, scored: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of a shard, of one document."""
    return {
        "aux": states["aux"].to(torch.bfloat16, copy=True),
        "final": states["final"].to(torch.bfloat16, copy=True),
        "greedy": states["greedy"].int(),
    }


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `packed` kept."""
    return tensors


def scored_places(mask: Tensor) -> Tensor:
    """bool [T]."""
    return mask.bool()
