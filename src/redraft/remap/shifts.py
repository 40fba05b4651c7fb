"""On which layers was a donor trained? Its drafts on the aux layers, and on those all one below and one above.

A drafter's files cannot tell: the same ids stand for inputs of layers in one tool and for outputs in another. One off
costs about 0.1 accept length, no more, so that nothing else shows it either.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.device import compute_device
from redraft.hidden.rows import Batch
from redraft.target.ends import Ends
from redraft.train.measure import as_written, clustered
from redraft.train.step import StepOutput, ttt_step

SHIFTS = (-1, 0, 1)
MEASURES = ("loss", "accuracy", "joint")
LAW = ("final", "top_ids", "top_logits")
"""What tells the target's law, in a shard: the first, or the two others."""
LEAST_DOCUMENTS = 8
"""For a verdict: the interval of fewer says little about documents that were not seen."""
Table = dict[str, Any]


def layer_shifts(
    donor: Checkpoint, ends: Ends, shard: dict[str, Tensor], aux_layers: Sequence[int], depth: int, steps: int
) -> Table:
    """What a donor under its own mapping makes of the aux layers, and of all of them one lower and one higher.

    Intervals are for 95 % and treat a document as one draw; differences are to shift 0 on the same positions.

    Args:
        donor: measured as it is written, in bf16.
        ends: the target's.
        shard: see `redraft.hidden.diagnostic.read_diagnostic`.
        aux_layers: inputs of layers.
        depth: layers of the target; the input of layer `depth` is what leaves the last one.
        steps: K.

    Returns:
        `documents` and `positions`; `shifts`: by shift (`-1`, `0`, `1`) its `layers`, and of each of `MEASURES` (`loss`
        and `accuracy` of the first draft, `joint`: drafts right in a row of K) the figure, its `_interval`, the
        `_difference` and the `_difference_interval`, None for what nothing is known of; `left_out`: by shift, why;
        `best`: the shift that the donor was trained on, None if that is not told; `verdict`: the same in words.
    """
    layers = {shift: [layer + shift for layer in aux_layers] for shift in SHIFTS}
    names = {shift: [_name(layer, depth) for layer in each] for shift, each in layers.items()}
    law = () if any(name in shard for name in LAW) else LAW[:1]
    lacking = {shift: [name for name in (*each, *law) if name not in shard] for shift, each in names.items()}
    measured = {} if lacking[0] else {shift: each for shift, each in names.items() if not lacking[shift]}
    found = _sums(donor, ends, shard, measured, steps)
    table = {
        str(shift): {"layers": layers[shift], **_figures(sums, found[0] if shift else None)}
        for shift, sums in found.items()
    }
    counts = found[0][1, 1] if found else torch.zeros(0)
    documents = int((counts > 0).sum())
    best = _best(table) if documents >= LEAST_DOCUMENTS else None
    return {
        "documents": documents,
        "positions": int(counts.sum()),
        "shifts": table,
        "left_out": {str(shift): f"no {', '.join(each)} in the shard" for shift, each in lacking.items() if each},
        "best": best,
        "verdict": _untold(table, documents) if best is None else _verdict(best, table[str(best)], layers, depth),
    }


def _name(layer: int, depth: int) -> str:
    """The name of a layer's input in a shard."""
    return "unnormed" if layer == depth else f"layer_{layer}"


@torch.no_grad()
def _sums(
    donor: Checkpoint, ends: Ends, shard: dict[str, Tensor], names: dict[int, list[str]], steps: int
) -> dict[int, Tensor]:
    """By shift fp64 [3, 2, D]: by measure, its sum and the positions that count, of every document."""
    device, drafter = compute_device(), donor.drafter
    home = next(drafter.parameters()).device
    ids = torch.from_numpy(donor.mapping.ids)
    embed, head, ids = ends.embed.to(device), ends.head[ids].to(device).float(), ids.to(device)
    kept = [name for name in ("input_ids", "loss_mask", "greedy", *LAW) if name in shard]
    found: dict[int, list[Tensor]] = {shift: [] for shift in names}
    drafter.to(device)
    with as_written(drafter):
        for start, end in pairwise(shard["offsets"].tolist() if names else []):
            document = {name: shard[name][start:end] for name in kept}
            for shift, states in names.items():
                aux = torch.cat([shard[name][start:end] for name in states], -1)
                batch = Batch.row([{**document, "aux": aux}]).to(device).cast(torch.float32)
                found[shift].append(_of_document(ttt_step(drafter, ids, embed, head, batch, steps)))
    drafter.to(home)
    return {shift: torch.stack(each, -1) for shift, each in found.items()}


def _of_document(output: StepOutput) -> Tensor:
    """fp64 [3, 2] on the CPU, see `_sums`."""
    trained, counted, whole = output.contributing()[0], output.counted[0], output.counted.all(0)
    in_a_row = output.correct.cumprod(0).sum(0)
    pairs = ((output.losses[0], trained), (output.correct[0], counted), (in_a_row, whole))
    sums = [torch.stack([(values * counts).sum().double(), counts.sum().double()]) for values, counts in pairs]
    return torch.stack(sums).cpu()


def _figures(sums: Tensor, right: Tensor | None) -> Table:
    """The figures of a shift; against those of shift 0, `right`, unless this is it."""
    row: Table = {}
    for place, name in enumerate(MEASURES):
        row[name], row[f"{name}_interval"] = clustered(sums[place])
        if right is not None:
            apart = torch.stack([sums[place, 0] - right[place, 0], right[place, 1]])  # the same positions count
            row[f"{name}_difference"], row[f"{name}_difference_interval"] = clustered(apart)
    return row


def _best(table: Table) -> int | None:
    """The shift that the donor was trained on, where the intervals tell.

    One that is better than shift 0, of two the one of less loss; shift 0 if every other one is worse.
    """
    others = {shift: _better(row) for shift, row in table.items() if shift != "0"}
    better = [shift for shift, sign in others.items() if sign > 0]
    if better:
        return int(min(better, key=lambda shift: table[shift]["loss"]))
    return 0 if others and all(sign < 0 for sign in others.values()) else None


def _better(row: Table) -> int:
    """1 for a shift that is better than 0, -1 for one that is worse: by some measure clearly, and by none the contrary.

    0 if that is not so, or nothing is known.
    """
    signs = {(-1 if name == "loss" else 1) * _sign(row, name) for name in MEASURES} - {0}
    return signs.pop() if len(signs) == 1 else 0


def _sign(row: Table, name: str) -> int:
    """1 or -1 for a paired difference whose interval excludes 0; else, and where nothing is known, 0."""
    difference, half = row[f"{name}_difference"], row[f"{name}_difference_interval"]
    return 0 if half is None or abs(difference) <= half else 1 if difference > 0 else -1


def _verdict(best: int, row: Table, layers: dict[int, list[int]], depth: int) -> str:
    if best == 0:
        return f"The donor was trained on these layers, inputs of {layers[0]}: every other shift measured is worse."
    changes = [f"{name} {_told(row, name)}" for name in MEASURES]
    told = (
        f"The donor was trained on other layers: on inputs of {layers[best]} it is better than on those of {layers[0]} "
        f"({', '.join(changes)}). "
    )
    if layers[best][-1] >= depth:
        return f"{told}They cannot be extracted: the last is no layer's input."
    return f"{told}Set target.aux_layers: {layers[best]} in the profile and run again."


def _told(row: Table, name: str) -> str:
    difference, half = row[f"{name}_difference"], row[f"{name}_difference_interval"]
    return "not known" if half is None else f"{difference:+.3f} ± {half:.3f}"


def _untold(table: Table, documents: int) -> str:
    told = "On which layers the donor was trained is not told: "
    if len(table) < 2:
        return f"{told}no two shifts could be measured."
    if documents < LEAST_DOCUMENTS:
        return f"{told}{documents} documents are too few; extract.diagnostic_positions in the profile asks for more."
    return f"{told}the intervals leave open which shift is better."
