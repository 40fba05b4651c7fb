"""Sums over positions, and the measures made of them: the same definitions in remap, train and donor."""

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from redraft.acceptance import Acceptance
from redraft.frame.device import compute_device
from redraft.frame.profile import FitParams
from redraft.hidden.rows import PackedRows
from redraft.train.batches import deal
from redraft.train.step import StepOutput
from redraft.train.walk import walk


@dataclass
class Tally:
    """Sums over positions, fp64 [K] each; adds up over batches and processes."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: StepOutput) -> None:
        """Count one batch."""
        counted, trained = output.counted, output.contributing()
        right = output.correct & counted
        parts = {
            "counted": counted,
            "trained": trained,
            "loss": output.losses.detach() * trained,
            "correct": right,
            "in_vocab": output.in_vocab & counted,
            "whole": counted.cumprod(0),
            "prefix": right.cumprod(0),
        }
        for name, part in parts.items():
            total = part.double().sum(1)
            self.sums[name] = self.sums[name].to(total.device) + total if name in self.sums else total

    @classmethod
    def of(cls, sums: dict[str, list[float]]) -> "Tally":
        """A tally that goes on from saved sums."""
        return cls({name: torch.tensor(values, dtype=torch.float64) for name, values in sums.items()})

    def reduce(self, accelerator: Accelerator) -> None:
        """Add up over processes."""
        names = list(self.sums)
        if not names:
            return
        total = accelerator.reduce(torch.stack([self.sums[name] for name in names]))
        self.sums = dict(zip(names, total, strict=True))

    def metrics(self) -> dict[str, Any]:
        """Per step k, with `_k` appended, and `positions`.

        loss: nats per position that contributes loss. accuracy: correct / counted positions, compared as target ids,
        an out-of-vocabulary target a miss. ceiling: share of counted positions whose target argmax has a slot.
        joint: share of the positions counted at all steps up to k at which all drafts up to k are right.
        """
        rows: dict[str, Any] = {"positions": int(self.sums["counted"][0])}
        pairs = (
            ("loss", "loss", "trained"),
            ("accuracy", "correct", "counted"),
            ("ceiling", "in_vocab", "counted"),
            ("joint", "prefix", "whole"),
        )
        for name, above, below in pairs:
            ratio = self.sums[above] / self.sums[below].clamp(min=1)
            rows |= {f"{name}_{step}": round(value, 6) for step, value in enumerate(ratio.tolist())}
        return rows


@torch.no_grad()
def evaluate(
    module: nn.Module, rows: PackedRows, params: FitParams, accelerator: Accelerator | None = None
) -> dict[str, Any]:
    """`Tally.metrics` of a `TTTModule` over all of `rows`, in fp32, with what is predicted of serving.

    `loss_0_interval` and `accuracy_0_interval` are the half widths of 95 % intervals for a mean over clusters: the
    positions of a row depend on each other, rows do not. With s_r the sum and c_r the count of row r, Var =
    sum (s_r - m c_r)^2 / (sum c_r)^2 (the linearised ratio estimator of survey sampling, Cochran 1977, 6.11).
    `accept_length` is `redraft.train.walk`'s for K drafted tokens; absent if no round was complete.

    With an `accelerator` every process measures its share, every row once, and all return the same.
    """
    device = accelerator.device if accelerator else compute_device()
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    tally = Tally()
    clusters = torch.zeros(2, 2, len(rows), dtype=torch.float64, device=device)
    histogram = torch.zeros(params.ttt_steps + 1, dtype=torch.int64, device=device)
    for numbers, batch in deal(rows, list(range(len(rows))), params, rank, world):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        output = module(batch, exact=True)
        tally.add(output)
        places = torch.tensor(numbers, dtype=torch.int64, device=device)
        own = output.positions // rows.row_tokens
        for index, (values, counts) in enumerate(
            ((output.losses[0], output.contributing()[0]), (output.correct[0], output.counted[0]))
        ):
            pairs = torch.stack([values * counts, counts]).double()
            clusters[index].index_add_(1, places[own], pairs)
        histogram += walk(output, batch["input_ids"], batch["loss_mask"], batch["documents"])
    if accelerator:
        clusters, histogram = accelerator.reduce(clusters), accelerator.reduce(histogram)
        tally.reduce(accelerator)
    found = tally.metrics()
    loss, accuracy = clusters.cpu()
    found |= {"loss_0_interval": _half_width(loss), "accuracy_0_interval": _half_width(accuracy)}
    rounds = histogram.tolist()
    if sum(rounds):
        walked = Acceptance(params.ttt_steps, rounds).metrics()
        found |= {"accept_length": walked["accept_length"], "verify_steps": walked["verify_steps"]}
    return found


def joint_acceptance(measured: dict[str, Any]) -> float:
    """Drafts that are right at a position before the first wrong one, on average: by this checkpoints are chosen."""
    return round(sum(value for name, value in measured.items() if name.startswith("joint_")), 6)


def _half_width(pairs: Tensor) -> float:
    """95 % half width of sum(pairs[0]) / sum(pairs[1]) over clusters [2, R]."""
    sums, counts = pairs
    total = counts.sum().clamp(min=1)
    return round(float(1.96 * (sums - sums.sum() / total * counts).square().sum().sqrt() / total), 6)
