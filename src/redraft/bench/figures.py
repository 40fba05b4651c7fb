"""Figures of a bench: what one arm did at one concurrency, how it compares, and whether that may be believed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.acceptance import Acceptance
from redraft.bench.cycle import break_even, needed_cycle
from redraft.bench.load import AGAIN, Block, Series
from redraft.engines.arm import PLAIN
from redraft.engines.engine import Generation

RESAMPLES = 2000
MOST_CACHED = 0.01
"""Share of prompt tokens whose states the engine had from before."""
LEAST_LENGTH = 0.5
"""Of the tokens asked for, the mean answer."""


def _pooled(blocks: Sequence[Block]) -> list[Generation]:
    return [answer for block in blocks for answer in block.answers]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile, ms."""
    return {
        name: round(1000 * float(np.median(values)), 3),
        f"{name}_p95": round(1000 * float(np.quantile(values, 0.95)), 3),
    }


def rate(blocks: Sequence[Block]) -> float:
    """Output tokens a second, over all clients."""
    return sum(len(answer.ids) for answer in _pooled(blocks)) / sum(block.seconds for block in blocks)


def step_ms(blocks: Sequence[Block]) -> float:
    """Decode time of one token of one stream, ms: from the first token to the last."""
    answers = _pooled(blocks)
    decode = sum(answer.seconds - answer.first_token_seconds for answer in answers)
    return 1000 * decode / max(1, sum(len(answer.ids) - 1 for answer in answers))


def arm_figures(blocks: Sequence[Block], spec_steps: int) -> dict[str, Any]:
    """One arm at one concurrency.

    `tokens_per_second`; `first_token_ms` and `token_ms` (per later token), median and p95 over answers; `step_ms`,
    pooled; `mean_tokens`, `finish`, `cached_share`, `errors`. With speculation also `accept_length`, `accepted_at`
    (share of verify steps by position), `cycle_ms` (decode time per verify step), `cycle_fit_ms` (the slope of decode
    time over verify steps of the answers: a cycle without what every answer costs once), `draft_share` if it is told.
    """
    answers = _pooled(blocks)
    decode = [answer.seconds - answer.first_token_seconds for answer in answers]
    prompts = sum(answer.prompt_tokens for answer in answers)
    row: dict[str, Any] = {
        "tokens_per_second": round(rate(blocks), 3),
        **_spread("first_token_ms", [answer.first_token_seconds for answer in answers]),
        **_spread("token_ms", [each / max(1, len(a.ids) - 1) for each, a in zip(decode, answers, strict=True)]),
        "step_ms": round(step_ms(blocks), 3),
        "mean_tokens": round(float(np.mean([len(answer.ids) for answer in answers])), 2),
        "finish": {kind: sum(answer.finish == kind for answer in answers) for kind in ("stop", "length")},
        "cached_share": round(sum(answer.cached_tokens for answer in answers) / max(1, prompts), 4),
        "errors": sum(len(block.errors) for block in blocks),
    }
    if not spec_steps:
        return row
    served = Acceptance(spec_steps)
    for answer in answers:
        if len(answer.every_step()) == answer.verify_steps:
            served.add(answer.accepted)
        else:
            served.add_untold(answer.verify_steps, answer.right)
    told = served.metrics()
    steps = [answer.verify_steps for answer in answers]
    drafting = sum(answer.draft_seconds for answer in answers)
    return row | {
        "accept_length": told["accept_length"],
        "accepted_at": [told[f"accepted_at_{k}"] for k in range(1, spec_steps + 1) if f"accepted_at_{k}" in told],
        "cycle_ms": round(1000 * sum(decode) / max(1, sum(steps)), 3),
        "cycle_fit_ms": round(1000 * float(np.polyfit(steps, decode, 1)[0]), 3) if len(set(steps)) > 2 else None,
        "draft_share": round(drafting / sum(decode), 4) if drafting else None,
    }


def ratio(series: Series, arm: str) -> dict[str, float]:
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
    """2.5 and 97.5 percentiles of the ratio of rates under resampled blocks; the same seed, so the same figures."""
    table = np.array(
        [[sum(len(a.ids) for a in block.answers), block.seconds] for run in (one, other) for block in run], dtype=float
    ).reshape(2, len(one), 2)
    picks = np.random.default_rng(0).integers(len(one), size=(RESAMPLES, len(one)))
    sums = table[:, picks].sum(2)  # [arm, resample, (tokens, seconds)]
    ratios = (sums[0, :, 0] / sums[0, :, 1]) / (sums[1, :, 0] / sums[1, :, 1])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def against_plain(series: Series, arm: str, row: dict[str, Any]) -> dict[str, float]:
    """What a speculative arm's row gets besides: `ratio`, its interval, `break_even`.

    And the longest cycle, ms, that would break even at today's acceptance, and of it the verify where drafting is told.
    """
    plain = step_ms([block for name in (PLAIN, AGAIN) for block in series.get(name, [])])
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
    reasons = []
    for name, blocks in series.items():
        row = arm_figures(blocks, 0)
        if row["cached_share"] > MOST_CACHED:
            reasons.append(f"{name}: {row['cached_share']:.0%} of the prompt tokens were cached")
        if row["mean_tokens"] < LEAST_LENGTH * asked:
            reasons.append(f"{name}: {row['mean_tokens']:.0f} tokens an answer where {asked} were asked for")
        if row["errors"]:
            first = next(error for block in blocks for error in block.errors)
            reasons.append(f"{name}: {row['errors']} errors ({first})")
        if len({block.server for block in blocks}) > 1:
            reasons.append(f"{name}: the server changed or was restarted")
    return reasons
