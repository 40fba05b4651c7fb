"""The loss of the first step of every option, before any training."""

from collections.abc import Mapping as Named
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.drafter.checkpoint import Checkpoint
from redraft.drafter.model import Drafter
from redraft.frame.device import compute_device
from redraft.frame.errors import RedraftError
from redraft.frame.profile import FitParams
from redraft.frame.progress import counter
from redraft.hidden.rows import HiddenStates, PackedRows
from redraft.remap.fills import FILLS
from redraft.remap.remap import initial
from redraft.target.ends import Ends
from redraft.train.batches import deal
from redraft.train.measure import Heldout, Measurement, as_written
from redraft.train.step import counted_positions, judge, unroll
from redraft.vocab.mapping import Mapping

CARRIED = {
    "naive": ("naive", "zero"),
    "keep_donor_vocab": ("keep_donor_vocab", "zero"),
    **{f"remap_{fill}": ("remap", fill) for fill in FILLS},
}
"""Init and fill of the options that differ in head and mapping alone: the rest is the donor's."""
Table = dict[str, dict[str, Any]]
"""By option, figures by name; None is what nothing was measured of."""


def first_steps(donor: Checkpoint, mapping: Mapping, ends: Ends, heldout: HiddenStates, params: FitParams) -> Table:
    """What the first training step of every option would read, on held-out documents, in fp32.

    Weights are measured as they are written, rounded to bf16.

    Returns:
        By option (`naive`, `keep_donor_vocab`, `remap_<fill>` for every fill, `scratch`): `positions`; of the first
        draft step `loss` and `accuracy`, each with `_interval`, and `ceiling`; `joint` over all steps. See `Heldout`.

    Raises:
        RedraftError: a loss that is not a number.
    """
    rows = PackedRows(heldout, params.row_tokens)

    def head(init: str, fill: str) -> tuple[Tensor, Mapping]:
        start = initial(init, fill, donor, mapping, ends.head, params.seed)
        return start.drafter.lm_head.weight.detach(), start.mapping

    heads = {name: head(*option) for name, option in CARRIED.items()}
    found = _measure(donor.drafter, heads, ends, rows, params)
    scratch = initial("scratch", "zero", donor, mapping, ends.head, params.seed).drafter
    found |= _measure(scratch, {"scratch": (scratch.lm_head.weight.detach(), mapping)}, ends, rows, params)
    for name, measured in found.items():
        if not measured.finite:
            raise RedraftError(
                "The first step of an option has no loss.",
                where=f"first_step: {name}, held-out documents",
                expected="finite losses",
                found=measured.loss,
                cause="weights of the donor, head rows or hidden states too large to compute with",
            )
    return {name: _figures(measured) for name, measured in found.items()}


def _figures(found: Heldout) -> dict[str, Any]:
    return {
        "loss": found.loss[0],
        "loss_interval": found.loss_interval,
        "accuracy": found.accuracy[0],
        "accuracy_interval": found.accuracy_interval,
        "ceiling": found.ceiling[0],
        "joint": found.joint[-1],
        "positions": found.positions,
    }


@torch.no_grad()
def _measure(
    body: Drafter, heads: Named[str, tuple[Tensor, Mapping]], ends: Ends, rows: PackedRows, params: FitParams
) -> dict[str, Heldout]:
    """`evaluate` of `body` under each of `heads` ([N, H] and its mapping): no draft is fed back, so one unroll will do.

    Bit for bit the figures of each head by itself.
    """
    device = compute_device()
    home = next(body.parameters()).device
    body.to(device)
    embed, steps = ends.embed.to(device).float(), params.ttt_steps
    ids = {mapping.hash: torch.from_numpy(mapping.ids) for _, mapping in heads.values()}
    drafted = {key: (slots.to(device), ends.head[slots].to(device)) for key, slots in ids.items()}
    given = {name: (weight.bfloat16().float().to(device), mapping.hash) for name, (weight, mapping) in heads.items()}
    sums = {name: Measurement(rows, steps, device) for name in heads}
    with as_written(body), counter(len(rows), "first step", "row") as bar:
        for numbers, batch in deal(rows, list(range(len(rows))), params, 0, 1):
            here = batch.to(device).cast(torch.float32)
            counted = counted_positions(here.loss_mask, here.documents, steps).flatten(1)
            asked = counted.any(0).nonzero()[:, 0]
            normed = body.norm(unroll(body, embed, here, steps, asked))
            for name, (weight, key) in given.items():
                logits = F.linear(normed, weight)
                output = judge(logits, *drafted[key], len(embed), here, asked, counted[:, asked])
                sums[name].add(output, here, numbers)
            bar.update(len(numbers))
    body.to(home)
    return {name: measured.found() for name, measured in sums.items()}


def best_fill(table: Table) -> str:
    """The fill with the lowest first-step loss in a table of `first_steps`: what `fill: auto` takes.

    Raises:
        RedraftError: no loss is defined.
    """
    losses = {fill: table[f"remap_{fill}"]["loss"] for fill in FILLS}
    if None in losses.values():
        raise RedraftError(
            "No fill can be chosen: no held-out position's next token has a slot (ceiling 0).",
            where="fill: auto in params.yaml",
            found=f"{table['remap_zero']['positions']:,} positions, none of whose next tokens is in artifacts/vocab",
            cause="the vocabulary was counted on other token ids or another corpus than the held-out documents",
            fix="look at coverage in metrics/vocab.json; more vocab.slots in the profile, or data alike",
        )
    return min(losses, key=lambda fill: losses[fill])
