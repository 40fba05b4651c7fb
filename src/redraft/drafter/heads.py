"""Compare a drafter's head with its target's, row by row: do the two share scale and direction?"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.vocab.mapping import Ids

CHUNK = 2048


def compare_heads(rows: Tensor, target_head: Tensor, ids: Ids) -> dict[str, float]:
    """Mean norms of both heads' rows for the same ids, their ratio, and the mean cosine between them.

    Args:
        rows: [N, H], the drafter's head.
        target_head: [V, H].
        ids: int64 [N], the target id of every row.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(ids), CHUNK):
        mine, its = rows[start : start + CHUNK].float(), target_head[ids[start : start + CHUNK]].float()
        parts = (mine.norm(dim=1), its.norm(dim=1), F.cosine_similarity(mine, its, dim=1))
        sums += torch.stack([part.double().sum() for part in parts])
    drafter, target, cosine = (sums / len(ids)).tolist()
    ratio = drafter / max(target, 1e-12)
    figures = {"drafter_norm": drafter, "target_norm": target, "norm_ratio": ratio, "cosine": cosine}
    return {name: round(value, 5) for name, value in figures.items()}
