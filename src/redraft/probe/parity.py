"""Parity: served acceptance against what the same drafter accepts in this process, and the cause of a gap.

Two measurements of the same thing that disagree mean a wrong data path. Three are taken on the same prompts: what the
engine counted, what the engine `torch` counts, and what training's walk predicts of the answers. If the first differs,
the drafter is replayed along the served answers with each known fault of serving, and the fault is named whose
acceptance per position is the served one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.acceptance import Acceptance
from redraft.engines.engine import Generation
from redraft.engines.open import Models
from redraft.frame.errors import RedraftError
from redraft.frame.progress import progress
from redraft.probe.probe import Comparison
from redraft.probe.replay import Counts, Replay
from redraft.vocab.mapping import Mapping

SIGMAS = 3.0
"""Half width of the interval of a gap, in standard errors: one honest probe in 370 fails by chance."""
LEAST_GAP = 0.02
"""Of accept length: below this a gap is rounding, whatever the interval."""
MOST_APART = 0.1
"""Share of prompts (at least one prompt) that may accept otherwise in float32, where rounding moves next to none."""


@dataclass(frozen=True)
class Gap:
    """Accept length of one measurement minus that of another on the same prompts."""

    difference: float
    half: float
    """Half width of its interval, `SIGMAS` standard errors of a difference paired by prompt."""

    @property
    def real(self) -> bool:
        """Whether the two measurements disagree."""
        return abs(self.difference) > max(self.half, LEAST_GAP)


def counts(answers: Sequence[Generation], spec_steps: int, *, every: bool) -> Counts:
    """Verify steps of each answer by accepted drafts; with `every` the ones that an answer's end cut too."""
    none = [0] * (spec_steps + 1)  # an answer that ended with its first token
    rows = [(answer.steps.histogram if every else answer.steps.whole()) or none for answer in answers]
    return np.array(rows, dtype=np.int64)


def untold(answers: Sequence[Generation]) -> bool:
    """Whether the engine does not tell its verify steps apart."""
    return any(answer.steps.verify and answer.steps.histogram is None for answer in answers)


def pooled(found: Counts) -> Acceptance:
    """The counts of all prompts together."""
    return Acceptance(found.shape[1] - 1, found.sum(0).tolist())


def gap(one: Counts, other: Counts) -> Gap:
    """The difference of two accept lengths, with an interval that is paired by prompt.

    The variance of the difference is the sum of the squared differences of the prompts' shares in both.
    """
    error = float(np.sqrt(np.square(_influence(one) - _influence(other)).sum()))
    return Gap(pooled(one).length - pooled(other).length, SIGMAS * error)


def _influence(found: Counts) -> np.ndarray:
    """float [prompts], each prompt's share in the accept length's error.

    With s steps and a accepted drafts of a prompt, of all prompts S and A, the prompt's share in A / S is
    (a - s A / S) / S (the linearised ratio estimator, Cochran 1977, 6.11).
    """
    steps, accepted = found.sum(1), found @ np.arange(found.shape[1])
    return (accepted - steps * (pooled(found).length - 1)) / steps.sum()


def agreeing(served: Counts, found: Counts) -> np.ndarray:
    """bool [prompts], where two measurements count the same, but for one more served step that an answer's end cut."""
    more = served - found
    return (more >= 0).all(1) & (more.sum(1) <= 1)


def _told(found: Counts) -> str:
    if not found.sum():
        return "no whole verify step"
    every = pooled(found)
    return f"accept length {every.length:.3f} (per position {' '.join(f'{share:.3f}' for share in every.shares)})"


def diagnose(served: Counts, replay: Replay, donor: Mapping | None) -> tuple[list[str], str]:
    """The faults that explain what was served, and a table of all that were tried, the nearest first.

    A fault explains it if at least half of the prompts accept, step for step, what was served; rounding alone
    (bf16) can move single prompts.
    """
    tried = {name: measure() for name, measure in progress(list(replay.faults(donor)), "diagnose", "fault")}
    agreed = {name: int(agreeing(served, found).sum()) for name, found in tried.items()}

    def nearness(name: str) -> tuple[int, float]:
        return agreed[name], -float(np.abs(_shares(tried[name]) - _shares(served)).sum())

    near = sorted(tried, key=nearness, reverse=True)
    rows = [f"    {name}: {agreed[name]} of {len(served)} prompts agree; {_told(tried[name])}" for name in near]
    best = near[0]
    explained = agreed[best] >= max(1, len(served) / 2)
    # two faults that accept the same cannot be told apart by what was served
    named = [name for name in near if (tried[name] == tried[best]).all()] if explained else []
    return named, "\n".join(rows)


def _shares(found: Counts) -> np.ndarray:
    """float [K], of verify steps, those that accepted at least k drafts; zeros if there is none."""
    return np.array(pooled(found).shares or [0.0] * (found.shape[1] - 1))


def require_parity(
    served: Counts, expected: Counts, name: str, replay: Replay, donor: Mapping | None, *, exact: bool
) -> None:
    """Refuse a drafter that is served otherwise than it is computed here.

    Args:
        served: what the engine counted.
        expected: another measurement on the same prompts.
        name: its name.
        replay: along the served answers.
        donor: another mapping that may have got in.
        exact: both in float32: prompts must agree step for step, not on average only.

    Raises:
        RedraftError: the two disagree; the cause is the fault that accepts what was served.
    """
    found, same = gap(served, expected), int(agreeing(served, expected).sum())
    if not found.real and not (exact and len(served) - same > max(1, MOST_APART * len(served))):
        return
    named, table = diagnose(served, replay, donor)
    raise RedraftError(
        "The drafter is not served as it is computed here.",
        where=f"{len(served)} prompts, {served.sum()} verify steps",
        expected=f"{name}: {_told(expected)}",
        found=f"{_told(served)}; apart by {found.difference:+.3f} ± {found.half:.3f}; {same} prompts agree",
        cause="; or ".join(named) or "none of the faults below: the served model or its files are not these",
        fix="redraft lint on the folder that is served, and the flags of the server",
        tail="\n  replayed with each fault, nearest first:\n" + table,
    )


def hold_against_models(
    outputs: Comparison, spec_steps: int, models: Models, donor: Mapping, *, here: bool, exact: bool = True
) -> dict[str, Any] | None:
    """Hold served acceptance against this process's: the walk, and for a server the engine `torch` on the same prompts.

    Args:
        outputs: what was served.
        spec_steps: K.
        models: target and drafter, fp32.
        donor: another mapping that may have got in.
        here: the engine `torch` served; its cut steps are left out, a server's are counted.
        exact: it served in float32.

    Returns:
        Accept lengths by name, and the gap to the served one; None if the engine does not tell its verify steps apart.

    Raises:
        RedraftError: see `require_parity`.
    """
    prompts, answers = [row[0] for row in outputs.answers], [row[2] for row in outputs.answers]
    if untold(answers):
        return None
    replay = Replay(
        models.target,
        models.draft,
        spec_steps,
        [([*prompt, *given.ids], len(prompt)) for prompt, given in zip(prompts, answers, strict=True)],
    )
    walked, served = replay.counts(), counts(answers, spec_steps, every=not here)
    reference = walked
    if not here:
        engine = models.engines([spec_steps])[spec_steps]
        pairs = progress(list(zip(prompts, answers, strict=True)), "probe torch", "prompt")
        own = [engine.generate(prompt, max(1, len(given.ids))) for prompt, given in pairs]
        reference = counts(own, spec_steps, every=True)
        if exact:  # else the answers here are others than the walked ones
            require_parity(counts(own, spec_steps, every=False), walked, "walked", replay, donor, exact=True)
    require_parity(served, reference, "walked" if here else "engine torch", replay, donor, exact=exact)
    found = gap(served, reference)
    lengths = {"walked": round(pooled(walked).length, 4)}
    lengths |= {} if here else {"torch": round(pooled(reference).length, 4)}
    same = int(agreeing(served, reference).sum())
    return {**lengths, "difference": round(found.difference, 4), "interval": round(found.half, 4), "agreeing": same}


def hold_against_training(outputs: Comparison, spec_steps: int, record: dict[str, Any]) -> dict[str, Any] | None:
    """Hold served acceptance against the walk that training measured on other answers; see `hold_against_models`.

    Args:
        outputs: what was served.
        spec_steps: K.
        record: `redraft.json` of the drafter; without a walk of K drafts in it nothing is compared.

    Raises:
        RedraftError: the two differ by more than chance explains.
    """
    answers = [row[2] for row in outputs.answers]
    walked = record.get("heldout", {})
    same = record.get("training", {}).get("ttt_steps") == spec_steps and "accept_length" in walked
    if not same or untold(answers):
        return None
    served = counts(answers, spec_steps, every=True)
    alone = SIGMAS * float(np.sqrt(np.square(_influence(served)).sum()))  # steps of the other are as noisy
    half = alone * float(np.sqrt(1 + served.sum() / walked["verify_steps"]))
    found = Gap(pooled(served).length - walked["accept_length"], half)
    if found.real:
        raise RedraftError(
            "The drafter is not served as training predicted.",
            where=f"{len(served)} prompts, {served.sum()} verify steps",
            expected=f"accept length {walked['accept_length']:.3f} ± {found.half:.3f}, walked on held-out answers",
            found=_told(served),
            cause="the server reads the drafter otherwise (redraft lint), or these prompts are of another kind",
            fix="probe.parity: torch, where the target fits into one process, names the fault",
        )
    return {"walked": walked["accept_length"], "difference": round(found.difference, 4), "interval": round(half, 4)}
