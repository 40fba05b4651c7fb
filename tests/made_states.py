"""States that a server could give, made from ids alone, so that a test knows them."""

import torch
from torch import Tensor


def made(ids: list[int], layers: list[int], hidden: int, seed: int = 0) -> Tensor:
    """fp32 [T, layers, H]."""
    drawn = [torch.Generator().manual_seed(hash((seed, layer, *ids)) % 2**40) for layer in layers]
    return torch.stack([torch.randn(len(ids), hidden, generator=each) for each in drawn], 1)


def normed(state: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32."""
    return weight * state / (state.pow(2).mean(-1, keepdim=True) + eps).sqrt()
