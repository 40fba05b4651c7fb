"""Bench: closed-loop load at concurrency 1, baseline and speculation interleaved on the same prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from redraft.progress import progress
from redraft.serve.acceptance import Acceptance
from redraft.serve.engine import Engine, Generation, serving

WARM_UP_TOKENS = 8
MIN_RATIO = 1.05
"""Below this a gain is within what one run can tell."""


def interleave(
    engines: Mapping[int, Engine], prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[int, list[Generation]]:
    """Answer every prompt with every engine, the order of engines rotated from prompt to prompt.

    Each engine first answers a few tokens unscored, so that the costs of a first use count for none.
    """
    order = list(engines)
    answers: dict[int, list[Generation]] = {steps: [] for steps in order}
    for steps in order:
        for prompt in prompts[:2]:
            engines[steps].generate(prompt, WARM_UP_TOKENS)
    for number, prompt in enumerate(progress(prompts, "bench", "prompt")):
        turn = number % len(order)
        for steps in order[turn:] + order[:turn]:
            answers[steps].append(engines[steps].generate(prompt, max_new_tokens))
    return answers


def in_turn(
    engines: Mapping[int, Engine], prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[int, list[Generation]]:
    """Answer every prompt with every engine, one engine after the other, each warmed up as `interleave` does."""
    answers = {}
    for steps, engine in engines.items():
        with serving(engine):
            for prompt in prompts[:2]:
                engine.generate(prompt, WARM_UP_TOKENS)
            bar = progress(prompts, f"bench, {steps or 'not'} drafted", "prompt")
            answers[steps] = [engine.generate(prompt, max_new_tokens) for prompt in bar]
    return answers


def figures(answers: Sequence[Generation]) -> dict[str, float]:
    """Pooled figures of one engine: output tokens/s, first token and time per later token, ms, and mean tokens."""
    tokens = sum(len(answer.ids) for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    first = sum(answer.first_token_seconds for answer in answers)
    return {
        "tokens_per_second": round(tokens / seconds, 3),
        "first_token_ms": round(1000 * first / len(answers), 2),
        "token_ms": round(1000 * (seconds - first) / max(1, tokens - len(answers)), 3),
        "mean_tokens": round(tokens / len(answers), 2),
    }


def summarize(answers: Mapping[int, Sequence[Generation]]) -> dict[str, Any]:
    """The bench's metrics: `baseline`, one row per number of draft steps, the best of them and a verdict.

    A row adds `ratio` (tokens/s over the baseline's), `accept_length`, `cycle_ms` (decode time per verify step) and
    `break_even` (the accept length at which a cycle costs what plain decoding of as many tokens does).
    """
    baseline = figures(answers[0])
    rows = {}
    for steps, given in answers.items():
        if not steps:
            continue
        row = figures(given)
        served = Acceptance(steps)
        for answer in given:
            served.add(answer.accepted)
        decode = sum(answer.seconds - answer.first_token_seconds for answer in given)
        cycle = 1000 * decode / sum(answer.verify_steps for answer in given)
        rows[str(steps)] = row | {
            "ratio": round(row["tokens_per_second"] / baseline["tokens_per_second"], 4),
            "accept_length": served.metrics()["accept_length"],
            "cycle_ms": round(cycle, 3),
            "break_even": round(cycle / baseline["token_ms"], 3),
        }
    best = max(rows, key=lambda steps: rows[steps]["ratio"])
    metrics = {"concurrency": 1, "baseline": baseline, "spec_steps": rows, "best_spec_steps": int(best)}
    return metrics | {"ratio": rows[best]["ratio"], "verdict": verdict(rows[best])}


def verdict(row: Mapping[str, float]) -> str:
    """One sentence on the best row: `ship`, `unclear` or `no`, with the reason."""
    ratio, length, need = row["ratio"], row["accept_length"], row["break_even"]
    why = f"{ratio:.2f} times the baseline's tokens/s at accept length {length:.2f}; break-even is {need:.2f}"
    if ratio >= MIN_RATIO:
        return f"ship: {why}"
    return f"unclear: {why}" if ratio > 1 else f"no: slower, {why}"
