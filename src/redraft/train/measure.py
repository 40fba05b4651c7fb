"""Sums over positions, and the measures made of them: the same definitions in remap, train and donor."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from redraft.drafter.checkpoint import Checkpoint
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
        counted, trained = output.counted, output.trained
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
    """`Tally.metrics` of `module` over all of `rows`, in fp32."""
    tally = Tally()
    for batch in DataLoader(rows, batch_size=batch_rows):
        tally.add(module({name: tensor.to(module.embed.device) for name, tensor in batch.items()}))
    return tally.metrics()


def first_steps(
    donor: Checkpoint, mapping: Mapping, ends: Ends, heldout: HiddenStates, params: FitParams
) -> dict[str, dict[str, float]]:
    """What the first training step of every option would read, on held-out documents, in fp32.

    Returns:
        By option (`naive`, `keep_donor_vocab`, `remap_zero`, `remap_target`, `scratch`): `positions`, and of the first
        draft step `loss`, `accuracy`, `ceiling`; `joint` over all steps. See `Tally.metrics`.
    """
    options = {
        "naive": ("naive", "zero"),
        "keep_donor_vocab": ("keep_donor_vocab", "zero"),
        "remap_zero": ("remap", "zero"),
        "remap_target": ("remap", "target"),
        "scratch": ("scratch", "zero"),
    }
    rows = PackedRows(heldout, params.row_tokens)
    embed = ends.embed.float()
    table = {}
    for name, (init, fill) in progress(options.items(), "first step", "option"):
        start = initial(init, fill, donor, mapping, ends.head, params.seed)
        module = TTTModule(start.drafter, start.mapping, embed, ends.head, params.ttt_steps)
        found = evaluate(module, rows, params.batch_tokens // params.row_tokens)
        table[name] = {key: found[f"{key}_0"] for key in ("loss", "accuracy", "ceiling")}
        table[name] |= {"joint": found[f"joint_{params.ttt_steps - 1}"], "positions": found["positions"]}
    return table
