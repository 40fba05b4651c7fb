"""Figures of a bench: what one arm did at one concurrency, how it compares, and whether that may be believed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from redraft.acceptance import Acceptance
from redraft.bench.cycle import break_even, needed_cycle
from redraft.bench.load import Block, Series
from redraft.engines.arm import AGAIN, PLAIN, Arm
from redraft.engines.engine import Generation

RESAMPLES = 2000
MOST_CACHED = 0.01
"""Share of prompt tokens whose states the engine had from before."""
LEAST_TOKENS, LEAST_LENGTH = 8, 0.5
"""Tokens, and share of the tokens asked for: an arm whose mean answer is below both was cut off, and is no load."""
MOST_APART = 0.2
"""By how much the mean answer of an arm may differ from the plain one's: chats end by themselves, alike in all arms."""
LEAST_STEP_MS = 0.05
"""No model decodes 20,000 tokens a second in one stream: below this they were held back and came at once."""


def _pooled(blocks: Sequence[Block]) -> list[Generation]:
    return [answer for block in blocks for answer in block.answers]


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile, ms; None of no values."""
    shares = {name: 0.5, f"{name}_p95": 0.95}
    return {key: round(1000 * float(np.quantile(values, at)), 3) if values else None for key, at in shares.items()}


def rate(blocks: Sequence[Block]) -> float:
    """Output tokens a second, over all clients."""
    return sum(len(answer.ids) for answer in _pooled(blocks)) / sum(block.seconds for block in blocks)


def step_ms(blocks: Sequence[Block]) -> float | None:
    """Decode time of one token of one stream, ms: from the first token to the last; None if it cannot be measured."""
    decoding = [answer for answer in _pooled(blocks) if answer.decoded]
    step = 1000 * sum(each.decode_seconds for each in decoding) / max(1, sum(each.decoded for each in decoding))
    return step if step >= LEAST_STEP_MS else None


def acceptance(blocks: Sequence[Block], arm: Arm) -> Acceptance:
    """The verify steps of an arm."""
    served = Acceptance(arm.steps)
    for answer in _pooled(blocks):
        served.add(answer.steps)
    return served


def arm_figures(blocks: Sequence[Block]) -> dict[str, Any]:
    """One arm at one concurrency.

    `tokens_per_second`; `first_token_ms` and `token_ms` (per later token), median and p95 over answers; `step_ms`,
    pooled; `mean_tokens`, `finish`, `cached_share`, `errors`. None stands for what cannot be measured.
    """
    answers = _pooled(blocks)
    prompts, step = sum(answer.prompt_tokens for answer in answers), step_ms(blocks)
    return {
        "tokens_per_second": round(rate(blocks), 3),
        **_spread("first_token_ms", [answer.first_token_seconds for answer in answers]),
        **_spread("token_ms", [each.decode_seconds / each.decoded for each in answers if each.decoded] if step else []),
        "step_ms": step and round(step, 3),
        "mean_tokens": round(float(np.mean([len(answer.ids) for answer in answers])), 2),
        "finish": {kind: sum(answer.finish == kind for answer in answers) for kind in ("stop", "length")},
        "cached_share": round(sum(answer.cached_tokens for answer in answers) / max(1, prompts), 4),
        "errors": sum(len(block.errors) for block in blocks),
    }


def cycle_figures(blocks: Sequence[Block], arm: Arm) -> dict[str, Any]:
    """What a speculative arm of a level that is valid tells besides.

    `accept_length`, `accepted_at` (share of verify steps by position), `cycle_ms` (decode time per verify step),
    `cycle_fit_ms` (the slope of decode time over verify steps of the answers: a cycle without what every answer costs
    once), `draft_share` if it is told.
    """
    answers, served = _pooled(blocks), acceptance(blocks, arm)
    steps, decode = [each.steps.verify for each in answers], [each.decode_seconds for each in answers]
    drafting = sum(answer.draft_seconds for answer in answers)
    return {
        "accept_length": round(served.length, 4),
        "accepted_at": [round(share, 4) for share in served.shares],
        "cycle_ms": round(1000 * sum(decode) / sum(steps), 3),
        "cycle_fit_ms": round(1000 * float(np.polyfit(steps, decode, 1)[0]), 3) if len(set(steps)) > 2 else None,
        "draft_share": round(drafting / sum(decode), 4) if drafting else None,
    }


def ratio(series: Series, arm: Arm) -> dict[str, float]:
    """Tokens/s of an arm over the plain one's, with a bootstrap 95 % interval over blocks that are paired by prompts.

    With two runs of the plain arm the ratio is over both, and the interval spans that over either: a machine that
    drifts widens it.
    """
    runs = [series[PLAIN], *([series[AGAIN]] if AGAIN in series else [])]
    pooled = rate(series[arm]) / rate([block for run in runs for block in run])
    ends = [_interval(series[arm], run) for run in runs]
    return {
        "ratio": round(pooled, 4),
        "ratio_low": round(min(low for low, _ in ends), 4),
        "ratio_high": round(max(high for _, high in ends), 4),
    }


def _interval(one: Sequence[Block], other: Sequence[Block]) -> tuple[float, float]:
    """95 % percentile interval of the ratio of rates under resampled blocks; the same seed, so the same figures."""

    def of_sums(*parts: np.ndarray, axis: int) -> np.ndarray:
        mine, my_time, its, its_time = (part.sum(axis=axis) for part in parts)
        return (mine / my_time) / (its / its_time)

    def sums(run: Sequence[Block]) -> tuple[list[int], list[float]]:
        return [sum(len(answer.ids) for answer in block.answers) for block in run], [block.seconds for block in run]

    found = bootstrap(
        (*sums(one), *sums(other)),
        of_sums,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=0,
    ).confidence_interval
    return float(found.low), float(found.high)


def against_plain(series: Series, arm: Arm, row: dict[str, Any]) -> dict[str, float]:
    """What a speculative arm's row gets besides, in a level that is valid: `ratio`, its interval, `break_even`.

    And the longest cycle, ms, that would break even at today's acceptance, and of it the verify where drafting is told.
    """
    plain = step_ms([block for name in (PLAIN, AGAIN) for block in series.get(name, [])])
    assert plain is not None  # else the level is invalid
    needed = needed_cycle(row["accept_length"], plain)
    told = {"break_even": round(break_even(row["cycle_ms"], plain), 3), "needed_cycle_ms": round(needed, 3)}
    if row["draft_share"] is not None:
        told["needed_verify_ms"] = round(needed - row["draft_share"] * row["cycle_ms"], 3)
    return {**ratio(series, arm), **told}


def drift(series: Series) -> float | None:
    """By how much the plain arm was faster in its second run; None if it had one."""
    return round(rate(series[AGAIN]) / rate(series[PLAIN]) - 1, 4) if AGAIN in series else None


def invalid(series: Series, asked: int) -> list[str]:
    """Reasons for which figures of this level may not be believed; none is good.

    Args:
        series: blocks by arm.
        asked: tokens asked for in each answer.
    """
    usual = arm_figures(series[PLAIN])["mean_tokens"] if PLAIN in series else None
    return [f"{arm.label}: {reason}" for arm, blocks in series.items() for reason in _faults(arm, blocks, asked, usual)]


def _faults(arm: Arm, blocks: Sequence[Block], asked: int, usual: float | None) -> list[str]:
    """What is wrong with one arm; `usual`: tokens of the mean answer of the plain one."""
    row, reasons = arm_figures(blocks), []
    if row["cached_share"] > MOST_CACHED:
        reasons.append(f"{row['cached_share']:.0%} of the prompt tokens were cached")
    if row["mean_tokens"] < min(LEAST_TOKENS, LEAST_LENGTH * asked):
        reasons.append(f"{row['mean_tokens']:.0f} tokens an answer where {asked} were asked for")
    elif usual and abs(row["mean_tokens"] / usual - 1) > MOST_APART:
        reasons.append(f"{row['mean_tokens']:.0f} tokens an answer where the plain arm gives {usual:.0f}")
    if row["errors"]:
        first = next(error for block in blocks for error in block.errors)
        reasons.append(f"{row['errors']} errors ({first})")
    if len({block.server for block in blocks}) > 1:
        reasons.append("the server changed or was restarted")
    if not all(any(answer.ids for answer in block.answers) for block in blocks):
        reasons.append("no answer to a whole block of prompts has a token")
    if not any(answer.decoded for answer in _pooled(blocks)):
        reasons.append("no answer has a second token: nothing was decoded")
    elif row["step_ms"] is None:
        reasons.append(
            "the tokens of an answer came at once, so that the time of a token cannot be measured: "
            "a gateway that holds events back, or stream-interval of the server"
        )
    if arm.steps and not acceptance(blocks, arm).verify_steps:
        reasons.append("no whole verify step was counted")
    return reasons
