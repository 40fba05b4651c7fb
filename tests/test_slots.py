"""How many slots? The head is measured as it is served, and other sizes are predicted from what was measured."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redraft.bench import slots as module
from redraft.bench.slots import (
    Predicted,
    Reads,
    Setting,
    cycle_with,
    head_cost,
    knee,
    measure_head,
    predict_slots,
    setting_of,
)

READS = Reads(1 << 20, 1 << 16, 2)
times = st.floats(0.001, 10)
sizes = st.integers(1, 1 << 17)


@given(st.floats(0, 1), st.floats(0, 1e-3), sizes, sizes, st.integers(1, 8))
def test_a_line_gives_the_cost_of_any_head(start: float, slope: float, one: int, other: int, steps: int) -> None:
    head_ms = {str(size): start + slope * size for size in (1024, 3072, 8192)}
    assert head_cost(head_ms, one) == pytest.approx(start + slope * one, rel=1e-6, abs=1e-6)
    found = cycle_with(50.0, steps, head_ms, one, other)
    assert found == pytest.approx(50 + steps * slope * (other - one), rel=1e-6, abs=1e-6)
    assert cycle_with(found, steps, head_ms, other, one) == pytest.approx(50)


@given(st.dictionaries(sizes.map(str), times, min_size=1), sizes, sizes)
def test_no_head_costs_less_than_nothing_or_than_a_smaller_one(head_ms: dict[str, float], one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert 0 <= head_cost(head_ms, small) <= head_cost(head_ms, large) + 1e-9


def test_a_head_is_measured_at_every_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    found = measure_head(64, [16, 1024, 65536], Setting("cpu", "bfloat16", threads=1), READS, seconds=0.05)
    assert torch.get_num_threads() == before
    assert list(found) == ["16", "1024", "65536"]
    assert 0 < found["1024"] < found["65536"]
    whole = measure_head(64, [65536], Setting("cpu", "float32"), READS, seconds=0.05)["65536"]
    assert measure_head(64, [65536], Setting("cpu", "float32", parts=8), READS, seconds=0.05)["65536"] < whole
    monkeypatch.setattr(module, "MOST_BYTES", 64 * 2 * 2000)
    assert list(measure_head(64, [16, 1024, 65536], Setting("cpu", "bfloat16"), READS, seconds=0.01)) == [
        "16",
        "1024",
    ]
    assert measure_head(64, [65536], Setting("cpu", "bfloat16"), READS, seconds=0.01) == {}


@pytest.mark.parametrize(("target", "rows"), [(64 * 2 * 3000, 3000), (1 << 40, 6000), (0, 1)])
def test_whole_cycles_are_played(target: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the target has is read, or 1.5 times what the cache holds; and the layer before each head."""
    read: list[int] = []
    real = torch.nn.functional.linear

    def linear(state: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        read.append(len(weights))
        return real(state, weights)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(module, "_cache", lambda device: 64 * 2 * 4000)
    measure_head(64, [16, 1000], Setting("cpu", "bfloat16"), Reads(target, 64 * 2 * 500, 3), seconds=0.01)
    layer = min(500, rows)
    turn = [rows, *[layer, 16] * 3] * 2 + [rows, *[layer, 1000] * 3] * 2
    assert read == turn * (len(read) // len(turn))


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"engine": "torch", "device": "cpu", "threads": 2, "dtype": "bfloat16"}, Setting("cpu", "bfloat16", 2)),
        ({"engine": "sglang", "device": "cpu", "dtype": "float32", "tp_size": 2}, Setting("cpu", "float32", 3, 2)),
        ({"engine": "sglang", "device": "cpu", "dtype": "auto"}, Setting("cpu", "bfloat16", 3)),
        ({"engine": "sglang", "device": "cpu", "dtype": "float32", "joined": "http://there:1"}, None),
    ],
)
def test_the_head_is_measured_where_the_engine_ran(described: dict[str, Any], expected: Setting | None) -> None:
    assert setting_of(described, 3) == expected


@pytest.mark.parametrize("device", ["cuda", "NVIDIA H200", "xpu", None])
def test_a_device_that_is_not_at_hand_is_not_stood_in_for(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert setting_of({"engine": "sglang", "device": device, "dtype": "bfloat16"}, 3) is None


ROW = {"steps": 3, "accepted_at": [0.5, 0.3, 0.2], "cycle_ms": 40.0}
HEADS = {"1024": 0.1, "2048": 0.2, "4096": 0.4}


@given(st.floats(0.05, 1), st.floats(0.05, 1))
def test_a_prediction_starts_from_what_was_measured(own: float, other: float) -> None:
    one, two = predict_slots(ROW, HEADS, 1024, {1024: own, 4096: other})
    assert one.accept_length == pytest.approx(2.0)
    assert (one.cycle_ms, one.tokens_per_second) == (40.0, pytest.approx(50.0))
    assert two.cycle_ms == pytest.approx(40.9)
    by = other / own  # of the first draft; each later one needs those before it as well
    assert two.accept_length <= 4
    if by <= 1:
        assert two.accept_length == pytest.approx(1 + 0.5 * by + 0.3 * by**2 + 0.2 * by**3)
    else:
        assert two.accept_length >= 2.0


def test_drafts_that_were_never_right_stay_so() -> None:
    row = {"steps": 2, "accepted_at": [0.0, 0.0], "cycle_ms": 10.0}
    assert [each.accept_length for each in predict_slots(row, HEADS, 1024, {1024: 0.5, 2048: 1.0})] == [1.0, 1.0]


def test_the_knee_is_the_smallest_that_is_as_good() -> None:
    rates = {1024: 40.0, 2048: 49.8, 4096: 50.0, 8192: 49.9}
    predicted = [Predicted(size, 0.1, 40.0, 2.0, rate) for size, rate in rates.items()]
    assert knee(predicted).slots == 2048
    assert knee(predicted[:1]).slots == 1024
