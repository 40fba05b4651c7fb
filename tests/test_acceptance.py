"""Accept length and its kin (case C23)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.acceptance import Acceptance
from redraft.frame.errors import RedraftError


def test_the_bonus_token_counts() -> None:
    counted = Acceptance(3)
    counted.add([0, 2, 1, 3])
    found = counted.metrics()
    assert found["accept_length"] == 2.5
    assert found["accept_rate"] == 0.5
    assert [found[f"accepted_at_{k}"] for k in (1, 2, 3)] == [0.75, 0.5, 0.25]


@given(st.lists(st.integers(0, 4), min_size=1))
def test_pooled_over_steps_and_between_its_bounds(accepted: list[int]) -> None:
    counted = Acceptance(4)
    counted.add(accepted)
    found = counted.metrics()
    assert found["accept_length"] == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-4)
    assert 1 <= found["accept_length"] <= 5
    assert sum(found[f"accepted_at_{k}"] for k in range(1, 5)) == pytest.approx(found["accept_length"] - 1, abs=1e-3)


def test_no_counters_is_an_error_and_not_accept_length_1() -> None:
    with pytest.raises(RedraftError, match="No verify step"):
        Acceptance(3).metrics()
