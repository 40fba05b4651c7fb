"""Sums over positions, and the measures made of them: the same definitions in remap, train and donor.

A measure of nothing is None, never 0: no position that counts, or none whose target has a slot.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from redraft.acceptance import Acceptance
from redraft.frame.device import compute_device
from redraft.frame.profile import FitParams
from redraft.hidden.rows import Batch, PackedRows
from redraft.train.batches import deal
from redraft.train.step import StepOutput
from redraft.train.walk import chats, walk

Measure = float | None


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

    @property
    def positions(self) -> int:
        """Positions that count at the first step."""
        return int(self.sums["counted"][0])

    @property
    def loss(self) -> list[Measure]:
        """By step, nats per position that contributes loss."""
        return self._by_step("loss", "trained")

    @property
    def accuracy(self) -> list[Measure]:
        """By step, correct / counted positions, compared as target ids, an out-of-vocabulary target a miss."""
        return self._by_step("correct", "counted")

    @property
    def ceiling(self) -> list[Measure]:
        """By step, share of counted positions whose target argmax has a slot."""
        return self._by_step("in_vocab", "counted")

    @property
    def joint(self) -> list[Measure]:
        """By step k, share of the positions counted at all steps up to k at which all drafts up to k are right."""
        return self._by_step("prefix", "whole")

    def _by_step(self, above: str, below: str) -> list[Measure]:
        pairs = zip(self.sums[above].tolist(), self.sums[below].tolist(), strict=True)
        return [_ratio(one, two) for one, two in pairs]


def _ratio(above: float, below: float) -> Measure:
    """`above` / `below`, None of nothing; NaN stays NaN."""
    if not below and math.isfinite(above):
        return None
    return round(above / below, 6) if below else math.nan


@dataclass
class Heldout:
    """What `evaluate` found on held-out documents; lists are by draft step, None is what nothing was measured of."""

    positions: int
    """That count at the first step."""
    loss: list[Measure]
    """See `Tally`."""
    accuracy: list[Measure]
    ceiling: list[Measure]
    joint: list[Measure]
    loss_interval: Measure
    """Half width of a 95 % interval of `loss[0]`; None with fewer than two rows to tell how rows differ."""
    accuracy_interval: Measure
    """The same of `accuracy[0]`."""
    accept_length: Measure
    """What serving will give with K drafted tokens, see `redraft.train.walk`; None if no round was complete."""
    verify_steps: int
    """Rounds that `accept_length` pools."""
    accept_length_interval: Measure = None
    """Half width of a 95 % interval of `accept_length` over chats; None with fewer than two that have a round."""
    walks: list[list[int]] = field(default_factory=list)
    """Of each document, in the order of the corpus, its rounds and the drafts accepted in them."""
    step: int = 0
    """Optimizer steps done before."""

    def metrics(self) -> dict[str, Any]:
        """The figures by the names of metrics files; `accept_length` and what goes with it are absent if undefined."""
        figures: dict[str, Any] = {"positions": self.positions}
        for name in ("loss", "accuracy", "ceiling", "joint"):
            figures |= {f"{name}_{step}": value for step, value in enumerate(getattr(self, name))}
        figures |= {"loss_0_interval": self.loss_interval, "accuracy_0_interval": self.accuracy_interval}
        if self.accept_length is not None:
            names = ("accept_length", "accept_length_interval", "verify_steps")
            figures |= {name: getattr(self, name) for name in names}
        return figures

    def row(self) -> dict[str, float]:
        """One row of the held-out curve, without what is undefined."""
        row = {"step": self.step, "loss": self.loss[0], "accuracy": self.accuracy[0], "joint": self.joint_acceptance}
        walked = {"accept_length": self.accept_length, "accept_length_interval": self.accept_length_interval}
        return {name: value for name, value in {**row, **walked}.items() if value is not None}

    @property
    def joint_acceptance(self) -> float:
        """Drafts that are right at a position before the first wrong one, on average: by this weights are chosen."""
        return round(sum(value for value in self.joint if value is not None), 6)

    @property
    def finite(self) -> bool:
        """Whether every loss is a number or undefined: NaN weights show here first."""
        return all(value is None or math.isfinite(value) for value in self.loss)


@contextmanager
def as_written(module: nn.Module) -> Iterator[None]:
    """Round the trained weights of `module` to bf16, as a file has them, until the block ends."""
    _gathered_anew(module)
    weights = list(module.parameters())
    kept = [weight.detach().clone() for weight in weights]
    _set(weights, [weight.detach().bfloat16() for weight in weights])
    try:
        yield
    finally:
        _set(weights, kept)
        _gathered_anew(module)


def _gathered_anew(module: nn.Module) -> None:
    """Let FSDP2 drop the whole weights that it keeps after a forward without gradients: it would go on with them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def _set(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


class Measurement:
    """Sums over held-out rows, batch by batch.

    The intervals are those of a mean over clusters: the positions of a row depend on each other, rows do not. With s_r
    the sum and c_r the count of row r, Var = sum (s_r - m c_r)^2 / (sum c_r)^2 (the linearised ratio estimator of
    survey sampling, Cochran 1977, 6.11). The clusters of the accept length are chats: accepted drafts over rounds.
    """

    def __init__(self, rows: PackedRows, steps: int, device: torch.device) -> None:
        self.rows, self.steps, self.tally = rows, steps, Tally()
        self.clusters = torch.zeros(2, 2, len(rows), dtype=torch.float64, device=device)
        """Of loss and accuracy at the first step, sum and count by row."""
        self.rounds = torch.zeros(len(rows.states), steps + 1, dtype=torch.int64, device=device)
        """Of each document, by accepted drafts."""

    def add(self, output: StepOutput, batch: Batch, numbers: list[int]) -> None:
        """Count a batch whose first rows are `numbers`; the rest is padding."""
        self.tally.add(output)
        row = torch.tensor(numbers, dtype=torch.int64, device=output.flat.device)[output.flat // self.rows.row_tokens]
        firsts = (output.losses[0], output.contributing()[0]), (output.correct[0], output.counted[0])
        for index, (values, counts) in enumerate(firsts):
            self.clusters[index].index_add_(1, row, torch.stack([values * counts, counts]).double())
        walked = walk(output, batch.input_ids, batch.loss_mask, batch.documents)
        for place, number in enumerate(numbers):
            documents = self.rows.rows[number]
            self.rounds[documents] += walked[place, : len(documents)]

    def found(self, accelerator: Accelerator | None = None) -> Heldout:
        """What the sums are worth, added up over processes."""
        clusters, rounds = self.clusters, self.rounds
        if accelerator:
            clusters, rounds = accelerator.reduce(clusters), accelerator.reduce(rounds)
            self.tally.reduce(accelerator)
        tally, (loss, accuracy) = self.tally, clusters.cpu()
        walked, walks = Acceptance(self.steps, rounds.sum(0).tolist()), _walks(rounds.cpu())
        return Heldout(
            tally.positions,
            tally.loss,
            tally.accuracy,
            tally.ceiling,
            tally.joint,
            loss_interval=_half_width(loss),
            accuracy_interval=_half_width(accuracy),
            accept_length=walked.metrics()["accept_length"] if walked.verify_steps else None,
            verify_steps=walked.verify_steps,
            accept_length_interval=_half_width(self._by_chat(walks)),
            walks=walks.tolist(),
        )

    def _by_chat(self, walks: Tensor) -> Tensor:
        """Accepted drafts and rounds, fp64 [2, chats]; `walks` int64 [documents, 2]."""
        states = self.rows.states
        chat = torch.tensor(chats([states.sample(index) for index in range(len(states))]))
        return torch.zeros(2, int(chat.max()) + 1, dtype=torch.float64).index_add_(1, chat, walks.flip(1).T.double())


def _walks(rounds: Tensor) -> Tensor:
    """Rounds and the drafts accepted in them, int64 [documents, 2], of rounds by accepted drafts [documents, K + 1]."""
    return torch.stack([rounds.sum(1), rounds @ torch.arange(rounds.shape[1])], 1)


@torch.no_grad()
def evaluate(module: nn.Module, rows: PackedRows, params: FitParams, accelerator: Accelerator | None = None) -> Heldout:
    """A `TTTModule` over all of `rows`, in fp32, with what is predicted of serving.

    With an `accelerator` every process measures its share, every row once, and all return the same.
    """
    device = accelerator.device if accelerator else compute_device()
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    measured = Measurement(rows, params.ttt_steps, device)
    for numbers, batch in deal(rows, list(range(len(rows))), params, rank, world):
        here = batch.to(device)
        measured.add(module(here, exact=True), here, numbers)
    return measured.found(accelerator)


def clustered(pairs: Tensor) -> tuple[Measure, Measure]:
    """sum(pairs[0]) / sum(pairs[1]) over clusters [2, R], and its 95 % half width, see `Measurement`."""
    above, below = pairs.sum(1).tolist()
    return _ratio(above, below), _half_width(pairs)


def _half_width(pairs: Tensor) -> Measure:
    """95 % half width of sum(pairs[0]) / sum(pairs[1]) over clusters [2, R]; None of fewer than two."""
    sums, counts = pairs
    if int((counts > 0).sum()) < 2:
        return None
    total = counts.sum()
    return round(float(1.96 * (sums - sums.sum() / total * counts).square().sum().sqrt() / total), 6)
