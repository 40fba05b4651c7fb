"""Audit: do two mappings agree; if not, how, and what follows?"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from redraft.errors import RedraftError
from redraft.vocab.build import coverage
from redraft.vocab.mapping import Ids, Mapping


@dataclass(frozen=True)
class Audit:
    """What a donor's mapping and a new one have in common."""

    donor_slots: int
    new_slots: int
    donor_order: str
    new_order: str
    shared: int
    """Ids in both."""
    same_slot: int
    """Ids in the same slot of both."""
    moved: int
    """Shared ids in another slot."""
    donor_only: int
    new_only: int
    first_divergence: int | None
    """First slot that means different tokens; None if there is none."""
    drift_mean: float
    """Mean of |new slot - donor slot| over shared ids, slots."""
    drift_max: int
    coverage_new: float
    """Share of supervised training tokens in the new vocabulary."""
    coverage_donor: float
    """The same for the donor's vocabulary: what keeping it costs."""
    coverage_new_heldout: float
    coverage_donor_heldout: float
    verdict: str
    recommended_init: str

    def metrics(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def audit(donor: Mapping, new: Mapping, counts: Ids, heldout_counts: Ids) -> Audit:
    """Compare two mappings over the same target vocabulary.

    Args:
        donor: the donor's mapping.
        new: the mapping built for the target.
        counts: int64 [V], supervised training tokens.
        heldout_counts: int64 [V], supervised held-out tokens.

    Raises:
        RedraftError: different V: the drafter was made for another tokenizer.
    """
    if donor.vocab_size != new.vocab_size:
        raise RedraftError(
            "The donor was made for a target with another vocabulary.",
            where="donor",
            expected=f"V = {new.vocab_size}",
            found=f"V = {donor.vocab_size}",
            cause="the donor belongs to another model family",
            fix="choose a donor of the target's family, or train with init: scratch",
        )
    slots = min(len(donor), len(new))
    same = donor.ids[:slots] == new.ids[:slots]
    shared = np.intersect1d(donor.ids, new.ids)
    drift = np.abs(new.slots[shared] - donor.slots[shared])
    same_slot = int(same.sum())
    differs = not (same.all() and len(donor) == len(new))
    divergence = None if not differs else (int(np.argmin(same)) if not same.all() else slots)
    verdict, init = _verdict(donor, new, len(shared), same_slot, drift)
    return Audit(
        donor_slots=len(donor),
        new_slots=len(new),
        donor_order=donor.order,
        new_order=new.order,
        shared=len(shared),
        same_slot=same_slot,
        moved=len(shared) - same_slot,
        donor_only=len(donor) - len(shared),
        new_only=len(new) - len(shared),
        first_divergence=divergence,
        drift_mean=float(drift.mean()) if len(drift) else 0.0,
        drift_max=int(drift.max(initial=0)),
        coverage_new=coverage(new, counts),
        coverage_donor=coverage(donor, counts),
        coverage_new_heldout=coverage(new, heldout_counts),
        coverage_donor_heldout=coverage(donor, heldout_counts),
        verdict=verdict,
        recommended_init=init,
    )


def _verdict(donor: Mapping, new: Mapping, shared: int, same_slot: int, drift: Ids) -> tuple[str, str]:
    if donor.hash == new.hash:
        return "The mappings are the same: the head can be used as it is.", "keep_donor_vocab"
    if not shared:
        return "The mappings share no id: nothing of the head can be kept.", "scratch"
    lacking = f"{len(new) - shared:,} of the new ids have no row in the donor"
    if donor.order == new.order == "ascending":
        how = (
            f"both are ascending, so every id gained or lost shifts the slots after it "
            f"(by {drift.mean():.0f} on average); nothing is scrambled"
        )
    else:
        how = f"the donor's order is {donor.order}, the new one's {new.order}"
    return (
        f"Only {same_slot:,} of {len(new):,} slots mean the same token, although {shared:,} ids are in both: {how}. "
        f"The rows of shared ids can be moved; {lacking}.",
        "remap",
    )


def drift_curve(donor: Mapping, new: Mapping, points: int = 200) -> list[dict[str, float]]:
    """Slots that a shared id moved by (new minus donor), against its slot in the donor; at most about `points` rows."""
    shared = np.intersect1d(donor.ids, new.ids)
    shared = shared[np.argsort(donor.slots[shared])][:: max(1, len(shared) // points)]
    pairs = zip(donor.slots[shared].tolist(), new.slots[shared].tolist(), strict=True)
    return [{"slot": before, "moved": after - before} for before, after in pairs]
