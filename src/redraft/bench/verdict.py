"""Verdict of a bench: is it faster, why, and what to do next, for every concurrency."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redraft.bench.cycle import CycleTime, Prediction, best_steps, needed_cycle, predict
from redraft.bench.figures import against_plain, arm_figures, drift, invalid
from redraft.bench.load import AGAIN, Series
from redraft.engines.arm import PLAIN
from redraft.frame.errors import RedraftError

WITHIN_REACH = 0.85
"""Of the accept length that is needed: from here on more training may bring the rest."""
BEYOND = 2
"""Draft steps past the measured ones up to which the curve is drawn."""
WORTH_IT = 1.03
"""Predicted gain of another number of drafts that is worth a word."""
Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """One level's."""

    word: str
    """`ship`, `no: slower`, `no: needs accept length ≥ x`, `unclear: interval spans 1`, or `invalid`."""
    reason: str
    action: str


def chains(rows: Rows) -> dict[int, Mapping[str, Any]]:
    """The drafter's own arms that draft a chain, by number of drafts: arms whose name is a number."""
    return {int(name): row for name, row in rows.items() if name.isdigit()}


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
    own = chains(rows)
    found = {}
    for steps, row in own.items():
        others = {str(number): other for number, other in own.items() if number != steps}
        parts = model({**others, PLAIN: rows[PLAIN]}) if PLAIN in rows else None
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


def best_arm(rows: Rows) -> str | None:
    """The arm of the drafter itself (a chain, or a tree such as `3x4x8`) that is surely fastest: by its lower end."""
    own = {name: row for name, row in rows.items() if name.replace("x", "").isdigit() and "ratio" in row}
    return max(own, key=lambda name: own[name]["ratio_low"]) if own else None


def judge(rows: Rows, faults: list[str]) -> Verdict:
    """The verdict on one level, from its rows (`redraft.bench.figures`) and what makes them invalid."""
    if faults:
        return Verdict("invalid", "; ".join(faults), "mend that and measure again: no ratio of this level counts")
    name = best_arm(rows)
    if name is None:
        return Verdict("unclear: no ratio", "an arm with or without speculation is missing", "serve both")
    row, plain = rows[name], rows[PLAIN]
    length, need, steps = row["accept_length"], row["break_even"], int(name.split("x")[0])
    why = (
        f"{row['ratio']:.2f} times the plain tokens/s ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) with {name} "
        f"drafted, at accept length {length:.2f} of at most {steps + 1}; break-even is {need:.2f}"
    )
    parts = model(rows)
    best = best_steps(*parts, most=max(chains(rows)) + 1) if parts else None
    if row["ratio_low"] > 1:
        return Verdict("ship", why, _further(best, rows, name) or f"serve it with {name} drafted tokens")
    if row["ratio_high"] >= 1:
        return Verdict("unclear: interval spans 1", why, "measure with more prompts (bench.prompts)")
    most = needed_cycle(length, plain["step_ms"])
    faster = f"a faster verify: a cycle takes {row['cycle_ms']:.1f} ms, at this accept length at most {most:.1f} ms pay"
    if length >= need:
        lost = f"{why}: decoding alone would gain, the first token ({row['first_token_ms']:.0f} ms) takes it away"
        return Verdict("no: slower", lost, "longer answers, or a faster prefill with speculation")
    if need > steps + 1:
        return Verdict("no: slower", f"{why}, more than a cycle can ever yield", _further(best, rows, name) or faster)
    if length >= WITHIN_REACH * need:
        action = "more data or epochs: it is within reach"
    else:
        action = f"{faster}; or more data, another fill, a larger draft vocabulary"
    return Verdict(f"no: needs accept length ≥ {need:.2f}", why, _further(best, rows, name) or action)


def _further(best: Prediction | None, rows: Rows, name: str) -> str | None:
    """A number of drafts that was not measured, if it is predicted to pay, and more than the best that was."""
    if best is None or str(best.spec_steps) in rows or best.ratio < max(1.0, WORTH_IT * rows[name]["ratio"]):
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


def summary(
    measured: Mapping[int, Series], spec_steps: Mapping[str, int], asked: int, skipped: Mapping[int, str]
) -> dict[str, Any]:
    """The bench's metrics.

    `verdict`; `levels`, by concurrency: `rows` by arm, `best`, `word`, `reason`, `action`, `drift`, and for one client
    `predictions` and `curve`; `skipped`, concurrencies with the reason.

    Args:
        measured: blocks by concurrency and arm.
        spec_steps: drafts by arm.
        asked: tokens asked for in each answer.
        skipped: concurrencies that were not measured.
    """
    verdicts, levels = {}, {}
    for level, series in measured.items():
        faults = invalid(series, asked)
        rows = {
            name: arm_figures(blocks, 0 if faults else spec_steps[name])
            for name, blocks in series.items()
            if name != AGAIN
        }
        for name, row in rows.items():
            if spec_steps[name] and PLAIN in rows and not faults:
                row |= against_plain(series, name, row)
        verdicts[level] = judge(rows, faults)
        told: dict[str, Any] = {"rows": rows, "best": best_arm(rows), "drift": drift(series), **asdict(verdicts[level])}
        if level == 1 and not faults:
            told |= {"predictions": predictions(rows), "curve": curve(rows, BEYOND + max(chains(rows), default=0))}
        levels[str(level)] = told
    return {
        "verdict": overall(verdicts),
        "levels": levels,
        "skipped": {str(level): why for level, why in skipped.items()},
    }


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
