"""Audit: do two mappings agree; if not, how, and what follows? Numpy only: it must answer in a second."""

from collections.abc import Collection
from collections.abc import Mapping as Table
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from redraft.frame.errors import RedraftError
from redraft.vocab.build import coverage
from redraft.vocab.mapping import Ids, Mapping

NAMED = 6
"""Special tokens that a verdict names before it counts the others."""


@dataclass(frozen=True)
class Audit:
    """What a donor's mapping and a new one have in common."""

    donor_slots: int
    new_slots: int
    donor_order: str
    new_order: str
    donor_last: int
    """The highest target id of the donor's vocabulary."""
    new_last: int
    shared: int
    """Ids in both."""
    same_slot: int
    """Slots that mean the same token in both."""
    differing_slots: int
    """Slots of the new mapping that mean another token in the donor's, or none."""
    moved: int
    """Shared ids in another slot."""
    donor_only: int
    new_only: int
    first_divergence: int | None
    """First slot that means different tokens; None if there is none."""
    kind: str
    """`same`, `drift` (both ascending, so ids gained or lost shift what follows), `reordered` or `disjoint`."""
    drift_mean: float
    """Mean of |new slot - donor slot| over shared ids, slots."""
    drift_median: float
    drift_p95: float
    drift_max: int
    recommended_init: str
    verdict: str
    coverage: dict[str, dict[str, float]] = field(default_factory=dict)
    """By split: share of supervised tokens in the donor's vocabulary (what keeping it costs) and in the new one."""
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of special and of byte tokens with a row: how many are in the donor's vocabulary, in the new one, in neither."""
    special: dict[str, str] = field(default_factory=dict)
    """Every special token, by id and text: `both`, `donor`, `new`, `neither`, or `no row` in the target."""

    def metrics(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def audit(
    donor: Mapping,
    new: Mapping,
    *,
    counts: Table[str, Ids] | None = None,
    special: Table[int, str] | None = None,
    single_bytes: Collection[int] = (),
    foreign: Table[int, tuple[str | None, str | None]] | None = None,
) -> Audit:
    """Compare two mappings over the same target vocabulary.

    Args:
        donor: the donor's mapping.
        new: the mapping built for the target.
        counts: by split, int64 [V], supervised tokens of a corpus.
        special: the target's special tokens by id.
        single_bytes: ids of the target's byte tokens.
        foreign: ids that mean another token to the donor, with both tokens (`chat.differing_ids`): not shared.

    Raises:
        RedraftError: different V: the drafter was made for another tokenizer.
    """
    _require_one_target(donor, new)
    foreign, named = foreign or {}, special or {}
    slots = min(len(donor), len(new))
    same = (donor.ids[:slots] == new.ids[:slots]) & ~np.isin(new.ids[:slots], list(foreign))
    shared = np.setdiff1d(np.intersect1d(donor.ids, new.ids), list(foreign))
    drift = np.abs(new.slots[shared] - donor.slots[shared])
    same_slot = int(same.sum())
    differs = not same.all() or len(donor) != len(new)
    kind = _kind(donor, new, differs, len(shared))
    verdict = _verdict(donor, new, kind, len(shared), same_slot, drift)
    return Audit(
        donor_slots=len(donor),
        new_slots=len(new),
        donor_order=donor.order,
        new_order=new.order,
        donor_last=int(donor.ids.max()),
        new_last=int(new.ids.max()),
        shared=len(shared),
        same_slot=same_slot,
        differing_slots=len(new) - same_slot,
        moved=len(shared) - same_slot,
        donor_only=len(donor) - len(shared),
        new_only=len(new) - len(shared),
        first_divergence=(slots if same.all() else int(np.argmin(same))) if differs else None,
        kind=kind,
        **_drift(drift),
        recommended_init={"same": "keep_donor_vocab", "disjoint": "scratch"}.get(kind, "remap"),
        verdict=verdict + _lacking(donor, named) + _foreign(foreign),
        coverage=_coverage(donor, new, counts or {}),
        special={f"{number} {text}": _place(donor, new, number) for number, text in sorted(named.items())},
        tokens={
            name: _where(donor, new, ids)
            for name, ids in (("special", list(named)), ("byte", list(single_bytes)))
            if ids
        },
    )


def _require_one_target(donor: Mapping, new: Mapping) -> None:
    if donor.vocab_size != new.vocab_size:
        raise RedraftError(
            "The donor was made for a target with another vocabulary.",
            where="donor",
            expected=f"V = {new.vocab_size}",
            found=f"V = {donor.vocab_size}",
            cause="the donor belongs to another model family",
            fix="choose a donor of the target's family, or train with init: scratch",
        )


def _drift(drift: Ids) -> dict[str, Any]:
    """How far shared ids moved, slots."""
    known = len(drift) > 0
    return {
        "drift_mean": round(float(drift.mean()), 3) if known else 0.0,
        "drift_median": round(float(np.median(drift)), 3) if known else 0.0,
        "drift_p95": round(float(np.quantile(drift, 0.95)), 3) if known else 0.0,
        "drift_max": int(drift.max(initial=0)),
    }


def _coverage(donor: Mapping, new: Mapping, counts: Table[str, Ids]) -> dict[str, dict[str, float]]:
    both = (("donor", donor), ("new", new))
    return {
        split: {name: round(coverage(mapping, values), 6) for name, mapping in both} for split, values in counts.items()
    }


def _kind(donor: Mapping, new: Mapping, differs: bool, shared: int) -> str:
    if not differs:
        return "same"
    if not shared:
        return "disjoint"
    return "drift" if donor.order == new.order == "ascending" else "reordered"


def _where(donor: Mapping, new: Mapping, ids: list[int]) -> dict[str, int]:
    known = [number for number in ids if number < new.vocab_size]
    in_donor, in_new = donor.t2d[known], new.t2d[known]
    neither = ~(in_donor | in_new)
    return {"donor": int(in_donor.sum()), "new": int(in_new.sum()), "neither": int(neither.sum()), "all": len(known)}


def _place(donor: Mapping, new: Mapping, number: int) -> str:
    if number >= new.vocab_size:
        return "no row"
    held = (bool(donor.t2d[number]), bool(new.t2d[number]))
    return {(True, True): "both", (True, False): "donor", (False, True): "new", (False, False): "neither"}[held]


def _verdict(donor: Mapping, new: Mapping, kind: str, shared: int, same_slot: int, drift: Ids) -> str:
    if kind == "same":
        return "The mappings are the same: the head can be used as it is."
    if kind == "disjoint":
        return "The mappings share no id: nothing of the head can be kept."
    if kind == "drift":
        half = f"half of the shared ids by {np.median(drift):.0f} or more" if np.median(drift) else "most not at all"
        how = (
            f"both are ascending, so every id gained or lost shifts the slots after it "
            f"({half}, none by more than {drift.max():,}); nothing is scrambled"
        )
    else:
        how = f"the donor's order is {donor.order}, the new one's {new.order}"
    lacking = f"{len(new) - shared:,} of the new ids have no row" if len(new) > shared else "every new id has a row"
    return (
        f"Only {same_slot:,} of {len(new):,} slots mean the same token, although {shared:,} ids are in both: {how}. "
        f"The rows of shared ids can be moved; {lacking} in the donor."
    )


def _lacking(donor: Mapping, special: Table[int, str]) -> str:
    """A sentence on the special tokens that the donor can never draft, if there are any."""
    missing = [number for number in sorted(special) if number < donor.vocab_size and donor.slots[number] < 0]
    if not missing:
        return ""
    named = ", ".join(f"{number:,} ({special[number]})" for number in missing[:NAMED])
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f" The donor's ids end at {donor.ids.max():,}; it lacks these special tokens of the target: {named}{more}."


def _foreign(foreign: Table[int, tuple[str | None, str | None]]) -> str:
    """A sentence on the ids that mean another token to the donor, if there are any."""
    if not foreign:
        return ""
    named = ", ".join(f"{number:,} ({one!r}, now {two!r})" for number, (one, two) in sorted(foreign.items())[:NAMED])
    more = f" and {len(foreign) - NAMED:,} more" if len(foreign) > NAMED else ""
    return f" These ids mean another token to the donor and count as not shared: {named}{more}."


def drift_curve(donor: Mapping, new: Mapping, points: int = 200) -> list[dict[str, float]]:
    """Slots that a shared id moved by (new minus donor), against its slot in the donor; at most about `points` rows."""
    shared = np.intersect1d(donor.ids, new.ids)
    shared = shared[np.argsort(donor.slots[shared])][:: max(1, len(shared) // points)]
    pairs = zip(donor.slots[shared].tolist(), new.slots[shared].tolist(), strict=True)
    return [{"slot": before, "moved": after - before} for before, after in pairs]
