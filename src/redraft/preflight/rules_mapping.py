"""Rules of the preflight on the mapping: what slots mean. docs/preflight.md has the table."""

import numpy as np
import torch

from redraft.preflight.facts import Facts, Findings, error, note
from redraft.preflight.weights import Entry
from redraft.vocab.mapping import Ids, Mapping, fits, holds_ids


def mapping(facts: Facts) -> Findings:
    """`d2t`: what slots mean."""
    entry, slots, vocab = facts.named.get("d2t"), facts.slots, facts.target.vocab
    if entry is None:
        if facts.weights.whole and slots == vocab:
            yield from _ids(facts, np.zeros(vocab, np.int64))
        elif facts.weights.whole and slots is not None:
            yield error(
                "d2t-missing",
                found=f"no d2t, {slots} slots of {vocab} ids",
                effect="silent: slots are taken for target ids, accept length near 1.00",
                fix="write the offsets d2t, int64 [N], into the weights",
            )
        return
    if entry.dtype not in ("I64", "I32") or len(entry.shape) != 1:
        effect = "silent: the table of ids is no table of whole numbers, the first draft fails or is garbage"
        yield error("d2t-dtype", found=f"d2t {entry.dtype} {entry.shape}", effect=effect, fix="int64 offsets [N]")
        return
    if entry.dtype == "I32":
        yield note("d2t-dtype", found="d2t I32", effect="none: promoted to int64", fix="write int64")
    if slots is not None and entry.shape != [slots]:
        effect = "no check: a shape error in the capture of CUDA graphs, or garbage drafts"
        yield error("d2t-length", found=f"d2t of {entry.shape[0]}, {slots} slots", effect=effect, fix="one a head row")
    yield from _ids(facts, entry.read().numpy().astype(np.int64))


def _ids(facts: Facts, offsets: Ids) -> Findings:
    """What the offsets stand for, against V, `t2d` and the hashes of the mapping."""
    ids, vocab = offsets + np.arange(len(offsets)), facts.target.vocab
    mask = _mask(facts)
    known = [*facts.weights.hashes, *([str(facts.record["mapping"])] if "mapping" in facts.record else [])]
    made = Mapping(ids, vocab) if fits(ids, vocab) else None
    if not (made and made.hash in known) and holds_ids(offsets, vocab, mask):
        yield error(
            "d2t-absolute",
            found=f"d2t holds ids, not offsets: {offsets[:5].tolist()} ...",
            effect="silent: every id is off by its slot, some past V: accept length near 1.00, or a device assert",
            fix="subtract the slot from every value",
        )
        return
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    same_id = len(ids) - len(np.unique(ids))
    if made and made.prefix and made.hash not in known:
        effect = "silent: slots are taken for the first ids, accept length near 1.00"
        yield error("d2t-zeros", found="every offset is 0", effect=effect, fix="write the mapping of the head")
    if len(outside):
        first = ", ".join(f"slot {slot}: {ids[slot]}" for slot in outside[:5])
        effect = "silent until drafted, then an index out of range on the device"
        fix = "a mapping of another target"
        yield error("d2t-range", found=f"{len(outside)} ids outside 0 to {vocab - 1}: {first}", effect=effect, fix=fix)
    if same_id:
        effect = "served, but slots of one id share its probability: fewer accepted"
        yield error("d2t-repeated", found=f"{same_id} ids stand in two slots", effect=effect, fix="distinct ids")
    elif (np.diff(ids) < 0).any():
        effect = "none; trainers that slice the head by t2d would scramble the rows"
        yield note("d2t-order", found="ids are not ascending", effect=effect, fix="redraft remap sorts them")
    if mask is not None and not np.array_equal(np.flatnonzero(mask), np.unique(ids)):
        effect = "t2d is ignored, but one of the two is not the mapping of the head: silent, accept length near 1.00"
        yield error("t2d-differs", found="d2t and t2d name different ids", effect=effect, fix="write both anew")
    other = sorted({text[:12] for text in known if text != made.hash}) if made else []
    if made and other:
        yield error(
            "mapping-hash",
            found=f"mapping {made.hash[:12]}, written with {', '.join(other)}",
            effect="silent: the head belongs to another mapping, accept length near 1.00",
            fix="put back the d2t it was written with, or redraft remap",
        )


def _mask(facts: Facts) -> np.ndarray | None:
    """`t2d` if it is a mask over V."""
    entry = facts.named.get("t2d")
    if entry is None or _mask_fault(entry, facts.target.vocab):
        return None
    return entry.read().numpy().astype(bool)


def _mask_fault(entry: Entry, vocab: int) -> str | None:
    if entry.dtype not in ("BOOL", "U8") or entry.shape != [vocab]:
        return f"t2d {entry.dtype} {entry.shape}, expected BOOL [{vocab}]"
    if int(entry.read().view(torch.uint8).max()) > 1:  # the raw byte: a bool of 2 reads as true without complaint
        return "t2d holds other bytes than 0 and 1"
    return None


def mask(facts: Facts) -> Findings:
    """`t2d`: SGLang ignores it, trainers and vLLM do not, and it tells whether `d2t` is right."""
    entry = facts.named.get("t2d")
    if entry is None:
        if "d2t" in facts.named:
            effect = "none in SGLang; vLLM and trainers need it"
            yield note("t2d-missing", found="no t2d", effect=effect, fix="write the mask, bool [V]")
        return
    fault = _mask_fault(entry, facts.target.vocab)
    if fault:
        yield error("t2d-form", found=fault, effect="ignored; the mapping may be another target's", fix="bool [V]")


RULES = (mapping, mask)
