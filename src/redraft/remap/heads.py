"""Compare a drafter's head with its target's, row by row: do the two share scale and direction?"""

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError
from redraft.vocab.mapping import Ids

CHUNK = 256
"""Rows at once: what stays in cache at a hidden size of 7168."""


def compare_heads(rows: Tensor, target_head: Tensor, ids: Ids) -> dict[str, float]:
    """Mean norms of both heads' rows for the same ids, their ratio, and the mean cosine between them.

    Args:
        rows: [N, H], the drafter's head.
        target_head: [V, H].
        ids: int64 [N], the target id of every row.
    """
    if not len(ids):
        raise RedraftError("The two vocabularies share no id: there are no rows to compare.", where="lm_head.weight")
    if rows.ndim != 2 or rows.shape[1] != target_head.shape[1] or ids.max() >= len(target_head):
        raise RedraftError(
            "The two heads belong to different models.",
            where="target",
            expected=f"[more than {ids.max()}, {rows.shape[-1]}]",
            found=list(target_head.shape),
        )
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(ids), CHUNK):
        mine, its = rows[start : start + CHUNK].float(), target_head[ids[start : start + CHUNK]].float()
        one, two = torch.linalg.vecdot(mine, mine).sqrt(), torch.linalg.vecdot(its, its).sqrt()
        cosine = torch.linalg.vecdot(mine, its) / (one * two).clamp(min=1e-12)
        sums += torch.stack([one, two, cosine]).double().sum(1)
    drafter, target, angle = (sums / len(ids)).tolist()
    ratio = drafter / max(target, 1e-12)
    figures = {"drafter_norm": drafter, "target_norm": target, "norm_ratio": ratio, "cosine": angle}
    return {name: round(value, 5) for name, value in figures.items()}
