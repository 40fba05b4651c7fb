"""The first-batch gate: numbers that cannot be right stop a training before its first step, with the likely cause.

Two measurements that disagree mean a wrong data path; so the diagnostic shard is measured again with each known fault
undone, and the one that makes the numbers sane is named.
"""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.drafter.checkpoint import Checkpoint
from redraft.drafter.model import Drafter
from redraft.frame.device import compute_device
from redraft.frame.errors import RedraftError
from redraft.hidden.rows import Batch
from redraft.target.ends import Ends
from redraft.train.measure import Heldout, Tally
from redraft.train.step import greedy_tokens, ttt_step
from redraft.vocab.mapping import Mapping, fits

LEAST_GAIN = 2.0
"""An alternative explains the fault if it at least doubles the accuracy and lowers the loss."""


NORM_EPS = 1e-6
"""Of the norm that is tried on the final state: near enough to any target's."""


@dataclass
class Measured:
    """First draft step on the diagnostic shard; None is what nothing was measured of."""

    loss: float | None
    """Nats per position that contributes loss."""
    accuracy: float | None

    def __str__(self) -> str:
        loss = "undefined" if self.loss is None else f"{self.loss:.3f}"
        return f"loss {loss}, accuracy " + ("undefined" if self.accuracy is None else f"{self.accuracy:.4f}")


def suspicion(start: Heldout, slots: int, init: str, donor_accuracy: float | None) -> str | None:
    """What cannot be right in the measurement before the first step, if anything.

    Args:
        start: `evaluate` before the first step.
        slots: N.
        init: what training starts from; a random drafter may be 1 nat worse than uniform.
        donor_accuracy: of the donor under its own mapping on the same positions, if that is known.
    """
    loss, accuracy = start.loss[0], start.accuracy[0]
    if loss is None or accuracy is None:
        return (
            "no held-out position's next token has a slot (ceiling 0): there is nothing to learn, no draft can be right"
        )
    limit = math.log(slots) + (1.0 if init == "scratch" else 0.0)
    if not loss <= limit:  # NaN too
        plus = " + 1" if init == "scratch" else ""
        return f"loss {loss:.3f} is above ln N{plus} = {limit:.3f}: worse than knowing nothing"
    chance = 3 / slots
    if init != "scratch" and accuracy <= chance and donor_accuracy is not None and donor_accuracy > chance:
        return f"accuracy {accuracy:.4f} is at chance, although the donor's is {donor_accuracy:.4f}"
    return None


def draft_once(drafter: Drafter, ids: np.ndarray, embed: Tensor, head: Tensor, batch: Batch) -> Measured:
    """The first draft step of `drafter` with slots that stand for `ids`; all tensors on one device.

    Args:
        drafter: fp32.
        ids: int64 [N].
        embed: [V, H].
        head: [V, H].
        batch: one row of documents, `aux` and `final` in fp32.
    """
    mapping_ids = torch.from_numpy(ids).to(head.device)
    tally = Tally()
    with torch.no_grad():
        tally.add(ttt_step(drafter, mapping_ids, embed, head[mapping_ids].float(), batch, steps=1))
    return Measured(tally.loss[0], tally.accuracy[0])


def _documents(shard: dict[str, Tensor], ends: Ends) -> Batch:
    """The diagnostic shard as one row, its states in fp32; `aux` holds one zero a token until it is chosen."""
    final = shard["final"].float()
    tensors = {
        "input_ids": shard["input_ids"],
        "loss_mask": shard["loss_mask"],
        "aux": final.new_zeros(len(final), 1),
        "final": final,
        "greedy": greedy_tokens(final, ends.head.float()),
    }
    bounds = shard["offsets"].tolist()
    return Batch.row([{name: t[start:end] for name, t in tensors.items()} for start, end in pairwise(bounds)])


def alternatives(
    checkpoint: Checkpoint, donor: Mapping, ends: Ends, shard: dict[str, Tensor], aux_layers: tuple[int, ...]
) -> Iterator[tuple[str, Measured]]:
    """Measure the diagnostic shard as it is (`as it is`), then with each known fault undone.

    Nothing where an engine gave no final states: most faults could not be told from one another.

    The checkpoint's own drafter stays where it is: on a GPU a copy is measured, and gone afterwards.
    """
    if "final" not in shard:
        return
    device = compute_device()
    drafter = checkpoint.drafter if device.type == "cpu" else deepcopy(checkpoint.drafter).to(device)
    ids = checkpoint.mapping.ids
    embed, head = ends.embed.to(device), ends.head.to(device)

    def layers(moves: tuple[int, ...]) -> Tensor | None:
        """fp32 [1, T, 3H], inputs of the aux layers moved by `moves`; None where such a layer was not kept."""
        names = [f"layer_{layer + move}" for layer, move in zip(aux_layers, moves, strict=True)]
        found = all(name in shard for name in names)
        return torch.cat([shard[name] for name in names], 1)[None].float().to(device) if found else None

    right = layers((0,) * len(aux_layers))
    assert right is not None
    batch = replace(_documents(shard, ends).to(device), aux=right)

    def tried(ids: np.ndarray = ids, embed: Tensor = embed, **changes: Tensor) -> Measured:
        return draft_once(drafter, ids, embed, head, replace(batch, **changes))

    yield "as it is", tried()
    if len(donor) == len(ids) and fits(donor.ids, checkpoint.mapping.vocab_size) and (donor.ids != ids).any():
        yield "the donor's mapping belongs to this head", tried(ids=donor.ids)
    for name, reading in checkpoint.mapping.misread.items():
        yield name, tried(ids=reading)
    count = len(aux_layers)
    for by, word in ((-1, "high"), (1, "low")):
        alone = {aux_layers[at]: tuple(by * (at == place) for place in range(count)) for at in range(count)}
        moves = {f"aux layer {layer} was captured one too {word}": move for layer, move in alone.items()}
        for name, move in {**moves, f"every aux layer was captured one too {word}": (by,) * count}.items():
            if (states := layers(move)) is not None:
                yield name, tried(aux=states)
    for by, word in ((-1, "late"), (1, "early")):
        yield f"tokens come one position too {word}", tried(input_ids=batch.input_ids.roll(by, 1))
    assert batch.final is not None
    normed = F.rms_norm(batch.final, ends.norm.shape, ends.norm.float().to(device), NORM_EPS)
    best = greedy_tokens(normed, head.float())
    yield "the final state was taken before its norm", tried(final=normed, greedy=best)
    if not torch.equal(ends.embed[:8], ends.head[:8]):
        yield "the head was given as the embedding", tried(embed=head)


def diagnose(found: dict[str, Measured]) -> str | None:
    """The alternative that explains the fault: the best accuracy, at least `LEAST_GAIN` times as good, at less loss."""
    if not found:
        return None
    known = {name: (each.accuracy or 0.0, math.inf if each.loss is None else each.loss) for name, each in found.items()}
    name, best = max(known.items(), key=lambda item: (item[1][0], -item[1][1]))
    accuracy, loss = known["as it is"]
    return name if best[0] > LEAST_GAIN * accuracy and best[1] < loss else None


def check(
    start: Heldout,
    checkpoint: Checkpoint,
    policy: str,
    donor_accuracy: float | None,
    measured: Callable[[], dict[str, Measured]],
) -> None:
    """Stop, warn or pass, before the first step.

    Args:
        start: `evaluate` before the first step.
        checkpoint: what training starts from; `init: naive` only warns, since it exists to show the fault.
        policy: `stop`, `warn` or `off`.
        donor_accuracy: see `suspicion`.
        measured: the alternatives, asked for only if something is wrong.

    Raises:
        RedraftError: the numbers cannot be right.
    """
    init = checkpoint.record.get("init", "scratch")
    wrong = suspicion(start, len(checkpoint.mapping), init, donor_accuracy) if policy != "off" else None
    if wrong is None:
        return
    found = measured()
    cause = diagnose(found)
    table = "; ".join(f"{name}: {each}" for name, each in found.items())
    error = RedraftError(
        "The numbers before the first step cannot be right.",
        where=f"held-out documents, init: {init}",
        found=wrong,
        cause=cause
        or (
            "none of the faults tried explains it: a drafter or an embedding of another target is left"
            if found
            else "not tried: the engine that the states came from gives no final states"
        ),
        fix="mend the data path; gate: warn in params.yaml trains all the same. Tried on the diagnostic shard: "
        + table,
    )
    if policy == "stop" and init != "naive":
        raise error
    print(f"warning: {error}")
