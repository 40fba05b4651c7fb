"""Verdict of a bench: is it faster, why, and what to do next, for every concurrency."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redraft.bench.cycle import CycleTime, best_steps, needed_cycle, predict
from redraft.bench.figures import against_plain, arm_figures, cycle_figures, drift, invalid
from redraft.bench.load import Series
from redraft.engines.arm import AGAIN, PLAIN, Arm, chain
from redraft.frame.errors import RedraftError

WITHIN_REACH = 0.85
"""Of the accept length that is needed: from here on more training may bring the rest."""
BEYOND = 2
"""Draft steps past the measured ones up to which the curve is drawn."""
WORTH_IT = 1.03
"""Predicted gain of another number of drafts that is worth a word."""
Rows = Mapping[Arm, Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """One level's."""

    word: str
    """`ship`, `no: slower`, `no: needs accept length ≥ x`, `unclear: interval spans 1`, or `invalid`."""
    reason: str
    action: str


def chains(rows: Rows) -> dict[int, Mapping[str, Any]]:
    """The drafter's own arms that draft a chain, by number of drafts."""
    return {arm.steps: row for arm, row in rows.items() if arm.chain}


def model(rows: Rows) -> tuple[list[float], CycleTime, float] | None:
    """Acceptance by position, cycle time and plain step of a level; None without two chains and the plain arm."""
    own = {steps: row for steps, row in chains(rows).items() if row["accepted_at"]}
    if len(own) < 2 or PLAIN not in rows:
        return None
    times = CycleTime.fit({steps: row["cycle_ms"] for steps, row in own.items()})
    return own[max(own)]["accepted_at"], times, rows[PLAIN]["step_ms"]


def predictions(rows: Rows) -> dict[str, dict[str, float]]:
    """What every chain was predicted to give from the *other* ones, beside what it gave, in decoded tokens/s.

    Acceptance by position is that of the longest other chain, the cycle time a line through the others' times.
    """
    found = {}
    for steps, row in chains(rows).items():
        parts = model({arm: other for arm, other in rows.items() if arm != chain(steps)})
        if parts is None:
            continue
        predicted, measured = predict(*parts, steps), 1000 / row["step_ms"]
        found[str(steps)] = {
            "predicted": round(predicted.tokens_per_second, 3),
            "measured": round(measured, 3),
            "difference": round(predicted.tokens_per_second / measured - 1, 4),
        }
    return found


def curve(rows: Rows, most: int) -> list[dict[str, float]]:
    """Predictions for 1 to `most` drafts from all chains together."""
    parts = model(rows)
    if parts is None:
        return []
    return [
        {name: round(value, 3) for name, value in asdict(predict(*parts, steps)).items()}
        for steps in range(1, most + 1)
    ]


def best_arm(rows: Rows) -> Arm | None:
    """The arm of the drafter under test (a chain or a tree) that is surely fastest: by its lower end."""
    own = {arm: row for arm, row in rows.items() if arm.steps and arm.drafter is None and "ratio" in row}
    return max(own, key=lambda arm: own[arm]["ratio_low"]) if own else None


def judge(rows: Rows, faults: list[str]) -> Verdict:
    """The verdict on one level, from its rows (`redraft.bench.figures`) and what makes them invalid."""
    if faults:
        return Verdict("invalid", "; ".join(faults), "mend that and measure again: no ratio of this level counts")
    arm = best_arm(rows)
    if arm is None:
        return Verdict("unclear: no ratio", "an arm with or without speculation is missing", "serve both")
    row, why = rows[arm], _why(arm, rows[arm])
    further = _further(rows, arm)
    if row["ratio_low"] > 1:
        drafts = f"{arm.steps} drafted token{'s' if arm.steps > 1 else ''}" if arm.chain else f"a {arm.label}"
        return Verdict("ship", why, further or f"serve it with {drafts}")
    if row["ratio_high"] >= 1:
        return Verdict("unclear: interval spans 1", why, "measure with more prompts (bench.prompts)")
    return _slower(arm, row, rows[PLAIN], why, further)


def _why(arm: Arm, row: Mapping[str, Any]) -> str:
    return (
        f"{row['ratio']:.2f} times the plain tokens/s ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) with "
        f"{arm.label if arm.chain else f'a {arm.label}'}, at accept length {row['accept_length']:.2f} of at most "
        f"{arm.steps + 1}; break-even is {row['break_even']:.2f}"
    )


def _slower(arm: Arm, row: Mapping[str, Any], plain: Mapping[str, Any], why: str, further: str | None) -> Verdict:
    """The whole interval is below 1: whether any acceptance would do, and what brings it nearer."""
    length, need, most = row["accept_length"], row["break_even"], needed_cycle(row["accept_length"], plain["step_ms"])
    faster = f"a faster verify: a cycle takes {row['cycle_ms']:.1f} ms, at this accept length at most {most:.1f} ms pay"
    if length >= need:
        first = f"the first token ({row['first_token_ms']:.0f} ms) takes it away"
        return Verdict(
            "no: slower",
            f"{why}: decoding alone would gain, {first}",
            "longer answers, or a faster prefill with speculation",
        )
    if need > arm.steps + 1:
        return Verdict("no: slower", f"{why}, more than a cycle can ever yield", further or faster)
    if length >= WITHIN_REACH * need:
        action = "more data or epochs: it is within reach"
    else:
        action = f"{faster}; or more data, another fill, a larger draft vocabulary"
    return Verdict(f"no: needs accept length ≥ {need:.2f}", why, further or action)


def _further(rows: Rows, arm: Arm) -> str | None:
    """A number of drafts that was not measured, if it is predicted to pay, and more than the best that was."""
    parts = model(rows)
    if parts is None:
        return None
    best = best_steps(*parts, most=max(chains(rows)) + 1)
    if best.spec_steps in chains(rows) or best.ratio < max(1.0, WORTH_IT * rows[arm]["ratio"]):
        return None
    return f"try spec_steps: {best.spec_steps}, for which {best.ratio:.2f} times the plain tokens/s are predicted"


def overall(verdicts: Mapping[int, Verdict]) -> str:
    """Every level's word, levels with the same one together: there is no single figure for all."""
    if not verdicts:
        return "not measured"
    if len(verdicts) == 1:
        (one,) = verdicts.values()
        return f"{one.word}: {one.reason}"
    words = dict.fromkeys(each.word for each in verdicts.values())
    levels = {word: [str(level) for level, each in verdicts.items() if each.word == word] for word in words}
    return "; ".join(f"{word} at concurrency {', '.join(numbers)}" for word, numbers in levels.items())


def summary(measured: Mapping[int, Series], asked: int, skipped: Mapping[int, str]) -> dict[str, Any]:
    """The bench's metrics.

    `verdict`; `levels`, by concurrency: `rows` by the arm's key (what the arm is, and its figures), `best`, `word`,
    `reason`, `action`, `drift`, and for one client `predictions` and `curve`; `skipped`, concurrencies with the reason.

    Args:
        measured: blocks by concurrency and arm.
        asked: tokens asked for in each answer.
        skipped: concurrencies that were not measured.
    """
    verdicts, levels = {}, {}
    for level, series in measured.items():
        faults = invalid(series, asked)
        rows = {arm: _figures(series, arm, not faults) for arm in series if arm != AGAIN}
        verdicts[level], best = judge(rows, faults), best_arm(rows)
        told = {arm.key: {**arm.told(), **row} for arm, row in rows.items()}
        levels[str(level)] = {
            "rows": told, "best": best and best.key, "drift": drift(series), **asdict(verdicts[level]),
        }  # fmt: skip
        if level == 1 and not faults:
            further = BEYOND + max(chains(rows), default=0)
            levels[str(level)] |= {"predictions": predictions(rows), "curve": curve(rows, further)}
    return {
        "verdict": overall(verdicts),
        "levels": levels,
        "skipped": {str(level): why for level, why in skipped.items()},
    }


def _figures(series: Series, arm: Arm, valid: bool) -> dict[str, Any]:
    """An arm's row; of an invalid level without what is made of others."""
    row = arm_figures(series[arm])
    if valid and arm.steps:
        row |= cycle_figures(series[arm], arm)
        row |= against_plain(series, arm, row) if PLAIN in series else {}
    return row


def refusal(levels: Mapping[str, Mapping[str, Any]], least: Mapping[int, float]) -> RedraftError | None:
    """What is below the ratio that the profile sets for its concurrency, if anything.

    A level that is invalid or was not measured is, too.
    """
    failed = []
    for level, wanted in least.items():
        found = levels.get(str(level))
        best = found and found["word"] != "invalid" and found["best"]
        ratio = found["rows"][best]["ratio"] if found and best else None
        if ratio is None or ratio < wanted:
            told = "no valid ratio" if ratio is None else ratio
            failed.append(f"concurrency {level}: {told}, at least {wanted:g} wanted")
    if not failed:
        return None
    return RedraftError(
        "The bench is below the ratio that the profile asks for.",
        where="bench.min_ratio in the profile",
        found="; ".join(failed),
        cause="; ".join(f"concurrency {level}: {each['reason']}" for level, each in levels.items()),
    )
