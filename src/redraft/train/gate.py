"""The first-batch gate: numbers that cannot be right stop a training before its first step, with the likely cause.

Two measurements that disagree mean a wrong data path; so the diagnostic shard is measured again with each known fault
undone, and the one that makes the numbers sane is named.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.device import compute_device
from redraft.frame.errors import RedraftError
from redraft.frame.store import store_root
from redraft.hidden.shards import check_present
from redraft.target.ends import Ends
from redraft.train.step import ttt_step
from redraft.vocab.mapping import Mapping, fits

LEAST_GAIN = 2.0
"""An alternative explains the fault if it at least doubles the accuracy and lowers the loss."""


NORM_EPS = 1e-6
"""Of the norm that is tried on the final state: near enough to any target's."""


@dataclass
class Measured:
    """First draft step on the diagnostic shard."""

    loss: float
    """Nats per position that contributes loss."""
    accuracy: float


def read_diagnostic(manifest: Path) -> dict[str, Tensor]:
    """The diagnostic shard that `manifest` names, T tokens: see `redraft.hidden.extract`.

    Raises:
        RedraftError: it is not in the store.
    """
    record = json.loads(manifest.read_text())
    path = store_root() / record["fingerprint"] / record["diagnostic"]["file"]
    check_present(path, record["diagnostic"]["bytes"])
    return load_file(path)


def suspicion(start: dict[str, Any], slots: int, init: str, donor_accuracy: float | None) -> str | None:
    """What cannot be right in the measurement before the first step, if anything.

    Args:
        start: `evaluate` before the first step.
        slots: N.
        init: what training starts from; a random drafter may be 1 nat worse than uniform.
        donor_accuracy: of the donor under its own mapping on the same positions, if that is known.
    """
    limit = math.log(slots) + (1.0 if init == "scratch" else 0.0)
    if not start["loss_0"] <= limit:  # NaN too
        plus = " + 1" if init == "scratch" else ""
        return f"loss {start['loss_0']:.3f} is above ln N{plus} = {limit:.3f}: worse than knowing nothing"
    chance = 3 / slots
    if init != "scratch" and start["accuracy_0"] <= chance and donor_accuracy is not None and donor_accuracy > chance:
        return f"accuracy {start['accuracy_0']:.4f} is at chance, although the donor's is {donor_accuracy:.4f}"
    return None


def measure(checkpoint: Checkpoint, ids: np.ndarray, embed: Tensor, head: Tensor, row: dict[str, Tensor]) -> Measured:
    """The first draft step of `checkpoint` with slots that stand for `ids`.

    Args:
        checkpoint: its weights are used, its mapping is not.
        ids: int64 [N].
        embed: [V, H].
        head: [V, H].
        row: one row of documents: `input_ids`, `loss_mask`, `documents`, `positions` [1, T], `aux_hidden` [1, T, 3H],
            `target_hidden` [1, T, H].
    """
    device = compute_device()
    drafter = checkpoint.drafter.to(device)
    given: dict[str, Any] = {name: tensor.to(device) for name, tensor in row.items()}
    for name in ("aux_hidden", "target_hidden"):
        given[name] = given[name].float()
    places = torch.from_numpy(ids).to(device)
    with torch.no_grad():
        output = ttt_step(
            drafter, places, **given, embed=embed.float().to(device), head=head.float().to(device), steps=1
        )
    counted, trained = output.counted[0], output.contributing()[0]
    loss = output.losses[0][trained].sum() / trained.sum().clamp(min=1)
    right = (output.correct[0] & counted).sum() / counted.sum().clamp(min=1)
    return Measured(round(float(loss), 4), round(float(right), 4))


def alternatives(
    checkpoint: Checkpoint, donor: Mapping, ends: Ends, shard: dict[str, Tensor], aux_layers: tuple[int, ...]
) -> Iterator[tuple[str, Measured]]:
    """Measure the diagnostic shard as it is (`as it is`), then with each known fault undone."""
    lengths = shard["offsets"].diff()
    numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)[None]
    places = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    ids = checkpoint.mapping.ids

    def layers(moves: tuple[int, ...]) -> Tensor | None:
        names = [f"layer_{layer + move}" for layer, move in zip(aux_layers, moves, strict=True)]
        return torch.cat([shard[name] for name in names], 1)[None] if all(name in shard for name in names) else None

    row: dict[str, Any] = {
        "input_ids": shard["input_ids"][None],
        "loss_mask": shard["loss_mask"][None],
        "documents": numbers,
        "positions": places,
        "aux_hidden": layers((0,) * len(aux_layers)),
        "target_hidden": shard["final"][None],
    }

    def tried(ids: np.ndarray = ids, embed: Tensor = ends.embed, **changes: Tensor) -> Measured:
        return measure(checkpoint, ids, embed, ends.head, {**row, **changes})

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
                yield name, tried(aux_hidden=states)
    for by, word in ((-1, "late"), (1, "early")):
        yield f"tokens come one position too {word}", tried(input_ids=shard["input_ids"].roll(by)[None])
    normed = F.rms_norm(shard["final"].float(), ends.norm.shape, ends.norm.float(), NORM_EPS)
    yield "the final state was taken before its norm", tried(target_hidden=normed[None])
    if not torch.equal(ends.embed[:8], ends.head[:8]):
        yield "the head was given as the embedding", tried(embed=ends.head)


def diagnose(found: dict[str, Measured]) -> str | None:
    """The alternative that explains the fault: the best accuracy, at least `LEAST_GAIN` times as good, at less loss."""
    now = found["as it is"]
    name, best = max(found.items(), key=lambda item: (item[1].accuracy, -item[1].loss))
    return name if best.accuracy > LEAST_GAIN * now.accuracy and best.loss < now.loss else None


def check(
    start: dict[str, Any],
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
    table = "; ".join(f"{name}: loss {each.loss:.3f}, accuracy {each.accuracy:.4f}" for name, each in found.items())
    error = RedraftError(
        "The numbers before the first step cannot be right.",
        where=f"held-out documents, init: {init}",
        found=wrong,
        cause=cause or "none of the faults tried explains it: a drafter or an embedding of another target is left",
        fix="mend the data path; gate: warn in params.yaml trains all the same. Tried on the diagnostic shard: "
        + table,
    )
    if policy == "stop" and init != "naive":
        raise error
    print(f"warning: {error}")
