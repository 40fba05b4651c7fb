"""Sums over positions, and the measures made of them: the same definitions in remap, train and donor."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from redraft.drafter.checkpoint import Checkpoint
from redraft.drafter.fill import FILLS
from redraft.drafter.remap import initial
from redraft.hidden.store import HiddenStates, PackedRows
from redraft.params import FitParams
from redraft.progress import progress
from redraft.target.model import Ends
from redraft.train.step import StepOutput, TTTModule
from redraft.vocab.mapping import Mapping


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
            self.sums[name] = self.sums[name] + total if name in self.sums else total

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


@torch.inference_mode()
def evaluate(module: TTTModule, rows: PackedRows, batch_rows: int) -> dict[str, Any]:
    """`Tally.metrics` of `module` over all of `rows`, in fp32; and the half width of 95 % intervals of the first step.

    `loss_0_interval` and `accuracy_0_interval` are for a mean over clusters: the positions of a row depend on each
    other, rows do not. With s_r the sum and c_r the count of row r, Var = sum (s_r - m c_r)^2 / (sum c_r)^2
    (the linearised ratio estimator of survey sampling, Cochran 1977, 6.11).
    """
    tally = Tally()
    clusters: dict[str, list[Tensor]] = {"loss_0": [], "accuracy_0": []}
    for batch in DataLoader(rows, batch_size=batch_rows):
        output = module({name: tensor.to(module.embed.device) for name, tensor in batch.items()})
        tally.add(output)
        row = output.positions // rows.row_tokens
        first = {"loss_0": (output.losses[0], output.contributing()[0]), "accuracy_0": (output.correct[0], output.counted[0])}
        for name, (values, counts) in first.items():
            pairs = torch.stack([values * counts, counts]).double()
            sums = pairs.new_zeros(2, len(batch["documents"])).index_add_(1, row, pairs)
            clusters[name].append(sums.cpu())
    return tally.metrics() | {f"{name}_interval": _half_width(torch.cat(parts, 1)) for name, parts in clusters.items()}


def _half_width(pairs: Tensor) -> float:
    """95 % half width of sum(pairs[0]) / sum(pairs[1]) over clusters [2, R]."""
    sums, counts = pairs
    total = counts.sum().clamp(min=1)
    return round(float(1.96 * (sums - sums.sum() / total * counts).square().sum().sqrt() / total), 6)


def first_steps(
    donor: Checkpoint, mapping: Mapping, ends: Ends, heldout: HiddenStates, params: FitParams
) -> dict[str, dict[str, float]]:
    """What the first training step of every option would read, on held-out documents, in fp32.

    Returns:
        By option (`naive`, `keep_donor_vocab`, `remap_<fill>` for every fill, `scratch`): `positions`; of the first
        draft step `loss` and `accuracy`, each with `_interval`, and `ceiling`; `joint` over all steps. See `evaluate`.
    """
    options = {name: (name, "zero") for name in ("naive", "keep_donor_vocab")}
    options |= {f"remap_{fill}": ("remap", fill) for fill in FILLS}
    options["scratch"] = ("scratch", "zero")
    rows = PackedRows(heldout, params.row_tokens)
    embed = ends.embed.float()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = {}
    for name, (init, fill) in progress(options.items(), "first step", "option"):
        start = initial(init, fill, donor, mapping, ends.head, params.seed)
        module = TTTModule(start.drafter, start.mapping, embed, ends.head, params.ttt_steps).to(device)
        found = evaluate(module, rows, params.batch_tokens // params.row_tokens)
        table[name] = {
            "loss": found["loss_0"],
            "loss_interval": found["loss_0_interval"],
            "accuracy": found["accuracy_0"],
            "accuracy_interval": found["accuracy_0_interval"],
            "ceiling": found["ceiling_0"],
            "joint": found[f"joint_{params.ttt_steps - 1}"],
            "positions": found["positions"],
        }
    return table


def best_fill(table: dict[str, dict[str, float]]) -> str:
    """The fill with the lowest first-step loss in a table of `first_steps`: what `fill: auto` takes."""
    return min(FILLS, key=lambda fill: table[f"remap_{fill}"]["loss"])
