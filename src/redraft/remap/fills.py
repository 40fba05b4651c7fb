"""Head rows for ids that the donor lacks: from nothing, from the donor's mean, or from the target's own head.

A donor's head was trained against the drafter's states, so its rows need not share scale or basis with the target's;
the ids that both know say how one maps to the other. All arithmetic is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge strengths tried, as shares of the mean squared norm of a feature."""
HELDOUT_EVERY = 10
MAX_FIT_ROWS_PER_FEATURE = 2
"""Rows used to fit, per input feature: more cost time and change little."""
CHOOSING_FEATURES = 512
"""Output features on which the ridge strength is chosen, at least."""
CHUNK = 2048


@dataclass(frozen=True)
class Shared:
    """The ids that both the donor and the target have a row for: all ids of the donor's mapping."""

    donor: Tensor
    """[N, H], the donor's head."""
    head: Tensor
    """[V, H], the target's head."""
    ids: Tensor
    """int64 [N], the target id of every row of the donor."""

    def pairs(self, step: int = 1) -> tuple[Tensor, Tensor]:
        """Every `step`-th row of both, fp32 [N / step, H]: target, donor."""
        return self.head[self.ids[::step]].float(), self.donor[::step].float()


def zero(shared: Shared, wanted: Tensor) -> Tensor:
    """Rows of zeros: the logit of an unknown id is 0."""
    return torch.zeros(1, 1).expand(wanted.shape)


def mean(shared: Shared, wanted: Tensor) -> Tensor:
    """The mean of the donor's rows: an unknown id scores as the average one."""
    parts = [part.sum(0, dtype=torch.float32) for part in shared.donor.split(CHUNK)]
    return (torch.stack(parts).sum(0) / len(shared.donor)).expand(wanted.shape)


def target(shared: Shared, wanted: Tensor) -> Tensor:
    """The target's rows as they are, which is what people do: usually the worst."""
    return wanted.float()


def scaled(shared: Shared, wanted: Tensor) -> Tensor:
    """The target's rows times the one factor that brings them nearest to the donor's on shared ids (least squares)."""
    above = below = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(shared.ids), CHUNK):
        known = shared.head[shared.ids[start : start + CHUNK]].float()
        above = above + (known * shared.donor[start : start + CHUNK].float()).sum()
        below = below + known.square().sum()
    return wanted.float() * (above / below.clamp(min=1e-12)).float()


def fitted(shared: Shared, wanted: Tensor) -> Tensor:
    """The target's rows through the affine map that best gives the donor's rows on shared ids.

    Ridge regression; the strength is the one of `RIDGES` with the least error on every tenth shared row, which is left
    out of the fit. Source: ordinary least squares, (X'X + r I)^-1 X'Y with centred X and Y. The strength is chosen on
    some of the output features, since each is a regression of its own.
    """
    features = wanted.shape[1]
    x, y = shared.pairs(max(1, len(shared.ids) // (MAX_FIT_ROWS_PER_FEATURE * features)))
    held = torch.arange(len(x)) % HELDOUT_EVERY == HELDOUT_EVERY - 1
    if not held.any():
        return scaled(shared, wanted)
    x_held, y_held, x, y = x[held], y[held], x[~held], y[~held]
    x_mean, y_mean = x.mean(0), y.mean(0)
    for states, centre in ((x, x_mean), (y, y_mean), (x_held, x_mean), (y_held, y_mean)):
        states -= centre
    gram, cross = x.T @ x, x.T @ y
    del x, y
    size = gram.diagonal().mean().clamp(min=1e-12)
    some = slice(None, None, max(1, features // CHOOSING_FEATURES))

    def solve(ridge: float, outputs: slice) -> Tensor:
        gram.diagonal().add_(ridge * size)
        lower = torch.linalg.cholesky(gram)
        gram.diagonal().sub_(ridge * size)
        return torch.cholesky_solve(cross[:, outputs], lower)

    def error(ridge: float) -> float:
        return float((x_held @ solve(ridge, some) - y_held[:, some]).square().mean())

    return (wanted.float() - x_mean) @ solve(min(RIDGES, key=error), slice(None)) + y_mean


FILLS: dict[str, Callable[[Shared, Tensor], Tensor]] = {
    "zero": zero,
    "mean": mean,
    "target": target,
    "scaled": scaled,
    "fitted": fitted,
}


def fill_rows(kind: str, shared: Shared, wanted: Tensor) -> Tensor:
    """Rows for ids that the donor lacks, fp32 [M, H].

    Args:
        kind: a key of `FILLS`.
        shared: the ids that both have.
        wanted: [M, H], the target's rows of the ids that the donor lacks.

    Raises:
        RedraftError: a fill that needs shared ids, without any.
    """
    if not len(shared.ids) and kind in ("mean", "scaled", "fitted"):
        raise RedraftError(
            "This fill needs ids that donor and target share.",
            where="fill in params.yaml",
            expected="zero or target",
            found=kind,
            cause="the mappings share no id, or the donor belongs to another model family",
        )
    return FILLS[kind](shared, wanted)
