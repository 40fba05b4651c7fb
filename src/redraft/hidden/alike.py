"""How far two readings of the same states are apart."""

import torch
from torch import Tensor


def apart(one: Tensor, other: Tensor) -> float:
    """Relative difference of states [T, ..., H] to `one`: of all, or of the worst state's median token if more.

    The first token of many models is a hundred times as loud as the others and nearly the same in every layer: by the
    norm of all alone, another layer looks right. NaN stays NaN.
    """
    one, other = one.float(), other.float()
    gap, size = (one - other).norm(dim=-1), one.norm(dim=-1)
    whole = gap.norm() / size.norm().clamp(min=1e-30)
    typical = (gap / size.clamp(min=1e-30)).median(0).values.max()
    return float(torch.stack([whole, typical]).max())
