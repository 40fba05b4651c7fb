"""Carry a donor's head to another mapping: each row moves to the slot of its token, and says where it came from."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.drafter.checkpoint import Checkpoint, read_parts, write_parts
from redraft.drafter.config import config_json
from redraft.drafter.donor import tell_embedding
from redraft.drafter.model import Drafter
from redraft.drafter.parts import require_finite
from redraft.frame.errors import RedraftError
from redraft.remap.fills import Shared, fill_rows
from redraft.remap.layers import carried_layers
from redraft.target.ends import read_ends
from redraft.vocab.mapping import Mapping

SOURCES = {"zero": -1, "target": -2, "fresh": -3, "mean": -4, "scaled": -5, "fitted": -6}
"""Row sources below 0: a fill, or fresh random weights. A source of 0 or more is the donor's slot."""


def remap(donor: Checkpoint, mapping: Mapping, fill: str, target_head: Tensor) -> Checkpoint:
    """Move the donor's head rows to the slots of `mapping`.

    Args:
        donor: the donor; not changed.
        mapping: the new mapping, over the same V.
        fill: rows the donor lacks: a key of `redraft.remap.fills.FILLS`.
        target_head: [V, H].

    Returns:
        The remapped drafter; every other weight is the donor's.

    Raises:
        RedraftError: a fill that needs shared ids, without any.
    """
    rows = donor.drafter.lm_head.weight.detach()
    weight, source = carry_head(rows, donor.mapping, mapping, fill, target_head, donor.foreign)
    return _with_head(donor, mapping, weight, source)


def carry_head(
    rows: Tensor, donor: Mapping, new: Mapping, fill: str, target_head: Tensor | None, foreign: Collection[int] = ()
) -> tuple[Tensor, np.ndarray]:
    """The head for `new`, [N, H] in the dtype of `rows`, and where each row came from, int64 [N].

    Args:
        rows: the donor's head, [N of the donor, H].
        donor: its mapping.
        new: the mapping wanted.
        fill: see `remap`.
        target_head: [V, H]; `zero` and `mean` do without.
        foreign: ids that mean another token to the donor; their rows are filled, not moved.
    """
    expected = [new.vocab_size, rows.shape[1]]
    if target_head is not None and list(target_head.shape) != expected:
        raise RedraftError(
            "The target's head does not fit the drafter.",
            where="target",
            expected=expected,
            found=list(target_head.shape),
            cause="another target than the drafter's",
        )
    source = np.where(np.isin(new.ids, list(foreign)), -1, donor.slots[new.ids])
    held = torch.from_numpy(source >= 0)
    missing = torch.from_numpy(new.ids[source < 0])
    head = target_head if target_head is not None else rows.new_empty(1, rows.shape[1]).expand(new.vocab_size, -1)
    own = torch.from_numpy(~np.isin(donor.ids, list(foreign)))
    shared = Shared(rows if bool(own.all()) else rows[own], head, torch.from_numpy(donor.ids)[own])
    weight = rows[torch.from_numpy(np.maximum(source, 0))]
    weight[~held] = fill_rows(fill, shared, head[missing]).to(rows.dtype)
    return weight, np.where(source >= 0, source, SOURCES[fill])


def remap_folder(
    donor: Path,
    new: Mapping,
    fill: str,
    target: Path | None,
    out: Path,
    foreign: Collection[int] = (),
    *,
    aux_layers: Sequence[int] | None = None,
    prefix: bool = False,
    tell: Callable[[str], None] = print,
) -> dict[str, int]:
    """Remap a whole checkpoint on disk, its other tensors copied as they are; the sources of the head's rows.

    Nothing but the head is held in memory: the other tensors stay mapped. See `remap` and `carry_head`.

    Args:
        donor: the donor's folder.
        new: the mapping wanted.
        fill: see `remap`.
        target: target folder, if it is at hand: its head for fills, its family for layer ids, its embedding.
        out: folder to write.
        foreign: see `carry_head`.
        aux_layers: inputs of layers, where the donor does not name them.
        prefix: see `read_parts`.
        tell: takes a line about what is not carried over, or could not be told.

    Raises:
        RedraftError: a donor that cannot be read, another V, or a fill that needs a target without one.
    """
    parts = read_parts(donor, finite=False, prefix=prefix)
    if parts.mapping.vocab_size != new.vocab_size:
        raise RedraftError(
            "Donor and new vocabulary belong to different targets.",
            where=donor,
            expected=f"V = {new.vocab_size}",
            found=f"V = {parts.mapping.vocab_size}",
        )
    if target is None and fill not in ("zero", "mean"):
        raise RedraftError(
            "This fill reads the target's head.", where="--fill", found=fill, fix="give --target, or fill zero or mean"
        )
    ends = read_ends(target) if target is not None else None
    layers, ids = carried_layers(parts, donor, target, aux_layers, tell)
    tell_embedding(parts.embedding, ends.embed if ends else None, donor, refuse=False, tell=tell)
    head = ends.head if ends else None
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(require_finite, parts.tensors, str(donor))
        weight, source = carry_head(parts.tensors["lm_head.weight"], parts.mapping, new, fill, head, foreign)
        tensors = {**parts.tensors, "lm_head.weight": weight}
        rows = sources(source)
        record: dict[str, Any] = {"init": "remap", "fill": fill, "rows": rows, "donor_mapping": parts.mapping.hash}
        record |= {"aux_layers": list(layers)} if layers else {}
        fields = config_json(replace(parts.config, draft_vocab_size=len(new)), ids)
        carried = replace(parts, tensors=tensors, mapping=new, fields=fields)
        write_parts(out, carried, record, source, before=checked.result, made={"lm_head.weight", "d2t", "t2d"})
    return rows


def prove(donor: Checkpoint, made: Checkpoint, states: int = 64) -> dict[str, float]:
    """Proof of a remap: rows of shared ids are the same bytes, and so are their logits for any state, in float32.

    Returns:
        `shared_rows`, and `largest_difference` of their logits over `states` random states, relative to the largest.

    Raises:
        RedraftError: a row that changed.
    """
    shared = np.setdiff1d(np.intersect1d(donor.mapping.ids, made.mapping.ids), list(donor.foreign))
    before = donor.drafter.lm_head.weight.detach()[donor.mapping.slots[shared]]
    after = made.drafter.lm_head.weight.detach()[made.mapping.slots[shared]]
    changed = shared[(before != after).any(1).numpy()]
    if len(changed):
        raise RedraftError("The remap changed rows of shared ids.", where="lm_head.weight", found=changed[:5].tolist())
    inputs = torch.randn(states, before.shape[1], generator=torch.Generator().manual_seed(0))
    one, two = (each.drafter.logits(inputs).detach()[:, each.mapping.slots[shared]] for each in (donor, made))
    difference = (one - two).abs().max() / one.abs().max().clamp(min=1e-12) if len(shared) else torch.zeros(())
    return {"shared_rows": len(shared), "largest_difference": float(f"{float(difference):.3g}")}


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
        made = Checkpoint(deepcopy(donor.drafter), donor.mapping, row_source=np.arange(len(donor.mapping)))
    elif init == "naive":
        made = _naive(donor, mapping, seed)
    else:
        config = replace(donor.drafter.config, draft_vocab_size=len(mapping))
        made = Checkpoint(Drafter.fresh(config, seed), mapping, row_source=np.full(len(mapping), SOURCES["fresh"]))
    made.record = {"init": init, "fill": fill if init == "remap" else None, "rows": count_sources(made)}
    return made


def count_sources(checkpoint: Checkpoint) -> dict[str, int]:
    """`sources` of a checkpoint's head."""
    assert checkpoint.row_source is not None
    return sources(checkpoint.row_source)


def sources(source: np.ndarray) -> dict[str, int]:
    """How many head rows were kept in place, moved, and filled from where."""
    names = {number: name for name, number in SOURCES.items()}
    kept = int((source == np.arange(len(source))).sum())
    filled = Counter(names[value] for value in source[source < 0].tolist())
    return {"kept": kept, "moved": int((source >= 0).sum()) - kept, **{name: filled[name] for name in names.values()}}


def _naive(donor: Checkpoint, mapping: Mapping, seed: int) -> Checkpoint:
    rows = min(len(mapping), len(donor.mapping))
    fresh = Drafter.fresh(replace(donor.drafter.config, draft_vocab_size=len(mapping)), seed)
    weight = fresh.lm_head.weight.detach().clone()
    weight[:rows] = donor.drafter.lm_head.weight.detach()[:rows]
    slots = np.arange(len(mapping))
    return _with_head(donor, mapping, weight, np.where(slots < rows, slots, SOURCES["fresh"]))


def _with_head(donor: Checkpoint, mapping: Mapping, weight: Tensor, source: np.ndarray) -> Checkpoint:
    drafter = Drafter(replace(donor.drafter.config, draft_vocab_size=len(mapping)))
    drafter.load_state_dict({**donor.drafter.state_dict(), "lm_head.weight": weight})
    return Checkpoint(drafter, mapping, row_source=source.astype(np.int64))
