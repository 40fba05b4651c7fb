"""The model of a cycle and the verdict, on the known case and as properties (case C22)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.acceptance import length_of_shares
from redraft.bench.cycle import (
    CycleTime,
    best_steps,
    break_even,
    needed_cycle,
    predict,
    tokens_per_second,
)
from redraft.bench.verdict import Verdict, judge, overall, predictions, refusal
from redraft.engines import arm
from redraft.engines.arm import chain

STEP, CYCLE = 1000 / 82, 30 / 0.97
"""82 tokens/s plain; the verify takes 30 ms, 97 % of a cycle."""
positive = st.floats(0.1, 1000)
shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=6).map(lambda each: sorted(each, reverse=True))


def test_the_known_case() -> None:
    assert break_even(CYCLE, STEP) == pytest.approx(2.54, abs=0.005)
    assert tokens_per_second(2.0, CYCLE) == pytest.approx(64.7, abs=0.05)
    assert tokens_per_second(1.5, CYCLE) == pytest.approx(48.5, abs=0.05)


@given(positive, positive, st.floats(1, 9))
def test_it_pays_exactly_above_break_even(cycle: float, step: float, length: float) -> None:
    faster = tokens_per_second(length, cycle) > 1000 / step
    assert faster == (length > break_even(cycle, step)) or length == pytest.approx(break_even(cycle, step))
    assert tokens_per_second(length, needed_cycle(length, step)) == pytest.approx(1000 / step)


@given(shares, st.integers(1, 9))
def test_accept_length_grows_with_drafts_and_stays_in_its_range(accepted: list[float], steps: int) -> None:
    length = length_of_shares(accepted, steps)
    assert 1 <= length <= steps + 1
    assert length == pytest.approx(1 + sum(accepted[:steps])) or steps > len(accepted)
    assert length_of_shares(accepted, steps + 1) >= length


@given(positive, st.floats(0, 100), shares, positive)
def test_a_prediction_is_what_the_parts_say(fixed: float, slope: float, accepted: list[float], step: float) -> None:
    time = CycleTime.fit({steps: fixed + slope * steps for steps in (1, 2, 4)})
    assert (time.fixed, time.per_step) == (pytest.approx(fixed, rel=1e-6, abs=1e-6), pytest.approx(slope, abs=1e-6))
    found = predict(accepted, time, step, 3)
    assert found.ratio == pytest.approx(found.tokens_per_second / (1000 / step))
    best = best_steps(accepted, time, step, 4)
    assert best.tokens_per_second >= found.tokens_per_second


def row(ratio: float, length: float, need: float, spread: float = 0.05) -> dict[str, Any]:
    cycle = need * 10.0
    return {
        "ratio": ratio, "ratio_low": ratio - spread, "ratio_high": ratio + spread, "accept_length": length,
        "break_even": need, "cycle_ms": cycle, "accepted_at": [0.5, 0.3, 0.2][: int(length + 1)],
        "step_ms": cycle / length, "tokens_per_second": 100 * ratio,
    }  # fmt: skip


PLAIN = {"step_ms": 10.0, "tokens_per_second": 100.0, "first_token_ms": 5.0}


@pytest.mark.parametrize(
    ("given_row", "word", "action"),
    [
        (row(1.4, 2.0, 1.4), "ship", "serve it with 3 drafted tokens"),
        (row(1.02, 2.0, 1.96), "unclear: interval spans 1", "more prompts"),
        (row(0.79, 2.0, 2.54), "no: needs accept length ≥ 2.54", "faster verify"),
        (row(0.9, 2.0, 2.2), "no: needs accept length ≥ 2.20", "within reach"),
        (row(0.4, 2.0, 5.0), "no: slower", "faster verify"),
    ],
)
def test_a_verdict_has_its_word_and_what_to_do_next(given_row: dict[str, Any], word: str, action: str) -> None:
    found = judge({arm.PLAIN: PLAIN, chain(3): given_row}, [])
    assert found.word == word
    assert action in found.action
    assert f"{given_row['ratio']:.2f} times" in found.reason


def test_fewer_drafts_are_advised_where_they_pay() -> None:
    """Drafts 2 and 3 are hardly ever right, and each costs as much as the first."""
    rows = {
        arm.PLAIN: PLAIN,
        chain(2): row(0.75, 1.63, 2.2) | {"accepted_at": [0.6, 0.03], "cycle_ms": 19.0},
        chain(3): row(0.7, 1.64, 2.4) | {"accepted_at": [0.6, 0.03, 0.01], "cycle_ms": 24.0},
    }
    assert "try spec_steps: 1" in judge(rows, []).action


def test_an_invalid_level_has_no_ratio_to_speak_of() -> None:
    found = judge({arm.PLAIN: PLAIN, chain(3): row(8.0, 2.0, 1.4)}, ["plain: 40% of the prompt tokens were cached"])
    assert found.word == "invalid"
    assert "cached" in found.reason


def test_levels_are_told_apart_and_none_is_the_headline() -> None:
    """Case C22: 1.6, 1.1 and 0.8 at concurrency 1, 4 and 16."""
    ratios = {1: 1.6, 4: 1.1, 16: 0.8}
    verdicts = {
        level: judge({arm.PLAIN: PLAIN, chain(3): row(ratio, 2.0, 2.0 / ratio)}, []) for level, ratio in ratios.items()
    }
    assert overall(verdicts) == "ship at concurrency 1, 4; no: needs accept length ≥ 2.50 at concurrency 16"
    levels: dict[str, Any] = {
        str(level): {"word": verdict.word, "reason": verdict.reason, "best": "3", "rows": {"3": row(ratio, 2.0, 1.0)}}
        for (level, ratio), verdict in zip(ratios.items(), verdicts.values(), strict=True)
    }
    assert refusal(levels, {1: 1.5, 4: 1.05}) is None
    assert "concurrency 16: 0.8, at least 1 wanted" in str(refusal(levels, {1: 1.0, 16: 1.0}))
    assert "concurrency 8: no valid ratio" in str(refusal(levels, {8: 1.0}))
    assert overall({1: Verdict("ship", "why", "next")}) == "ship: why"


def test_every_number_of_drafts_is_predicted_from_the_others() -> None:
    rows: dict[Any, Any] = {arm.PLAIN: PLAIN}
    accepted = [0.5, 0.25, 0.125]
    for steps in (1, 2, 3):
        length, cycle = 1 + sum(accepted[:steps]), 12.0 + 2 * steps
        rows[chain(steps)] = row(1, length, 1) | {
            "accepted_at": accepted[:steps], "cycle_ms": cycle, "step_ms": cycle / length,
        }  # fmt: skip
    found = predictions(rows)
    assert set(found) == {"1", "2", "3"}
    assert all(abs(each["difference"]) < 1e-3 for each in found.values())
    rows[chain(2)]["step_ms"] *= 1.2  # what was measured, not what was predicted
    assert predictions(rows)["2"]["difference"] == pytest.approx(0.2, abs=1e-3)
