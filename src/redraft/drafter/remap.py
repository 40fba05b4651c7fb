"""Carry a donor's head to another mapping: each row moves to the slot of its token, and says where it came from."""

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from redraft.drafter.checkpoint import Checkpoint
from redraft.drafter.model import Drafter
from redraft.vocab.mapping import Mapping

ZERO, TARGET, FRESH = -1, -2, -3
"""Row sources below 0; a source of 0 or more is the donor's slot."""


def remap(donor: Checkpoint, mapping: Mapping, fill: str, target_head: Tensor) -> Checkpoint:
    """Move the donor's head rows to the slots of `mapping`.

    Args:
        donor: the donor; not changed.
        mapping: the new mapping, over the same V.
        fill: rows the donor lacks: `zero`, or `target` (the target's own head row).
        target_head: [V, H].

    Returns:
        The remapped drafter; every other weight is the donor's.
    """
    source = donor.mapping.slots[mapping.ids]
    held = torch.from_numpy(source >= 0)
    weight = torch.zeros(len(mapping), donor.drafter.config.hidden_size)
    weight[held] = donor.drafter.lm_head.weight.detach()[source[source >= 0]]
    if fill == "target":
        weight[~held] = target_head[mapping.ids[source < 0]].float()
    source = np.where(source >= 0, source, TARGET if fill == "target" else ZERO)
    return _with_head(donor, mapping, weight, source)


def initial(init: str, fill: str, donor: Checkpoint, mapping: Mapping, target_head: Tensor, seed: int) -> Checkpoint:
    """What training starts from.

    Args:
        init: `remap`, `keep_donor_vocab`, `naive` (the donor's head under the new mapping, as tools do that swap d2t
            alone: every moved row is wrong) or `scratch`.
        fill: see `remap`.
        donor: the donor.
        mapping: the mapping built for the target; `keep_donor_vocab` does not use it.
        target_head: [V, H].
        seed: of fresh weights.
    """
    if init == "remap":
        made = remap(donor, mapping, fill, target_head)
    elif init == "keep_donor_vocab":
        made = Checkpoint(donor.drafter, donor.mapping, row_source=np.arange(len(donor.mapping)))
    elif init == "naive":
        made = _naive(donor, mapping, seed)
    else:
        config = replace(donor.drafter.config, draft_vocab_size=len(mapping))
        made = Checkpoint(Drafter.fresh(config, seed), mapping, row_source=np.full(len(mapping), FRESH))
    made.record = {"init": init, "fill": fill if init == "remap" else None, "rows": count_sources(made)}
    return made


def count_sources(checkpoint: Checkpoint) -> dict[str, int]:
    """How many head rows were kept in place, moved, and filled from where."""
    assert checkpoint.row_source is not None
    source = checkpoint.row_source
    names = {ZERO: "zero", TARGET: "target", FRESH: "fresh"}
    kept = int((source == np.arange(len(source))).sum())
    filled = Counter(names[value] for value in source[source < 0].tolist())
    return {"kept": kept, "moved": int((source >= 0).sum()) - kept, **{name: filled[name] for name in names.values()}}


def _naive(donor: Checkpoint, mapping: Mapping, seed: int) -> Checkpoint:
    rows = min(len(mapping), len(donor.mapping))
    fresh = Drafter.fresh(replace(donor.drafter.config, draft_vocab_size=len(mapping)), seed)
    weight = fresh.lm_head.weight.detach().clone()
    weight[:rows] = donor.drafter.lm_head.weight.detach()[:rows]
    slots = np.arange(len(mapping))
    return _with_head(donor, mapping, weight, np.where(slots < rows, slots, FRESH))


def _with_head(donor: Checkpoint, mapping: Mapping, weight: Tensor, source: np.ndarray) -> Checkpoint:
    drafter = Drafter(replace(donor.drafter.config, draft_vocab_size=len(mapping)))
    drafter.load_state_dict({**donor.drafter.state_dict(), "lm_head.weight": weight})
    return Checkpoint(drafter, mapping, row_source=source.astype(np.int64))
