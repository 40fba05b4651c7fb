"""The figures of the summary in two revisions: which way each moved, and whether more than chance moves it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from redraft.bench.machine import require_same
from redraft.diff.revision import Revision
from redraft.frame.errors import RedraftError
from redraft.report.summary import summary

STAGES = ("bench", "probe", "train", "remap", "vocab")
HELDOUT = "artifacts/corpus/heldout.safetensors"
LOWER = {"first_loss"}
"""Better when lower."""
NEUTRAL = {"first_loss_naive", "ceiling", "trained_tokens"}
"""Neither better nor worse by themselves: of data and draft vocabulary, not of the drafter."""
Z = 1.96


class State(StrEnum):
    """What became of a figure."""

    SAME = "same"
    BETTER = "better"
    WORSE = "worse"
    NOISE = "within noise"
    CHANGED = "changed"
    NEW = "new"
    GONE = "gone"
    APART = "not comparable"


@dataclass(frozen=True)
class Side:
    """What one revision says."""

    summary: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, Any]]
    """`metrics/<stage>.json` by stage; empty without one."""
    params: Mapping[str, Any]
    profile: Mapping[str, Any]
    heldout: str | None
    """md5 of the held-out corpus, by `dvc.lock`."""

    @classmethod
    def read(cls, revision: Revision | None) -> "Side":
        """Of a revision, or of none.

        Raises:
            RedraftError: a file in it cannot be read.
        """
        if revision is None:
            return cls({}, {stage: {} for stage in STAGES}, {}, {}, None)
        params = revision.mapping("params.yaml")
        stages = {stage: revision.mapping(f"metrics/{stage}.json") for stage in STAGES}
        outs = _under(revision.mapping("dvc.lock"), "stages", "corpus").get("outs") or []
        heldout = next((out.get("md5") for out in outs if out.get("path") == HELDOUT), None)
        profile = revision.mapping(f"profiles/{params.get('profile')}.yaml")
        return cls(_summary(revision, stages), stages, params, profile, heldout)

    def half(self, name: str) -> float | None:
        """Half width of the 95 % interval of a figure of the summary; None where the metrics hold none."""
        try:
            half = _plain(_HALVES[name](self.stages)) if name in _HALVES else None
        except (TypeError, ValueError, AttributeError):  # not what redraft writes: then it has no interval
            return None
        return half if _is_number(half) else None


def _summary(revision: Revision, stages: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """From the metrics of the stages: an experiment that ran `train` alone has the summary of the run before.

    What an older redraft wrote may lack what the summary needs; then its own, where there is one.
    """
    try:
        return summary(stages)
    except (KeyError, TypeError, ValueError, AttributeError):
        return revision.mapping("metrics/summary.json")


@dataclass(frozen=True)
class Figure:
    """One figure in both revisions."""

    name: str
    base: Any
    head: Any
    state: State
    why: str = ""
    """Of `not comparable`."""

    @property
    def change(self) -> float | None:
        """Of two numbers."""
        return self.head - self.base if _is_number(self.base) and _is_number(self.head) else None


def figures(base: Side, head: Side) -> list[Figure]:
    """All figures of both summaries, in the order of the newer one."""
    names = dict.fromkeys([*head.summary, *base.summary])
    found = {name: _figure(name, base, head) for name in names}
    low = found.get("ratio_low")
    if low and low.state in (State.BETTER, State.WORSE) and found.get("ratio", low).state is State.NOISE:
        found["ratio_low"] = replace(low, state=State.NOISE)  # the end of an interval moves with its middle
    return list(found.values())


def _figure(name: str, base: Side, head: Side) -> Figure:
    one, two = _plain(base.summary.get(name)), _plain(head.summary.get(name))
    if one is None or two is None:
        return Figure(name, one, two, State.SAME if one is two else State.NEW if one is None else State.GONE)
    if why := _apart(name, base, head):
        return Figure(name, one, two, State.APART, why)
    if one == two:
        return Figure(name, one, two, State.SAME)
    if not _is_number(one) or not _is_number(two):
        return Figure(name, one, two, State.CHANGED)
    known = [half for side in (base, head) if (half := side.half(name)) is not None]
    if known and abs(two - one) <= math.hypot(known[0], known[-1]):  # an older redraft kept no interval: the other's
        return Figure(name, one, two, State.NOISE)
    if name in NEUTRAL:
        return Figure(name, one, two, State.CHANGED)
    return Figure(name, one, two, State.BETTER if (two > one) != (name in LOWER) else State.WORSE)


def _apart(name: str, base: Side, head: Side) -> str:
    """Why the two values of a figure are of different things; nothing if they are not."""
    if base.params.get("profile") != head.params.get("profile"):
        return f"profile {base.params.get('profile')} and {head.params.get('profile')}"
    if name in ("verdict", "ratio", "ratio_low"):
        return _benches_apart(base.stages["bench"], head.stages["bench"])
    if name == "served_accept_length":
        one, two = ({key: side.stages["probe"].get(key) for key in ("engine", "asked")} for side in (base, head))
        if found := [f"{key} of the probe" for key in one if one[key] != two[key]]:
            return " and ".join(found)
    if name == "trained_tokens":
        return ""
    if base.heldout != head.heldout:
        return "held-out prompts"
    steps = [_under(side.stages["train"], "knobs").get("ttt_steps") for side in (base, head)]
    if name == "predicted_accept_length" and steps[0] != steps[1]:
        return f"ttt_steps {steps[0]} and {steps[1]}"
    if name.startswith("first_loss"):
        slots, init = ({side.stages[stage].get(key) for side in (base, head)} for stage, key in _LOSS_OF)
        own = "keep_donor_vocab" in init and len(init) > 1 and name == "first_loss"
        return "slots: another loss of knowing nothing" if len(slots) > 1 or own else ""
    return ""


_LOSS_OF = (("vocab", "slots"), ("remap", "init"))


def _benches_apart(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    if not one or not two:
        return ""
    try:
        require_same(one, two, "")
    except RedraftError as error:
        return str(error.found)
    except (KeyError, TypeError, AttributeError):
        return "a bench of another redraft"
    return ""


def _bench_half(stages: Mapping[str, Mapping[str, Any]]) -> float | None:
    for _, level in sorted(_under(stages["bench"], "levels").items(), key=lambda each: int(each[0])):
        row = _under(level, "rows", str(level.get("best")))
        if level.get("word") != "invalid" and {"ratio_low", "ratio_high"} <= row.keys():
            return float(row["ratio_high"] - row["ratio_low"]) / 2
    return None


def _served_half(stages: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Of accepted drafts a verify step, taken as independent: with P_k = P(k or more), E[A^2] = sum (2k - 1) P_k."""
    probe, reached = stages["probe"], list[float]()
    steps = probe.get("verify_steps")
    while _is_number(probe.get(f"accepted_at_{len(reached) + 1}")):
        reached.append(probe[f"accepted_at_{len(reached) + 1}"])
    if not steps or not reached:
        return None
    square = sum((2 * number + 1) * share for number, share in enumerate(reached))
    return Z * math.sqrt(max(square - sum(reached) ** 2, 0) / steps)


def _heldout_half(name: str) -> Callable[[Mapping[str, Mapping[str, Any]]], float | None]:
    return lambda stages: _plain(_under(stages["train"], "heldout").get(name))


def _loss_half(option: str | None) -> Callable[[Mapping[str, Mapping[str, Any]]], float | None]:
    def half(stages: Mapping[str, Mapping[str, Any]]) -> float | None:
        remap = stages["remap"]
        return _plain(_under(remap, "first_step", option or str(remap.get("option"))).get("loss_interval"))

    return half


_HALVES = {
    "ratio": _bench_half,
    "ratio_low": _bench_half,
    "served_accept_length": _served_half,
    "predicted_accept_length": _heldout_half("accept_length_interval"),
    "accuracy": _heldout_half("accuracy_0_interval"),
    "first_loss": _loss_half(None),
    "first_loss_naive": _loss_half("naive"),
}


def _under(values: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at a path; an empty one where there is none."""
    for name in path:
        found = values.get(name)
        values = found if isinstance(found, Mapping) else {}
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """NaN and infinities are no figures."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
