"""Accept length and its kin (case C23)."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.acceptance import Acceptance, Steps, length_of_shares
from redraft.frame.errors import RedraftError

SRC = Path(__file__).parent.parent / "src/redraft"
orders = st.lists(st.integers(0, 4), min_size=1)


def test_the_bonus_token_counts() -> None:
    counted = Acceptance(3)
    counted.add(Steps.in_turn([0, 2, 1, 3], 3))
    found = counted.metrics()
    assert found["accept_length"] == 2.5
    assert found["accept_rate"] == 0.5
    assert [found[f"accepted_at_{k}"] for k in (1, 2, 3)] == [0.75, 0.5, 0.25]


@given(st.lists(orders, min_size=1))
def test_pooled_over_steps_and_between_its_bounds(answers: list[list[int]]) -> None:
    counted = Acceptance(4)
    for order in answers:
        counted.add(Steps.in_turn(order, 4))
    found, every = counted.metrics(), [number for order in answers for number in order]
    assert found["accept_length"] == pytest.approx(1 + sum(every) / len(every), abs=1e-4)
    assert 1 <= found["accept_length"] <= 5
    assert sum(counted.shares) == pytest.approx(counted.length - 1)
    assert length_of_shares(counted.shares, 4) == pytest.approx(counted.length)


@given(orders, st.none() | st.integers(0, 4), orders)
def test_a_step_that_was_cut_counts_only_where_the_engine_does_not_tell(
    order: list[int], cut: int | None, other: list[int]
) -> None:
    """The engine `torch` tells every step in turn; a server their histogram, or, of an old release, the sums alone."""
    told = Steps.in_turn(order, 4, cut)
    assert (told.verify, told.right) == (len(order) + (cut is not None), sum(order) + (cut or 0))
    assert told.whole() == [order.count(number) for number in range(5)]
    spread, sums = Steps(told.verify, told.right, told.histogram), Steps(told.verify, told.right)
    lengths = []
    for steps in (told, spread, sums):
        counted = Acceptance(4)
        counted.add(steps)
        counted.add(Steps.in_turn(other, 4))
        lengths.append((counted.verify_steps, counted.length))
    assert lengths[0] == (len(order + other), pytest.approx(1 + sum(order + other) / len(order + other)))
    assert lengths[1] == lengths[2]
    assert lengths[1][0] == lengths[0][0] + (cut is not None)


def test_sums_alone_have_no_share_by_position() -> None:
    counted = Acceptance(3)
    counted.add(Steps(4, 5))
    assert counted.metrics() == {"verify_steps": 4, "accept_length": 2.25, "accept_rate": 0.4167}


def test_no_counters_is_an_error_and_not_accept_length_1() -> None:
    counted = Acceptance(3)
    counted.add(Steps())  # an answer of one token
    assert counted.shares == []
    for measure in (counted.metrics, lambda: counted.length):
        with pytest.raises(RedraftError, match="No verify step"):
            measure()


OTHERS = {"math.cos(math.pi * (step - rise) / max(1, total - rise))", "served.sum() / walked['verify_steps']"}
"""What else is added to 1: a learning rate's schedule, the width of an interval."""


def test_accept_length_is_computed_in_one_place() -> None:
    """Nowhere else is 1 added to accepted drafts over verify steps, or to a sum of shares by position."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and ast.unparse(node.left) in ("1", "1.0"):
                added = ast.unparse(node.right)
                if any(word in added for word in ("/", "sum(", "mean", "accept")):
                    assert path.name == "acceptance.py" or added in OTHERS, f"{path}: 1 + {added}"
